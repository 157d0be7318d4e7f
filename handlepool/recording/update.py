"""Update the recorded arguments of a program's function.

New arrays are copied into the recorded arrays. Other new values must equal the recorded values.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from handlepool._util.names import kind_of, shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import attributes, leaves
from handlepool.drivers.operands import ASARRAY, taken
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.graphs.arrays import MASKED, is_array
from handlepool.order import reached
from handlepool.order.stream_order import integration
from handlepool.recording import tensors
from handlepool.recording.state_kinds import slots_of
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import Piece, piece, share

PLAIN = (int, float, complex, str, bytes, np.generic)


class Copy(NamedTuple):
    """The copy of an array into a recorded array.

    Attributes
    ----------
    place : str
        The place of the recorded array among the arguments, for messages.
    target, source : array
        Arrays of the driver. The source is copied into the target.
    shift : int
        Bytes from the target's address to the source's address. The value 0 means that both are the same memory.
    tensor : object
        The recorded tensor of torch, if ``target`` is an array over the memory of a tensor.
    """

    place: str
    target: Any
    source: Any
    shift: int
    tensor: Any = None


class Plain(NamedTuple):
    """A recorded argument without an array."""

    value: Any


class Inputs:
    """The recorded arguments of a function.

    The arguments are kept as they were when the function was recorded. Arguments without an array cannot be updated.

    A call passes either all positional arguments, or only the arguments with an array. The number of passed arguments tells
    these two cases apart. Arrays of libraries other than torch count as arrays here, but they cannot be overwritten.
    """

    def __init__(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = driver.array_types
        self._all = [value if isinstance(value, kind) else _recorded(value, kind) for value in args]
        self._positional = [value for value in self._all if type(value) is not Plain]
        self._named = {key: value if isinstance(value, kind) else _recorded(value, kind) for key, value in kwargs.items()}
        # Maps the address of each input that was overwritten to its memory.
        self._replaced: dict[int, Piece] = {}

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield each array among the arguments, of any library, and its place."""
        for place, value in enumerate(self._positional):
            yield from _arrays(f"argument {place}", value)
        for name, value in self._named.items():
            if type(value) is not Plain:
                yield from _arrays(name, value)

    def flat(self, driver: Driver) -> list[Any] | None:
        """Return the inputs if all are plain arrays in separate memory.

        Each argument with an array must itself be a writeable array of the driver, and be positional. Otherwise return None.
        """
        arrays: list[Any] = self._positional
        kind: Any = driver.array_types[0]
        if any(type(each) is not kind or not getattr(each.flags, "writeable", True) for each in arrays):
            return None
        return None if self._named or any(overlapping(driver, arrays)) else arrays

    def match(self, driver: Driver, name: str, device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Copy]:
        """Return the copies that a call with new arguments needs.

        Raises
        ------
        ArgumentError
            If a new argument has another structure, shape, strides or type than the recorded argument, or another value and no
            array. If two new arrays are given for the same memory. If the recorded array is of a library other than torch. If a
            new argument is a recorded array that was overwritten since the recording.
        ArrayTypeError
            If a new value is no array of the driver, and no tensor in the place of a tensor.
        DeviceMismatchError
            If a new array is on another device.
        """
        recorded, count = self._positional, len(args)
        if count != len(recorded):
            if count == len(self._all):
                recorded = self._all
            elif count > len(recorded) or not kwargs:
                self._refuse(name, count)
        unknown = [key for key in kwargs if key not in self._named]
        if unknown:
            there = f"pass only {', '.join(self._named)} by keyword" if self._named else "pass all arguments by position"
            raise ArgumentError(f"{name} was not recorded with the keyword {unknown[0]!r}: {there}")
        places = [(f"argument {place}", old, new) for place, (old, new) in enumerate(zip(recorded, args, strict=False))]
        places += [(key, self._named[key], new) for key, new in kwargs.items()]
        copies = [copy for place, old, new in places for copy in _copies(driver, f"{name}: {place}", device, old, new)]
        _check_values(driver, name, copies)
        for copy in copies if self._replaced else ():
            self._check_kept(driver, name, copy)
        return [copy for copy in copies if copy.shift]

    def _refuse(self, name: str, count: int) -> NoReturn:
        """Refuse a wrong number of positional arguments.

        The right numbers are the number of all positional arguments and the number of those arguments with arrays.
        """
        there, arrays = len(self._all), len(self._positional)
        few = arrays != there
        text = f"{name} was recorded with {there} positional arguments"
        if few:
            text += f", {arrays} of which are arrays or contain arrays"
        fix = [f"give all positional arguments{f', or only these {arrays}' if few else ''}"] if there else []
        fix += [f"give {', '.join(self._named)} by keyword"] if self._named else []
        text += f", and was given {count}: {', and '.join(fix) or 'give none'}"
        raise ArgumentError(f"{text}. Pass None for an array that keeps its values")

    def _check_kept(self, driver: Driver, name: str, copy: Copy) -> None:
        """Refuse a new argument in the memory of an overwritten input.

        The caller may mean the values that the input had before. But if an input is given in the place of another input, it is
        taken with its current values, because a caller may swap inputs.
        """
        begin = driver.array_pointer(copy.source)
        if not copy.shift:
            if begin not in self._replaced:
                return
            what, now = "is the array", "pass None for its present values"
        else:
            target = self._replaced.get(begin - copy.shift)
            if begin in self._replaced or target is None:
                return
            # The source has the layout of the target, so it covers the same range, moved by the shift.
            first, last = target[0] + copy.shift, target[1] + copy.shift
            near = [each for each in self._replaced.values() if first < each[1] and each[0] < last]
            if not near or not any(share(piece_of(driver, copy.source), each) for each in near):
                return
            what, now = "overlaps an array", "pass a copy of the intended values"
        raise ArgumentError(
            f"{copy.place} {what} that {name} was recorded with, and a call or an update has overwritten it since "
            f"then. To keep the values of an array x, record with a copy, x.copy(order='K'); or {now}"
        )

    def copied(self, driver: Driver, copies: Sequence[Copy]) -> None:
        """Note that the targets of these copies, which are inputs, are overwritten.

        `match` then refuses such an input as a new argument, because the caller may mean its former values.
        """
        for copy in copies:
            begin = driver.array_pointer(copy.target)
            if begin not in self._replaced:
                self._replaced[begin] = piece_of(driver, copy.target)

    def written(self, driver: Driver, copies: Sequence[Copy]) -> None:
        """Note that outputs were copied into the targets of these copies.

        If a target is also an overwritten input, `match` accepts it again: its values are now the values that the caller expects.
        """
        for copy in copies if self._replaced else ():
            self._replaced.pop(driver.array_pointer(copy.target), None)


