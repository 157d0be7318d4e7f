"""Forks: one parallel region each, over side slots that it leases.

Two events a branch carry the order (guarantee 6): one recorded on the caller's stream when the branch is run, which the side
stream waits for, and one recorded on the side stream at the join, which the caller's stream waits for. Between two branches
stands what their data asks for (guarantee 17), and nothing else (guarantee 7).
"""

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from sys import modules
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from handlepool._util.arguments import check_ran
from handlepool._util.names import name_of
from handlepool.drivers.protocol import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, CaptureError, OwnershipError, PoolClosedError
from handlepool.order.accesses import Memory, Operands
from handlepool.order.books import DataOrder, in_the_middle, open_order, opened
from handlepool.order.operation import OperationCall, operation_of
from handlepool.order.plain_calls import PlainCall, pieces_of, warn_of_guess
from handlepool.order.recent import Recent
from handlepool.order.stream_order import in_torch, torch_among
from handlepool.order.stream_order import order as order_streams
from handlepool.order.track import NOBODYS, Needs, Track
from handlepool.order.undeclared import run_watched
from handlepool.pool.context import NO_LAUNCHER, NOT_CACHED, ThreadToken, launchers, on_device, recordings, run_on, thread
from handlepool.pool.deferred import abandon, defer, deferred, settle
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot, bind_to_thread, unbind
from handlepool.pool.stream import check_foreign, resolve
from handlepool.regions.memory import Region, branch_regions, held_by, inherited

T = TypeVar("T")

_ENDLESS = (itertools.repeat, itertools.count, itertools.cycle)

_NOT_ENTERED, _LEFT = None, False
"""What stands for the thread of a fork that is not open; neither is true."""


waited_for: dict[type, Callable[[Any], object]] = {}
"""By the type of what has arrays of its own, what leads to them: `Fork.wait` waits for these."""


