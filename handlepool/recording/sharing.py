"""Copy arrays that share memory, so that the copies share memory alike.

The arrays are the arguments of one call, or belong to one item of a map. If a function writes to such an array in place, it also
changes the arrays that share memory with it. The same must hold for the copies. So the memory that the arrays cover together is
copied once as a block, and the copy of each array is a part of this block.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from handlepool.drivers.protocol import Driver
from handlepool.recording.update import piece_of
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Piece, bytes_at, piece, share

ALIGNED = 256
"""The alignment, in bytes, that a copy keeps.

The copy of a block has the same distance from an aligned address as the block itself. So each array in the copy is aligned like
the array that it copies.
"""

Group = list[int]


def _memory(driver: Driver, array: DeviceArray) -> Piece:
    if isinstance(array, np.ndarray):
        return piece(_address(driver, array), array.shape, array.strides, array.itemsize)
    return piece_of(driver, array)


def _address(driver: Driver, array: DeviceArray) -> int:
    if isinstance(array, np.ndarray):
        address: int = array.__array_interface__["data"][0]
        return address
    return driver.array_pointer(array)


def groups(driver: Driver, arrays: Sequence[Any]) -> list[Group]:
    """Return groups of arrays that share bytes, by their places.

    Two arrays that share bytes are in the same group. An array that shares no bytes is in no group.
    """
    pieces = [_memory(driver, array) for array in arrays]
    group_of: dict[int, Group] = {}
    near: list[int] = []
    # The arrays are visited in order of their begin. So an array can only overlap an earlier array that ends after its begin.
    for place in sorted([place for place, each in enumerate(pieces) if each[0] < each[1]], key=lambda place: pieces[place][0]):
        near = [other for other in near if pieces[other][1] > pieces[place][0]]
        for other in near:
            if share(pieces[other], pieces[place]):
                one, two = group_of.setdefault(other, [other]), group_of.setdefault(place, [place])
                # If the two arrays were in different groups, these groups become one.
                if one is not two:
                    one += two
                    group_of.update(dict.fromkeys(two, one))
        near.append(place)
    return [*{id(group): sorted(group) for group in group_of.values()}.values()]


def runs_apart(driver: Driver, arrays: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether no two of ``arrays`` share memory.

    All arrays are of NumPy, or all are of the driver. The memory of each array has no gaps, and ``sizes`` has its size in bytes.
    """
    if type(arrays[0]) is np.ndarray:
        begins = [each.__array_interface__["data"][0] for each in arrays]
    else:
        begins = driver.array_pointers(arrays)
    last = 0
    for begin, size in sorted(zip(begins, sizes, strict=True)):
        if begin < last:
            return False
        last = begin + size
    return True


def relation(driver: Driver, value: object) -> Hashable:
    """Return a key that tells which arrays in a value share memory.

    For each array that shares memory, the key has the array's place, the place of the first array of its group, and the bytes
    from the first array's address to its address.
    """
    arrays = _arrays(driver, value)
    found = groups(driver, arrays) if len(arrays) > 1 else []
    return tuple(
        [
            (place, group[0], _address(driver, arrays[place]) - _address(driver, arrays[group[0]]))
            for group in found
            for place in group
        ]
    )


def copier(driver: Driver, value: object, copy: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that copies the leaves of a value, for `rebuilt`.

    Parameters
    ----------
    driver : Driver
    value
        The value whose leaves are copied. The caller keeps it alive as long as it uses the returned function.
    copy : callable
        ``copy(array)`` returns a copy of an array on the current device, and returns any other leaf as it is.
        ``copy(array, target)`` copies into an array ``target``.
    """
    arrays = _arrays(driver, value)
    known: dict[int, Any] = {}
    for group in groups(driver, arrays) if len(arrays) > 1 else ():
        members = [arrays[place] for place in group]
        first = members[0]
        # If all arrays of the group are equal views of the same memory, a single copy serves for all of them.
        if len({(_address(driver, each), each.shape, each.strides, each.dtype) for each in members}) == 1:
            known.update(dict.fromkeys(map(id, members), copy(first)))
            continue
        pieces = [_memory(driver, each) for each in members]
        begin, end = min(each[0] for each in pieces), max(each[1] for each in pieces)
        shift = begin % ALIGNED
        with driver.relaxed():
            block = driver.empty((shift + end - begin,), (1,), np.dtype(np.uint8))
        source = (
            bytes_at(begin, end, members)
            if isinstance(first, np.ndarray)
            else driver.part(first, begin, (end - begin,), (1,), block.dtype)
        )
        copy(source, block[shift:])
        by = driver.array_pointer(block) + shift - begin
        for each in members:
            known[id(each)] = driver.part(block, _address(driver, each) + by, each.shape, each.strides, each.dtype)
    return lambda leaf: known[id(leaf)] if id(leaf) in known else copy(leaf)


def _arrays(driver: Driver, value: object) -> list[Any]:
    """Return the arrays in a value, with repetitions."""
    found: list[Any] = []
    rebuilt(value, found.append)
    return [each for each in found if isinstance(each, (np.ndarray, *driver.array_types))]


def rebuilt(value: object, of: Callable[[Any], Any]) -> Any:
    """Rebuild lists, tuples and dictionaries, with ``of`` applied to leaves."""
    if isinstance(value, dict):
        return {key: rebuilt(entry, of) for key, entry in value.items()}
    if not isinstance(value, (list, tuple)):
        return of(value)
    entries = [rebuilt(entry, of) for entry in value]
    if isinstance(value, list):
        return entries
    named: Any = type(value)
    return named(*entries) if hasattr(named, "_fields") else tuple(entries)
