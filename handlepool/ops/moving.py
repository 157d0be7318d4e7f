"""Define operations that only move elements: padding, shuffles, layouts."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Never

import numpy as np

from handlepool._util.arguments import as_integer, at_least
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.kernel import Concat, Pad, Shuffle
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, dense, lying_as
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout

MODES = ("constant", "reflect", "replicate")
MOST_BYTES = 8
"""The maximum size of an element, in bytes."""


@launches
@by_keyword
def pad(
    x: ArrayT,
    widths: Sequence[int],
    *extra: Never,
    mode: str = "constant",
    value: float = 0,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Put elements around an array, on the current stream.

    Parameters
    ----------
    x : array
        An array of any type with elements of at most 8 bytes. It may be any view without negative strides.
    widths : sequence of int
        Numbers of elements to add at the begin and end of the last axis, then of the axis before it, and so on, as in torch.
        For images they are (left, right, above, below). A negative width removes elements.
    mode : {"constant", "reflect", "replicate"}
        The values of the new elements. "reflect" mirrors the array at its outermost element, and does not repeat this element.
        With "reflect", widths must be below the extent. "replicate" repeats the outermost element.
    value : number
        The value of the new elements in mode "constant".
    out : array, optional
        Array for the result. Its strides decide the layout. Without ``out`` the result has the layout of x, without gaps.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind and type of x.

    Raises
    ------
    ArgumentError
        For unsupported widths, types, strides and constants.

    Examples
    --------
    >>> y = handlepool.pad(x, (1, 1, 1, 1), mode="reflect")                              # doctest: +SKIP
    """
    if extra:
        raise misplaced(pad, extra)
    return _pad.call((x,), out, pool, (widths, mode, value))


