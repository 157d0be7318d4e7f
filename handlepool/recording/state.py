"""Find state that a function's second call changes (guarantee 19).

The second call of a function is recorded. If it changes state, such as an attribute, the recording is refused, because a replay
would not change that state.

The walk begins at the function and its arguments. It goes through attributes, slots, containers, closures, defaults, bound and
partial functions, classes, and the globals that the code names. Each object whose contents can change is a *place*. A snapshot of
all places is taken between the two calls, and compared with their contents after the second call. If the recording is refused,
the places get the contents of the snapshot back.

Device arrays are compared by their memory and not by their values, because no work runs on the device while a function is
recorded.
"""

import functools
import gc
import random
import sys
from array import array as compact_array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import is_
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import CallableProxyType, ProxyType, ReferenceType, WeakKeyDictionary, WeakMethod, WeakSet, WeakValueDictionary

import numpy as np

from handlepool._util.names import shown
from handlepool._util.protocols import Wrapper
from handlepool._util.reachable import CACHE
from handlepool.drivers.protocol import Driver
from handlepool.errors import CaptureError
from handlepool.order.operation import Operation
from handlepool.recording.state_kinds import (
    ATTRIBUTES,
    BYTES,
    CELL,
    CLASS,
    DEFAULTS,
    DICT,
    GENERATOR,
    HOLDERS,
    LEGACY_GENERATOR,
    LIST,
    MISSING,
    NAMES,
    OBJECTS,
    POSITION,
    PYTHON_GENERATOR,
    SET,
    SLOTS,
    TENSOR,
    TORCH_GENERATOR,
    VALUES,
    WEAK_DICT,
    Kind,
    is_data,
    is_library,
    is_on_host,
    is_tensor,
    kind_of_generator,
    position,
    read_cell,
    read_class,
    read_dict,
    read_list,
    read_slots,
    slots_of,
)
from handlepool.recording.update import memory_of, piece_of
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Ranges

MOST_PLACES = 100_000
"""The maximum number of objects that the walk visits.

If the function reaches more objects, the state of the rest is not compared.
"""
MOST_HOST_BYTES = 64 << 20
"""The maximum bytes of host arrays that are compared by values."""

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, range, np.dtype, type)
_ITERABLES: tuple[Any, ...] = (range(0), range(1 << 70), "", "\u00e9", b"", bytearray(), compact_array("b"), {}, np.empty(0))
_ITERATORS = HOLDERS.union(
    [type(iter(each)) for each in _ITERABLES], [type(iter(int, 1)), type(reversed(range(0))), type(reversed({}))]
)
_ADVICE = (
    "Keep state in one array that is written in place (out=, state[...] = new, an operation with mutates=), or take the state as "
    "an argument and return the new state"
)
_DRAW = "Draw the numbers before the call and pass them as an argument, or draw them on the device in an operation"


class Place(NamedTuple):
    """An object whose contents can change.

    Attributes
    ----------
    path : str
        Path by which the function reaches the object.
    kind : Kind
    owner : object
    names : object
        For a module's dictionary, the global names that the code uses. For slots, their names and descriptors. Otherwise None.
    then : dict
        The contents when the snapshot was taken.
    """

    path: str
    kind: Kind
    owner: Any
    names: Any
    then: dict[Any, Any]


