"""Open forks: parallel regions over leased side slots.

Two events order a branch and the caller's stream (guarantee 6). The start event is recorded on the caller's stream when the
branch starts, and the side stream waits for it. The end event is recorded on the side stream at the join, and the caller's
stream waits for it. Two branches have only the order that their data requires (guarantees 17 and 7).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from sys import modules
from types import FunctionType, MethodType, TracebackType
from typing import Any, TypeVar

from handlepool._util.arguments import TO_RUN, check_ran
from handlepool._util.names import name_of
from handlepool._util.reachable import Opaque, leaves
from handlepool.errors import ArgumentError, OwnershipError, PoolClosedError
from handlepool.order.measured import awaited, read_answers
from handlepool.order.operation import Operation, OperationCall, operation_of
from handlepool.order.places import open_order
from handlepool.order.plain_calls import PlainCall
from handlepool.order.reached import Reached, arrays_among
from handlepool.order.stream_order import in_torch, torch_of
from handlepool.order.stream_order import order as order_streams
from handlepool.order.track import Track, follow
from handlepool.order.undeclared import run_watched
from handlepool.order.uses import Operands
from handlepool.pool.context import LAUNCHES, NOT_CACHED, ThreadToken, active, recordings, run_on, thread
from handlepool.pool.deferred import defer, deferred
from handlepool.pool.internals import PoolInternals
from handlepool.pool.stream import check_foreign, resolve
from handlepool.regions.join import Join
from handlepool.regions.leases import Leases, UnorderedLeases
from handlepool.regions.map_start import MapStart
from handlepool.regions.memory import branch_regions, inherited

T = TypeVar("T")

_ENDLESS = (itertools.repeat, itertools.count, itertools.cycle)

_NOT_ENTERED, _LEFT, _DEFERRED = None, False, 0
"""Values of `_thread` for a fork that is not open.

