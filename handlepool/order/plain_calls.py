"""Branches of plain functions: what they read, and what they may have written (guarantee 17).

Nobody knows what a plain function does. What it reads is looked for in its arguments and in what it is bound to. What it
allocated was written by it, and its ``out=``. A function that returned new arrays alone is taken to have written nothing else;
any other may have written whatever it was given. Which of the two a function is, is known from its first call with as many
arguments and the same flags on.
"""

import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from gc import get_referents
from operator import methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np

from handlepool._util.frames import frames_inside
from handlepool._util.names import kind_of
from handlepool._util.protocols import has
from handlepool._util.reachable import CACHE, Opaque, attribute_leaves, attributes, bound_call, content, leaves
from handlepool.drivers.protocol import Driver
from handlepool.order.accesses import Memory
from handlepool.order.argument_names import UNNAMED, named_values
from handlepool.order.books import DataOrder
from handlepool.order.measured import Measurement, begin, unsure, writes_of
from handlepool.order.track import Track
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token, piece, share

Guess = tuple[str, Hashable]
"""A function that may have written what it was given: its name, and its code."""

_may_write: dict[tuple[Hashable, ...], bool] = {}
"""By code, since a lambda is another function each time: the function's own, and that of the functions that it was given; and by
how many arguments and arrays it was given, since one more may be what it writes; and by its flags."""
_MOST_KNOWN = 10_000
_warned: set[Hashable] = set()


def piece_of(driver: Driver, value: Any) -> Piece | None:
    """Return the memory of an array of any library; None for what has none that is known."""
    if isinstance(value, driver.array_types):  # outside of the below: an error here must not hide an array
        array: Any = value
        return piece(driver.array_pointer(array), array.shape, array.strides, array.dtype.itemsize)
    try:
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is not None and isinstance(value, tensor):
            size = value.element_size()
            return piece(value.data_ptr(), value.shape, [step * size for step in value.stride()], size)
        for protocol in ("__cuda_array_interface__", "__array_interface__"):
            if has(value, protocol) and not isinstance(value, (type, np.generic)):
                known = getattr(value, protocol)
                kind = np.dtype(known["typestr"])
                shape, strides = tuple(known["shape"]), known.get("strides")
                if strides is None:
                    strides = np.empty(0, kind).itemsize * np.cumprod([1, *shape[:0:-1]])[::-1]
                return piece(known["data"][0], shape, [int(step) for step in strides], kind.itemsize)
    except Exception:  # sparse, without memory, or a proxy
        return None
    return None


def arrays_in(driver: Driver, *values: object, calls: bool = False) -> list[tuple[Any, Piece]]:
    """Return the arrays that are reached from values, each with its memory."""
    found = [(value, piece_of(driver, value)) for value in leaves(*values, calls=calls)]
    return [(value, memory) for value, memory in found if memory is not None]


def pieces_of(driver: Driver, *values: object, calls: bool = False) -> list[Piece]:
    """Return the memory of the arrays that are reached from values and have elements."""
    return [memory for _, memory in arrays_in(driver, *values, calls=calls) if memory[1] > memory[0]]


exact: set[Any] = set()
"""Functions that order themselves, when they are called, by what they read and write: nothing has to be guessed of them."""


