"""Define sums and concatenations of arrays, by kernels of this package."""

from collections.abc import Sequence
from typing import Any, Never, cast

import numpy as np

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.kernel import Add, Concat
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.expression import Traced
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, lying_as
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import FLOATING_TYPES, check_activation
from handlepool.ops.elementwise import NUMBERS, Arguments, ElementwiseFunction, describe, summed
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout


class _Scalars(dict[type, bool]):
    """For each type, whether `add` treats its objects as numbers.

    `add` treats traced values as numbers, because both need an elementwise function.
    """

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = issubclass(kind, (*NUMBERS, Traced))
        return found


# A look-up for each operand is quicker than `isinstance` with five classes.
_scalars = _Scalars()


@launches
def add(x: ArrayT, *others: object, activation: str | None = None, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Add arrays and numbers that broadcast, on the current stream.

    Parameters
    ----------
    x, *others : array or number
        At most 63 arrays, all of one type: float16, bfloat16 or float32. The call is quickest if they have equal shapes and
        equal layouts without gaps.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied to the sum. "gelu" uses the exact error function.
    out : array, optional
        Array for the result. It may be an input with the result's shape and layout.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind and type of the first array. A new array has the layout of the first input with the
        result's shape, without gaps. The sum is computed in float32, from left to right, and rounded once.

    Raises
    ------
    ArgumentError
        For shapes that do not broadcast, for unsupported types or strides, and for an unknown activation.
    """
    # The kernel for sums reads only arrays. If an operand is a number or a traced value, an elementwise function computes the
    # sum.
    for each in (x, *others):
        if _scalars[type(each)]:
            return cast("ArrayT", _sum(x, *others, activation=activation, out=out, pool=pool))
    return _add.call((x, *others), out, pool, (activation,))


@launches
@by_keyword
def concat(arrays: Sequence[ArrayT], axis: int, *extra: Never, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Join arrays along an axis, on the current stream.

    Parameters
    ----------
    arrays : list or tuple of array
        1 to 63 arrays, all of one type, which may be any type. Their extents are equal except along the axis. Arrays may be
        empty.
    axis : int
        The axis to join along, which is 1 for the channels of (N, C, H, W). A negative axis counts from the last axis.
    out : array, optional
        Array for the result, with any strides. Without ``out`` the result has the layout of the first array, without gaps.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind and type of the first array. An input that already lies at its place in ``out`` is
        not copied.

    Raises
    ------
    ArgumentError
        For arrays that do not fit each other, and for an axis that is out of range.

    Notes
    -----
    An operation can write its result directly into its slice of the output, as in ``a = max_pool2d(x, 3, out=y[:, :64])``. Then
    ``concat([a, b], 1, out=y)`` copies only ``b``. If all arrays are written in this way, no call is needed. In a fork,
    operations that write different slices of channels run concurrently. ``docs/pooling.md`` tells which way is quicker.
    """
    if extra:
        raise misplaced(concat, extra)
    if type(arrays) not in (list, tuple):
        raise ArgumentError(f"concat takes a list or a tuple of arrays, not {shown(arrays)}")
    return _concat.call(tuple(arrays), out, pool, (axis,))


def _check(name: str, layouts: tuple[Layout, ...]) -> None:
    first = layouts[0]
    for place, layout in enumerate(layouts):
        if layout.dtype != first.dtype:
            raise ArgumentError(
                f"{name}: argument {place} is {layout.dtype} and argument 0 is {first.dtype}; convert one to the type of "
                "the other"
            )
        check_strides(f"argument {place} of {name}", layout)


def _describe_add(layouts: tuple[Layout, ...], *, activation: str | None) -> Described:
    _check("add", layouts)
    first = layouts[0]
    if first.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"add: argument 0 is {first.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    shape = first.shape
    for place, layout in enumerate(layouts):
        if layout.shape != shape:
            try:
                shape = np.broadcast_shapes(shape, layout.shape)
            except ValueError:
                raise ArgumentError(
                    f"add: argument {place} is of shape {layout.shape} and argument 0 of {first.shape}; they must broadcast to "
                    f"one shape"
                ) from None
    # The kernel for sums takes only operands of equal shapes. An elementwise kernel adds operands that broadcast.
    if any(layout.shape != shape for layout in layouts):
        return describe(summed, "add", layouts, arguments=Arguments("add", (None,) * len(layouts), {"activation": activation}))
    return Add(activation), lying_as(first, first.shape)


def _describe_concat(layouts: tuple[Layout, ...], *, axis: int) -> Described:
    _check("concat", layouts)
    first = layouts[0]
    rank = first.ndim
    if rank == 0:
        raise ArgumentError(f"concat: argument 0 has no axes, so it has no axis={axis}; pass arrays with at least one axis")
    if not -rank <= axis < rank:
        raise ArgumentError(f"concat: axis={axis}; it must be an integer from {-rank} to {rank - 1} for {rank} axes")
    number = axis % rank
    for place, layout in enumerate(layouts):
        if layout.ndim != rank or _beside(layout, number) != _beside(first, number):
            raise ArgumentError(
                f"concat: argument {place} has shape {layout.shape} and argument 0 has {first.shape}; the shapes may differ "
                f"only along axis {number}"
            )
    extent = sum(layout.shape[number] for layout in layouts)
    return Concat(number), lying_as(first, (*first.shape[:number], extent, *first.shape[number + 1 :]))


def _beside(layout: Layout, axis: int) -> tuple[int, ...]:
    return layout.shape[:axis] + layout.shape[axis + 1 :]


def _options_of_add(activation: object) -> dict[str, Any]:
    check_activation("add", activation)
    return {"activation": activation}


def _options_of_concat(axis: object) -> dict[str, Any]:
    try:
        # An array is refused before it is read, because reading it would wait for the device.
        if not holds_values(axis):
            return {"axis": as_integer(axis)}
    except TypeError:
        pass
    raise ArgumentError(f"concat: axis={shown(axis)}; it must be an integer, such as 1 for the channels")


_sum = ElementwiseFunction(summed, name="add")
_add = KernelFunction(_describe_add, "add", _options_of_add)
_concat = KernelFunction(_describe_concat, "concat", _options_of_concat)
