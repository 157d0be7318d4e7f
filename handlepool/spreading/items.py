"""Check and compare the items of a spread."""

from collections.abc import Callable, Hashable
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from handlepool._util.arguments import check_ends
from handlepool._util.names import kind_of, shown
from handlepool._util.reachable import attributes, bound_call, leaves
from handlepool.drivers.operands import ASARRAY
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArrayTypeError
from handlepool.recording.update import PLAIN, is_foreign
from handlepool.tensors.graph_types import DeviceArray

MOST_FUNCTIONS = 100
"""The maximum number of functions whose globals are searched."""


def itself(value: object) -> Any:
    """Return the value itself."""
    return value


def geometry(value: Any) -> Hashable:
    """Return a key, equal for items that can share a program."""
    if isinstance(value, dict):
        return dict, tuple([(key, geometry(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return type(value), tuple([geometry(entry) for entry in value])
    return value.shape, value.strides, value.dtype


def check_copied(place: str, value: object, driver: Driver, *, inside: bool) -> None:
    """Raise for an array that cannot be copied to devices.

    Such arrays come from another library, or have a mask that would be lost. With ``inside`` an array of the driver
    inside an object also raises: nothing would order its use after the stream that writes it.
    """
    check_ends(f"{place} holds", value)
    for leaf in leaves(value):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArrayTypeError(f"{place} holds {shown(leaf)}, whose mask is not copied to devices: pass its data and its mask")
        if isinstance(leaf, np.ndarray) and type(leaf) not in (np.ndarray, np.memmap, *driver.array_types):
            raise ArrayTypeError(
                f"{place} holds {shown(leaf)}, whose class would be lost, because only elements are copied to devices: pass "
                f"numpy.asarray(...)"
            )
        if isinstance(leaf, (np.ndarray, *driver.array_types, *PLAIN)):
            continue
        if is_foreign(leaf):
            converter = "cupy.from_dlpack" if driver.name == "cuda" else ASARRAY
            raise ArrayTypeError(
                f"{place} holds {shown(leaf)}, which is not copied to devices: convert it with {converter}, or pass a NumPy array"
            )
        for array in leaves(leaf, attributes(leaf), calls=True) if inside else ():
            if isinstance(array, driver.array_types) and not isinstance(array, np.ndarray):
                raise ArrayTypeError(
                    f"{place} holds a {kind_of(leaf)} with {shown(array)} in it, which is not copied to devices: pass arrays in "
                    f"lists, tuples and dictionaries"
                )


def global_elsewhere(function: Any, is_elsewhere: Callable[[Any], bool]) -> str | None:
    """Return the global that holds an array from another device.

    The function, or a function that it names, reads the global. The result is None if there is no such global.
    """
    left, seen = [function], set[int]()
    while left:
        call = left.pop()
        while isinstance(call, partial):
            call = call.func
        call = bound_call(unwrap(call))
        call = unwrap(getattr(call, "__func__", call))
        if not isinstance(call, FunctionType) or id(call) in seen:
            continue
        seen.add(id(call))
        codes = [call.__code__]
        # The list grows while the loop runs: lambdas, comprehensions and inner functions add their code.
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in dict.fromkeys([name for code in codes for name in code.co_names if name in call.__globals__]):
            value = call.__globals__[name]
            if isinstance(value, ModuleType):
                continue
            if any(map(is_elsewhere, leaves(value, attributes(value)))):
                return name
            if callable(value) and len(seen) < MOST_FUNCTIONS:
                left.append(value)
    return None


def steps(array: DeviceArray) -> tuple[int, ...]:
    """Return the strides of axes that are longer than 1.

    The stride of an axis of extent 1 has no meaning.
    """
    return tuple([step for extent, step in zip(array.shape, array.strides, strict=True) if extent != 1])
