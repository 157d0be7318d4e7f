"""Rules for NumPy's functions on host arrays.

A rule queues a function whose result has a known shape, or makes a view at once. A function without a rule waits for its
arguments: see `handlepool.drivers.host.array_work`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from handlepool.drivers.host.array import (
    HostArray,
    Raw,
    getitem,
    raw_view,
    setitem,
    view_of,
)
from handlepool.drivers.host.array_arguments import (
    INDEXING,
    contracted,
    dummy,
    einsum_shape,
    hosts,
    is_basic,
    is_mask,
    named,
    ones,
    operands,
    raws,
    signature,
    taken,
    tried,
    walk,
)
from handlepool.drivers.host.array_work import ArrayWork, Rule


def _views(work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
    return work.viewed(function, args, kwargs)


def _metadata(work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
    return function(*raws(args), **raws(kwargs))


def _structural(
    work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: HostArray | None
) -> Any:
    """Queue a function whose result's shape follows from the arguments' shapes.

    To learn the shape and type of the result, the rule first calls the function with stand-ins for the arrays (`dummy`). This
    trial costs as much as the function.
    """
    if any(callable(value) and not isinstance(value, (type, np.dtype)) for value in walk((args, kwargs))):
        # The user may pass a function to `numpy.pad`. That function must run on the real values, so the rule waits for them.
        return work.run_now(function, args, kwargs, function.__name__, ())
    with np.errstate(all="ignore"):
        small, options = dummy(args), {name: dummy(value) for name, value in kwargs.items()}
        pattern = function(*small, **options)
        if isinstance(out, HostArray):
            function(*small, **options, out=np.empty(out.shape, out.dtype))
    return work.made(function, args, kwargs, np.asarray(pattern), out, function.__name__)


def _elementwise(
    work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: HostArray | None
) -> Any:
    if function is np.where and len(args) == 1:
        return work.run_now(function, args, kwargs, "where", ())
    # With copy=False, `nan_to_num` writes to its argument.
    in_place = function is np.nan_to_num and not signature(function).bind(*args, **kwargs).arguments.get("copy", True)
    small = tried(out)
    if in_place:
        out = args[0]
    shape = np.broadcast_shapes(*(np.shape(raws(value)) for value in (*args, *kwargs.values())))
    with np.errstate(all="ignore"):
        kind = np.asarray(function(*map(ones, args), **{key: ones(value) for key, value in kwargs.items()}, **small)).dtype
    pattern = np.broadcast_to(np.empty((), kind), shape)
    return work.made(function, args, kwargs, pattern, out, function.__name__, takes_out=not in_place)


def _reductions(
    work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: HostArray | None
) -> Any:
    options = dict(signature(function).bind(*args, **kwargs).arguments)
    return work.reduced(function, options.pop("a"), options, out, function.__name__)


def _products(
    work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: HostArray | None
) -> Any:
    a, b = signature(function).bind(*args, **kwargs).args
    return work.made(function, (a, b), {}, contracted(np.dot, dummy(a), dummy(b)), out, "dot", takes_out=False)


def _einsum(work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> Any:
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    work.check_lists("einsum", args[1:] if isinstance(args[0], str) else args[: len(args) // 2 * 2 : 2])
    small = [ones(value) for value in args]
    # The trial raises for wrong subscripts at once, and not when the work runs.
    found = function(*small, **kwargs, **tried(out))
    if out is None and any(isinstance(value, np.ndarray) and np.may_share_memory(found, value) for value in small):
        return work.viewed(np.einsum, args, kwargs)
    pattern = np.broadcast_to(np.empty((), found.dtype), einsum_shape(args))
    return work.made(np.einsum, args, kwargs, pattern, out, "einsum")


def _copied(work: ArrayWork, function: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
    given = signature(function).bind(*args, **kwargs).arguments
    pattern = np.empty_like(raw_view(given["a"])[0], order=given.get("order", "K"))
    made = work.like(pattern.shape, pattern.dtype, pattern)
    # The copy is queued. It reads the values that the array has when the copy runs, not the values at this call.
    work.queue(np.copyto, [made], [given["a"]], "copy")
    return made


def _filled(work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
    name = function.__name__
    given = dict(signature(function).bind(*args, **kwargs).arguments)
    like, value = raws(given.get("a", given.get("prototype"))), given.get("fill_value", name == "ones_like")
    pattern = np.empty_like(like, **{key: given[key] for key in ("dtype", "order", "shape") if key in given})
    made = work.like(pattern.shape, pattern.dtype, pattern)
    if name != "empty_like":
        # If the value does not fit, one of these trials raises before the work is queued.
        np.copyto(np.empty((), made.dtype), np.ravel(ones(value))[0], "unsafe")
        np.broadcast_to(dummy(value), made.shape)
        taken = raws(value)
        work.queue(lambda to, *_: np.copyto(to, taken, "unsafe"), [made], hosts((value,)), name)
    return made


def _copyto(work: ArrayWork, function: object, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> Any:
    given = dict(signature(function).bind(*args, **kwargs).arguments)
    target = given.pop("dst")
    work.check_lists("copyto", given.values())
    if not isinstance(target, HostArray):
        work.run_now(np.copyto, args, kwargs, "copyto", ())
        return
    # The trial raises for types that do not fit, before the work is queued.
    np.copyto(ones(target), **{key: ones(value) for key, value in given.items()})
    _check_fit(given["src"], target.shape)
    _check_fit(given.get("where", True), target.shape)
    options = raws(given)
    work.queue(lambda to, *_: np.copyto(to, **options), [target], operands(given), "copyto")


def _gets(work: ArrayWork, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Any:
    array, index = args
    if is_basic(index):
        entries = index if isinstance(index, tuple) else (index,)
        if not any(entry is Ellipsis for entry in entries):
            # For an index of numbers alone, NumPy would read an element and return a number. With an ellipsis, NumPy returns a
            # view.
            entries = (*entries, ...)
        return view_of(array, raw_view(array)[0][entries])
    if is_mask(index):
        return work.run_now(function, args, kwargs, "a mask as an index", ())
    index = taken(index)
    return work.made(getitem, (array, index), {}, np.asarray(dummy(array)[dummy(index)]), None, INDEXING[getitem])


def _sets(work: ArrayWork, function: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
    array, index, values = args
    # CuPy takes a list of values if the index has arrays, so lists are refused only for basic indices.
    if is_basic(index):
        work.check_lists(INDEXING[setitem], (values,))
    index = taken(index)
    if not (isinstance(values, np.ndarray) or hosts(values)):
        # A Python number that does not fit the type raises here, before the work is queued.
        values = np.array(values, None if np.ndim(values) else array.dtype)
    first = np.ravel(ones(values))[:1]
    # If the values cannot be cast to the array's type, this trial raises before the work is queued.
    np.empty(first.shape, array.dtype)[:] = first
    if not is_mask(index):
        _check_fit(values, np.shape(dummy(array)[dummy(index)]))
    index_now, values_now = raws(index), raws(values)

    def run(to: Raw, *_: Raw) -> None:
        to[index_now] = values_now

    work.queue(run, [array], operands((index, values)), INDEXING[setitem])


def _check_fit(values: object, shape: tuple[int, ...]) -> None:
    """Raise for values that cannot be broadcast to a shape.

    Leading axes of extent 1 in ``values`` are ignored, as in NumPy's assignments.
    """
    given = np.shape(raws(values))
    while len(given) > len(shape) and given[0] == 1:
        given = given[1:]
    if len(given) > len(shape) or any(a not in (1, b) for a, b in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"values of shape {given} cannot be broadcast to the shape {shape} of the elements to write")


RULES: dict[Any, Rule] = {getitem: _gets, setitem: _sets, np.copyto: _copyto, np.copy: _copied, np.einsum: _einsum}
for _rule, _names in (
    (
        _views,
        "transpose permute_dims matrix_transpose swapaxes moveaxis rollaxis squeeze expand_dims broadcast_to broadcast_arrays "
        "atleast_1d atleast_2d atleast_3d flip flipud fliplr rot90 split array_split hsplit vsplit dsplit diag diagonal reshape "
        "ravel unstack real imag",
    ),
    (_metadata, "shape ndim size result_type can_cast may_share_memory shares_memory iscomplexobj isrealobj common_type"),
    (
        _structural,
        "concatenate concat stack hstack vstack dstack column_stack pad roll tile repeat triu tril take diff outer cumsum "
        "cumprod cumulative_sum cumulative_prod sort argsort",
    ),
    (_elementwise, "where clip isclose nan_to_num round around angle"),
    (
        _reductions,
        "sum prod max min amax amin mean std var any all argmax argmin ptp nansum nanprod nanmax nanmin nanmean nanstd nanvar",
    ),
    (_products, "dot"),
    (_filled, "zeros_like ones_like full_like empty_like"),
):
    RULES |= dict.fromkeys(named(_names), _rule)
RULES |= dict.fromkeys((np.lib.stride_tricks.sliding_window_view, *named("matrix_transpose diagonal", np.linalg)), _views)
