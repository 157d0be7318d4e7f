"""Cases of `region_cases` as sequential programs, recorded with lanes; and what becomes of one without an edge that it needs."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness.hidden import hidden
from harness.insides import streams_of
from harness.process import as_default
from harness.region_cases import SMALL, Case, Look, Make, Sizes, leaves
from harness.region_runs import Sequential, Values
from harness.region_worlds import World, books_of, expected_of

import handlepool
from handlepool import CaptureError, ContractError, Program
from handlepool.drivers.host.graphs import RecordedGraph
from handlepool.recording import capture
from handlepool.recording import lanes as books
from handlepool.recording.explain import Explanation

MOST_TRIES = 12


class Flat(Sequential):
    """Runs the steps one after the other, on what a recording is given: what the host makes is made before."""

    def __init__(self, case: Case, make: Any, copy: Any, sizes: Sizes = SMALL) -> None:
        super().__init__(make, copy, numpy=False, sizes=sizes)
        self.case = case
        self.begin()
        numbers = [step.made for step in leaves(case.steps) if isinstance(step, Make)]
        self.later = {number: self.initial(number) for number in numbers}
        self.given = {**self.arrays, **self.later, **{number: token.hidden for number, token in self.tokens.items()}}
        self.first = self.arrays
        self.left: Callable[[], dict[int, Any]] = hidden({})

    def once(self) -> list[Any]:
        """All steps; the arrays that are left."""
        self.arrays = dict(self.first)
        self.steps(self.case.steps)
        # An attribute that holds other arrays after each call would be refused.
        self.programs.clear()
        self.left().clear()
        self.left().update(self.arrays)
        self.arrays = self.first
        return [*self.left().values()]

    def make(self, step: Make) -> None:
        self.arrays[step.made] = self.later[step.made]

    def look(self, step: Look) -> None:
        pass


@dataclass
class Edges:
    """How many needs the nodes of a recording have, and which of them is left out."""

    left_out: int | None = None
    found: int = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        former = books.needs_of

        def needs_of(reads: Any, writes: Any) -> Any:
            needs = former(reads, writes)
            kept = {}
            for track, call in needs.items():
                if self.found != self.left_out:
                    kept[track] = call
                self.found += 1
            return kept

        books.needs_of = needs_of
        try:
            yield
        finally:
            books.needs_of = former


@dataclass
class Outcome:
    values: Values | None
    error: Exception | None
    how: Explanation | None
    edges: Edges

    def differs(self, expected: Values) -> str:
        """Say what is wrong, or nothing."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        assert self.values is not None
        if self.values.keys() != expected.keys():
            return f"other arrays: {self.values.keys() ^ expected.keys()}"
        wrong = [name for name, value in expected.items() if not np.array_equal(value, self.values[name], equal_nan=True)]
        return f"wrong values: {wrong}" if wrong else ""


def wanted(case: Case) -> Values:
    """What a case leaves behind."""
    return {name: value for name, value in expected_of(case).items() if name[0] != "look"}


@contextlib.contextmanager
def random_times(rng: random.Random) -> Iterator[None]:
    """Let schedules expect random times for the steps of a recording."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "estimated", lambda used: [rng.choice([0.5, 1, 2, 5, 30]) for _ in used])
        yield


@dataclass
class Scheduled(Edges):
    """The same of the edges that a recording has in the end, where steps take times at random."""

    seed: int = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        former = RecordedGraph.arranged

        def arranged(graph: Any, add: Any = (), remove: Any = ()) -> Any:
            made = former(graph, add, remove)
            edges = [*made.edges()]
            self.found = len(edges)
            return made if self.left_out is None else former(made, (), [edges[self.left_out]])

        with pytest.MonkeyPatch.context() as patch, random_times(random.Random(self.seed)):
            patch.setattr(RecordedGraph, "arranged", arranged)
            yield


def run(
    world: World,
    case: Case,
    lanes: int,
    left_out: int | None = None,
    kind: type[Edges] = Edges,
    before: Callable[[Program], object] = lambda program: None,
) -> Outcome:
    """Record a case and replay it once, over the values that it begins with; without one of its needs, or edges."""
    driver = world.driver
    streams_of(driver).scheduler._random.seed(case.seed)
    edges = Scheduled(left_out, seed=case.seed) if kind is Scheduled else Edges(left_out)
    values, error, how = None, None, None
    with as_default(world.pool), books_of(case), world._home:
        driver.blind = True
        try:
            flat = Flat(case, world._make, lambda array: array.get())
            with edges.noted(), handlepool.record(flat.once, lanes=lanes) as program:
                how = program.explain()
                for number, array in flat.given.items():
                    driver.copy(array, flat.initial(number))
                before(program)
                program.replay()
                values = {("array", base): array.get() for base, array in flat.left().items()}
                values |= {("token", number): token.hidden.get() for number, token in flat.tokens.items()}
        except (ContractError, CaptureError) as found:
            error = found
        finally:
            driver.blind = False
        world._settle()
    if driver.order is not None and driver.order.found:
        error = error or driver.order.found[0]
        driver.order.found.clear()
    return Outcome(values, error, how, edges)


def control(world: World, case: Case, lanes: int, edges: Edges, expected: Values) -> str | None:
    """Leave out what a node needs, or an edge, and say what went wrong; None where that does no harm, whatever is left out."""
    choices = [*range(edges.found)]
    random.Random(case.seed).shuffle(choices)
    for left_out in choices[:MOST_TRIES]:
        outcome = run(world, case, lanes, left_out, type(edges))
        if why := outcome.differs(expected):
            return why  # or another way leads there; or both calls were given an array that one of them leaves alone
    return None
