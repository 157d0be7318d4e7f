"""The hot paths make no more calls than they did; how they are counted stands in `call_counts`."""

import numpy as np
import pytest
from call_counts import BOUNDS, CUDA_BOUNDS, SHAPES, count_all, count_cuda, counted
from harness.graphs import convolution as conv
from harness.process import as_default

from handlepool import GraphFunction, HandlePool, record
from handlepool.drivers.host.driver import HostDriver

NODE = 132, 84
"""Most calls that a node of a recording with lanes makes: in both calls of the function, and when it is brought onto its lane."""


@pytest.fixture(scope="module")
def counts():
    return count_all()


@pytest.fixture(scope="module")
def cuda_counts():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    pytest.importorskip("handlepool.drivers.cuda.driver", reason="the cuda driver's packages are not installed")
    return count_cuda()


def check(path: str, found: tuple[int, int], most: tuple[int, int]) -> None:
    """Raise for a call more than there were."""
    for kind, calls, bound in zip(("Python", "C"), found, most, strict=True):
        assert calls <= bound, (
            f"{path}: {calls} calls of {kind} functions, {bound} at most. If the new ones are needed, "
            f"`python tests/call_counts.py` prints what the bounds are to be"
        )


@pytest.mark.parametrize("path", BOUNDS)
def test_a_hot_path_makes_no_more_calls_than_it_did(counts, path):
    check(path, counts[path], BOUNDS[path])


@pytest.mark.cupy
@pytest.mark.parametrize("path", CUDA_BOUNDS)
def test_a_hot_path_of_the_cuda_driver_makes_no_more_calls_than_it_did(cuda_counts, path):
    check(path, cuda_counts[path], CUDA_BOUNDS[path])


def test_every_path_has_a_bound(counts):
    assert counts.keys() == BOUNDS.keys()
    assert CUDA_BOUNDS.keys() < BOUNDS.keys()


@pytest.fixture
def nodes():
    """How many calls so many nodes of a recording make, each of which was called before."""
    with HandlePool(driver=HostDriver(devices=1)) as pool, as_default(pool):
        driver = pool.driver
        with driver.create_stream():
            chains = [[driver.asarray(np.ones(shape, np.float32)) for shape in (*SHAPES, SHAPES[0])] for _ in range(4)]

            def calls(count):
                for number in range(count):
                    x, w, y = chains[number % 4]
                    conv(x, w, out=y)
                return [y for *_, y in chains]

            record(calls, 8, lanes=2).close()
            yield lambda count: np.array(counted(lambda: record(calls, count, lanes=2).close()))


def test_a_node_makes_no_more_calls_than_it_did_and_the_last_as_many_as_the_first(nodes):
    few, more, most = nodes(20), nodes(60), nodes(100)
    first, last = (more - few) / 40, (most - more) / 40
    check("a node of a recording", tuple(last), NODE)
    assert np.abs(last - first).max() < 2


def test_a_call_that_was_made_before_is_not_prepared_to_be_recorded(nodes, monkeypatch):
    monkeypatch.setattr(GraphFunction, "prepare", None)
    nodes(20)


def test_control_a_call_more_is_counted():
    def more():
        return len([])

    def path():
        return None

    def longer():
        return more()

    assert counted(path) == (0, 0)
    assert counted(longer) == (1, 1)


def test_what_a_driver_does_inside_is_not_counted():
    with HandlePool(driver=HostDriver()) as pool:
        stream = pool.driver.create_stream()
        assert counted(lambda: pool.driver.synchronize_stream(stream.ptr))[0] == 2  # and the pool's property