class State:
    """A snapshot of all objects that a function reaches.

    Parameters
    ----------
    driver : Driver
    function : callable
    args, kwargs : tuple, dict
    given : iterable of list or dict
        Lists and dictionaries among the arguments. Changes of their entries are not compared here, because `ContainerSnapshot`
        compares them.
    inputs : sequence
        Values that the arguments contain, also inside containers.
    settle : callable, optional
        Waits for work that may still write NumPy arrays. It is called once if the function reaches such arrays. Without
        ``settle``, the snapshot contains only the positions of iterators.

    Attributes
    ----------
    aliases : dict of str
        The paths to arrays that share memory with arrays of the arguments, in order.
    """

    def __init__(
        self,
        driver: Driver,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Iterable[Any],
        inputs: Sequence[Any],
        settle: Callable[[], object] | None = None,
    ) -> None:
        self._driver = driver
        walk = Walk(driver, given, inputs)
        walk.run(function, args, kwargs)
        self.aliases = walk.aliases
        self._known = walk.entered
        # Without ``settle``, the snapshot is compared after the first call. The first call may change state, but must not advance
        # iterators, because their positions cannot be restored.
        if settle is None:
            walk.found = [each for each in walk.found if each[1] is POSITION]
        elif walk.host_arrays:
            settle()
        self._places = [Place(path, kind, owner, names, kind.read(owner, names)) for path, kind, owner, names in walk.found]

    def check(self, name: str) -> None:
        """Refuse a function that has changed something since the snapshot.

        ``name`` is the function's name in the message.

        Raises
        ------
        CaptureError
            The message names the first change.
        """
        for place in self._places:
            then, now = place.then, place.kind.read(place.owner, place.names)
            # Most places are unchanged, so they are compared by identity first, which is quick.
            same = len(then) == len(now) and all(map(is_, then, now)) and all(map(is_, then.values(), now.values()))
            key = MISSING if same else next(self._changes(place, now), MISSING)
            if key is not MISSING:
                raise CaptureError(self._message(name, place, key, place.then.get(key, MISSING), now.get(key, MISSING)))

    def check_kept(self, name: str, before: "State") -> None:
        """Refuse a function whose first call kept an argument's array.

        Each replay would overwrite the kept array with the new input.

        Raises
        ------
        CaptureError
            The message names the first path to an argument's array that the snapshot ``before`` lacks.
        """
        paths = [each for each in self.aliases if each not in before.aliases]
        if paths:
            raise CaptureError(
                f"{name} keeps an argument's array in {paths[0]}, and each replay would overwrite this array with the new input. "
                "Copy the values into a separate array, by state[...] = x"
            )

    def restore(self) -> None:
        """Restore all places, except the positions of iterators."""
        for place in self._places:
            now = place.kind.read(place.owner, place.names)
            if next(self._changes(place, now), MISSING) is not MISSING:
                place.kind.write(place.owner, place.then, now)

    def _changes(self, place: Place, now: dict[Any, Any]) -> Iterator[Any]:
        then = place.then
        for key, value in then.items():
            if now.get(key, MISSING) is not value and not self._same(value, now.get(key, MISSING)):
                yield key
        yield from (key for key in now if key not in then)
        if place.kind is DICT:
            yield from (key for key, other in zip(then, now, strict=False) if not self._same(key, other))

    def _same(self, then: Any, now: Any, depth: int = 4) -> bool:
        """Return whether the function cannot tell two values of a place apart.

        Such values are the same object, equal numbers or texts, or arrays over the same memory.
        """
        if then is now:
            return True
        if type(then) is not type(now) or depth == 0:
            return False
        if isinstance(then, _SCALARS):
            # The reprs differ for 0.0 and -0.0, which compare as equal. The second condition makes two NaNs equal.
            return bool(then == now and repr(then) == repr(now)) or (then != then and now != now)
        if id(now) in self._known and not isinstance(now, (tuple, frozenset)):
            # The new object existed before the call. So the function may have other references to it, and can tell it from the
            # former object by `is`.
            return False
        if isinstance(then, np.ndarray):
            return _same_values(then, now)
        if isinstance(then, self._driver.array_types):
            arrays: list[Any] = [then, now]
            one, other = ((piece_of(self._driver, each), each.shape, each.strides, each.dtype) for each in arrays)
            return one == other
        if is_tensor(then):
            alike = (then.shape, then.stride(), then.dtype) == (now.shape, now.stride(), now.dtype)
            if is_on_host(then):
                # A tensor on the host is compared by its values, which can be read during a recording.
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
        if isinstance(then, (set, frozenset)):
            return then == now and all(isinstance(each, _SCALARS) for each in then)
        if type(then) in _ITERATORS:
            return self._same(position(then, None), position(now, None), depth - 1)
        if (kind := kind_of_generator(then)) is not None:
            return self._same(kind.read(then, None), kind.read(now, None), depth)
        if isinstance(then, (*_CODE, functools.partial)):
            return False
        own, others = (_contents(each) for each in (then, now))
        return bool(own) and self._same(own, others, depth - 1)

    @staticmethod
    def _message(name: str, place: Place, key: object, then: object, now: object) -> str:
        label = place.kind.label.format(path=place.path, key=key if isinstance(key, str) else shown(key))
        if place.kind in (GENERATOR, LEGACY_GENERATOR, PYTHON_GENERATOR, TORCH_GENERATOR):
            return (
                f"{name} drew random numbers from {label} when it was called again to be recorded, so every replay would "
                f"compute with the same numbers. {_DRAW}"
            )
        if place.kind is POSITION:
            return (
                f"{name} took values from {label}, which no replay does. Take the values before the call, and pass "
                "them as arguments"
            )
        one, other = _told(then), _told(now)
        was = f"from {one} to {other}" if one != other else f"to another {other}"
        if place.kind in (VALUES, TENSOR):
            was = "its values in host memory"
        return f"{name} changed {label} ({was}) when it was called again to be recorded, which no replay does. {_ADVICE}"


