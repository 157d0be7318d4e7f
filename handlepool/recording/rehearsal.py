"""The first call of a function that is recorded: its nodes and plans, to be compared with the second call's, and its changes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import fields
from itertools import zip_longest
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

from handlepool._util.frames import place_of_call
from handlepool._util.names import shown
from handlepool._util.reachable import content, leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import CaptureError
from handlepool.graphs.plan import Plan
from handlepool.graphs.trace import Request
from handlepool.pool.context import NOT_CACHED, recordings
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.recording.update import PLAIN
from handlepool.tensors.layout import Piece, Token, piece, share

T = TypeVar("T")
Pieces = Collection[Piece | Token]


OF_CONSTANT = ("a constant",)
"""The ``what`` of a copy of a constant. The first call of a function makes no such copies: it has the constants themselves."""


class CallSignature(NamedTuple):
    """The identity of a call that becomes a node, compared between the two calls of the function, and the call's place.

    Attributes
    ----------
    name : str
    sizes : tuple of int
        Bytes of each array that it writes.
    place : str
    what : tuple
        The plans that it launches; or the operation, with those of its arguments that are numbers or text.
    """

    name: str
    sizes: tuple[int, ...]
    place: str
    what: tuple[object, ...]

    def __str__(self) -> str:
        writes = f", which writes {sum(self.sizes):,} bytes" if self.sizes else ""
        return f"{self.name} at {self.place}{writes}"


def sizes_of(writes: Pieces) -> tuple[int, ...]:
    """Return the bytes of each piece of memory."""
    return tuple([each[1] - each[0] for each in writes if not isinstance(each, Token)])


class Rehearsal:
    """Notes the calls in the place of lanes, while a function is called for real.

    Attributes
    ----------
    calls : list of CallSignature
    new : LeftoverArrays
    """

    def __init__(self, pool: PoolInternals, pointer: int) -> None:
        self.calls: list[CallSignature] = []
        self.new = LeftoverArrays(pool.driver)
        self._pool = pool
        self._pointer = pointer
        self._inside = False
        self._place = ""

    def around(self, function: Callable[..., T], *args: object) -> T:
        """Call a function, and note the calls that it makes in this thread."""
        return recordings.around(self, "rehearsal", self, function, *args)

    def takes(self, pool: object, pointer: int) -> bool:
        """Whether a call of a pool on a stream would become a node."""
        return not self._inside and pool is self._pool and pointer == self._pointer

    def accessed(self, reads: Pieces, writes: Pieces) -> None:
        """Ignore the memory of a call that is no node, or is inside one."""

    def expect(self, reads: Callable[[], Pieces] | None) -> None:
        """Note the place of the next node."""
        self._place = "" if reads is None else place_of_call()

    def hit(self, attempt: Callable[..., T], arrays: tuple[Any, ...], out: object) -> T:
        """Make a call by a shortcut."""
        known = len(self.calls)
        try:
            result = attempt(self._begin, arrays, out)
        finally:
            self._inside = False
        if result is NOT_CACHED:
            del self.calls[known:]
        elif out is None:
            self.new.add(result, self.calls[-1])
        return result

    def made(self, arrays: object) -> None:
        """Note new arrays that a node has made."""
        self.new.add(arrays, self.calls[-1])

    def _begin(self, operands: object, launch: Any, *_: object) -> Slot:
        plan = launch.plan
        self.calls.append(CallSignature(plan.name, launch.operands.sizes, self._place or place_of_call(), (plan,)))
        self._inside = True
        return self._pool.slot()

    def run(
        self,
        name: str,
        reads: Pieces,
        writes: Pieces,
        keep: object,
        call: Callable[[Any], T],
        new: Callable[[T], Iterable[Piece | Token]] | None = None,
        *,
        what: tuple[object, ...] = (),
        assumed_writes: Pieces = (),
    ) -> T:
        """Make a call where it would be made without lanes."""
        self.calls.append(CallSignature(name, sizes_of(writes), place_of_call(), what))
        self._inside = True
        try:
            result = call(None)
        finally:
            self._inside = False
        if new is not None:
            self.new.add(result, self.calls[-1], among={*new(result)})
        return result


class LeftoverArrays:
    """The arrays that the first call makes and that are still held when it has ended: caches, or state.

    Parameters
    ----------
    driver : Driver
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kind = driver.array_types[0]
        # Weak, so that the first call takes no more memory for being watched. The references are to the memory, since a view
        # keeps the memory and not the array.
        self._made: list[tuple[ReferenceType[Any], Piece, CallSignature]] = []
        self._held: list[tuple[Any, Piece, CallSignature]] = []

    def add(self, arrays: object, call: CallSignature, among: Set[object] | None = None) -> None:
        """Note the arrays that a call made; with ``among``, only those whose memory is in it."""
        driver = self._driver
        for value in (arrays,) if type(arrays) is self._kind else leaves(arrays):
            if isinstance(value, driver.array_types):
                array: Any = value
                memory = piece(driver.array_pointer(array), array.shape, array.strides, array.dtype.itemsize)
                if among is None or memory in among:
                    owner = driver.array_block(array)
                    try:
                        reference = ref(array if owner is None else owner)
                    except TypeError:  # CuPy's views hold the array instead
                        reference = ref(array)
                    self._made.append((reference, memory, call))

    def end(self) -> None:
        """End the first call. The arrays that are left are held from here on, so that no other array takes their memory."""
        left = [(made(), piece, call) for made, piece, call in self._made]
        self._held = [each for each in left if each[0] is not None]
        self._made.clear()

    def forget(self) -> None:
        """Let go of the arrays."""
        self._held.clear()

    def check(self, name: str, reads: Pieces, writes: Pieces) -> None:
        """Refuse a function whose second call read, and did not write, an array of its first call: each replay reads the same.

        Raises
        ------
        CaptureError
            Naming the call that made it.
        """
        if not self._held:
            return
        read, written = ([each for each in pieces if not isinstance(each, Token)] for pieces in (reads, writes))
        for _, held, call in self._held:
            if any(share(held, each) for each in read) and not any(share(held, each) for each in written):
                raise CaptureError(
                    f"{name} keeps state in a new array each time: its second call read what its first one had made by {call}, "
                    f"and every replay would read just that. Write state into one array, by out= or state[...] = new, or take it "
                    f"as an argument and return the new one"
                )