def copy_all(driver: Driver, copies: Sequence[Copy]) -> None:
    """Enqueue copies on the current stream.

    The result is the same as if all sources were read before the first target is written.
    """
    targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
    pairs = overlapping(driver, targets + sources)
    # If any source overlaps a target, all sources are first copied into new arrays.
    if any((one < len(copies)) is not (other < len(copies)) for one, other in pairs):
        sources = [_read(driver, source) for source in sources]
    for copy, source in zip(copies, sources, strict=True):
        driver.copy(copy.target, source)
        if copy.tensor is not None:
            integration().written(copy.tensor)


def _read(driver: Driver, array: DeviceArray) -> Any:
    """Return a copy of an array, made on the current stream.

    The copy is allocated for this stream, so its memory is reused only after the stream's present work.
    """
    strides = tuple([step * array.dtype.itemsize for step in dense_strides(array.shape)])
    with driver.relaxed():
        copy = driver.empty(array.shape, strides, array.dtype)
    driver.copy(copy, array)
    return copy


# Structure


@dataclass(frozen=True, slots=True, eq=False)
class Attributed:
    """A recorded container with attributes.

    Attributes
    ----------
    entries : tuple or dict
    kind : type
    attributes : dict
        The attributes by name, without attributes that are entries as well.
    """

    entries: Any
    kind: type
    attributes: dict[str, Any]


def own_attributes(value: object) -> dict[str, Any]:
    """Return a container's attributes by name, without its entries."""
    if not isinstance(value, (list, tuple, dict)) or type(value) in (list, tuple, dict):
        return {}
    return {name: each for name, each in attributes_of(value) if place_among(value, each) is None}


def attributes_of(value: object) -> list[tuple[str, Any]]:
    """Return the names and values of a container's attributes."""
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    names += [*getattr(value, "__dict__", ()), *[name for name, _ in slots_of(type(value))]]
    return [(name, getattr(value, name)) for name in dict.fromkeys(names) if hasattr(value, name)]


