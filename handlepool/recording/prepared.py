"""Prepare a program's calls once, so that each call is cheap.

An array that lies in a single run of bytes is copied as such a run. The array library's kernel copies any other array. All
results are allocated in one step before the first copy, so that an allocation failure leaves the program unchanged.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.recording.outputs import UNCHANGED, steps_without_gaps
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Piece, one_run


def prepared(
    driver: Driver, inputs: Sequence[Any], outputs: Sequence[Any], back: Sequence[int] = ()
) -> Callable[[Sequence[Any], int, Callable[[], object]], Sequence[Any]]:
    """Return a function that enqueues a program's call on a stream, which is current.

    The function is ``run(arrays, pointer, launch)``. Its arrays have the layouts of the inputs. It returns copies of the outputs.

    Parameters
    ----------
    driver : Driver
    inputs : sequence of array
        The program's own input arrays, which a call writes.
    outputs : sequence of array
        The program's own output arrays, each once.
    back : sequence of int
        Places of inputs that are copied back into the caller's arrays.
    """
    bring = [(each, _copy(driver, each, each.strides)) for each in inputs]
    lies = [(each.shape, steps_without_gaps(each), each.dtype) for each in outputs]
    allocate, relaxed = driver.empties(lies), driver.relaxed
    take = [(each, _copy(driver, each, lie[1])) for each, lie in zip(outputs, lies, strict=True)]
    returned = [(place, inputs[place], bring[place][1]) for place in back]

    def run(arrays: Sequence[Any], pointer: int, launch: Callable[[], object]) -> Sequence[Any]:
        with relaxed():
            made = allocate()
        # The stream keeps this order: the inputs are copied before the launch, and the outputs after the launch.
        for array, (target, copy) in zip(arrays, bring, strict=True):
            copy(target, array, pointer)
        launch()
        for result, (output, copy) in zip(made, take, strict=True):
            copy(result, output, pointer)
        for place, target, copy in returned:
            copy(arrays[place], target, pointer)
        return made

    return run


def _copy(driver: Driver, array: DeviceArray, strides: tuple[int, ...]) -> Callable[[Any, Any, int], None]:
    """Return a function that copies between arrays of the given strides."""
    if not array.size:
        return lambda target, source, pointer: None
    if one_run(array.shape, array.strides, strides, array.dtype.itemsize):
        return driver.copy_run
    return lambda target, source, pointer: driver.copy(target, source)


def bounds(pieces: Sequence[Piece]) -> list[int]:
    """Return the ends of pieces of memory, with touching pieces joined."""
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

    ``places`` maps the identifier of each array of the value to a function. The function takes the array's stand-in out of the
    arrays.
    """
    place = places.get(id(value))
    if place is not None:
        return place
    if isinstance(value, dict):
        keys, entries = [*value], [builder(each, places) for each in value.values()]
        return lambda made: {key: entry(made) for key, entry in zip(keys, entries, strict=True)}
    if isinstance(value, (list, tuple)):
        entries = [builder(each, places) for each in value]
        if isinstance(value, list):
            return lambda made: [entry(made) for entry in entries]
        named: Any = type(value)
        if hasattr(named, "_fields"):
            return lambda made: named(*[entry(made) for entry in entries])
        return lambda made: tuple([entry(made) for entry in entries])
    return lambda made: value


def arrays_once(driver: Driver, value: object, found: dict[int, Any]) -> bool:
    """Collect the driver's arrays of a value, by identifier.

    Return whether the rest of the value is plain.
    """
    if isinstance(value, (list, tuple, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return all(arrays_once(driver, each, found) for each in inside)
    if type(value) is driver.array_types[0]:
        found[id(value)] = value
        return True
    return isinstance(value, UNCHANGED)
