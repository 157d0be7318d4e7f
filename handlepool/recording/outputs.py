"""Copy a program's outputs into arrays for the caller.

The copies are in the same structure of lists, tuples and dictionaries as the outputs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from handlepool._util.arguments import check_ends
from handlepool._util.names import kind_of
from handlepool.drivers.operands import taken
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.order.stream_order import integration
from handlepool.recording import tensors
from handlepool.recording.update import PLAIN, Copy, is_foreign, keys_of, overlapping, piece_of
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import overlaps_itself, share

UNCHANGED = (type(None), Enum, np.dtype, *PLAIN)
"""Types of outputs that a call returns as they are."""


def is_returned(value: Any) -> bool:
    """Return whether ``value`` is a container that a call can rebuild.

    Such containers are lists, tuples, dictionaries and named tuples. A container of any other class could only be rebuilt by code
    of that class.
    """
    if type(value) in (list, tuple, dict, OrderedDict):
        return True
    return isinstance(value, tuple) and hasattr(value, "_fields") and not getattr(value, "__dict__", None)


def is_unchanged(value: object) -> bool:
    """Return whether a call can return this value itself, without a copy."""
    return isinstance(value, UNCHANGED) or (isinstance(value, tuple) and all(map(is_unchanged, value)))


def tuple_of(kind: Any, entries: list[Any]) -> Any:
    """Return a tuple of class ``kind``, without running code of the class."""
    try:
        return tuple.__new__(kind, entries)
    # A class that is written in C refuses `tuple.__new__`, and is called instead.
    except TypeError:
        return kind(entries)


def container_like(value: Any, entries: list[Any]) -> Any:
    """Return a container of the class of ``value``, with other entries."""
    if isinstance(value, dict):
        return type(value)(zip(value, entries, strict=True))
    return entries if isinstance(value, list) else tuple_of(type(value), entries)


class Results:
    """Choose a target array for each output of one call.

    The target of an output is the array that the caller gave for it in ``out``, or a new array.

    Attributes
    ----------
    value
        The target arrays, in the structure of the outputs.
    copies : list of Copy
        The copies from outputs to targets, for `copy_all`.
    pieces : list of Piece
        The memory that the copies write.

    Parameters
    ----------
    driver : Driver
    name : str
        Name of the program.
    device : int
        Ordinal of the program's device, which is current.
    outputs
        The value that the program's function returned.
    out
        Arrays in the structure of ``outputs``. None in place of an array asks for a new array.

    Raises
    ------
    ArgumentError
        If ``out`` has another structure, shape or type than the outputs. If two arrays of ``out`` share memory. If an output is
        neither an array nor a number, a string or None. If a container contains itself.
    ArrayTypeError
        If an output, or an array of ``out``, is an array of a library that the driver cannot copy.
    DeviceMismatchError
        If an array of ``out`` is on another device.
    """

    def __init__(self, driver: Driver, name: str, device: int, outputs: object, out: object) -> None:
        self._driver = driver
        self._name = name
        self._device = device
        self._made: dict[tuple[int, int], Any] = {}
        self.copies: list[Copy] = []
        try:
            self.value = self._entry(f"{name}: out", outputs, out)
        except RecursionError:
            # The recursion comes from a container that contains itself. `check_ends` raises an error that names the container.
            check_ends(f"{name} returned", outputs)
            raise
        targets = [copy.target for copy in self.copies]
        self.pieces = [piece_of(driver, target) for target in targets]
        # `overlapping` compares only the ranges from first to last byte. `share` also takes the gaps in the pieces into account.
        for one, other in overlapping(driver, targets):
            if share(self.pieces[one], self.pieces[other]):
                first, second = (self.copies[index].place for index in sorted((one, other)))
                raise ArgumentError(
                    f"{first} and {second[len(name) + 2 :]} share memory, but each would get its own result; pass arrays that "
                    "share no memory, or None for one of them"
                )

    def _entry(self, place: str, output: Any, given: Any) -> Any:
        if is_returned(output):
            keys: Sequence[Any] = list(output) if isinstance(output, dict) else range(len(output))
            if given is not None:
                keys_of(place, tuple(output) if isinstance(output, list) else output, given)
            entries = [self._entry(f"{place}[{key!r}]", output[key], None if given is None else given[key]) for key in keys]
            return container_like(output, entries)
        if isinstance(output, self._driver.array_types):
            return self._array(place, output, given)
        if tensors.takes(self._driver, output, self._device):
            return self._tensor(place, output, given)
        if is_foreign(output):
            raise ArrayTypeError(
                f"{self._name} returned a {kind_of(output)}, which the {self._driver.name} driver cannot copy: replay the "
                "program instead, and copy program.outputs by the array's own library, on the stream of the replay"
            )
        if not is_unchanged(output):
            raise ArgumentError(
                f"{self._name} returned a {kind_of(output)}, which a call cannot copy: return arrays in lists, tuples and "
                "dictionaries, or replay the program and read program.outputs"
            )
        if given is not None:
            raise ArgumentError(f"{place} stands for a {kind_of(output)}, which is no array; pass None in its place")
        return output

    def _array(self, place: str, output: Any, given: Any) -> Any:
        # The key has both identifiers, because the caller may give two arrays for the same output.
        key = id(output), id(given)
        target = self._made.get(key)
        if target is None:
            target = self._made[key] = new_like(self._driver, output) if given is None else self._checked(place, output, given)
            same = [(self._driver.array_pointer(each), each.strides) for each in (output, target)]
            # If the caller gave the output itself as the target, no copy is needed.
            if output.size and same[0] != same[1]:
                self.copies.append(Copy(place, target, output, same[1][0] - same[0][0]))
        return target

    def _tensor(self, place: str, output: Any, given: Any) -> Any:
        key = id(output), id(given)
        if key not in self._made:
            target = given
            if given is None:
                with self._driver.relaxed():
                    target = integration().empty_like(output)
            else:
                tensors.check_alike(self._driver, place, output, given, self._device, strides=False)
            into, source = (tensors.elements(self._driver, place, each) for each in (target, output))
            if source.size and overlaps_itself(into.shape, into.strides, into.dtype.itemsize):
                raise ArgumentError(f"{place} has elements that overlap; pass a tensor whose elements do not overlap")
            same = [(self._driver.array_pointer(each), each.strides) for each in (source, into)]
            if source.size and same[0] != same[1]:
                self.copies.append(Copy(place, into, source, same[1][0] - same[0][0], target))
            self._made[key] = target
        return self._made[key]

    def _checked(self, place: str, output: Any, given: Any) -> Any:
        driver = self._driver
        if not isinstance(given, driver.array_types):
            raise ArrayTypeError(f"{place} is a {kind_of(given)}; the {driver.name} driver takes {taken(driver)}")
        found: Any = given
        for what, returned, there in (("shape", output.shape, found.shape), ("type", output.dtype, found.dtype)):
            if returned != there:
                raise ArgumentError(
                    f"{place} has {what} {there}, but the result of {self._name} has {what} {returned}; pass an array of that "
                    f"{what}, or None"
                )
        if not getattr(found.flags, "writeable", True):
            raise ArgumentError(f"{place} is a read-only array; pass a writeable array, or None")
        if found.size and overlaps_itself(found.shape, found.strides, found.dtype.itemsize):
            raise ArgumentError(
                f"{place} has strides {found.strides} bytes: its elements overlap; pass an array whose elements do not overlap"
            )
        where = driver.array_device(given)
        if where != self._device:
            raise DeviceMismatchError(
                f"{place} is on device {where}, and the program on device {self._device}; pass an array on that device, or None"
            )
        return given


def steps_without_gaps(array: DeviceArray) -> tuple[int, ...]:
    """Return strides in bytes for a new array without gaps.

    The axes of the new array have the same order in memory as the axes of ``array``.
    """
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    return tuple([step * array.dtype.itemsize for step in dense_strides(array.shape, order)])


def new_like(driver: Driver, array: Any) -> Any:
    """Return a new array without gaps, of an array's shape and type.

    The axes of the new array have the same order in memory as the axes of ``array``.
    """
    with driver.relaxed():
        return driver.empty(array.shape, steps_without_gaps(array), array.dtype)