class Launches:
    """The plans that a call of a function launches, and how often each.

    Parameters
    ----------
    pool : PoolInternals
        Whose plans count.

    Attributes
    ----------
    calls : list of CallSignature
        In order.
    new : LeftoverArrays
    """

    def __init__(self, pool: PoolInternals) -> None:
        self.calls: list[CallSignature] = []
        self.new = LeftoverArrays(pool.driver)
        self._pool = pool
        self._found: dict[int, tuple[Plan, int]] = {}

    def around(self, function: Callable[..., T], *args: object) -> T:
        """Call a function, and count the plans that this thread launches meanwhile."""
        return recordings.around(self, "launched", self._count, function, *args)

    def _count(self, pool: PoolInternals, plan: Plan, made: Sequence[Any]) -> None:
        if pool is self._pool:
            self.calls.append(CallSignature(plan.name, (), place_of_call(), (plan,)))
            self.new.add(made, self.calls[-1])
            self._found[id(plan)] = plan, self._found.get(id(plan), (plan, 0))[1] + 1

    def forget(self) -> None:
        """Let go of the plans."""
        self._found.clear()

    def plans(self, device: int) -> list[tuple[Plan, int]]:
        """Return a device's plans, each with its launches."""
        return [(plan, count) for plan, count in self._found.values() if plan.device == device]