class PlainCall(Memory):
    """A call of a plain function: what it reads and writes, and, until it has ended, what it may write.

    Attributes
    ----------
    held : list of array
        What it reads. A list may be emptied meanwhile, and an attribute or a closure's name be given anew.
    measurement : Measurement or None
        Of its writes, while it runs.
    """

    __slots__ = (
        "_call",
        "_driver",
        "_exact",
        "_form",
        "_found",
        "_given",
        "_guess",
        "_out",
        "_settled",
        "_written",
        "held",
        "measurement",
    )

    def __init__(self, driver: Driver, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = getattr(function, "__qualname__", None) or kind_of(function)
        function = bound_call(function)
        self._call = function, args, kwargs
        self._driver = driver
        self.measurement: Measurement | None = None
        codes = tuple(_codes((function, args, kwargs)))
        self._guess = name, codes[:1]
        self._exact = getattr(function, "__func__", None) in exact
        reached: list[Any] = []
        given = 0
        if not self._exact:
            owners: list[Any] = []
            reached = [*leaves(args, kwargs, calls=True, owners=owners)]
            given = sum(piece_of(driver, each) is not None for each in reached)
            reached += leaves(function, calls=True, owners=owners)
            if owners:
                reached += attribute_leaves(owners)
        pairs = [(value, piece_of(driver, value)) for value in reached]
        self._found = [(value, memory) for value, memory in pairs if memory is not None]
        opaque = [value for value, memory in pairs if memory is None and type(value) is Opaque]
        self.held = [*[array for array, _ in self._found], *opaque]
        self._given = [memory for _, memory in self._found if memory[1] > memory[0]]
        self._out = pieces_of(driver, kwargs.get("out"))
        self._form = (*codes, len(args), given, *kwargs)
        self._written = written = writes_of(self._form, name)
        if written.pending:
            written.read()
        # Two threads may call the function: an answer that another one reads meanwhile does not count for this call.
        self._settled = self._exact or written.settled
        guessed = [] if self._exact or (self._settled and _may_write.get(self._form) is False) else self._given
        if guessed and thread.told is not None:
            unsure()
        super().__init__(
            self._given, [*self._out, *self._changed()] if written.places else self._out, guessed, name, opaque=bool(opaque)
        )

    def _changed(self) -> list[Piece]:
        """Return the memory of the arguments that earlier calls were found to write."""
        places = self._written.places
        if UNNAMED in places:
            return self._given
        values = named_values(self._call)
        return pieces_of(self._driver, *[values.get(place) for place in places], calls=True)

    def begin(self, pool: PoolInternals, pointer: int) -> None:
        """Begin to measure the call, which waits on its stream for all that it has to."""
        # One that did not return new arrays alone counts as a writer of all, whatever it writes.
        if not self._exact and not _may_write.get(self._form):
            self.measurement = begin(pool, pointer, self._written, self._found, self.writes)
            # There may have been nothing to measure.
            self._settled = self._settled or (self._written.settled and not self._written.places)

    def returned(self, result: object, allocated: Sequence[Any]) -> None:
        """End the measurement, where the call is one whose writes nothing else tells."""
        measurement, self.measurement = self.measurement, None
        assert measurement is not None
        if self.is_new(allocated, result):
            measurement.end(self._written, self._call)
        else:
            measurement.drop()

    def raised(self) -> None:
        """Drop the measurement of a call that has raised an error."""
        if self.measurement is not None:
            self.measurement.drop()
            self.measurement = None

    def ended(self, order: DataOrder, track: Track, allocated: Sequence[Any] | None, result: object) -> None:
        """Write down what the function wrote, now that it has returned; None where nobody saw what it allocated."""
        new = [self._driver.block_range(block) for block in allocated or ()]
        found = arrays_in(self._driver, result)
        made: list[Piece] = [(start, stop, None) for start, stop in new]
        others: list[Piece] = []
        for _, memory in found:
            inside = any(start <= memory[0] and memory[1] <= stop for start, stop in new)
            (made if inside else others).append(memory)
        if "torch" in sys.modules and not self._exact:
            others += self._made_unseen(result)
        pure = self._exact or self._are_new(found, new)
        if not pure:
            in_place = not found or any(share(memory, known) for _, memory in found for known in self._given)
            if in_place and not self.guessed and not order.waits_for_all(track, self._given):
                warn_of_change(self._guess)
        if allocated is not None:
            if not _may_write.get(self._form):
                if len(_may_write) >= _MOST_KNOWN:
                    _may_write.clear()
                _may_write[self._form] = not pure
            if not pure:
                self._tell(order, track)
        order.note_found(track, made, others if pure and self._settled else others + self._given)

    def _made_unseen(self, result: object) -> list[Piece]:
        """Return the memory of what the call may have made with torch's allocator, which nobody sees, wherever it put that."""
        known, kind, found = {*map(id, self.held)}, self._driver.array_types, []
        for value in leaves(result, *self._call, calls=True):
            if id(value) not in known and not isinstance(value, kind):
                memory = piece_of(self._driver, value)
                if memory is not None and not any(share(memory, given) for given in self._given):
                    found.append(memory)
        return found

    def failed(self, order: DataOrder, track: Track, allocated: Sequence[Any]) -> None:
        """Write down what the function may have written before it raised an error."""
        if self.guessed:
            self._tell(order, track)
        order.note_found(track, [(*self._driver.block_range(block), None) for block in allocated], self._given)

    def is_new(self, allocated: Sequence[Any], result: object) -> bool:
        """Whether a result is new arrays alone, of those that the call allocated and those of other libraries."""
        return self._are_new(arrays_in(self._driver, result), [self._driver.block_range(block) for block in allocated])

    def _are_new(self, found: Sequence[tuple[Any, Piece]], new: Sequence[tuple[int, int]]) -> bool:
        return bool(found) and all(self._is_new(value, memory, new) for value, memory in found)

    def _is_new(self, value: Any, memory: Piece, new: Sequence[tuple[int, int]]) -> bool:
        start, stop, _ = memory
        if any(first <= start and stop <= last for first, last in (*new, *(known[:2] for known in self._out))):
            return True
        # Another library's allocator is not ours to see.
        return type(value) is not self._driver.array_types[0] and not any(share(memory, known) for known in self._given)

    def _tell(self, order: DataOrder, track: Track) -> None:
        """Warn where a guess made this call wait, and let whoever waits for the call warn, too."""
        if self.waited:
            warn_of_guess(self._guess)
        if not self._out:
            order.guesses[track, track.count + 1] = self._guess


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


def warn_of_guess(guess: Guess) -> None:
    """Warn, once for each function, that a branch waits for what the function may have written."""
    if guess not in _warned:
        _warned.add(guess)
        warnings.warn(
            f"a branch waits since {guess[0]}, which does not return new arrays alone, may have written any array that it was "
            f"given: say what it writes with @handlepool.operation(mutates=...), and nothing else waits for it",
            stacklevel=frames_inside(),
        )


def warn_of_change(guess: Guess) -> None:
    """Warn, once for each function, that it may have written what another branch reads, which nobody could tell before."""
    if (guess, "changed") not in _warned:
        _warned.add((guess, "changed"))
        warnings.warn(
            f"{guess[0]} returned new arrays before, and this call did not. If it wrote an array that it was given, nothing "
            f"orders that with another branch that was given the array: say what it writes with "
            f"@handlepool.operation(mutates=...), or mutates=() where it writes nothing",
            stacklevel=frames_inside(),
        )