def _contents(value: object) -> dict[Any, Any]:
    """Return an object's attributes, including its slots."""
    own = getattr(value, "__dict__", None)
    return {**(own if isinstance(own, dict) else {}), **read_slots(value, slots_of(type(value)))}


def _told(value: object) -> str:
    return "nothing" if value is MISSING else shown(value)


def _same_values(then: Any, now: Any) -> bool:
    if then.dtype != now.dtype or then.shape != now.shape or then.dtype.hasobject:
        return False
    return bool(then.nbytes <= MOST_HOST_BYTES and then.tobytes() == now.tobytes())


# The walk


class Walk:
    """Walk from a function to the places that it reaches.

    Attributes
    ----------
    found : list of (path, kind, owner, names)
        The places, with the attributes of `Place`.
    host_arrays : int
        The number of NumPy arrays and host tensors in ``found``.
    aliases : dict of str
        The paths to arrays that share memory with arrays of the arguments, in order.
    entered : dict of int
        All visited objects, by ``id``. The dictionary keeps the objects alive, so that no ``id`` is reused.
    """

    def __init__(self, driver: Driver, given: Iterable[Any], inputs: Sequence[Any]) -> None:
        self._driver = driver
        self._inputs = inputs
        self._input_arrays = frozenset([id(each) for each in inputs if isinstance(each, driver.array_types)])
        # The memory ranges of the arguments' arrays are computed only if the walk finds any other array.
        self._ranges: Ranges | None = None
        self._arrays: Any = (*driver.array_types, getattr(sys.modules.get("torch"), "Tensor", ()))
        self.aliases: dict[str, None] = {}
        self._given = frozenset(map(id, given))
        self.found: list[tuple[str, Kind, Any, Any]] = []
        self.host_arrays = 0
        self._host_bytes = 0
        # The host driver also accepts NumPy arrays as operands. But the walk compares NumPy arrays by their values, not by their
        # memory, so they are left out here.
        self._kinds = tuple(kind for kind in driver.array_types if kind is not np.ndarray)
        self.entered: dict[int, Any] = {}
        self._data: dict[type, bool] = {}
        self._named: set[tuple[int, str]] = set()
        self._left: list[tuple[str, Any]] = []

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Walk from a function and its arguments."""
        left = self._left
        given = [(f"argument {place}", value) for place, value in enumerate(args)]
        for path, value in (*given[::-1], *[*kwargs.items()][::-1]):
            # Most arguments are arrays. For them, these lines do the same as `_visit`, but more quickly.
            if id(value) in self._input_arrays and isinstance(value, self._kinds):
                self.aliases[path] = None
                self.entered[id(value)] = value
        left += [entry for entry in (*kwargs.items(), *given) if id(entry[1]) not in self.entered]
        bound = not isinstance(function, FunctionType)
        left.append(("self" if bound else function.__qualname__, function))
        while left and len(self.entered) < MOST_PLACES:
            path, value = left.pop()
            try:
                self._visit(path, value)
            except Exception:
                # Access to a user's object may raise any error, as with a proxy outside of its context. Then the state of the
                # object is not compared.
                continue

    def _visit(self, path: str, value: Any) -> None:
        if type(value) in _PROXIES:
            # The object behind a weak proxy is the ``__self__`` of the proxy's bound method. If the object is gone, this raises
            # ReferenceError.
            value = value.__repr__.__self__
        if value is None or (isinstance(value, _SCALARS) and not isinstance(value, type)):
            return
        # An alias is noted even if the array was visited before, because several paths may lead to the same array.
        if id(value) in self._input_arrays or (isinstance(value, self._arrays) and self._is_over_input(value)):
            self.aliases[path] = None
        if id(value) not in self.entered:
            self.entered[id(value)] = value
            # A device array is not entered, because its values are not compared. The place that refers to the array is compared.
            if not isinstance(value, self._kinds):
                self._enter(path, value)

    def _is_over_input(self, array: DeviceArray) -> bool:
        """Return whether an array shares memory with an argument's array."""
        if self._ranges is None:
            pieces = [memory_of(self._driver, each) for each in self._inputs]
            self._ranges = Ranges([each[:2] for each in pieces if each is not None])
        memory = memory_of(self._driver, array)
        return memory is not None and self._ranges.meet(memory)

    def _add(self, path: str, kind: Kind, owner: object, names: object = None) -> None:
        if kind not in (LIST, DICT) or id(owner) not in self._given:
            self.found.append((path, kind, owner, names))

    def _all(self, path: str, values: Iterable[Any]) -> None:
        self._left += [(path, value) for value in values]

    def _enter(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self._enter_host_array(path, value)
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
        elif isinstance(value, Wrapper):
            self._all(path, (value.__wrapped__,))
        elif isinstance(value, ModuleType):
            self._enter_module(path, value, frozenset())
        elif isinstance(value, memoryview):
            self._all(path, (value.obj,))
        elif isinstance(value, (ReferenceType, WeakMethod)):
            self._all(path, (value(),))
        elif type(value) in _ITERATORS:
            self._enter_iterator(path, value)
        elif isinstance(value, np.random.SeedSequence):
            # The number of spawned generators is treated as a position, because it cannot be restored either.
            self._add(path, POSITION, value)
        elif (kind := kind_of_generator(value)) is not None:
            self._add(path, kind, value)
            bits = getattr(value, "bit_generator", value)
            self._all(path, (getattr(bits, "seed_seq", None),))
        elif is_tensor(value):
            # A GPU tensor is not entered, because its values are not compared. The place that refers to the tensor is compared.
            if is_on_host(value) and self._takes(value.nbytes):
                self._add(path, TENSOR, value)
        else:
            self._enter_object(path, value)

    def _enter_host_array(self, path: str, array: Any) -> None:
        if array.dtype.hasobject:
            self._add(path, OBJECTS, array)
            self._all(f"{path}[...]", array.ravel().tolist())
        # A read-only array has no state of its own, but its values may change through a writeable base.
        elif not array.flags.writeable:
            self._all(path, (array.base,))
        elif self._takes(array.nbytes):
            self._add(path, VALUES, array)

    def _takes(self, nbytes: int) -> bool:
        """Count a host array; return whether to compare its values.

        The values are not compared if the arrays would exceed `MOST_HOST_BYTES` together.
        """
        if self._host_bytes + nbytes > MOST_HOST_BYTES:
            return False
        self._host_bytes += nbytes
        self.host_arrays += 1
        return True

    def _enter_iterator(self, path: str, value: object) -> None:
        if type(value) is not CACHE:
            self._add(path, POSITION, value)
        # Caches of a library's functions are not inspected.
        elif is_library(value.__module__):
            return
        self._all(path, gc.get_referents(value))

    def _enter_function(self, path: str, function: Any) -> None:
        if is_library(function.__module__):
            return
        names = names_of(function.__code__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # Several functions may share a cell. The cell is entered only once.
            if id(cell) not in self.entered:
                self.entered[id(cell)] = cell
                self._add(f"nonlocal {variable}", CELL, cell)
                for value in read_cell(cell, None).values():
                    if isinstance(value, ModuleType):
                        self._enter_module(variable, value, names)
                    self._left.append((f"nonlocal {variable}", value))
        self._add(path, DEFAULTS, function)
        self._all(path, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        if function.__dict__:
            self._add(path, ATTRIBUTES, function)
            self._left += [(f"{path}.{key}", value) for key, value in function.__dict__.items()]
        self._enter_names(function.__globals__, names, "global ")
        # These modules are named in the code but are no globals: the function imports them itself.
        for name in names.intersection(sys.modules).difference(function.__globals__):
            self._enter_module(name, sys.modules[name], names)

    def _enter_names(self, namespace: dict[str, Any], names: frozenset[str], prefix: str) -> None:
        """Add those globals or module attributes that are in ``names``."""
        used = frozenset([name for name in names if name in namespace and (id(namespace), name) not in self._named])
        if not used:
            return
        self._named.update([(id(namespace), name) for name in used])
        self._add(prefix, NAMES, namespace, used)
        for name in used:
            value = namespace[name]
            if isinstance(value, ModuleType):
                self._enter_module(f"{prefix}{name}", value, names)
            else:
                self._left.append((f"{prefix}{name}", value))

    def _enter_module(self, path: str, module: ModuleType, names: frozenset[str]) -> None:
        """Add those attributes of a module that are in ``names``.

        For a module of a library, add only its generator of random numbers.
        """
        if module is random:
            self._left.append(("random", random._inst))  # noqa: SLF001
        elif module is np.random or (module is np and "random" in names):
            self._left.append(("numpy.random", np.random.mtrand._rand))  # noqa: SLF001
        elif module is sys.modules.get("torch"):
            self._left.append(("torch.default_generator", module.default_generator))
        elif not is_library(module.__name__):
            self._enter_names(vars(module), names, f"{path}.")

    def _enter_class(self, kind: type) -> None:
        # A class inherits the state of its bases and of its metaclass.
        self._all(kind.__qualname__, (*kind.__mro__[1:], type(kind)))
        if not is_library(kind.__module__):
            self._add(kind.__qualname__, CLASS, kind)
            self._left += [(f"{kind.__qualname__}.{name}", value) for name, value in read_class(kind, None).items()]
            special = [value for name, value in vars(kind).items() if name.startswith("__")]
            self._all(kind.__qualname__, [value for value in special if isinstance(value, _CODE)])

    def _enter_object(self, path: str, value: object) -> None:
        kind = type(value)
        if isinstance(value, (list, deque)):
            self._add(path, LIST, value)
            self._left += [
                (f"{path}[{index}]", each) for index, each in read_list(value, None).items() if type(each) not in _PLAIN
            ]
        elif isinstance(value, dict):
            self._add(path, DICT, value)
            entries = [*read_dict(value, None).items()]
            self._left += [(f"{path}[{shown(key)}]", each) for key, each in entries if type(each) not in _PLAIN]
            self._all(path, [key for key, _ in entries if type(key) not in _PLAIN])
        elif isinstance(value, (set, WeakSet)):
            self._add(path, SET, value)
            self._all(path, [*value])
        elif isinstance(value, (WeakKeyDictionary, WeakValueDictionary)):
            self._add(path, WEAK_DICT, value)
            self._all(path, [*value.keys(), *value.values()])
            return
        elif isinstance(value, (tuple, frozenset)):
            self._left += [(f"{path}[{index}]", each) for index, each in enumerate(value)]
        elif isinstance(value, (MappingProxyType, *_VIEWS)):
            self._all(path, [*value.values()] if isinstance(value, MappingProxyType) else [*value])
            return
        elif isinstance(value, (bytearray, compact_array)):
            self._add(path, BYTES, value)
            return
        elif isinstance(value, functools.partial):
            self._left += [(path, value.func), *((path, each) for each in value.args)]
            # The dictionary of keywords may be changed in place.
            if value.keywords:
                self._left.append((f"{path}.keywords", value.keywords))
        if kind in _PLAIN_CONTAINERS:
            return
        # The answer of `is_data` is cached by class, because many objects have the same class.
        if kind not in self._data:
            self._data[kind] = is_data(kind)
        if self._data[kind]:
            self._enter_attributes(path, value, kind)

    def _enter_attributes(self, path: str, value: object, kind: type) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._add(path, ATTRIBUTES, value)
            self._left += [(f"{path}.{key}", each) for key, each in [*own.items()]]
        slots = slots_of(kind)
        if slots:
            self._add(path, SLOTS, value, slots)
            self._left += [(f"{path}.{key}", each) for key, each in read_slots(value, slots).items()]
        self._left.append((kind.__qualname__, kind))


_CODE = (FunctionType, staticmethod, classmethod, property)
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_PROXIES = (ProxyType, CallableProxyType)
_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict)


@functools.lru_cache(4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that ``code`` contains.

    Names in functions that are defined inside the code are included.
    """
    inner = [names_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)
