"""Compare the values that a function reaches with the recorded values.

A program reads the arrays that it was recorded with, and has numbers, texts and flags built in. So before a call uses the
program, guards check that the function still reaches the same arrays and values. Arrays and other objects are compared by
identity, and plain values by value. The function reaches values through its closure, its defaults, attributes, containers, and
the globals that its code names. An attribute has no guard if no code of the function names the attribute, unless library code
may read it.

All comparisons of one program are compiled into one function, because a loop over the guards would take three times as long.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from handlepool._util.reachable import CACHE
from handlepool.drivers.protocol import Driver
from handlepool.recording.state import MOST_PLACES, Walk, names_of
from handlepool.recording.state_kinds import (
    ATTRIBUTES,
    BYTES,
    CELL,
    CLASS,
    DEFAULTS,
    DICT,
    LIST,
    MISSING,
    NAMES,
    OBJECTS,
    SET,
    SLOTS,
    TENSOR,
    VALUES,
    WEAK_DICT,
    Kind,
    is_library,
    is_tensor,
)
from handlepool.recording.update import PLAIN, same

MOST_GUARDS = 5000
"""The maximum number of guards of a program.

A function that needs more guards is not recorded, and runs eagerly.
"""
MOST_HOST_BYTES = 1 << 16
"""The maximum bytes of NumPy arrays that are compared at each call.

A function that reaches more bytes is not recorded, and runs eagerly.
"""
ARRAY, OBJECT, VALUE = "array", "object", "value"

_BY_NAME = frozenset(
    ["getattr", "hasattr", "vars", "__dict__", "attrgetter", "methodcaller", "eval", "exec", "globals", "locals"]
)
"""Names with which code can reach attributes whose names it computes."""
_MODULE_DATA = ("_parameters", "_buffers", "_modules")
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_CODE = (FunctionType, BuiltinFunctionType, ModuleType, type, staticmethod, classmethod, property, CACHE)
"""Types of values that count as code.

