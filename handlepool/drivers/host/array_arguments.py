"""Find host arrays among NumPy's arguments, and the shapes of results.

To learn the shape and type of a result without its values, the rules of `handlepool.drivers.host.array_functions` call the
function for a trial. In a trial, small stand-ins replace the arrays: `ones` makes arrays of the same types with one element, and
`dummy` makes arrays of the same shapes. The tables at the end say how NumPy's functions take their arguments.
"""

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from handlepool.drivers.host.array import HostArray, Raw, getitem, raw_view, setitem


def walk(value: object) -> Iterator[Any]:
    """Yield the entries of nested sequences and dictionaries."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (Sequence, deque)) or isinstance(value, (str, bytes, range)):
        # Strings and ranges are sequences, but they hold no arrays.
        yield value
        return
    for entry in value:
        yield from walk(entry)


def converted(value: Any) -> Any:
    """Replace array-like objects in arguments with NumPy arrays.

    The caller converts the arguments once, so that all later code reads the same memory.
    """
    if isinstance(value, (HostArray, np.ndarray, np.generic)):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(converted, value))
    return np.asarray(value) if hasattr(type(value), "__array__") else value


def hosts(value: object) -> list[HostArray]:
    """Return the host arrays among arguments, each once."""
    return list({id(array): array for array in walk(value) if isinstance(array, HostArray)}.values())


def operands(value: object) -> list[Any]:
    """Return the host and NumPy arrays among arguments, each once."""
    return list({id(array): array for array in walk(value) if isinstance(array, (HostArray, np.ndarray))}.values())


def raws(value: object, views: dict[int, Raw] | None = None) -> Any:
    """Replace host arrays in arguments with NumPy arrays.

    A host array becomes ``views[id(array)]`` if ``views`` is given, and its own raw array otherwise.
    """
    if isinstance(value, HostArray):
        return raw_view(value)[0] if views is None else views[id(value)]
    if isinstance(value, (Sequence, deque)) and not isinstance(value, (str, bytes, range)):
        entries = [raws(entry, views) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, dict):
        return {key: raws(entry, views) for key, entry in value.items()}
    return value


def ones(value: object) -> Any:
    """Return ``value`` with each array cut to at most one element.

    The arrays keep their types. So a call of a function with the cut arrays tells the type of the function's result.
    """
    if isinstance(value, (HostArray, np.ndarray)):
        return np.ones([min(extent, 1) for extent in value.shape], value.dtype)
    if isinstance(value, (list, tuple)) and not isinstance(value, str) and value and hosts(value):
        return np.ones([1] * np.ndim(raws(value)), np.result_type(*raws(value)))
    return value


def dummy(value: object) -> Any:
    """Return ``value`` with stand-ins for its host arrays.

    A stand-in has the shape and type of the host array, zeros as elements, and the memory of one element.
    """
    if isinstance(value, HostArray):
        # A broadcast zero has strides of 0, so an array of any shape needs the memory of one element.
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    if isinstance(value, (list, tuple)):
        return type(value)(map(dummy, value))
    return value


def contracted(function: Callable[..., Any], a: object, b: object) -> Raw:
    """Return an array with the result's shape and type.

    The result is ``function(a, b)``, and ``function`` is `numpy.dot` or `numpy.matmul`. This trial multiplies arrays whose summed
    axes are cut to one element, so it costs little.
    """
    a, b = np.asarray(a), np.asarray(b)
    with np.errstate(all="ignore"):
        if not (a.ndim and b.ndim):
            return np.asarray(function(a, b))
        axis = max(b.ndim - 2, 0)
        if a.shape[-1] != b.shape[axis]:
            raise ValueError(
                f"arrays of shape {a.shape} and {b.shape} have no product, because {a.shape[-1]} is not {b.shape[axis]}"
            )
        return np.asarray(function(a[..., :1], b[(slice(None),) * axis + (slice(0, 1),)]))


def einsum_shape(args: tuple[Any, ...]) -> list[int]:
    """Return the shape of an einsum result from its labels' extents.

    The axes of an ellipsis have the labels -1, -2 and so on from the right.
    """
    result: Any = None
    if isinstance(args[0], str):
        left, arrow, right = args[0].replace(" ", "").replace("...", ".").partition("->")
        terms: list[Any] = left.split(",")
        arrays = args[1:]
        result = right if arrow else None
    else:
        arrays, terms = args[: len(args) // 2 * 2 : 2], list(args[1::2])
        result = args[-1] if len(args) % 2 else None
    extents: dict[Any, int] = {}
    counts: Counter[Any] = Counter()
    spread: list[int] = []
    for term, array in zip(terms, arrays, strict=True):
        shape = np.shape(raws(array))
        labels = [None if label in (".", Ellipsis) else label for label in term]
        if None in labels:
            at, spare = labels.index(None), len(shape) - len(labels) + 1
            labels[at : at + 1] = inner = list(range(-spare, 0))
            # The longest ellipsis determines the axes that all terms broadcast to.
            spread = max(spread, inner, key=len)
        counts.update(labels)
        for label, extent in zip(labels, shape, strict=True):
            # An axis of extent 1 broadcasts, so the larger extent replaces it.
            if extents.setdefault(label, extent) == 1:
                extents[label] = extent
            elif extent not in (1, extents[label]):
                raise ValueError(
                    f"einsum: axes with the label {label!r} have the extents {extents[label]} and {extent}; they must be equal"
                )
    if result is None:
        result = [*spread, *sorted(label for label in counts if counts[label] == 1 and label not in spread)]
    else:
        result = [entry for label in result for entry in (spread if label in (".", Ellipsis) else [label])]
    return [extents[label] for label in result]


def tried(out: object) -> dict[str, Raw]:
    """Return the keyword ``out`` for a trial: an array of one element.

    If ``out`` is no host array, return no keyword.
    """
    return {"out": ones(out)} if isinstance(out, HostArray) else {}


def is_basic(index: object) -> bool:
    """Return whether an index has only numbers and slices."""
    return all(
        entry is None
        or entry is Ellipsis
        # `bool` is a subclass of `int`, but a truth value as an index is a mask.
        or (isinstance(entry, (int, np.integer, slice)) and not isinstance(entry, (bool, np.bool_)))
        for entry in (index if isinstance(index, tuple) else (index,))
    )


def is_mask(index: object) -> bool:
    """Return whether an index has a host array of truth values.

    The values of such a mask decide the result's shape. They are not known before the work that writes the mask has run.
    """
    return any(isinstance(entry, HostArray) and entry.dtype == bool for entry in walk(index))


def taken(index: object) -> Any:
    """Return an index with copies of its NumPy arrays and lists.

    Later changes of such an array or list then have no effect, as with CuPy, which copies them to the device at once.
    """
    if isinstance(index, tuple):
        return tuple(map(taken, index))
    return np.array(index) if isinstance(index, (np.ndarray, list)) and not hosts(index) else index


@cache
def signature(function: object) -> inspect.Signature:
    """Return the signature of a NumPy function."""
    # In some versions of NumPy, functions written in C report no signature. `BUILT_IN` has their signatures.
    return inspect.signature(BUILT_IN.get(function, function))


def named(names: str, place: object = np) -> list[Any]:
    """Return the functions with these names that this NumPy version has."""
    return [found for name in names.split() if (found := getattr(place, name, None)) is not None]


ARRAYS = frozenset({
    "a", "ary", "arys", "args", "arrays", "tup", "array", "A", "b", "m", "x", "y", "z", "val", "condition", "indices", "prepend",
    "append", "min", "max", "a_min", "a_max", "nan", "posinf", "neginf", "rtol", "atol", "where", "initial", "mean", "kwargs",
    "constant_values", "fill_value", "prototype",
})  # fmt: skip
"""Names of parameters whose values are read when the queued work runs.

