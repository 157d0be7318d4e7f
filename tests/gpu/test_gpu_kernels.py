"""Kernels of our own on a GPU: every variant against float64, captures, large arrays. `tests/ops` is for both drivers as well."""

import numpy as np
import pytest
from harness.kernel_cases import CASES, check, random_case
from harness.kernels_on_gpu import launch

import handlepool
from handlepool import HandlePool, ParallelStates, add, avg_pool2d, concat, max_pool2d, mean2d
from handlepool.testing import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytest.importorskip("scipy", reason="SciPy is not installed")


@pytest.fixture(params=[True, False], ids=["large packs", "packs that leave threads enough"])
def packs(request, limits):
    if request.param:
        limits(PLENTY=0)


@pytest.mark.usefixtures("packs")
def test_each_case_is_the_reference_and_nothing_else_is_written(pool, stream):
    for kernel, operands in CASES:
        check(kernel, operands, launch(pool, kernel, operands))


@pytest.mark.usefixtures("packs")
def test_random_operands(pool, stream):
    for seed in range(150):
        kernel, operands = random_case(seed)
        check(kernel, operands, launch(pool, kernel, operands), f"of seed {seed}")


NETWORK = [
    ((1, 64, 112, 112), 3, 2, 0),
    ((1, 192, 56, 56), 3, 2, 0),
    ((1, 480, 28, 28), 3, 1, 1),
    ((8, 832, 14, 14), 2, 2, 0),
    ((8, 1024, 7, 7), 7, 1, 0),
]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_sizes_of_a_network(pool, stream, random_array, dtype, layout):
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[dtype]

    def error(y, expected):
        return reference.relative_error(y.get().astype(np.float64), expected)

    for shape, window, stride, padding in NETWORK:
        x, z = random_array(shape, dtype, layout), random_array(shape, dtype, layout, seed=1)
        values, others = x.get().astype(np.float64), z.get().astype(np.float64)
        options = {"stride": stride, "padding": padding}
        assert error(max_pool2d(x, window, **options, pool=pool), reference.max_pool2d(values, window, **options)) == 0
        assert error(avg_pool2d(x, window, **options, pool=pool), reference.avg_pool2d(values, window, **options)) < tolerance
        assert error(add(x, z, activation="relu", pool=pool), np.maximum(values + others, 0)) < tolerance
        assert error(concat([x, z, x], 1, pool=pool), np.concatenate([values, others, values], 1)) == 0
        assert error(mean2d(x, pool=pool), values.mean((2, 3))) < 3 * tolerance


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_mean_of_many_large_images(pool, stream, random_array, dtype, layout):
    x = random_array((64, 256, 28, 28), dtype, layout)  # the largest packs, and the largest blocks
    found = mean2d(x, pool=pool).get().astype(np.float64)
    expected = x.get().astype(np.float64).mean((2, 3))
    assert reference.relative_error(found, expected) < {"float16": 3e-3, "bfloat16": 3e-2, "float32": 3e-5}[dtype]


def test_more_elements_than_32_bits_count(pool, stream):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 30 << 30:
        pytest.skip(f"needs 30 GiB of free memory, and there are {free >> 30}")
    extents = (33, 64, 1 << 10, 1 << 10)
    x = cupy.zeros((extents[0], *extents[2:], extents[1]), np.float16).transpose(0, 3, 1, 2)
    assert x.size > 1 << 31
    x[-1] = 3
    x[-1, -1, -1, -1] = 7
    y = add(x, x, pool=pool)
    assert y[-1, -1, -1, -2:].tolist() == [6, 14]
    assert float(y[0].max()) == 0
    del y
    largest = max_pool2d(x, 2, pool=pool)
    assert largest[-1, -1, -1, -2:].tolist() == [3, 7]
    assert largest[-2].max() == 0
    assert mean2d(x, pool=pool)[-2:, 0].tolist() == [0, 3]
    both = concat([x[:1], x[-1:], x[:31]], 0, pool=pool)
    assert (float(both[1, 0, 0, 0]), float(both[1, -1, -1, -1]), float(both[2].max())) == (3, 7, 0)
    del x, largest, both
    cupy.get_default_memory_pool().free_all_blocks()  # other processes' tests need some, too


def test_g9_a_capture_takes_kernels_that_are_new_in_it(pool, stream, random_array):
    x, options = random_array((1, 24, 17, 15)), {"stride": (3, 2)}
    expected = reference.max_pool2d(x.get(), (5, 4), **options)
    out = cupy.empty(expected.shape, np.float32)
    pool.get_handle()
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        max_pool2d(x, (5, 4), **options, out=out, pool=pool)
    finally:
        graph = stream.end_capture()
    for _ in range(2):
        out.fill(np.nan)
        graph.launch(stream)
        assert np.array_equal(out.get(), expected)


def test_g17_branches_of_kernels_follow_their_data(pool, stream, random_array, kernels, latch):
    x, z = random_array((2, 64, 28, 28), layout="nhwc"), random_array((2, 64, 28, 28), layout="nhwc", seed=1)
    states = ParallelStates(4, pool=pool)

    def region():
        y = cupy.empty((2, 28, 28, 192), np.float32).transpose(0, 3, 1, 2)
        with states.fork() as fork:
            total = fork.run(add, x, z)
            fork.run(max_pool2d, total, 3, stride=1, padding=1, out=y[:, :64])
            fork.run(avg_pool2d, x, 3, stride=1, padding=1, out=y[:, 64:128])
            fork.run(concat, [total], 1, out=y[:, 128:])
            return fork.run(mean2d, y)

    region()  # loads every kernel
    stream.synchronize()
    values = x.get().astype(np.float64), z.get().astype(np.float64)
    parts = [
        reference.max_pool2d(sum(values), 3, stride=1, padding=1),
        reference.avg_pool2d(values[0], 3, stride=1, padding=1),
        sum(values),
    ]
    expected = np.concatenate(parts, 1).mean((2, 3))
    x.fill(np.nan)
    stream.synchronize()
    latch.hold()
    kernels.copy(cupy.asarray(np.ascontiguousarray(values[0].transpose(0, 2, 3, 1)), np.float32), x.transpose(0, 2, 3, 1))
    found = region()
    latch.release()
    assert reference.relative_error(found.get(), expected) < 1e-4


@pytest.mark.two_gpus
def test_g3_each_device_has_kernels_of_its_own(random_array):
    with HandlePool(driver="cuda") as pool:
        for device in (0, 1, 0):
            with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True):
                x = random_array((2, 16, 9, 9))
                assert (add(x, x, pool=pool).get() == 2 * x.get()).all()


def test_a_recorded_program_outlives_the_plans_of_its_kernels(pool, stream, random_array):
    x = random_array((2, 16, 9, 9))
    program = handlepool.record(lambda x: mean2d(add(x, x, activation="relu")), x, pool=pool)
    pool.cache_clear()
    program.replay()
    expected = np.maximum(2 * x.get().astype(np.float64), 0).mean((2, 3))
    assert reference.relative_error(program.outputs.get(), expected) < 1e-5
