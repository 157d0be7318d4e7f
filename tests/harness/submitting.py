"""What the tests of the executor share: its scenarios over schedules, and waiting for what it runs."""

import concurrent.futures
import threading

from harness.scenes import SEEDS, TIMEOUT, over_seeds

from handlepool import ParallelStateExecutor


class TaskError(Exception):
    """A task's own."""


def over_seeds_with(scenario, *, workers=2, make=None, control=False):
    """As `over_seeds`, for ``scenario(scene, executor)``. Tasks are waited for on the host before the caller goes on."""

    def run(scene):
        with ParallelStateExecutor(workers, pool=scene.pool) as executor:
            return scenario(scene, executor)

    return over_seeds(run, make=make, control=control, seeds=SEEDS)


def returned(*futures):
    """Wait until the functions have returned."""
    assert not concurrent.futures.wait(futures, TIMEOUT).not_done


def busy(executor):
    """Occupy the one worker of an executor until the event that is returned is set."""
    started, go_on = threading.Event(), threading.Event()
    executor.submit(lambda: started.set() or go_on.wait(TIMEOUT))
    assert started.wait(TIMEOUT)
    return go_on
