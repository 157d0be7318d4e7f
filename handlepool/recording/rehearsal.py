"""Note the nodes, plans and changes of a recorded function's first call.

Before a function is recorded, it is called for real. Its second call is recorded, and must do the same work as the first call.
"""

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
"""The ``what`` of a call that copies a constant (see `handlepool.recording.host_copies`).

Only the second call of a function makes such copies. So they are left out when the two calls are compared.
"""


class CallSignature(NamedTuple):
    """The identity and the place of a call that becomes a node.

    The identity consists of name, sizes and ``what``. It must be the same in both calls of the function.

    Attributes
    ----------
    name : str
    sizes : tuple of int
        Size in bytes of each array that the call writes.
    place : str
        File and line of the call.
    what : tuple
        The plans that the call launches, or the operation and those of its arguments that are numbers or text.
    """

    name: str
    sizes: tuple[int, ...]
    place: str
    what: tuple[object, ...]

    def __str__(self) -> str:
        writes = f", which writes {sum(self.sizes):,} bytes" if self.sizes else ""
        return f"{self.name} at {self.place}{writes}"


def sizes_of(writes: Pieces) -> tuple[int, ...]:
    """Return the size in bytes of each piece of memory, without tokens."""
    return tuple([each[1] - each[0] for each in writes if not isinstance(each, Token)])


class Rehearsal:
    """Note the calls that will be nodes, while a function runs.

    The object takes the place of `Lanes`, and has the same methods.

    Attributes
    ----------
    calls : list of CallSignature
        The calls that will be nodes in the recording.
    new : LeftoverArrays
        The arrays that these calls made.
    """

    def __init__(self, pool: PoolInternals, pointer: int) -> None:
        self.calls: list[CallSignature] = []
        self.new = LeftoverArrays(pool.driver)
        self._pool = pool
        self._pointer = pointer
        self._inside = False
        self._place = ""

    def around(self, function: Callable[..., T], *args: object) -> T:
        """Call a function, and note its calls in this thread."""
        return recordings.around(self, "rehearsal", self, function, *args)

    def takes(self, pool: object, pointer: int) -> bool:
        """Return whether a pool's call on a stream will be a node."""
        return not self._inside and pool is self._pool and pointer == self._pointer

    def accessed(self, reads: Pieces, writes: Pieces) -> None:
        """Ignore the memory that a call accesses, which only `Lanes` notes."""

    def expect(self, reads: Callable[[], Pieces] | None) -> None:
        """Note the place of the next node; with None, forget that place."""
        self._place = "" if reads is None else place_of_call()

    def hit(self, attempt: Callable[..., T], arrays: tuple[Any, ...], out: object) -> T:
        """Make a call by a shortcut; forget the call if it fails."""
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
        """Note the new arrays that the last noted call made."""
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
        """Make a call on its usual stream, and note the call."""
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
    """The arrays of the function's first call that outlive the call.

    The function keeps such arrays as caches or as state.

    Parameters
    ----------
    driver : Driver
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kind = driver.array_types[0]
        # The references are weak, so that they keep no array alive. Each reference is to the array's memory object and not to the
        # array, because a view of an array keeps only the memory object alive.
        self._made: list[tuple[ReferenceType[Any], Piece, CallSignature]] = []
        self._held: list[tuple[Any, Piece, CallSignature]] = []

    def add(self, arrays: object, call: CallSignature, among: Set[object] | None = None) -> None:
        """Note the arrays that a call made.

        With ``among``, note only arrays whose memory is in ``among``.
        """
        driver = self._driver
        for value in (arrays,) if type(arrays) is self._kind else leaves(arrays):
            if isinstance(value, driver.array_types):
                array: Any = value
                memory = piece(driver.array_pointer(array), array.shape, array.strides, array.dtype.itemsize)
                if among is None or memory in among:
                    owner = driver.array_block(array)
                    try:
                        reference = ref(array if owner is None else owner)
                    # This memory object allows no weak reference. A view in CuPy then refers to the array, so a weak reference to
                    # the array serves instead.
                    except TypeError:
                        reference = ref(array)
                    self._made.append((reference, memory, call))

    def end(self) -> None:
        """End the first call, and hold the arrays that are still alive.

        While they are held, no other array can get their memory.
        """
        left = [(made(), piece, call) for made, piece, call in self._made]
        self._held = [each for each in left if each[0] is not None]
        self._made.clear()

    def forget(self) -> None:
        """Release the arrays."""
        self._held.clear()

    def check(self, name: str, reads: Pieces, writes: Pieces) -> None:
        """Refuse a second call that reads an array of the first call.

        Each replay would read the same values again. A second call that also writes the array is allowed.

        Raises
        ------
        CaptureError
            The message names the call that made the array.
        """
        if not self._held:
            return
        read, written = ([each for each in pieces if not isinstance(each, Token)] for pieces in (reads, writes))
        for _, held, call in self._held:
            if any(share(held, each) for each in read) and not any(share(held, each) for each in written):
                raise CaptureError(
                    f"{name} keeps state in a new array at each call: its second call read the array that its first call made by "
                    f"{call}, and every replay would read that array again. Write the state into a fixed array, by out= or "
                    "state[...] = new, or take the state as an argument and return the new state"
                )


class Launches:
    """Count how often a call of a function launches each plan.

    Parameters
    ----------
    pool : PoolInternals
        Only launches of this pool are counted.

    Attributes
    ----------
    calls : list of CallSignature
        Calls in the order of their launches.
    new : LeftoverArrays
        The arrays that these calls made.
    """

    def __init__(self, pool: PoolInternals) -> None:
        self.calls: list[CallSignature] = []
        self.new = LeftoverArrays(pool.driver)
        self._pool = pool
        self._found: dict[int, tuple[Plan, int]] = {}

    def around(self, function: Callable[..., T], *args: object) -> T:
        """Call a function, and count this thread's launches of each plan."""
        return recordings.around(self, "launched", self._count, function, *args)

    def _count(self, pool: PoolInternals, plan: Plan, made: Sequence[Any]) -> None:
        if pool is self._pool:
            self.calls.append(CallSignature(plan.name, (), place_of_call(), (plan,)))
            self.new.add(made, self.calls[-1])
            # The entry keeps the plan alive, so that no other plan can get its identifier, which is the key.
            self._found[id(plan)] = plan, self._found.get(id(plan), (plan, 0))[1] + 1

    def forget(self) -> None:
        """Release the plans."""
        self._found.clear()

    def plans(self, device: int) -> list[tuple[Plan, int]]:
        """Return a device's plans with their launch counts."""
        return [(plan, count) for plan, count in self._found.values() if plan.device == device]


