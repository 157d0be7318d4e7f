"""Small helpers below everything: protocols of other libraries, values in messages, integers, and clean-up after errors."""

import reprlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from operator import index
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, TypeVar

import numpy as np

from handlepool.errors import ArgumentError


def has(value: object, name: str) -> bool:
    """Whether an object has an attribute, its type's or its own; one that is made for any name asked, as by a proxy, is none."""
    if hasattr(type(value), name):
        return True
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and name in own


ARRAY_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
MOST_SHOWN = 100
"""Characters of a value."""

_SCALARS = (str, bytes, int, float, complex, Enum, np.bool_, np.number)
_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
_WITHOUT_ARRAYS = ("builtins", "collections", "numpy", "cupy", "torch", "handlepool")
"""Packages whose objects are arrays, hold them as containers do, or have no attribute that is an array."""
_PLAIN = (*_SCALARS, type(None), type, range, np.dtype, FunctionType, BuiltinFunctionType)


def kind_of(value: object) -> str:
    """Return the name of a type, or of a value's type, with its module's where it is not built in."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def holds_values(value: object) -> bool:
    """Whether a value is an array, of whatever library; a NumPy scalar is none."""
    if isinstance(value, (type, np.generic)):
        return False
    return any(has(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))


_TO_RUN = frozenset([GeneratorType, CoroutineType, AsyncGeneratorType, map, filter])


def name_of(function: Any) -> str:
    """Return what messages call a function."""
    return str(getattr(function, "__qualname__", None) or f"a {kind_of(function)}")


def check_ran(function: object, value: object) -> None:
    """Refuse what a function returned where its work is still to be done, which nobody would put in order.

    Raises
    ------
    ArgumentError
    """
    if type(value) in _TO_RUN and not getattr(value, "gi_suspended", False):  # one that has begun is of a use of its own
        if isinstance(value, (GeneratorType, CoroutineType)):
            value.close()  # or Python warns that nobody awaited it
        raise ArgumentError(
            f"{name_of(function)} returned a {kind_of(value)}, of which nothing has run: pass a function that does the work and "
            f"returns arrays"
        )


def shown(value: object) -> str:
    """Show a value in a message: an array by kind, shape and type, what may show one by its kind, all else as it shows itself."""
    return _shortened.repr(value)


class _Shortened(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        if holds_values(x):
            return _described(x)
        for container in (tuple, list, dict, set, frozenset):
            if isinstance(x, container):
                text: str = getattr(self, f"repr_{container.__name__}")(x, level)
                return text
        kind: Any = type(x)
        harmless = (
            kind.__repr__ is object.__repr__ or kind.__name__ == "dtype" or hasattr(kind, "__cuda_stream__")
        )  # torch's dtype
        if not (harmless or isinstance(x, _PLAIN)):
            return f"<{kind_of(x)} object>"
        text = repr(x)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


_shortened = _Shortened()


def _described(array: Any) -> str:
    try:
        geometry = f" of shape {tuple(map(int, array.shape))}, {array.dtype}"
    except Exception:  # its library calls them otherwise, or does not tell
        geometry = ""
    return f"<{kind_of(array)}{geometry}>"


def as_integer(value: Any, otherwise: int | None = None) -> int:
    """Return the integer that a value is, or ``otherwise`` for what is none, where that is given.

    Raises
    ------
    TypeError
        For what is none.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{shown(value)} is no integer")
        return index(value)
    except TypeError:
        if otherwise is None:
            raise
        return otherwise


def at_least(least: int, what: str, value: Any, unit: str = "") -> int:
    """Return the integer that an argument is, which must not be below ``least``.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``, and what it may be.
    """
    number = as_integer(value, least - 1)
    if number < least:
        raise ArgumentError(f"{what}={shown(value)}; it must be an integer, {least}{unit} or more")
    return number