The values of any other parameter may decide a shape, so the call waits for arrays in such a parameter.
"""

OPERANDS = ARRAYS - {"indices", "nan", "posinf", "neginf", "initial", "kwargs", "constant_values", "fill_value"}
"""Parameters in `ARRAYS` for which CuPy refuses lists."""

SEVERAL = {"arys", "args", "arrays", "tup"}
"""Parameters in `ARRAYS` that are lists of arrays."""

INDEXING = {getitem: "an index", setitem: "an assignment"}
"""Names in messages for `getitem` and `setitem`."""

COPIED = frozenset(["set", "copyto", *INDEXING.values()])
"""Names of work for which CuPy copies NumPy arrays at each call."""

BARE = {getitem, setitem, np.copyto, np.einsum}
"""Functions whose rules get the caller's arguments unchanged."""

IN_PLACE = {*named("put place putmask fill_diagonal put_along_axis")}
"""Functions that write to their first argument."""

TAKE_PLAIN = {getitem, *named("take put compress array asarray asanyarray ascontiguousarray asfortranarray")}
"""Functions that take NumPy's arrays even in strict mode.

CuPy takes them as well: these functions use the arrays as an index, or copy them to the device.
"""

COMPARISONS = {np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}
"""Functions that take NumPy's arrays without axes even in strict mode.

NumPy itself turns a scalar operand of a comparison into such an array.
"""

BUILT_IN: dict[Any, Any] = {
    np.concatenate: lambda arrays, /, axis=0, out=None, *, dtype=None, casting="same_kind": None,
    np.where: lambda condition, x=None, y=None, /: None,
    np.dot: lambda a, b, out=None: None,
    np.copyto: lambda dst, src, casting="same_kind", where=True: None,
    np.empty_like: lambda prototype, /, dtype=None, order="K", subok=True, shape=None, *, device=None: None,
}
"""For functions written in C: a function with the same parameters.

Not every version of NumPy reports the signatures of functions written in C.
"""
