"""Find the arrays and objects that can be reached from arguments."""

import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache, partial
from itertools import islice
from operator import methodcaller
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
)
from typing import Any
from weakref import (
    CallableProxyType,
    ProxyType,
    ReferenceType,
    WeakKeyDictionary,
    WeakMethod,
    WeakSet,
    WeakValueDictionary,
)

import numpy as np

from handlepool._util.protocols import ARRAY_PROTOCOLS, Wrapper, holds_values

_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
_WITHOUT_ARRAYS = ("builtins", "numpy", "cupy", "handlepool")
"""Packages with types whose objects' attributes need not be searched.

Objects of these types are arrays or containers, or have no array in an attribute.
"""
_PROXIES = (ProxyType, CallableProxyType)
"""Types of weak proxies, whose referents may have ended."""
CACHE = type(lru_cache(len))
_OF_OBJECTS = (np.ndarray, np.void)
"""NumPy's types that may hold Python objects, as their ``dtype`` tells."""
# The walk does not enter objects of these types. A traceback, for example, leads to frames, and a frame leads to all objects of
# its function and of the function's callers.
_HOLD_NO_ARRAYS = (type, ModuleType, CodeType, FrameType, TracebackType)
_WEAK_CONTAINERS = (WeakSet, WeakValueDictionary, WeakKeyDictionary)
_without_attributes: set[type] = {CACHE, methodcaller, ReferenceType, WeakMethod, *_WEAK_CONTAINERS}
"""Types whose attributes are not searched.

The walk searches objects of some of these types in another way. When the walk meets a type of a package in `_WITHOUT_ARRAYS`, it
adds the type to this set.
"""
_NO_ARRAY = (int, float, complex, str, bytes)
_NO_ARRAY_TYPES = frozenset(_NO_ARRAY)
_ends: set[type] = {*_NO_ARRAY, bool, type(None)}
"""Types whose objects hold no other objects.

At first these are types of plain values. The walk adds a type of `_without_attributes` if it finds nothing to enter in its
objects.
"""
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_HEAP_TYPE = 1 << 9
"""The bit of ``__flags__`` that classes written in Python have.

A class made by `exec` also has this bit, although its module may be "builtins".
"""
_IMMUTABLE_TYPE = 1 << 8
"""The bit of ``__flags__`` that only types written in C have."""
_COLLECTED_TYPE = 1 << 14
"""The bit of ``__flags__`` of types that Python's garbage collector traverses.

An object of such a type tells the garbage collector which objects it holds.
"""
MOST_PLAIN = 1000
MOST_OBJECTS = 10_000
"""The maximum number of objects that a walk enters or yields.

A single `Opaque` stands for all further objects.
"""
ATTRIBUTE_LEVELS = 2
"""The depth of the search in attributes.

The search looks at the attributes of an object, and at the attributes of the objects found in them.
"""
_COMPUTING = ("__getitem__", "__iter__", "__next__")
_LIBRARIES = {*_WITHOUT_ARRAYS, *sys.stdlib_module_names, "torch", "cudnn"} - {"__main__"}
_computing: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
"""For each class, the answer of `_computes`.

The keys are weak, so the table does not keep a class alive.
"""


