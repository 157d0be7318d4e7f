"""Give a function a pool of programs, by its arguments' geometry."""

import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, overload

from handlepool._util.arguments import as_integer, at_least, flag
from handlepool._util.cleanup import do_all
from handlepool._util.frames import frames_inside
from handlepool._util.names import kind_of, shown
from handlepool._util.protocols import Wrapper
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import ArgumentError, CaptureError, PoolClosedError
from handlepool.order.books import open_order
from handlepool.order.stream_order import integration
from handlepool.pool.context import active, recordings, thread
from handlepool.pool.default import current_pool
from handlepool.pool.deferred import abandon, deferred
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.recording.first_call import name_of_call
from handlepool.recording.guards import VALUE
from handlepool.recording.hits import MISSED, Hit
from handlepool.recording.instances import Instance
from handlepool.recording.keys import Call, NotRecorded, Reader
from handlepool.recording.outputs import Results
from handlepool.recording.program import Program
from handlepool.recording.requests import request, takes
from handlepool.recording.tuning import LanesTuning
from handlepool.recording.update import copy_all
from handlepool.recording.variants import Options, Variant
from handlepool.regions.executor import ParallelStateExecutor
from handlepool.regions.future import StreamFuture, Task
from handlepool.regions.requests import Requests
from handlepool.tensors.layout import ArraySpec

_made: "weakref.WeakSet[RecordedFunction[..., Any]]" = weakref.WeakSet()
"""All recorded functions. A forked child abandons their programs."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

MOST_REBOUND = 3
"""The maximum number of programs dropped because an array was rebound.

One more drop makes the function run eagerly.
"""
MOST_LACKED = 3
"""The maximum number of recordings that may lack memory or side streams.

The key of each further such recording runs eagerly.
"""
MOST_TRIED = 4
"""The maximum number of written-out calls that a call tries.

If none of them takes the arguments, the call goes the long way.
"""
MOST_PENDING = 256
"""The maximum number of pending calls by `submit`.

A further call waits for the oldest.
"""
MANY_VALUES = 8
"""A warning names a value in which this many keys differ."""
MOST_SEEN = 1024
"""The maximum number of keys whose calls are counted.

The key that came least recently is forgotten first.
"""
_PER_OBJECT = "_handlepool_recorded"
"""Attribute of an object that holds its methods' recorded functions."""


@dataclass(frozen=True, slots=True)
class RecordedStats:
    """Counts of a recorded function.

    Attributes
    ----------
    keys : int
        Keys that have programs.
    programs : int
        Programs, all instances together.
    nbytes : int
        Bytes of device memory that the programs allocated while they were recorded, scratch included.
    recorded : int
        Programs that were recorded so far.
    eager : int
        Calls that ran eagerly.
    closed : int
        Keys whose programs were closed because other keys were used more recently, or because an array was rebound.
    """

    keys: int
    programs: int
    nbytes: int
    recorded: int
    eager: int
    closed: int