class Fork:
    """One parallel region: its branches start after the caller's stream, and end before that goes on.

    Made by `ParallelStates.fork` and used in a ``with`` statement, once, by the thread that entered it.
    """

    __slots__ = (
        "_callers",
        "_checked",
        "_count",
        "_counted",
        "_driver",
        "_home",
        "_inherited",
        "_keep",
        "_kept",
        "_leased",
        "_mark",
        "_next",
        "_once",
        "_order",
        "_ordered",
        "_ordinal",
        "_pointer",
        "_pool",
        "_region",
        "_sides",
        "_started",
        "_status",
        "_stream",
        "_thread",
        "_tracks",
        "_within",
    )

    def __init__(
        self,
        pool: PoolInternals,
        count: int,
        stream: Any = None,
        *,
        ordered: bool = True,
        once: bool = False,
    ) -> None:
        self._ordered = ordered
        self._once = once  # whether it is for one map, which nothing comes after
        self._order: DataOrder | None = None  # opened with the first branch
        self._home = NOBODYS  # the caller's track
        self._counted = False  # whether the books are kept open for it: a fork in a branch is over with that
        self._mark = object()  # stands for this fork where that must not be kept
        self._tracks: list[Track] = []  # of the leased states
        # The token of the thread that entered it, `_NOT_ENTERED` or `_LEFT`.
        self._thread: ThreadToken | bool | None = _NOT_ENTERED
        self._pool = pool
        self._status = pool.status
        self._checked = pool.checked
        self._count = count
        self._stream = stream
        self._leased: list[Slot] = []
        self._kept: list[object] = []  # to the join; the region's, too, once there is one
        self._callers: tuple[int, ...] = ()  # further streams that branches start after, and that wait at the join
        self._next = 0
        self._started = False  # whether branches have been started ahead, all states together

    def __enter__(self) -> "Fork":
        if self._thread is not _NOT_ENTERED:
            raise OwnershipError("this fork was entered already; make a new one with states.fork()")
        pool = self._pool
        if self._status.unusable:
            self._status.check()
        if deferred:
            settle()
        driver = self._driver = pool.driver
        ordinal: int = pool.current_device()
        stream = self._stream
        if stream is not None or not driver.owns_stream(stream := driver.current_stream(ordinal)):
            reference = resolve(driver, self._stream)
            check_foreign(driver, reference)
            stream = reference.stream or driver.wrap_stream(reference.pointer, reference.owner)
        self._stream = stream
        self._pointer: int = stream.ptr
        self._ordinal = ordinal
        self._sides = (pool.devices.get(ordinal) or pool.device(ordinal)).sides
        # One that is not inherited is made when a branch runs Python.
        outer = self._region = None if thread.region is None else inherited(driver, ordinal, self._pointer)
        self._inherited = outer is not None
        if outer is not None:
            outer.enter(self._leased)
            self._kept = outer.kept
        self._keep = self._kept.append
        # Of whose Python this is the body: of a branch, where that is known, or of none.
        order = open_order(driver, ordinal) if opened else None
        self._within = None if order is None else order.running
        self._thread = thread.token
        return self

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run one branch: ``function(*args, **kwargs)`` with a side stream as the current stream.

        In the body of the fork plain CuPy or torch code reads what branches made behind `wait` alone. Graph functions, operations
        and programs wait on their own there.

        The branch starts after everything that the caller's stream has been given by now, after the branches whose outputs it
        reads, and after those that read or write what it overwrites. Memory decides, so views count. A plain function reads the
        arrays in its arguments, defaults and closure, and in the attributes of objects among these, ``self`` too; globals, deeper
        attributes and raw pointers are not seen. What it writes in place is said by
        `handlepool.operation`, or guessed from what it returns.

        A branch that follows the last one of a state runs there. The others take the states in turn, and two on one state run one
        after the other. Where every side slot of the device is out, the branch runs on the caller's stream, with the same result.
        A branch may use another stream of its own choice. It then orders that stream itself, before and after, and memory is that
        stream's, as outside of branches.

        Parameters
        ----------
        function : callable
            A graph function or `handlepool.conv2d`, of which no Python runs in the branch; or any other.
        *args, **kwargs
            For the function. They are kept alive to the join.

        Returns
        -------
        object
            What the function returned. Its arrays may be read on the caller's stream after the fork.

        Raises
        ------
        ArgumentError
            For a function that returns a generator or a coroutine, of which nothing has run.
        OwnershipError
            In another thread than the fork's; and inside a branch: open another fork there.
        PoolClosedError
            After the fork was left, or the pool closed.
        """
        pool = self._pool
        if self._thread is not thread.token or self._status.unusable or self._inherited:
            self._refuse()
        driver = self._driver
        ordinal = self._ordinal
        if pool.current_device() != ordinal:  # inside `with other_device:` in the fork's body
            with driver.device(ordinal):
                return self.run(function, *args, **kwargs)
        kind = type(function)
        if type(function) is partial:  # of a graph function, say
            return self.run(function.func, *function.args, *args, **{**function.keywords, **kwargs})
        hit, prepare = launchers.get(function if kind is FunctionType else kind, NO_LAUNCHER)
        if hit is not None and driver.current_stream(ordinal) is self._stream:
            begin: Callable[..., Slot] = self._begin if self._ordered else self._begin_unordered
            result: T = hit(function, pool, begin, args, kwargs)
            if result is not NOT_CACHED:
                return result
        order = self._order or (open_order(driver, ordinal) if opened and self._ordered else None)
        if order is not None and order.running is not self._within:
            raise OwnershipError(
                f"fork.run({name_of(function)}) was called inside a branch: it is for the body of the fork. Inside a branch open "
                f"another one, with states.fork() as inner"
            )
        if recordings and thread.recording is not None:
            thread.recording.check("a fork", self._pointer, driver, self._mark)
        if prepare is None:
            value = self._run_python(function, args, kwargs)
            check_ran(function, value)
            return value
        # A graph function: its outputs are known, so they are allocated before the edge that starts the branch, on the caller's
        # stream, and nothing is allocated inside the branch. Arguments that it refuses cost no side slot.
        if driver.current_stream(ordinal) is self._stream:
            call = prepare(function, pool, args, kwargs)
        else:  # inside `with other_stream:` in the fork's body
            call = self._on_caller(prepare, (function, pool, args, kwargs), {})
        if call.callers:
            self._follow(call.callers)
        slot = self._begin_any((args, kwargs, call.operands), Memory(*call.pieces()) if self._ordered else None)
        result = call.enqueue(slot)
        return result

    def _run_python(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run a branch of which no more is known than its arguments."""
        pool, ordinal = self._pool, self._ordinal
        torch = torch_among(function, args, kwargs) if "torch" in modules else None
        theirs = 0 if torch is None else self._follow((torch.current_stream(ordinal),))
        region = self._region or self._own_region()
        call: PlainCall | OperationCall | None = None
        if (declared := operation_of(function, args)) is not None:
            operation, args = declared
            function = operation.function
            call = OperationCall(self._driver, operation, args, kwargs)
        elif self._ordered or pool.checked:
            call = PlainCall(self._driver, function, args, kwargs)
        held = held_by(function, args, kwargs) if call is None else call.held
        slot = self._begin_any((function, args, kwargs, held), call if self._ordered else None)
        known = len(region.allocated)
        if isinstance(call, OperationCall):
            function, args, kwargs = call.run, (pool,), {}
        elif call is not None and (pool.checked or "torch" in modules):
            function, args, kwargs = run_watched, (pool, region, call, (function, args, kwargs)), {}
        if torch is not None:
            function, args, kwargs = in_torch(torch, slot.pointer, theirs, ordinal, function, args, kwargs)
        order = self._order
        if call is None or order is None:
            return self._call(slot, region, function, args, kwargs)
        track, former, elsewhere = order.tracks[slot.pointer], order.running, order.elsewhere
        order.running, order.elsewhere = track, []
        ended = None
        try:
            result = self._call(slot, region, function, args, kwargs)
            ended = region.allocated[known:] if self._leased or self._inherited else None, result
        finally:
            given, order.running, order.elsewhere = order.elsewhere, former, elsewhere
            if former is track:  # no state was left for a fork in a branch
                elsewhere += given
            if not order.closed:
                with order:
                    for reads, writes in ((call.reads, call.writes), *given):
                        order.note_again(track, reads, writes)
                    if ended is None:
                        call.failed(order, track, region.allocated[known:])
                    else:
                        order.kept.append(result)  # it is in the books, also where its memory is another library's
                        call.ended(order, track, *ended)
        return result

    def _call(
        self, slot: Slot, region: Region, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call what a branch runs, on its stream."""
        if not self._leased:
            return self._on_caller(function, args, kwargs)
        branch_regions[slot.pointer] = region
        return run_on(self._pool, slot.side_stream, self._ordinal, region, function, args, kwargs)

    def wait(self, *arrays: Any) -> Any:
        """Let the caller's stream wait for the branches that wrote arrays, and for those alone.

        Plain CuPy or torch code in the body of the fork reads arrays that branches made only behind this. To overwrite what
        branches may still read, call a `handlepool.operation` there: this does not wait for readers. Graph functions, operations,
        programs and `ParallelStateExecutor.submit` wait on their own.

        Parameters
        ----------
        *arrays : array
            Of any library, or what leads to arrays as an argument of `run` does; a program stands for its outputs. What no branch
            wrote costs nothing.

        Returns
        -------
        array or tuple
            What was given: the one argument, or all of them.

        Raises
        ------
        OwnershipError
            In another thread than the fork's, and inside a branch.
        PoolClosedError
            After the fork was left, or the pool closed.

        Examples
        --------
        >>> with states.fork() as fork:                                                                  # doctest: +SKIP
        ...     y = fork.run(conv, x, w)
        ...     largest = fork.wait(y).max()
        """
        self._refuse()
        driver = self._driver
        order = self._order or open_order(driver, self._ordinal)
        if order is not None and order.running is not self._within:
            raise OwnershipError("fork.wait was called inside a branch: it is for the body of the fork")
        if order is not None:
            home = order.tracks.get(self._pointer) or Track(self._pointer)
            found = [waited_for[type(each)](each) if type(each) in waited_for else each for each in arrays]
            pieces = pieces_of(driver, *found, calls=True)
            with order:
                order.follow(home, order.conflicts(pieces, ()))
            current = driver.current_stream(self._ordinal).ptr
            if current != self._pointer:
                self._pool.device(self._ordinal).edges.order(self._pointer, current)
            if (torch := torch_among(None, arrays, {})) is not None:
                order_streams(self._pool, self._ordinal, self._pointer, torch.current_stream(self._ordinal))
        return arrays[0] if len(arrays) == 1 else arrays

    def map(
        self, function: Callable[..., T], /, *iterables: Iterable[Any], out: Iterable[Any] | None = None, **kwargs: Any
    ) -> list[T]:
        """Run ``function`` over the iterables, each call a branch; the results in order.

        It does what as many calls of `run` do, with two differences for a graph function over lists, tuples and ranges. The
        branches start together, after what the caller's stream has been given by the time of the call. And small outputs that
        the function allocates may share a block of memory, as in `ParallelStates.map`.

        Parameters
        ----------
        function : callable
        *iterables : iterable
            Of its positional arguments, one entry of each for a call. They are equally long, but for `itertools.repeat`, `count`
            and `cycle`, which give as many entries as there are calls. A generator alone is read while branches are run; beside
            other iterables or ``out``, it is read to its end before the first call.
        out : iterable of array, optional
            What each call is to write to, its ``out``.
        **kwargs
            For the function, the same in every call, as ``padding=1``. `map` keeps the name ``out`` alone: bind one ``out`` for
            all calls with `functools.partial`.

        Returns
        -------
        list
            What each call returned. Arrays in it may be read on the caller's stream after the fork.

        Raises
        ------
        ArgumentError
            For iterables that are not equally long. No call was made.
        OwnershipError, PoolClosedError
            As in `run`.
        """
        if kwargs:
            function = partial(function, **kwargs)
        given = out is not None
        sources = (*iterables, out) if out is not None else iterables
        if len(sources) > 1:
            sources = _equally_long(sources, given)
        calls: Iterable[tuple[Any, ...]] = zip(*sources, strict=False)
        # No code of the caller's runs between branches over these.
        if all(isinstance(source, (list, tuple, range)) for source in sources):
            calls = list(calls)
            results = self._map_known(function, calls, sources, given) if len(calls) > 1 else None
            if results is not None:
                return results
        return [self._run(function, call, given) for call in calls]

    def _run(self, function: Callable[..., T], call: tuple[Any, ...], given: bool) -> T:
        return self.run(function, *call[:-1], out=call[-1]) if given else self.run(function, *call)

    def _map_known(
        self, function: Callable[..., T], calls: list[tuple[Any, ...]], sources: Sequence[Iterable[Any]], given: bool
    ) -> list[T] | None:
        """Run branches that each launch one known plan, and no Python; None where the first one does not.

        All outputs are allocated before the edge that starts the branches (guarantee 8), so one edge for each state will do.
        """
        pool = self._pool
        bare, fixed, keywords = (
            (function.func, function.args, function.keywords) if type(function) is partial else (function, (), {})
        )
        kind = type(bare)
        hit, _ = launchers.get(bare if kind is FunctionType else kind, NO_LAUNCHER)
        if hit is None or (keywords and any(hasattr(value, "shape") for value in keywords.values())):
            return None  # a shortcut does not add the arrays of a partial's keywords
        if self._thread is not thread.token or self._status.unusable or self._inherited:
            self._refuse()
        if pool.current_device() != self._ordinal or self._driver.current_stream(self._ordinal) is not self._stream:
            return None
        ordered = self._ordered
        attempt: Any = None  # what the first branch launches by
        fresh: list[Any] = []

        def start(operands: tuple[Any, ...], launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Slot:
            nonlocal attempt
            attempt = launch
            # Nothing comes after these, nothing that is open came before, and what they write is new.
            if self._once and open_order(self._driver, self._ordinal) is None:
                self._ordered = ordered and not (launch.operands.fresh or self._apart(launch.operands, fixed, sources))
            if not given:
                fresh.extend(launch.allocate(len(others)))
            elif first[-1] is None:  # or it launches for nobody without an output
                fresh.extend([None if call[-1] is not None else launch.allocate(1)[0] for call in others])
            else:
                fresh.extend([None] * len(others))
            self._start(self._next + len(calls))
            self._started = True
            begin = self._begin if self._ordered else self._begin_unordered
            return begin(operands, launch, addresses, blocks)

        first, *others = calls
        arrays, options = (first[:-1], {**keywords, "out": first[-1]}) if given else (first, keywords)
        try:
            results = [hit(bare, pool, start, fixed + arrays, options)]
            if results[0] is NOT_CACHED:
                return None
            begin = self._begin if self._ordered else self._begin_unordered
            for call, made in zip(others, fresh, strict=True):
                arrays, out = (call[:-1], call[-1]) if given else (call, None)
                result = attempt(begin, fixed + arrays, out, made)
                if result is NOT_CACHED:  # another geometry, say
                    together, self._started = self._started, False
                    if given and self._ordered is not ordered:  # nobody knows whether it is apart from the others
                        together, self._ordered = False, ordered
                        begin = self._begin
                        self._wait_for_all()
                    result = self._run(function, call, given)
                    self._started = together
                results.append(result)
            return results
        finally:
            self._started, self._ordered = False, ordered

    def _apart(self, operands: Operands, fixed: tuple[Any, ...], sources: Sequence[Iterable[Any]]) -> bool:
        """Whether no call of a map into outputs, the last of the sources, comes near what another one writes."""
        pointers = self._driver.array_pointers
        try:
            read = pointers(fixed)
            for source in sources[:-1]:
                read += pointers(source)
            return operands.are_apart(read, pointers(sources[-1]))
        except (AttributeError, TypeError):  # another library's arrays
            return False

    def _wait_for_all(self) -> None:
        """Let the caller's stream wait for all branches so far, and so those that are to come."""
        driver = self._driver
        for slot in self._leased:
            driver.record_event(slot.end_event, slot.pointer)
            driver.wait_event(self._pointer, slot.end_event)

    def _start(self, most: int) -> None:
        """Lease states, and let them start after what the caller's stream has been given by now: one event for all."""
        leased, free = self._leased, self._sides.free
        known = len(leased)
        try:
            try:
                for _ in range(known, most if most < self._count else self._count):
                    leased.append(free.pop())  # the join releases whatever is here
            except IndexError:
                while len(leased) < most and self._lease():
                    pass
            if leased:
                driver = self._driver
                event, wait = leased[0].start_event, driver.wait_event
                driver.record_event(event, self._pointer)
                for slot in leased:
                    wait(slot.pointer, event)
        except BaseException:
            self._release_from(known)
            raise

    def _release_from(self, known: int) -> None:
        """Release the states that were leased for branches which did not come to start, all but the first ``known``."""
        while len(self._leased) > known:
            slot = self._leased.pop()
            if slot.owner is not None:
                unbind(slot)
            if self._order is not None:
                self._order.forget(slot.pointer)
                del self._tracks[len(self._leased) :]
            self._sides.release(slot, captured=True)  # it may wait for a caller's stream that is being captured

    def _begin(
        self,
        kept: object,
        launch: Any = None,
        addresses: tuple[int, ...] = (),
        blocks: tuple[object, ...] = (),
        *,
        memory: Memory | None = None,
        owned: bool = False,
    ) -> Slot:
        """Start the next branch, and keep what it reads; its slot, the caller's where every side slot is out.

        A branch that follows the last one of a state by its data goes on there. The others take the states in turn; the first
        branch of a state leases it. Each starts after what the caller's stream has been given by now, those of a map after what
        it had been given by `_start`, and after the branches that it conflicts with. What it reads and writes is ``memory``, or
        what ``launch`` says of ``addresses``. Where Python runs in it (``owned``), or a pool checks, the slot is this thread's: a
        hit of `get_handle` finds it.
        """
        self._keep(kept)
        order = self._order
        if order is None or order.busy:
            order = self._open_order()
        known = -1
        track: Track | None = None
        recent: Recent | None = None
        try:
            order.busy = True
            if memory is None:
                recent, operands = order.recent, launch.operands
                needs = recent and recent.meet(addresses, operands, blocks)
                if needs is None:
                    recent = None
                    reads, writes, needs = order.meet(addresses, operands)
            else:
                reads, writes, needs = order.meet_any(memory)
            if needs:
                if order.guesses:
                    self._warn(order, needs)
                mark = self._mark
                for each, call in needs.items():
                    if each.count == call and each.fork is mark:
                        track = each
                        if track.marked != call:
                            order.mark(track)  # others may follow the same
                        break
            home = self._home
            if track is None:
                index = self._next
                try:
                    track = self._tracks[index]
                except IndexError:
                    known, former = len(self._leased), index
                    track = self._lease_track(order, index)
                index += 1
                self._next = index if index < self._count else 0
            slot: Slot | None = track.slot
            if slot is None or track is home:
                slot = self._pool.slot(self._stream)
            else:
                if (owned or self._checked) and slot.owner is None:
                    bind_to_thread(self._pool.sound(slot))
                if not self._started:
                    driver = self._driver
                    driver.record_event(slot.start_event, self._pointer)
                    driver.wait_event(slot.pointer, slot.start_event)
                if home.known is not track.seen:
                    track.learn(home.known)
                    track.seen = home.known
            if needs and (len(needs) > 1 or track not in needs):
                order.follow(track, needs)
            if recent is not None:
                recent.note(addresses, operands, blocks, track)
            elif memory is None:
                order.note_launch(track, reads, writes, addresses, operands)
            else:
                order.note(track, reads, writes)
        except BaseException:
            if known >= 0:
                self._release_from(known)
                self._next = former
            raise
        finally:
            order.busy = False
        return slot

    def _begin_any(self, operands: object, memory: Memory | None) -> Slot:
        """Start the next branch, where it is no launch of one known plan, on a slot that is this thread's."""
        if memory is None:
            return self._begin_unordered(operands, owned=True)
        return self._begin(operands, memory=memory, owned=True)

    def _begin_unordered(self, operands: object, *_: object, owned: bool = False) -> Slot:
        """Start the next branch on the next state, whatever it reads and writes."""
        self._keep(operands)
        pool, leased, index = self._pool, self._leased, self._next
        known = len(leased)
        if index >= known and (self._started or not self._lease()):
            if not known:
                return pool.slot(self._stream)
            index = 0
        self._next = index + 1 if index + 1 < self._count else 0
        slot = leased[index]
        try:
            if slot.owner is None and (owned or pool.checked):
                bind_to_thread(pool.sound(slot))
            if not self._started:
                driver = self._driver
                driver.record_event(slot.start_event, self._pointer)
                driver.wait_event(slot.pointer, slot.start_event)
        except BaseException:
            self._release_from(known)
            self._next = index
            raise
        return slot

    def _lease_track(self, order: DataOrder, index: int) -> Track:
        """Return the track of the state whose turn it is; the caller's where there is no state."""
        leased, tracks = self._leased, self._tracks
        if index >= len(leased) and (self._started or not self._lease()):
            if not leased:
                return self._home
            index = 0
        while len(tracks) <= index:
            slot = leased[len(tracks)]
            track = order.tracks[slot.pointer] = Track(slot.pointer, self._home, self._mark, slot)
            tracks.append(track)
        return tracks[index]

    def _open_order(self) -> DataOrder:
        """Return the books of the region: the thread's that are open, or else ones that this fork opens."""
        order = open_order(self._driver, self._ordinal)
        if order is None:
            # It is this fork's, and counted, before a finaliser that runs just then can find it, and after an interrupt, too.
            order = self._order = DataOrder(self._pool, self._ordinal, Track(self._pointer))
            self._counted = True
            order.open()
        elif order.busy:
            raise in_the_middle()
        else:
            self._counted = not self._inherited
            order.forks += self._counted
        self._tracks.clear()
        home = order.tracks.get(self._pointer)
        if home is None:  # of a stream that the body chose
            home = order.tracks[self._pointer] = Track(self._pointer)
        self._home, self._order = home, order
        return order

    def _warn(self, order: DataOrder, needs: Needs) -> None:
        """Warn where a branch waits for one that may have written what it was given."""
        for each in needs.items():
            if each in order.guesses:
                warn_of_guess(order.guesses[each])

    def _follow(self, pointers: Sequence[int]) -> int:
        """Let the next branches start after further callers' streams, too, as torch's current one, and those wait at the join.

        The order goes through the caller's stream, which waits for the others now and they for it at the join: one event each.
        Returns the last pointer.
        """
        for pointer in pointers:
            order_streams(self._pool, self._ordinal, pointer, self._pointer)
            if pointer != self._pointer and pointer not in self._callers:
                self._callers += (pointer,)
        return pointers[-1]

    def _on_caller(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        region = self._region if self._inherited else thread.region
        return run_on(self._pool, self._stream, self._ordinal, region, function, args, kwargs)

    def _lease(self) -> bool:
        """Lease a side slot more; False where there may be none, or is none, and fewer have to do."""
        leased = self._leased
        if len(leased) >= self._count:
            return False
        try:
            slot: Slot | None = self._sides.free.pop()
        except IndexError:
            slot = self._sides.lease()
        if slot is None:
            if thread.recording is not None:
                thread.recording.lack(self._mark, len(leased), self._count)
            self._count = max(1, len(leased))
            return False
        leased.append(slot)  # the join releases whatever is here
        return True

    def _own_region(self) -> Region:
        """Return the region that this fork is, or is in; made when it is first needed."""
        region = self._region
        if region is None:
            region = self._region = Region(self._driver, self._stream, self._ordinal, None, self._kept)
        return region

    def _refuse(self) -> None:
        """Say why this fork cannot be used, where that is so."""
        if not self._thread:
            raise PoolClosedError("this fork was left, or not entered; run branches inside `with states.fork() as fork:`")
        if self._thread is not thread.token:
            raise OwnershipError(
                f"a fork belongs to the thread that entered it ({self._thread}), and this is {thread.token}; make a fork in each "
                f"thread, or use ParallelStateExecutor"
            )
        self._status.check()
        self._check_in_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not thread.token:
            self._refuse()
        status = self._status
        try:
            self._thread = _LEFT
            if error is not None:
                status.lost(error, ask=False)
            if status.unusable and self._given_up():
                if error is None and status.poison is not None:
                    status.check()
                return
            if self._pool.current_device() == self._ordinal:
                self._join()
            else:  # where the null stream's pointer means another stream
                with self._driver.device(self._ordinal):
                    self._join()
        except BaseException:
            if self._order is not None:
                self._order.busy = self._order.closed  # after an interrupt
            if self._leased or self._order is not None:  # it did not come to the join, or not to its end
                if self._inherited:
                    region = self._own_region()
                    region.abandon()  # or the outer fork would let go of it
                    region.leave(self._leased)
                defer(self._settle)
            raise
        if self._inherited and error is None:
            self._check_in_time()

    def _given_up(self) -> bool:
        """Touch nothing in the child of a process that forked in here (guarantee 13), nor after a lost context."""
        if not self._status.untouchable:
            return False
        self._leased = []
        self._own_region().abandon()
        self._leave_order(joined=False)
        return True

    def _join(self) -> None:
        """Let the caller's stream wait for every branch, then release the side slots and let go of what was kept."""
        driver, leased, pointer = self._driver, self._leased, self._pointer
        captured = False
        failure: BaseException | None = None
        try:
            captured = pointer != LEGACY_STREAM and driver.is_capturing(pointer)
            if not captured:
                record, wait = driver.record_event, driver.wait_event
                for slot in leased:
                    event = slot.end_event
                    if slot.pointer in branch_regions and driver.is_capturing(slot.pointer):  # Python ran there
                        raise _left_capturing(slot.pointer)
                    record(event, slot.pointer)
                    wait(pointer, event)
                    if slot.owner is not None:
                        unbind(slot)
        except BaseException as trouble:
            failure = trouble
        if captured or failure is not None:
            failure = self._join_each(captured, failure)
        else:
            if self._region is not None:  # before they go to others
                for slot in leased:
                    if slot.pointer in branch_regions:
                        del branch_regions[slot.pointer]
            self._leave_order(joined=True)  # and before another fork of this thread, in a finaliser, has the same states
            self._leased = []  # an interrupt that came before this finds all of them here, and they are joined again later
            self._sides.free.extend(leased)
        try:
            late = self._finish(failure) if failure is not None or self._callers or self._status.unusable else None
        finally:
            self._leave_order(joined=failure is None)
            del failure  # or it, its traceback and this frame would keep each other, and all that the callers had
        region = self._region
        if region is None:
            self._kept.clear()
        elif self._inherited:
            region.leave(leased)
        else:
            region.release()
        try:
            if late is not None:
                raise late
        finally:
            del late

    def _leave_order(self, *, joined: bool) -> None:
        """Close the books, or note where another fork goes on with them that the caller's stream waits for the branches."""
        order = self._order
        if order is None:
            if opened and self._leased and not self._ordered:
                self._leave_order_of_others(joined)
            return
        order.busy = True  # it may be so already, after an interrupt
        order.forks -= self._counted
        self._counted = False
        if not joined:  # branches may still use it
            abandon(order.kept[:])
        if not order.forks:
            order.close()
        elif not order.closed:
            order.joined(self._tracks, self._home)
            self._home.stream = self._stream
            if not self._inherited:
                order.kept.append((self._region.kept if self._region is not None else self._kept)[:])
        order.busy = order.closed
        self._order, self._home = None, NOBODYS
        self._tracks = []

    def _leave_order_of_others(self, joined: bool) -> None:
        """Note in the books of an outer fork that states were joined in which ordered forks had their bodies."""
        order = open_order(self._driver, self._ordinal)
        inside = [] if order is None else [order.tracks[slot.pointer] for slot in self._leased if slot.pointer in order.tracks]
        if order is not None and inside and joined:
            order.joined(inside, order.tracks.setdefault(self._pointer, Track(self._pointer)))

    def _finish(self, failure: BaseException | None) -> BaseException | None:
        """End a join of which there is more to say; what went wrong too late to matter to it is returned."""
        late: BaseException | None = None
        if self._status.closed:  # in this order: `close` says so first and destroys the free ones then, so that one of us sees it
            try:
                self._sides.destroy_free()
            except BaseException as trouble:  # something could not be destroyed yet
                late = trouble
                self._pool.device(self._ordinal).settle_later()
        if failure is None:
            try:
                for caller in self._callers:
                    order_streams(self._pool, self._ordinal, self._pointer, caller)
            except BaseException as trouble:
                failure = trouble
        try:
            if failure is not None:
                self._own_region().abandon()
                self._status.diagnose(failure)
                raise failure
            return late
        finally:
            del failure, late

    def _join_each(self, captured: bool, failure: BaseException | None) -> BaseException | None:
        """Join under a capture, or where something failed: every branch that can be is joined all the same."""
        driver, leased, abandoned = self._driver, self._leased, False
        while leased:  # an interrupt may come between any two of these steps: what is left is joined later
            slot = leased[0]
            try:
                if captured and not driver.capture_id(slot.pointer):
                    raise CaptureError(
                        f"stream {self._pointer:#x} began to be captured inside a fork, after a branch was run: the capture "
                        f"cannot wait for the branch. Begin it before the fork, or after"
                    )
                if not captured and slot.pointer in branch_regions and driver.is_capturing(slot.pointer):
                    raise _left_capturing(slot.pointer)
                driver.record_event(slot.end_event, slot.pointer)
                driver.wait_event(self._pointer, slot.end_event)
            except BaseException as trouble:
                failure = trouble
                if not abandoned:
                    abandoned = True
                    self._own_region().abandon()
            if slot.owner is not None:
                unbind(slot)
            branch_regions.pop(slot.pointer, None)
            leased.pop(0)
            if not captured or thread.recording is None or not thread.recording.take(self._sides, slot):
                self._sides.release(slot, captured=True)
        if captured and thread.recording is not None and not self._inherited:
            thread.recording.kept.add(self._kept if self._region is None else self._region.kept)
        try:
            return failure
        finally:
            del failure

    def _check_in_time(self) -> None:
        if self._inherited and self._own_region().ended:
            raise OwnershipError(
                "this fork was entered inside a branch, and the fork of that branch was left before it: nobody waits for its "
                "branches. Leave a fork where it was entered; a generator that holds one open must be finished there"
            )

    def __del__(self, _defer: Callable[[Any], None] = defer) -> None:
        # Nobody left it: its thread ended inside, or an interrupt came while it was left.
        try:
            if self._thread or self._leased or self._order is not None:
                _defer(self._settle)
        except AttributeError:  # an interrupt came while it was made
            pass

    def _settle(self) -> bool:
        """Leave a fork that nobody left; called later, by any thread."""
        self._thread = _LEFT
        if self._order is not None and self._order.busy and not self._order.closed:
            return False  # in a finaliser that found its thread in the middle of the books, or by another thread
        if self._given_up():
            return True
        try:
            with on_device(self._driver, self._ordinal):
                capturing = self._driver.capture_id
                # Here the first means another stream; the other was destroyed by the collector in one go with the self.
                if self._pointer == PER_THREAD_STREAM or gc.is_finalized(self._stream):
                    self._own_region().abandon()
                    while self._leased:
                        captured = capturing(self._leased[-1].pointer) != 0
                        slot = self._leased.pop()
                        if slot.owner is not None:
                            unbind(slot)
                        branch_regions.pop(slot.pointer, None)
                        self._sides.release(slot, captured=captured)
                    self._leave_order(joined=False)
                    return True
                pointers = [slot.pointer for slot in self._leased]
                if any(pointer and capturing(pointer) for pointer in (self._pointer, *pointers)):
                    return False
                self._join()
        except Exception:
            self._own_region().abandon()
        return (not self._leased and self._order is None) or self._given_up()

    def __reduce__(self) -> Any:
        """Refuse to be copied: two would give the same states back."""
        raise TypeError("a fork owns the states that it leased and cannot be copied or pickled; make another with states.fork()")

    def __repr__(self) -> str:
        state = f"{len(self._leased)} of {self._count} states leased" if self._thread else "not open"
        return f"<Fork of {self._pool!r}, {state}>"


def _left_capturing(pointer: int) -> CaptureError:
    """Return the error for a branch that left its stream capturing: the join would draw the caller's stream into that capture."""
    return CaptureError(
        f"a branch began to capture its stream {pointer:#x} and did not end that: nothing can wait for the branch. End a "
        f"capture where it was begun, also where something raises in between"
    )


def _equally_long(sources: tuple[Iterable[Any], ...], given: bool) -> tuple[Iterable[Any], ...]:
    """Return what a map runs over, each with a length; refuse it where those differ (``given``: the last is its ``out``)."""
    found = [source if isinstance(source, (Sized, *_ENDLESS)) else list(source) for source in sources]
    sized = [len(source) for source in found if isinstance(source, Sized)]
    if not sized:
        return sources
    cut = [source if isinstance(source, Sized) else list(itertools.islice(source, max(sized))) for source in found]
    lengths = [len(source) for source in cut]
    if len(set(lengths)) > 1:
        listed = ", ".join(map(str, lengths[: len(lengths) - given])) + (f", and out= {lengths[-1]}" if given else "")
        raise ArgumentError(
            f"map() makes one call for each entry of its iterables, and they have {listed} entries: give equally many. "
            f"No call was made"
        )
    return tuple(cut)
