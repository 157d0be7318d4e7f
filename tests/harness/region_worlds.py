"""Where cases run on the host driver, with the order checked; and whether a case, or its control, does what it must."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness.insides import finish_queues, streams_of
from harness.process import as_default
from harness.region_cases import Case, Shape
from harness.region_edges import Trace, Wait
from harness.region_runs import Regional, Sequential, Values, values_of

from handlepool import ContractError, HandlePool
from handlepool.drivers.host.driver import HostDriver
from handlepool.order import track, uses
from handlepool.pool import deferred
from handlepool.pool.context import active
from handlepool.pool.side_streams import MOST_SIDE_SLOTS


class BlindDriver(HostDriver):
    """Says of no event that it has passed while it is blind: who sees that is ordered after it, when the schedule has it so."""

    blind = False

    def event_done(self, event: Any) -> bool:
        return not self.blind and super().event_done(event)


@dataclass
class Outcome:
    """What a run came to.

    Attributes
    ----------
    values : Values or None
        None where it ended with an error.
    error : ContractError or None
        What the race checker found first.
    """

    values: Values | None
    error: Exception | None
    trace: Trace

    def differs(self, expected: Values) -> str:
        """Say what is wrong, or nothing."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        assert self.values is not None
        if self.values.keys() != expected.keys():
            return f"other arrays: {self.values.keys() ^ expected.keys()}"
        wrong = [name for name, value in expected.items() if not np.array_equal(value, self.values[name], equal_nan=True)]
        return f"wrong values: {wrong}" if wrong else ""


class World:
    """A pool over a host driver whose schedule means harm, with some side slots free, for one case after the other."""

    def __init__(self, free: int = MOST_SIDE_SLOTS, *, check_order: bool = True) -> None:
        self.driver = BlindDriver(devices=1, scheduler="adversarial", check_order=check_order)
        self.pool = HandlePool(driver=self.driver)
        self._home = self.driver.create_stream()
        self._streams: list[Any] = []
        sides = self.pool.internals.device(0).sides
        self._hoard = [sides.lease() for _ in range(MOST_SIDE_SLOTS - free)]

    def left_behind(self) -> str:
        """Say what is not as it was before the last case, or nothing."""
        leased = self.pool.stats()["handles_leased"] - len(self._hoard)
        if leased or active:
            return f"{leased} side slots are still leased, and books are {'open' if active else 'closed'}"
        return ""

    def close(self) -> None:
        sides = self.pool.internals.device(0).sides
        for slot in self._hoard:
            sides.release(slot, captured=False)
        self.pool.close()

    def run(self, case: Case, left_out: Wait | None = None, *, schedule: int = 0, **options: Any) -> Outcome:
        """Run a case, without one of its waits."""
        driver = self.driver
        streams_of(driver).scheduler._random.seed(case.seed + (schedule << 40))
        self.pool.internals.device(0).sides.free.sort(key=lambda slot: -slot.pointer)  # or each run has other streams
        trace = Trace(driver)
        values, error = None, None
        with as_default(self.pool), books_of(case), driver.legacy_stream if case.legacy else self._home:
            regional = Regional(
                self.pool,
                self._make,
                lambda array: array.get(),
                note=trace.note,
                freely=self._freely,
                streams=self._streams,
                **options,
            )
            driver.blind = True
            try:
                with trace.on(left_out):
                    values = regional.run(case)
            except ContractError as found:
                error = found
            finally:
                driver.blind = False
            self._settle()
        if driver.order is not None and driver.order.found:
            error = error or driver.order.found[0]
            driver.order.found.clear()
        return Outcome(values, error, trace)

    @contextlib.contextmanager
    def _freely(self) -> Iterator[None]:
        """Have all side slots free meanwhile."""
        sides, count = self.pool.internals.device(0).sides, len(self._hoard)
        while self._hoard:
            sides.release(self._hoard.pop(), captured=False)
        yield
        self._hoard += [sides.lease() for _ in range(count)]

    def _make(self, seed: int, number: int, shape: Shape) -> Any:
        return self.driver.asarray(values_of(seed, number, shape))

    def _settle(self) -> None:
        """Let nothing be under way when the next case begins, whatever became of the last."""
        finish_queues(self.driver, "the end of a case")
        if self.driver.order is not None:
            self.driver.order.forgive()
        deferred.deferred.run(1000)

    def control(self, case: Case, trace: Trace, expected: Values, **options: Any) -> tuple[Wait | None, str]:
        """Leave one needed wait out, and say which, and what went wrong; nothing went wrong where the control did not work.

        A wait of the order by data is left out where one is needed.
        """
        for _ in range(4):
            needed = trace.needed(case)
            if not needed:
                return None, ""
            choices = [wait for wait in needed if wait.by_data] or needed
            left_out = random.Random(case.seed).choice(choices)
            outcome = self.run(case, left_out, **options)
            why = outcome.differs(expected)
            if why or outcome.trace.unordered(case):
                return left_out, why
            # It ran in another way, in which this wait is not needed: other states were free, or a function is known by now.
            trace = self.run(case, **options).trace
        raise AssertionError(f"the case ran in another way each time: without {left_out} all is in order")


@contextlib.contextmanager
def books_of(case: Case) -> Iterator[None]:
    """Let the books be as they are, or, where the case says so, keep so little that they soon count several as one."""
    former = track.MOST_MARKS, uses.MOST_NEIGHBOURS
    if case.small:
        track.MOST_MARKS, uses.MOST_NEIGHBOURS = 2, 4
    try:
        yield
    finally:
        track.MOST_MARKS, uses.MOST_NEIGHBOURS = former


def expected_of(case: Case) -> Values:
    return Sequential().run(case)
