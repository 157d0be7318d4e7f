"""Define recorded functions, which have programs per argument geometry."""

import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

from handlepool._util.arguments import flag
from handlepool._util.frames import frames_inside
from handlepool._util.names import kind_of
from handlepool._util.protocols import Wrapper
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import ArgumentError, CaptureError, PoolClosedError
from handlepool.order.places import open_order
from handlepool.order.stream_order import integration
from handlepool.pool.context import active, recordings, thread
from handlepool.pool.default import current_pool
from handlepool.pool.deferred import abandon, deferred
from handlepool.pool.internals import PoolInternals
from handlepool.recording.guards import VALUE
from handlepool.recording.hits import MISSED
from handlepool.recording.keys import Call, NotRecorded, Reader, text_of
from handlepool.recording.outputs import Results
from handlepool.recording.program import Program
from handlepool.recording.requests import request, takes
from handlepool.recording.tuning import LanesTuning
from handlepool.recording.update import copy_all
from handlepool.recording.variant_table import MANY_VALUES, RecordedStats, VariantTable
from handlepool.recording.variants import Options, Variant
from handlepool.regions.executor import ParallelStateExecutor
from handlepool.regions.future import StreamFuture, Task
from handlepool.regions.requests import Requests
from handlepool.tensors.layout import ArraySpec

_made: "weakref.WeakSet[RecordedFunction[..., Any]]" = weakref.WeakSet()
"""All recorded functions. A forked child abandons their programs."""

P = ParamSpec("P")
R = TypeVar("R")

MOST_REBOUND = 3
"""The maximum number of programs dropped because an array was rebound.

An array is rebound if a variable or attribute that the function reads is set to another array. After one more drop, the function
runs eagerly.
"""
MOST_LACKED = 3
"""The maximum number of recordings that may lack memory or side streams.

If a further recording lacks memory or side streams, its key runs eagerly.
"""
MOST_PENDING = 256
"""The maximum number of pending calls by `submit`.

A further call first waits for the oldest pending call.
"""
_PER_OBJECT = "_handlepool_recorded"
"""The attribute with the recorded functions of an object's methods."""