Code gets no guard, because it is assumed not to change.
"""
_PLAIN = (*PLAIN, type(None), slice, range, np.dtype)


class Guard(NamedTuple):
    """The comparison of one value that the function reaches.

    Attributes
    ----------
    path : str
        The path by which the function reaches the value.
    kind : str
        ``ARRAY``, ``OBJECT`` or ``VALUE``.
    read : callable
        Returns the present value.
    expected : object
        The value at the recording, or a later object equal to that value.
    """

    path: str
    kind: str
    read: Callable[[], Any]
    expected: Any


class TooMany(Exception):
    """A function reaches more values than can be compared at each call."""


class Guards:
    """The comparisons that tell whether a program may serve a call.

    Parameters
    ----------
    driver : Driver
    function : callable
    held : iterable
        The arguments that the key of the call contains by identity.

    Attributes
    ----------
    arrays : list
        All arrays and tensors that the function reaches.
    holds : callable
        Returns True if each value is the same object as at the recording. If it returns False, `changed` tells whether a value
        differs or was only replaced by an equal object.

    Raises
    ------
    TooMany
    """

    def __init__(self, driver: Driver, function: Callable[..., Any], held: Iterable[Any]) -> None:
        self._kinds = driver.array_types
        # The host driver reads a tensor in host memory in place, like an array. With any other driver, the values of such a
        # tensor are compared.
        self._host_tensors = driver.name != "host"
        walk = Walk(driver, (), ())
        walk.run(function, [*held], {})
        if len(walk.entered) >= MOST_PLACES:
            raise TooMany(
                f"the function reaches {MOST_PLACES:,} objects or more, too many to compare at each call: let it "
                "reach fewer objects"
            )
        self._reached = walk.entered
        self.arrays = [each for each in walk.entered.values() if self._is_array(each)]
        named = _named([each for each in walk.entered.values() if isinstance(each, FunctionType) and _is_users(each)])
        # None stands for all names. If code can compute the names of attributes, each attribute counts as named.
        self._named = None if named & _BY_NAME else named
        self._guards: list[Guard] = []
        self._tests: list[str] = []
        self._space: dict[str, Any] = {}
        self._host_bytes = 0
        # The identifiers of dictionaries of torch modules. Dictionaries in `_left_out`, such as hooks, are not compared. Of
        # dictionaries in `_any_length` (parameters and buffers), the entries are compared, but not their number.
        self._left_out: set[int] = set()
        self._any_length: set[int] = set()
        self._of_modules = _of_modules()
        for path, kind, owner, names in walk.found:
            self._add_place(path, kind, owner, names)
            if len(self._guards) > MOST_GUARDS:
                raise TooMany(
                    f"the function reaches more than {MOST_GUARDS:,} attributes, entries and variables, too many to compare at "
                    "each call: let it reach fewer of these"
                )
        self.holds = self._compiled()
        # Only the guarded objects must stay alive, and the guards refer to them. So all other objects of the walk are released.
        self._reached = {}

    def __len__(self) -> int:
        return len(self._guards)

    def changed(self) -> list[Guard]:
        """Return the guards whose values have changed.

        If a value was replaced by an equal object, it counts as unchanged, and its guard expects the new object from now on.
        """
        found, renewed = [], []
        for number, guard in enumerate(self._guards):
            try:
                now = guard.read()
            except Exception:
                now = MISSING
            if now is guard.expected:
                continue
            if guard.kind != VALUE or not same(guard.expected, now):
                kind = guard.kind if guard.kind != VALUE or _is_plain(now) else OBJECT
                found.append(guard._replace(kind=kind))
            else:
                renewed.append((number, now))
        for number, now in renewed:
            self._guards[number] = self._guards[number]._replace(expected=now)
            # `holds` compares by identity. Without the new object, `holds` would return False at every later call.
            if f"v{number}" in self._space:
                self._space[f"v{number}"] = now
        return found

    def _is_array(self, value: object) -> bool:
        return isinstance(value, self._kinds) or is_tensor(value)

    def _compiled(self) -> Callable[[], bool]:
        # The compiled function evaluates all tests in one expression without a loop. If a test raises, the value counts as
        # different.
        tests = "\n        or ".join(self._tests) or "False"
        text = f"def holds():\n    try:\n        return not ({tests})\n    except Exception:\n        return False\n"
        exec(compile(text, "<a program's guards>", "exec"), self._space)
        # A function in its own namespace would be a reference cycle, and only the garbage collector would free guarded arrays.
        made: Callable[[], bool] = self._space.pop("holds")
        return made

    # Places

    def _add_place(self, path: str, kind: Kind, owner: Any, names: Any) -> None:
        if id(owner) in self._left_out:
            return
        if kind is ATTRIBUTES:
            own = owner.__dict__
            keys = self._read_of(type(owner), own)
            self._entries(own, [(f"{path}.{key}", key) for key in keys], "[{key}]", own.get)
            if keys != ["training"] and not isinstance(owner, FunctionType):
                self._present(path, own, partial(_readable, type(owner), self._named, self._of_modules, own))
        elif kind in (DICT, WEAK_DICT):
            self._entries(owner, [(f"{path}[{key!r:.40}]", key) for key in [*owner.keys()]], "[{key}]", owner.get)
            if kind is WEAK_DICT:
                self._length(path, owner)
            elif id(owner) not in self._any_length:
                self._keys(path, owner)
        elif kind is NAMES:
            self._entries(owner, [(f"{path}{name}", name) for name in names if name in owner], "[{key}]", owner.get)
        elif kind is LIST:
            entries = [(f"{path}[{index}]", index) for index in range(len(owner))]
            self._entries(owner, entries, "[{key}]", lambda index, _: owner[index])
            self._length(path, owner)
        elif kind is CLASS:
            space = vars(owner)
            named = partial(_of_class, self._named, space)
            self._entries(space, [(f"{path}.{key}", key) for key in named()], "[{key}]", space.get)
            self._present(path, space, named)
        elif kind is SLOTS:
            for name, slot in names:
                if self._named is None or name in self._named:
                    self._slot(f"{path}.{name}", owner, slot)
        elif kind is CELL:
            self._one(path, owner, ".cell_contents", lambda: owner.cell_contents)
        elif kind is DEFAULTS:
            self._one(f"{path}.__defaults__", owner, ".__defaults__", lambda: owner.__defaults__)
            self._one(f"{path}.__kwdefaults__", owner, ".__kwdefaults__", lambda: owner.__kwdefaults__)
            given = owner.__kwdefaults__ or {}
            self._entries(given, [(f"{path}.__kwdefaults__[{key!r}]", key) for key in given], "[{key}]", given.get)
        elif kind is SET:
            self._bytes(path, owner, "frozenset(map(id, {}))", lambda: frozenset(map(id, owner)), [*owner])
        elif kind in (VALUES, TENSOR) and (kind is VALUES or self._host_tensors):
            self._host_bytes += owner.nbytes
            if self._host_bytes > MOST_HOST_BYTES:
                raise TooMany(
                    f"the function reaches more than {MOST_HOST_BYTES:,} bytes of host arrays, too many to compare at each call, "
                    f"as in {path}. Keep these values in arrays of the device"
                )
            if kind is VALUES:
                self._bytes(path, owner, "{}.tobytes()", owner.tobytes)
            else:
                self._bytes(path, owner, "{}.detach().numpy().tobytes()", lambda: owner.detach().numpy().tobytes())
        elif kind is OBJECTS:
            self._bytes(path, owner, "[*map(id, {}.flat)]", lambda: [*map(id, owner.flat)], owner.ravel().tolist())
        elif kind is BYTES:
            self._bytes(path, owner, "bytes({})", lambda: bytes(owner))

    def _read_of(self, kind: type, own: dict[str, Any]) -> list[str]:
        """Return the names of an object's attributes that need guards."""
        if self._of_modules and _is_module(kind):
            self._left_out |= {id(own[key]) for key in self._of_modules if key in own and key not in _MODULE_DATA}
            self._any_length |= {id(own.get(key)) for key in ("_parameters", "_buffers")}
        return _readable(kind, self._named, self._of_modules, own)

    def _entries(self, owner: object, entries: Iterable[tuple[str, Any]], test: str, get: Callable[[Any, Any], Any]) -> None:
        for path, key in entries:
            value = get(key, MISSING)
            if value is MISSING or self._is_code(value):
                continue
            number = len(self._guards)
            shown = repr(key) if type(key) in (str, int) else f"k{number}"
            # A key that has no literal is read from the namespace of the compiled function.
            self._space[f"k{number}"] = key
            self._guard(path, value, owner, test.format(key=shown), partial(get, key, MISSING))

    def _slot(self, path: str, owner: Any, slot: Any) -> None:
        def read() -> Any:
            # Reading a slot without a value raises.
            try:
                return slot.__get__(owner, type(owner))
            except AttributeError:
                return MISSING

        value = read()
        if not self._is_code(value):
            self._guard(path, value, read, "()", read)

    def _one(self, path: str, owner: object, test: str, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except ValueError:
            return
        if not self._is_code(value):
            self._guard(path, value, owner, test, read)

    def _guard(self, path: str, value: object, owner: object, test: str, read: Callable[[], Any]) -> None:
        number = len(self._guards)
        kind = ARRAY if self._is_array(value) else VALUE if _is_plain(value) else OBJECT
        self._guards.append(Guard(path, kind, read, value))
        self._space[f"o{number}"], self._space[f"v{number}"] = owner, value
        self._tests.append(f"o{number}{test} is not v{number}")

    def _present(self, path: str, owner: Any, named: Callable[[], list[str]]) -> None:
        """Add a guard for the attributes of ``owner`` that have values.

        Only attributes that the function may read count. A new attribute matters, because it may hide an attribute of the
        class. A call compares only the number of all attributes, because a search for each name would take too long.
        """
        number, expected, space = len(self._guards), tuple(sorted(named())), self._space

        def read() -> tuple[str, ...]:
            now = tuple(sorted(named()))
            if now == expected:
                space[f"n{number}"] = len(owner)
            return now

        self._guards.append(Guard(f"the attributes of {path}", VALUE, read, expected))
        space[f"o{number}"], space[f"n{number}"] = owner, len(owner)
        self._tests.append(f"len(o{number}) != n{number}")

    def _keys(self, path: str, owner: dict[Any, Any]) -> None:
        """Add a guard for the keys of a dictionary and their order."""
        number, keys = len(self._guards), [*owner]
        read: Callable[[], Any] = lambda: keys if [*owner] == keys else MISSING  # noqa: E731
        self._guards.append(Guard(f"the keys of {path}", OBJECT, read, keys))
        self._space[f"o{number}"], self._space[f"k{number}"] = owner, keys
        self._tests.append(f"[*o{number}] != k{number}")

    def _length(self, path: str, owner: Any) -> None:
        number, length = len(self._guards), len(owner)
        read: Callable[[], Any] = lambda: length if len(owner) == length else MISSING  # noqa: E731
        self._guards.append(Guard(f"the number of entries of {path}", OBJECT, read, length))
        self._space[f"o{number}"] = owner
        self._tests.append(f"len(o{number}) != {length}")

    def _bytes(self, path: str, owner: object, test: str, read: Callable[[], Any], keep: object = None) -> None:
        try:
            value = read()
        except Exception as error:
            raise TooMany(
                f"the function reaches {path}, whose values cannot be read to compare them at each call: pass them as an argument"
            ) from error
        number = len(self._guards)
        self._guards.append(Guard(path, VALUE, lambda: value if read() == value else MISSING, value))
        # ``keep`` are the objects whose identities are compared. The namespace keeps them alive, because a new object could get
        # the identity of a freed object.
        self._space[f"o{number}"], self._space[f"v{number}"], self._space[f"k{number}"] = owner, value, keep
        self._tests.append(f"{test.format(f'o{number}')} != v{number}")

    def _is_code(self, value: object) -> bool:
        if self._is_array(value):
            return False
        if isinstance(value, FunctionType):
            # A function of the user gets a guard, because the variable may later refer to another function.
            return is_library(value.__module__)
        return isinstance(value, _CODE) or str(type(value).__module__).partition(".")[0] == "handlepool"


def _readable(kind: type, named: frozenset[str] | None, of_modules: frozenset[str], own: dict[str, Any]) -> list[str]:
    """Return the names of an object's attributes that the function may read.

    ``named`` has the names in the function's code, or is None if they are unknown.
    """
    if kind is FunctionType:
        # ``__wrapped__`` needs no guard, because the code of a wrapper does not read this attribute.
        return [key for key in own if key != "__wrapped__"]
    if of_modules and _is_module(kind):
        if str(kind.__module__).partition(".")[0] == "torch":
            return ["training"]
        return [key for key in own if key == "training" or key not in of_modules]
    by_library = any(is_library(base.__module__) for base in kind.__mro__ if base is not object) or is_dataclass(kind)
    return [*own] if named is None or by_library else [key for key in own if key in named]


def _of_class(named: frozenset[str] | None, space: Mapping[str, Any]) -> list[str]:
    """Return the attributes of a class that the function may read."""
    return [key for key in space if not key.startswith("__") and (named is None or key in named)]


def _of_modules() -> frozenset[str]:
    """Return the names of the attributes that every torch module has."""
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return frozenset[str]() if module is None else frozenset(vars(module()))


def _is_module(kind: type) -> bool:
    return issubclass(kind, sys.modules["torch"].nn.Module)


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _named(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Return all names that the code of ``functions`` contains.

    The names in a constructor are left out if no other code names its class, because the constructor then ran only before the
    recording.
    """
    # Methods that `dataclasses` generates are left out. Some of them name ``__class__``, but they make no object.
    functions = [each for each in functions if not (each.__name__.startswith("__") and each.__code__.co_filename == "<string>")]
    makes = {each for each in functions if each.__name__ in _CONSTRUCTORS}
    named = frozenset[str]().union(*[names_of(each.__code__) for each in functions if each not in makes])
    while True:
        used = {each for each in makes if named & {"type", "__class__", *each.__qualname__.split(".")[-2:-1]}}
        if not used:
            return named
        makes -= used
        named = named.union(*[names_of(each.__code__) for each in used])


def _is_users(function: FunctionType) -> bool:
    return not is_library(function.__module__)