def content(cell: CellType) -> Any:
    """Return the contents of a closure's cell; None for an empty cell.

    A cell belongs to a variable of an enclosing function. It is empty until the variable has a value.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Opaque:
    """Stand among the leaves for objects that the walk did not enter.

    Attributes
    ----------
    held : object
        The objects that the walk did not enter, or an object whose methods compute its values.
    """

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def leaves(*values: object, calls: bool = False, keys: bool = False, owners: list[Any] | None = None) -> Iterator[Any]:
    """Yield the leaves: the objects that values lead to, in order.

    The walk enters lists, tuples and values of dictionaries, each container once. If ``keys`` is true, the walk also enters keys
    of dictionaries.

    If ``calls`` is true, the walk finds everything that a call with these values may use, except globals. It enters keys, sets,
    deques, dataclasses, arrays of objects and weak references. A function leads to its defaults, closure and attributes. A
    partial function or a method leads to its bound objects, and a ``torch.nn.Module`` to its parameters and buffers. Any other
    object of a type written in C, such as a view, a generator or an exception, leads to the objects that it holds. The walk does
    not advance iterators. A fork is no leaf.

    If ``calls`` is true, a container of more than `MOST_PLAIN` entries is not entered if it begins with numbers or text, or with
    lists and tuples of these. After `MOST_OBJECTS` objects, an `Opaque` stands for all further objects. The last leaves are the
    `attribute_leaves` of all objects with attributes. If ``owners`` is given, the walk appends the objects with attributes to
    that list instead, and does not search their attributes.
    """
    if not calls:
        return _walk(values, keys, None)
    if owners is not None:
        return _walk(values, keys, owners)
    # To make a list is quicker than to yield from a second generator.
    found: list[Any] = []
    direct = [*_walk(values, keys, found)]
    return iter(direct + attribute_leaves(found)) if found else iter(direct)


def attribute_leaves(owners: Iterable[Any]) -> list[Any]:
    """Return the leaves of objects' attributes, `ATTRIBUTE_LEVELS` deep.

    The list has an `Opaque` for each object that may compute arrays: the object holds no array, and its class has a method of
    `_COMPUTING` that is written in Python.
    """
    computing: list[Any] = []
    found = _attribute_leaves(owners, computing)
    for owner in computing:
        if not any(map(_is_array, _attribute_leaves([owner], []))) and not any(map(_is_array, _walk((owner,), False, []))):
            found.append(Opaque(owner))
    return found


def _attribute_leaves(owners: Iterable[Any], computing: list[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    found: list[Any] = []
    level = owners
    for _ in range(ATTRIBUTE_LEVELS):
        new = {id(each): each for each in level if id(each) not in seen}
        if not new:
            break
        seen |= new
        for each in new.values():
            kind = type(each)
            if known if (known := _computing.get(kind)) is not None else _computes(kind):
                computing.append(each)
        level = []
        found += _walk(attributes(*new.values()), False, level)
    return found


def _is_array(value: object) -> bool:
    return isinstance(value, Opaque) or holds_values(value)


def _computes(kind: type) -> bool:
    """Return whether a class has a method that may compute arrays.

    The method must be written in Python. The arrays that it returns may exist nowhere before the call.
    """
    known = False
    for each in kind.__mro__:
        package = str(each.__module__).partition(".")[0]
        written = package not in _LIBRARIES or (package == "builtins" and each.__flags__ & _HEAP_TYPE)
        if written and any(isinstance(each.__dict__.get(name), FunctionType) for name in _COMPUTING):
            known = True
    _computing[kind] = known
    return known


def _walk(values: Iterable[object], keys: bool, owners: list[Any] | None) -> Iterator[Any]:
    """Yield the leaves of values, without the leaves of attributes.

    See `leaves`. The objects whose attributes are to be searched are added to ``owners``.
    """
    calls = owners is not None
    budget = MOST_OBJECTS
    left: list[Any] = [*values][::-1]
    entered: dict[int, object] = {}
    # The dictionary holds each owner once.
    found: dict[int, Any] = {}
    torch = sys.modules.get("torch") if calls else None
    module = getattr(getattr(torch, "nn", None), "Module", ())
    while left:
        value = left.pop()
        if type(value) in _ends:
            yield value
            continue
        if calls:
            budget -= 1
            if budget < 0:
                yield Opaque([value, *left])
                break
        if calls and type(value) not in _without_attributes:
            if type(value) in _PROXIES:
                try:
                    # A method of a proxy is bound to the object that the proxy stands for.
                    value = value.__repr__.__self__
                except ReferenceError:
                    continue
            if not isinstance(value, module) and _has_attributes(value):
                found[id(value)] = value
        inside: Collection[Any]
        if isinstance(value, (list, tuple)):
            inside = value
        elif isinstance(value, dict):
            inside = value.values() if type(value) is dict else [*value.values()]
            long = calls and len(value) > MOST_PLAIN and _begins_plain(value)
            if (calls or keys) and not long and not _ends.issuperset(map(type, value)):
                inside = [*value, *inside]
        elif not calls:
            yield value
            continue
        elif isinstance(value, _OF_OBJECTS):
            yield value
            if not value.dtype.hasobject:
                continue
            flat = np.asarray(value).ravel()
            inside = flat.tolist() if len(flat) <= MOST_PLAIN or not _begins_plain(flat[:16].tolist()) else ()
        elif isinstance(value, (set, frozenset, deque)):
            inside = value
        elif isinstance(value, partial):
            inside = (bound_call(value.func), value.args, value.keywords)
        elif isinstance(value, Wrapper):
            inside = (value.__wrapped__,)
        elif isinstance(value, FunctionType):
            inside = (value.__defaults__, value.__kwdefaults__, *map(content, value.__closure__ or ()))
            if value.__dict__:
                inside += (value.__dict__,)
        elif isinstance(value, _BOUND):
            bound = value.__self__
            inside = (getattr(value, "__func__", None), None if isinstance(bound, (ModuleType, type)) else bound)
        elif isinstance(value, module):
            yield value
            own = [each for name, each in vars(value).items() if name not in _OF_MODULES]
            inside = (*value.parameters(), *value.buffers(), *own)
        elif is_dataclass(type(value)):
            yield value
            inside = attributes(value)
        elif isinstance(value, ReferenceType):
            inside = (value() if isinstance(value, WeakMethod) else ReferenceType.__call__(value),)
        elif isinstance(value, _WEAK_CONTAINERS):
            inside = [*value] if isinstance(value, WeakSet) else [*value.values()]
            if isinstance(value, WeakKeyDictionary):
                inside += [*value]
        elif isinstance(value, np.flatiter):
            inside = (value.base,)
        elif _is_looked_into(value):
            yield value
            inside = _referents(value)
        # An open fork keeps the leaves of its calls until its join. If the fork itself were a leaf, it would keep itself alive,
        # and for good if its thread ends before the join.
        elif hasattr(type(value), "__handlepool_keeps_calls__"):
            continue
        else:
            yield value
            if type(value) in _without_attributes:
                _ends.add(type(value))
            continue
        if id(value) not in entered:
            entered[id(value)] = value
            if not calls or len(inside) <= MOST_PLAIN or not _begins_plain(inside):
                if calls and len(inside) > MOST_OBJECTS:
                    # The list in the `Opaque` keeps these objects alive for the branch, even if the caller empties the container.
                    yield Opaque([*inside])
                    continue
                left += reversed([*inside])
    if owners is not None:
        owners += found.values()


def _begins_plain(values: Iterable[Any]) -> bool:
    try:
        first = [*islice(values, 16)]
    # Another thread has changed the container during the iteration, so its entries are unknown.
    except RuntimeError:
        return False
    if _NO_ARRAY_TYPES.issuperset(map(type, first)):
        return True
    flat = [each for value in first for each in (value if isinstance(value, (list, tuple)) else (value,))]
    return all(isinstance(each, _NO_ARRAY) for each in flat)


def bound_call(function: object) -> Any:
    """Return the object at which a walk for a call's inputs begins.

    For an instance of a class with ``__call__``, the object is the bound ``__call__``. For a function, it is the function itself.
    """
    if isinstance(function, Wrapper):
        return bound_call(function.__wrapped__)
    if isinstance(function, (FunctionType, partial, type, *_BOUND)) or not callable(function):
        return function
    return function.__call__


def _has_attributes(value: object) -> bool:
    """Return whether an object's attributes have to be searched.

    The attributes of arrays, and of objects of `_WITHOUT_ARRAYS`, need no search.
    """
    kind = type(value)
    heap = kind.__flags__ & _HEAP_TYPE
    if str(kind.__module__).partition(".")[0] in _WITHOUT_ARRAYS and not (kind.__module__ == "builtins" and heap):
        _without_attributes.add(kind)
        return False
    if issubclass(kind, getattr(sys.modules.get("torch"), "Tensor", ())):
        if str(kind.__module__).startswith("torch"):
            _without_attributes.add(kind)
        return False
    # A driver, or a subclass of a driver, holds hundreds of events and streams, and no array that a user passes. So it is not
    # searched.
    for base in kind.__mro__:
        if str(base.__module__).startswith("handlepool.drivers"):
            return False
    return not issubclass(kind, (type, ModuleType))


def _is_looked_into(value: object) -> bool:
    """Return whether an object of a C type may hold other objects.

    A C type is a type written in C, or a type derived from such a type. The answer for an array is False.
    """
    kind: Any = type(value)
    base = _type_of_c(kind)
    if not base.__flags__ & _COLLECTED_TYPE or isinstance(value, _HOLD_NO_ARRAYS) or str(base.__module__).startswith("cupy"):
        return False
    return not any(hasattr(kind, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))


def _type_of_c(kind: Any) -> Any:
    """Return the first C type among a type and its bases.

    As in `copyreg`, a type counts as written in C if its ``__new__`` is a C function of this very type.
    """
    while kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE:
        if getattr(getattr(kind, "__new__", None), "__self__", None) is kind:
            break
        kind = kind.__base__
    return kind


def _referents(value: object) -> list[Any]:
    """Return the objects that an object of a C type holds.

    Python's garbage collector lists these objects. The object's attributes are left out, because `leaves` yields them at the end.
    The dictionaries of modules are left out, because they hold globals.
    """
    kind, own = type(value), list[Any]()
    if kind not in _without_attributes:
        with suppress(Exception):
            own = [getattr(value, "__dict__", None)]
        # The garbage collector may list the values of attributes in place of the attributes' dictionary.
        own += () if _type_of_c(kind) is kind else attributes(value)
    without = {*map(id, own)}
    return [
        each
        for each in gc.get_referents(value)
        if not isinstance(each, _HOLD_NO_ARRAYS) and id(each) not in without and not (type(each) is dict and "__spec__" in each)
    ]


def attributes(*owners: object) -> list[Any]:
    """Return the values of objects' own attributes.

    If an object raises an error when its attributes are read, the function leaves the object out.
    """
    found: list[Any] = []
    for owner in owners:
        try:
            own = getattr(owner, "__dict__", None)
            found += own.values() if isinstance(own, dict) else ()
            for kind in type(owner).__mro__:
                for slot in kind.__dict__.values() if "__slots__" in kind.__dict__ else ():
                    if isinstance(slot, MemberDescriptorType):
                        with suppress(AttributeError):
                            found.append(slot.__get__(owner, kind))
        # The code of a user's class may raise any error here.
        except Exception:
            continue
    return [each for each in found if type(each) not in _PROXIES]