class RecordedFunction(Wrapper, Generic[P, R]):
    """A function with a pool of programs, made by `recorded`.

    A call takes the function's own arguments, and returns new arrays, which later work of the current stream may use. The first
    call of each geometry runs the function for real and records it. Any thread may call a recorded function, at any time.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.__wrapped__ = function = options.function
        functools.update_wrapper(self, function, updated=())
        self._takes_out = _has_parameter(function, "out")
        self._reader: Reader | None = None
        self._table = VariantTable()
        # The same dictionary as in the table. The reference saves each call the lookup of an attribute.
        self._hits = self._table.hits
        # Maps a pool to a mark, an object that stands for the call that records now. In a pool, one call of this function records
        # at a time. Meanwhile, other calls that would record run eagerly instead. A lock cannot serve here, because no lock may
        # be held while the user's function runs (guarantee 15). `setdefault` is atomic, so two calls cannot both set a mark. If
        # an interrupt ends the call, its `finally` removes the mark.
        self._under_way: dict[PoolInternals, object] = {}
        self._eager: str | None = None
        self._said = False
        self._rebound = self._unused = self._lacked = 0
        self._counts = {"recorded": 0, "eager": 0}
        self._executor: ParallelStateExecutor | None = None
        # The lock prevents two threads from making two executors.
        self._lock = threading.RLock()
        _made.add(self)

    def _after_fork(self) -> None:
        """Abandon the parent's programs in a forked child (guarantee 13).

        The child also gets a new lock, because a thread of the parent, which the child lacks, may have held the old lock.
        """
        abandon((self._table, self._executor, self._reader))
        self._lock, self._table, self._under_way = threading.RLock(), VariantTable(), {}
        self._hits = self._table.hits
        self._executor = self._reader = None

    def __repr__(self) -> str:
        return f"<recorded function {self._options.name}, {len(self._table)} keys>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the program for such arguments, or call the function.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function. In addition, ``out=`` may give arrays in the structure of the result, into which the call
            writes. But if the function itself has a parameter named ``out``, ``out=`` is that parameter.

        Returns
        -------
        object
            The value of the function, in new arrays.
        """
        if not kwargs:
            try:
                hits = self._hits.get(args[0].shape, ())  # type: ignore[attr-defined]
            # If there is no argument, or the first argument is no array, no hit is tried.
            except Exception:
                hits = ()
            for hit in hits:
                try:
                    found = hit(args)
                # If the user has closed the program, the call takes the long way, which makes a new program.
                except PoolClosedError:
                    break
                if found is not MISSED:
                    self._unused = 0
                    return found
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that no hit serves, by its key."""
        out = kwargs.pop("out", None) if kwargs and not self._takes_out else None
        pool = current_pool()
        # Inside a recording, the call runs the function itself, so that the function's work becomes a part of that recording.
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
            # If torch's current stream is being captured, the call runs the function itself, so that the capture gets its work.
            if theirs != LEGACY_STREAM and driver.is_capturing(theirs):
                return self._plain(pool, args, kwargs, out)
        # The table is read without the lock, because changes of the table replace or extend its lists in single steps.
        for variant in self._table.by_key.get(call.key, ()):
            if variant.pool is pool and variant.takes(call):
                guards = variant.guards
                if guards is None:
                    if variant.eager is not None:
                        return self._plain(pool, args, kwargs, out)
                elif guards.holds():
                    return self._served(variant, call, stream, args, kwargs, out)
        return self._missed(pool, call, stream, args, kwargs, out)

    def _served(
        self, variant: Variant, call: Call, stream: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> Any:
        """Serve a call by a program of the variant, if possible now."""
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
                self._table.keep_hit(variant, args)
            return found
        except PoolClosedError:
            if variant.pool.status.closed or not instance.program.closed:
                raise
        # `program` gave the program to the user, who has closed it. So the variant is dropped, and the call is recorded anew.
        self._table.drop(variant)
        return self._missed(variant.pool, call, stream, args, kwargs, out)

    def _plain(self, pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
        """Call the function itself, eagerly."""
        self._counts["eager"] += 1
        return self._into(pool, self._options.function(*args, **kwargs), out)

    def _into(self, pool: PoolInternals, value: object, out: object) -> Any:
        """Copy the arrays of a value into ``out``, unless that is None.

        Return the value that the call returns.
        """
        if out is None:
            return value
        driver = pool.driver
        results = Results(driver, self._options.name, driver.current_device(), value, out)
        copy_all(driver, results.copies)
        return results.value

    def _missed(
        self, pool: PoolInternals, call: Call, stream: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
    ) -> Any:
        """Serve a call for which the table seems to have no program."""
        variants = self._table.by_key.get(call.key, [])
        values: dict[str, int] = {}
        # The loop uses a copy of the list, because another thread may insert a variant meanwhile.
        for variant in [*variants]:
            if variant.pool is not pool or variant.guards is None:
                continue
            if not variant.takes(call):
                self._table.drop(variant)
                continue
            changed = variant.guards.changed()
            if not changed:
                return self._served(variant, call, stream, args, kwargs, out)
            if all(guard.kind == VALUE for guard in changed):
                if len(changed) == 1:
                    values[changed[0].path] = values.get(changed[0].path, 0) + 1
                continue
            self._table.drop(variant)
            self._rebound += 1
            if self._rebound > MOST_REBOUND:
                names = ", ".join(guard.path for guard in changed[:3] if guard.kind != VALUE)
                self._eager = (
                    f"the function was recorded {self._rebound} times, because {names} was bound to another array or object"
                )
                self._say(f"{self._eager}: write new values in place, for example by w[...] = new")
                self.clear()
        if self._eager is not None or not self._may_record(pool, call):
            return self._plain(pool, args, kwargs, out)
        me = object()
        try:
            # If another call is recording now, `setdefault` returns its mark, and this call runs eagerly instead of waiting.
            if self._under_way.setdefault(pool, me) is me:
                return self._into(pool, self._recorded(pool, call, args, kwargs, values), out)
        finally:
            if self._under_way.get(pool) is me:
                del self._under_way[pool]
        return self._plain(pool, args, kwargs, out)

    def _may_record(self, pool: PoolInternals, call: Call) -> bool:
        """Return whether to record the key of a call.

        In a region no key is recorded. If many programs were recorded that no call used later, a key is recorded only at its
        second call.
        """
        if thread.region is not None or (active and open_order(pool.driver, pool.current_device()) is not None):
            return False
        if self._unused < 2 * self._options.programs:
            return True
        return self._table.see(call.key) > 1

    def _recorded(
        self, pool: PoolInternals, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, int]
    ) -> Any:
        """Call the function for real and record it; return the call's value."""
        for name, count in values.items():
            if count == MANY_VALUES:
                self._warn(
                    f"was recorded for {count + 1} values of {name}, each in a program of its own: keep the value in an "
                    "array without axes"
                )
        for name in self._table.many_values(call):
            self._warn(
                f"was recorded for {MANY_VALUES} values of {name}, each in a program of its own: pass the value as an "
                "array without axes"
            )
        variant = Variant(self._options, pool, call)
        value = variant.record(args, kwargs, call)
        # The lack of memory or side streams may be temporary. So the first few such keys are not marked as eager, and a later
        # call tries to record again.
        if variant.lacking is not None:
            self._lacked += 1
            if self._lacked <= MOST_LACKED:
                self._counts["eager"] += 1
                return value
            variant.eager = variant.lacking
        self._unused += 1
        self._counts["recorded" if variant.eager is None else "eager"] += 1
        for each in self._table.insert(variant, self._options.programs):
            self._table.drop(each)
        if variant.eager is not None:
            self._say(variant.eager)
        return value

    def _grow(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
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

    def _say(self, why: str, cause: BaseException | None = None) -> None:
        """Warn once that calls run eagerly; with ``strict``, raise an error."""
        if self._options.strict:
            raise CaptureError(f"recorded({self._options.name}) cannot serve this call by a program: {why}") from cause
        if not self._said:
            self._said = True
            self._warn(f"runs eagerly: {why}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"recorded({self._options.name}) {text}", RuntimeWarning, stacklevel=frames_inside())

    # For the user

    def program(self, *args: P.args, **kwargs: P.kwargs) -> Program:
        """Return the program for such arguments; record it if it is missing.

        Use the program for `Program.explain`, `Program.draw` and `Program.tune`. Later calls of the function still use it.

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
            If no program can be recorded for such arguments.
        """
        pool = current_pool()
        for attempt in range(2):
            try:
                call = Reader(pool.driver, self._options.in_place).read(args, kwargs)
            except NotRecorded as why:
                raise CaptureError(f"{self._options.name} has no program for such arguments: {why}") from why
            for variant in self._table.by_key.get(call.key, ()):
                if variant.takes(call) and variant.guards is not None and not variant.guards.changed():
                    return variant.instances[0].program
                if variant.eager is not None:
                    raise CaptureError(f"{self._options.name} has no program for such arguments: {variant.eager}")
            if not attempt:
                self(*args, **kwargs)
        raise CaptureError(
            f"{self._options.name} has no program for such arguments: {self._eager or 'the call was not recorded'}"
        )

    def stats(self) -> RecordedStats:
        """Return the numbers of programs and calls, and the programs' memory.

        Returns
        -------
        RecordedStats
        """
        return self._table.stats(**self._counts)

    def explain(self) -> str:
        """Return a text that describes the programs of each key.

        Returns
        -------
        str
        """
        lines = [repr(self)]
        for variant in self._table:
            what = f"eager: {variant.eager}" if variant.eager else f"{len(variant.instances)} programs"
            lines.append(f"{text_of(variant.key)}: {what}")
            # The user may have closed the first program, or another thread may close it now.
            with suppress(PoolClosedError):
                if variant.instances:
                    lines += [f"    {line}" for line in str(variant.instances[0].program.explain()).splitlines()]
        if self._eager is not None:
            lines.append(f"runs eagerly: {self._eager}")
        return "\n".join(lines)

    def tune(self, lanes: Iterable[int] = (1, 2, 4, 8, 16), *, goal: str = "clock", seconds: float = 10.0) -> list[LanesTuning]:
        """Choose the best number of lanes for each key by measurements.

        `Program.tune` does this for a single program. Calls of the function do not wait for the measurement. Meanwhile they use
        another program of their key, or run eagerly.

        Parameters
        ----------
        lanes, goal, seconds
            As in `Program.tune`.

        Returns
        -------
        list of LanesTuning
            The result for each key that has programs.
        """
        tried = tuple(lanes) if isinstance(lanes, Iterator) else lanes
        found = [variant.tune(tried, goal, seconds) for variant in self._table]
        return [each for each in found if each is not None]

    def prewarm(self, *specs: object, tune: bool = True) -> None:
        """Record the function for later arguments, by calls with zeros.

        Parameters
        ----------
        *specs : ArraySpec or tuple
            For each spec, the function is called once. A tuple has the arguments of the call: an `ArraySpec` for each array, and
            any other value as it is. A spec that is no tuple is the call's only argument.
        tune : bool
            Whether to call `tune` afterwards. This has no effect if the function is recorded without lanes or with one lane.
        """
        tuned = flag("prewarm: tune", tune)
        driver = current_pool().driver
        for spec in specs:
            args = spec if isinstance(spec, tuple) else (spec,)
            self(*[_zeros(driver, each) for each in args])  # type: ignore[call-arg]
        if tuned and self._options.lanes not in (None, 1):
            self.tune()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> StreamFuture[R]:
        """Call the function on a separate stream, and return a future.

        The call starts after the work that the current stream has now, and after earlier calls of `submit` by the same client. A
        client is a thread, or a task of asyncio. Calls of several clients overlap on up to ``instances`` streams.

        If there is no program for the arguments yet, the function first runs in this thread and is recorded. Up to 256 calls may
        be pending on the GPU. A further call first waits for the oldest pending call.

        Parameters
        ----------
        *args, **kwargs
            As in a call. Arrays of NumPy are copied to the device through page-locked memory. If any argument is an array of
            NumPy, the results are arrays of NumPy. `ParallelStateExecutor` has options for both.

        Returns
        -------
        StreamFuture
            A future that can be awaited. The arrays of its ``result`` are ready for work of the current stream, or are on the
            host.
        """
        executor = self._executor
        if executor is None:
            # The attribute is read again under the lock, because another thread may have made the executor meanwhile.
            with self._lock:
                executor = self._executor = self._executor or ParallelStateExecutor(
                    self._options.instances, max_pending=MOST_PENDING, thread_name_prefix=self._options.name
                )
        return executor.submit(self, *args, **kwargs)

    def _known(self, args: tuple[Any, ...], stream: Any, begin: Callable[[], None]) -> Any:
        """Serve a call by a hit on ``stream``, or return `MISSED`.

        ``begin`` is called when the results are allocated, before the call's first copy.
        """
        shape = getattr(args[0], "shape", None) if args else None
        for attempt in range(2):
            try:
                for hit in self._hits.get(shape, ()):
                    found = hit(args, stream, begin)
                    if found is not MISSED:
                        self._unused = 0
                        return found
            # If the user has closed the program, the call takes the long way, which makes a new program.
            except PoolClosedError:
                break
            if attempt or not self._widen(args, stream):
                break
        return MISSED

    def _widen(self, args: tuple[Any, ...], stream: Any) -> bool:
        """Capture a further instance for ``stream``, if the call has a program.

        Return whether a hit may serve the call now.
        """
        reader, pool = self._reader, current_pool()
        if reader is None or reader.driver is not pool.driver or active:
            return False
        call = reader.read(args, {})
        for variant in self._table.by_key.get(call.key, ()):
            if variant.pool is pool and variant.takes(call) and variant.guards is not None and variant.guards.holds():
                made = self._grow(variant, args, {}, call) if variant.growable(stream) else None
                if made is not None:
                    made.move(stream)
                self._table.keep_hit(variant, args)
                return made is not None or not variant.growable(stream)
        return False

    def _request(
        self, pool: PoolInternals, requests: Requests, task: Callable[[], Task], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StreamFuture[R] | None:
        return request(self, pool, requests, task(), args, kwargs) if takes(pool.driver, args, kwargs) else None

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call the function if the key is new; return a list.

        The call records the key, and the list has the call's value. If the key is known or cannot be recorded, the function is
        not called, and the list is empty.
        """
        pool = current_pool()
        if pool.status.unusable or self._eager is not None:
            return []
        try:
            call = Reader(pool.driver, self._options.in_place).read(args, kwargs)
        except (NotRecorded, RecursionError):
            return []
        known = any(each.pool is pool for each in self._table.by_key.get(call.key, ()))
        return [] if known else [self(*args, **kwargs)]

    def clear(self) -> None:
        """Forget all programs.

        Each program is destroyed once the device has finished the program's last call. The next call of a key records it anew.
        """
        self._table.clear()
        deferred.run_all()

    # As a method

    def __get__(self, owner: object, kind: object = None) -> Any:
        """Return the recorded function for a method of ``owner``.

        The returned function is kept in ``owner``, has programs of its own, and lives as long as ``owner``.
        """
        if owner is None or not hasattr(type(self._options.function), "__get__"):
            return self
        space = getattr(owner, "__dict__", None)
        if not isinstance(space, dict):
            raise ArgumentError(
                f"recorded({self._options.name}): a {kind_of(owner)} has no __dict__, in which the programs of its methods are "
                "kept: add '__dict__' to __slots__ of the class, or record a function outside of the class"
            )
        own = space.get(_PER_OBJECT)
        if own is None:
            # If two threads come here at once, `setdefault` gives both the same object.
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
        """Let copies and pickles refer to the function by its name."""
        return self._options.name


def _after_fork() -> None:
    for function in [*_made]:
        function._after_fork()  # noqa: SLF001 - of the same module


os.register_at_fork(after_in_child=_after_fork)


class _PerObject:
    """The recorded functions of one object's methods.

    If the object is copied, the copy starts without recorded functions.
    """

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, RecordedFunction[..., Any]]] = {}

    def __reduce__(self) -> Any:
        return _PerObject, ()


def _inside_recording() -> bool:
    """Return whether this thread makes either call of a recording.

    These are the real call of the function, and its call under capture.
    """
    return thread.recording is not None or thread.rehearsal is not None or thread.launched is not None


def _has_parameter(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # A function written in C may have no signature.
        return False


def _zeros(driver: Any, value: Any) -> Any:
    if not isinstance(value, ArraySpec):
        return value
    array = driver.empty(value.shape, value.strides, value.dtype)
    array[...] = 0
    return array
