"""Order plain functions by their reads and possible writes (guarantee 17).

The writes of a plain function are unknown. Its reads are the arrays in its arguments and in the objects that it is bound to. It
wrote the memory that it allocated, and its ``out=``. A function that returned new arrays alone counts as having written nothing
else. Any other function may have written all its arguments. The first call of a function, per argument count and flags, decides
which rule applies to later calls.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from gc import get_referents
from operator import methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, TypeVar
from weakref import ReferenceType

from handlepool._util.names import kind_of
from handlepool._util.reachable import CACHE, attributes, bound_call, content, leaves
from handlepool.drivers.protocol import Driver
from handlepool.order.argument_names import UNNAMED, named_values
from handlepool.order.assumed import warn_of_assumed_write, warn_of_change
from handlepool.order.books import DataOrder
from handlepool.order.call import PythonCall
from handlepool.order.measured import LAST, Measurement, begin, functions, unsure, writes_of
from handlepool.order.reached import Reached, arrays_in, piece_of, pieces_of
from handlepool.order.track import Track
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.tensors.layout import Piece, Token, share

_may_write: dict[tuple[Hashable, ...], bool] = {}
"""Whether calls of a call form may write their arguments.

Calls with the same call form count as alike. A call form holds the code of the function and of the functions among its
arguments, because a lambda is a new function each time but has the same code. A call form also holds the number of arguments and
of arrays, because one more array may be an output. Finally, a call form holds the flags: True, False
and None among the arguments, and in the defaults and closures of these functions.
"""
_MOST_KNOWN = 10_000


ORDERS_ITSELF = "__handlepool_orders_itself__"
"""The attribute that marks a function which orders itself.

