"""State: values that a function reaches and its second call changes, which a replay would not change (guarantee 19).

The walk begins at the function and its arguments. It goes through attributes, slots, containers, closures, defaults, bound and
partial functions, classes, and the globals that the code names. Each object that can change is a *place*: a snapshot is taken
between the two calls, compared after the second one, and written back when the recording is refused.

Device arrays are compared by their memory and never by their values, since nothing runs while a function is recorded.
"""

import functools
import gc
import random
import sys
import warnings
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, WeakSet, WeakValueDictionary

import numpy as np

from handlepool._util import HOLDERS, shown
from handlepool.drivers.protocol import Driver
from handlepool.errors import CaptureError
from handlepool.recording.update import piece_of
from handlepool.regions.operation import Operation

MOST_PLACES = 100_000
"""Objects that the walk takes in. The state of objects beyond them is not compared."""
MOST_HOST_BYTES = 64 << 20
"""Of NumPy's arrays, all together, that are compared by their values."""

_MISSING: Any = object()
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, range, np.dtype, type)
_LIBRARIES = frozenset(
    ["cuda", "cudnn", "cupy", "cupy_backends", "cupyx", "handlepool", "jax", "jaxlib", "numpy", "torch", "triton"]
)
_TESTING = frozenset(["pytest", "_pytest", "pluggy", "hypothesis"])
"""Packages whose functions and objects keep caches and counters of their own."""
_OPEN = (SimpleNamespace, functools.partial, UserDict, UserList)
"""Types of the standard library whose instances are a user's data."""
_ADVICE = (
    "Keep state in one array that is written in place (out=, state[...] = new, an operation with mutates=), or take it as an "
    "argument and return the new one"
)
_DRAW = "Draw them before and pass the array as an argument, or make them on the device in an operation"


class _Kind(NamedTuple):
    """A kind of place: how its contents are read, written back, and named in a message."""

    read: Callable[[Any, Any], dict[Any, Any]]
    write: Callable[[Any, dict[Any, Any], dict[Any, Any]], None]
    label: str


class _Place(NamedTuple):
    """An object whose contents can change.

    Attributes
    ----------
    path : str
        How the function reaches it.
    kind : _Kind
    owner : object
    names : object
        The global names of a module's dictionary that the code uses, and of a cell its variable.
    then : dict
        The contents when the snapshot was taken.
    """

    path: str
    kind: _Kind
    owner: Any
    names: Any
    then: dict[Any, Any]