class ContainerSnapshot:
    """A snapshot of the lists and dictionaries among a function's arguments.

    Each container is visited once. The snapshot calls the methods of `list` and `dict` themselves, because a subclass may
    override them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found: list[tuple[str, Any, list[tuple[Any, Any]]]] = []
        self._new: list[list[tuple[Any, Any]]] = []
        entered: set[int] = set()
        left = [(f"argument {place}", value) for place, value in enumerate(args)] + [*kwargs.items()]
        while left:
            place, value = left.pop()
            # No other object can get the identifier of an entered container, because the snapshot or a tuple keeps it alive.
            if not isinstance(value, (list, tuple, dict)) or id(value) in entered:
                continue
            entered.add(id(value))
            inside = [*dict.items(value)] if isinstance(value, dict) else [*enumerate(tuple(value))]
            if not isinstance(value, tuple):
                self._found.append((place, value, inside))
            left += [(f"{place}[{shown(key)}]", each) for key, each in inside if isinstance(each, (list, tuple, dict))]

    @property
    def containers(self) -> list[Any]:
        """The lists and dictionaries of the snapshot."""
        return [value for _, value, _ in self._found]

    @property
    def grown(self) -> bool:
        """Whether a container has entries that the snapshot lacks."""
        return any(self._beyond(value, inside) for _, value, inside in self._found)

    def renew(self) -> list[Any]:
        """Remove the entries that the first call added; return their values.

        So the second call finds the same entries as the first call.
        """
        self._new = [self._beyond(value, inside) for _, value, inside in self._found]
        self._shorten()
        return [entry for new in self._new for _, entry in new]

    def restore(self) -> None:
        """Undo `renew`: restore all entries as the first call left them."""
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
        """Refuse a function that removed or replaced an entry.

        A replay would not remove or replace the entry. New entries are allowed.

        Raises
        ------
        CaptureError
            The message names the entry.
        """
        for place, value, inside in self._found:
            there = value if isinstance(value, dict) else dict(enumerate(value))
            for key, entry in inside:
                now = dict.get(there, key, self)
                if now is entry or (type(now) is type(entry) and isinstance(now, PLAIN) and now == entry):
                    continue
                what = f"{place}[{shown(key)}] is {'gone' if now is self else 'another object now'}"
                raise CaptureError(
                    f"{name} changed a list or dictionary that it was given, which no replay does: {what}. In the function, "
                    "change a copy, made by dict(d) or list(d)"
                )


def check_same(name: str, first: Sequence[CallSignature], second: Sequence[CallSignature]) -> None:
    """Compare the calls of the first run with the recorded calls.

    Addresses are not compared, because each call of a function makes its arrays at other addresses.

    Raises
    ------
    CaptureError
        The message names the first difference.
    """
    for number, (one, other) in enumerate(zip_longest(first, second), 1):
        more = ("", "")
        if one is not None and other is not None and one[:2] == other[:2]:
            if one.what == other.what or _same(one.what, other.what):
                continue
            more = _options(one.what, ""), _options(other.what, ", with other options")
        raise CaptureError(
            f"{name} did other work in its second call, which is recorded: call {number} was {one or 'none'}{more[0]} "
            f"the first time, and {other or 'none'}{more[1]} the second time. Let both calls do the same: move decisions out of "
            "the function, and if it fills a cache, call it once before the recording"
        )


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Return whether two calls ask for the same work.

    Plans are compared by their requests, because the second call may get another plan for the same request: by tuning, or because
    the plan was built again.
    """
    return [_asked(each) for each in one] == [_asked(each) for each in other]


def _asked(what: object) -> object:
    return _likeness(what.asked if isinstance(what, Plan) else what)


def _likeness(value: object) -> object:
    """Return an equal value for values that ask for the same work.

    Functions do not count by identity, because each call of the recorded function may define them anew.
    """
    # Operations and graph functions keep their Python function in `__wrapped__`.
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, Request):
        return tuple([_likeness(getattr(value, each.name)) for each in fields(value)])
    if isinstance(value, (tuple, list)):
        return type(value), *map(_likeness, value)
    if isinstance(value, Mapping):
        return {key: _likeness(each) for key, each in value.items()}
    return _telling(value) if isinstance(value, FunctionType) else value


def _telling(value: object, depth: int = 4) -> object:
    """Return the parts by which functions are compared.

    The parts are the function's code, and the numbers, text and functions in its defaults and closure. Other values in them, such
    as arrays, count only by type, because they are inputs of the function.
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
