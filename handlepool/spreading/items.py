"""Check the items of a spread, and compare their geometries."""

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
"""The maximum number of functions whose globals `global_elsewhere` searches."""


def itself(value: object) -> Any:
    """Return ``value`` unchanged, as the leaf function of `rebuilt`."""
    return value


def geometry(value: Any) -> Hashable:
    """Return a key, equal for two items that can share a program."""
    if isinstance(value, dict):
        return dict, tuple([(key, geometry(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return type(value), tuple([geometry(entry) for entry in value])
    return value.shape, value.strides, value.dtype


def check_copied(place: str, value: object, driver: Driver, *, inside: bool) -> None:
    """Refuse an array that cannot be copied to devices.

    Such an array is of another library, or has a mask or a class that would be lost. ``inside`` says whether an array of the
    driver inside an object is also refused. Such an array is not copied, and its use would not wait for the stream that writes
    it.
    """
    check_ends(f"{place} holds", value)
    for leaf in leaves(value):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArrayTypeError(
                f"{place} holds {shown(leaf)}, whose mask cannot be copied to devices: pass its data and its mask as two arrays"
            )
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
                f"{place} holds {shown(leaf)}, which cannot be copied to devices: convert it by {converter}, or pass a "
                f"NumPy array"
            )
        for array in leaves(leaf, attributes(leaf), calls=True) if inside else ():
            if isinstance(array, driver.array_types) and not isinstance(array, np.ndarray):
                raise ArrayTypeError(
                    f"{place} holds a {kind_of(leaf)} with {shown(array)} in it, which cannot be copied to devices: pass arrays "
                    f"only in lists, tuples and dictionaries"
                )


def global_elsewhere(function: Any, is_elsewhere: Callable[[Any], bool]) -> str | None:
    """Return the name of a global with an array on another device.

    The globals that ``function`` names are searched, and the globals that functions among them name. Return None if there is no
    such global.
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
        # The loop extends the list that it iterates over, so that the code of lambdas, comprehensions and inner functions is
        # also visited.
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
    """Return the strides of all axes with an extent above 1.

    The stride of an axis of extent 1 is left out, because it has no effect.
    """
    return tuple([step for extent, step in zip(array.shape, array.strides, strict=True) if extent != 1])