def entries_of(value: Any) -> Any:
    """Return a container's entries; an empty tuple for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def place_among(value: object, attribute: object) -> int | None:
    """Return the index of ``attribute`` among the entries of a container.

    Return None if no entry is the same object.
    """
    return next((place for place, each in enumerate(entries_of(value)) if each is attribute), None)


def _fixed(value: object) -> Any:
    """Return a value with copies of its lists, tuples and dictionaries.

    The inputs are the arrays that these containers hold now. Later changes of the caller's containers have no effect.
    """
    attributes = own_attributes(value)
    return Attributed(_fixed_entries(value), type(value), attributes) if attributes else _fixed_entries(value)


def _fixed_entries(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_fixed(entry) for entry in value])
    if isinstance(value, dict):
        return {key: _fixed(entry) for key, entry in value.items()}
    return value


def _recorded(value: object, kind: tuple[type, ...]) -> Any:
    """Return a copy of an argument's containers, with the same arrays.

    An argument without an array becomes a `Plain`.
    """
    has_array = any(isinstance(leaf, kind) or is_foreign(leaf) for leaf in leaves(value))
    return _fixed(value) if has_array else Plain(_fixed(value))


def _arrays(place: str, value: object) -> Iterator[tuple[str, Any]]:
    if type(value) is Attributed:
        value = value.entries
    if isinstance(value, (tuple, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _arrays(f"{place}[{shown(key)}]", value[key])
    else:
        yield place, value


def is_foreign(value: object) -> bool:
    """Return whether a value is an array of another library.

    The caller makes sure that the value is no array of the driver.
    """
    return is_array(value) and not isinstance(value, np.generic)


def _copies(driver: Driver, place: str, device: int, old: Any, new: Any) -> Iterator[Copy]:
    if new is None:
        # For an argument without an array, None may be a real value, so it is compared. In any other place, None says that the
        # array or the entry stays as it is.
        if type(old) is Plain and old.value is not None:
            _check_unchanged(driver, place, old.value, new)
    elif type(old) is Plain:
        yield from _copies(driver, place, device, old.value, new)
    elif type(old) is Attributed:
        if type(new) is not old.kind:
            raise ArgumentError(
                f"{place} was recorded as a {old.kind.__qualname__}, and is now a {kind_of(new)}; pass the recorded type"
            )
        now = own_attributes(new)
        for name in {**old.attributes, **now}:
            _check_unchanged(driver, f"{place}.{name}", old.attributes.get(name), now.get(name))
        yield from _copies(driver, place, device, old.entries, new)
    elif isinstance(old, (tuple, dict)):
        for key in keys_of(place, old, new):
            # The method of `dict` is called, because a subclass may override it.
            entry = dict.__getitem__(new, key) if isinstance(new, dict) else new[key]
            yield from _copies(driver, f"{place}[{shown(key)}]", device, old[key], entry)
    elif isinstance(old, driver.array_types):
        if new is not old:
            _check_alike(driver, place, device, old, new)
        yield Copy(place, old, new, driver.array_pointer(new) - driver.array_pointer(old))
    elif tensors.takes(driver, old, device):
        if new is not old:
            tensors.check_alike(driver, place, old, new, device, strides=True)
        target, source = tensors.elements(driver, place, old), tensors.elements(driver, place, new)
        yield Copy(place, target, source, driver.array_pointer(source) - driver.array_pointer(target), old)
    elif new is not old:
        _check_unchanged(driver, place, old, new)


def keys_of(place: str, old: Any, new: Any) -> Sequence[Any]:
    """Return the keys of ``old``, a recorded container.

    Raise an `ArgumentError` if ``new`` is not a container of the same kind, or has other keys.
    """
    if isinstance(old, tuple):
        if not isinstance(new, (list, tuple)):
            raise ArgumentError(f"{place} was recorded as a list or a tuple, and is now a {kind_of(new)}; pass a list or a tuple")
        if len(old) != len(new):
            raise ArgumentError(
                f"{place} was recorded with {len(old)} entries, and was given {len(new)}; pass None for each entry that "
                "stays as it is"
            )
        return range(len(old))
    if not isinstance(new, dict):
        raise ArgumentError(f"{place} was recorded as a dictionary, and is now a {kind_of(new)}; pass a dictionary")
    for key in new:
        if key not in old:
            raise ArgumentError(f"{place} was recorded without the key {shown(key)}; its keys are {', '.join(map(shown, old))}")
    for key in old:
        if key not in new:
            raise ArgumentError(
                f"{place} was recorded with the key {shown(key)}, which is missing now; to keep the entry's value, pass None "
                "for this key"
            )
    return list(old)


def _check_alike(driver: Driver, place: str, device: int, target: Any, source: Any) -> None:
    if isinstance(source, (list, tuple, dict)):
        raise ArgumentError(f"{place} was recorded as an array, and is now a {kind_of(source)}; pass an array")
    if isinstance(source, np.ma.MaskedArray) and source.mask is not np.ma.nomask:
        raise ArrayTypeError(f"{place} is a {kind_of(source)}: {MASKED}")
    if not isinstance(source, driver.array_types):
        advice = f"; convert it by {_converters(driver)}" if is_foreign(source) else ""
        raise ArrayTypeError(f"{place} is a {kind_of(source)}; the {driver.name} driver takes {taken(driver)}{advice}")
    # Only arrays of the host driver can be read-only. CuPy's arrays have no such flag.
    if not getattr(target.flags, "writeable", True):
        raise ArgumentError(f"{place} was recorded as a read-only array, which update cannot write to; pass None in its place")
    found: Any = source
    for what, recorded, given in (
        ("shape", target.shape, found.shape),
        ("type", target.dtype, found.dtype),
    ):
        if recorded != given:
            raise ArgumentError(
                f"{place} was recorded with {what} {recorded} and now has {what} {given}; pass an array of the recorded "
                f"{what}, or record the function again"
            )
    tensors.check_strides(place, target.shape, target.strides, found.strides, target.dtype.itemsize)
    where = driver.array_device(source)
    if where != device:
        raise DeviceMismatchError(
            f"{place} is on device {where}, and the program on device {device}; copy the array to device {device} first"
        )


def _check_unchanged(driver: Driver, place: str, old: object, new: object) -> None:
    if is_foreign(old):
        raise ArgumentError(
            f"{place} was recorded as a {kind_of(old)}, which is no array of the {driver.name} driver, so update "
            f"cannot write to it. Record with the result of {_converters(driver)}, or pass None here and write to the array "
            "with its own library"
        )
    if not same(old, new):
        was, now = shown(old), shown(new)
        raise ArgumentError(
            f"{place} was recorded as {was} and is now {'another ' if was == now else ''}{now}. A value that is no array "
            "cannot change: pass the same value, or record the function again"
        )


def same(old: Any, new: Any) -> bool:
    """Return whether two values without arrays mean the same to a function.

    They do if they are the same object, or equal immutable objects of the same type. The sign of a zero counts. A mutable object
    is the same only as itself, because its contents at the recording are unknown. No comparison method of a user's class is
    called, because it may compare elements or take a lock.
    """
    kind = type(old)
    if new is old:
        return True
    if type(new) is not kind:
        return False
    if isinstance(old, np.generic):
        return old.dtype == new.dtype and old.tobytes() == new.tobytes() and bool(old.dtype.kind == "V" or old == new)
    if kind in (int, bool, str, bytes):
        return bool(old == new)
    if kind in (float, complex):
        return bool(old == new) and repr(old) == repr(new)
    if kind is slice:
        return same((old.start, old.stop, old.step), (new.start, new.stop, new.step))
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(same, old, new))
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return same((*attributes(old),), (*attributes(new),))
    if kind in (MethodType, BuiltinFunctionType):
        return bool(old == new)
    known = str(kind.__module__).partition(".")[0] in (*sys.stdlib_module_names, "numpy") and kind.__hash__ is not None
    return known and not any(map(holds_values, leaves(old, calls=True))) and (old == new) is True


def _converters(driver: Driver) -> str:
    return "cupy.from_dlpack or cupy.asarray" if driver.name == "cuda" else ASARRAY


# Memory


def _check_values(driver: Driver, name: str, copies: Sequence[Copy]) -> None:
    """Refuse two different new arrays for the same recorded memory."""
    for pair in overlapping(driver, [copy.target for copy in copies]):
        first, second = (copies[place] for place in sorted(pair))
        # If both copies have the same shift, the sources overlap as the targets do, so each byte gets a single value.
        if first.shift != second.shift and share(piece_of(driver, first.target), piece_of(driver, second.target)):
            raise ArgumentError(
                f"{first.place} and {second.place[len(name) + 2 :]} were recorded with the same memory, and were now given two "
                "different arrays; pass the same array for both, or None for one of them"
            )


def overlapping(driver: Driver, arrays: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the places of each pair of arrays whose memory ranges overlap.

    The range of an array goes from its first to its last byte.
    """
    near: list[tuple[int, int, int]] = []
    for begin, end, place in sorted([(*piece_of(driver, array)[:2], place) for place, array in enumerate(arrays) if array.size]):
        # The arrays are visited in order of their begin. So an array that ends before this begin overlaps no later array.
        near = [other for other in near if other[1] > begin]
        yield from [(other[2], place) for other in near]
        near.append((begin, end, place))


def piece_of(driver: Driver, array: Any) -> Piece:
    """Return the memory of an array of the driver."""
    return piece(driver.array_pointer(array), array.shape, array.strides, array.dtype.itemsize)


def memory_of(driver: Driver, value: Any) -> Piece | None:
    """Return the memory of an array of any library.

    Return None for a value whose memory is unknown.
    """
    return piece_of(driver, value) if type(value) is driver.array_types[0] else reached.piece_of(driver, value)