class RecordedFunction(Wrapper, Generic[P, R]):
    """A function with a pool of programs. Made by `recorded`.

    A call takes the function's own arguments, and returns new arrays, ready in the order of the current stream. The first call
    of each geometry runs the function for real and records it. Any thread may call it, at any time.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.__wrapped__ = function = options.function
        functools.update_wrapper(self, function, updated=())
        self._takes_out = _has_parameter(function, "out")
        self._reader: Reader | None = None
        self._variants: dict[tuple[Any, ...], list[Variant]] = {}
        # Maps each variant to its written-out call, or to None if it has none that calls try.
        self._order: dict[Variant, Hit | None] = {}
        # Written-out calls, by the shape of the first argument.
        self._hits: dict[Any, tuple[Hit, ...]] = {}
        # The lock guards changes of these tables. Calls read the tables without it. No function of the user runs under the lock.
        self._lock = threading.RLock()
        # The dictionary maps a pool to a mark of the call that records now. One call records at a time, and other calls run
        # eagerly instead of waiting. The mark replaces a lock, which must not be held while the function runs (guarantee 15).
        # `setdefault` is a single step, so two calls cannot both set a mark. After an interrupt, the `finally` removes the mark.
        self._under_way: dict[PoolInternals, object] = {}
        self._eager: str | None = None
        self._said = False
        self._rebound = self._unused = self._lacked = 0
        self._counts = {"recorded": 0, "eager": 0, "closed": 0}
        self._seen: dict[Any, int] = {}
        self._executor: ParallelStateExecutor | None = None
        _made.add(self)

    def _after_fork(self) -> None:
        """Abandon the programs of the parent in a forked child (guarantee 13).

        A thread that the child lacks may have held the lock.
        """
        abandon((self._variants, self._order, self._hits, self._executor, self._reader))
        self._lock = threading.RLock()
        self._variants, self._order, self._hits, self._seen, self._under_way = {}, {}, {}, {}, {}
        self._executor = self._reader = None

    def __repr__(self) -> str:
        return f"<recorded function {self._options.name}, {len(self._order)} keys>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the program for such arguments, or call the function.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function. ``out=`` has arrays in the structure of the result, and the call writes into these
            arrays. If the function has a parameter of that name, ``out=`` is this parameter.

        Returns
        -------
        object
            The value of the function, in new arrays.
        """
        if not kwargs:
            try:
                hits = self._hits.get(args[0].shape, ())  # type: ignore[attr-defined]
            # There is no argument, or the first argument is no array.
            except Exception:
                hits = ()
            for hit in hits:
                try:
                    found = hit(args)
                # The user may have closed the program. The long way notices that.
                except PoolClosedError:
                    break
                if found is not MISSED:
                    self._unused = 0
                    return found
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function the long way, without a hit."""
        out = kwargs.pop("out", None) if kwargs and not self._takes_out else None
        pool = current_pool()
        # A call inside a recording runs the function itself, so that its work becomes a part of that recording.
        if self._eager is not None or (recordings and _inside_recording()):
            return self._plain(pool, args, kwargs, out)
        if pool.status.unusable:
            pool.status.check()
        driver = pool.driver
        stream = driver.current_stream()
        if stream.ptr != LEGACY_STREAM and driver.is_capturing(stream.ptr):
            return self._plain(pool, args, kwargs, out)
        reader = self._reader
        if reader is None or reader.driver is not driver:
            reader = self._reader = Reader(driver, self._options.in_place)
        try:
            call = reader.read(args, kwargs)
        except (NotRecorded, RecursionError) as why:
            self._say(str(why), why)
            return self._plain(pool, args, kwargs, out)
        except Exception as error:
            pool.status.diagnose(error)
            raise
        if call.tensors and driver.name == "cuda":
            theirs = integration().current_stream(driver.current_device())
            # If torch's current stream is being captured, the function itself runs, as under a capture of CuPy's stream.
            if theirs != LEGACY_STREAM and driver.is_capturing(theirs):
                return self._plain(pool, args, kwargs, out)
        # The table is read without the lock.
        for variant in self._variants.get(call.key, ()):
            if variant.pool is pool and variant.takes(call):
                guards = variant.guards
                if guards is None:
                    if variant.eager is not None:
                        return self._plain(pool, args, kwargs, out)
                elif guards.holds():
                    return self._served(variant, call, stream, args, kwargs, out)
        return self._missed(pool, call, stream, args, kwargs, out)

    def _served(self, variant: Variant, call: Call, stream: object, args: object, kwargs: object, out: object) -> Any:
        """Call a program of a variant."""
        self._unused = 0
        grow = None
        if thread.region is None and not active:
            grow = functools.partial(self._grow, variant, args, kwargs, call)
        instance = variant.lease(stream, grow=grow) if variant.apart(call) else None
        if instance is None:
            return self._plain(variant.pool, args, kwargs, out)
        try:
            found = variant.run(instance, call, out, ordered=bool(active))
            if out is None and not kwargs:
                self._keep_hit(variant, args)
            return found
        except PoolClosedError:
            if variant.pool.status.closed or not instance.program.closed:
                raise
        # The user closed the program that `program` returned, so the call records anew.
        self._drop(variant)
        return self._missed(variant.pool, call, stream, args, kwargs, out)

    def _plain(self, pool: PoolInternals, args: Any, kwargs: Any, out: Any) -> Any:
        """Call the function itself."""
        self._counts["eager"] += 1
        return self._into(pool, self._options.function(*args, **kwargs), out)

    def _into(self, pool: PoolInternals, value: object, out: object) -> Any:
        """Copy the arrays of a value into the caller's arrays."""
        if out is None:
            return value
        driver = pool.driver
        results = Results(driver, self._options.name, driver.current_device(), value, out)
        copy_all(driver, results.copies)
        return results.value

    def _missed(self, pool: PoolInternals, call: Call, stream: object, args: object, kwargs: object, out: object) -> Any:
        """Serve a call for which the lookup found no program."""
        variants = self._variants.get(call.key, [])
        values: dict[str, int] = {}
        # Another thread may insert a variant meanwhile, so the loop walks a copy of the list.
        for variant in [*variants]:
            if variant.pool is not pool or variant.guards is None:
                continue
            if not variant.takes(call):
                self._drop(variant)
                continue
            changed = variant.guards.changed()
            if not changed:
                return self._served(variant, call, stream, args, kwargs, out)
            if all(guard.kind == VALUE for guard in changed):
                if len(changed) == 1:
                    values[changed[0].path] = values.get(changed[0].path, 0) + 1
                continue
            self._drop(variant)
            self._rebound += 1
            if self._rebound > MOST_REBOUND:
                names = ", ".join(guard.path for guard in changed[:3] if guard.kind != VALUE)
                self._eager = f"it was recorded {self._rebound} times since {names} was bound to another array or object"
                self._say(f"{self._eager}: write new values in place, as by w[...] = new")
                self.clear()
        if self._eager is not None or not self._may_record(pool, call):
            return self._plain(pool, args, kwargs, out)
        me = object()
        try:
            # If another call records, this call runs eagerly instead of waiting.
            if self._under_way.setdefault(pool, me) is me:
                return self._into(pool, self._recorded(pool, call, args, kwargs, values), out)
        finally:
            if self._under_way.get(pool) is me:
                del self._under_way[pool]
        return self._plain(pool, args, kwargs, out)

    def _may_record(self, pool: PoolInternals, call: Call) -> bool:
        """Return whether to record a key.

        In a region no key is recorded. After many recordings whose programs served no call, a key is recorded only when it comes
        a second time.
        """
        if thread.region is not None or (active and open_order(pool.driver, pool.current_device()) is not None):
            return False
        if self._unused < 2 * self._options.programs:
            return True
        return self._see(call.key) > 1

    def _see(self, what: object) -> int:
        """Count a call of a key, and return the count.

        Only the last `MOST_SEEN` keys are remembered.
        """
        with self._lock:
            seen = self._seen[what] = self._seen.pop(what, 0) + 1
            if len(self._seen) > MOST_SEEN:
                del self._seen[next(iter(self._seen))]
        return seen

    def _recorded(self, pool: PoolInternals, call: Call, args: Any, kwargs: Any, values: dict[str, int]) -> Any:
        """Record a key; return the value of the call for real."""
        for name, count in values.items():
            if count == MANY_VALUES:
                self._warn(f"was recorded for {count + 1} values of {name}: keep it in an array without axes")
        self._count_statics(call)
        variant = Variant(self._options, pool, call)
        value = variant.record(args, kwargs, call)
        # A lack of memory or side streams may pass, so a few such recordings are tried again.
        if variant.lacking is not None:
            self._lacked += 1
            if self._lacked <= MOST_LACKED:
                self._counts["eager"] += 1
                return value
            variant.eager = variant.lacking
        # The tables change together under the lock. Variants are dropped after the lock is released.
        with self._lock:
            self._variants.setdefault(call.key, []).insert(0, variant)
            self._order[variant] = None
            self._unused += 1
            self._counts["recorded" if variant.eager is None else "eager"] += 1
            dead = [each for each in self._order if each.pool.status.closed or each.pool.status.forked]
            if len(self._order) > self._options.programs and not dead:
                dead.append(min(self._order, key=attrgetter("last")))
        for each in dead:
            if each is not variant:
                self._drop(each)
        if variant.eager is not None:
            self._say(variant.eager)
        return value

    def _grow(self, variant: Variant, args: Any, kwargs: Any, call: Call) -> Any:
        """Capture a further instance, unless another call records."""
        me, pool = object(), variant.pool
        try:
            if self._under_way.setdefault(pool, me) is not me:
                return None
            made = variant.grow(args, kwargs, call)
            if made is not None:
                self._counts["recorded"] += 1
            return made
        finally:
            if self._under_way.get(pool) is me:
                del self._under_way[pool]

    # The table

    def _keep_hit(self, variant: Variant, args: Any) -> None:
        """Let later calls of a variant take the written-out call."""
        hit, shape = variant.hit(args), getattr(args[0], "shape", None) if args else None
        if hit is None or hit in self._hits.get(shape, ()):
            return
        with self._lock:
            # Another thread may have dropped the variant meanwhile.
            if variant in self._order:
                known = [each for each in self._hits.get(shape, ()) if each is not self._order[variant]]
                self._hits[shape] = (hit, *known[: MOST_TRIED - 1])
                self._order[variant] = hit

    def _drop(self, variant: Variant) -> None:
        """Forget a variant.

        Each of its programs is destroyed once the device has finished the program's last call.
        """
        with self._lock:
            if variant not in self._order:
                return
            hit = self._order.pop(variant)
            self._counts["closed"] += 1
            known = [each for each in self._variants.get(variant.key, ()) if each is not variant]
            if known:
                self._variants[variant.key] = known
            else:
                self._variants.pop(variant.key, None)
            if hit is not None:
                left = {shape: tuple([each for each in hits if each is not hit]) for shape, hits in self._hits.items()}
                self._hits = {shape: hits for shape, hits in left.items() if hits}

    def _count_statics(self, call: Call) -> None:
        """Warn if many keys differ in a single plain value."""
        for place, part in enumerate(call.key):
            value = part[1] if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) else part
            if isinstance(value, tuple) and len(value) == 2 and value[0] in (int, float, complex, str, bytes, bool):
                rest = place, (*call.key[:place], *call.key[place + 1 :])
                if self._see(rest) == MANY_VALUES:
                    name = part[0] if value is not part else f"argument {place - 1}"
                    self._warn(f"was recorded for {MANY_VALUES} values of {name}: pass it as an array without axes")

    def _say(self, why: str, cause: BaseException | None = None) -> None:
        """Warn once that the function runs eagerly; with ``strict`` raise."""
        if self._options.strict:
            raise CaptureError(f"recorded({self._options.name}) has no program for this call: {why}") from cause
        if not self._said:
            self._said = True
            self._warn(f"runs eagerly: {why}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"recorded({self._options.name}) {text}", RuntimeWarning, stacklevel=frames_inside())

    # For the user

    def program(self, *args: P.args, **kwargs: P.kwargs) -> Program:
        """Return the program for such arguments; record it if it is missing.

        It is for `Program.explain`, `Program.draw` and `Program.tune`. Calls of the function go on using it.

        Parameters
        ----------
        *args, **kwargs
            As in a call.

        Returns
        -------
        Program

        Raises
        ------
        CaptureError
            If the function runs eagerly with such arguments.
        """
        pool = current_pool()
        for attempt in range(2):
            try:
                call = Reader(pool.driver, self._options.in_place).read(args, kwargs)
            except NotRecorded as why:
                raise CaptureError(f"{self._options.name} has no program for such arguments: {why}") from why
            for variant in self._variants.get(call.key, ()):
                if variant.takes(call) and variant.guards is not None and not variant.guards.changed():
                    return variant.instances[0].program
                if variant.eager is not None:
                    raise CaptureError(f"{self._options.name} has no program for such arguments: {variant.eager}")
            if not attempt:
                self(*args, **kwargs)
        raise CaptureError(f"{self._options.name} has no program for such arguments: {self._eager or 'it was not recorded here'}")

    def _served_by(self, *args: Any) -> tuple[Variant, Instance] | None:
        """Return the variant and the instance of arguments that have a program."""
        reader, pool = self._reader, current_pool()
        if reader is None or reader.driver is not pool.driver:
            return None
        call = reader.read(args, {})
        for variant in self._variants.get(call.key, ()):
            if variant.pool is pool and variant.instances and variant.takes(call):
                return variant, variant.instances[0]
        return None

    def _keeps(self, variant: Variant) -> bool:
        """Return whether the table still has a variant."""
        return variant in self._order

    def _close(self) -> None:
        """Close all programs, after their last work, and forget them."""
        try:
            do_all([each.close for variant in [*self._order] for each in variant.instances])
        finally:
            self.clear()

    def stats(self) -> RecordedStats:
        """Return counts of programs, their memory, and calls.

        Returns
        -------
        RecordedStats
        """
        programs = [each.program for variant in [*self._order] for each in variant.instances]
        keys = sum(bool(variant.instances) for variant in [*self._order])
        return RecordedStats(keys, len(programs), sum(each.nbytes for each in programs), **self._counts)

    def explain(self) -> str:
        """Return a text on the arguments and the programs of each key.

        Returns
        -------
        str
        """
        lines = [repr(self)]
        for variant in [*self._order]:
            lines.append(
                f"{_told(variant.key)}: " + (f"eager: {variant.eager}" if variant.eager else f"{len(variant.instances)} programs")
            )
            # The user may have closed the first program, or another thread may close it now.
            with suppress(PoolClosedError):
                if variant.instances:
                    lines += [f"    {line}" for line in str(variant.instances[0].program.explain()).splitlines()]
        if self._eager is not None:
            lines.append(f"runs eagerly: {self._eager}")
        return "\n".join(lines)

    def tune(self, lanes: Iterable[int] = (1, 2, 4, 8, 16), *, goal: str = "clock", seconds: float = 10.0) -> list[LanesTuning]:
        """Measure the best number of lanes for each key, and use it.

        `Program.tune` does so for a single program. No call waits for the measurement: meanwhile calls take another program of
        the key, or run eagerly.

        Parameters
        ----------
        lanes, goal, seconds
            As in `Program.tune`.

        Returns
        -------
        list of LanesTuning
            A tuning for each key that has programs.
        """
        tried = tuple(lanes) if isinstance(lanes, Iterator) else lanes
        found = [variant.tune(tried, goal, seconds) for variant in [*self._order]]
        return [each for each in found if each is not None]

    def prewarm(self, *specs: object, tune: bool = True) -> None:
        """Record the function for arguments to come, by calls with zeros.

        Parameters
        ----------
        *specs : ArraySpec or tuple
            Each has the arguments of one call: an `ArraySpec` in the place of each array, and other values as they are. Outside
            of a tuple, a value is the call's single argument.
        tune : bool
            Whether `tune` is called afterwards, if the function is recorded on several lanes.
        """
        tuned = flag("prewarm: tune", tune)
        driver = current_pool().driver
        for spec in specs:
            args = spec if isinstance(spec, tuple) else (spec,)
            self(*[_zeros(driver, each) for each in args])  # type: ignore[call-arg]
        if tuned and self._options.lanes not in (None, 1):
            self.tune()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> StreamFuture[R]:
        """Call the function on a stream of its own.

        The call comes after the current stream's work so far. It also comes after earlier calls by `submit` of the same client. A
        client is a thread, or a task of asyncio. Calls of several clients overlap on up to ``instances`` streams.

        Arguments that have no program yet are recorded first, by a call in this thread. Up to 256 calls are pending on the GPU. A
        further call waits for the oldest.

        Parameters
        ----------
        *args, **kwargs
            As in a call. Arrays of NumPy are copied to the device through page-locked memory. If there are any, the results come
            back as arrays of NumPy. `ParallelStateExecutor` has options for both.

        Returns
        -------
        StreamFuture
            A future that can be awaited. Its ``result`` is ready on the current stream, or on the host.
        """
        executor = self._executor
        if executor is None:
            # Another thread may have made the executor meanwhile, so the lock guards a second look.
            with self._lock:
                executor = self._executor = self._executor or ParallelStateExecutor(
                    self._options.instances, max_pending=MOST_PENDING, thread_name_prefix=self._options.name
                )
        return executor.submit(self, *args, **kwargs)

    def _known(self, args: tuple[Any, ...], stream: Any, begin: Callable[[], None]) -> Any:
        """Enqueue a known call on a stream, or return `MISSED`.

        ``begin`` is called once results are allocated, before the call's first copy.
        """
        shape = getattr(args[0], "shape", None) if args else None
        for attempt in range(2):
            try:
                for hit in self._hits.get(shape, ()):
                    found = hit(args, stream, begin)
                    if found is not MISSED:
                        self._unused = 0
                        return found
            # The user may have closed the program. The long way notices that.
            except PoolClosedError:
                break
            if attempt or not self._widen(args, stream):
                break
        return MISSED

    def _widen(self, args: tuple[Any, ...], stream: Any) -> bool:
        """Capture a further instance for a stream.

        Return whether another try as a known call may succeed.
        """
        reader, pool = self._reader, current_pool()
        if reader is None or reader.driver is not pool.driver or active:
            return False
        call = reader.read(args, {})
        for variant in self._variants.get(call.key, ()):
            if variant.pool is pool and variant.takes(call) and variant.guards is not None and variant.guards.holds():
                made = self._grow(variant, args, {}, call) if variant.growable(stream) else None
                if made is not None:
                    made.move(stream)
                self._keep_hit(variant, args)
                return made is not None or not variant.growable(stream)
        return False

    def _request(
        self, pool: PoolInternals, requests: Requests, task: Callable[[], Task], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StreamFuture[R] | None:
        return request(self, pool, requests, task(), args, kwargs) if takes(pool.driver, args, kwargs) else None

    def _at_once(self, args: Any, kwargs: Any) -> list[Any]:
        """Record such arguments and return the call's value in a list.

        The list is empty if the key is known or cannot be recorded. Then the function was not called.
        """
        pool = current_pool()
        if pool.status.unusable or self._eager is not None:
            return []
        try:
            call = Reader(pool.driver, self._options.in_place).read(args, kwargs)
        except (NotRecorded, RecursionError):
            return []
        known = any(each.pool is pool for each in self._variants.get(call.key, ()))
        return [] if known else [self(*args, **kwargs)]

    def clear(self) -> None:
        """Forget all programs.

        Each program is destroyed once the device has finished its last call. The next call of a key records anew.
        """
        for variant in [*self._order]:
            self._drop(variant)
        self._seen.clear()
        deferred.run_all()

    # As a method

    def __get__(self, owner: object, kind: object = None) -> Any:
        """Return the recorded function of an object's method.

        It has programs of its own, and lives as long as the object.
        """
        if owner is None or not hasattr(type(self._options.function), "__get__"):
            return self
        space = getattr(owner, "__dict__", None)
        if not isinstance(space, dict):
            raise ArgumentError(
                f"recorded({self._options.name}): a {kind_of(owner)} has no __dict__ that could keep the programs of its "
                "methods: add '__dict__' to its __slots__, or record a function outside of the class"
            )
        own = space.get(_PER_OBJECT)
        if own is None:
            # `setdefault` keeps a single object if two threads come here at the same time.
            own = space.setdefault(_PER_OBJECT, _PerObject())
        made = own.made.get(id(self))
        if made is None:
            made = own.made.setdefault(id(self), (self, self._of(owner, kind)))
        return made[1]

    def _of(self, owner: Any, kind: Any) -> "RecordedFunction[..., Any]":
        options = self._options
        function = options.function.__get__(owner, kind)
        in_place = frozenset(each - 1 if isinstance(each, int) else each for each in options.in_place)
        values = options.lanes, options.instances, options.programs, options.reused, options.strict, in_place
        return RecordedFunction(Options(function, options.name, *values))

    def __reduce__(self) -> str:
        """Copy by reference, as functions do."""
        return self._options.name


def _after_fork() -> None:
    for function in [*_made]:
        function._after_fork()  # noqa: SLF001 - of the same module


os.register_at_fork(after_in_child=_after_fork)


class _PerObject:
    """The recorded functions of one object's methods.

    A copy of the object has none.
    """

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, RecordedFunction[..., Any]]] = {}

    def __reduce__(self) -> Any:
        return _PerObject, ()