class ContainerSnapshot:
    """The entries of the lists and dictionaries among a function's arguments, when it was called.

    Each container is looked at once, by the methods of lists and dictionaries themselves: its own class may override them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found: list[tuple[str, Any, list[tuple[Any, Any]]]] = []
        self._new: list[list[tuple[Any, Any]]] = []
        entered: set[int] = set()
        left = [(f"argument {place}", value) for place, value in enumerate(args)] + [*kwargs.items()]
        while left:
            place, value = left.pop()
            if not isinstance(value, (list, tuple, dict)) or id(value) in entered:  # which is held, here or by a tuple
                continue
            entered.add(id(value))
            inside = [*dict.items(value)] if isinstance(value, dict) else [*enumerate(tuple(value))]
            if not isinstance(value, tuple):
                self._found.append((place, value, inside))
            left += [(f"{place}[{shown(key)}]", each) for key, each in inside if isinstance(each, (list, tuple, dict))]

    @property
    def containers(self) -> list[Any]:
        """The lists and dictionaries."""
        return [value for _, value, _ in self._found]

    @property
    def grown(self) -> bool:
        """Whether there are new entries."""
        return any(self._beyond(value, inside) for _, value, inside in self._found)

    def renew(self) -> list[Any]:
        """Take the new entries out, so that the second call finds the arguments as the first one did; return their values."""
        self._new = [self._beyond(value, inside) for _, value, inside in self._found]
        self._shorten()
        return [entry for new in self._new for _, entry in new]

    def restore(self) -> None:
        """Put back all entries as the first call left them, whatever the second one has done."""
        if not self._new:
            return
        self._shorten()
        for (_, value, inside), new in zip(self._found, self._new, strict=True):
            if isinstance(value, dict):
                for key, entry in (*inside, *new):
                    dict.__setitem__(value, key, entry)
            else:
                list.__setitem__(value, slice(None), [entry for _, entry in (*inside, *new)])

    @staticmethod
    def _beyond(value: Any, inside: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        if isinstance(value, dict):
            known = {key for key, _ in inside}
            return [(key, entry) for key, entry in dict.items(value) if key not in known]
        return [*enumerate(list.__iter__(value))][len(inside) :]

    def _shorten(self) -> None:
        for _, value, inside in self._found:
            if isinstance(value, dict):
                for key, _ in self._beyond(value, inside):
                    dict.__delitem__(value, key)
            else:
                list.__delitem__(value, slice(len(inside), None))

    def check(self, name: str) -> None:
        """Refuse a function that took an entry out, or gave one anew: no replay does that. New entries are none of these.

        Raises
        ------
        CaptureError
            Naming the entry.
        """
        for place, value, inside in self._found:
            there = value if isinstance(value, dict) else dict(enumerate(value))
            for key, entry in inside:
                now = dict.get(there, key, self)
                if now is entry or (type(now) is type(entry) and isinstance(now, PLAIN) and now == entry):
                    continue
                what = f"{place}[{shown(key)}] is {'gone' if now is self else 'another object now'}"
                raise CaptureError(
                    f"{name} changed a list or dictionary that it was given, which no replay does: {what}. Have it change one of "
                    f"its own, as dict(d) or list(d) makes one"
                )


def check_same(name: str, first: Sequence[CallSignature], second: Sequence[CallSignature]) -> None:
    """Compare the calls that a function made when it was called for real with those that were recorded.

    Addresses are not: whoever makes arrays in the function has other ones each time.

    Raises
    ------
    CaptureError
        Naming the first difference.
    """
    for number, (one, other) in enumerate(zip_longest(first, second), 1):
        more = ("", "")
        if one is not None and other is not None and one[:2] == other[:2]:
            if one.what == other.what or _same(one.what, other.what):
                continue
            more = _options(one.what, ""), _options(other.what, ", with other options")
        raise CaptureError(
            f"{name} gave other work when it was called again to be recorded. Call {number} was {one or 'none'}{more[0]} the "
            f"first time, and {other or 'none'}{more[1]} the second. Take decisions, and prepare what is made once, before it is "
            f"recorded"
        )


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether two calls ask for the same; of one geometry there may be another plan by now, that was tuned or built anew."""
    return [_asked(each) for each in one] == [_asked(each) for each in other]


def _asked(what: object) -> object:
    return _likeness(what.asked if isinstance(what, Plan) else what)


def _likeness(value: object) -> object:
    """Return what two values have in common where they ask for the same work: a function may be defined anew at each call."""
    value = getattr(value, "__wrapped__", value)  # of an operation, a graph function
    if isinstance(value, Request):
        return tuple([_likeness(getattr(value, each.name)) for each in fields(value)])
    if isinstance(value, (tuple, list)):
        return type(value), *map(_likeness, value)
    if isinstance(value, Mapping):
        return {key: _likeness(each) for key, each in value.items()}
    return _telling(value) if isinstance(value, FunctionType) else value


def _telling(value: object, depth: int = 4) -> object:
    """Return what tells a function from others: its code, and numbers, text and functions in its defaults and closure.

    Of all else, as arrays, it is the type: those are what the function is given.
    """
    if isinstance(value, (int, float, complex, str, bytes)):
        return value
    inside: Iterable[object] = ()
    if depth and isinstance(value, FunctionType):
        inside = (value.__defaults__, value.__kwdefaults__, *map(content, value.__closure__ or ()))
    elif depth and isinstance(value, (tuple, list)):
        inside = value
    elif depth and isinstance(value, dict):
        inside = value.values()
    return getattr(value, "__code__", type(value)), *[_telling(each, depth - 1) for each in inside]


def _options(what: tuple[object, ...], otherwise: str) -> str:
    values = [shown(each) for each in what[1:] if not isinstance(each, Plan)]
    return f", with {', '.join(values)}" if values else otherwise
