"""What orders a run of a case on the host driver, and which of its waits are needed.

A `Trace` notes each operation that streams are given, what it comes after, and the step that it is of. Which two steps conflict
is a matter of the case alone: of the arrays that they read and write. A wait is needed when without it two steps that conflict
are not ordered any more.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.region_cases import Call, Case, Look, Map, Record, Replay, Step, Update, View, bits
from harness.region_functions import FUNCTIONS, RECORDED

from handlepool.drivers.host.driver import HostDriver
from handlepool.order import books, track
from handlepool.order import operation as operations_module
from handlepool.regions import fork

Touched = dict[int, int]
"""By array, the bits of the elements."""


def accesses(case: Case, step: Step) -> tuple[Touched, Touched]:
    """What a step reads, and what it writes."""
    reads: Touched = {}
    writes: Touched = {}

    def touch(found: Touched, view: View) -> None:
        found[view.base] = found.get(view.base, 0) | bits(case.shapes[view.base], view.index)

    def roles(views: tuple[View, ...], of: str) -> None:
        for view, role in zip(views, of, strict=False):
            if role in "rw":
                touch(reads, view)
            if role in "wo":
                touch(writes, view)

    if isinstance(step, Map):
        for call in step.calls:
            for mine, theirs in zip((reads, writes), accesses(case, call), strict=True):
                for base, elements in theirs.items():
                    mine[base] = mine.get(base, 0) | elements
    elif isinstance(step, Call):
        function = FUNCTIONS[step.function]
        roles(step.args, function.roles)
        for view in (*map(View, step.made), *([step.out] if step.out else [])):
            touch(writes, view)
        if step.token is not None:
            touch(reads, View(step.token))
            if "w" in function.hidden:
                touch(writes, View(step.token))
    elif isinstance(step, (Record, Replay)):
        record = step if isinstance(step, Record) else step.record
        roles(record.args, RECORDED[record.function][0])
        touch(writes, View(record.made))
    elif isinstance(step, Update):
        roles(step.args, "r" * len(step.args))
        roles(step.record.args, "o" * len(step.args))
    elif isinstance(step, Look):
        touch(reads, step.view)
    return reads, writes


@dataclass
class Wait:
    """A wait of one stream for an event.

    Attributes
    ----------
    step, behind : int
        The step that it is of, and that of what it waits for; 0 for none.
    ordinal : int
        Which of these.
    by_data : bool
        Whether the order by data asked for it.
    """

    step: int
    behind: int
    ordinal: int
    by_data: bool


@dataclass
class _Node:
    before: int
    """The numbers of what it directly comes after, as bits."""
    step: int
    works: bool
    wait: Wait | None = None
    awaited: int = 0


class Trace:
    """What a driver's streams are given while the trace is on.

    Parameters
    ----------
    driver : HostDriver
    """

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver
        self._numbers: dict[Any, int] = {}
        self.nodes: list[_Node] = []
        self.steps: dict[int, Step] = {}
        self._step = 0
        self._ordinals: Counter[tuple[int, int]] = Counter()
        self._host = 0
        self._by_data = 0
        self._waiting: Wait | None = None
        self.left_out: Wait | None = None
        self.has_left_out = False

    @contextlib.contextmanager
    def note(self, step: Step) -> Iterator[None]:
        """Surround what a step gives to streams."""
        outer, self._step = self._step, step.number  # type: ignore[union-attr]
        self.steps[self._step] = step
        try:
            yield
        finally:
            self._step = outer

    @contextlib.contextmanager
    def on(self, left_out: Wait | None = None) -> Iterator[None]:
        """Note everything, and leave out one wait."""
        self.left_out = left_out
        streams, scheduler = self._driver._streams, self._driver._streams.scheduler
        submit, wait, wait_on_host = scheduler.submit, streams.wait, streams.wait_on_host

        def noted_submit(operation: Any, line: Any, after: Any = (), lane: int = 0) -> None:
            earlier = [line.tail] if line is not None else []
            submit(operation, line, after, lane)
            self._numbers[operation] = len(self.nodes)
            filled = operation.label == "an allocation"  # with poison: where memory is used again, which differs from run to run
            works = operation.function is not None and not filled
            before = self._host | self._bits(earlier)
            step = self._step_of(earlier[0]) if filled else self._step
            node = _Node(before, step, works, self._waiting)
            if self._waiting is None:
                node.before |= self._bits(after)
            else:
                node.awaited = self._bits(after)
            self.nodes.append(node)

        def noted_wait(queue: Any, event: Any) -> None:
            if queue.capture is not None or not hasattr(event.moment, "clock"):
                wait(queue, event)
                return
            place = self._step, self._step_of(event.moment)
            found = Wait(*place, self._ordinals[place], self._by_data > 0)
            self._ordinals[place] += 1
            if found == self.left_out:
                self.has_left_out = True
                return
            self._waiting = found
            try:
                wait(queue, event)
            finally:
                self._waiting = None

        def noted_host_wait(operation: Any, purpose: str) -> None:
            wait_on_host(operation, purpose)
            self._host |= self._bits([operation])

        follow, callers = track.follow, (books, operations_module, fork)

        def noted_follow(*args: Any) -> None:
            self._by_data += 1
            try:
                follow(*args)
            finally:
                self._by_data -= 1

        scheduler.submit, streams.wait, streams.wait_on_host = noted_submit, noted_wait, noted_host_wait  # type: ignore[method-assign]
        for module in callers:
            module.follow = noted_follow
        try:
            yield
        finally:
            for module in callers:
                module.follow = follow
            del scheduler.submit, streams.wait, streams.wait_on_host

    def _step_of(self, operation: Any) -> int:
        number = self._numbers.get(operation)
        return 0 if number is None else self.nodes[number].step

    def _bits(self, operations: Any) -> int:
        found = 0
        for operation in operations:
            number = self._numbers.get(operation)  # what was queued before the trace was on was waited for
            if number is not None:
                found |= 1 << number
        return found

    # What is needed

    def waits(self) -> list[Wait]:
        """All that were made, in their order."""
        return [node.wait for node in self.nodes if node.wait is not None]

    def _ancestors(self, without: Wait | None) -> list[int]:
        """For each operation all that comes before it."""
        found: list[int] = []
        for node in self.nodes:
            direct = node.before if node.wait is not None and node.wait == without else node.before | node.awaited
            every = direct
            while direct:
                last = direct.bit_length() - 1
                every |= found[last]
                direct &= ~(found[last] | 1 << last)
            found.append(every)
        return found

    def unordered(self, case: Case, without: Wait | None = None) -> list[tuple[int, int]]:
        """The pairs of steps that conflict and of which no work of one comes before, or after, any of the other."""
        ancestors = self._ancestors(without)
        works: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            if node.works and node.step in self.steps:
                works.setdefault(node.step, []).append(number)
        masks = {step: sum(1 << number for number in numbers) for step, numbers in works.items()}
        before = {step: [ancestors[number] for number in numbers] for step, numbers in works.items()}
        return [
            (one, other)
            for one, other in self._conflicts(case, works)
            if not any(mask & masks[one] for mask in before[other]) and not any(mask & masks[other] for mask in before[one])
        ]

    def _conflicts(self, case: Case, works: dict[int, list[int]]) -> list[tuple[int, int]]:
        """The pairs of steps of which one writes what the other reads or writes."""
        if not hasattr(self, "_pairs"):
            order = sorted(works, key=lambda step: works[step][0])
            touched = {step: accesses(case, self.steps[step]) for step in order}
            self._pairs = [
                (one, other)
                for index, other in enumerate(order)
                for one in order[:index]
                if _meet(touched[one][1], touched[other][0])
                or _meet(touched[one][1], touched[other][1])
                or _meet(touched[one][0], touched[other][1])
            ]
        return self._pairs

    def needed(self, case: Case) -> list[Wait]:
        """The waits without which two steps that conflict would not be ordered."""
        return [wait for wait in self.waits() if self.unordered(case, wait)]


def _meet(one: Touched, other: Touched) -> bool:
    return any(elements & other.get(base, 0) for base, elements in one.items())
