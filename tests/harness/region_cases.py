"""Cases: programs of regions, as lists of steps over views of few arrays. They mean what the steps mean one after the other."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from harness.region_functions import FUNCTIONS, RECORDED

Shape = tuple[int, ...]
Index = tuple[tuple[int | None, int | None, int | None], ...]
"""Start, stop and step for each axis: slices have no hash."""
FULL: Shape = (1, 4, 2, 4)
HALF: Shape = (1, 2, 2, 4)
COLUMNS: Shape = (1, 4, 2, 2)
ONE: Shape = (1, 1, 1, 1)
NONE: Shape = (1, 0, 2, 4)
INPUTS = 4
"""Arrays that are there before the first step. One more, ``WEIGHTS``, has the weights of convolutions, which nothing writes."""
WEIGHTS = 0
MOST_DEPTH, MOST_WIDTH = 40, 12
ALL = (None, None, None)
REVERSED = (None, None, -1)
MIDDLE = (1, 3, None)


@dataclass(frozen=True)
class View:
    """A part of an array, or a view of it in which elements stand several times."""

    base: int
    index: Index = ()
    spread: Shape | None = None

    def __str__(self) -> str:
        index = ", ".join(":".join("" if part is None else str(part) for part in entry) for entry in self.index)
        return f"a{self.base}" + (f"[{index}]" if index else "") + (f" to {self.spread}" if self.spread else "")


@dataclass(frozen=True)
class Call:
    """One call of one of `FUNCTIONS`.

    ``way`` says how: run, body, wait (plain code behind a wait), state, submit. ``up`` says of which fork that is open here: the
    innermost, or one further out.
    """

    number: int
    function: str
    args: tuple[View, ...]
    made: tuple[int, ...] = ()
    out: View | None = None
    token: int | None = None
    way: str = "run"
    fresh: bool = False
    index: int = 0
    up: int = 0


@dataclass(frozen=True)
class Map:
    """Several calls of one function in one map, of the fork that is open or of its own."""

    number: int
    calls: tuple[Call, ...]
    alone: bool = False


@dataclass(frozen=True)
class Fork:
    """A ``with`` statement over a fork; ``raises`` says that its body ends with an exception, which is caught outside."""

    number: int
    count: int
    steps: tuple["Step", ...]
    raises: bool = False


@dataclass(frozen=True)
class Branch:
    """A branch of Python, with steps of its own. Of its ``args`` plain code inside reads, and writes where it is ``silent``.

    What it makes it returns, but for a silent one, which returns nothing.
    """

    number: int
    way: str
    args: tuple[View, ...]
    steps: tuple["Step", ...]
    made: tuple[int, ...] = ()
    silent: bool = False
    raises: bool = False
    index: int = 0


@dataclass(frozen=True)
class Elsewhere:
    """Another stream of the body's own, in order with the caller's before and after."""

    number: int
    steps: tuple["Step", ...]


@dataclass(frozen=True)
class Result:
    """Asks for the result of a task."""

    number: int
    call: Call


@dataclass(frozen=True)
class Record:
    """Records a program and replays it once."""

    number: int
    function: str
    args: tuple[View, ...]
    made: int


@dataclass(frozen=True)
class Replay:
    number: int
    record: Record
    way: str


@dataclass(frozen=True)
class Update:
    number: int
    record: Record
    args: tuple[View, ...]
    way: str


@dataclass(frozen=True)
class Drop:
    """Lets go of arrays."""

    bases: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """The host reads, behind a wait for it."""

    number: int
    view: View


@dataclass(frozen=True)
class Make:
    """The body makes an array of values."""

    number: int
    made: int


Operands = Sequence[tuple[View, bool]]
"""Views, and whether each is written."""
Step = Call | Map | Fork | Branch | Elsewhere | Result | Record | Replay | Update | Drop | Look | Make


@dataclass(frozen=True)
class Case:
    """A program, with the shapes of its arrays and the classes of its tokens, whose own array has the token's number.

    ``legacy`` says that the caller's stream is the legacy default stream, ``small`` that the books keep few events and tell few
    pieces of memory apart.
    """

    seed: int
    steps: tuple[Step, ...]
    shapes: dict[int, Shape]
    tokens: dict[int, str]
    depth: int
    width: int
    calls: int
    legacy: bool
    small: bool
    features: Counter[str] = field(compare=False)


def leaves(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, and those inside of them."""
    for step in steps:
        yield step
        if isinstance(step, (Fork, Branch, Elsewhere)):
            yield from leaves(step.steps)
        elif isinstance(step, Map):
            yield from step.calls


