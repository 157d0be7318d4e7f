"""Define the kinds of places where a function keeps state.

A place is an object whose contents can change. Its kind says how the contents are read, written back, and named in a message. The
module also decides whether an object belongs to the user, whose objects hold state, or to a library.
"""

import functools
import gc
import itertools
import random
import sys
import warnings
from array import array as compact_array
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import methodcaller
from types import GeneratorType, MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np

from handlepool._util.reachable import CACHE
from handlepool.tensors.graph_types import FrontendTensor

MISSING: Any = object()
_LIBRARIES = frozenset(
    ["cuda", "cudnn", "cupy", "cupy_backends", "cupyx", "handlepool", "jax", "jaxlib", "numpy", "torch", "triton"]
)
_DICTS: tuple[dict[object, object], ...] = ({}, OrderedDict())
_EMPTY: tuple[Any, ...] = ([], (), set(), deque(), *[view for each in _DICTS for view in (each.values(), each.items())])
HOLDERS = frozenset(
    [type(iter(each)) for each in _EMPTY]
    + [type(reversed(each)) for each in _EMPTY if isinstance(each, (list, deque))]
    + [GeneratorType, map, filter, zip, enumerate, reversed]
    + [kind for kind in vars(itertools).values() if isinstance(kind, type)]
    + [CACHE, methodcaller]
)
"""Types of iterators and similar objects whose state can be read.

Reading the state does not advance the object.
"""
_TESTING = frozenset(["pytest", "_pytest", "pluggy", "hypothesis"])
"""Packages for testing, which count as libraries.

Their objects are not inspected, because they keep caches and counters of their own.
"""
_OPEN = frozenset(
    {
        "_thread._local",
        "argparse.Namespace",
        "collections.ChainMap",
        "collections.UserDict",
        "collections.UserList",
        "functools.cached_property",
        "functools.partial",
        "functools.partialmethod",
        "functools.singledispatchmethod",
        "queue.Queue",
        "types.SimpleNamespace",
    }
)
"""Types of the standard library whose instances count as a user's data."""
_HEAP_TYPE = 1 << 9
"""The bit in ``__flags__`` that marks a class as written in Python.

The bit is needed for a class that `exec` made: its module may be "builtins", although the class is a user's.
"""


class Kind(NamedTuple):
    """A kind of place: how to read, restore and name its contents."""

    read: Callable[[Any, Any], dict[Any, Any]]
    write: Callable[[Any, dict[Any, Any], dict[Any, Any]], None]
    label: str


def is_library(module: object) -> bool:
    """Return whether ``module`` is the name of a library's module.

    Functions and objects of libraries are not inspected.
    """
    return _is_library_root(str(module).partition(".")[0])


@functools.cache
def _is_library_root(root: str) -> bool:
    return root in _LIBRARIES or root in _TESTING or root in sys.stdlib_module_names


def is_data(kind: type) -> bool:
    """Return whether objects of a class are a user's data.

    Objects of a library's class, or of a class derived from it, are no user's data. Torch's modules are an exception: they are a
    user's data.
    """
    # Torch is not imported here. If the process has not imported torch, no object is one of torch's modules.
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    if module is not None and issubclass(kind, module):
        return True
    if any(str(base.__module__).partition(".")[0] in _LIBRARIES for base in kind.__mro__):
        return False
    if not is_library(kind.__module__) or (kind.__module__ == "builtins" and kind.__flags__ & _HEAP_TYPE):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" in _OPEN for base in kind.__mro__)


def slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and descriptors of a class's slots.

    Slots of library classes are left out.
    """
    return tuple(
        (name, value)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and not is_library(base.__module__)
    )


def is_tensor(value: object) -> bool:
    """Return whether a value is a torch tensor."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_on_host(tensor: FrontendTensor) -> bool:
    """Return whether a tensor is in the host's memory."""
    return getattr(getattr(tensor, "device", None), "type", "") == "cpu"


def kind_of_generator(value: object) -> "Kind | None":
    """Return the kind of a random generator; None for other values."""
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        return GENERATOR
    if isinstance(value, np.random.RandomState):
        return LEGACY_GENERATOR
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return PYTHON_GENERATOR
    generator = getattr(sys.modules.get("torch"), "Generator", None)
    # A torch generator on the GPU is left out, because its state must not be read while a stream is being captured. Its state
    # cannot change then, because torch refuses to draw from the generator during a capture.
    return TORCH_GENERATOR if generator is not None and isinstance(value, generator) and is_on_host(value) else None


def _read_attributes(owner: object, _: object) -> dict[Any, Any]:
    return {**owner.__dict__, "__class__": type(owner)}