def _inside_recording() -> bool:
    """Return whether this thread records a function, or makes its first call."""
    return thread.recording is not None or thread.rehearsal is not None or thread.launched is not None


def _has_parameter(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # The signature of a function written in C is unknown.
        return False


def _zeros(driver: Any, value: Any) -> Any:
    if not isinstance(value, ArraySpec):
        return value
    array = driver.empty(value.shape, value.strides, value.dtype)
    array[...] = 0
    return array


def _told(key: tuple[Any, ...]) -> str:
    """Return a key's plain values, and its arrays' shapes and types."""
    # The length of a part tells an array (three entries) from a tensor (six).
    arrays = {3: (0, 2), 6: (1, 3)}
    return ", ".join(
        " ".join(str(part[each]) for each in arrays.get(len(part), (-1,))) for part in key[1:] if isinstance(part, tuple) and part
    )


def _places(function: Any, names: Any) -> frozenset[int | str]:
    """Return the places and names of arguments that are read in place."""
    given, names = names, (names,) if isinstance(names, str) else tuple(names)
    try:
        known = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        known = []
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ArgumentError(
                f"recorded: in_place={shown(given)}; {name_of_call(function)} has the parameters {', '.join(known)}"
            )
    return frozenset([*names, *[known.index(name) for name in names]])


@overload
def recorded(
    function: Callable[P, R],
    /,
    *,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
) -> RecordedFunction[P, R]: ...


@overload
def recorded(
    *,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
) -> Callable[[Callable[P, R]], RecordedFunction[P, R]]: ...


def recorded(
    function: Any = None,
    /,
    *args: object,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
    **others: object,
) -> Any:
    """Record a function by its calls: a program for each geometry.

    The result is called as the function is, with any arguments, from any thread. The first call of a geometry runs the function
    for real and records it, see `record`. Later calls copy their arguments into a program, launch it, and return copies of its
    outputs. `recorded` is also a decorator, with and without arguments, of functions, methods and callable objects.

    Parameters
    ----------
    function : callable
        Must give the same work each time. A function that cannot be recorded runs eagerly, with a single warning.
    *args, **others
        Refused, because arguments of the function belong into a call of the result.
    lanes : int or None
        As in `record`.
    instances : int
        Maximum number of programs for one key. At most this number of calls on different streams overlap.
    programs : int
        Maximum number of keys. A new key beyond this number closes the programs of the key that was used least recently.
    outputs : {"new", "reused"}
        Whether a call returns new arrays, or the program's own arrays. The program's arrays are valid until this thread calls the
        function again on the same stream.
    in_place : str or iterable of str
        Parameters whose arrays the program reads where they are, without a copy. Another array in such a place is another key.
    strict : bool
        Whether a function that cannot be recorded raises an error.

    Returns
    -------
    RecordedFunction

    Raises
    ------
    ArgumentError
        For a value that is no function, a generator function or a coroutine function. For arguments of the function, which belong
        into a call or to `record`. For values that an option cannot have.
    """
    if args or others:
        raise ArgumentError(
            "recorded takes a function and options, and was given arguments for the function: call the result of "
            "recorded(function) with them, or use record(function, *args)"
        )
    if lanes is not None and not 1 <= as_integer(lanes, 0) <= MOST_SIDE_SLOTS:
        raise ArgumentError(f"recorded(lanes={shown(lanes)}); it must be an integer from 1 to {MOST_SIDE_SLOTS}, or None")
    if outputs not in ("new", "reused"):
        raise ArgumentError(f"recorded(outputs={shown(outputs)}); it can be 'new' or 'reused'")
    counts = at_least(1, "recorded: instances", instances), at_least(1, "recorded: programs", programs)
    strictly = flag("recorded: strict", strict)

    def made(function: Any) -> Any:
        if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
            raise ArgumentError(f"recorded({shown(function)}): pass a function")
        inner = getattr(function, "__func__", function)
        for test, what in (
            (inspect.isgeneratorfunction, "a generator function"),
            (inspect.iscoroutinefunction, "a coroutine function"),
            (inspect.isasyncgenfunction, "an asynchronous generator function"),
        ):
            if test(inner) or test(getattr(type(inner), "__call__", None)):  # noqa: B004 - about the method
                raise ArgumentError(
                    f"recorded: {name_of_call(inner)} is {what}: pass a function that does the work and returns arrays"
                )
        places = _places(function, in_place)
        options = Options(function, name_of_call(function), lanes, *counts, outputs == "reused", strictly, places)
        return RecordedFunction(options)

    return made if function is None else made(function)
