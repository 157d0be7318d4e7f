"""Random cases, each from a seed: forks, branches, maps, tasks, recordings and plain code.

A case asks of a region what the region promises: plain code outside of branches reads what it has waited for, a task's arrays are
left alone to its result, and a function changes no argument in a way that nobody can know.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from harness.region_cases import (
    COLUMNS,
    FULL,
    HALF,
    INPUTS,
    MOST_DEPTH,
    MOST_WIDTH,
    NONE,
    ONE,
    WEIGHTS,
    Branch,
    Call,
    Case,
    Drop,
    Elsewhere,
    Fork,
    Index,
    Look,
    Make,
    Map,
    Operands,
    Record,
    Replay,
    Result,
    Shape,
    Step,
    Update,
    View,
    bits,
    slices,
    touched_by,
    views_of,
    written_by,
)
from harness.region_functions import FUNCTIONS, RECORDED, Function


@dataclass
class Body:
    """Where steps are made: at the top, in the body of a fork, or in a branch with no fork of its own open."""

    kind: str
    depth: int = 0
    forks: int = 0
    """How many forks are open."""
    readable: set[int] | None = None
    """In a branch, and in forks inside it, what plain code may read; None for all."""
    writable: frozenset[int] = frozenset()
    """In a silent branch, its arguments."""
    tasks: list[Call] = field(default_factory=list)


SHAPES = (FULL, HALF, COLUMNS, ONE, NONE)
MAPPED = ("plus", "rectified_difference", "conv", "scaled", "shifted", "pair", "copied_into", "grown", "accumulated", "counted")
PURE = tuple(name for name, function in FUNCTIONS.items() if function.kind == "plain" and not set(function.roles) & set("wo"))
PLAIN = tuple(
    name for name, function in FUNCTIONS.items() if function.kind == "plain" and not function.token and not function.raises
)
KNOWN = tuple(name for name, function in FUNCTIONS.items() if function.kind != "plain" and not function.raises)
STATED = tuple(
    name for name, function in FUNCTIONS.items() if not function.raises and not (function.token and function.kind == "plain")
)
RETURNING = tuple(name for name, function in FUNCTIONS.items() if not function.raises)


class Maker:
    """Makes one case.

    Parameters
    ----------
    seed : int
    calls : (int, int)
        The fewest and the most.
    few : bool
        Whether graph functions are given whole arrays alone, so that there is one geometry of each.
    """

    def __init__(self, seed: int, calls: tuple[int, int] = (6, 40), *, few: bool = False) -> None:
        self.seed = seed
        self.few = few
        self.random = random.Random(seed)
        self.width = self.random.choice((1, 2, 3, 3, 4, 5, 6, 8, 10, MOST_WIDTH))
        self.depth = self.random.choice((3, 6, 10, 20, MOST_DEPTH, MOST_DEPTH))
        self.chain = self.random.choice((0.1, 0.4, 0.9))  # how often a call goes on with the last array
        self.left = min(self.random.randint(*calls), self.width * self.depth)
        self.deep = self.random.random() < 0.05  # one long chain
        if self.deep:
            self.chain, self.depth, self.left = 1.0, MOST_DEPTH, max(calls) + MOST_DEPTH
        self.calls = 0
        self.numbers = itertools.count(1)
        self.shapes: dict[int, Shape] = {WEIGHTS: (4, 4, 3, 3)}
        self.alive: list[int] = []
        self.usual: set[int] = {WEIGHTS}
        """Arrays in the order of C: what others are like follows from the views that they were made of."""
        self.odd: set[int] = set()
        """Arrays that no graph function takes."""
        self.level: Counter[int] = Counter()
        self.tokens: dict[int, str] = {}
        self.reading: Counter[int] = Counter()  # by array, tasks that read it
        self.writing: Counter[int] = Counter()  # or write it
        self.private: dict[int, Body] = {}  # what plain code of a body made, and nothing else was given
        self.records: list[Record] = []
        self.features: Counter[str] = Counter()
        for _ in range(INPUTS):
            self.usual.add(self.array(FULL))

    def case(self) -> Case:
        """Make it."""
        top = Body("top")
        steps = self.record(top) if self.random.random() < 0.3 else []
        while self.left > 0:
            way = self.random.random()
            if way < 0.08:
                steps += self.record(top)
            elif way < 0.2:
                steps += self.single(top, "body", RETURNING)
            elif way < 0.25:
                steps += self.submit(top)
            elif way < 0.3:
                steps += self.map(top)
            else:
                most = self.left if self.random.random() < 0.5 else self.random.randint(1, self.left)
                steps += self.fork(top, most)
            steps += self.drops() + self.results(top)
        steps += self.results(top, all_of_them=True)
        depth = max(self.level.values())
        legacy = self.random.random() < 0.1
        small = self.random.random() < 0.3
        self.count(*["the legacy default stream"] * legacy, *["small books"] * small)
        counts = depth, self.width, self.calls
        return Case(self.seed, tuple(steps), self.shapes, self.tokens, *counts, legacy, small, self.features)

    def array(self, shape: Shape, level: int = 0) -> int:
        """A new array's number."""
        number = next(self.numbers)
        self.shapes[number] = shape
        self.alive.append(number)
        self.level[number] = level
        return number

    def count(self, *features: str) -> None:
        self.features.update(features)

    # Operands

    def free(self, base: int, *, writes: bool) -> bool:
        """Whether no task is in the way."""
        return not self.writing[base] and not (writes and self.reading[base])

    def plainly(self, body: Body, base: int, *, writes: bool) -> bool:
        """Whether plain code may touch an array here."""
        if not writes or body.kind == "top":
            return body.readable is None or base in body.readable
        return self.private.get(base) is body or (body.kind == "branch" and base in body.writable)

    def operand(
        self,
        shape: Shape,
        body: Body,
        *,
        writes: bool,
        plain: bool,
        graph: bool = False,
        whole: bool = False,
        others: Operands = (),
    ) -> View | None:
        """A view of some array of a shape, or a ``whole`` array in the usual layout; None where there is none.

        What is written has no element in common with the call's other operands, or is one of them.
        """
        candidates = [
            base
            for base in self.alive
            if self.free(base, writes=writes)
            and shape in views_of(self.shapes[base])
            and (not plain or self.plainly(body, base, writes=writes))
            and (not whole or base in self.usual)
        ]
        candidates = [base for base in candidates if self.level[base] < self.depth] or candidates
        if not candidates:
            return None
        recent = [base for base in candidates if base in self.alive[-self.width :]] or candidates
        for _ in range(6):
            base = (
                recent[-1]
                if self.random.random() < self.chain
                else self.random.choice(recent if self.random.random() < 0.7 else candidates)
            )
            choices = views_of(self.shapes[base])[shape]
            likely = [choice for choice in choices if choice[2] in ("whole", "slice")]
            if not likely or self.random.random() > 0.65:
                kind = self.random.choice(sorted({choice[2] for choice in choices}))
                likely = [choice for choice in choices if choice[2] == kind]
            index, spread, kind = choices[0] if whole else self.random.choice(likely)
            if (spread is not None and (writes or graph)) or (graph and not self.suits(base, index, kind)):
                continue
            view = View(base, index, spread)
            if all(self.beside(view, writes, *other, graph=graph) for other in others):
                self.count(kind)
                return view
        return None

    def suits(self, base: int, index: Index, kind: str) -> bool:
        """Whether a graph function takes a view: it begins at a multiple of 16 bytes."""
        if base not in self.usual:
            return not index and base not in self.odd
        elements = bits(self.shapes[base], index)
        return kind != "negative strides" and (elements & -elements).bit_length() % 4 == 1

    def beside(self, view: View, writes: bool, other: View, written: bool, *, graph: bool) -> bool:
        """Whether two views may be operands of one call; of a graph function none lies between elements of the other."""
        if view.base != other.base or not (writes or written) or (view == other and not (writes and written)):
            return True
        one, another = bits(self.shapes[view.base], view.index), bits(self.shapes[view.base], other.index)
        if graph:
            return one < another & -another or another < one & -one
        return not one & another

    def operands(self, function: Function, body: Body, *, plain: bool) -> tuple[View, ...] | None:
        """Views for all arguments, of one shape."""
        graph = function.kind == "graph"
        whole = function.whole or (graph and self.few)
        shape = (
            FULL if whole or self.deep or function.token else self.random.choices(SHAPES, (60, 16, 12, 8, 0 if graph else 4))[0]
        )
        found: list[tuple[View, bool]] = []
        for role in function.roles:
            view = self.operand(shape, body, writes=role in "wo", plain=plain, graph=graph, whole=whole, others=found)
            if view is None:
                return None
            found.append((view, role in "wo" or function.apart))
        return tuple([view for view, _ in found])

    def shape_of(self, view: View) -> Shape:
        return view.spread or np.empty(self.shapes[view.base])[slices(view.index)].shape

    # Steps of one call

    def call(self, body: Body, way: str, names: Sequence[str], *, fresh: float = 0.15, apart: bool = False) -> Call | None:
        """A call of some function; None where there are no operands for it.

        One that is ``apart`` keeps to what plain code may read here, and writes nothing that is there.
        """
        kinds = {FUNCTIONS[name].kind for name in names}
        kind = self.random.choice([kind for kind in ("graph", "graph", "plain", "plain", "operation") if kind in kinds])
        function = FUNCTIONS[self.random.choice([name for name in names if FUNCTIONS[name].kind == kind])]
        plain = apart or way == "wait" or (way == "body" and function.kind == "plain")
        views = self.operands(function, body, plain=plain)
        token = self.token(function, body, plain=plain) if function.token else None
        if views is None or (function.token and token is None):
            return None
        level = 1 + max(self.level[view.base] for view in views)
        out, made = None, ()
        if function.takes_out and not apart and self.random.random() < 0.4:
            others = [(view, function.whole) for view in views]
            shape = self.shape_of(views[0])
            out = self.operand(shape, body, writes=True, plain=plain, graph=True, whole=function.whole or self.few, others=others)
        if function.name == "conv":
            views += (View(WEIGHTS),)
        if out is None:
            made = tuple([self.array(self.shape_of(views[0]), level) for _ in range(function.makes)])
            if function.odd:
                self.odd.update(made)
            elif all(view.base in self.usual and not view.index for view in views):
                self.usual.update(made)
        is_fresh = function.kind == "plain" and self.random.random() < fresh
        index = self.random.randrange(64)
        up = self.random.randrange(body.forks) if body.forks > 1 and way in ("run", "wait") and self.random.random() < 0.3 else 0
        self.count(*["by an outer fork"] * (up > 0))
        call = Call(next(self.numbers), function.name, views, made, out, token, way, is_fresh, index, up)
        for base in written_by(call):
            if base in self.alive:  # and so recent
                self.level[base] = max(self.level[base], level)
                self.alive.remove(base)
                self.alive.append(base)
        self.given(body, [view.base for view in views] + ([out.base] if out else []), made, plain=plain)
        self.left -= 1
        self.calls += 1
        self.count(function.name, f"{function.kind}, {way}", *["a first call"] * is_fresh, *["raises"] * function.raises)
        return call

    def given(self, body: Body, bases: Sequence[int], made: Sequence[int], *, plain: bool) -> None:
        """Note what a call was given, and what it makes."""
        if body.readable is not None:
            body.readable.update(made)
        if plain:
            self.private |= dict.fromkeys(made, body)
        for base in bases:
            if not plain or self.private.get(base) is not body:
                self.private.pop(base, None)

    def token(self, function: Function, body: Body, *, plain: bool) -> int | None:
        """An object for a function, or a new one."""
        writes = "w" in function.hidden
        known = [
            number
            for number, kind in self.tokens.items()
            if kind == function.token
            and self.free(number, writes=writes)
            and (not plain or body.kind == "top" or (body.readable is None and not writes))
        ]
        if known and self.random.random() < 0.8:
            return self.random.choice(known)
        if plain and body.kind != "top":
            return None
        number = next(self.numbers)
        self.tokens[number] = function.token
        self.shapes[number] = FULL
        return number

    def single(self, body: Body, way: str, names: Sequence[str]) -> list[Step]:
        call = self.call(body, way, names)
        return [call] if call else []

    def map(self, body: Body) -> list[Step]:
        """Several calls of one function, over arrays that are there before."""
        names = (self.random.choice(MAPPED),)
        alive = list(self.alive)
        calls: list[Call] = []
        with_out = self.random.random() < 0.4
        for _ in range(self.random.randint(2, 6)):
            before = self.alive
            self.alive = [base for base in before if base in alive]
            call = self.call(body, "map", names, fresh=0)
            self.alive = before + [base for base in self.alive if base not in before]
            if call is not None and (call.out is not None) == with_out:
                calls.append(call)
            elif call is not None:
                self.forget(call.made)
        if not calls:
            return []
        alone = body.kind != "fork" or self.random.random() < 0.2
        self.count("map", *["map with out"] * with_out, *["map alone"] * alone)
        return [Map(next(self.numbers), tuple(calls), alone)]

    def forget(self, bases: Sequence[int]) -> None:
        """Take back what will not be there."""
        for base in bases:
            if base in self.alive:
                self.alive.remove(base)

    # Steps with others inside

    def fork(self, body: Body, most: int) -> list[Step]:
        """A region, or a fork inside one."""
        end = self.left - most
        inner = Body("fork", body.depth + 1, body.forks + 1, body.readable)
        steps: list[Step] = []
        while self.left > max(0, end):
            steps += self.in_fork(inner) + self.drops(0.15) + self.results(inner)
        steps += self.results(inner, all_of_them=True)
        raises = self.random.random() < 0.06
        self.count("fork" if body.kind == "top" else f"fork in a {body.kind}", *["a body that raises"] * raises)
        return [Fork(next(self.numbers), self.random.choice((1, 2, 2, 3, 4, 4, 6)), tuple(steps), raises)]

    def in_fork(self, body: Body) -> list[Step]:
        """Some steps of a fork's body."""
        way = self.random.random()
        deep = body.depth > 4
        if way < 0.5 or (deep and way > 0.93):
            return self.single(body, "run", tuple(FUNCTIONS))
        if way < 0.62:
            return self.single(body, "body", KNOWN)
        if way < 0.70:
            return self.single(body, "wait", PURE if self.random.random() < 0.7 else PLAIN)
        if way < 0.74:
            return self.single(body, "state", STATED)
        if way < 0.80:
            return self.map(body)
        if way < 0.84:
            return self.submit(body)
        if way < 0.88 and self.records:
            return self.replay(body)
        if way < 0.90:
            return self.look(body)
        if way < 0.91:
            return self.elsewhere(body)
        if way < 0.93:
            made = self.array(FULL)
            self.usual.add(made)
            self.given(body, (), (made,), plain=True)
            self.count("made by the body")
            return [Make(next(self.numbers), made)]
        if way < 0.98:
            return self.branch(body)
        return self.fork(body, self.random.randint(1, max(1, min(6, self.left))))

    def branch(self, body: Body) -> list[Step]:
        """A branch of Python with steps inside."""
        free = [base for base in self.alive if self.free(base, writes=True) and base not in self.locked()]
        args = tuple(self.random.sample(free, min(len(free), self.random.randint(1, 3))))
        for base in args:
            self.private.pop(base, None)
        raises = self.random.random() < 0.12
        silent = self.random.random() < 0.3
        inner = Body("branch", body.depth + 1, 0, set(args), frozenset(args if silent else ()))
        known = set(self.alive)
        steps: list[Step] = []
        end = max(0, self.left - self.random.randint(1, 8))
        while self.left > end:
            way = self.random.random()
            if way < 0.35:
                steps += self.single(inner, "body", KNOWN)
            elif way < 0.6:
                steps += self.single(inner, "body", PLAIN if silent else PURE)
            elif way < 0.68:
                steps += self.submit(inner)
            elif way < 0.75:
                steps += self.replay(inner)
            elif way < 0.8:
                steps += self.single(inner, "state", STATED)
            elif way < 0.83:
                steps += self.look(inner)
            elif way < 0.86:
                steps += self.elsewhere(inner)
            elif way < 0.89:
                steps += self.map(inner)
            else:
                steps += self.fork(inner, self.random.randint(1, max(1, min(8, self.left))))
            steps += self.drops(0.1) + self.results(inner)
        steps += self.results(inner, all_of_them=True)
        made = tuple([base for base in self.alive if base not in known])
        silent = silent or not made
        if silent or raises:
            if made:
                self.forget(made)
                steps.append(Drop(made))
            made = ()
        way = self.random.choice(("run", "run", "state"))
        self.count(f"branch, {way}", *["silent branch"] * silent, *["a branch that raises"] * raises)
        views = tuple([View(base) for base in args])
        return [Branch(next(self.numbers), way, views, tuple(steps), made, silent, raises, self.random.randrange(64))]

    def elsewhere(self, body: Body) -> list[Step]:
        """Calls on another stream of the body's own."""
        inner = replace(body, forks=0, tasks=[])
        steps: list[Step] = []
        for _ in range(self.random.randint(1, 3)):
            way = self.random.random()
            if way < 0.2 and body.depth <= 4:
                steps += self.fork(inner, self.random.randint(1, max(1, min(5, self.left))))
            elif way < 0.5 and body.kind == "branch":
                call = self.call(inner, "body", PURE, apart=True)
                steps += [call] if call else []
            elif way < 0.5:
                steps += self.single(inner, "wait" if body.kind == "fork" else "body", PURE)
            else:
                steps += self.single(inner, "body", KNOWN)
        self.count("another stream")
        return [Elsewhere(next(self.numbers), tuple(steps))] if steps else []

    def locked(self) -> set[int]:
        return {base for base in self.alive if self.reading[base] or self.writing[base]}

    # Tasks, programs, and the rest

    def submit(self, body: Body) -> list[Step]:
        """A task: what it touches is its own until its result."""
        call = self.call(body, "submit", tuple(FUNCTIONS))
        if call is None:
            return []
        self.forget(call.made)
        reads, writes = touched_by(call)
        self.reading.update(reads)
        self.writing.update(writes)
        body.tasks.append(call)
        return [call]

    def results(self, body: Body, *, all_of_them: bool = False) -> list[Step]:
        """Results of tasks of this body."""
        steps: list[Step] = []
        while body.tasks and (all_of_them or self.random.random() < 0.3):
            call = body.tasks.pop(self.random.randrange(len(body.tasks)))
            reads, writes = touched_by(call)
            self.reading.subtract(reads)
            self.writing.subtract(writes)
            self.alive += call.made
            steps.append(Result(next(self.numbers), call))
        return steps

    def record(self, body: Body) -> list[Step]:
        """A program, recorded and replayed once, outside of all regions."""
        name = self.random.choice(tuple(RECORDED))
        views: list[tuple[View, bool]] = []
        for _ in RECORDED[name][0]:  # an update writes all of them, so no two share elements
            view = self.operand(FULL, body, writes=True, plain=False, graph=True, whole=True, others=views)
            if view is None:
                return []
            views.append((view, True))
        level = 1 + max(self.level[view.base] for view, _ in views)
        record = Record(next(self.numbers), name, tuple([view for view, _ in views]), self.array(FULL, level))
        self.usual.add(record.made)
        self.records.append(record)
        self.left -= 1
        self.count(name)
        return [record]

    def replay(self, body: Body) -> list[Step]:
        """A replay or an update of a program, whose arrays need not be anybody's any more."""
        if not self.records:
            return []
        record = self.random.choice(self.records)
        reads, writes = touched_by(record)
        way = self.random.choice(("run", "run", "body", "submit") if body.kind == "fork" else ("body", "body", "submit"))
        step: Step
        if self.random.random() < 0.3:
            if not all(self.free(view.base, writes=True) for view in record.args):
                return []
            views: list[tuple[View, bool]] = [(view, True) for view in record.args]
            for _ in record.args:
                view = self.operand(FULL, body, writes=False, plain=False, graph=True, whole=True, others=views)
                if view is None:
                    return []
                if view in record.args:
                    return []  # nothing to copy
                views.append((view, False))
            sources = tuple([view for view, _ in views[len(record.args) :]])
            step = Update(next(self.numbers), record, sources, way)
            self.given(body, [view.base for view, _ in views], (), plain=False)
            self.count(f"update, {way}")
        else:
            if not all(self.free(base, writes=base in writes) for base in (*reads, *writes)):
                return []
            step = Replay(next(self.numbers), record, way)
            self.given(body, (*reads, *writes), (), plain=False)
            for base in writes:
                self.level[base] += 1
            self.count(f"replay, {way}")
        self.left -= 1
        return [step]

    def look(self, body: Body) -> list[Step]:
        view = self.operand(FULL, body, writes=False, plain=True)
        if view is None:
            return []
        self.left -= 1
        self.count("look")
        return [Look(next(self.numbers), view)]

    def drops(self, chance: float = 0.5) -> list[Step]:
        """Let go of some arrays, so that no more than the width stay."""
        if len(self.alive) <= self.width + 2 or self.random.random() > chance:
            return []
        bases = self.random.sample(self.alive, self.random.randint(1, len(self.alive) - self.width - 1))
        self.forget(bases)
        self.count("drop")
        return [Drop(tuple(bases))]


def make_case(seed: int, calls: tuple[int, int] = (6, 40), *, few: bool = False) -> Case:
    """The case of a seed."""
    return Maker(seed, calls, few=few).case()