def _write_entries(entries: Any, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for key in now:
        if key not in then:
            del entries[key]
    for key, value in then.items():
        if now.get(key, MISSING) is not value:
            entries[key] = value


def _write_attributes(owner: object, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    own, others = ({key: value for key, value in each.items() if key != "__class__"} for each in (then, now))
    _write_entries(owner.__dict__, own, others)
    if type(owner) is not then["__class__"]:
        owner.__class__ = then["__class__"]


def read_slots(owner: object, slots: Any) -> dict[Any, Any]:
    """Return the values of an object's slots."""
    found = {}
    for name, slot in slots:
        try:
            found[name] = slot.__get__(owner, type(owner))
        # A slot without a value is left out.
        except AttributeError:
            continue
    return found


def _write_slots(owner: object, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for name, slot in slots_of(type(owner)):
        if name in then:
            slot.__set__(owner, then[name])
        elif name in now:
            slot.__delete__(owner)


def read_list(owner: Any, _: Any) -> dict[Any, Any]:
    """Return the entries of a list or deque, by index."""
    # The method of the base class is called, because a user's class may override the method.
    return dict(enumerate((list if isinstance(owner, list) else deque).__iter__(owner)))


def _write_list(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    if isinstance(owner, list):
        list.__setitem__(owner, slice(None), then.values())
    else:
        owner.clear()
        owner.extend(then.values())


def read_dict(owner: object, _: object) -> dict[Any, Any]:
    """Return the entries of a dictionary, in order."""
    # An `OrderedDict` keeps an order of its own, which the methods of `dict` ignore.
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    return dict(base.items(owner))


def _write_dict(owner: object, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    # The methods of the base class are called, because a user's class may override them.
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    base.clear(owner)
    base.update(owner, then)


def _read_set(owner: Any, _: object) -> dict[Any, Any]:
    # The entries are copied into a list first, because a weak set may lose entries while it is iterated over.
    return {each: each for each in [*owner]}


def _write_set(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    owner.clear()
    owner.update(then.values())


def _write_weak(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    # The container is changed in place, because other code may refer to it.
    owner.clear()
    owner.update(then)


def read_cell(cell: Any, _: object) -> dict[Any, Any]:
    """Return the value of a closure's variable."""
    try:
        return {"": cell.cell_contents}
    # A variable without a value has no contents.
    except ValueError:
        return {}


def _write_cell(cell: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    if then:
        cell.cell_contents = then[""]
    else:
        del cell.cell_contents


def _read_names(namespace: Any, names: Any) -> dict[Any, Any]:
    return {name: namespace[name] for name in names if name in namespace}


def read_class(kind: object, _: object) -> dict[Any, Any]:
    """Return the attributes of a class, except Python's own."""
    return {key: value for key, value in [*vars(kind).items()] if not key.startswith("__")}


def _write_class(kind: object, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for key in now:
        if key not in then:
            delattr(kind, key)
    for key, value in then.items():
        if now.get(key, MISSING) is not value:
            setattr(kind, key, value)


def _read_defaults(function: Any, _: Any) -> dict[Any, Any]:
    return {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}


def _write_defaults(function: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    function.__defaults__, function.__kwdefaults__ = then["__defaults__"], then["__kwdefaults__"]


def _read_values(array: Any, _: object) -> dict[Any, Any]:
    return {"": array.copy()}


def _write_bytes(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    # The slice assignment keeps the length. So it works even while a memoryview of the bytes exists.
    owner[:] = then[""] if isinstance(owner, bytearray) else compact_array(owner.typecode, then[""])


def _write_values(array: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    array[...] = then[""]


def _read_objects(array: Any, _: object) -> dict[Any, Any]:
    return dict(enumerate(array.ravel().tolist()))


def _write_objects(array: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    for index, value in zip(np.ndindex(array.shape), then.values(), strict=True):
        array[index] = value


def position(iterator: object, _: object) -> Any:
    """Return a value that changes when an iterator advances.

    For a seed sequence, return the number of sequences that it has spawned.
    """
    if isinstance(iterator, np.random.SeedSequence):
        return iterator.n_children_spawned
    if type(iterator) is GeneratorType:
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, gc.get_referents(iterator))
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns that Python 3.14 drops ``__reduce__`` for iterators of itertools. So in 3.14, the position of a
            # `cycle` that has begun again is unknown.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iterator.__reduce__()
    except TypeError:
        return repr(iterator), gc.get_referents(iterator)


def _write_nothing(*_: object) -> None:
    """Do nothing, because the position of an iterator cannot be restored."""


def _write_bits(generator: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    # A `numpy.random.Generator` keeps its state in its bit generator. A bit generator keeps its own state.
    getattr(generator, "bit_generator", generator).state = then[""]


def _write_torch(generator: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    torch = sys.modules["torch"]
    generator.set_state(torch.frombuffer(bytearray(then[""]), dtype=torch.uint8))


ATTRIBUTES = Kind(_read_attributes, _write_attributes, "{path}.{key}")
SLOTS = Kind(read_slots, _write_slots, "{path}.{key}")
LIST = Kind(read_list, _write_list, "{path}[{key}]")
DICT = Kind(read_dict, _write_dict, "{path}[{key}]")
SET = Kind(_read_set, _write_set, "the set {path}")
WEAK_DICT = Kind(lambda owner, _: dict(owner.items()), _write_weak, "{path}[{key}]")
CELL = Kind(read_cell, _write_cell, "{path}")
NAMES = Kind(_read_names, _write_entries, "{path}{key}")
CLASS = Kind(read_class, _write_class, "{path}.{key}")
DEFAULTS = Kind(_read_defaults, _write_defaults, "{path}.{key}")
VALUES = Kind(_read_values, _write_values, "{path}")
OBJECTS = Kind(_read_objects, _write_objects, "{path}")
TENSOR = Kind(lambda owner, _: {"": owner.detach().clone()}, lambda owner, then, _: owner.data.copy_(then[""]), "{path}")
BYTES = Kind(lambda owner, _: {"": bytes(owner)}, _write_bytes, "{path}")
POSITION = Kind(lambda owner, _: {"": position(owner, None)}, _write_nothing, "{path}")
GENERATOR = Kind(lambda owner, _: {"": getattr(owner, "bit_generator", owner).state}, _write_bits, "{path}")
LEGACY_GENERATOR = Kind(lambda owner, _: {"": owner.get_state()}, lambda owner, then, _: owner.set_state(then[""]), "{path}")
PYTHON_GENERATOR = Kind(lambda owner, _: {"": owner.getstate()}, lambda owner, then, _: owner.setstate(then[""]), "{path}")
TORCH_GENERATOR = Kind(lambda owner, _: {"": owner.get_state().numpy().tobytes()}, _write_torch, "{path}")
