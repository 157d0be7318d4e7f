"""Outputs into memory of the host's own, on the host driver: they are there when the caller can look, whatever the schedule."""

from types import SimpleNamespace

import numpy as np
import pytest

from handlepool import CaptureError, HandlePool, ParallelStateExecutor, ParallelStates, add, ops, record
from handlepool.drivers.host.array import raw_view
from handlepool.drivers.host.driver import HostDriver


def graph(pool, x, out):
    ops.relu(x, out=out, pool=pool)


def kernel(pool, x, out):
    add(x, np.zeros_like(x), out=out, pool=pool)


def branch(pool, x, out):
    with ParallelStates(2, pool=pool).fork() as fork:
        fork.run(ops.relu, x, out=out)


def inside_a_branch(pool, x, out):
    def body():
        ops.relu(x, out=out, pool=pool)
        assert set(np.asarray(plain(out)).flat) == {6}

    with ParallelStates(2, pool=pool).fork() as fork:
        fork.run(body)


def mapped(pool, x, out):
    ParallelStates(2, pool=pool).map(ops.relu, [x, x], out=[out, np.zeros_like(plain(out))])


def task(pool, x, out):
    with ParallelStateExecutor(2, pool=pool) as executor:
        executor.submit(ops.relu, x, out=out).result()


def program(pool, x, out):
    record(lambda: ops.relu(x, pool=pool), pool=pool)(out=plain(out))


def program_on_lanes(pool, x, out):
    record(lambda: ops.relu(x, pool=pool), pool=pool, lanes=2)(out=plain(out))


def plain(out):
    return getattr(out, "values", out)


def with_interface(values):
    return SimpleNamespace(values=values, __array_interface__=values.__array_interface__)


class Producer:
    def __init__(self, values):
        self.values = values
        self.__dlpack__, self.__dlpack_device__ = values.__dlpack__, values.__dlpack_device__


WAYS = [graph, kernel, branch, inside_a_branch, mapped, task, program, program_on_lanes]


def results(way, kind, check=False, read=plain):
    """Return what is in the output after the call, for each of ten schedules."""
    found = []
    for seed in range(10):
        driver = HostDriver(scheduler="adversarial", seed=seed)
        with HandlePool(driver=driver, check=check) as pool, driver.create_stream():
            out = kind(np.zeros((2, 3), np.float32), driver) if kind is on_the_device else kind(np.zeros((2, 3), np.float32))
            way(pool, np.full((2, 3), 6, np.float32), out)
            found.append(set(read(out).ravel()))
            driver.current_stream().synchronize()
    return found


def on_the_device(values, driver):
    return driver.asarray(values)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kind", [np.asarray, with_interface, Producer])
@pytest.mark.parametrize("way", WAYS)
def test_memory_of_the_hosts_own_has_its_values_when_the_call_or_the_join_returns(way, kind, check):
    assert results(way, kind, check) == [{6}] * 10


@pytest.mark.parametrize("way", [graph, kernel, branch])
def test_the_schedules_tell_who_waits_from_who_does_not(way):
    assert {0} in results(way, on_the_device, read=lambda out: raw_view(out)[0].copy())


@pytest.mark.parametrize("kind", [np.asarray, with_interface])
@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("way", [graph, kernel, branch])
def test_a_recorded_call_into_memory_of_the_hosts_own_is_refused(way, kind, lanes):
    with HandlePool(driver=HostDriver(scheduler="adversarial")) as pool:
        x, out = np.ones((2, 3), np.float32), kind(np.zeros((2, 3), np.float32))
        with pytest.raises(CaptureError, match=r"out= \(memory of NumPy or another library on the host"):
            record(lambda: (way(pool, x, out), plain(out))[1], pool=pool, lanes=lanes)