@launches
@by_keyword
def channel_shuffle(x: ArrayT, groups: int, *extra: Never, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Interleave the channels of groups, on the current stream.

    As in torch, the result begins with the first channel of each group, followed by the second channel of each group, and so
    on.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        As in `handlepool.pad`.
    groups : int
        Number of groups of neighbouring channels. It must divide C.
    out, pool
        As in `handlepool.pad`.

    Returns
    -------
    array, shape (N, C, ...)
        ``out``, or a new array of the kind and type of x.

    Raises
    ------
    ArgumentError
        For groups that do not divide the channels, and for unsupported types and strides.

    Examples
    --------
    >>> y = handlepool.channel_shuffle(x, 2)                                             # doctest: +SKIP
    """
    if extra:
        raise misplaced(channel_shuffle, extra)
    return _shuffle.call((x,), out, pool, (groups,))


@launches
@by_keyword
def to_channels_last(x: ArrayT, *extra: Never, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Copy an array to the channels-last layout, on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        An array of any type, with three axes or more. It may be any view without negative strides.
    out : array, optional
        Array for the copy, of any layout.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind, shape and type of x. The array is new even if x is already channels-last.

    Raises
    ------
    ArgumentError
        For too few axes, and for negative strides.

    Examples
    --------
    >>> y = handlepool.to_channels_last(x)                                               # doctest: +SKIP
    """
    if extra:
        raise misplaced(to_channels_last, extra)
    return _to_channels_last.call((x,), out, pool, ())


@launches
@by_keyword
def to_contiguous(x: ArrayT, *extra: Never, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Copy an array to the contiguous layout, on the current stream.

    Parameters
    ----------
    x : array
        An array of any type, with one axis or more. It may be any view without negative strides.
    out, pool
        As in `handlepool.to_channels_last`.

    Returns
    -------
    array
        ``out``, or a new array of the kind, shape and type of x. The array is new even if x is already contiguous.

    Raises
    ------
    ArgumentError
        For too few axes, and for negative strides.

    Examples
    --------
    >>> y = handlepool.to_contiguous(x)                                                  # doctest: +SKIP
    """
    if extra:
        raise misplaced(to_contiguous, extra)
    return _to_contiguous.call((x,), out, pool, ())


def _options_of_pad(widths: object, mode: object, value: object) -> dict[str, Any]:
    try:
        if not isinstance(widths, Sequence) or isinstance(widths, (str, bytes, bytearray, memoryview)):
            raise TypeError
        found = tuple(map(as_integer, widths))
    except TypeError:
        # Replace a wrong value by an odd number of widths. The test below refuses that, with the message for all wrong values.
        found = (0,)
    if len(found) % 2 or not found:
        raise ArgumentError(
            f"pad: widths={shown(widths)}; it must be two integers for each axis, from the last axis on, such as (left, right, "
            f"above, below)"
        )
    if not isinstance(mode, str) or mode not in MODES:
        raise ArgumentError(f"pad: mode={shown(mode)}; it can be {', '.join(MODES)}")
    if not isinstance(value, (int, float, np.number, np.bool_)) or holds_values(value):
        raise ArgumentError(f"pad: value={shown(value)}; it must be a number")
    if mode != "constant" and value != 0:
        raise ArgumentError(f"pad: value={shown(value)} with mode={mode!r}, which uses no value; leave value= out")
    # Equal options find the same plan, but a NaN does not equal itself. So the value becomes text.
    return {"widths": found, "mode": mode, "value": str(value)}


def _check(name: str, layouts: tuple[Layout, ...], least: int) -> Layout:
    x, *rest = layouts
    if rest or x.ndim < least:
        raise ArgumentError(f"{name}: x has {x.ndim} axes, shape {x.shape}; it must have {least} or more")
    check_strides(f"x of {name}", x)
    return x


def _check_bytes(name: str, x: Layout) -> None:
    if x.dtype.itemsize not in (1, 2, 4, MOST_BYTES):
        raise ArgumentError(f"{name}: x is {x.dtype}; {name} takes elements of 1, 2, 4 or {MOST_BYTES} bytes. Convert x")


def _bits(dtype: np.dtype[Any], text: str) -> int:
    """Return the bytes of a number of type ``dtype``, as an integer.

    ``text`` is the number as text.

    Raises
    ------
    ArgumentError
        For a number that the type cannot represent.
    """
    if dtype.kind in "iu":
        # Read a text without a point or an exponent as an integer, because a float cannot represent all integers beyond 2**53.
        number: Any = float(text) if set(text) & set(".en") else int(text.replace("True", "1").replace("False", "0"))
        limits = np.iinfo(dtype)
        if number != number or not limits.min <= number <= limits.max or number != int(number):
            raise ArgumentError(f"pad: value={text} for x of {dtype}; it must be an integer from {limits.min} to {limits.max}")
        number = int(number)
    else:
        number = float({"True": "1", "False": "0"}.get(text, text))
    # A number beyond the range of a floating type becomes infinity. Suppress NumPy's warning about this.
    with np.errstate(over="ignore"):
        return int.from_bytes(np.asarray(number).astype(dtype).tobytes(), "little")


def _describe_pad(layouts: tuple[Layout, ...], *, widths: tuple[int, ...], mode: Any, value: str) -> Described:
    x = _check("pad", layouts, 1)
    _check_bytes("pad", x)
    if len(widths) > 2 * x.ndim:
        raise ArgumentError(
            f"pad: {len(widths)} widths for x of shape {x.shape}; pass at most {2 * x.ndim} widths, two for each axis"
        )
    missing = x.ndim - len(widths) // 2
    before = (0,) * missing + tuple(reversed(widths[::2]))
    behind = (0,) * missing + tuple(reversed(widths[1::2]))
    shape = tuple(map(sum, zip(before, x.shape, behind, strict=True)))
    for axis, (extent, one, other) in enumerate(zip(x.shape, before, behind, strict=True)):
        if shape[axis] < 0:
            raise ArgumentError(
                f"pad: widths of {one} and {other} leave {shape[axis]} of the {extent} elements of axis {axis}; remove fewer "
                f"elements"
            )
        if mode == "reflect" and max(one, other) >= max(extent, 1):
            raise ArgumentError(
                f"pad: widths of {one} and {other} for {extent} elements of axis {axis} of x {x.shape}; mode 'reflect' needs "
                f"widths below the number of elements"
            )
        if max(one, other) > 0 and not extent and (mode != "constant" or 0 not in shape):
            raise ArgumentError(
                f"pad: x of shape {x.shape} is empty, and has no elements to pad; make an array of the result's shape instead"
            )
        if mode != "constant" and min(one, other) < 0 and extent + min(one, other) < 1:
            raise ArgumentError(
                f"pad: widths of {one} and {other} leave nothing of the {extent} elements of axis {axis}; remove fewer elements"
            )
    return Pad(before, mode, _bits(x.dtype, value) if mode == "constant" else 0), lying_as(x, shape)


def _describe_shuffle(layouts: tuple[Layout, ...], *, groups: int) -> Described:
    x = _check("channel_shuffle", layouts, 2)
    _check_bytes("channel_shuffle", x)
    if x.shape[1] % groups:
        raise ArgumentError(
            f"channel_shuffle: {groups} groups do not divide the {x.shape[1]} channels of x {x.shape}; the channels "
            "must be a multiple of the groups"
        )
    return Shuffle(groups), lying_as(x, x.shape)


def _describe_layout(name: str, last: bool, layouts: tuple[Layout, ...]) -> Described:
    x = _check(name, layouts, 3 if last else 1)
    # A concatenation of a single array copies it into the output's layout.
    return Concat(0), dense(x.shape, x.dtype, (0, *range(2, x.ndim), 1) if last else None)


def _options_of_shuffle(groups: object) -> dict[str, Any]:
    return {"groups": at_least(1, "channel_shuffle: groups", groups)}


_pad = KernelFunction(_describe_pad, "pad", _options_of_pad)
_shuffle = KernelFunction(_describe_shuffle, "channel_shuffle", _options_of_shuffle)
_to_channels_last = KernelFunction(partial(_describe_layout, "to_channels_last", True), "to_channels_last")
_to_contiguous = KernelFunction(partial(_describe_layout, "to_contiguous", False), "to_contiguous")