# Views


def slices(index: Index) -> tuple[slice, ...]:
    """An index as arrays take it."""
    return tuple([slice(*entry) for entry in index])


@functools.cache
def views_of(shape: Shape) -> dict[Shape, list[tuple[Index, Shape | None, str]]]:
    """Return by shape how to see an array of some shape so: index, what that is spread to, and the kind of view."""
    found: dict[Shape, list[tuple[Index, Shape | None, str]]] = {}

    def add(kind: str, *index: tuple[int | None, int | None, int | None], spread: Shape | None = None) -> None:
        seen = np.empty(shape)[slices(index)]
        found.setdefault(spread or seen.shape, []).append((index, spread, kind))

    add("whole")
    if 0 in shape:
        return found
    add("negative strides", ALL, ALL, ALL, REVERSED)
    add("negative strides", ALL, REVERSED)
    if shape[1] == 4:
        for channels in ((0, 2, None), (2, 4, None), (1, 3, None)):
            add("slice", ALL, channels)
        for channels in ((0, None, 2), (1, None, 2)):
            add("odd strides", ALL, channels)
        add("negative strides", ALL, (3, None, -2))
        add("no element", ALL, (4, None, None))
    if shape[3] == 4:
        for columns in ((0, None, 2), (1, None, 2), MIDDLE):
            add("odd strides", ALL, ALL, ALL, columns)
        add("negative strides", ALL, ALL, ALL, (None, None, -2))
    for c, h, w in itertools.product(*map(range, shape[1:])):
        one = (ALL, (c, c + 1, None), (h, h + 1, None), (w, w + 1, None))
        add("one element", *one)
        if (c + h + w) % 3 == 0:
            for spread in (FULL, HALF, COLUMNS):
                add("zero strides", *one, spread=spread)
    for h in range(shape[2]):
        add("zero strides", ALL, ALL, (h, h + 1, None), spread=(1, shape[1], 2, shape[3]))
    return found


@functools.cache
def bits(shape: Shape, index: Index = ()) -> int:
    """Return which elements of an array a view of it has, as the bits of a number."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)[slices(index)]
    return sum(1 << int(number) for number in numbers.flat)


@dataclass(frozen=True)
class Sizes:
    """How large arrays are made that a case has in small: `FULL` becomes (1, 4, height, width), and all others in proportion."""

    height: int = FULL[2]
    width: int = FULL[3]

    def shape(self, shape: Shape) -> Shape:
        if shape[2:] not in (FULL[2:], COLUMNS[2:]):
            return shape
        return (*shape[:2], self.height, self.width * shape[3] // FULL[3])

    def index(self, index: Index) -> Index:
        if index[3:] == (MIDDLE,):
            return (*index[:3], (self.width // 4, self.width // 4 * 3, None))
        return index


SMALL = Sizes()


# What calls touch


def written_by(call: Call) -> list[int]:
    """The arrays that a call writes, but for those that it makes."""
    roles = FUNCTIONS[call.function].roles
    found = [view.base for view, role in zip(call.args, roles, strict=False) if role in "wo"]
    return found + ([call.out.base] if call.out else [])


def touched_by(step: Call | Record) -> tuple[set[int], set[int]]:
    """The arrays that a call, or a replay of a program, was given and does not write, and those that it writes."""
    if isinstance(step, Record):
        writes = {view.base for view, role in zip(step.args, RECORDED[step.function][0], strict=True) if role == "w"} | {
            step.made
        }
        return {view.base for view in step.args} - writes, writes
    writes = set(written_by(step)) | set(step.made)
    reads = {view.base for view in step.args} - writes - {WEIGHTS}
    if step.token is not None:
        (writes if "w" in FUNCTIONS[step.function].hidden else reads).add(step.token)
    return reads, writes
