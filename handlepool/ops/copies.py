"""Copy arrays between the host and the current pool's device."""

from typing import Any

import numpy as np

from handlepool._util.names import kind_of
from handlepool.drivers.operands import taken
from handlepool.errors import ArrayTypeError
from handlepool.pool.default import chosen_pool
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray


def asarray(values: object, *, pool: HandlePool | None = None) -> Any:
    """Copy values to the current device, on the current stream.

    Parameters
    ----------
    values : array or sequence
        An array of the host, or any value that ``numpy.asarray`` accepts. An array of the driver is returned unchanged.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        An array of CuPy or of the host driver, with the type and layout of ``values``.

    Raises
    ------
    ArrayTypeError
        For values that no device can hold, such as texts.
    CaptureError
        In the second call of a function that is being recorded, if ``values`` differ from the values of the first call. The
        program would hold the values as constants.

    Examples
    --------
    >>> x = handlepool.asarray(numpy.ones((1, 8, 8, 8), "float32"))                                      # doctest: +SKIP
    """
    driver = chosen_pool("asarray", pool).driver
    # The host driver accepts NumPy arrays as operands, so NumPy's type is among its array types. A NumPy array is copied even
    # so, because the caller asks for an array of the driver's own type.
    if isinstance(values, driver.array_types) and not isinstance(values, np.ndarray):
        return values
    return driver.asarray(values)


def asnumpy(array: DeviceArray, *, pool: HandlePool | None = None) -> np.ndarray[Any, Any]:
    """Copy an array to the host, after the current stream's work.

    Parameters
    ----------
    array : array
        An array of CuPy or of the host driver.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    numpy.ndarray
        An array with the type and layout of ``array``. The host waits for the copy.

    Raises
    ------
    ArrayTypeError
        For an array of another library. Use that library's own function, such as ``tensor.cpu().numpy()``.

    Examples
    --------
    >>> values = handlepool.asnumpy(y)                                                                   # doctest: +SKIP
    """
    driver = chosen_pool("asnumpy", pool).driver
    if not isinstance(array, driver.array_types):
        raise ArrayTypeError(
            f"asnumpy was given a {kind_of(array)}; the {driver.name} driver takes {taken(driver)}. Copy another library's array "
            f"by that library's function, such as tensor.cpu().numpy()"
        )
    return driver.asnumpy(array)
