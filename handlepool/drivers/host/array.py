"""Arrays of the host driver, which act as CuPy's arrays do.

Work on such an array is queued on the current stream, as with CuPy. A reader on the host waits for the work that writes the
array. So the class does not derive from NumPy's class, exposes no memory that could be read without a wait, and has no
``__array_interface__``. Otherwise `np.asarray`, `memoryview`, ``tolist`` or SciPy would read memory that queued work has yet to
write. NumPy's functions reach the array through NumPy's protocols, and `handlepool.drivers.host.array_functions` handles them.
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
"""The characters ``dtype.kind`` of the NumPy types that GPU memory may hold."""


def check_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Raise `ArrayTypeError` for a type that GPU memory cannot hold.

    GPU memory can hold numbers and truth values. It cannot hold Python objects and strings.
    """
    # A GPU also holds the types of ml_dtypes, whose kinds are not in `KINDS`. So only NumPy's own types are refused by kind.
    if dtype.hasobject or (dtype.kind not in KINDS and dtype.type.__module__.partition(".")[0] == "numpy"):
        raise ArrayTypeError(f"an array of type {dtype} cannot be in device memory; pass an array of numbers")
    return dtype


class Owner(Protocol):
    """An object that keeps an array's memory alive."""

    @property
    def block(self) -> "Memory":
        """The piece of memory that the owner keeps alive."""


class Memory(Protocol):
    """A piece of a device's memory."""

    device: int