class State:
    """A snapshot of all that a function reaches.

    Parameters
    ----------
    driver : Driver
    function : callable
    args, kwargs : tuple, dict
    given : iterable of list or dict
        Containers of arguments, which every call is given anew: their entries are no state.
    settle : callable, optional
        Waits for work that may still write NumPy's arrays; called once if there are any. Without it the snapshot is of iterators
        alone, which cannot be put back.
    """

    def __init__(
        self,
        driver: Driver,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Iterable[Any],
        settle: Callable[[], object] | None = None,
    ) -> None:
        self._driver = driver
        walk = _Walk(driver, given)
        walk.run(function, args, kwargs)
        if settle is None:
            walk.found = [each for each in walk.found if each[1] is _POSITION]
        elif walk.host_arrays:
            settle()
        self._places = [_Place(path, kind, owner, names, kind.read(owner, names)) for path, kind, owner, names in walk.found]

    def check(self, name: str) -> None:
        """Refuse a function of a name that has changed something since the snapshot.

        Raises
        ------
        CaptureError
            Naming the first change.
        """
        for place in self._places:
            now = place.kind.read(place.owner, place.names)
            key = next(self._changes(place.then, now), _MISSING)
            if key is not _MISSING:
                raise CaptureError(self._message(name, place, key, place.then.get(key, _MISSING), now.get(key, _MISSING)))

    def restore(self) -> None:
        """Put back the contents of the snapshot, except positions of iterators and generators."""
        for place in self._places:
            now = place.kind.read(place.owner, place.names)
            if next(self._changes(place.then, now), _MISSING) is not _MISSING:
                place.kind.write(place.owner, place.then, now)

    def _changes(self, then: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
        for key, value in then.items():
            if now.get(key, _MISSING) is not value and not self._same(value, now.get(key, _MISSING)):
                yield key
        yield from (key for key in now if key not in then)

    def _same(self, then: Any, now: Any, depth: int = 4) -> bool:
        """Whether two values are alike to a function: one object, equal numbers or text, or arrays over the same memory."""
        if then is now:
            return True
        if type(then) is not type(now) or depth == 0:
            return False
        if isinstance(then, _SCALARS):
            return bool(then == now and repr(then) == repr(now)) or (then != then and now != now)
        if isinstance(then, np.ndarray):
            return _same_values(then, now)
        if isinstance(then, self._driver.array_types):
            arrays: list[Any] = [then, now]
            one, other = ((piece_of(self._driver, each), each.shape, each.strides, each.dtype) for each in arrays)
            return one == other
        if _is_tensor(then):
            alike = (then.shape, then.stride(), then.dtype) == (now.shape, now.stride(), now.dtype)
            if _is_on_host(then):
                return alike and bool((then == now).all())
            return alike and then.data_ptr() == now.data_ptr()
        if isinstance(then, MethodType):
            return then.__func__ is now.__func__ and then.__self__ is now.__self__
        if isinstance(then, (list, tuple)):
            return len(then) == len(now) and all(self._same(*pair, depth - 1) for pair in zip(then, now, strict=True))
        if isinstance(then, dict):
            return then.keys() == now.keys() and all(self._same(then[key], now[key], depth - 1) for key in then)
        if isinstance(then, slice):
            return then == now
        if type(then) in HOLDERS:
            return self._same(_position(then, None), _position(now, None), depth - 1)
        own, others = (getattr(each, "__dict__", None) for each in (then, now))
        return isinstance(own, dict) and bool(own) and self._same(own, others, depth - 1)

    @staticmethod
    def _message(name: str, place: _Place, key: Any, then: Any, now: Any) -> str:
        label = place.kind.label.format(path=place.path, key=key if isinstance(key, str) else shown(key))
        if place.kind in (_GENERATOR, _LEGACY_GENERATOR, _PYTHON_GENERATOR, _TORCH_GENERATOR):
            return (
                f"{name} drew random numbers from {label} when it was called again to be recorded, so that every replay would "
                f"compute with the same numbers. {_DRAW}"
            )
        if place.kind is _POSITION:
            return f"{name} took values from {label}, which no replay does. Take them before, and pass them as arguments"
        was = "values of the host's" if place.kind in (_VALUES, _TENSOR) else f"from {_told(then)} to {_told(now)}"
        return f"{name} changed {label} ({was}) when it was called again to be recorded, which no replay does. {_ADVICE}"


def _told(value: Any) -> str:
    return "nothing" if value is _MISSING else shown(value)


def _same_values(then: Any, now: Any) -> bool:
    if then.dtype != now.dtype or then.shape != now.shape or then.dtype.hasobject:
        return False
    return bool(then.nbytes <= MOST_HOST_BYTES and then.tobytes() == now.tobytes())


# The walk


class _Walk:
    """Finds places.

    Attributes
    ----------
    found : list of (path, kind, owner, names)
    host_arrays : int
        NumPy's arrays and tensors of the host among the owners.
    """

    def __init__(self, driver: Driver, given: Iterable[Any]) -> None:
        self._given = frozenset(map(id, given))
        self.found: list[tuple[str, _Kind, Any, Any]] = []
        self.host_arrays = 0
        self._host_bytes = 0
        # NumPy's arrays are operands of the host driver, too, but their values are the host's.
        self._kinds = tuple(kind for kind in driver.array_types if kind is not np.ndarray)
        # The values are kept with their identifiers, so that no identifier is given out again.
        self._entered: dict[int, Any] = {}
        self._named: set[tuple[int, str]] = set()
        self._left: list[tuple[str, Any]] = []

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Walk from a function and its arguments."""
        left = self._left
        left += [(key, value) for key, value in kwargs.items()]
        left += [(f"argument {place}", value) for place, value in enumerate(args)]
        bound = not isinstance(function, FunctionType)
        left.append(("self" if bound else function.__qualname__, function))
        while left and len(self._entered) < MOST_PLACES:
            path, value = left.pop()
            if value is None or (isinstance(value, _SCALARS) and not isinstance(value, type)):
                continue
            if id(value) not in self._entered:
                self._entered[id(value)] = value
                self._enter(path, value)

    def _add(self, path: str, kind: _Kind, owner: Any, names: Any = None) -> None:
        if id(owner) not in self._given:
            self.found.append((path, kind, owner, names))

    def _all(self, path: str, values: Iterable[Any]) -> None:
        self._left += [(path, value) for value in values]

    def _enter(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self._enter_host_array(path, value)
        elif isinstance(value, self._kinds):
            pass
        elif isinstance(value, FunctionType):
            self._enter_function(path, value)
        elif isinstance(value, MethodType):
            self._left += [(path, value.__func__), (path, value.__self__)]
        elif isinstance(value, BuiltinFunctionType):
            self._all(path, () if isinstance(value.__self__, ModuleType) else (value.__self__,))
        elif isinstance(value, (staticmethod, classmethod)):
            self._all(path, (value.__func__,))
        elif isinstance(value, property):
            self._all(path, (value.fget, value.fset, value.fdel))
        elif isinstance(value, type):
            self._enter_class(value)
        elif isinstance(value, Operation):
            self._all(path, (value.function,))
        elif isinstance(value, (ReferenceType, WeakMethod)):
            self._all(path, (value(),))
        elif type(value) in HOLDERS:
            self._enter_iterator(path, value)
        elif (kind := _kind_of_generator(value)) is not None:
            self._add(path, kind, value)
        elif _is_tensor(value):
            # A tensor of a GPU is compared by its memory, where an attribute has it.
            if _is_on_host(value) and self._takes(value.nbytes):
                self._add(path, _TENSOR, value)
        else:
            self._enter_object(path, value)

    def _enter_host_array(self, path: str, array: Any) -> None:
        if array.dtype.hasobject:
            self._add(path, _OBJECTS, array)
            self._all(f"{path}[...]", array.ravel().tolist())
        elif array.flags.writeable and self._takes(array.nbytes):
            self._add(path, _VALUES, array)

    def _takes(self, nbytes: int) -> bool:
        """Whether so many bytes of the host's are compared, too."""
        if self._host_bytes + nbytes > MOST_HOST_BYTES:
            return False
        self._host_bytes += nbytes
        self.host_arrays += 1
        return True

    def _enter_iterator(self, path: str, value: Any) -> None:
        if type(value).__name__ != "_lru_cache_wrapper":
            self._add(path, _POSITION, value)
            self._all(path, gc.get_referents(value))
        else:
            self._all(path, (value.__wrapped__,))

    def _enter_function(self, path: str, function: Any) -> None:
        if _is_library(function.__module__):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._entered:
                self._entered[id(cell)] = cell
                self._add(f"nonlocal {variable}", _CELL, cell)
                self._all(f"nonlocal {variable}", _read_cell(cell, None).values())
        self._add(path, _DEFAULTS, function)
        self._all(path, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        if function.__dict__:
            self._add(path, _ATTRIBUTES, function)
            self._left += [(f"{path}.{key}", value) for key, value in function.__dict__.items()]
        self._enter_names(function.__globals__, _names(function.__code__), "global ")

    def _enter_names(self, namespace: dict[str, Any], names: frozenset[str], prefix: str) -> None:
        """Take in the globals, or attributes of a module, that some code names."""
        used = frozenset(name for name in names if name in namespace and (id(namespace), name) not in self._named)
        if not used:
            return
        self._named.update((id(namespace), name) for name in used)
        self._add(prefix, _NAMES, namespace, used)
        for name in used:
            value = namespace[name]
            if not isinstance(value, ModuleType):
                self._left.append((f"{prefix}{name}", value))
            elif value is random:
                self._left.append(("random", random._inst))  # noqa: SLF001
            elif value is np or value is np.random:
                if value is np.random or "random" in names:
                    self._left.append(("numpy.random", np.random.mtrand._rand))  # noqa: SLF001
            elif value is sys.modules.get("torch"):
                self._left.append(("torch.default_generator", value.default_generator))
            elif not _is_library(value.__name__):
                self._enter_names(vars(value), names, f"{prefix}{name}.")

    def _enter_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not _is_library(base.__module__) and id(vars(base)) not in self._entered:
                self._entered[id(vars(base))] = base
                self._add(base.__qualname__, _CLASS, base)
                self._left += [(f"{base.__qualname__}.{name}", value) for name, value in _read_class(base, None).items()]
                self._all(base.__qualname__, [value for value in vars(base).values() if isinstance(value, _CODE)])

    def _enter_object(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, (list, deque)):
            self._add(path, _LIST, value)
            self._left += [(f"{path}[{index}]", each) for index, each in enumerate([*value]) if each is not None]
        elif isinstance(value, dict):
            self._add(path, _DICT, value)
            self._left += [(f"{path}[{shown(key)}]", each) for key, each in [*dict.items(value)]]
            self._all(path, [*dict.keys(value)])
        elif isinstance(value, (set, WeakSet)):
            self._add(path, _SET, value)
            self._all(path, [*value])
        elif isinstance(value, (WeakKeyDictionary, WeakValueDictionary)):
            self._add(path, _WEAK_DICT, value)
            self._all(path, [*value.keys(), *value.values()])
            return
        elif isinstance(value, (tuple, frozenset)):
            self._left += [(f"{path}[{index}]", each) for index, each in enumerate(value)]
        elif isinstance(value, (MappingProxyType, *_VIEWS)):
            self._all(path, [*value.values()] if isinstance(value, MappingProxyType) else [*value])
            return
        elif isinstance(value, bytearray):
            self._add(path, _BYTES, value)
            return
        elif isinstance(value, functools.partial):
            self._left += [(path, value.func), *((path, each) for each in value.args)]
            self._left += [(f"{path}.{key}", each) for key, each in value.keywords.items()]
        if kind not in _PLAIN_CONTAINERS and _is_data(kind):
            self._enter_attributes(path, value, kind)

    def _enter_attributes(self, path: str, value: Any, kind: type) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._add(path, _ATTRIBUTES, value)
            self._left += [(f"{path}.{key}", each) for key, each in [*own.items()]]
        slots = _slots(kind)
        if slots:
            self._add(path, _SLOTS, value, slots)
            self._left += [(f"{path}.{key}", each) for key, each in _read_slots(value, slots).items()]
        self._left.append((kind.__qualname__, kind))


_CODE = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_HEAP_TYPE = 1 << 9
"""The bit of ``__flags__`` that classes written in Python have, `exec`'s among them, whose module is "builtins"."""
_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict)


@functools.lru_cache(4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that some code names, with the functions that are defined in it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _is_library(module: str | None) -> bool:
    root = str(module).partition(".")[0]
    return root in _LIBRARIES or root in _TESTING or root in sys.stdlib_module_names


def _is_data(kind: type) -> bool:
    """Whether objects of a class are a user's: neither a library's own nor of a class made from these, except torch's modules."""
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    if module is not None and issubclass(kind, module):
        return True
    if any(base.__module__.partition(".")[0] in _LIBRARIES for base in kind.__mro__):
        return False
    if not _is_library(kind.__module__) or (kind.__module__ == "builtins" and kind.__flags__ & _HEAP_TYPE):
        return True
    return issubclass(kind, (sys.modules["_thread"]._local, *_OPEN))  # noqa: SLF001


def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and not _is_library(base.__module__)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_on_host(tensor: Any) -> bool:
    return getattr(getattr(tensor, "device", None), "type", "") == "cpu"


def _kind_of_generator(value: Any) -> "_Kind | None":
    """Return the kind of a generator of random numbers; None for other values."""
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        return _GENERATOR
    if isinstance(value, np.random.RandomState):
        return _LEGACY_GENERATOR
    if isinstance(value, random.Random):
        return _PYTHON_GENERATOR
    generator = getattr(sys.modules.get("torch"), "Generator", None)
    # A generator of a GPU must not be asked while its stream is captured; torch refuses to draw from it there.
    return _TORCH_GENERATOR if generator is not None and isinstance(value, generator) and _is_on_host(value) else None


# Kinds


def _read_attributes(owner: Any, _: Any) -> dict[Any, Any]:
    return dict(owner.__dict__)


def _write_entries(entries: Any, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for key in now:
        if key not in then:
            del entries[key]
    for key, value in then.items():
        if now.get(key, _MISSING) is not value:
            entries[key] = value


def _write_attributes(owner: Any, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    _write_entries(owner.__dict__, then, now)


def _read_slots(owner: Any, slots: Any) -> dict[Any, Any]:
    found = {}
    for name, slot in slots:
        try:
            found[name] = slot.__get__(owner, type(owner))
        except AttributeError:  # it has no value yet
            continue
    return found


def _write_slots(owner: Any, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for name, slot in _slots(type(owner)):
        if name in then:
            slot.__set__(owner, then[name])
        elif name in now:
            slot.__delete__(owner)


def _read_list(owner: Any, _: Any) -> dict[Any, Any]:
    return dict(enumerate([*owner]))


def _write_list(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    if isinstance(owner, list):
        owner[:] = then.values()
    else:
        owner.clear()
        owner.extend(then.values())


def _read_dict(owner: Any, _: Any) -> dict[Any, Any]:
    return dict(dict.items(owner))


def _write_dict(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    # A class of the user's may override the methods.
    base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
    base.clear(owner)
    base.update(owner, then)


def _read_set(owner: Any, _: Any) -> dict[Any, Any]:
    return {id(each): each for each in [*owner]}


def _write_set(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    owner.clear()
    owner.update(then.values())


def _write_weak(owner: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    owner.clear()
    owner.update(then)


def _read_cell(cell: Any, _: Any) -> dict[Any, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # the variable has no value yet
        return {}


def _write_cell(cell: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    if then:
        cell.cell_contents = then[""]
    else:
        del cell.cell_contents


def _read_names(namespace: Any, names: Any) -> dict[Any, Any]:
    return {name: namespace[name] for name in names if name in namespace}


def _read_class(kind: Any, _: Any) -> dict[Any, Any]:
    """Return the attributes of a class that are data."""
    own = [*vars(kind).items()]
    return {key: value for key, value in own if not key.startswith("__") and not hasattr(type(value), "__get__")}


def _write_class(kind: Any, then: dict[Any, Any], now: dict[Any, Any]) -> None:
    for key in now:
        if key not in then:
            delattr(kind, key)
    for key, value in then.items():
        if now.get(key, _MISSING) is not value:
            setattr(kind, key, value)


def _read_defaults(function: Any, _: Any) -> dict[Any, Any]:
    return {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}


def _write_defaults(function: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    function.__defaults__, function.__kwdefaults__ = then["__defaults__"], then["__kwdefaults__"]


def _read_values(array: Any, _: Any) -> dict[Any, Any]:
    return {"": array.copy()}


def _write_values(array: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    array[...] = then[""]


def _read_objects(array: Any, _: Any) -> dict[Any, Any]:
    return dict(enumerate(array.ravel().tolist()))


def _write_objects(array: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    for index, value in zip(np.ndindex(array.shape), then.values(), strict=True):
        array[index] = value


def _position(iterator: Any, _: Any) -> Any:
    """Return where an iterator is, as far as its type tells."""
    if type(iterator) is GeneratorType:
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, gc.get_referents(iterator))
    try:
        with warnings.catch_warnings():
            # Python 3.12 says of itertools' that 3.14 cannot do so. There `cycle` tells nothing once it has begun anew.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iterator.__reduce__()
    except TypeError:
        return repr(iterator), gc.get_referents(iterator)


def _write_nothing(*_: object) -> None:
    """Leave an iterator where it is: nothing puts it back."""


def _write_bits(generator: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    getattr(generator, "bit_generator", generator).state = then[""]


def _write_torch(generator: Any, then: dict[Any, Any], _: dict[Any, Any]) -> None:
    torch = sys.modules["torch"]
    generator.set_state(torch.frombuffer(bytearray(then[""]), dtype=torch.uint8))


_ATTRIBUTES = _Kind(_read_attributes, _write_attributes, "{path}.{key}")
_SLOTS = _Kind(_read_slots, _write_slots, "{path}.{key}")
_LIST = _Kind(_read_list, _write_list, "{path}[{key}]")
_DICT = _Kind(_read_dict, _write_dict, "{path}[{key}]")
_SET = _Kind(_read_set, _write_set, "the set {path}")
_WEAK_DICT = _Kind(lambda owner, _: dict(owner.items()), _write_weak, "{path}[{key}]")
_CELL = _Kind(_read_cell, _write_cell, "{path}")
_NAMES = _Kind(_read_names, _write_entries, "{path}{key}")
_CLASS = _Kind(_read_class, _write_class, "{path}.{key}")
_DEFAULTS = _Kind(_read_defaults, _write_defaults, "{path}.{key}")
_VALUES = _Kind(_read_values, _write_values, "{path}")
_OBJECTS = _Kind(_read_objects, _write_objects, "{path}")
_TENSOR = _Kind(lambda owner, _: {"": owner.detach().clone()}, lambda owner, then, _: owner.data.copy_(then[""]), "{path}")
_BYTES = _Kind(lambda owner, _: {"": bytes(owner)}, lambda owner, then, _: owner.__init__(then[""]), "{path}")
_POSITION = _Kind(lambda owner, _: {"": _position(owner, None)}, _write_nothing, "{path}")
_GENERATOR = _Kind(lambda owner, _: {"": getattr(owner, "bit_generator", owner).state}, _write_bits, "{path}")
_LEGACY_GENERATOR = _Kind(lambda owner, _: {"": owner.get_state()}, lambda owner, then, _: owner.set_state(then[""]), "{path}")
_PYTHON_GENERATOR = _Kind(lambda owner, _: {"": owner.getstate()}, lambda owner, then, _: owner.setstate(then[""]), "{path}")
_TORCH_GENERATOR = _Kind(lambda owner, _: {"": owner.get_state().numpy().tobytes()}, _write_torch, "{path}")
