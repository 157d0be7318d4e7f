"""Arrays of the host driver, as CuPy's arrays on a GPU.

Work on such an array is queued on the current stream, as with CuPy. A reader on the host waits for the work that writes the
array. So the class does not derive from NumPy's, and has neither a readable buffer of its own nor ``__array_interface__``.
Through these, `np.asarray`, `memoryview`, ``tolist`` or SciPy would read memory that queued work has yet to write. NumPy's
functions reach the array through NumPy's protocols, and `handlepool.drivers.host.array_functions` handles them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from handlepool.drivers.operands import ASARRAY
from handlepool.errors import ArrayTypeError

Raw = np.ndarray[Any, Any]

KINDS = "biufc"
"""Kinds of NumPy types that GPU memory may hold."""


def check_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Raise `ArrayTypeError` for a type that GPU memory cannot hold.

    Objects and strings are such types.
    """
    # The types of ml_dtypes have other kinds, and a GPU holds them, so only NumPy's own types are refused by kind.
    if dtype.hasobject or (dtype.kind not in KINDS and dtype.type.__module__.partition(".")[0] == "numpy"):
        raise ArrayTypeError(f"no array of {dtype} can be in device memory; it takes numbers")
    return dtype


class Owner(Protocol):
    """An object that keeps an array's memory alive."""

    @property
    def block(self) -> "Memory":
        """The memory."""


class Memory(Protocol):
    """A piece of a device's memory."""

    device: int


