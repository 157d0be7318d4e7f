"""Check the operands of a launch, and name them for messages."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from handlepool._util.names import kind_of
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.tensors.layout import View

TENSOR_ALIGNMENT = 16
"""Bytes that every tensor's address is a multiple of: our own kernels assume it, and cuDNN where a graph does not say otherwise.
An address that is not can end in a misaligned access, which no later call of the process survives."""


def operand_name(index: int, inputs: int = sys.maxsize, outs: int = 0) -> str:
    """Return what messages call the operand at a place of a call with so many inputs, and so many outputs in its ``out``."""
    if index < inputs:
        return f"argument {index}"
    return "out=" if outs == 1 else f"out[{index - inputs}]"


ASARRAY = "pool.driver.asarray"
"""What messages advise, to make an array of the driver's."""


def taken(driver: Driver) -> str:
    """Return what a driver takes as it is, for messages."""
    return " or ".join(map(kind_of, driver.array_types))


def check_operands(
    driver: Driver,
    name: str,
    device: int,
    operands: Sequence[Any],
    operand: Callable[[int], str] = operand_name,
    copied: Collection[int] = (),
) -> None:
    """Raise for the first array that a graph on a device cannot take; ``operand`` says what messages call it.

    Of those at the places in ``copied`` a copy is launched with, and they may begin at any element.

    Raises
    ------
    ArrayTypeError
        For what is no array of the driver's.
    DeviceMismatchError
        For an array on another device.
    ArgumentError
        For an array that is misaligned.
    """
    for index, array in enumerate(operands):
        kinds: Any = (*driver.array_types, View)
        if not isinstance(array, kinds):
            raise ArrayTypeError(
                f"{name}: {operand(index)} is a {kind_of(array)}; the {driver.name} driver takes {taken(driver)}"
            )
        found = driver.array_device(array)
        if found != device:
            raise DeviceMismatchError(
                f"{name}: {operand(index)} is on device {found} and the current device is {device}; make device {found} "
                f"current, or copy the array"
            )
        alignment = array.dtype.itemsize if index in copied else TENSOR_ALIGNMENT
        if array.size and (address := driver.array_pointer(array) % alignment):
            raise ArgumentError(
                f"{name}: {operand(index)}, of shape {array.shape}, begins {address} bytes past a multiple of "
                f"{alignment}, which no launch takes; pass a copy; for an output, pass another array, and copy from that"
            )
