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
        An array of the host, or a value for ``numpy.asarray``. An array of the driver's own is returned as it is.
    pool : HandlePool, optional
        The default pool, or a branch's own, where none is given.

    Returns
    -------
    array
        CuPy's, or of the host driver, of the type and the layout of ``values``.

    Raises
    ------
    ArrayTypeError
        For values that fit no device, as texts.
    CaptureError
        In the second call of a function that is recorded, for other values than in the first: equal ones are a constant.

    Examples
    --------
    >>> x = handlepool.asarray(numpy.ones((1, 8, 8, 8), "float32"))                                      # doctest: +SKIP
    """
    driver = chosen_pool("asarray", pool).driver
    # The host driver takes NumPy arrays as operands, so they are among its array types. They are copied here all the same,
    # because the caller asks for an array of the driver.
    if isinstance(values, driver.array_types) and not isinstance(values, np.ndarray):
        return values
    return driver.asarray(values)


def asnumpy(array: DeviceArray, *, pool: HandlePool | None = None) -> np.ndarray[Any, Any]:
    """Copy an array to the host, after the current stream's work.

    Parameters
    ----------
    array : array
        CuPy's, or of the host driver.
    pool : HandlePool, optional
        The default pool, or a branch's own, where none is given.

    Returns
    -------
    numpy.ndarray
        Of the type and the layout of ``array``. The host waits for the copy, and the current stream stays current.

    Raises
    ------
    ArrayTypeError
        For an array of another library, which has a way of its own, as ``tensor.cpu().numpy()``.

    Examples
    --------
    >>> values = handlepool.asnumpy(y)                                                                   # doctest: +SKIP
    """
    driver = chosen_pool("asnumpy", pool).driver
    if not isinstance(array, driver.array_types):
        raise ArrayTypeError(
            f"asnumpy was given a {kind_of(array)}; the {driver.name} driver takes {taken(driver)}. Copy another library's array "
            f"by its own function, as tensor.cpu().numpy()"
        )
    return driver.asnumpy(array)