class Work(Protocol):
    """The operations on arrays; each driver has one object of this type."""

    strict: bool

    def ufunc(self, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a NumPy universal function on the current stream."""

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a NumPy function, or wait for its inputs and run it."""

    def run_now(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, writes: object
    ) -> Any:
        """Wait for queued work on the arguments, then call ``function``."""

    def queue(self, function: Callable[..., object], writes: "Sequence[HostArray]", reads: Sequence[Any], label: str) -> None:
        """Queue a function of raw arrays on the current stream."""

    def finish(self, reads: "Sequence[HostArray]", writes: "Sequence[HostArray]", label: str) -> None:
        """Wait for queued work that must run before the host's accesses.

        The host will read ``reads`` and write ``writes``.
        """

    def home(self, array: "HostArray", label: str) -> AbstractContextManager[object]:
        """Make an array's device current in a ``with`` block."""

    def read_unordered(self, array: "HostArray") -> Raw | None:
        """Return a copy of an array's elements for display.

        Return None while the current stream is captured, and in a forked child, because the elements cannot be read then.
        """

    def like(self, shape: Sequence[int], dtype: npt.DTypeLike, pattern: Raw | None = None) -> "HostArray":
        """Return a new array on the current device.

        If ``pattern`` has the same shape, both arrays have the same order of axes in memory.
        """


class HostArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in the host driver's memory, with CuPy's names.

    `conv2d` and the other functions make such arrays, and so do the driver's ``asarray`` and ``empty``. NumPy's universal
    functions, reductions, indexing, copies, `numpy.concatenate`, `numpy.where`, `numpy.einsum`, `numpy.matmul` and `numpy.pad` of
    such an array are queued on the current stream. Any other NumPy function waits for the array, and runs at once.

    A conversion to a Python number or to a plain NumPy array waits: ``float(y)``, ``y.get()``, ``numpy.asarray(y)``,
    ``y.tolist()``. While the current stream is captured, such a conversion is an error, because captured work has not run.

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
        # Queued work holds the raw array. The raw array does not keep the owner alive, so the block can return to its arena
        # before that work has run, as on a GPU.
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
                raise AttributeError(
                    f"an array of strides {self.strides} cannot get the shape {value} without a copy: use reshape"
                )
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
    # The iterator gives a view of each element, whatever the strides are. A flattened array may be a copy, so its elements would
    # be no views.
    flat = property(lambda self: (self[index] for index in np.ndindex(*self.shape)))

    @property
    def device(self) -> "int":
        """Ordinal of the array's device; 0 if no driver owns the memory."""
        return 0 if self._owner is None else self._owner.block.device

    @property
    def data(self) -> "Pointer":
        """The array's memory, as an object with the address ``ptr``."""
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
            raise TypeError("an array of real numbers has no imaginary part to set; convert the array to a complex type first")
        self.imag[...] = values

    # NumPy's protocols

    __array_priority__ = 100.0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Any:
        return self._work.ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not all(issubclass(kind, (HostArray, np.ndarray)) for kind in types):
            # The class of another library's array may handle host arrays, so NumPy asks that class next.
            return NotImplemented
        return self._work.function(function, args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Raw:
        if self._work.strict:
            raise ArrayTypeError(
                f"NumPy cannot convert a host array implicitly, just as it cannot convert CuPy's arrays: make a copy by .get(), "
                f"or convert the NumPy array to an array of the driver with {ASARRAY}"
            )
        if copy is False:
            raise ValueError(
                "a host array becomes a NumPy array only by a copy, and copy=False forbids copies: pass copy=None or True"
            )
        values = self._values("a conversion to a NumPy array")
        values = values if dtype is None else values.astype(dtype, copy=False)
        # The result is a copy, so a write to it would not reach this array. If the caller did not ask for a copy, the result is
        # read-only.
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
            raise BufferError("a host array has no writable buffer: assign to the array's elements")
        if self._work.strict:
            raise ArrayTypeError("a host array has no buffer, just as CuPy's arrays have none: make a copy with .get()")
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
            Ignored: CuPy has this argument. The call waits for all work that writes the array, on any stream.
        order : {"C", "F", "A"}
        out : numpy.ndarray, optional
            The array to copy the values into.
        blocking : bool
            Ignored: CuPy has this argument. The copy is complete when the call returns.

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
            raise ArrayTypeError(
                f"set was given values of type {np.asarray(values).dtype} and shape {np.shape(values)} for an array of type "
                f"{self.dtype} and shape {self.shape}; type and shape must be the same"
            )
        self._work.queue(np.copyto, [self], [np.array(values)], "set")

    def item(self, *index: Any) -> Any:
        """Return one element as a Python number."""
        return self._values("item()").item(*index)

    def tolist(self) -> Any:
        """Return the elements as lists of Python numbers."""
        return self._values("tolist()").tolist()

    def tobytes(self, order: Literal["K", "A", "C", "F"] = "C") -> bytes:
        """Return the bytes of all elements."""
        return self._values("tobytes()").tobytes(order)

    def _number(self, label: str) -> Any:
        if self.size != 1:
            raise TypeError(f"an array of shape {self.shape} cannot become a number: select one element first, for example y[0]")
        return self._values(label).reshape(())[()]

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __complex__(self) -> complex:
        return complex(self._number("complex()"))

    def __index__(self) -> int:
        if self._work.strict:
            raise TypeError("a host array cannot be an index, just as CuPy's arrays cannot: use int(y)")
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
            # A debugger may ask for a repr at any time, so a repr raises no error. Without the values, the repr shows shape and
            # type.
            values = None
        if values is None:
            return f"<HostArray of shape {self.shape}, {self.dtype}>"
        return show(values).replace("array(", "HostArray(", 1)

    # Operators

    def __pow__(self, exponent: object) -> Any:
        if self.dtype == bool and type(exponent) is int and exponent == 2:
            # NumPy's operator ``**`` computes the square of booleans as int8 by `numpy.square`. `numpy.power`, which the base
            # class would call, does not.
            return np.square(self)
        return super().__pow__(exponent)

    # As a sequence

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length: use y.size for the number of elements")
        return self.shape[0]

    def __iter__(self) -> Iterator["HostArray"]:
        if not self.shape:
            raise TypeError("an array without axes cannot be iterated over: use y.item() for its element")
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
        """Pickle a NumPy copy of the array, because drivers cannot be pickled."""
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
            raise TypeError(
                f"an array of type {self.dtype} cannot be cast to {dtype} with casting={casting!r}; use casting='unsafe'"
            )
        made = self._work.like(self.shape, dtype, self._raw if order == "K" else None)
        self._work.queue(lambda to, values: np.copyto(to, values, "unsafe"), [made], [self], "astype")
        return made

    def view(self, dtype: Any = None) -> "HostArray":
        """Return an array over the same memory, optionally of another type."""
        return view_of(self, self._raw.view() if dtype is None else self._raw.view(check_type(np.dtype(dtype))))

    def reshape(self, *shape: Any, order: Any = "C") -> "HostArray":
        """Return the elements in another shape.

        If possible, the result shares the memory of this array. If not, the result is a copy.
        """
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[return-value]

    def transpose(self, *axes: Any) -> "HostArray":
        """Return an array over the same memory, with reordered axes."""
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
        # To sort an empty part raises for an invalid axis now, in the caller's line. The queued work would raise later.
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
        """Add ``values`` to the elements at ``index``.

        If the index names an element several times, each of the values for it is added.
        """
        np.add.at(self, index, values)

    def scatter_max(self, index: Any, values: Any) -> None:
        """Set each element at ``index`` to its maximum with ``values``."""
        np.maximum.at(self, index, values)

    def scatter_min(self, index: Any, values: Any) -> None:
        """Set each element at ``index`` to its minimum with ``values``."""
        np.minimum.at(self, index, values)

    def tofile(self, file: Any, sep: str = "", format: str = "%s") -> None:
        """Write the values to a file; see `numpy.ndarray.tofile`."""
        self.get(order="A").tofile(file, sep, format)

    def dump(self, file: Any) -> None:
        """Pickle the values into a file; see `numpy.ndarray.dump`."""
        self.get(order="A").dump(file)

    def dumps(self) -> bytes:
        """Return the pickled values; see `numpy.ndarray.dumps`."""
        return self.get(order="A").dumps()

    def dot(self, other: Any, out: Any = None) -> Any:
        """Return the product; see `numpy.dot`."""
        return np.dot(self, other, out=out)


# `HostArray.__setattr__` refuses shape, strides and dtype, so `HostArray.__init__` sets the slots through these descriptors.
_put_raw, _put_owner, _put_work, _put_shape, _put_strides, _put_dtype = (
    getattr(HostArray, name).__set__ for name in ("_raw", "_owner", "_work", "shape", "strides", "dtype")
)


class Pointer:
    """Hold an array's address as ``ptr``; ``array.data`` is such an object."""

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

Streams do not order the accesses to NumPy's arrays.
"""


def owner_of(array: object) -> Any:
    """Return the owner of an array's memory.

    If the driver did not make the array, return None.
    """
    return array._owner if isinstance(array, HostArray) else None


def work_of(array: HostArray) -> Work:
    """Return the operations object of the array's driver."""
    return array._work


def view_of(array: HostArray, raw: Raw) -> HostArray:
    """Return a `HostArray` over ``raw``, which views the memory of ``array``."""
    return HostArray(raw, array._owner, array._work)


def raw_view(array: Array) -> tuple[Raw, Any]:
    """Return a NumPy array over an array's memory, and its block.

    The NumPy array does not keep the owner of the memory alive. If no driver owns the memory, the block is None.
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
        # NumPy understands no type string for the types of ml_dtypes. So the string says opaque bytes, and `keeping` restores the
        # type.
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (address_of(array), not array.flags.writeable),
        }


def keeping(array: HostArray) -> Raw:
    """Return a NumPy array over the memory of a host array.

    The NumPy array keeps the host array alive.
    """
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return np.asarray(_Keeper(array)).view(array.dtype)
