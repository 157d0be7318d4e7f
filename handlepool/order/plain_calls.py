"""Branches of plain functions: what they read, and what they may have written (guarantee 17).

Nobody knows what a plain function does. What it reads is looked for in its arguments and in what it is bound to. What it
allocated was written by it, and its ``out=``. A function that returned new arrays alone is taken to have written nothing else;
any other may have written whatever it was given. Which of the two a function is, is known from its first call with as many
arguments and the same flags on.
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
"""By code, since a lambda is another function each time: the function's own, and that of the functions that it was given; and by
how many arguments and arrays it was given, since one more may be what it writes; and by its flags."""
_MOST_KNOWN = 10_000


ORDERS_ITSELF = "__handlepool_orders_itself__"
"""The attribute of a function that orders itself when it is called. It is the function itself, since `functools.wraps` copies
attributes."""
F = TypeVar("F", bound=Callable[..., Any])


def orders_itself(function: F) -> F:
    """Decorate a method that orders itself, when it is called, by what it reads and writes."""
    setattr(function, ORDERS_ITSELF, function)
    return function


def does_order_itself(function: object) -> bool:
    """Whether a function, or an object that is called, orders itself."""
    method = getattr(bound_call(function), "__func__", None)
    return type(method) is FunctionType and method.__dict__.get(ORDERS_ITSELF) is method


class PlainCall(PythonCall):
    """A call of a plain function: what it reads and writes, and, until it has ended, what it may write.

    Attributes
    ----------
    reached : Reached or None
        What it is given; None for a function that orders itself.
    caused_wait : bool
        Whether it waits for another call because of its assumed writes alone.
    measurable : bool
        Whether the call counts among the calls that are measured: nothing else tells its writes.
    measurement : Measurement or None
        Of its writes, while it runs.
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
        # What a call reads is kept: a list may be emptied meanwhile, and an attribute or a closure's name be given anew.
        self.reached = reached = None if self._exact else Reached(driver, bound, args, kwargs)
        codes: tuple[Hashable, ...]
        if reached is not None and reached.flat:  # as below, without a look at each value
            codes = (function.__code__, *reached.flags)
        else:
            codes = tuple(_codes((bound, args, kwargs)))
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
        # Another thread may read an answer meanwhile. It counts for later calls.
        self._settled = self._exact or written.known
        may_write = _may_write.get(self._form)
        self.assumed_writes = [] if self._exact or (self._settled and may_write is False) else self._given
        # A call that did not return new arrays alone counts as a writer of all its arrays, whatever it writes.
        self.measurable = not (self._exact or may_write or (written.known and written.calls >= LAST))
        if self.assumed_writes and thread.told is not None:
            unsure()
        self.caused_wait = False
        self.measurement: Measurement | None = None
        self.keep = self._call, reached and reached.values

    def _changed(self) -> list[Piece]:
        """Return the memory of the arguments that earlier calls were found to write."""
        places = self._written.places
        if UNNAMED in places:
            return self._given
        values = named_values(self._call)
        return pieces_of(self._driver, *[values.get(place) for place in places], calls=True)

    def begin(self, pool: PoolInternals, pointer: int) -> None:
        """Begin to measure the call, where it is due, on a stream that waits for all that the call waits for."""
        reached = self.reached
        assert reached is not None
        self.measurement = begin(pool, pointer, self._written, reached.arrays, self.writes)
        # There may have been nothing to measure.
        self._settled = self._settled or (self._written.known and not self._written.places)

    def returned(self, value: object, allocated: Sequence[Any]) -> None:
        """End the measurement, where the call returned new arrays alone."""
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
        """Note whether the assumed writes add to the calls that this one waits for."""
        self.caused_wait = assumed != known

    def ended(
        self, order: DataOrder, track: Track, allocated: Sequence[Any] | None, value: object
    ) -> tuple[list[Piece], list[Piece]]:
        """Be told of the value; new memory that was written, and other memory that the call was not ordered for."""
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
        """Remember whether calls of this form may write what they are given; a form that once did may do so again."""
        if not _may_write.get(self._form):
            if len(_may_write) >= _MOST_KNOWN:
                _may_write.clear()
            _may_write[self._form] = writes

    def _made_unseen(self, result: object) -> list[Piece]:
        """Return the memory of what the call may have made with torch's allocator, which nobody sees, wherever it put that."""
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
        """Be told that the function raised an error; what it may have written before."""
        if self.assumed_writes:
            self._tell(order, track)
        return [(*self._driver.block_range(block), None) for block in allocated], self._given

    def is_new(self, allocated: Sequence[Any], result: object) -> bool:
        """Whether a result is new arrays alone, of those that the call allocated and those of other libraries."""
        new = list(map(self._driver.block_range, allocated))
        found = arrays_in(self._driver, result)
        return bool(found) and all(_lies_in(memory, new) or self._is_new(value, memory) for value, memory in found)

    def _is_new(self, value: Any, memory: Piece) -> bool:
        """Whether an array outside of what the call allocated is its ``out``, or another library's new array."""
        if _lies_in(memory, [known[:2] for known in self._out]):
            return True
        # Another library's allocator is not ours to see.
        return type(value) is not self._driver.array_types[0] and not any(share(memory, known) for known in self._given)

    def _tell(self, order: DataOrder, track: Track) -> None:
        """Warn where a guess made this call wait, and let whoever waits for the call warn, too."""
        if self.caused_wait:
            warn_of_assumed_write(self._writer)
        if not self._out:
            order.assumed_writers[track, track.count + 1] = self._writer


def _lies_in(memory: Piece, blocks: Sequence[tuple[int, int]]) -> bool:
    """Whether memory lies in one of some blocks."""
    start, stop, _ = memory
    for first, last in blocks:  # noqa: SIM110 - a generator takes longer, and mostly there is one block
        if first <= start and stop <= last:
            return True
    return False


def _codes(values: Iterable[Any], depth: int = 4, *, grows: bool = False) -> Iterator[Hashable]:
    """Yield the code of functions, and of those that they were given or call, as far as that can be seen; and flags.

    What is called and has no code of Python's, as a ufunc or a kernel, stands for itself: another one may do another thing. A
    flag says what a call does, as ``inplace=True``. Numbers and text seldom do, and differ from call to call; and so do the
    flags in what grows: lists, and containers of an object.
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
            else:  # an array's method, say: the array is not to be kept, and others of its kind do the same
                yield owner if isinstance(owner, type) else type(owner), value.__name__
        elif type(value) is CACHE:  # of a function or a method; what it holds is not to be kept
            yield from _codes((value.__wrapped__,), depth - 1) if depth else ()
        elif type(value) is methodcaller:
            yield methodcaller, *[each for each in get_referents(value) if isinstance(each, str)]
        elif callable(value) and depth and isinstance(getattr(value, "__wrapped__", None), FunctionType):
            yield from _codes((value.__wrapped__,), depth - 1)  # another cache of a function
        elif callable(value):
            called = bound_call(value)
            if isinstance(value, ReferenceType):
                yield ReferenceType  # itself would be kept, and called when what it leads to ends
            elif called is value:
                yield Token(value)
            elif depth:
                yield from _codes((called,), depth - 1)


def _codes_of_owner(owner: object, depth: int) -> Iterator[Hashable]:
    """Yield the code of what an object calls in its methods: of the functions among its attributes; and its flags.

    Of a ``torch.nn.Module`` it is the code of what each part computes; one function calls them all.
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
