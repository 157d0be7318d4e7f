"""What NumPy's functions do with host arrays.

A function whose result's shape follows from the shapes of its arguments is queued on the current stream, with its reads and
writes: universal functions, reductions, indexing, and the table at the end of this module. Views are made at once. Whatever else
NumPy has waits on the host for those who write its arguments, runs at once, and is right.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from handlepool.drivers.host.array import HostArray, Raw, getitem, keeping, owner_of, raw_view, setitem
from handlepool.drivers.host.memory import Memory, accesses, plain_reads
from handlepool.drivers.host.race_checker import caller
from handlepool.drivers.host.streams import Queue, StreamTable
from handlepool.errors import ArrayTypeError, CaptureError, DeviceMismatchError, ForkedProcessError
from handlepool.tensors.inference import dense_strides

Rule = Callable[["ArrayWork", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

KINDS = "biufcV"
"""The kinds of types that memory of a GPU may have; ml_dtypes' are of the last."""


class ArrayWork:
    """What is done with a driver's arrays, as `handlepool.drivers.host.array.Work`.

    Parameters
    ----------
    streams, memory
        The driver's.
    strict : bool
        Whether to refuse what CuPy refuses.
    """

    def __init__(self, streams: StreamTable, memory: Memory, strict: bool) -> None:
        self.strict = strict
        self._streams = streams
        self._memory = memory
        self._process = os.getpid()

    # Memory

    def like(self, shape: Sequence[int], dtype: Any, pattern: Raw | None = None) -> HostArray:
        """Return a new array on the current device, in the order of axes of another one of that shape."""
        dtype = check_type(np.dtype(dtype))
        order = None
        if pattern is not None and pattern.shape == tuple(shape):
            steps = [abs(step) for step in pattern.strides]
            order = sorted(range(len(steps)), key=lambda axis: -steps[axis])  # stable, so that C order stays
        strides = [step * dtype.itemsize for step in dense_strides(shape, order)]
        return self._memory.empty(shape, strides, dtype)

    def like_all(self, result: Any) -> Any:
        """NumPy's arrays in a result as arrays of the driver's."""
        if isinstance(result, np.ndarray):
            made = self.like(result.shape, result.dtype, result)
            self.queue(partial(_copy_from, result), [made], [], "a copy to the device")
            return made
        if type(result) in (list, tuple):
            return type(result)(map(self.like_all, result))
        if isinstance(result, tuple):  # with names
            return type(result)(*map(self.like_all, result))
        return result

    # Order

    def queue(self, function: Callable[..., object], writes: Sequence[HostArray], reads: Sequence[Any], label: str) -> None:
        """Queue a function of raw arrays on the current stream."""
        queue = self._queue_for([*writes, *reads], label)
        written, read = [raw_view(array) for array in writes], [raw_view(array) for array in reads]
        raws = [raw for raw, _ in (*written, *read)]
        touched = [*accesses(written, writes=True), *accesses(read, writes=False)]
        if self._streams.scheduler.order is not None:
            touched += plain_reads(reads)
        self._streams.give(queue, lambda: function(*raws), touched, label)

    def finish(self, reads: Sequence[HostArray], writes: Sequence[HostArray], label: str) -> None:
        """Wait on the host for what may not run after a read, or a write, by the host.

        Raises
        ------
        CaptureError
            While the current stream is captured: nothing that was recorded has run.
        """
        queue = self._queue_for([*reads, *writes], label)
        if queue.capture is not None:
            what = f"{label} at {caller()}, which waits for the values of a host array,"
            queue.capture.spoil(what)
            raise CaptureError(
                f"{what} while {queue!r} is captured: what is captured has not run. Keep to arrays there, and ask for values "
                f"after the replay"
            )
        scheduler = self._streams.scheduler
        touched = [
            *accesses([raw_view(array) for array in reads], writes=False),
            *accesses([raw_view(array) for array in writes], writes=True),
        ]
        if scheduler.order is not None and touched:  # CuPy's copies to the host are in the order of the current stream
            self._streams.give(queue, _nothing, touched, label)
        for operation in scheduler.conflicting(touched):
            self._streams.wait_on_host(operation, f"{operation.label!r}, whose result {label} needs")

    def _queue_for(self, arrays: Iterable[Any], label: str) -> Queue:
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"{label}: the array was made before os.fork, and the work on it is the parent's: copy what is needed with "
                f".get() before the fork, or start the child with multiprocessing.get_context('spawn')"
            )
        thread = self._streams.thread
        for array in arrays:
            owner = owner_of(array)
            if owner is not None and owner.block.device != thread.device:
                raise DeviceMismatchError(
                    f"{label}: an array of device {owner.block.device} is used while device {thread.device} is current: make its "
                    f"device current, or copy it"
                )
        return self._streams.resolve(thread.current[thread.device].ptr)

    # NumPy's protocols

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a universal function, or one of its methods."""
        kwargs = dict(kwargs)
        outs = kwargs.pop("out", None)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        self._check(name, (*inputs, *(outs or ())))
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        if outs is not None and any(not isinstance(out, HostArray) for out in outs):
            return self.run_now(function, inputs, {**kwargs, "out": outs}, name, ())
        if method == "__call__" and ufunc.signature is None:
            return self._elementwise(function, inputs, kwargs, outs, name)
        if method == "reduce":
            bound = {"axis": 0, **dict(zip(("axis", "dtype"), inputs[1:], strict=False)), **kwargs}
            return self.reduced(function, inputs[0], bound, outs[0] if outs else None, name)
        if ufunc is np.matmul and method == "__call__" and not kwargs:
            return self.made(
                np.matmul, inputs, {}, _contracted(_dummy(inputs[0]), _dummy(inputs[1]), -2), outs[0] if outs else None, name
            )
        if outs is not None:
            kwargs["out"] = outs if method == "__call__" else outs[0]
        return self.run_now(function, inputs, kwargs, name, inputs[:1] if method == "at" else outs or ())

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a function of NumPy's, or run it after what it needs."""
        name = function.__name__.strip("_")
        self._check(name, (*args, *kwargs.values()))
        rule = RULES.get(function)
        if rule is not None:
            return rule(self, function, args, kwargs)
        out = kwargs.get("out")
        first = args[:1] if function in IN_PLACE else ()
        return self.run_now(function, args, kwargs, name, (*first, *(out if isinstance(out, tuple) else (out,))))

    def _check(self, name: str, arguments: Iterable[Any]) -> None:
        if self.strict:
            for argument in walk(arguments):
                if isinstance(argument, np.ndarray) and argument.ndim:
                    raise ArrayTypeError(
                        f"{name} was given a numpy.ndarray beside a host array, which CuPy refuses: make it one with asarray, or "
                        f"the other one NumPy's with .get()"
                    )

    # Queued

    def made(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pattern: Raw, out: Any, name: str
    ) -> HostArray:
        """Queue a function whose result has the shape and type of a pattern."""
        if out is not None and not isinstance(out, HostArray):
            return self.run_now(function, args, {**kwargs, "out": out}, name, ())
        if out is None:
            out = self.like(pattern.shape, pattern.dtype, pattern if pattern.size else None)
        elif np.broadcast_shapes(pattern.shape, out.shape) != out.shape:
            raise ValueError(f"{name} makes an array of shape {pattern.shape}, which out= of shape {out.shape} cannot hold")
        arguments = (raws(args), raws(kwargs))
        reads = operands((args, kwargs))

        def run(to: Raw, *_: Raw) -> None:
            with np.errstate(all="ignore"):
                np.copyto(to, function(*arguments[0], **arguments[1]), "unsafe")

        self.queue(run, [out], reads, name)
        return out

    def _elementwise(
        self, ufunc: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[HostArray, ...] | None, name: str
    ) -> Any:
        where = kwargs.get("where", True)
        shape = np.broadcast_shapes(*(np.shape(raw_view(x)[0]) for x in (*inputs, where)))
        probes = [_ones(x) for x in inputs]
        tried = {key: value for key, value in kwargs.items() if key != "where"}
        with np.errstate(all="ignore"):
            if outs is None:
                found = ufunc(*probes, **tried)
                pattern = next((raw_view(x)[0] for x in inputs if getattr(x, "shape", None) == shape), None)
                made = [self.like(shape, kind.dtype, pattern) for kind in (found if isinstance(found, tuple) else (found,))]
                outs = tuple(made)
            else:
                ufunc(*probes, out=tuple(_ones(out) for out in outs), **tried)
                for out in outs:
                    if np.broadcast_shapes(shape, out.shape) != out.shape:
                        raise ValueError(f"{name} makes an array of shape {shape}, which out= of shape {out.shape} cannot hold")
        arguments, options = raws(inputs), raws(kwargs)

        def run(*views: Raw) -> None:
            with np.errstate(all="ignore"):  # as on a GPU, which warns of nothing
                ufunc(*arguments, out=views[: ufunc.nout], **options)

        self.queue(run, outs, operands((inputs, kwargs)), name)
        return outs[0] if ufunc.nout == 1 else outs

    def reduced(self, function: Callable[..., Any], array: Any, options: dict[str, Any], out: Any, name: str) -> HostArray:
        """Queue a reduction over some axes, or all."""
        raw = raw_view(array)[0] if isinstance(array, HostArray) else np.asarray(array)
        axis = options.get("axis")
        axes = range(raw.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        gone = {int(place) % raw.ndim if raw.ndim else 0 for place in axes}
        keep = bool(options.get("keepdims") is True)
        shape = tuple(1 if place in gone else extent for place, extent in enumerate(raw.shape) if keep or place not in gone)
        with np.errstate(all="ignore"):
            kind = function(_ones(array), **{key: _ones(value) for key, value in options.items()})
        pattern = np.broadcast_to(np.empty((), np.asarray(kind).dtype), shape)
        return self.made(function, (array,), options, pattern, out, name)

    # Not queued

    def viewed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return views where the function gives views, and copies, queued, where it does not."""
        found = function(*raws(args), **raws(kwargs))
        sources = [(array, raw_view(array)[0]) for array in hosts((args, kwargs))]
        if isinstance(found, (list, tuple)):
            return type(found)([self._view(result, sources) for result in found])
        view = self._view(found, sources)
        return self.made(function, args, kwargs, found, None, function.__name__) if isinstance(view, np.ndarray) else view

    def _view(self, result: Any, sources: list[tuple[HostArray, Raw]]) -> Any:
        """Return a result as a view of the array whose memory it is, or as it is."""
        if isinstance(result, np.ndarray):
            for source, raw in sources:
                if result is raw:
                    return source
                if np.may_share_memory(result, raw):
                    return HostArray(result, owner_of(source), self)
        return result

    def run_now(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, writes: Any) -> Any:
        """Run a function of NumPy arrays, after what the arrays are waiting for."""
        written = [array for array in writes if isinstance(array, HostArray)]
        sources = hosts((args, kwargs))
        self.finish(sources, written, name)
        views = {id(array): keeping(array) for array in sources}
        found = function(*raws(args, views), **raws(kwargs, views))
        known = [(array, views[id(array)]) for array in sources]
        if type(found) in (list, tuple):
            found = type(found)([self._view(result, known) for result in found])
        return self.like_all(self._view(found, known))


def check_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Raise `ArrayTypeError` for a type that memory of a GPU cannot have: objects and strings."""
    if dtype.hasobject or (dtype.kind not in KINDS and dtype.type.__module__.partition(".")[0] == "numpy"):
        raise ArrayTypeError(f"no array of {dtype} can be in device memory; it takes numbers")
    return dtype


def _nothing() -> None:
    pass


def _copy_from(values: Raw, to: Raw) -> None:
    np.copyto(to, values)


# Arguments


def walk(value: Any) -> Iterator[Any]:
    """Return what is in lists, tuples and dictionaries, however deep."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, map)) and not hasattr(value, "__next__"):
        yield value
        return
    for entry in value:
        yield from walk(entry)


def hosts(value: Any) -> list[HostArray]:
    """Return the host arrays among arguments, each once."""
    return list({id(array): array for array in walk(value) if isinstance(array, HostArray)}.values())


def operands(value: Any) -> list[Any]:
    """Return the host arrays and NumPy's own among arguments, each once."""
    return list({id(array): array for array in walk(value) if isinstance(array, (HostArray, np.ndarray))}.values())


def raws(value: Any, views: dict[int, Raw] | None = None) -> Any:
    """Arguments with NumPy's arrays in place of host arrays: raw ones, or the views given by id."""
    if isinstance(value, HostArray):
        return raw_view(value)[0] if views is None else views[id(value)]
    if type(value) in (list, tuple):
        return type(value)(raws(entry, views) for entry in value)
    if isinstance(value, dict):
        return {key: raws(entry, views) for key, entry in value.items()}
    return value


def _ones(value: Any) -> Any:
    """Return an argument in small: what it is to a function that looks at types alone."""
    if isinstance(value, (HostArray, np.ndarray)):
        return np.ones([min(extent, 1) for extent in value.shape], value.dtype)
    if isinstance(value, (list, tuple)) and not isinstance(value, str) and value and hosts(value):
        return np.ones([1] * np.ndim(raws(value)), np.result_type(*raws(value)))
    return value


def _dummy(value: Any) -> Any:
    """Return an argument without memory: of its shape and type, all elements one."""
    if isinstance(value, (HostArray, np.ndarray)):
        return np.broadcast_to(np.ones((), value.dtype), value.shape)
    if type(value) in (list, tuple):
        return type(value)(map(_dummy, value))
    return value


# Rules


def _contracted(a: Any, b: Any, axis: int) -> Raw:
    """Return the shape and type of a product, not computed; ``axis`` is the one of the second array that is summed over."""
    a, b = np.asarray(a), np.asarray(b)
    if not (a.ndim and b.ndim):
        return np.multiply(a, b)
    inner = b.shape[axis if b.ndim > 1 else 0]
    if a.shape[-1] != inner:
        raise ValueError(f"a product of arrays of shape {a.shape} and {b.shape}: {a.shape[-1]} is not {inner}")
    index = [slice(None)] * b.ndim
    index[axis if b.ndim > 1 else 0] = slice(0, 1)
    short = (a[..., :1], b[tuple(index)])
    return np.matmul(*short) if axis == -2 and b.ndim != 1 and a.ndim != 1 else np.dot(*short)


def _views(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return work.viewed(function, args, kwargs)


def _metadata(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*raws(args), **raws(kwargs))


def _structural(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what costs about as much as its result: it is tried on arrays without memory to know what that is."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    with np.errstate(all="ignore"):
        pattern = function(*_dummy(args), **_dummy(kwargs))
    if not isinstance(pattern, np.ndarray):
        pattern = np.asarray(pattern)
    return work.made(function, args, kwargs, pattern, out, function.__name__)


def _elementwise(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    if function is np.where and len(args) + len(kwargs) != 3:
        return work.run_now(function, args, kwargs, "where", ())
    arrays = [value for value in (*args, *kwargs.values()) if isinstance(value, (HostArray, np.ndarray))]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    with np.errstate(all="ignore"):
        kind = np.asarray(function(*map(_ones, args), **{key: _ones(value) for key, value in kwargs.items()})).dtype
    return work.made(function, args, kwargs, np.broadcast_to(np.empty((), kind), shape), out, function.__name__)


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _reductions(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = dict(_signature(function).bind(*args, **kwargs).arguments)
    array = options.pop("a")
    return work.reduced(function, array, options, options.pop("out", None), function.__name__)


def _products(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _signature(function).bind(*args, **kwargs).arguments if function is np.dot else dict(zip("ab", args, strict=False))
    a, b = bound["a"], bound["b"]
    return work.made(function, (a, b), {}, _contracted(_dummy(a), _dummy(b), -2), bound.get("out", kwargs.get("out")), "dot")


def _einsum(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    if not (args and isinstance(args[0], str)) or "." in args[0]:
        return work.run_now(np.einsum, args, {**kwargs, **({} if out is None else {"out": out})}, "einsum", (out,))
    left, arrow, right = args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    extents: dict[str, int] = {}
    for term, operand in zip(terms, args[1:], strict=True):
        for letter, extent in zip(term, np.shape(raw_view(operand)[0]), strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    if not arrow:
        right = "".join(sorted(letter for letter in extents if left.count(letter) == 1))
    kind = np.einsum(args[0], *map(_ones, args[1:]), **kwargs).dtype
    pattern = np.broadcast_to(np.empty((), kind), [extents[letter] for letter in right])
    return work.made(np.einsum, args, kwargs, pattern, out, "einsum")


def _copied(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _signature(function).bind(*args, **kwargs).arguments
    array, order = bound["a"], bound.get("order", "K")
    raw = raw_view(array)[0]
    if order == "F" or (order == "A" and raw.flags.fnc):
        pattern = np.broadcast_to(np.empty((), raw.dtype), raw.shape[::-1]).T
        pattern = np.empty(raw.shape, raw.dtype, "F")
    else:
        pattern = raw if order == "K" else np.broadcast_to(np.empty((), raw.dtype), raw.shape)
    made = work.like(raw.shape, raw.dtype, pattern)
    work.queue(np.copyto, [made], [array], "copy")
    return made


def _filled(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    like, *rest = args
    found = function(_dummy(like), *rest, **{key: value for key, value in kwargs.items() if key != "order"})
    pattern = raw_view(like)[0] if kwargs.get("order", "K") in ("K", "A") else None
    made = work.like(found.shape, found.dtype, pattern)
    value = 0 if name == "zeros_like" else 1 if name == "ones_like" else rest[0] if rest else kwargs.get("fill_value")
    if name != "empty_like":
        setting = partial(_set, raws(value))
        work.queue(setting, [made], hosts((value,)), name)
    return made


def _set(value: Any, to: Raw, *_: Raw) -> None:
    to[...] = value


def _copyto(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _signature(function).bind(*args, **kwargs).arguments
    target = bound.pop("dst")
    if not isinstance(target, HostArray):
        work.run_now(np.copyto, args, kwargs, "copyto", ())
        return
    np.copyto(_ones(target), **{key: _ones(value) for key, value in bound.items()})
    np.broadcast_shapes(target.shape, np.shape(raw_view(bound["src"])[0]))
    options = raws(bound)
    work.queue(lambda to, *_: np.copyto(to, **options), [target], operands(bound), "copyto")


def _is_basic(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(
        entry is None
        or entry is Ellipsis
        or (isinstance(entry, (int, np.integer, slice)) and not isinstance(entry, (bool, np.bool_)))
        for entry in entries
    )


def _is_mask(index: Any) -> bool:
    """Whether the result's shape follows from values of the index that are not there yet."""
    return any(isinstance(entry, HostArray) and entry.dtype == bool for entry in walk(index))


def _plain_index(index: Any) -> Any:
    """Return an index of the same shape that is in bounds."""
    if isinstance(index, HostArray):
        return np.zeros(index.shape, index.dtype)
    return tuple(map(_plain_index, index)) if isinstance(index, tuple) else index


def _gets(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    array, index = args
    if not isinstance(array, HostArray):
        return work.run_now(function, args, kwargs, "an index", ())
    if _is_basic(index):
        found = raw_view(array)[0][index if isinstance(index, tuple) else (index, ...)]
        return HostArray(found if isinstance(found, np.ndarray) else np.asarray(found), owner_of(array), work)
    if _is_mask(index):
        return work.run_now(function, args, kwargs, "a mask as an index", ())
    return work.made(getitem, args, {}, np.asarray(_dummy(array)[_plain_index(index)]), None, "an index")


def _sets(work: ArrayWork, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    array, index, values = args
    if not _is_mask(index):
        place = _dummy(array)[_plain_index(index)]
        np.broadcast_shapes(np.shape(place), np.shape(raws(values)))
        if np.broadcast_shapes(np.shape(place), _stripped(np.shape(raws(values)))) != np.shape(place):
            raise ValueError(f"values of shape {np.shape(raws(values))} do not fit into a place of shape {np.shape(place)}")
    index_now, values_now = raws(index), raws(values)

    def run(to: Raw, *_: Raw) -> None:
        to[index_now] = values_now

    work.queue(run, [array], operands((index, values)), "an assignment")


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _named(names: str) -> list[Any]:
    return [found for name in names.split() if (found := getattr(np, name, None)) is not None]


RULES: dict[Any, Rule] = {getitem: _gets, setitem: _sets, np.copyto: _copyto, np.copy: _copied, np.einsum: _einsum}
for _rule, _names in (
    (
        _views,
        "transpose permute_dims matrix_transpose swapaxes moveaxis rollaxis squeeze expand_dims broadcast_to atleast_1d "
        "atleast_2d atleast_3d flip flipud fliplr rot90 split array_split hsplit vsplit dsplit diagonal reshape ravel "
        "unstack real",
    ),
    (_metadata, "shape ndim size result_type can_cast may_share_memory shares_memory iscomplexobj isrealobj common_type"),
    (
        _structural,
        "concatenate concat stack hstack vstack dstack column_stack pad roll tile triu tril take diff outer cumsum cumprod",
    ),
    (_elementwise, "where clip isclose nan_to_num round around angle"),
    (
        _reductions,
        "sum prod max min amax amin mean std var any all argmax argmin ptp nansum nanprod nanmax nanmin nanmean nanstd nanvar",
    ),
    (_products, "dot"),
    (_filled, "zeros_like ones_like full_like empty_like"),
):
    RULES |= dict.fromkeys(_named(_names), _rule)

IN_PLACE = {*_named("put place putmask fill_diagonal put_along_axis")}
"""What writes to its first argument."""
