"""An interrupt while a branch is looked up, which the fork's body catches: what ran before is waited for all the same."""

import itertools

import numpy as np
import pytest
from harness.graphs import both, double, plus
from harness.lines import at_line, interrupt, line_of, some_lines

from handlepool import ContractError, HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.order.books import DataOrder

BOOKS = {"books.py", "recent.py", "track.py", "uses.py"}


def interrupted_at(k, modules=BOOKS):
    """Interrupt the first branch that is looked up at the k-th line of the books; False beyond the last."""
    driver = HostDriver(scheduler="adversarial", seed=k, check_order=True)
    with HandlePool(driver=driver) as pool, driver.create_stream():
        states = ParallelStates(4, pool=pool)
        xs = [driver.asarray(np.full((4, 16), i, np.float32)) for i in range(3)]
        out = driver.asarray(xs[0])
        with states.fork() as fork:  # from here on their plans are known
            for x in (xs[0], xs[0][1:]):
                fork.run(double, x)
                fork.run(double, x, out=driver.asarray(x))
            fork.run(plus, *fork.run(both, xs[0], xs[0]))
        where = "some line"
        with states.fork() as fork:
            ys = [fork.run(double, x) for x in xs]
            fork.run(double, xs[1], out=out)
            made = fork.run(both, ys[0], ys[1])
            try:
                where = at_line(k, lambda: fork.run(double, ys[2][1:]), interrupt, modules)
            except KeyboardInterrupt as error:
                # CPython delivers interrupts at calls and at the end of loops, and so none at this line.
                if line_of(error) == "self.busy = False":
                    return True
            last = fork.run(double, ys[2][1:])
            fork.run(double, ys[2], out=out)
            summed = fork.run(plus, *made)
            fork.run(double, ys[0], out=ys[1])
        found = [driver.asnumpy(array) for array in (last, out, summed, ys[1])]
    assert [set(values.ravel()) for values in found] == [{8.0}, {8.0}, {2.0}, {0.0}]
    return where is not None


def test_g17_what_ran_before_an_interrupt_is_waited_for_after_it():
    lines = list(itertools.takewhile(interrupted_at, some_lines(12)))
    assert len(lines) > 10


def test_g17_an_interrupt_between_an_event_and_the_note_of_it_is_no_error_later():
    lines = list(itertools.takewhile(lambda k: interrupted_at(k, {"books.py"}), itertools.count(1)))
    assert len(lines) > 10


def test_g17_control_books_that_an_interrupt_empties_do_not_wait(monkeypatch):
    look_up = DataOrder._enter_recent

    def forget(self):
        try:
            look_up(self)
        except KeyboardInterrupt:
            self.recent = None
            raise

    monkeypatch.setattr(DataOrder, "_enter_recent", forget)
    with pytest.raises(ContractError, match="not ordered"):
        for _ in itertools.takewhile(interrupted_at, some_lines(12)):
            pass
