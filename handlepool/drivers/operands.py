"""Check the operands of a launch, and name them for messages."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from handlepool._util.names import kind_of
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.tensors.layout import View

TENSOR_ALIGNMENT = 16
"""Alignment in bytes of every tensor's address.

This package's kernels assume this alignment, and so does cuDNN unless a graph declares another alignment. A misaligned access
destroys the CUDA context, so every later CUDA call of the process fails.
"""


def operand_name(index: int, inputs: int = sys.maxsize, outs: int = 0) -> str:
    """Return the name of an operand for messages.

    ``inputs`` is the number of inputs, and ``outs`` the number of arrays in ``out``.
    """
    if index < inputs:
        return f"argument {index}"
    return "out=" if outs == 1 else f"out[{index - inputs}]"


ASARRAY = "pool.driver.asarray"
"""The function that messages recommend for converting arrays to the driver's type."""


def taken(driver: Driver) -> str:
    """Name the array types that a driver takes, for messages."""
    return " or ".join(map(kind_of, driver.array_types))


def check_operands(
    driver: Driver,
    name: str,
    device: int,
    operands: Sequence[Any],
    operand: Callable[[int], str] = operand_name,
    copied: Collection[int] = (),
) -> None:
    """Raise for the first array of ``operands`` that a launch cannot take.

    The graph ``name`` was planned for ``device``. ``operand`` returns the name of an operand for messages. A launch copies the
    operands whose indices are in ``copied``, so these arrays may begin at any element.

    Raises
    ------
    ArrayTypeError
        For an object that is no array of the driver.
    DeviceMismatchError
        For an array on another device than ``device``.
    ArgumentError
        For an array whose address is misaligned.
    """
    for index, array in enumerate(operands):
        kinds: Any = (*driver.array_types, View)
        if not isinstance(array, kinds):
            raise ArrayTypeError(
                f"{name}: {operand(index)} is a {kind_of(array)}; the {driver.name} driver takes {taken(driver)}; "
                f"convert the array first, for example with {ASARRAY}"
            )
        found = driver.array_device(array)
        if found != device:
            raise DeviceMismatchError(
                f"{name}: {operand(index)} is on device {found} and the current device is {device}; make device {found} "
                f"current, or copy the array"
            )
        # An operand that is copied into scratch needs only the alignment of its elements.
        alignment = array.dtype.itemsize if index in copied else TENSOR_ALIGNMENT
        if array.size and (address := driver.array_pointer(array) % alignment):
            raise ArgumentError(
                f"{name}: {operand(index)}, of shape {array.shape}, begins {address} bytes past a multiple of {alignment}, and a "
                f"launch needs an address that is such a multiple. Pass a copy; for an output, pass another array, and copy "
                f"the result from that array"
            )
