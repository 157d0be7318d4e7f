"""Queue NumPy's functions on host arrays, or run them at once.

A function is queued on the current stream if the shapes of its arguments determine the shape of its result. Such functions are
universal functions, reductions, indexing, and the functions with a rule in `handlepool.drivers.host.array_functions`. The queued
work lists the arrays that it reads and writes. A function that returns a view makes the view at once. Any other NumPy function
waits on the host for the work that writes its arguments, and then runs at once.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from handlepool._util.frames import place_of_call
from handlepool._util.names import kind_of
from handlepool._util.protocols import holds_values
from handlepool.drivers.host.array import (
    HostArray,
    Raw,
    check_type,
    keeping,
    owner_of,
    raw_view,
    setitem,
    view_of,
    work_of,
)
from handlepool.drivers.host.array_arguments import (
    ARRAYS,
    BARE,
    COMPARISONS,
    COPIED,
    IN_PLACE,
    INDEXING,
    OPERANDS,
    SEVERAL,
    TAKE_PLAIN,
    contracted,
    converted,
    dummy,
    hosts,
    ones,
    operands,
    raws,
    signature,
    taken,
    tried,
    walk,
)
from handlepool.drivers.host.memory import Memory, accesses, plain_reads, tell_plain
from handlepool.drivers.host.scheduler import NOTHING
from handlepool.drivers.host.streams import Device, Queue, StreamTable
from handlepool.drivers.operands import ASARRAY
from handlepool.drivers.protocol import BeforeUntracked
from handlepool.errors import ArrayTypeError, CaptureError, DeviceMismatchError, ForkedProcessError
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import Piece, piece

Rule = Callable[["ArrayWork", Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""A rule for a function: ``rule(work, function, args, kwargs, out)``.

``work`` is the `ArrayWork` that queues. The other arguments are the NumPy function, its arguments, and the value of ``out=``.
"""


