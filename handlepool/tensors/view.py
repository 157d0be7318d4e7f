"""Memory that another library owns, in the form in which drivers read arrays."""

from typing import Any

import numpy as np

HOST = -1
"""Stands for a device's ordinal where memory is the host's."""
UNKNOWN = -2
"""Stands for a device's ordinal where the library does not say."""


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
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def __repr__(self) -> str:
        return f"<View of {self.dtype} {self.shape} at {self.ptr:#x} of {type(self.owner).__qualname__}>"

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy array over host memory that keeps the owner alive."""
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
