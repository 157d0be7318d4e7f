"""Describe how an array lies in memory.

Plans are built for layouts. So a plan can be built before its arrays exist.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from handlepool._util.arguments import as_integer
from handlepool._util.names import kind_of, shown
from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.inference import dense_strides

# `Layout.of` needs both functions, because `Layout` is a frozen dataclass. Each launch makes layouts, so look the functions up
# only once.
_new, _set = object.__new__, object.__setattr__

HOST = -1
"""Takes the place of a device's ordinal for memory of the host."""
UNKNOWN = -2
"""Takes the place of a device's ordinal that is not known."""
_MOST_WORK: Any = 10_000
"""The maximum work to prove that strided arrays share no byte.

If a proof needs more work, the arrays count as sharing a byte.
"""
_SOMEWHERE = 1 << 60
"""An address that stands for any address, where only distances matter.

The address is so large that no address computed from it falls below zero.
"""
_MOST_DISTANCES = 64
"""The maximum number of cached distances between two views of a block.

For each distance, the cache tells whether the views share an element.
"""


class View:
    """A view of another library's array, which copies and frees nothing.

    Attributes
    ----------
    ptr : int
        Address of the first element.
    shape, strides : tuple of int
        Strides in bytes.
    dtype : numpy.dtype
    device_id : int
        Ordinal, or `HOST`, or `UNKNOWN`.
    readonly : bool
    owner : object
        Keeps the memory alive.
    """

    __slots__ = ("__weakref__", "device_id", "dtype", "owner", "ptr", "readonly", "shape", "strides")

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        device_id: int,
        readonly: bool,
        owner: object,
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device_id = device_id
        self.readonly = readonly
        self.owner = owner

    @property
    def data(self) -> "View":
        """The view itself.

        The attribute ``data`` of a CuPy array has its pointer and device. So a launch can read a view and a CuPy array in the
        same way.
        """
        return self

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<View of {self.dtype} {self.shape} at {self.ptr:#x} of {kind_of(self.owner)}>"

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array over host memory that keeps the owner alive."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return np.asarray(_Interface(self)).view(self.dtype)


class _Interface:
    """Expose a view by NumPy's array interface, as raw bytes.

    The interface has no names for the types of ml_dtypes.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.__array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.dtype.itemsize}",
            "data": (view.ptr, view.readonly),
        }


Strided = tuple[int, tuple[int, ...], tuple[int, ...], int]
Piece = tuple[int, int, Strided | None]
"""An array's memory: begin address, end address, and description.

The description is None if the array has no gaps. Otherwise it has the address of the first element, the shape, the strides in
bytes, and the bytes of an element.
"""


def span(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the addresses where an array's memory begins and ends.

    Its first element is at ``address``. Strides are in bytes, and may be negative.
    """
    ends = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    return address + sum(end for end in ends if end < 0), address + sum(end for end in ends if end > 0) + itemsize


def share_bytes(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Return False if two arrays certainly share no byte.

    The answer is True if the arrays share a byte, or if the proof takes too long.
    """
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    # A proof can take too long, because the problem is NP-complete. Then answer True: the caller adds a wait, and a needless
    # wait only costs time, but a missing wait may cause a wrong value.
    except np.exceptions.TooHardError:
        return True


def bytes_at(begin: int, end: int, owner: object) -> np.ndarray[Any, Any]:
    """Return host memory as an array of bytes, which keeps its owner."""
    return np.asarray(_Bytes(begin, end, owner))


class _Bytes:
    def __init__(self, begin: int, end: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (begin, False), "shape": (end - begin,), "typestr": "|u1", "version": 3}


def piece(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Piece:
    """Return the memory of an array with this address and geometry.

    The memory of an array without elements begins and ends at ``address``.
    """
    # `_reach` is cached, and needs hashable arguments.
    shape, strides = tuple(shape), tuple(strides)
    start, stop, gaps = _reach(shape, strides, itemsize)
    return address + start, address + stop, (address, shape, strides, itemsize) if gaps else None


@lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int, bool]:
    """Return an array's begin, end and gaps.

    Begin and end are offsets in bytes from the first element. The last value says whether there are gaps.
    """
    if 0 in shape:
        return 0, 0, False
    start, stop = span(0, shape, strides, itemsize)
    return start, stop, stop - start > math.prod(shape) * itemsize


@lru_cache(maxsize=4096)
def one_run(shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two arrays of one shape have equal strides without gaps.

    Each element must also lie at or after the array's address, and no two elements may overlap. The answer is False for arrays
    without elements. Strides of axes of extent 1 do not count.
    """
    if 0 in shape:
        return False
    run = itemsize
    for step, extent, other in sorted(zip(strides, shape, others, strict=True)):
        if extent != 1:
            if step != run or other != run:
                return False
            run *= extent
    return True


def share(one: Piece, other: Piece) -> bool:
    """Return whether two pieces of memory share a byte.

    The answer comes from the addresses alone, and no memory is read.
    """
    if one[1] <= other[0] or other[1] <= one[0]:
        return False
    # The ranges overlap. If neither piece has gaps, they share a byte.
    if one[2] is None and other[2] is None:
        return True
    return share_bytes(_bytes_of(one), _bytes_of(other))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether two elements of an array may share a byte.

    The answer is True if the step of an axis is smaller than the extent in memory of all axes with smaller steps.
    """
    if 0 in shape:
        return False
    reach = itemsize
    for step, extent in sorted((abs(step), extent) for step, extent in zip(strides, shape, strict=True) if extent > 1):
        if step < reach:
            return True
        reach += step * (extent - 1)
    return False


def meeting(one: "Layout", other: "Layout") -> Callable[[int], bool] | None:
    """Return a test whether arrays of two layouts share an element.

    The test is a function of the distance: the number of bytes from the address of the first array to the address of the other
    array. The result is None if neither array has gaps, because then a comparison of begins and ends is enough.
    """
    if one.piece(_SOMEWHERE)[2] is None and other.piece(_SOMEWHERE)[2] is None:
        return None

    # The answer depends only on the distance, so it is cached by distance.
    @lru_cache(maxsize=_MOST_DISTANCES)
    def meet(distance: int) -> bool:
        return share(one.piece(_SOMEWHERE), other.piece(_SOMEWHERE + distance))

    return meet


def _bytes_of(memory: Piece) -> np.ndarray[Any, Any]:
    start, stop, strided = memory
    address, shape, strides, itemsize = strided or (start, (stop - start,), (1,), 1)
    return np.asarray(_Interface(View(address, shape, strides, np.dtype(f"V{itemsize}"), HOST, True, None)))


class Ranges:
    """A set of memory ranges, each from its begin to its end."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            # Ranges that touch are merged, so that a piece across both is found inside a single range.
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def have(self, piece: Piece) -> bool:
        """Return whether one of the ranges contains a whole piece."""
        place = bisect_right(self._starts, piece[0]) - 1
        return place >= 0 and piece[1] <= self._stops[place]

    def meet(self, piece: Piece) -> bool:
        """Return whether one of the ranges overlaps a piece."""
        place = bisect_left(self._starts, piece[1]) - 1
        return piece[0] < piece[1] and place >= 0 and self._stops[place] > piece[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """An array's shape, strides in bytes and type.

    Arrays with equal layouts can use the same plan.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: DeviceArray) -> "Layout":
        """Return the layout of an array.

        The array may be any object with ``shape``, ``strides`` in bytes and ``dtype``.
        """
        # Set the fields without `__init__`, which would be slower. A launch on the host driver makes the layouts of all its
        # arrays.
        layout = _new(cls)
        _set(layout, "shape", tuple(array.shape))
        _set(layout, "strides", tuple(array.strides))
        _set(layout, "dtype", np.dtype(array.dtype))
        return layout

    @property
    def reach(self) -> int:
        """Bytes from the first element's begin to the last element's end.

        The number is 0 for an array without elements.
        """
        if 0 in self.shape:
            return 0
        return sum([(extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True)]) + self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def piece(self, address: int) -> Piece:
        """Return the memory of an array with this layout at an address."""
        return piece(address, self.shape, self.strides, self.dtype.itemsize)

    def lies_as(self, other: "Layout") -> bool:
        """Return whether two layouts have each element at the same offset.

        Strides of axes of extent 1 do not count.
        """
        steps = zip(self.shape, self.strides, other.strides, strict=True) if self.shape == other.shape else ()
        same = (self.shape, self.dtype) == (other.shape, other.dtype)
        return same and all(extent == 1 or a == b for extent, a, b in steps)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with strides {self.strides} bytes"


class Token:
    """Stand for an object that is no array, such as a plan.

    A call lists the token among its reads and writes, as it lists arrays. Two tokens are equal if they stand for the same object.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        # The token keeps the object alive. Otherwise a new object could get the same identity.
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Token and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class ArraySpec:
    """Describe an array that does not exist yet.

    `GraphFunction.compile` and `GraphFunction.plan_for` take such descriptions.

    Parameters
    ----------
    shape : sequence of int
    dtype : numpy.dtype, or a value that NumPy converts to a type
        The name "bfloat16" and the names of the 8-bit floating-point types of ml_dtypes are also accepted.
    layout : {"NCHW", "NHWC"} or sequence of int
        "NCHW" means contiguous and "NHWC" channels-last in memory, both for any number of axes. A sequence gives the strides in
        bytes. The strides must equal those of the later arrays, also along axes of extent 1. Otherwise a call does not find the
        plan.

    Examples
    --------
    >>> x = ArraySpec((8, 64, 56, 56), "float16", "NHWC")                                                # doctest: +SKIP
    >>> plan = conv.compile(x, ArraySpec((32, 64, 3, 3), "float16", "NHWC"))                             # doctest: +SKIP
    """

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, shape: Sequence[int], dtype: object, layout: str | Sequence[int] = "NCHW") -> None:
        self.dtype = as_dtype(dtype)
        try:
            self.shape = tuple(map(as_integer, shape))
        except TypeError:
            self.shape = (-1,)
        if any(extent < 0 for extent in self.shape):
            raise ArgumentError(f"ArraySpec: shape={shown(shape)} is no shape of an array; give integers of 0 or more")
        if isinstance(layout, str):
            rank = len(self.shape)
            orders = {"NCHW": tuple(range(rank)), "NHWC": (0, *range(2, rank), 1) if rank > 1 else tuple(range(rank))}
            if layout not in orders:
                raise ArgumentError(f"layout={shown(layout)}; give 'NCHW', 'NHWC' or the strides in bytes")
            self.strides = tuple(step * self.dtype.itemsize for step in dense_strides(self.shape, orders[layout]))
        else:
            try:
                self.strides = tuple(map(as_integer, layout))
            except TypeError:
                raise ArgumentError(f"layout={shown(layout)}; give 'NCHW', 'NHWC' or the strides in bytes") from None
            if len(self.strides) != len(self.shape):
                raise ArgumentError(
                    f"layout gives {len(self.strides)} strides for the {len(self.shape)} axes of shape {self.shape}; give one "
                    "stride for each axis"
                )

    def __repr__(self) -> str:
        return f"ArraySpec({self.shape}, {self.dtype.name!r}, {self.strides})"


def as_dtype(value: Any) -> np.dtype[Any]:
    """Return NumPy's data type for a name or a type.

    Raises
    ------
    ArrayTypeError
        If ``value`` names no type, if cuDNN lacks the type, or if the type needs the package ml_dtypes and it is missing.
    """
    try:
        # NumPy would take None as float64. So replace None by a name of no type, for which NumPy raises.
        dtype = np.dtype("nothing" if value is None else value)
    except (TypeError, ValueError):
        if not isinstance(value, str) or value not in frontend.NAMES:
            raise ArrayTypeError(
                f"{shown(value)} is no data type; pass a type that cuDNN has: {', '.join(frontend.NAMES)}"
            ) from None
        try:
            import ml_dtypes
        except ImportError as error:
            raise ArrayTypeError(f"arrays of {value} need the package ml_dtypes: pip install ml_dtypes") from error
        dtype = np.dtype(getattr(ml_dtypes, value))
    if dtype.name not in frontend.NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {dtype.name!r}; pass a type that cuDNN has: {', '.join(frontend.NAMES)}")
    return dtype