def flag(what: str, value: Any) -> bool:
    """Return the bool that an argument is.

    Raises
    ------
    ArgumentError
        Naming the argument, ``what``.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what}={shown(value)}; it must be True or False")
    return bool(value)


T = TypeVar("T")


def do_all(steps: Iterable[Callable[[], object]]) -> None:
    """Do every step, also after one has failed; raise the first failure then."""
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as trouble:
            failure = failure or trouble
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # or it, its traceback and this frame would keep each other, and all that the callers had


def take_each(things: list[T]) -> Iterator[T]:
    """Take what a list holds, the first first; other threads append to it and pop from it, too.

    One at a time, so that an interrupt costs what is in hand at most.
    """
    for _ in range(len(things)):
        try:
            yield things.pop(0)
        except IndexError:  # another thread was faster
            return


def content(cell: CellType) -> Any:
    """Return what a closure's cell holds; None for a name of the enclosing function that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def leaves(*values: object, calls: bool = False) -> Iterator[Any]:
    """Yield what is reached from values through lists, tuples and dictionaries, in order; each container is entered once.

    With ``calls`` also through sets, deques and dataclasses, and through what a call of a function reads beside its arguments:
    defaults, closures, what partial functions and methods are bound to, the attributes of an object in a closure or that a method
    is bound to, and the parameters and buffers of a ``torch.nn.Module``. Globals and deeper attributes are not reached.
    """
    left: list[Any] = [*reversed(values)]
    entered: dict[int, object] = {}
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ()) if calls else ()
    while left:
        value = left.pop()
        inside: Iterable[Any]
        if isinstance(value, (list, tuple)):
            inside = value
        elif isinstance(value, dict):
            inside = value.values()
        elif calls and isinstance(value, (set, frozenset, deque)):
            inside = value
        elif calls and type(value) is partial:
            inside = (bound_call(value.func), value.args, value.keywords)
        elif calls and isinstance(value, FunctionType):
            held = [*map(content, value.__closure__ or ())]
            deeper = [each for cell in held if _has_attributes(cell) for each in attributes(cell)]
            inside = (value.__defaults__, value.__kwdefaults__, *held, *deeper)
        elif calls and isinstance(value, _BOUND):
            bound = value.__self__
            inside = () if isinstance(bound, (ModuleType, type)) else (bound, *attributes(bound))
            inside = (getattr(value, "__func__", None), *inside)
        elif calls and isinstance(value, module):
            yield value
            inside = (*value.parameters(), *value.buffers())
        elif calls and is_dataclass(value) and not isinstance(value, type):
            yield value
            inside = [getattr(value, field.name, None) for field in fields(value)]
        else:
            yield value
            continue
        if id(value) not in entered:
            entered[id(value)] = value
            left += reversed([*inside])


def bound_call(function: Any) -> Any:
    """Return what leads to all that a call of a function reads: of an object that can be called its bound method, else itself."""
    if isinstance(function, (FunctionType, partial, type, *_BOUND)) or not callable(function):
        return function
    return function.__call__


def _has_attributes(value: object) -> bool:
    """Whether a function may read arrays in the attributes of what its closure holds, as ``self`` of a lambda in a method."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _WITHOUT_ARRAYS or is_dataclass(value):  # of which the fields are reached anyhow
        return False
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ())
    return not isinstance(value, (type, ModuleType, FunctionType, partial, *_BOUND)) and not isinstance(value, module)


def attributes(value: object) -> list[Any]:
    """Return the values of an object's own attributes."""
    own = getattr(value, "__dict__", None)
    found = [*own.values()] if isinstance(own, dict) else []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += [getattr(value, name, None) for name in names if isinstance(kind.__dict__.get(name), MemberDescriptorType)]
    return found


def frames_inside() -> int:
    """Return how many frames of this package the caller is deep in, for a warning's ``stacklevel``: whoever called into it."""
    frame, depth = sys._getframe(1), 1  # noqa: SLF001 - public in all but its name
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "handlepool":
        frame, depth = frame.f_back, depth + 1
    return depth
