"""How an array lies in memory: what a plan takes and gives, and what it can be built for before there are arrays."""

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

_new, _set = object.__new__, object.__setattr__

HOST = -1
"""Stands for a device's ordinal where memory is the host's."""
UNKNOWN = -2
"""Stands for a device's ordinal where the library does not say."""
_MOST_WORK: Any = 10_000
"""How hard to try to prove that two strided arrays share no byte; past it they count as sharing."""
_SOMEWHERE = 1 << 60
"""An address from which none that is needed lies beyond zero: only distances count."""
_MOST_DISTANCES = 64
"""Of two views of one block, for which it is known whether they share an element."""


class View:
    """An array of another library's memory; neither copied nor freed here.

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
        """Itself: CuPy's arrays have their pointer and their device there, and a launch reads both forms alike."""
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
    """A view by NumPy's array interface, which has no name for the types of ml_dtypes: elements are as many raw bytes."""

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
"""Memory of an array: where it begins and ends, in bytes, and, where not every byte in between is the array's, the address of the
first element, the shape, the strides in bytes and the bytes of an element."""


def span(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return where an array's memory begins and ends, whose first element is at an address; strides in bytes, also negative."""
    ends = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    return address + sum(end for end in ends if end < 0), address + sum(end for end in ends if end > 0) + itemsize


def share_bytes(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have a byte in common, or may have, where that takes too long to tell."""
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def bytes_at(begin: int, end: int, owner: object) -> np.ndarray[Any, Any]:
    """Return the host's memory from one address to another one as an array of bytes, which keeps its owner."""
    return np.asarray(_Bytes(begin, end, owner))


class _Bytes:
    def __init__(self, begin: int, end: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (begin, False), "shape": (end - begin,), "typestr": "|u1", "version": 3}


def piece(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Piece:
    """Return the memory of an array by its geometry; nothing, at its address, for one without elements."""
    shape, strides = tuple(shape), tuple(strides)
    start, stop, gaps = _reach(shape, strides, itemsize)
    return address + start, address + stop, (address, shape, strides, itemsize) if gaps else None


@lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int, bool]:
    """Return where an array begins and ends behind its first element, and whether there are gaps in it."""
    if 0 in shape:
        return 0, 0, False
    start, stop = span(0, shape, strides, itemsize)
    return start, stop, stop - start > math.prod(shape) * itemsize


@lru_cache(maxsize=4096)
def one_run(shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...], itemsize: int) -> bool:
    """Whether two arrays of one shape lie alike, each in one run of bytes from its address on: no gap, nothing twice.

    False where there are no elements. Strides of axes of extent 1 say nothing.
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
    """Whether two pieces of memory have a byte in common. NumPy says so from addresses alone, and reads nothing."""
    if one[1] <= other[0] or other[1] <= one[0]:
        return False
    if one[2] is None and other[2] is None:
        return True
    return share_bytes(_bytes_of(one), _bytes_of(other))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of an array share a byte, or may: an axis steps into what the quicker axes reach over."""
    if 0 in shape:
        return False
    reach = itemsize
    for step, extent in sorted((abs(step), extent) for step, extent in zip(strides, shape, strict=True) if extent > 1):
        if step < reach:
            return True
        reach += step * (extent - 1)
    return False


def meeting(one: "Layout", other: "Layout") -> Callable[[int], bool] | None:
    """Return what tells whether arrays that lie so share an element, by how many bytes the other one begins behind the first.

    None where neither has gaps, so that it is enough to compare where they begin and end.
    """
    if one.piece(_SOMEWHERE)[2] is None and other.piece(_SOMEWHERE)[2] is None:
        return None

    @lru_cache(maxsize=_MOST_DISTANCES)
    def meet(distance: int) -> bool:
        return share(one.piece(_SOMEWHERE), other.piece(_SOMEWHERE + distance))

    return meet


def _bytes_of(memory: Piece) -> np.ndarray[Any, Any]:
    start, stop, strided = memory
    address, shape, strides, itemsize = strided or (start, (stop - start,), (1,), 1)
    return np.asarray(_Interface(View(address, shape, strides, np.dtype(f"V{itemsize}"), HOST, True, None)))


class Ranges:
    """Stretches of memory, each from its begin to its end."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def have(self, piece: Piece) -> bool:
        """Whether a stretch has all of a piece."""
        place = bisect_right(self._starts, piece[0]) - 1
        return place >= 0 and piece[1] <= self._stops[place]

    def meet(self, piece: Piece) -> bool:
        """Whether a stretch and a piece overlap."""
        place = bisect_left(self._starts, piece[1]) - 1
        return piece[0] < piece[1] and place >= 0 and self._stops[place] > piece[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides in bytes and type of an array; equal for arrays that a plan cannot tell apart."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: DeviceArray) -> "Layout":
        """Return the layout of anything with ``shape``, ``strides`` in bytes and ``dtype``."""
        # A launch on the host driver compares the layouts of all its arrays: this spares it the call of `__init__`.
        layout = _new(cls)
        _set(layout, "shape", tuple(array.shape))
        _set(layout, "strides", tuple(array.strides))
        _set(layout, "dtype", np.dtype(array.dtype))
        return layout

    @property
    def reach(self) -> int:
        """Bytes from the first element's begin to the last element's end; 0 without elements."""
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
        """Return the memory of an array that lies so and begins at an address."""
        return piece(address, self.shape, self.strides, self.dtype.itemsize)

    def lies_as(self, other: "Layout") -> bool:
        """Whether another one has the same elements at the same places; strides of axes of extent 1 say nothing."""
        steps = zip(self.shape, self.strides, other.strides, strict=True) if self.shape == other.shape else ()
        same = (self.shape, self.dtype) == (other.shape, other.dtype)
        return same and all(extent == 1 or a == b for extent, a, b in steps)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with strides {self.strides} bytes"


class Token:
    """What is no memory and yet written or read: a plan, a generator, a file. It is compared by identity."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value  # kept, or another object could have its identity

    def __eq__(self, other: object) -> bool:
        return type(other) is Token and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class ArraySpec:
    """An array that is not there yet, for `GraphFunction.compile` and `GraphFunction.plan_for`.

    Parameters
    ----------
    shape : sequence of int
    dtype : numpy.dtype or what makes one
        Also "bfloat16" and the 8-bit floating-point types of ml_dtypes, by name.
    layout : {"NCHW", "NHWC"} or sequence of int
        Contiguous, or channels-last in memory, for any number of axes; or the strides in bytes. They must be those of the arrays
        to come, also along axes of extent 1, or the plan is not found.

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
            raise ArgumentError(f"an array of shape {shown(shape)}: each extent must be an integer, 0 or more")
        if isinstance(layout, str):
            rank = len(self.shape)
            orders = {"NCHW": tuple(range(rank)), "NHWC": (0, *range(2, rank), 1) if rank > 1 else tuple(range(rank))}
            if layout not in orders:
                raise ArgumentError(f"layout={shown(layout)}; it can be 'NCHW', 'NHWC' or the strides in bytes")
            self.strides = tuple(step * self.dtype.itemsize for step in dense_strides(self.shape, orders[layout]))
        else:
            try:
                self.strides = tuple(map(as_integer, layout))
            except TypeError:
                raise ArgumentError(f"layout={shown(layout)}; it can be 'NCHW', 'NHWC' or the strides in bytes") from None
            if len(self.strides) != len(self.shape):
                raise ArgumentError(f"{len(self.strides)} strides for the {len(self.shape)} axes of shape {self.shape}")

    def __repr__(self) -> str:
        return f"ArraySpec({self.shape}, {self.dtype.name!r}, {self.strides})"


def as_dtype(value: Any) -> np.dtype[Any]:
    """NumPy's data type for whatever names one.

    Raises
    ------
    ArrayTypeError
        For what names none, a type that cuDNN has not, or one that needs ml_dtypes where that is missing.
    """
    try:
        dtype = np.dtype("nothing" if value is None else value)  # NumPy takes None for float64
    except (TypeError, ValueError):
        if not isinstance(value, str) or value not in frontend.NAMES:
            raise ArrayTypeError(f"{shown(value)} is no data type; cuDNN has {', '.join(frontend.NAMES)}") from None
        try:
            import ml_dtypes
        except ImportError as error:
            raise ArrayTypeError(f"arrays of {value} need the package ml_dtypes: pip install ml_dtypes") from error
        dtype = np.dtype(getattr(ml_dtypes, value))
    if dtype.name not in frontend.NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {dtype.name!r}; it has {', '.join(frontend.NAMES)}")
    return dtype
