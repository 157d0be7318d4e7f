"""Find the key of a call of a recorded function.

Calls with the same key use the same programs.

The key contains the shape, strides and type of each array among the arguments, and which of them share memory. For numbers, text
and flags the key contains the value, with its type and sign. For any other object the key contains the identity. The state inside
such an object is compared by guards, see `handlepool.recording.guards`.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, MappingView, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from handlepool._util.names import kind_of
from handlepool._util.protocols import holds_values
from handlepool.drivers.protocol import Driver
from handlepool.recording import tensors
from handlepool.recording.outputs import tuple_of
from handlepool.recording.sharing import relation
from handlepool.recording.state_kinds import is_tensor
from handlepool.recording.update import attributes_of, entries_of, piece_of, place_among

_PLAIN = frozenset([int, bool, str, bytes, type(None)])
_VALUES = frozenset(["datetime", "decimal", "fractions", "pathlib", "uuid"])
"""Modules of immutable objects whose repr shows the full value."""
_WITHOUT_ATTRIBUTES = (list, tuple, dict, OrderedDict)
"""Classes of containers whose objects have entries but no attributes."""
MOST_LIES = 1000
"""The maximum number of geometries whose extent in memory is cached."""


class NotRecorded(Exception):
    """A call has arguments for which no program can be made.

    The call then runs eagerly.
    """


class Call:
    """The key of one call, and the parts of its arguments.

    Attributes
    ----------
    key : tuple
    arrays : list
        The driver's arrays and torch's tensors among the arguments, in order.
    held : list
        The objects that the key contains by identity.
    edges : list of tuple
        The begin and end of each array's memory, sorted by address.
    tensors : bool
        Whether tensors are among the arrays.
    related : bool
        Whether arrays share memory.
    containers : dict
        Numbers the lists, dictionaries and data class objects of the call. Maps the ``id`` of each object to its number.
    """

    __slots__ = ("arrays", "containers", "edges", "held", "key", "related", "tensors")

    def __init__(self) -> None:
        self.containers: dict[int, int] = {}
        self.key: tuple[Any, ...] = ()
        self.arrays: list[Any] = []
        self.held: list[Any] = []
        self.edges: list[tuple[int, int]] = []
        self.tensors = self.related = False


class Reader:
    """Find the keys of calls, for one driver.

    Parameters
    ----------
    driver : Driver
    in_place : dict
        Positions and names of arguments whose arrays a program reads in place, without a copy.
    """

    def __init__(self, driver: Driver, in_place: frozenset[int | str]) -> None:
        self.driver = self._driver = driver
        self._kind: Any = driver.array_types[0]
        self._kinds = driver.array_types
        self._in_place = in_place
        self._several = driver.device_count() > 1
        # Only arrays of the host driver can be read-only.
        self._read_only = driver.name == "host"
        self._reaches: dict[tuple[Any, ...], tuple[int, int]] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call's key and the parts of its arguments.

        Raises
        ------
        NotRecorded
            If no program can be made for such arguments. The message gives the reason.
        """
        call, kind = Call(), self._kind
        parts: list[Any] = []
        arrays, simple = call.arrays, not self._in_place
        for place, value in enumerate(args):
            # This repeats a branch of `_part`, because most arguments are arrays by position and must be quick.
            if type(value) is kind and simple:
                arrays.append(value)
                parts.append((value.shape, value.strides, value.dtype))
            elif type(value) in _PLAIN:
                parts.append((type(value), value))
            elif place in self._in_place:
                parts.append(self._fixed(value, call))
            else:
                parts.append(self._part(value, call))
        if kwargs:
            for name, value in kwargs.items():
                part = self._fixed(value, call) if name in self._in_place else self._part(value, call)
                parts.append((name, part))
        device = self._driver.current_device()
        if arrays:
            self._place(call, device)
            # If there is plain code, every array is copied back after the call, and nothing can be copied into a read-only array.
            if self._read_only and not all(map(self._is_writeable, arrays)):
                raise NotRecorded("an argument is a read-only array, for example a result of numpy.broadcast_to: pass a copy")
        # The relation tells which arrays share memory. If no arrays share memory, the key does not contain the relation.
        call.key = (device, *parts, *(self._relation(call) if call.related else ()))
        return call

    @staticmethod
    def _is_writeable(array: Any) -> bool:
        return is_tensor(array) or array.flags.writeable

    def _relation(self, call: Call) -> tuple[Any, Any]:
        """Tell which arrays share memory, and which are the same object."""
        first: dict[int, int] = {}
        same = tuple([first.setdefault(id(each), place) for place, each in enumerate(call.arrays)])
        return relation(self._driver, self._elements(call)), same

    def _place(self, call: Call, device: int) -> None:
        """Find the memory of each array, and whether arrays share memory."""
        driver, arrays = self._driver, call.arrays
        if self._several and any(driver.array_device(each) != device for each in arrays if not is_tensor(each)):
            raise NotRecorded(f"an argument is not on the current device, device {device}: copy it to that device")
        if call.tensors:
            pieces = [tensors.piece_of(each) if is_tensor(each) else piece_of(driver, each) for each in arrays]
            call.edges = sorted([each[:2] for each in pieces])
        else:
            # The begin and the end of an array's memory, as offsets from its pointer, depend only on the geometry. So these
            # offsets are cached by geometry.
            reaches = self._reaches
            for array, pointer in zip(arrays, driver.array_pointers(arrays), strict=True):
                lie = array.shape, array.strides, array.dtype
                reach = reaches.get(lie)
                if reach is None:
                    # If each call has a new shape, the cache would grow without this bound.
                    if len(reaches) > MOST_LIES:
                        reaches.clear()
                    begin, end, _ = piece_of(driver, array)
                    reach = reaches[lie] = begin - pointer, end - pointer
                call.edges.append((pointer + reach[0], pointer + reach[1]))
            if len(arrays) > 1:
                call.edges.sort()
        # The edges are sorted by begin. So an array shares memory with an earlier array if it begins before the largest end so
        # far.
        last = 0
        for begin, end in call.edges:
            if begin < last and begin < end:
                call.related = True
            last = max(last, end)

    def _elements(self, call: Call) -> list[Any]:
        return elements_of(self._driver, call.arrays)

    def _part(self, value: Any, call: Call) -> Any:
        kind = type(value)
        if kind is self._kind:
            call.arrays.append(value)
            return value.shape, value.strides, value.dtype
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            # The repr is compared, not the value: 0.0 == -0.0, but their reprs differ, and NaN != NaN, but their reprs are equal.
            return kind, repr(value)
        if isinstance(value, np.generic):
            return kind, value.dtype, value.tobytes()
        # A dictionary with ``__missing__`` may return values that are no entries. So it is compared by identity, not by entries.
        if isinstance(value, (list, tuple, dict)) and not hasattr(kind, "__missing__"):
            return self._container(kind, value, call)
        if kind in (slice, range):
            return kind, tuple([self._part(getattr(value, name), call) for name in ("start", "stop", "step")])
        if is_tensor(value):
            return self._tensor(value, call)
        if isinstance(value, (*self._kinds, np.ndarray)) or holds_values(value):
            raise NotRecorded(
                f"an argument is a {kind_of(value)}, which a program cannot take: pass an array of the {self._driver.name} driver"
            )
        if isinstance(value, (Iterator, MappingView)):
            raise NotRecorded(f"an argument is a {kind_of(value)}, which a program cannot take: pass a list")
        if is_dataclass(value) and not isinstance(value, type):
            return self._container(kind, value, call)
        if kind.__module__ in _VALUES:
            return kind, repr(value)
        return self._fixed(value, call)

    def _container(self, kind: type, value: Any, call: Call) -> Any:
        """Return the part of the key for a container or data class.

        If the same container occurs again among the arguments, its second part has only its number. So the key differs from the
        key for equal but separate containers, which the function may tell apart.
        """
        if not isinstance(value, tuple):
            known = call.containers.get(id(value))
            if known is not None:
                return kind, "again", known
            call.containers[id(value)] = len(call.containers)
        if isinstance(value, dict):
            entries = tuple([(self._part(key, call), self._part(each, call)) for key, each in value.items()])
        elif isinstance(value, (list, tuple)):
            entries = tuple([self._part(each, call) for each in value])
        else:
            entries = ()
        if kind in _WITHOUT_ATTRIBUTES:
            return kind, entries
        # Methods of the class may read the attributes, so the key contains them too.
        return kind, entries, tuple([(name, self._attribute(value, each, call)) for name, each in attributes_of(value)])

    def _attribute(self, value: object, attribute: object, call: Call) -> Any:
        # In some classes an attribute is one of the entries. Then only its place is added, so that its arrays are not added
        # twice.
        place = place_among(value, attribute)
        return self._part(attribute, call) if place is None else (kind_of(value), place)

    @staticmethod
    def _fixed(value: object, call: Call) -> tuple[Any, ...]:
        call.held.append(value)
        return object, id(value)

    def _tensor(self, value: Any, call: Call) -> Any:
        if not tensors.takes(self._driver, value, self._driver.current_device()):
            raise NotRecorded(f"an argument is a {kind_of(value)} on {value.device}: copy it to the current device")
        modes = tensors.modes()
        if value.requires_grad and modes[0]:
            raise NotRecorded("an argument is a tensor that requires a gradient: call the function inside torch.no_grad()")
        try:
            tensors.check(value)
        except Exception as error:
            raise NotRecorded(str(error)) from error
        call.arrays.append(value)
        call.tensors = True
        return type(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad, modes


def rebuilt_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_place: frozenset[int | str],
    is_input: Callable[[Any], bool],
    arrays: Iterator[Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments, with ``arrays`` as the inputs.

    Containers are copied. ``arrays`` are in the order of `Call.arrays`.
    """
    made: dict[int, Any] = {}

    def rebuilt(value: object) -> Any:
        if is_input(value):
            return next(arrays)
        known = made.get(id(value))
        if known is not None:
            return known
        if isinstance(value, dict):
            new: Any = made.setdefault(id(value), copy.copy(value))
            for key, each in value.items():
                # The method of `dict` is called, because a subclass may override it.
                dict.__setitem__(new, rebuilt(key), rebuilt(each))
        elif isinstance(value, list):
            new = made.setdefault(id(value), copy.copy(value))
            list.__setitem__(new, slice(None), [rebuilt(each) for each in value])
        elif isinstance(value, tuple):
            new = tuple_of(type(value), [rebuilt(each) for each in value])
        elif is_dataclass(value) and not isinstance(value, type):
            new = made.setdefault(id(value), copy.copy(value))
        else:
            return value
        if type(value) not in _WITHOUT_ATTRIBUTES:
            for name, each in attributes_of(value):
                place = place_among(value, each)
                # `object.__setattr__` also works for a frozen dataclass, which refuses ordinary assignment.
                made_anew = rebuilt(each) if place is None else [*entries_of(new)][place]
                object.__setattr__(new, name, made_anew)
        return new

    positional = [each if place in in_place else rebuilt(each) for place, each in enumerate(args)]
    return tuple(positional), {name: each if name in in_place else rebuilt(each) for name, each in kwargs.items()}


def elements_of(driver: Driver, arrays: Sequence[Any]) -> list[Any]:
    """Return ``arrays``, with each tensor replaced by an array over its memory."""
    return [tensors.elements(driver, "a tensor", each) if is_tensor(each) else each for each in arrays]


def text_of(key: tuple[Any, ...]) -> str:
    """Return a text with a key's plain values, array shapes and types."""
    # In a key, an array has three entries (shape, strides, type), and a tensor has six, with the shape at index 1.
    arrays = {3: (0, 2), 6: (1, 3)}
    return ", ".join(
        " ".join(str(part[each]) for each in arrays.get(len(part), (-1,))) for part in key[1:] if isinstance(part, tuple) and part
    )
