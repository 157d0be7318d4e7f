"""Prepare a program's calls once, so that each call is cheap.

If an array's memory has no gaps, a call copies its bytes in one run. Any other array is copied by a kernel of the array library.
All results are allocated in one step before the first copy. So if the allocation fails, the program's inputs are unchanged.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from handlepool.drivers.prepared import Copies
from handlepool.drivers.protocol import Driver
from handlepool.recording.matching import matcher
from handlepool.recording.outputs import is_returned, is_unchanged, steps_without_gaps, tuple_of
from handlepool.recording.update import piece_of
from handlepool.tensors.layout import Piece

Prepared = tuple[Callable[..., bool], Callable[..., Any], Callable[[Any], Any]]
"""The functions of a prepared call.

The first function checks the call's arguments, the second enqueues the call, and the third builds the call's value from the new
arrays.
"""


def prepared_call(driver: Driver, inputs: Sequence[Any] | None, value: object, device: int | None) -> Prepared | None:
    """Return the functions of a prepared call of a program, or None.

    A call can be prepared if all inputs, and all arrays in ``value``, the program's outputs, are plain arrays of the driver. The
    prepared call checks that its arguments are on ``device``, unless ``device`` is None.
    """
    outputs = dict[int, Any]()
    if not inputs or not arrays_once(driver, value, outputs):
        return None
    built = builder(value, {each: itemgetter(place) for place, each in enumerate(outputs)})
    match = matcher(driver, inputs, device, bounds([piece_of(driver, each) for each in inputs]))
    return match, driver.prepared(copies_of(inputs, [*outputs.values()])), built


def copies_of(inputs: Sequence[Any], outputs: Sequence[Any], back: Sequence[int] = ()) -> Copies:
    """Return the copies of a call: to inputs, to results, and back.

    ``inputs`` and ``outputs`` are the program's arrays. ``back`` are places of inputs that are copied back to the arguments.
    """
    return Copies(inputs, outputs, [steps_without_gaps(each) for each in outputs], back)


def bounds(pieces: Sequence[Piece]) -> list[int]:
    """Return the begin and the end of each piece of memory, ascending.

    Pieces that touch or overlap are joined into one piece.
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
    """Return a function that rebuilds a value with other arrays.

    The returned function takes a sequence of new arrays. ``places`` maps the identifier of each array in ``value`` to a function,
    which takes the same sequence and returns the new array to put in place of the old array.
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
    """Collect the driver's arrays in a value, by identifier.

    Return whether the value has, besides these arrays, only containers and plain values.
    """
    if is_returned(value):
        inside = value.values() if isinstance(value, dict) else value
        return all(arrays_once(driver, each, found) for each in inside)
    if type(value) is driver.array_types[0]:
        found[id(value)] = value
        return True
    return is_unchanged(value)
