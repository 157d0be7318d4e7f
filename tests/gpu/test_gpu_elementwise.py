"""Elementwise functions on a GPU: random functions over arrays that lie in many ways, against float64; captures, large arrays.

``HANDLEPOOL_EXPRESSIONS`` is the number of random functions; ``pytest -n 8`` runs them side by side. The tests of `tests/ops` run
on both drivers as well.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
from harness.expressions import FLOATING, REFERENCES, Case, around, lying
from harness.kernel_cases import placed

import handlepool
from handlepool import ArgumentError, ParallelStates, add, elementwise, multiply
from handlepool import math as over
from handlepool.graphs.expression import VOCABULARY
from handlepool.tensors.layout import as_dtype
from handlepool.testing import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytest.importorskip("scipy", reason="SciPy is not installed")

COUNT = int(os.environ.get("HANDLEPOOL_EXPRESSIONS", "240"))
PARTS = 8
ROUNDED = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6}
SMALLEST = 2.0**-126
"""Positive number of float32 that is normal."""


def brought(array, memory):
    """A CuPy array that lies as a NumPy array does, in a copy of the memory around that, and the copy."""
    block = cupy.empty(memory.nbytes + 16, np.uint8)
    offset = array.__array_interface__["data"][0] - memory.ctypes.data
    first = -(block.data.ptr + offset) % 16  # the array begins at a multiple of 16
    part = block[first : first + memory.nbytes]
    part.set(memory.view(np.uint8))
    return cupy.ndarray(array.shape, array.dtype, part.data + offset, array.strides), part


@pytest.mark.parametrize("part", range(PARTS))
def test_random_functions_are_the_plain_function_on_numpy(pool, stream, limits, monkeypatch, part):
    tight = total = 0
    for seed in range(part, COUNT, PARTS):
        case = Case(seed)
        if seed % 3:  # packs as large as there may be
            limits(PLENTY=0)
        else:
            monkeypatch.undo()
        function = elementwise(case.traced)
        pairs = [brought(array, memory) for array, memory in zip(case.arrays, case.memories, strict=True)]
        args = [*(array for array, _ in pairs), *case.numbers]
        if seed % 2:
            y = handlepool.asnumpy(function(*args, pool=pool), pool=pool)
        else:
            _, result = case.result()
            y, memory = placed(lying(case.random, result.shape, result.dtype.name))
            before = around(y, memory)
            out, part_of = brought(y, memory)
            assert function(*args, out=out, pool=pool) is out
            memory.view(np.uint8)[...] = part_of.get()
            assert around(y, memory) == before, f"seed {seed}"
        for (_, block), memory in zip(pairs, case.memories, strict=True):
            assert np.array_equal(block.get(), memory.view(np.uint8)), f"seed {seed}: an input was written"
        tight += case.check(y, f"seed {seed}")
        total += y.size
    assert tight > 0.9 * total


UNARY = [name for name in VOCABULARY if name in REFERENCES or (getattr(np, name, None) is not None and name != "positive")]
BINARY = ["add", "subtract", "multiply", "divide", "maximum", "minimum", "pow", "equal", "not_equal", "less", "less_equal"]
BINARY += ["greater", "greater_equal", "logical_and", "logical_or", "logical_xor"]
OTHER = ["where", "clip"]


@pytest.mark.parametrize("name", [name for name in UNARY if name not in (*BINARY, *OTHER)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_function_of_every_number_of_16_bits(pool, stream, name, dtype):
    kind = as_dtype(dtype)
    x = np.arange(1 << 16, dtype=np.uint16).view(kind)
    result = handlepool.asnumpy(getattr(over, name)(cupy.asarray(x), pool=pool), pool=pool)
    with np.errstate(all="ignore"):
        values = x.astype(np.float64)
        # CuPy compiles with -ftz=true: what is smaller may count as zero.
        taken = (values == 0) | ~(np.abs(values) < SMALLEST)
        if dtype == "bfloat16" and name in ("sin", "cos"):  # of larger numbers float32 says nothing
            taken &= np.abs(values) < 1e5
        values, found = values[taken], result.astype(np.float64)[taken]
        expected = np.asarray((REFERENCES.get(name) or getattr(np, name))(values))
        rounded = expected.astype(np.float64) if expected.dtype == bool else expected.astype(kind).astype(np.float64)
        sure = np.isfinite(rounded) == np.isfinite(expected)  # not between the largest number and infinity
        bound = 2 * ROUNDED[dtype] * np.abs(rounded) + (1.3e-7 if dtype == "float16" else 1e-36)
        bound += 8e-3 * (dtype == "bfloat16" and name in ("sin", "cos"))
        wrong = np.where(np.isfinite(rounded), np.abs(found - rounded) > bound, (found != rounded) & ~np.isnan(rounded)) & sure
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    places = np.flatnonzero(wrong)[:5]
    assert not wrong.any(), f"{name}({values[places]}) is {found[places]}, and not {rounded[places]}"


@pytest.mark.parametrize("name", [name for name in UNARY if name not in (*BINARY, *OTHER)])
def test_each_function_in_float32(pool, stream, name):
    random = np.random.default_rng(1)
    x = np.concatenate([random.standard_normal(40_000) * scale for scale in (0.01, 1, 8)]).astype(np.float32)
    found = handlepool.asnumpy(getattr(over, name)(cupy.asarray(x), pool=pool), pool=pool).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = np.asarray((REFERENCES.get(name) or getattr(np, name))(x.astype(np.float64))).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=4e-6, atol=2e-7)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", FLOATING)
def test_each_function_of_two_arrays(pool, stream, name, dtype):
    random = np.random.default_rng(1)
    x, y = (random.standard_normal(shape).astype(as_dtype(dtype)) for shape in ((64, 3, 65), (3, 65)))
    if name == "pow":  # of what is positive, and leads nowhere beyond the largest number
        x = (np.abs(x.astype(np.float64)) + 0.5).astype(as_dtype(dtype))
    a, b = (each.astype(np.float64) for each in (x, y))
    result = getattr(over, name)(cupy.asarray(x), cupy.asarray(y), pool=pool)
    found = handlepool.asnumpy(result, pool=pool).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = np.asarray(a**b if name == "pow" else getattr(np, name)(a, b)).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=4 * ROUNDED[dtype], atol=1e-7)


GATES = [
    (1, 32, 112),
    (1, 96, 56),
    (1, 144, 56),
    (1, 240, 28),
    (8, 480, 14),
    (1, 672, 14),
    (2, 1152, 7),
    (1, 72, 28),
    (1, 960, 7),
]
"""Images, channels and side of gates of efficientnet_b0 and mobilenet_v3_large."""


@elementwise
def gate(x, s):
    return x * over.hardsigmoid(s)


@elementwise
def scaled(x, scale, shortcut):
    return x * scale + shortcut


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_the_sizes_of_networks(pool, stream, random_array, dtype, layout):
    def error(y, expected):
        return reference.relative_error(handlepool.asnumpy(y, pool=pool).astype(np.float64), expected)

    for images, channels, side in GATES:
        x, z = (random_array((images, channels, side, side), dtype, layout, seed) for seed in (0, 1))
        s, row = random_array((images, channels, 1, 1), dtype, seed=2), random_array((1, channels, 1, 1), dtype, seed=3)
        a, b, c, d = (handlepool.asnumpy(each, pool=pool).astype(np.float64) for each in (x, z, s, row))
        open_ = np.clip(c + 3, 0, 6) / 6
        for _ in range(2):
            y = gate(x, s, pool=pool)
            assert y.strides == x.strides
            assert error(y, a * open_) < ROUNDED[dtype]
            assert error(multiply(x, s, pool=pool), a * c) < ROUNDED[dtype]
            assert error(add(x, s, activation="relu", pool=pool), np.maximum(a + c, 0)) < ROUNDED[dtype]
            assert error(scaled(x, row, z, pool=pool), a * d + b) < ROUNDED[dtype]
        assert gate(x, s, out=x, pool=pool) is x
        assert error(x, a * open_) < ROUNDED[dtype]


def test_truth_values_and_integers(pool, stream):
    image = cupy.asarray((np.arange(2 * 3 * 40 * 36) % 256).astype(np.uint8).reshape(2, 3, 40, 36))
    means = cupy.asarray([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
    normal = elementwise(lambda x, m, n: ((x / 255 - m) / n).astype("float16"))(image, means, 0.225, pool=pool)
    expected = (image.get() / 255 - means.get().astype(np.float64)) / 0.225
    assert normal.dtype == np.float16
    assert np.abs(normal.get() - expected).max() < 3e-3
    mask = elementwise(lambda x: (x > 100) & ~(x > 200))(image, pool=pool)
    assert mask.dtype == bool
    assert np.array_equal(mask.get(), (image.get() > 100) & (image.get() <= 200))
    chosen = elementwise(lambda m, x, y: np.where(m, x, y))(mask, normal, means, pool=pool)
    assert np.allclose(chosen.get(), np.where(mask.get(), normal.get().astype(np.float32), means.get()))
    for kind in (np.int8, np.int16, np.uint16, np.int32):
        x = cupy.arange(-60, 60).astype(kind)
        assert np.array_equal(elementwise(lambda x: x * 2)(x, pool=pool).get(), x.get().astype(np.float32) * 2)


def test_more_elements_than_32_bits_count(pool, stream):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 20 << 30:
        pytest.skip(f"needs 20 GiB of free memory, and there are {free >> 30}")
    extents = (33, 64, 1 << 10, 1 << 10)
    x = cupy.zeros((extents[0], *extents[2:], extents[1]), np.float16).transpose(0, 3, 1, 2)
    assert x.size > 1 << 31
    x[-1] = 3
    x[-1, -1, -1, -1] = 7
    s = cupy.ones((33, 64, 1, 1), np.float16)
    s[-1, -1] = 2
    y = multiply(x, s, pool=pool)
    assert y[-1, -1, -1, -2:].tolist() == [6, 14]
    assert y[-1, -2, -1, -2:].tolist() == [3, 3]
    assert float(y[-2].max()) == 0
    assert multiply(x, s, out=x, pool=pool) is x
    assert x[-1, -1, -1, -2:].tolist() == [6, 14]
    del x, y
    cupy.get_default_memory_pool().free_all_blocks()  # other processes' tests need some, too


def test_g9_a_capture_takes_a_function_that_is_new_in_it(pool, stream, random_array):
    x, s = random_array((2, 24, 17, 15)), random_array((2, 24, 1, 1), seed=1)
    expected = x.get() * np.tanh(s.get()) + 17
    out = cupy.empty_like(x)
    pool.get_handle()
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        elementwise(lambda x, s, n: x * np.tanh(s) + n)(x, s, 17, out=out, pool=pool)
    finally:
        graph = stream.end_capture()
    for _ in range(2):
        out.fill(np.nan)
        graph.launch(stream)
        assert np.allclose(out.get(), expected, rtol=1e-5, atol=1e-5)


def test_g17_branches_of_elementwise_functions_follow_their_data(pool, stream, random_array, kernels, latch):
    x, s = random_array((2, 64, 28, 28)), random_array((2, 64, 1, 1), seed=1)
    states = ParallelStates(4, pool=pool)
    values, gates = (each.get().astype(np.float64) for each in (x, s))
    given, total = cupy.asarray(values, np.float32), cupy.empty_like(x)
    expected = np.tanh(values * (np.clip(gates + 3, 0, 6) / 6) + gates)

    def region():
        with states.fork() as fork:
            first = fork.run(gate, x, s)
            fork.run(add, first, s, out=total)
            return fork.run(over.tanh, total)

    region()  # loads every kernel
    total.fill(np.nan)
    x.fill(np.nan)
    stream.synchronize()
    latch.hold()
    kernels.copy(given, x)
    found = region()
    latch.release()
    assert reference.relative_error(found.get(), expected) < 1e-5


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_recorded_program_is_replayed_with_new_inputs(pool, stream, random_array, lanes):
    x, s = random_array((2, 16, 9, 9), "float16", "nhwc"), random_array((2, 16, 1, 1), "float16")

    def network(x, s):
        first, second = gate(x, s, pool=pool), over.silu(x, pool=pool)
        return add(first, second, s, activation="relu", pool=pool)

    program = handlepool.record(network, x, s, lanes=lanes, pool=pool)
    if lanes:
        assert [len(node.after) for node in program.explain().nodes] == [0, 0, 2]
    pool.cache_clear()
    for seed in range(3):
        x, s = random_array((2, 16, 9, 9), "float16", "nhwc", seed), random_array((2, 16, 1, 1), "float16", seed=seed + 9)
        a, b = x.get().astype(np.float64), s.get().astype(np.float64)
        expected = np.maximum(a * np.clip(b + 3, 0, 6) / 6 + a / (1 + np.exp(-a)) + b, 0)
        assert reference.relative_error(program(x, s).get().astype(np.float64), expected) < 2e-3


def test_an_array_that_begins_between_multiples_of_16_bytes_is_refused(pool, stream):
    x = cupy.ones(65, np.float16)
    for _ in range(2):
        assert multiply(x, 2.0, pool=pool)[0] == 2
        with pytest.raises(ArgumentError, match="16"):
            multiply(x[1:], 2.0, pool=pool)


def test_asnumpy_keeps_a_stream_that_use_made_current(pool):
    stream, previous = cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()
    stream.use()
    try:
        x = handlepool.asarray(np.arange(24, dtype=np.float32).reshape(4, 6), pool=pool)
        for view in (x, x[:, ::2], x.T, x[1:, 1:], x[::-1]):
            assert np.array_equal(handlepool.asnumpy(view, pool=pool), cupy.ascontiguousarray(view).get())
            assert cupy.cuda.get_current_stream() == stream
    finally:
        previous.use()


if find_spec("torch"):
    SPECIAL = [np.nan, -np.inf, -1e4, -8.0, -3.0, -0.5, -0.0, 0.0, 0.5, 3.0, 8.0, 1e4, np.inf]

    @pytest.mark.parametrize("dtype", FLOATING)
    @pytest.mark.parametrize("name", ["relu", "sigmoid", "silu", "gelu", "hardswish", "hardsigmoid"])
    def test_activations_of_nan_and_infinities_are_torchs(pool, name, dtype):
        import torch

        x = torch.tensor(SPECIAL, dtype=getattr(torch, dtype), device="cuda")
        found, expected = getattr(over, name)(x, pool=pool), getattr(torch.nn.functional, name)(x)
        assert found.dtype == x.dtype
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=2 * ROUNDED[dtype], atol=1e-6)

    def test_torchs_functions_are_traced(pool):
        import torch

        x = torch.randn((2, 24, 7, 5), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

        def function(x):
            inner = torch.nn.functional.hardswish(x) + torch.clamp(x, -1, 1) * torch.sigmoid(x)
            return torch.where(x > 0.5, inner, torch.tanh(x) + torch.nn.functional.silu(x))

        torch.testing.assert_close(elementwise(function)(x, pool=pool), function(x), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_tensors_broadcast_as_torchs(pool, dtype):
        import torch

        make = torch.Generator("cuda").manual_seed(1)
        x = torch.randn((2, 24, 7, 5), dtype=getattr(torch, dtype), device="cuda", generator=make)
        for layout in (torch.contiguous_format, torch.channels_last):
            images = x.contiguous(memory_format=layout)
            for shape in ((2, 24, 1, 1), (24, 1, 1), (5,), (), (2, 1, 7, 5)):
                s = torch.randn(shape, dtype=x.dtype, device="cuda", generator=make)
                y = multiply(images, s, pool=pool)
                assert y.stride() == images.stride()
                torch.testing.assert_close(y, images * s, rtol=ROUNDED[dtype], atol=1e-6)
                torch.testing.assert_close(add(images, s, pool=pool), images + s, rtol=ROUNDED[dtype], atol=1e-2 * ROUNDED[dtype])
