"""Prepare a program's calls once, so that each call is cheap.

An array that lies in a single run of bytes is copied as such a run. The array library's kernel copies any other array. All
results are allocated in one step before the first copy, so that an allocation failure leaves the program unchanged.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from handlepool.drivers.prepared import Copies
from handlepool.drivers.protocol import Driver
from handlepool.recording.outputs import is_returned, is_unchanged, steps_without_gaps, tuple_of
from handlepool.tensors.layout import Piece


def copies_of(inputs: Sequence[Any], outputs: Sequence[Any], back: Sequence[int] = ()) -> Copies:
    """Return the copies of a call of the program with these arrays."""
    return Copies(inputs, outputs, [steps_without_gaps(each) for each in outputs], back)


def bounds(pieces: Sequence[Piece]) -> list[int]:
    """Return begin and end of each piece of memory, ascending.

    Pieces that touch or overlap are joined.
    """
    found: list[int] = []
    for begin, end, _ in sorted(pieces, key=itemgetter(0)):
        if begin == end:
            continue
        if found and begin <= found[-1]:
            found[-1] = max(found[-1], end)
        else:
            found += [begin, end]
    return found


def builder(value: object, places: dict[int, Callable[[Sequence[Any]], Any]]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts other arrays into a value's structure.

    ``places`` maps the identifier of each array of the value to a function. That function takes the sequence of the other arrays,
    and returns the array that replaces this array.
    """
    place = places.get(id(value))
    if place is not None:
        return place
    if is_unchanged(value):
        return lambda made: value
    if isinstance(value, dict):
        kind, keys, entries = type(value), [*value], [builder(each, places) for each in value.values()]
        if kind is dict:
            return lambda made: {key: entry(made) for key, entry in zip(keys, entries, strict=True)}
        return lambda made: kind((key, entry(made)) for key, entry in zip(keys, entries, strict=True))
    if isinstance(value, (list, tuple)):
        entries = [builder(each, places) for each in value]
        if isinstance(value, list):
            return lambda made: [entry(made) for entry in entries]
        return lambda made: tuple_of(type(value), [entry(made) for entry in entries])
    return lambda made: value


def arrays_once(driver: Driver, value: Any, found: dict[int, Any]) -> bool:
    """Collect the driver's arrays of a value, by identifier.

    Return whether all other parts of the value are plain.
    """
    if is_returned(value):
        inside = value.values() if isinstance(value, dict) else value
        return all(arrays_once(driver, each, found) for each in inside)
    if type(value) is driver.array_types[0]:
        found[id(value)] = value
        return True
    return is_unchanged(value)
