"""State and host data of recorded functions on a GPU (guarantee 19)."""

import numpy as np
import pytest
from harness import stateful
from harness.process import as_default

import handlepool
from handlepool import CaptureError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)

SHAPE = (1, 4, 3, 4)
LANES = pytest.mark.parametrize("lanes", [None, 4])


@pytest.fixture
def driver(pool, stream):
    with as_default(pool):
        yield pool.driver


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_g19_random_stateful_programs_give_the_plain_functions_values_or_are_refused(driver, lanes):
    verdicts = [stateful.check_on(driver, seed, lanes) for seed in range(500)]
    assert verdicts.count("accepted") > 100
    assert verdicts.count("refused") > 100


@LANES
@pytest.mark.parametrize(
    "write",
    [
        lambda x, values: handlepool.add(x, cupy.asarray(values)),
        lambda x, values: handlepool.add(x, cupy.array(values)),
        lambda x, values: x + cupy.asarray(values),
        lambda x, values: x[:, cupy.asarray([1, 0, 2, 3])] * 2,
        lambda x, values: x[:, [1, 0, 2, 3]] * 2,
    ],
    ids=["asarray", "array", "plain", "index", "list"],
)
def test_g19_copies_from_the_host_are_refused_and_their_target_is_named(driver, write, lanes):
    x, values = cupy.ones(SHAPE, np.float32), np.ones(SHAPE, np.float32)
    with pytest.raises(CaptureError, match=r"test_gpu_state\.py:\d+.*Pass host data as an argument, or make"):
        handlepool.record(lambda x: write(x, values), x, lanes=lanes)


def copy_past_cupy(target, values):
    """Copy as a library does that does not ask CuPy, which refuses such a copy itself."""
    runtime = cupy.cuda.runtime
    pointer = cupy.cuda.get_current_stream().ptr
    runtime.memcpyAsync(target.data.ptr, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice, pointer)


@LANES
@pytest.mark.parametrize("pinned", [False, True])
def test_g19_a_copy_into_an_array_that_stays_is_refused(driver, lanes, pinned):
    buffer, values = cupy.zeros(SHAPE, np.float32), host_values(pinned)

    def step(x):
        copy_past_cupy(buffer, values)
        return handlepool.add(x, buffer)

    with pytest.raises(CaptureError, match="copies from the host into device memory at 0x"):
        handlepool.record(step, cupy.ones(SHAPE, np.float32), lanes=lanes)


@LANES
@pytest.mark.parametrize("pinned", [False, True])
def test_g19_the_line_that_allocated_the_target_is_named(driver, lanes, pinned):
    values = host_values(pinned)

    def step(x):
        target = cupy.empty(SHAPE, np.float32)
        copy_past_cupy(target, values)
        return x + target

    with pytest.raises(CaptureError, match=r"was allocated at .*test_gpu_state\.py:\d+.*Pass the array as an argument"):
        handlepool.record(step, cupy.ones(SHAPE, np.float32), lanes=lanes)


def host_values(pinned):
    values = np.ones(SHAPE, np.float32)
    if not pinned:
        return values
    memory = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(memory, np.float32, values.size).reshape(SHAPE)
    host[...] = values
    return host


@LANES
def test_g19_an_array_with_equal_values_is_a_constant_and_copies_on_the_device_are_none_of_the_hosts(driver, lanes):
    def step(x):
        total = driver.asarray(np.ones(SHAPE, np.float32))
        total += x
        buffer = cupy.empty(SHAPE, np.float32)
        driver.copy(buffer, total)
        return handlepool.add(buffer, driver.asarray(np.full(SHAPE, 5, np.float32)))

    with handlepool.record(step, cupy.zeros(SHAPE, np.float32), lanes=lanes) as program:
        found = [float(program(cupy.full(SHAPE, value, np.float32)).get().flat[0]) for value in (1, 2, 3)]
    assert found == [7, 8, 9]


@LANES
def test_g19_a_view_that_outlives_its_array_is_found_by_its_memory(driver, lanes):
    from harness.hidden import hidden

    kept = hidden([cupy.ones(SHAPE, np.float32)])

    def step(x):
        y = handlepool.concat([x, handlepool.add(kept()[0], x)], 1)
        kept()[0] = y[:, 4:]
        return y

    step(cupy.ones(SHAPE, np.float32))
    with pytest.raises(CaptureError, match="keeps state in a new array at each call"):
        handlepool.record(step, cupy.ones(SHAPE, np.float32), lanes=lanes)