Such a function makes its stream wait for all calls that it depends on. `Program.replay` is an example. The attribute's value
is the function itself. So a wrapper to which `functools.wraps` copies the attribute does not count as marked.
"""
F = TypeVar("F", bound=Callable[..., Any])


def orders_itself(function: F) -> F:
    """Mark a method as a function that orders itself; see `ORDERS_ITSELF`."""
    setattr(function, ORDERS_ITSELF, function)
    return function


def does_order_itself(function: object) -> bool:
    """Return whether `orders_itself` marked a method or ``__call__``.

    ``function`` is a bound method or a callable object. A marked function makes its stream wait for the calls that it depends on.
    """
    method = getattr(bound_call(function), "__func__", None)
    return type(method) is FunctionType and method.__dict__.get(ORDERS_ITSELF) is method


class PlainCall(PythonCall):
    """A call of a plain function, with its reads and possible writes.

    The writes are assumed until the call has ended.

    Attributes
    ----------
    reached : Reached or None
        The values that the call reaches. None for a function that orders itself (`ORDERS_ITSELF`).
    caused_wait : bool
        Whether the call waits for another call because of its assumed writes alone.
    measurable : bool
        Whether the call is counted and, if due, measured. False if a measurement could not change the order of later calls.
    measurement : Measurement or None
        The measurement of the call's writes, as long as the call runs.
    """

    __slots__ = (
        "_call",
        "_driver",
        "_exact",
        "_form",
        "_given",
        "_out",
        "_settled",
        "_writer",
        "_written",
        "assumed_writes",
        "caused_wait",
        "keep",
        "measurable",
        "measurement",
        "name",
        "opaque",
        "reached",
        "reads",
        "writes",
    )

    def __init__(self, driver: Driver, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = getattr(function, "__qualname__", None) or kind_of(function)
        plain = type(function) is FunctionType
        bound = function if plain else bound_call(function)
        self._call = bound, args, kwargs
        self._driver = driver
        self._exact = not plain and does_order_itself(bound)
        # `Reached` keeps the values that the call reads. Without it they could be destroyed while the call runs, because other
        # code may empty a list, or rebind an attribute or a closure's name.
        self.reached = reached = None if self._exact else Reached(driver, bound, args, kwargs)
        # For a flat call, `_codes` would give just the function's code and the flags. So its walk is left out.
        flags = None if reached is None or not reached.flat else reached.flags
        codes = tuple(_codes((bound, args, kwargs))) if flags is None else (bound.__code__, *flags)
        self._writer = self.name, codes[:1]
        self._given: list[Piece] = [] if reached is None else reached.pieces
        self._out = pieces_of(driver, kwargs["out"]) if "out" in kwargs else []
        self._form = (*codes, len(args), 0 if reached is None else reached.given, *kwargs)
        self.reads = self._given
        self.opaque = reached is not None and reached.opaque
        self._written = written = functions.get(self._form) or writes_of(self._form, self.name)
        if written.pending:
            written.read()
        self.writes = [*self._out, *self._changed()] if written.places else self._out
        # Another thread may read an answer while this call starts. So `_settled` keeps the state of this moment, and the answer
        # counts only for later calls.
        self._settled = self._exact or written.known
        may_write = _may_write.get(self._form)
        self.assumed_writes = [] if self._exact or (self._settled and may_write is False) else self._given
        # If a call of this form once returned anything but new arrays, all calls of the form count as writers of all their
        # arrays. A measurement would not change this.
        self.measurable = not (self._exact or may_write or (written.known and written.calls >= LAST))
        if self.assumed_writes and thread.told is not None:
            unsure()
        self.caused_wait = False
        self.measurement: Measurement | None = None
        self.keep = self._call, reached and reached.values

    def _changed(self) -> list[Piece]:
        """Return the memory of the arguments that measured calls wrote."""
        places = self._written.places
        if UNNAMED in places:
            return self._given
        values = named_values(self._call)
        return pieces_of(self._driver, *[values.get(place) for place in places], calls=True)

    def begin(self, pool: PoolInternals, pointer: int) -> None:
        """Begin to measure the call where a measurement is due.

        At this point the stream waits for all calls that this call depends on.
        """
        reached = self.reached
        assert reached is not None
        self.measurement = begin(pool, pointer, self._written, reached.arrays, self.writes)
        # If `begin` finds nothing to measure, it marks `_written` as known.
        self._settled = self._settled or (self._written.known and not self._written.places)

    def returned(self, value: object, allocated: Sequence[Any]) -> None:
        """End the measurement of a call that has returned.

        If the call returned new arrays alone, the measurement compares the call's arguments. If not, the measurement is dropped,
        because the call counts as writing all its arguments anyway.
        """
        measurement, self.measurement = self.measurement, None
        assert measurement is not None
        if self.is_new(allocated, value):
            measurement.end(self._written, self._call)
        else:
            measurement.drop()

    def raised(self) -> None:
        """Drop the measurement of a call that has raised an error."""
        if self.measurement is not None:
            self.measurement.drop()
            self.measurement = None

    def launch(self, slot: Slot) -> Any:
        """Call the function; the slot's stream is current."""
        function, args, kwargs = self._call
        return function(*args, **kwargs)

    def compare_needs(self, known: object, assumed: object) -> None:
        """Note whether the assumed writes add further calls to wait for."""
        self.caused_wait = assumed != known

    def ended(
        self, order: DataOrder, track: Track, allocated: Sequence[Any] | None, value: object
    ) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the call allocated, and other memory it wrote.

        ``value`` is the call's value. The first list is memory that the call allocated. The second list is all other memory
        that counts as written.
        """
        driver = self._driver
        new = list(map(driver.block_range, allocated or ()))
        found = [(value, driver.memory_of(value))] if type(value) is driver.array_types[0] else arrays_in(driver, value)
        made: list[Piece] = []
        for start, stop in new:
            made.append((start, stop, None))
        others: list[Piece] = []
        pure = bool(found)
        for array, memory in found:
            if not _lies_in(memory, new):
                others.append(memory)
                pure = pure and self._is_new(array, memory)
            elif memory not in made:
                made.append(memory)
        if "torch" in sys.modules and not self._exact:
            others += self._made_unseen(value)
        if pure or self._exact:
            if allocated is not None and self._form not in _may_write:
                self._learn(False)
            return made, others if self._settled else others + self._given
        in_place = not found or any(share(memory, known) for _, memory in found for known in self._given)
        if in_place and not self.assumed_writes and not order.waits_for_all(track, self._given):
            warn_of_change(self._writer)
        if allocated is not None:
            self._learn(True)
            self._tell(order, track)
        return made, others + self._given

    def _learn(self, writes: bool) -> None:
        """Remember whether calls of this form may write their arguments.

        The answer True is final, because a form that once wrote its arguments may do so again.
        """
        if not _may_write.get(self._form):
            if len(_may_write) >= _MOST_KNOWN:
                # The table must not grow without end. A call form that is forgotten counts as writing its arguments until it is
                # known again.
                _may_write.clear()
            _may_write[self._form] = writes

    def _made_unseen(self, result: object) -> list[Piece]:
        """Return memory that the call may have made outside the driver.

        Torch's allocator is not observed, so the memory is looked for in the result and in the call's values.
        """
        reached = self.reached
        known = set() if reached is None else {id(array) for array, _ in reached.arrays}
        kind, found = self._driver.array_types, []
        for value in leaves(result, *self._call, calls=True):
            if id(value) not in known and not isinstance(value, kind):
                memory = piece_of(self._driver, value)
                if memory is not None and not any(share(memory, given) for given in self._given):
                    found.append(memory)
        return found

    def failed(self, order: DataOrder, track: Track, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the function may have written before its error."""
        if self.assumed_writes:
            self._tell(order, track)
        return [(*self._driver.block_range(block), None) for block in allocated], self._given

    def is_new(self, allocated: Sequence[Any], result: object) -> bool:
        """Return whether a result consists of new arrays alone.

        New arrays are arrays that the call allocated and new arrays of other libraries.
        """
        new = list(map(self._driver.block_range, allocated))
        found = arrays_in(self._driver, result)
        return bool(found) and all(_lies_in(memory, new) or self._is_new(value, memory) for value, memory in found)

    def _is_new(self, value: Any, memory: Piece) -> bool:
        """Return whether an array is ``out`` or another library's new array.

        Call this method only for an array outside of the memory that the call allocated.
        """
        if _lies_in(memory, [known[:2] for known in self._out]):
            return True
        # Another library's allocator is not observed. So an array of that library counts as new if it shares no memory with the
        # arguments.
        return type(value) is not self._driver.array_types[0] and not any(share(memory, known) for known in self._given)

    def _tell(self, order: DataOrder, track: Track) -> None:
        """Warn if this call waited only because a write was assumed.

        A call whose writes are unknown counts as writing its arguments. If a later call waits for this call for that reason,
        the later call warns as well.
        """
        if self.caused_wait:
            warn_of_assumed_write(self._writer)
        if not self._out:
            order.assumed_writers[track, track.count + 1] = self._writer


