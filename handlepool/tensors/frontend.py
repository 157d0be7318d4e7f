"""Provide the frontend's data types and empty graphs to both drivers.

The module maps NumPy's types to the frontend's types. nvidia-cudnn-frontend is imported when it is first needed, so that
importing handlepool stays quick.
"""

from functools import cache
from typing import Any

import numpy as np

from handlepool.errors import ArrayTypeError
from handlepool.tensors.device_properties import DeviceProperties

NAMES = {
    "float16": "HALF",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOLEAN",
    "float8_e4m3fn": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
}
"""The frontend's name of each data type, by NumPy's name."""


def data_type(dtype: Any) -> Any:
    """Return the frontend's data type for a NumPy type.

    Parameters
    ----------
    dtype : numpy.dtype, or a value that NumPy converts to a type
        bfloat16 and the 8-bit floating-point types come from ml_dtypes.

    Raises
    ------
    ArrayTypeError
        For a type that cuDNN lacks.
    """
    return _data_type(np.dtype(dtype))


# The result is cached, because NumPy takes microseconds to compute a type's name.
@cache
def _data_type(dtype: np.dtype[Any]) -> Any:
    import cudnn

    if dtype.name not in NAMES:
        raise ArrayTypeError(f"cuDNN has no data type {dtype.name!r}; pass a type that cuDNN has: {', '.join(NAMES)}")
    return getattr(cudnn.data_type, NAMES[dtype.name])


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """Return NumPy's type for a type of the frontend.

    Raises
    ------
    ArrayTypeError
        For a type that NumPy lacks, and for a type that needs ml_dtypes if this package is missing.
    """
    return _numpy_dtype(kind.name)


@cache
def _numpy_dtype(kind: str) -> np.dtype[Any]:
    name = next((name for name, upper in NAMES.items() if upper == kind), None)
    if name is None:
        raise ArrayTypeError(f"NumPy has no type for cuDNN's {kind}; give the tensor another data type")
    try:
        return np.dtype(name)
    # NumPy itself has no type of this name. The package ml_dtypes has it.
    except TypeError:
        try:
            import ml_dtypes
        except ImportError as error:
            raise ArrayTypeError(f"arrays of {name} need the package ml_dtypes: pip install ml_dtypes") from error
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def convolution_mode(name: str) -> Any:
    """Return the frontend's convolution mode; None for "cross_correlation", which is its default.

    Parameters
    ----------
    name : {"cross_correlation", "convolution"}
    """
    import cudnn

    if name == "cross_correlation":
        return None
    return getattr(cudnn._pybind_module.convolution_mode, name.upper())  # noqa: SLF001 - public nowhere, though methods take it


def new_graph(
    *,
    name: str = "handlepool",
    io_dtype: object = None,
    intermediate_dtype: object = None,
    compute_dtype: object = None,
    device: DeviceProperties | None = None,
) -> Any:
    """Return an empty `cudnn.pygraph`.

    Parameters
    ----------
    name : str
    io_dtype, intermediate_dtype, compute_dtype : numpy.dtype, optional
        Default types of real tensors, of virtual tensors between nodes, and of the arithmetic.
    device : DeviceProperties, optional
        The description of a device to plan for. A graph without a description can be read, but needs a handle to be planned.

    Raises
    ------
    ArgumentError
        If the installed cuDNN does not take the description.
    """
    import cudnn

    def convert(dtype: object) -> Any:
        return None if dtype is None else data_type(dtype)

    described = {} if device is None else {"device_property": device.native, "sm_version": device.architecture}
    return cudnn.pygraph(
        name=name,
        io_data_type=convert(io_dtype),
        intermediate_data_type=convert(intermediate_dtype),
        compute_data_type=convert(compute_dtype),
        **described,
    )
