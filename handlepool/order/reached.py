"""Walk a call's arguments once, for all uses.

The result serves to order the call, to keep its values, to find torch tensors, and to measure first calls.
"""

from collections.abc import Callable, Iterable
from sys import modules
from types import FunctionType
from typing import Any

import numpy as np

from handlepool._util.protocols import has_protocol
from handlepool._util.reachable import Opaque, attribute_leaves, bound_call, leaves
from handlepool.drivers.protocol import Driver
from handlepool.tensors.layout import Piece, piece

_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None)))
"""Types of most options, whose values are never arrays."""


class Reached:
    """The values that a call reaches now, and the arrays among them.

    Parameters
    ----------
    driver : Driver
        The driver whose arrays are found, besides arrays of other libraries.
    function : callable
        The called function. The values include the object of a bound method, and a callable object itself.
    args, kwargs : tuple, dict
        The call's arguments.

    Attributes
    ----------
    values : list
        Values of the arguments, then of the function, then of the attributes of objects among these.
    arrays : list of (array, Piece)
        Arrays among ``values`` with their memory, in the order of ``values``.
    given : int
        Number of arrays that are reached from the arguments without an attribute.
    direct : int
        Number of values that are reached without an attribute.
    pieces : list of Piece
        The memory of the arrays that have elements.
    opaque : bool
        Whether an object among the values may lead to any array, so that the call may use any memory.
    flat : bool
        Whether the arguments are the driver's arrays and plain values, and the function is bound to nothing. The arguments of
        such a call need no walk.
    flags : list
        The arguments of a flat call that are True, False or None.
    """

    __slots__ = ("arrays", "direct", "flags", "flat", "given", "opaque", "pieces", "values")

    def __init__(self, driver: Driver, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        native = driver.array_types[0]
        values = [*args, *kwargs.values()] if kwargs else [*args]
        self.flat = type(function) is FunctionType and not (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__
        )
        arrays: list[tuple[Any, Piece]] = []
        self.flags: list[bool | None] = []
        self.pieces: list[Piece] = []
        if self.flat:
            for value in values:
                if type(value) is native:
                    memory = driver.memory_of(value)
                    arrays.append((value, memory))
                    if memory[1] > memory[0]:
                        self.pieces.append(memory)
                elif value is None or value is True or value is False:
                    self.flags.append(value)
                elif type(value) not in _PLAIN:
                    self.flat = False
                    break
            self.given, self.direct, self.opaque = len(arrays), len(values), False
        if not self.flat:
            owners: list[Any] = []
            values = [*leaves(args, kwargs, calls=True, owners=owners)]
            own = [*leaves(bound_call(function), calls=True, owners=owners)]
            deeper = attribute_leaves(owners) if owners else []
            arrays = arrays_among(driver, values)
            self.given, self.direct = len(arrays), len(values) + len(own)
            own += deeper
            arrays += arrays_among(driver, own)
            values += own
            self.pieces = [memory for _, memory in arrays if memory[1] > memory[0]]
            self.opaque = Opaque in map(type, values)
        self.arrays = arrays
        self.values = values


def arrays_among(driver: Driver, values: Iterable[Any]) -> list[tuple[Any, Piece]]:
    """Return each array among ``values``, of any library, and its memory."""
    natives, memory_of, found = driver.array_types, driver.memory_of, []
    for value in values:
        if isinstance(value, natives):
            found.append((value, memory_of(value)))
        elif type(value) not in _PLAIN and (memory := _foreign_piece(value)) is not None:
            found.append((value, memory))
    return found


def arrays_in(driver: Driver, *values: object, calls: bool = False) -> list[tuple[Any, Piece]]:
    """Return each array that ``values`` lead to, and its memory."""
    if len(values) == 1 and type(values[0]) is driver.array_types[0]:
        return [(values[0], driver.memory_of(values[0]))]
    return arrays_among(driver, leaves(*values, calls=calls))


def pieces_of(driver: Driver, *values: object, calls: bool = False) -> list[Piece]:
    """Return the memory of non-empty arrays that values lead to."""
    return [memory for _, memory in arrays_in(driver, *values, calls=calls) if memory[1] > memory[0]]


def piece_of(driver: Driver, value: Any) -> Piece | None:
    """Return the memory of an array of any library, or None.

    The result is None if ``value`` is no array, or if its memory is unknown.
    """
    # `_foreign_piece` takes any error for a missing array. An error of `memory_of` must not hide an array, so this call stands
    # outside of the ``try`` there.
    return driver.memory_of(value) if isinstance(value, driver.array_types) else _foreign_piece(value)


def _foreign_piece(value: Any) -> Piece | None:
    """Return the memory of another library's array, or None if unknown."""
    try:
        if is_tensor(value):
            size = value.element_size()
            return piece(value.data_ptr(), value.shape, [step * size for step in value.stride()], size)
        for protocol in ("__cuda_array_interface__", "__array_interface__"):
            if has_protocol(value, protocol) and not isinstance(value, (type, np.generic)):
                known = getattr(value, protocol)
                kind = np.dtype(known["typestr"])
                shape, strides = tuple(known["shape"]), known.get("strides")
                if strides is None:
                    strides = np.empty(0, kind).itemsize * np.cumprod([1, *shape[:0:-1]])[::-1]
                return piece(known["data"][0], shape, [int(step) for step in strides], kind.itemsize)
    # A sparse array, a proxy, and an array without memory may raise an error. The memory of such an array counts as unknown.
    except Exception:
        return None
    return None


def is_tensor(value: object) -> bool:
    """Return whether a value is a torch tensor."""
    return "torch" in modules and isinstance(value, getattr(modules["torch"], "Tensor", ()))