class Work(Protocol):
    """The operations on arrays; each driver has one such object."""

    strict: bool

    def ufunc(self, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a universal function."""

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a NumPy function, or run it after its inputs are ready."""

    def run_now(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, writes: object
    ) -> Any:
        """Run a function of NumPy arrays after the arrays' pending work."""

    def queue(self, function: Callable[..., object], writes: "Sequence[HostArray]", reads: Sequence[Any], label: str) -> None:
        """Queue a function of raw arrays on the current stream."""

    def finish(self, reads: "Sequence[HostArray]", writes: "Sequence[HostArray]", label: str) -> None:
        """Wait on the host for work that conflicts with host accesses.

        The host reads ``reads`` and writes ``writes``.
        """

    def home(self, array: "HostArray", label: str) -> AbstractContextManager[object]:
        """Make an array's device current, for a copy to the host."""

    def read_unordered(self, array: "HostArray") -> Raw | None:
        """Return a copy of an array's elements for display, or None.

        None means that the elements are not available.
        """

    def like(self, shape: Sequence[int], dtype: npt.DTypeLike, pattern: Raw | None = None) -> "HostArray":
        """Return a new array on the current device.

        If ``pattern`` has the same shape, the axes get its order in memory.
        """


class HostArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in the host driver's memory, with CuPy's names.

    `conv2d` and the other functions make such arrays, and so do the driver's ``asarray`` and ``empty``. Work on the array is
    queued on the current stream. That holds for NumPy's universal functions, reductions, indexing, copies, `numpy.concatenate`,
    `numpy.where`, `numpy.einsum`, `numpy.matmul` and `numpy.pad`. Any other NumPy function waits for the array, and runs at
    once.

    Conversions to Python numbers and plain NumPy arrays wait: ``float(y)``, ``y.get()``, ``numpy.asarray(y)``, ``y.tolist()``.
    While a stream is captured they are errors, since the work has not run.

    Attributes
    ----------
    shape, strides : tuple of int
        The extents, and the strides in bytes.
    dtype : numpy.dtype
    ndim, size, itemsize, nbytes : int
    """

    __slots__ = ("__weakref__", "_owner", "_raw", "_work", "dtype", "shape", "strides")
    _raw: Raw
    _owner: Owner | None
    _work: Work
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def __init__(self, raw: Raw, owner: Owner | None, work: Work) -> None:
        # The raw array does not keep the owner alive, so that queued work may hold it.
        _put_raw(self, raw)
        _put_owner(self, owner)
        _put_work(self, work)
        _put_shape(self, raw.shape)
        _put_strides(self, raw.strides)
        _put_dtype(self, raw.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("strides", "dtype"):
            raise AttributeError(f"the {name} of a host array cannot be set: use view or astype")
        if name == "shape":
            raw = self._raw.reshape(value)
            if raw.size and not np.may_share_memory(raw, self._raw):
                raise AttributeError(f"an array of strides {self.strides} takes the shape {value} only as a copy: use reshape")
            HostArray.__init__(self, raw, self._owner, self._work)
        else:
            object.__setattr__(self, name, value)

    ndim = property(lambda self: self._raw.ndim)
    size = property(lambda self: self._raw.size)
    itemsize = property(lambda self: self._raw.itemsize)
    nbytes = property(lambda self: self._raw.nbytes)
    flags = property(lambda self: self._raw.flags)
    T = property(lambda self: view_of(self, self._raw.T))
    mT = property(lambda self: view_of(self, self._raw.swapaxes(-1, -2)))
    # Indexing each element gives views for any strides, unlike a flattened copy.
    flat = property(lambda self: (self[index] for index in np.ndindex(*self.shape)))

    @property
    def device(self) -> "int":
        """The ordinal of its device; 0 for memory of no driver."""
        return 0 if self._owner is None else self._owner.block.device

    @property
    def data(self) -> "Pointer":
        """The memory, with its address as ``ptr``."""
        return Pointer(address_of(self))

    @property
    def real(self) -> "HostArray":
        """The real parts, in the same memory."""
        return view_of(self, self._raw.real)

    @real.setter
    def real(self, values: object) -> None:
        self.real[...] = values

    @property
    def imag(self) -> "HostArray":
        """The imaginary parts, in the same memory; zeros for real numbers."""
        if self.dtype.kind == "c":
            return view_of(self, self._raw.imag)
        return np.zeros_like(self)  # type: ignore[return-value]

    @imag.setter
    def imag(self, values: object) -> None:
        if self.dtype.kind != "c":
            raise TypeError("an array of real numbers has no imaginary part to set")
        self.imag[...] = values

    # NumPy's protocols

    __array_priority__ = 100.0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Any:
        return self._work.ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not all(issubclass(kind, (HostArray, np.ndarray)) for kind in types):
            # The other library's array may know how to handle both types.
            return NotImplemented
        return self._work.function(function, args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Raw:
        if self._work.strict:
            raise ArrayTypeError(
                f"a host array is not made a NumPy array by itself, as CuPy's is not: ask for a copy with .get(), or make "
                f"NumPy's array one of the driver's with {ASARRAY}"
            )
        if copy is False:
            raise ValueError("a NumPy array of a host array is a copy, which copy=False does not allow")
        values = self._values("a conversion to a NumPy array")
        values = values if dtype is None else values.astype(dtype, copy=False)
        # Without an explicit copy, a write to the result would not reach the array, so the result is read-only.
        values.flags.writeable = bool(copy)
        return values

    def __dlpack__(self, **options: Any) -> Any:
        self._work.finish([self], [], "an export by DLPack")
        return keeping(self).__dlpack__(**{name: value for name, value in options.items() if name != "stream"})

    def __dlpack_device__(self) -> tuple[int, int]:
        # DLPack numbers the CPU as device type 1.
        return (1, 0)

    def __buffer__(self, flags: int) -> memoryview:
        # Bit 0 is PyBUF_WRITABLE.
        if flags & 1:
            raise BufferError("a host array's memory is not written by a buffer: assign to the array")
        if self._work.strict:
            raise ArrayTypeError("a host array has no buffer, as CuPy's has none: ask for a copy with .get()")
        return memoryview(self._values("an export of its buffer")).toreadonly()  # type: ignore[arg-type]

    # To the host

    def _values(self, label: str) -> Raw:
        with self._work.home(self, label):
            self._work.finish([self], [], label)
        return self._raw.copy(order="K")

    def get(self, stream: object = None, order: str = "C", out: Raw | None = None, blocking: bool = True) -> Raw:
        """Return a copy as a NumPy array, from any device.

        The call waits for the work that writes the array.

        Parameters
        ----------
        stream : stream, optional
            Accepted for CuPy's sake; the call waits for the array's writers on all streams.
        order : {"C", "F", "A"}
        out : numpy.ndarray, optional
            Gets the values.
        blocking : bool
            Accepted for CuPy's sake; the copy is always complete.

        Returns
        -------
        numpy.ndarray
        """
        values = self._values("get()")
        if out is not None:
            np.copyto(out, values)
            return out
        return np.array(values, order=order)  # type: ignore[call-overload]

    def set(self, values: npt.ArrayLike, stream: object = None) -> None:
        """Copy values of the same shape and type into this array."""
        if np.shape(values) != self.shape or np.asarray(values).dtype != self.dtype:
            raise ArrayTypeError(f"set was given {np.asarray(values).dtype} {np.shape(values)} for {self.dtype} {self.shape}")
        self._work.queue(np.copyto, [self], [np.array(values)], "set")

    def item(self, *index: Any) -> Any:
        """Return one element as a Python number."""
        return self._values("item()").item(*index)

    def tolist(self) -> Any:
        """Return the elements as lists of Python numbers."""
        return self._values("tolist()").tolist()

    def tobytes(self, order: Literal["K", "A", "C", "F"] = "C") -> bytes:
        """Return the elements' bytes."""
        return self._values("tobytes()").tobytes(order)

    def _number(self, label: str) -> Any:
        if self.size != 1:
            raise TypeError(f"only an array of one element is a number; this one has shape {self.shape}")
        return self._values(label).reshape(())[()]

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __complex__(self) -> complex:
        return complex(self._number("complex()"))

    def __index__(self) -> int:
        if self._work.strict:
            raise TypeError("a host array is no index by itself, as CuPy's is not: use int(y)")
        return int(self._values("an index").__index__())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("the truth of an array of more than one element, or of none, is ambiguous: use any() or all()")
        return bool(self._number("bool()"))

    def __bytes__(self) -> bytes:
        return self.tobytes()

    def __contains__(self, value: object) -> bool:
        return bool((self == value).any())

    def __format__(self, form: str) -> str:
        return format(self._values("format()"), form) if form else str(self)

    def __repr__(self) -> str:
        return self._shown(repr)

    def __str__(self) -> str:
        return self._shown(str)

    def _shown(self, show: Callable[[Any], str]) -> str:
        try:
            values = self._work.read_unordered(self)
        except Exception:
            # A debugger may ask for a repr at any time, so this method never raises. It checks no order, and leaves failures of
            # queued work to the next wait.
            values = None
        if values is None:
            return f"<HostArray of shape {self.shape}, {self.dtype}>"
        return show(values).replace("array(", "HostArray(", 1)

    # Operators

    def __pow__(self, exponent: object) -> Any:
        if self.dtype == bool and type(exponent) is int and exponent == 2:
            # NumPy's operator squares booleans to int8, and `numpy.power` does not.
            return np.square(self)
        return super().__pow__(exponent)

    # As a sequence

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator["HostArray"]:
        if not self.shape:
            raise TypeError("an array without axes cannot be iterated over")
        return (self[index] for index in range(self.shape[0]))

    def __getitem__(self, index: object) -> "HostArray":
        found: HostArray = self._work.function(_getitem, (self, index), {})
        return found

    def __setitem__(self, index: object, values: object) -> None:
        self._work.function(_setitem, (self, index, values), {})

    # Copies

    def __copy__(self) -> "HostArray":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostArray":
        self._work.finish([self], [], "a deep copy")
        return self.copy()

    def __reduce__(self) -> Any:
        """Pickle the values as a NumPy array, since no driver travels along."""
        return np.array, (self.get(order="A"),)

    def copy(self, order: str = "C") -> "HostArray":
        """Return a copy on the current device."""
        return np.copy(self, order=order)  # type: ignore

    def astype(self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: Any = None, copy: bool = True) -> "HostArray":
        """Return a copy of another type."""
        dtype = np.dtype(dtype)
        if not copy and dtype == self.dtype:
            return self
        if not np.can_cast(self.dtype, dtype, casting):
            raise TypeError(f"{self.dtype} is not cast to {dtype} by the rule {casting!r}")
        made = self._work.like(self.shape, dtype, self._raw if order == "K" else None)
        self._work.queue(lambda to, values: np.copyto(to, values, "unsafe"), [made], [self], "astype")
        return made

    def view(self, dtype: Any = None) -> "HostArray":
        """Return the same memory, optionally as another type."""
        return view_of(self, self._raw.view() if dtype is None else self._raw.view(check_type(np.dtype(dtype))))

    def reshape(self, *shape: Any, order: Any = "C") -> "HostArray":
        """Return the elements in another shape.

        The result shares the memory if possible, else it is a copy.
        """
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[return-value]

    def transpose(self, *axes: Any) -> "HostArray":
        """Return the same memory with the axes in another order."""
        given = axes[0] if len(axes) == 1 and (axes[0] is None or not np.isscalar(axes[0])) else axes or None
        return np.transpose(self, given)  # type: ignore[return-value]

    def flatten(self, order: Literal["K", "A", "C", "F"] = "C") -> "HostArray":
        """Return a copy with one axis."""
        return np.ravel(self.copy(), order)  # type: ignore[return-value]

    def fill(self, value: object) -> None:
        """Set every element to a value."""
        self[...] = value

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        """Sort in place."""
        # Sorting an empty part refuses an invalid axis now, before the work runs.
        self._raw[:0].copy().sort(axis, kind)
        self._work.queue(lambda raw: raw.sort(axis, kind), [self], [], "sort")

    def partition(self, kth: Any, axis: int = -1, kind: Any = "introselect") -> None:
        """Partition in place; see `numpy.partition`."""
        self[...] = np.partition(self, kth, axis, kind)

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Any:
        """Limit the elements; see `numpy.clip`."""
        return np.clip(self, min, max, out)

    def compress(self, condition: Any, axis: int | None = None, out: Any = None) -> Any:
        """Select slices; see `numpy.compress`."""
        return np.compress(condition, self, axis, out)

    def byteswap(self, inplace: bool = False) -> "HostArray":
        """Return a copy with the bytes of each element reversed."""
        made = self if inplace else self.copy("K")
        self._work.queue(lambda raw: raw.byteswap(inplace=True), [made], [], "byteswap")
        return made

    def scatter_add(self, index: Any, values: Any) -> None:
        """Add values at an index.

        An element gets a value as often as the index names it.
        """
        np.add.at(self, index, values)

    def scatter_max(self, index: Any, values: Any) -> None:
        """Keep the larger of the elements at an index and values."""
        np.maximum.at(self, index, values)

    def scatter_min(self, index: Any, values: Any) -> None:
        """Keep the smaller of the elements at an index and values."""
        np.minimum.at(self, index, values)

    def tofile(self, file: Any, sep: str = "", format: str = "%s") -> None:
        """Write the values to a file; see `numpy.ndarray.tofile`."""
        self.get(order="A").tofile(file, sep, format)

    def dump(self, file: Any) -> None:
        """Pickle the values into a file; see `numpy.ndarray.dump`."""
        self.get(order="A").dump(file)

    def dumps(self) -> bytes:
        """Pickle the values."""
        return self.get(order="A").dumps()

    def dot(self, other: Any, out: Any = None) -> Any:
        """Return the product; see `numpy.dot`."""
        return np.dot(self, other, out=out)


# The slots are set through their descriptors, because `__setattr__` refuses shape, strides and dtype.
_put_raw, _put_owner, _put_work, _put_shape, _put_strides, _put_dtype = (
    getattr(HostArray, name).__set__ for name in ("_raw", "_owner", "_work", "shape", "strides", "dtype")
)


class Pointer:
    """An address, as CuPy's arrays expose it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def _getitem(array: HostArray, index: object) -> Any:
    return array[index]


def _setitem(array: HostArray, index: object, values: npt.ArrayLike) -> None:
    array[index] = values


getitem, setitem = _getitem, _setitem

_FUNCTIONS = (
    "all any argmax argmin argpartition argsort choose cumprod cumsum diagonal max mean min nonzero prod "
    "put ptp ravel repeat round searchsorted squeeze std sum swapaxes take trace var"
)


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def method(self: HostArray, *args: object, **kwargs: object) -> Any:
        return function(self, *args, **kwargs)

    method.__name__, method.__qualname__, method.__doc__ = name, f"HostArray.{name}", f"As `numpy.{name}` of this array."
    return method


for _name in _FUNCTIONS.split():
    setattr(HostArray, _name, _method(_name))
for _name in ("conj", "conjugate"):
    setattr(HostArray, _name, lambda self, out=None: np.conjugate(self, out=out))

Array = HostArray | Raw
"""Arrays that the driver accepts: its own arrays and NumPy's.

NumPy's arrays take part in no stream order.
"""


def owner_of(array: object) -> Any:
    """Return the owner of an array's memory.

    Returns None for an array that the driver did not make.
    """
    return array._owner if isinstance(array, HostArray) else None


def work_of(array: HostArray) -> Work:
    """Return the operations object of the array's driver."""
    return array._work


def view_of(array: HostArray, raw: Raw) -> HostArray:
    """Return an array over a part of another array's memory."""
    return HostArray(raw, array._owner, array._work)


def raw_view(array: Array) -> tuple[Raw, Any]:
    """Return the elements as a NumPy array, and the driver's block.

    The NumPy array does not keep the owner alive. The block is None for memory of no driver.
    """
    if not isinstance(array, HostArray):
        return array, None
    return array._raw, None if array._owner is None else array._owner.block


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    raw = array._raw if isinstance(array, HostArray) else array
    address: int = raw.__array_interface__["data"][0]
    return address


class _Keeper:
    def __init__(self, array: HostArray) -> None:
        self.array = array
        # The type string is opaque bytes, because ml_dtypes have none that NumPy understands. `keeping` restores the type.
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (address_of(array), not array.flags.writeable),
        }


def keeping(array: HostArray) -> Raw:
    """Return a NumPy array over the same memory.

    It keeps the host array alive.
    """
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return np.asarray(_Keeper(array)).view(array.dtype)