`_DEFERRED` is the value for a fork whose join failed and was deferred.
"""


class Fork:
    """A parallel region between two points of the caller's stream.

    `ParallelStates.fork` makes a fork. A single thread enters it, once, in a ``with`` statement.
    """

    __slots__ = (
        "_count",
        "_driver",
        "_inherited",
        "_join",
        "_leases",
        "_once",
        "_ordered",
        "_ordinal",
        "_pointer",
        "_pool",
        "_status",
        "_stream",
        "_thread",
    )

    # `Reached`, which walks a call's arguments, leaves out objects with this attribute.
    __handlepool_keeps_calls__ = True

    _leases: Leases

    def __init__(self, pool: PoolInternals, count: int, stream: Any = None, *, ordered: bool = True, once: bool = False) -> None:
        self._pool = pool
        self._status = pool.status
        self._count = count
        self._stream = stream
        self._ordered = ordered
        # This tells whether the fork makes a single map and nothing else.
        self._once = once
        # The token of the thread that entered the fork, or `_NOT_ENTERED`, `_LEFT` or `_DEFERRED`.
        self._thread: ThreadToken | int | None = _NOT_ENTERED

    def __enter__(self) -> "Fork":
        if self._thread is not _NOT_ENTERED:
            raise OwnershipError("this fork was entered already; make a new fork with states.fork()")
        pool = self._pool
        if self._status.unusable:
            self._status.check()
        if deferred:
            deferred.run()
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
        sides = (pool.devices.get(ordinal) or pool.device(ordinal)).sides
        # A fork that is in no region makes a region of its own when a branch runs Python.
        outer = None if thread.region is None else inherited(driver, ordinal, self._pointer)
        self._inherited = outer is not None
        leases = Leases if self._ordered else UnorderedLeases
        self._leases = leases(pool, self._count, stream, ordinal, sides, outer)
        self._join: Join | None = None
        self._thread = thread.token
        return self

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``function(*args, **kwargs)`` as a branch on a side stream.

        The side stream is the current stream of the branch.

        In the body of the fork, call `wait` before plain CuPy or torch code reads the arrays of a branch. In the body, graph
        functions, operations and programs wait on their own.

        The branch starts after three kinds of work: all work that the caller's stream has received by now, the branches whose
        outputs this branch reads, and the branches that use memory which this branch overwrites. Memory decides, so a view of
        an array counts as the array. A plain function counts as reading the arrays in its arguments, its defaults and its
        closure, and in the attributes of objects among these, two attributes deep. The ``self`` of a method is such an object.
        Globals, deeper attributes and raw pointers are not detected. `handlepool.operation` declares writes in place. The first
        call of any other function is ordered as if it wrote every array that it was given, and its real writes are measured.

        A branch that depends on the last branch of a state runs on that state. All other branches take the states in turn. Two
        branches on the same state run one after the other. If no side slot of the device is free, the branch runs on the
        caller's stream, with the same result. A branch may use another stream than its side stream. Then the code of the branch
        has to let that stream wait for the side stream first, and the side stream wait for that stream afterwards. Memory that
        is allocated on that stream belongs to it.

        Parameters
        ----------
        function : callable
            Any callable. No Python runs in the branch of a graph function or of an operation such as `handlepool.conv2d`.
        *args, **kwargs
            Passed to the function, and kept alive until the join.

        Returns
        -------
        object
            The function's value. Its arrays may be read on the caller's stream after the fork.

        Raises
        ------
        ArgumentError
            For a function that returns a generator or a coroutine, because none of its code has run.
        OwnershipError
            In another thread than the fork's, and inside a branch. Open another fork there.
        PoolClosedError
            After the fork was left, or after the pool was closed.
        """
        pool = self._pool
        if self._thread is not thread.token or self._status.unusable or self._inherited:
            self._refuse()
        driver = self._driver
        ordinal = self._ordinal
        # In this case the caller is inside `with other_device:` in the fork's body.
        if pool.current_device() != ordinal:
            with driver.device(ordinal):
                return self.run(function, *args, **kwargs)
        kind = type(function)
        # The function may be a partial of a graph function.
        if type(function) is partial:
            return self.run(function.func, *function.args, *args, **{**function.keywords, **kwargs})
        launcher = (function if kind is FunctionType else kind).__dict__.get(LAUNCHES)
        if launcher is not None and (kind is not FunctionType or launcher is function):
            # The function belongs to this package, so no Python code of the user runs in the branch. Its outputs are known, so
            # they are allocated before the edge that starts the branch, on the caller's stream. If the arguments are refused,
            # no side slot has been leased.
            if driver.current_stream(ordinal) is self._stream:
                if launcher is not function:
                    return launcher(function, self._leases, args, kwargs)
                branches = thread.branches
                outer = len(branches)
                try:
                    branches.append(self._leases)
                    return function(*args, **kwargs)
                finally:
                    del branches[outer:]
            # The caller is inside `with other_stream:` in the fork's body, or inside a branch. `check_body` refuses a call
            # inside a branch.
            self._leases.check_body(f"fork.run({name_of(function)})")
            return self._on_caller(_launch_at, (self._leases, launcher, function, args, kwargs), {})
        leases = self._leases
        order = leases.order
        if recordings or (active if order is None else order.running is not leases.within):
            leases.check_body(f"fork.run({name_of(function)})")
        value = self._run_python(function, args, kwargs)
        if type(value) in TO_RUN:  # type: ignore[comparison-overlap]
            check_ran(function, value)
        return value

    def _run_python(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run a function of the user as a branch.

        Before the function runs, only its arguments are known. Its writes are noted when it has ended.
        """
        pool, ordinal, leases = self._pool, self._ordinal, self._leases
        call: PlainCall | OperationCall | None = None
        reached: Reached | None = None
        kind = type(function)
        if (kind is Operation or kind is MethodType) and (declared := operation_of(function, args)) is not None:
            call = OperationCall(pool, *declared, kwargs)
        elif self._ordered or pool.checked:
            call = PlainCall(self._driver, function, args, kwargs)
        else:
            reached = Reached(self._driver, function, args, kwargs)
        torch, theirs = None, 0
        if "torch" in modules:
            reached = reached or (call and call.reached) or Reached(self._driver, function, args, kwargs)
            if (torch := torch_of(function, reached.values)) is not None:
                theirs = leases.follow((torch.current_stream(ordinal),))
        slot = leases.begin_call((function, args, kwargs, call.keep if call else reached), call)
        region = leases.own_region() if leases.region is None else leases.region
        run: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = function, args, kwargs
        if isinstance(call, OperationCall):
            run = call.launch, (slot,), {}
        elif call is not None and (pool.checked or "torch" in modules):
            run = run_watched, (pool, region, call, (function, args, kwargs)), {}
        if torch is not None:
            run = in_torch(torch, slot.pointer, theirs, ordinal, *run)
        stream: Any = slot.side_stream
        inside: Any = region
        if leases.slots:
            branch_regions[slot.pointer] = region
        # The fork got no side slot, so the branch runs on the caller's stream.
        else:
            stream, inside = self._stream, region if self._inherited else thread.region
        order, known = leases.order, len(region.allocated)
        if call is None or order is None:
            return run_on(pool, stream, ordinal, inside, *run)
        outer = order.enter_branch(order.tracks[slot.pointer])
        ended: tuple[T] | None = None
        plain = call if leases.slots and isinstance(call, PlainCall) and call.measurable else None
        try:
            if plain is not None:
                plain.begin(pool, slot.pointer)
            value: T = run_on(pool, stream, ordinal, inside, *run)
            if plain is not None and plain.measurement is not None:
                plain.returned(value, region.allocated[known:])
            ended = (value,)
        finally:
            if plain is not None and ended is None:
                plain.raised()
            # If the fork leased no state, the branch ran on the caller's stream, where the region does not see the allocations.
            seen = bool(leases.slots) or self._inherited
            order.end_branch(outer, call, region.allocated[known:] if seen or ended is None else None, ended)
        return ended[0]

    def _on_caller(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        region = self._leases.region if self._inherited else thread.region
        return run_on(self._pool, self._stream, self._ordinal, region, function, args, kwargs)

    def wait(self, *arrays: Any) -> Any:
        """Let the caller's stream wait for the branches that wrote arrays.

        Plain CuPy or torch code in the body of the fork needs this call before it reads the arrays of a branch. The call does not
        wait for branches that only read the arrays. So to overwrite arrays that branches may still read, call a
        `handlepool.operation` in the body. Graph functions, operations, programs and `ParallelStateExecutor.submit` wait on their
        own.

        Parameters
        ----------
        *arrays : array
            Arrays of any library, or values that lead to arrays as an argument of `run` does. A program stands for its outputs.
            An array that no branch wrote costs nothing.

        Returns
        -------
        array or tuple
            The one argument, or all arguments.

        Raises
        ------
        OwnershipError
            In another thread than the fork's, and inside a branch.
        PoolClosedError
            After the fork was left, or after the pool was closed.

        Examples
        --------
        >>> with states.fork() as fork:                                                                  # doctest: +SKIP
        ...     y = fork.run(conv, x, w)
        ...     largest = fork.wait(y).max()
        """
        self._refuse()
        driver = self._driver
        self._leases.check_body("fork.wait")
        order = self._leases.order or open_order(driver, self._ordinal)
        if order is not None:
            home = order.tracks.get(self._pointer) or Track(self._pointer)
            reached = [*leaves(*map(_with_arrays, arrays), calls=True)]
            opaque = Opaque in map(type, reached)
            pieces = [memory for _, memory in arrays_among(driver, reached) if memory[1] > memory[0]]
            with order:
                follow(order.events, home, order.all_calls() if opaque else order.conflicts(pieces, ()))
            current = driver.current_stream(self._ordinal).ptr
            if current != self._pointer:
                self._pool.device(self._ordinal).edges.order(self._pointer, current)
            if (torch := torch_of(None, reached)) is not None:
                order_streams(self._pool, self._ordinal, self._pointer, torch.current_stream(self._ordinal))
        return arrays[0] if len(arrays) == 1 else arrays

    def map(
        self, function: Callable[..., T], /, *iterables: Iterable[Any], out: Iterable[Any] | None = None, **kwargs: Any
    ) -> list[T]:
        """Run ``function`` over the iterables, each call a branch.

        The results come in order.

        The effect is that of one call of `run` for each entry. There are two differences for a graph function over lists, tuples
        and ranges. The branches start together, after the work that the caller's stream had received when `map` was called. Small
        outputs that the function allocates may share a block of memory, as in `ParallelStates.map`.

        Parameters
        ----------
        function : callable
        *iterables : iterable
            The positional arguments. Each call takes an entry of each iterable. All iterables are equally long, except
            `itertools.repeat`, `count` and `cycle`, which give an entry for every call. A single generator is read while
            branches run. Beside other iterables or ``out``, a generator is read to its end before the first call.
        out : iterable of array, optional
            The ``out`` that each call writes to.
        **kwargs
            Keywords for every call, such as ``padding=1``. `map` takes the name ``out`` for itself. To give all calls the same
            ``out``, bind it with `functools.partial`.

        Returns
        -------
        list
            The value of each call. Arrays in it may be read on the caller's stream after the fork.

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
        # Lists, tuples and ranges run no code of the user when they are read. So the branches can start together.
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
        """Run branches that each launch one known plan, and no Python.

        The result is None if a call of ``function`` may run Python code, or if the branches have to start separately.

        All outputs are allocated before the edge that starts the branches (guarantee 8). So each state needs only one edge.
        """
        bare, fixed, keywords = (
            (function.func, function.args, function.keywords) if type(function) is partial else (function, (), {})
        )
        kind = type(bare)
        launcher = (bare if kind is FunctionType else kind).__dict__.get(LAUNCHES)
        if launcher is None or (kind is FunctionType and launcher is not bare):
            return None
        if keywords and any(hasattr(value, "shape") for value in keywords.values()):
            # A shortcut takes arrays by position, and would miss the arrays among a partial's keywords.
            return None
        if self._thread is not thread.token or self._status.unusable or self._inherited:
            self._refuse()
        if self._pool.current_device() != self._ordinal or self._driver.current_stream(self._ordinal) is not self._stream:
            return None
        first, *others = calls
        arrays, options = (first[:-1], {**keywords, "out": first[-1]}) if given else (first, keywords)
        start = MapStart(self._leases, others, first[-1] if given else None, given, partial(self._is_apart, fixed, sources))
        leases = self._leases
        try:
            results = [_launch_at(start, launcher, bare, fixed + arrays, options)]
            attempt = start.attempt
            # If the first call had to build the plan, `MapStart` has no `attempt`. Then each of the other branches starts on
            # its own.
            if attempt is None:
                return results + [self._run(function, call, given) for call in others]
            begin = start.begin_next
            for call, made in zip(others, start.fresh, strict=True):
                arrays, out = (call[:-1], call[-1]) if given else (call, None)
                result = attempt(begin, fixed + arrays, out, made)
                # The plan does not fit this call, for example because the arrays have another geometry.
                if result is NOT_CACHED:
                    # `_is_apart` has not checked this call, so the call must wait for all branches so far.
                    if given and begin != leases.begin:
                        leases.end_together()
                        begin = leases.begin
                        leases.wait_for_all()
                    result = leases.apart(self._run, function, call, given)
                results.append(result)
            return results
        finally:
            leases.end_together()

    def _is_apart(self, fixed: tuple[Any, ...], sources: Sequence[Iterable[Any]], operands: Operands) -> bool:
        """Return whether no branch of a map waits for another branch.

        The result is True if the branches write new memory, or memory that no other call of the map uses. The last entry of
        ``sources`` holds the outputs that the caller gave. The result is always False if the fork may run other branches than
        this map's, or if another ordered fork of this thread is open.
        """
        if not self._once or open_order(self._driver, self._ordinal) is not None:
            return False
        if operands.fresh:
            return True
        pointers = self._driver.array_pointers
        try:
            read = pointers(fixed)
            for source in sources[:-1]:
                read += pointers(source)
            return operands.are_apart(read, pointers(sources[-1]))
        # The arrays belong to another library, so their addresses were not compared.
        except (AttributeError, TypeError):
            return False

    def _refuse(self) -> None:
        """Raise the error for a fork that cannot be used."""
        if not self._thread:
            raise PoolClosedError("this fork was left, or not entered; run branches inside `with states.fork() as fork:`")
        if self._thread is not thread.token:
            raise OwnershipError(
                f"a fork belongs to the thread that entered it ({self._thread}), but {thread.token} used it; make a fork in each "
                f"thread, or use ParallelStateExecutor"
            )
        self._status.check()
        self._leases.check_in_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not thread.token:
            self._refuse()
        status, leases = self._status, self._leases
        try:
            self._thread = _LEFT
            join = self._join = Join(self._pool, leases, self._stream, self._ordinal)
            if error is not None:
                status.lost(error, ask=False)
            if status.unusable and join.given_up():
                if error is None and status.poison is not None:
                    status.check()
                return
            if self._pool.current_device() == self._ordinal:
                join.make()
            # The caller may leave the fork on another device, where the pointer of the null stream means another stream. So the
            # join makes the fork's device current.
            else:
                with self._driver.device(self._ordinal):
                    join.make()
        except BaseException:
            if leases.order is not None:
                # An interrupt may have left the books in the middle of a change.
                leases.order.recover()
            # The fork still has slots or books, so the join did not begin or did not end. It is deferred.
            if leases.slots or leases.order is not None:
                join = self._join = self._join or Join(self._pool, leases, self._stream, self._ordinal)
                join.fail()
                defer(join.settle)
                self._thread = _DEFERRED
            raise
        if error is None:
            if self._inherited:
                leases.check_in_time()
            if awaited.answers:
                read_answers()

    def __del__(self, _defer: Callable[[Any], None] = defer, _join: type[Join] = Join) -> None:
        # The fork may not have been left: its thread ended inside, or an interrupt came during its exit.
        try:
            leases = self._leases
            # An interrupt may have come just after the `defer` of the exit. Then this code defers the same join a second time,
            # which `Join.settle` allows.
            if self._thread is not _DEFERRED and (self._thread or leases.slots or leases.order is not None):
                _defer((self._join or _join(self._pool, leases, self._stream, self._ordinal)).settle)
        # The fork was not entered, or an interrupt came while it was entered. So there is nothing to join.
        except AttributeError:
            pass

    def __reduce__(self) -> Any:
        """Refuse to be copied, because both copies would release the same states."""
        raise TypeError(
            "a fork owns the states that it leased and cannot be copied or pickled; make another fork with states.fork()"
        )

    def __repr__(self) -> str:
        state = f"{len(self._leases.slots)} of {self._leases.count} states leased" if self._thread else "not open"
        return f"<Fork of {self._pool!r}, {state}>"


def _launch_at(place: Any, launcher: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of handlepool, which ``place`` orders and launches.

    If ``function`` is a callable object, ``launcher`` is the launcher of the object's type and makes the call. Otherwise
    ``launcher`` is ``function`` itself, which finds ``place`` as the last entry of `thread.branches`.
    """
    if launcher is not function:
        return launcher(function, place, args, kwargs)
    branches = thread.branches
    outer = len(branches)
    try:
        branches.append(place)
        return function(*args, **kwargs)
    finally:
        del branches[outer:]


def _with_arrays(value: Any) -> Any:
    """Return the arrays that stand for ``value``, or ``value`` itself.

    A type names its arrays by ``__handlepool_arrays__``. For example, the output arrays stand for a program.
    """
    arrays = type(value).__dict__.get("__handlepool_arrays__")
    return value if arrays is None else arrays(value)


def _equally_long(sources: tuple[Iterable[Any], ...], given: bool) -> tuple[Iterable[Any], ...]:
    """Return a map's iterables with equal lengths, or refuse them.

    With ``given`` the last iterable is the map's ``out``.
    """
    found = [source if isinstance(source, (Sized, *_ENDLESS)) else list(source) for source in sources]
    sized = [len(source) for source in found if isinstance(source, Sized)]
    if not sized:
        return sources
    cut = [source if isinstance(source, Sized) else list(itertools.islice(source, max(sized))) for source in found]
    lengths = [len(source) for source in cut]
    if len(set(lengths)) > 1:
        listed = " and ".join(map(str, lengths[: len(lengths) - given])) + (
            f" entries, and out= has {lengths[-1]} entries" if given else " entries"
        )
        raise ArgumentError(
            f"map() makes one call for each entry of its iterables, but its iterables have {listed}: pass iterables of equal "
            "length. No call was made"
        )
    return tuple(cut)
