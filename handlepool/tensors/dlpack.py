"""Read arrays of other libraries by DLPack and the CUDA array interface.

Reading imports no other library and copies nothing.

A capsule of DLPack is read without being consumed. The capsule keeps the memory alive, and its destructor releases the memory.
(DLPack, C API of version 1, https://dmlc.github.io/dlpack/latest/c_api.html; CUDA Array Interface, version 3, of Numba's
documentation.)
"""

import ctypes
from typing import Any

import numpy as np

from handlepool._util.names import kind_of
from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import HOST, UNKNOWN, View, as_dtype

# These are DLPack's device types for CPU memory, for memory pinned by CUDA, and for memory pinned by ROCm.
_HOST_MEMORY = (1, 3, 11)
# These are DLPack's device types for the memory of a CUDA device, and for managed memory.
_GPU_MEMORY = (2, 13)
_KINDS = {0: "int", 1: "uint", 2: "float", 6: "bool"}
_NAMED = {4: "bfloat16", 10: "float8_e4m3fn", 12: "float8_e5m2"}
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_called = ctypes.pythonapi.PyCapsule_IsValid
_is_called.restype, _is_called.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def device_of(array: Any) -> int:
    """Return the ordinal of an array's GPU, or `HOST`."""
    kind, ordinal = array.__dlpack_device__()
    kind = int(kind)
    if kind in _HOST_MEMORY:
        return HOST
    if kind not in _GPU_MEMORY:
        raise ArrayTypeError(
            f"the array is on a device of DLPack's type {kind}, and only the host and CUDA devices are supported; copy the array "
            f"to the host or a CUDA device"
        )
    return int(ordinal)


def from_dlpack(array: Any, stream: int) -> View:
    """Return a view of another library's array, by DLPack.

    Parameters
    ----------
    array : object
        Has the methods ``__dlpack__`` and ``__dlpack_device__``.
    stream : int
        The ``cudaStream_t`` that will read the array. The array's library makes this stream wait for the work that produces the
        array.

    Raises
    ------
    ArrayTypeError
        For an array that its library refuses to export, and for types that cuDNN lacks.
    """
    device = device_of(array)
    # In this package, a pointer of 0 is the legacy default stream. DLPack forbids 0 as ambiguous, and uses 1 for that stream.
    asked: dict[str, Any] = {"stream": None if device == HOST else stream or 1}
    try:
        try:
            # Only a versioned capsule tells whether the array is read-only.
            capsule = array.__dlpack__(max_version=(1, 0), **asked)
        except TypeError:
            # A library that is older than DLPack 1 does not take ``max_version``.
            capsule = array.__dlpack__(**asked)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayTypeError(
            f"a {kind_of(array)} does not export its memory by DLPack, for the reason that its library gives: {error}"
        ) from error
    readonly = False
    if _is_called(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        tensor, readonly = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    else:
        tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    dtype = _dtype(tensor.code, tensor.bits, tensor.lanes)
    shape = tuple(tensor.shape[: tensor.ndim])
    # DLPack allows a null pointer for the strides of a contiguous array.
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense_strides(shape)
    # `ctypes` gives None for a null pointer, which an empty array may have.
    pointer = (tensor.data or 0) + tensor.byte_offset
    # The capsule is not consumed, so its destructor releases the memory. The view therefore keeps the capsule, and the array
    # that made the capsule.
    return View(pointer, shape, tuple([step * dtype.itemsize for step in strides]), dtype, device, readonly, (capsule, array))


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    name = _NAMED.get(code)
    if name is None and code in _KINDS:
        name = "bool" if code == 6 else f"{_KINDS[code]}{bits}"
    if name is None or lanes != 1:
        raise ArrayTypeError(
            f"the array has DLPack's type code {code} with {bits} bits and {lanes} lanes, and cuDNN has no such type; convert "
            f"the array to another type"
        )
    return as_dtype(name)


def from_cuda_array(array: Any) -> tuple[View, int | None]:
    """Return a view of an array with a ``__cuda_array_interface__``.

    The interface does not name the array's device.

    Returns
    -------
    View
    int or None
        Pointer of the stream that the interface names: work of this stream may still use the memory. None if the interface names
        no stream.

    Raises
    ------
    ArrayTypeError, ArgumentError
        For an array that cuDNN cannot take.
    """
    described = array.__cuda_array_interface__
    if described.get("mask") is not None:
        raise ArrayTypeError(f"a {kind_of(array)} has a mask, and cuDNN has no masks; pass the array's data")
    typestr = str(described["typestr"])
    if typestr.startswith(">"):
        raise ArrayTypeError(
            f"a {kind_of(array)} has type {typestr!r}, whose byte order differs from the GPU's; make the array little-endian"
        )
    dtype = as_dtype(typestr)
    shape = tuple(described["shape"])
    strides = described.get("strides")
    strides = tuple([step * dtype.itemsize for step in dense_strides(shape)]) if strides is None else tuple(strides)
    pointer, readonly = described["data"]
    stream = described.get("stream")
    if stream == 0:
        raise ArgumentError(
            f"a {kind_of(array)} names stream 0, which the CUDA array interface forbids as ambiguous; use 1 for the "
            "legacy default stream"
        )
    view = View(int(pointer), shape, strides, dtype, UNKNOWN, bool(readonly), array)
    # In the interface the legacy default stream is 1. In this package it is 0.
    return view, None if stream is None else 0 if stream == 1 else int(stream)
