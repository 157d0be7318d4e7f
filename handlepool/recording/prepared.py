"""Prepare a program's calls once, so that each call is cheap.

An array that lies in a single run of bytes is copied as such a run. The array library's kernel copies any other array. All
results are allocated in one step before the first copy, so that an allocation failure leaves the program unchanged.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from handlepool.drivers.protocol import Driver
from handlepool.recording.outputs import UNCHANGED, steps_without_gaps
from handlepool.recording.update import piece_of
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Piece, one_run

Lies = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides in bytes, and type of an array."""


class Prepared:
    """A program's call, for arrays with the layouts of its inputs.

    Parameters
    ----------
    driver : Driver
    device : int
        Ordinal of the program's device.
    inputs : sequence of array
        The program's own input arrays, which a call writes.
    outputs : sequence of array
        The program's own output arrays, each once. A call returns copies of the outputs.
    back : sequence of int
        Places of inputs that are copied back into the caller's arrays.
    """

    __slots__ = ("_allocate", "_back", "_bounds", "_bring", "_device", "_driver", "_kind", "_lies", "_take")

    def __init__(
        self, driver: Driver, device: int, inputs: Sequence[Any], outputs: Sequence[Any], back: Sequence[int] = ()
    ) -> None:
        self._driver = driver
        # On a machine with a single device the check of the device is skipped.
        self._device = device if driver.device_count() > 1 else None
        self._kind = driver.array_types[0]
        self._lies: list[Lies] = [(each.shape, each.strides, each.dtype) for each in inputs]
        self._bring = [(each, _copy(driver, each, each.strides)) for each in inputs]
        self._back = [(place, inputs[place], self._bring[place][1]) for place in back]
        lies: list[Lies] = [(each.shape, steps_without_gaps(each), each.dtype) for each in outputs]
        self._allocate = driver.empties(lies)
        self._take = [(each, _copy(driver, each, lie[1])) for each, lie in zip(outputs, lies, strict=True)]
        self._bounds = bounds([piece_of(driver, each) for each in inputs])

    def match(self, arrays: Sequence[Any]) -> bool:
        """Return whether arrays have the inputs' layouts, apart from the inputs' memory."""
        lies, device = self._lies, self._device
        kind: Any = self._kind
        if len(arrays) != len(lies):
            return False
        array: Any
        for array, (shape, strides, dtype) in zip(arrays, lies, strict=True):
            if type(array) is not kind or array.shape != shape or array.strides != strides or array.dtype != dtype:
                return False
            if device is not None and self._driver.array_device(array) != device:
                return False
        edges = self._bounds
        for address, array in zip(self._driver.array_pointers(arrays), arrays, strict=True):
            place = bisect_right(edges, address)
            # An odd place is inside a piece of memory. If the place at the array's end differs, a piece begins inside the array.
            if place & 1 or (place < len(edges) and bisect_left(edges, address + array.nbytes) != place):
                return False
        return True

    def run(self, arrays: Sequence[Any], pointer: int, launch: Callable[[], object], out: Sequence[Any] | None = None) -> Any:
        """Enqueue the call on a stream, which is current.

        Return new arrays, or the arrays of ``out``, in the order of the outputs.
        """
        if out is None:
            with self._driver.relaxed():
                made: Sequence[Any] = self._allocate()
        else:
            made = out
        # The stream keeps this order: the inputs are copied before the launch, and the outputs after the launch.
        for array, (target, copy) in zip(arrays, self._bring, strict=True):
            copy(target, array, pointer)
        launch()
        for result, (output, copy) in zip(made, self._take, strict=True):
            copy(result, output, pointer)
        for place, target, copy in self._back:
            copy(arrays[place], target, pointer)
        return made


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