def _lies_in(memory: Piece, blocks: Sequence[tuple[int, int]]) -> bool:
    """Return whether memory lies inside any of several blocks."""
    start, stop, _ = memory
    # A generator expression would be slower, and mostly there is one block.
    for first, last in blocks:  # noqa: SIM110
        if first <= start and stop <= last:
            return True
    return False


def _codes(values: Iterable[Any], depth: int = 4, *, grows: bool = False) -> Iterator[Hashable]:
    """Yield the codes of functions in values, and the flags in values.

    The walk continues into the defaults, the closure and the object of each function. A callable without Python code, such as a
    ufunc or a kernel, stands for itself, because another callable may do other work. A flag such as ``inplace=True`` changes
    the work of a call. Numbers and text are left out, because they seldom change the work and differ from call to call. Flags
    in lists and in the containers of an object are left out as well, because these containers often grow from call to call.
    """
    for value in values:
        if value is None or value is True or value is False:
            yield value
        elif isinstance(value, partial):
            yield from _codes((value.func, value.args, value.keywords), depth)
        elif isinstance(value, (list, tuple, dict)):
            if depth:
                inside = value.values() if isinstance(value, dict) else value
                if grows or isinstance(value, list):
                    inside = [each for each in inside if not (each is None or each is True or each is False)]
                yield from _codes(inside, depth - 1, grows=grows)
        elif isinstance(value, FunctionType | MethodType):
            function: Any = getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            yield Token(function) if code is None else code
            if depth:
                cells = getattr(function, "__closure__", None) or ()
                defaults = getattr(function, "__defaults__", None) or ()
                named = getattr(function, "__kwdefaults__", None) or {}
                yield from _codes([*defaults, *named.values(), *map(content, cells)], depth - 1)
            if isinstance(value, MethodType):
                yield from _codes_of_owner(value.__self__, depth)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            owner = value.__self__
            if value.__name__ == "__call__":
                yield from _codes((owner,), depth) if type(owner) is CACHE else (Token(owner),)
            elif owner is None or isinstance(owner, ModuleType):
                yield Token(value)
            # For a method of an array, for example, yield the array's type, because the table of call forms must not keep the
            # array. The same method of another array does the same work.
            else:
                yield owner if isinstance(owner, type) else type(owner), value.__name__
        # For a `functools.lru_cache`, continue with the wrapped function, because the table of call forms must not keep the
        # cache's contents.
        elif type(value) is CACHE:
            yield from _codes((value.__wrapped__,), depth - 1) if depth else ()
        elif type(value) is methodcaller:
            yield methodcaller, *[each for each in get_referents(value) if isinstance(each, str)]
        elif callable(value) and depth and isinstance(getattr(value, "__wrapped__", None), FunctionType):
            # The wrapper may be a cache of another kind. So the walk continues with the wrapped function here, too.
            yield from _codes((value.__wrapped__,), depth - 1)
        elif callable(value):
            called = bound_call(value)
            if isinstance(value, ReferenceType):
                # Yield the type, because a weak reference kept in the table would run its callback when its referent ends.
                yield ReferenceType
            elif called is value:
                yield Token(value)
            elif depth:
                yield from _codes((called,), depth - 1)


def _codes_of_owner(owner: object, depth: int) -> Iterator[Hashable]:
    """Yield the codes of functions among an object's attributes, and its flags.

    For a ``torch.nn.Module`` the codes are the ``forward`` codes of its parts, because the same method of `Module` calls every
    part.
    """
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ())
    if isinstance(owner, module):
        for part in owner.modules():
            code = getattr(getattr(type(part), "forward", None), "__code__", None)
            if code is not None:
                yield code
            yield from [flag for flag in vars(part).values() if flag is True or flag is False]
    elif depth and not isinstance(owner, type):
        own: Any = getattr(owner, "__dict__", None)
        wraps = isinstance(own, dict) and "__wrapped__" in own
        yield from _codes([own["__wrapped__"]] if wraps else attributes(owner), min(depth - 1, 1), grows=True)