class ArrayWork:
    """The operations on a driver's arrays; see `handlepool.drivers.host.array.Work`.

    Parameters
    ----------
    streams, memory
        The driver's streams, and its memory.
    strict : bool
        Whether to refuse the uses that CuPy refuses.
    rules : mapping
        The rule that queues or runs a NumPy function, by function.
    """

    def __init__(self, streams: StreamTable, memory: Memory, strict: bool, rules: "Mapping[Any, Rule]") -> None:
        self.strict = strict
        self._rules = rules
        self._streams = streams
        self._memory = memory
        self._process = os.getpid()
        # An open fork sets this function. It is called before work is queued: see `Driver.before_untracked_access`.
        self.before: BeforeUntracked | None = None

    # Memory

    def like(self, shape: Sequence[int], dtype: npt.DTypeLike, pattern: Raw | None = None) -> HostArray:
        """Return a new array on the current device.

        If ``pattern`` has the same shape, both arrays have the same order of axes in memory.
        """
        dtype = check_type(np.dtype(dtype))
        order = None
        if pattern is not None and pattern.shape == tuple(shape):
            steps = [abs(step) for step in pattern.strides]
            # The sort is stable, so that axes of equal strides stay in C order.
            order = sorted(range(len(steps)), key=lambda axis: -steps[axis])
        strides = [step * dtype.itemsize for step in dense_strides(shape, order)]
        return self._memory.empty(shape, strides, dtype)

    def like_all(self, result: object, known: dict[int, Any], copies: Sequence[Raw] = ()) -> Any:
        """Replace the NumPy arrays in ``result`` with new arrays of the driver.

        ``known`` maps the id of a NumPy array to the array that takes its place. ``copies`` are copies of arguments. If a
        result shares memory with one of ``copies``, the new array is read-only: in NumPy, a write to it changes the argument.
        """
        if id(result) in known:
            return known[id(result)]
        if isinstance(result, np.ndarray):
            made = self.like(result.shape, result.dtype, result)
            self.queue(partial(_copy_from, result), [made], [], "a copy to the device")
            if any(np.may_share_memory(result, copy) for copy in copies):
                raw = raw_view(made)[0].view()
                raw.flags.writeable = False
                return view_of(made, raw)
            return made
        if isinstance(result, (list, tuple)):
            entries = [self.like_all(entry, known, copies) for entry in result]
            return type(result)(*entries) if hasattr(result, "_fields") else type(result)(entries)
        return result

    # Order

    def queue(self, function: Callable[..., object], writes: Sequence[HostArray], reads: Sequence[Any], label: str) -> None:
        """Queue a function of raw arrays on the current stream."""
        queue = self._queue_for([*writes, *reads], label)
        if (watched := self._streams.thread.host_data) is not None:
            tell_plain(watched[1], reads, label, label in COPIED)
        written, read = [raw_view(array) for array in writes], [raw_view(array) for array in reads]
        if not all(raw.flags.writeable for raw, _ in written):
            raise ValueError(f"{label} would write to a read-only array; pass a writable array")
        raws = [raw for raw, _ in (*written, *read)]
        touched = [*accesses(written, writes=True), *accesses(read, writes=False)]
        # If the work is captured, each replay reads the values that NumPy's arrays have by then. So the host may change them, and
        # the race checker does not watch them.
        if self._streams.scheduler.order is not None:
            touched += plain_reads(reads) if queue.capture is None else []
        elif self.before is not None:
            self.before(queue.pointer, [_piece(raw) for raw, _ in read], [_piece(raw) for raw, _ in written])
        for report in self._streams.watchers[:]:
            report(label)
        self._streams.give(queue, lambda: function(*raws), touched, label)

    def finish(self, reads: Sequence[HostArray], writes: Sequence[HostArray], label: str) -> None:
        """Wait for queued work that must run before the host's accesses.

        The host will read ``reads`` and write ``writes``.

        Raises
        ------
        CaptureError
            If the current stream is captured, because captured work has not run.
        """
        queue = self._queue_for([*reads, *writes], label)
        self._refuse_capture(queue, label)
        scheduler = self._streams.scheduler
        touched = [
            *accesses([raw_view(array) for array in reads], writes=False),
            *accesses([raw_view(array) for array in writes], writes=True),
        ]
        # CuPy copies to the host in the order of the current stream. So the race checker counts the host's access as work of the
        # current stream.
        if scheduler.order is not None and touched:
            self._streams.give(queue, _nothing, touched, label)
            self._streams.wait_on_host(queue.tail, f"{queue!r}, whose values {label} needs")
        # These waits raise the failures of earlier work. The race checker does not count them as waits, because CuPy would wait
        # for the current stream alone.
        for operation in scheduler.conflicting(touched) or [NOTHING]:
            scheduler.wait(operation, f"{operation.label!r}, whose result {label} needs")

    def home(self, array: HostArray, label: str) -> AbstractContextManager[object]:
        """Make an array's device current in a ``with`` block, as CuPy does.

        Raises
        ------
        CaptureError
            If the current stream is captured.
        """
        if array.device == self._streams.thread.device or owner_of(array) is None:
            return nullcontext()
        self._refuse_capture(self._streams.current_queue(), label)
        return Device(self._streams, array.device)

    def _refuse_capture(self, queue: Queue, label: str) -> None:
        if queue.capture is not None:
            what = f"{label} at {place_of_call()} (a wait for the values of a host array)"
            queue.capture.spoil(what)
            raise CaptureError(
                f"{what} is impossible while {queue!r} is captured, because captured work has not run. Under a capture, call "
                "only functions that docs/host-arrays.md lists as queued, and ask for values after the replay"
            )

    def read_unordered(self, array: HostArray) -> Raw | None:
        """Return a copy of an array's elements for display, or None.

        Return None if the current stream is captured. The call has no other effect: it raises no failure of queued work, and it
        does not count as an access or a wait for the race checker.
        """
        # In a forked child no worker runs the queued work, so a wait for that work would never end.
        if os.getpid() != self._process or self._streams.current_queue().capture is not None:
            return None
        raw, block = raw_view(array)
        for operation in self._streams.scheduler.conflicting(accesses([(raw, block)], writes=False)):
            self._streams.scheduler.reach(operation, f"{operation.label!r}, whose result repr() shows")
        return raw.copy(order="K")

    def check(self, array: HostArray, label: str) -> None:
        """Raise for an array of another driver.

        A wait in this driver does not wait for work of another driver.
        """
        if work_of(array) is not self:
            raise ArrayTypeError(f"{label} was given an array y of another host driver: pass a copy, {ASARRAY}(y.get())")

    def _queue_for(self, arrays: Iterable[Any], label: str) -> Queue:
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"{label}: the array was made before os.fork, and its work runs in the parent. Copy the array with .get() "
                "before the fork, or start the child with multiprocessing.get_context('spawn')"
            )
        device = self._streams.thread.device
        for array in arrays:
            if isinstance(array, HostArray):
                self.check(array, label)
                if array.device != device and owner_of(array) is not None:
                    raise DeviceMismatchError(
                        f"{label}: an array of device {array.device} is used while device {device} is current: make the array's "
                        f"device current, or copy the array"
                    )
        return self._streams.current_queue()

    # NumPy's protocols

    def ufunc(self, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a universal function, or a method of such a function."""
        if any(hasattr(x, "__array_ufunc__") and not isinstance(x, (HostArray, np.ndarray, np.generic)) for x in inputs):
            # The class of another library's array may handle host arrays, so NumPy asks that class next.
            return NotImplemented
        kwargs = dict(kwargs)
        outs = kwargs.pop("out", None)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        self._check(
            # NumPy turns a scalar operand of a comparison into an array without axes. So the strict check must not see such an
            # array.
            name,
            [x for x in (*inputs, *(outs or ())) if not (ufunc in COMPARISONS and isinstance(x, np.ndarray) and not x.ndim)],
        )
        self.check_lists(name, inputs)
        inputs = converted(inputs)
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        out = outs[0] if outs else None
        if outs is not None and any(not isinstance(out, HostArray) for out in outs):
            return self.run_now(function, inputs, {**kwargs, "out": outs if method == "__call__" else out}, name, outs)
        if method == "__call__" and ufunc.signature is None:
            return self._elementwise(function, inputs, kwargs, outs, name)
        if method == "reduce":
            return self.reduced(function, inputs[0], {"axis": 0, **kwargs}, out, name)
        if method in ("accumulate", "outer"):
            shape = [extent for x in inputs for extent in np.shape(raws(x))]
            with np.errstate(all="ignore"):
                kind = function(*map(ones, inputs), **kwargs).dtype
                if wanted := tried(out):
                    function(*map(ones, inputs), **kwargs, **wanted)
            return self.made(function, inputs, kwargs, np.broadcast_to(np.empty((), kind), shape), out, name)
        if method == "at" and isinstance(inputs[0], HostArray):
            target, index, *values = inputs
            index = taken(index)
            target_now, index_now, *values_now = raws([target, index, *values])
            return self.queue(lambda *_: function(target_now, index_now, *values_now), [target], operands((index, *values)), name)
        if ufunc is np.matmul and method == "__call__" and not kwargs:
            return self.made(np.matmul, inputs, {}, contracted(np.matmul, *map(dummy, inputs)), out, name)
        if outs is not None:
            kwargs["out"] = outs if method == "__call__" else out
        return self.run_now(function, inputs, kwargs, name, outs or ())

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a NumPy function, or wait for its inputs and run it."""
        name = INDEXING.get(function) or function.__name__
        if function not in TAKE_PLAIN:
            self._check(name, (*args[2 if function is setitem else 0 :], *kwargs.values()))
        args = converted(args)
        kwargs = {key: value if key == "out" else converted(value) for key, value in kwargs.items()}
        rule = self._rules.get(function)
        if rule is not None:
            return rule(self, function, *((args, kwargs, None) if function in BARE else self._settled(function, args, kwargs)))
        return self.run_now(
            function, args, kwargs, name, (args[:1] if function in IN_PLACE else (), _out(function, args, kwargs))
        )

    def _settled(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments without ``out`` for a rule, and ``out`` apart.

        If the values of an array decide a shape, a NumPy copy of the values takes the array's
        place.
        """
        bound = signature(function).bind(*args, **kwargs)
        out = bound.arguments.pop("out", None)
        for name, value in bound.arguments.items() if self.strict else ():
            if name in OPERANDS:
                self.check_lists(function.__name__, value if name in SEVERAL else (value,))
        for name, value in bound.arguments.items():
            if name not in ARRAYS and (arrays := hosts(value)):
                self.finish(arrays, (), f"{function.__name__}, which needs the values of {name},")
                bound.arguments[name] = raws(value, {id(array): raw_view(array)[0].copy() for array in arrays})
            elif name == "indices" or (name not in ARRAYS and isinstance(value, np.ndarray)):
                bound.arguments[name] = taken(value)
        return bound.args, bound.kwargs, out

    def _check(self, name: str, arguments: Iterable[Any]) -> None:
        for argument in walk(arguments):
            if isinstance(argument, np.ma.MaskedArray):
                raise ArrayTypeError(
                    f"{name} was given a masked array together with a host array, and host arrays have no masks: fill the "
                    "masked array first"
                )
            if self.strict and holds_values(argument) and not isinstance(argument, HostArray):
                raise ArrayTypeError(
                    f"{name} was given a {kind_of(argument)} together with a host array, which CuPy refuses: convert the "
                    f"{kind_of(argument)} with {ASARRAY}, or the host array with .get()"
                )

    def check_lists(self, name: str, values: Iterable[Any]) -> None:
        """Refuse lists in the place of an array, as CuPy does.

        NumPy would make an array of such a list.
        """
        for value in values if self.strict else ():
            if isinstance(value, Collection) and not (holds_values(value) or isinstance(value, (np.generic, str, bytes))):
                raise ArrayTypeError(
                    f"{name} was given a {kind_of(value)} together with a host array, which CuPy refuses: convert the values "
                    f"with {ASARRAY}"
                )

    # Queued

    def made(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pattern: Raw,
        out: object,
        name: str,
        takes_out: bool = True,
    ) -> HostArray:
        """Queue a function whose result has the shape and type of ``pattern``.

        If the function takes ``out=``, it gets a new array of the type of ``out``, because many functions add up in that type.
        """
        takes_out = takes_out and out is not None
        if out is not None and not isinstance(out, HostArray):
            return self.run_now(function, args, {**kwargs, "out": out}, name, (out,))
        if out is None:
            out = self.like(pattern.shape, pattern.dtype, pattern if pattern.size else None)
        elif pattern.shape != out.shape:
            raise ValueError(f"{name} makes an array of shape {pattern.shape}, and out= has shape {out.shape}; pass another out=")
        elif not np.can_cast(pattern.dtype, out.dtype, rule := kwargs.get("casting", "same_kind")):
            raise TypeError(
                f"{name} makes an array of type {pattern.dtype}, and casting={rule!r} forbids to write this type to out= of type "
                f"{out.dtype}; pass out= of another type, or another casting"
            )
        arguments = (raws(args), raws(kwargs))

        def run(to: Raw, *_: Raw) -> None:
            # ``to`` may overlap the function's inputs. So the function writes to a new array, which is then copied.
            own = {"out": np.empty_like(to)} if takes_out else {}
            with np.errstate(all="ignore"):
                np.copyto(to, function(*arguments[0], **arguments[1], **own), "unsafe")

        self.queue(run, [out], operands((args, kwargs)), name)
        return out

    def _elementwise(
        self, ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[HostArray, ...] | None, name: str
    ) -> Any:
        where = kwargs.get("where", True)
        shape = np.broadcast_shapes(*(np.shape(raws(x)) for x in (*inputs, where)))
        probes = [ones(x) for x in inputs]
        tried = {key: value for key, value in kwargs.items() if key != "where"}
        with np.errstate(all="ignore"):
            if outs is None:
                found = ufunc(*probes, **tried)
                # CuPy's results are contiguous for any layout of the operands, so these results are contiguous, too.
                made = [self.like(shape, kind.dtype, None) for kind in (found if isinstance(found, tuple) else (found,))]
                outs = tuple(made)
            else:
                ufunc(*probes, out=tuple(ones(out) for out in outs), **tried)
                for out in outs:
                    if np.broadcast_shapes(shape, out.shape) != out.shape:
                        raise ValueError(
                            f"{name} makes an array of shape {shape}, and out= has shape {out.shape}; pass another out="
                        )
        arguments, options = raws(inputs), raws(kwargs)

        def run(*views: Raw) -> None:
            # A GPU gives no warnings for floating-point errors, so NumPy's warnings are off.
            with np.errstate(all="ignore"):
                ufunc(*arguments, out=views[: ufunc.nout], **options)

        self.queue(run, outs, operands((inputs, kwargs)), name)
        return outs[0] if ufunc.nout == 1 else outs

    def reduced(
        self, function: Callable[..., Any], array: DeviceArray, options: dict[str, Any], out: object, name: str
    ) -> HostArray:
        """Queue a reduction over some or all axes."""
        raw = raw_view(array)[0] if isinstance(array, HostArray) else np.asarray(array)
        axis = options.get("axis")
        axes = range(raw.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        gone = {int(place) % raw.ndim if raw.ndim else 0 for place in axes}
        with np.errstate(all="ignore"):
            small = {key: ones(options[key]) for key in options if key not in ("ddof", "correction")}
            kind = np.asarray(function(ones(array), **small))
            if wanted := tried(out):
                function(ones(array), **small, **wanted)
        # If the trial result has all axes, the function keeps axes. So this method need not read keepdims=, which may have any
        # value that NumPy takes.
        keep = kind.ndim == raw.ndim
        shape = tuple(1 if place in gone else extent for place, extent in enumerate(raw.shape) if keep or place not in gone)
        pattern = np.broadcast_to(np.empty((), kind.dtype), shape)
        return self.made(function, (array,), options, pattern, out, name)

    # Not queued

    def viewed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return views if the function makes views; queue the function if not."""
        found = function(*raws(args), **raws(kwargs))
        # NumPy returns a scalar for an element of an array without axes.
        if isinstance(found, np.generic):
            found = np.asarray(found)
        sources = [(array, raw_view(array)[0]) for array in operands((args, kwargs))]
        single = isinstance(found, np.ndarray)
        views = [_view(result, sources) for result in ([found] if single else found)]
        if all(view is not None for view in views):
            return views[0] if single else type(found)(views)
        if single:
            return self.made(function, args, kwargs, found, None, function.__name__)
        return self.run_now(function, args, kwargs, function.__name__, ())

    def run_now(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, writes: object
    ) -> Any:
        """Wait for queued work on the arguments, then call ``function``.

        The function gets the memory of the arrays that it writes, and copies of all other arrays. So if it keeps an argument or
        passes an argument on, later work does not change the values of that argument.
        """
        written = hosts(writes)
        sources = hosts((args, kwargs, written))
        self.finish(sources, written, name)
        known: dict[int, Any] = {id(array): array for array in operands(writes) if isinstance(array, np.ndarray)}
        views = {id(array): raw_view(array)[0].copy(order="K") for array in sources}
        copies = [view for key, view in views.items() if all(key != id(array) for array in written)]
        views |= {id(array): keeping(array) for array in written}
        known |= {id(views[id(array)]): array for array in written}
        found = function(*raws(args, views), **raws(kwargs, views))
        return self.like_all(found, known, copies)


def _view(result: Any, sources: list[tuple[Any, Raw]]) -> Any:
    """Return ``result`` as a view of the source whose memory it shares.

    If ``result`` shares memory with no source, return None.
    """
    for source, raw in sources:
        if result is raw:
            return source
        if np.may_share_memory(result, raw) or not result.size:
            return view_of(source, result) if isinstance(source, HostArray) else result
    return None


def _out(function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return signature(function).bind(*args, **kwargs).arguments.get("out")
    except (TypeError, ValueError):
        # The function has no signature, or its signature does not fit the arguments. In the second case the function itself will
        # raise.
        return kwargs.get("out")


def _nothing() -> None:
    pass


def _piece(raw: Raw) -> Piece:
    return piece(raw.__array_interface__["data"][0], raw.shape, raw.strides, raw.itemsize)


def _copy_from(values: Raw, to: Raw) -> None:
    np.copyto(to, values)
