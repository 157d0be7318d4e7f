"""Normalisations, softmax, copies, resampling, attention and transposed convolutions on a GPU.

Every variant of the kernels of our own is compared with float64, then each operation at the sizes of networks with float64, and
with torch where it is installed. `tests/ops` runs on both drivers.
"""

from functools import partial

import numpy as np
import pytest
from harness import network_references as reference
from harness.kernel_cases import check
from harness.kernels_on_gpu import launch
from harness.network_cases import CASES, expects, random_case

import handlepool
from handlepool import ParallelStates, ops
from handlepool.tensors.layout import as_dtype
from handlepool.testing import reference as public

cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytest.importorskip("scipy", reason="SciPy is not installed")
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 2e-5}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)
LAYOUTS = pytest.mark.parametrize("layout", ["nchw", "nhwc"])


def taken(array):
    return array.get().astype(np.float64)


def error(y, expected):
    return public.relative_error(taken(y), expected)


def put(values, dtype):
    """A contiguous copy of host values on the GPU; CuPy computes nothing, which it cannot in every type."""
    return cupy.asarray(np.ascontiguousarray(values).astype(as_dtype(dtype)))


# Kernels of our own


@pytest.fixture(params=[True, False], ids=["large packs", "packs that leave threads enough"])
def packs(request, limits):
    if request.param:
        limits(PLENTY=0)
    return request.param


def test_each_case_is_the_reference_and_nothing_else_is_written(pool, stream, packs):
    for kernel, operands in CASES if packs else CASES[::3]:
        check(kernel, operands, launch(pool, kernel, operands), "", expects(operands[-1].shape))


@pytest.mark.usefixtures("packs")
def test_random_operands(pool, stream):
    for seed in range(80):
        kernel, operands = random_case(seed)
        check(kernel, operands, launch(pool, kernel, operands), f"of seed {seed}", expects(operands[-1].shape))


@LAYOUTS
@TYPES
@pytest.mark.parametrize("shape", [(1, 96, 56, 56), (2, 768, 7, 7), (8, 64, 112, 112), (3, 65, 33, 31)], ids=str)
def test_normalisations_of_images(pool, stream, random_array, shape, dtype, layout):
    x, weight, bias = random_array(shape, dtype, layout), *(random_array(shape[1:2], dtype, seed=seed) for seed in (1, 2))
    values, w, b = map(taken, (x, weight, bias))
    how, variance = {"weight": weight, "bias": bias, "pool": pool}, put(w * w + 1, dtype)
    groups = 5 if shape[1] == 65 else 32
    tolerance = TOLERANCE[dtype]
    for _ in range(2):  # the second time by the shortcut
        assert error(ops.layer_norm(x, axis=1, **how), reference.layer_norm(values, 1, w, b)) < tolerance
        assert error(ops.rms_norm(x, axis=(1, 2, 3), pool=pool), reference.rms_norm(values, (1, 2, 3))) < tolerance
        assert error(ops.group_norm(x, groups, **how), reference.group_norm(values, groups, w, b)) < tolerance
        assert error(ops.instance_norm(x, **how), reference.instance_norm(values, w, b)) < tolerance
        assert error(ops.softmax(x, axis=1, pool=pool), reference.softmax(values, 1)) < tolerance
        found = ops.batch_norm(x, bias, variance, **how, activation="relu")
        expected = reference.batch_norm(values, b, taken(variance), w, b)
        assert error(found, np.maximum(expected, 0)) < 2 * tolerance


@TYPES
@pytest.mark.parametrize(("rows", "extent"), [(197, 768), (1, 65536), (12 * 197, 197), (4096, 8), (50000, 96)], ids=str)
def test_rows_of_any_length(pool, stream, random_array, rows, extent, dtype):
    x, weight = random_array((rows, extent), dtype), random_array((extent,), dtype, seed=1)
    values, w = taken(x), taken(weight)
    assert error(ops.layer_norm(x, weight=weight, pool=pool), reference.layer_norm(values, -1, w)) < TOLERANCE[dtype]
    assert error(ops.rms_norm(x, weight=weight, pool=pool), reference.rms_norm(values, -1, w)) < TOLERANCE[dtype]
    assert error(ops.softmax(x, pool=pool), reference.softmax(values)) < TOLERANCE[dtype]
    expected = reference.layer_norm(values)
    assert error(ops.layer_norm(x, out=x, pool=pool), expected) < TOLERANCE[dtype]


@LAYOUTS
@TYPES
def test_copies_and_resampling(pool, stream, random_array, dtype, layout):
    x = random_array((2, 24, 14, 15), dtype, layout)
    values = taken(x)
    for mode in ("constant", "reflect", "replicate"):
        assert np.array_equal(taken(ops.pad(x, (3, 2, 1, 4), mode=mode, pool=pool)), reference.pad(values, (3, 2, 1, 4), mode))
    assert np.array_equal(taken(ops.channel_shuffle(x, 3, pool=pool)), reference.channel_shuffle(values, 3))
    for copied in (ops.to_contiguous(x, pool=pool), ops.to_channels_last(x, pool=pool)):
        assert np.array_equal(taken(copied), values)
    for how in ({"scale_factor": 2}, {"size": (5, 31)}, {"scale_factor": (1.3, 0.7)}):
        nearest = ops.interpolate2d(x, **how, pool=pool)
        assert np.array_equal(taken(nearest), reference.interpolate2d(values, **how))
        for corners in (False, True):
            more = {**how, "mode": "bilinear", "align_corners": corners}
            assert error(ops.interpolate2d(x, **more, pool=pool), reference.interpolate2d(values, **more)) < TOLERANCE[dtype]


@LAYOUTS
@TYPES
@pytest.mark.parametrize("shape", [(1, 32, 112, 112), (3, 96, 56, 56), (1, 1152, 7, 7), (2, 13, 9, 11)], ids=str)
def test_gates(pool, stream, random_array, shape, dtype, layout):
    channels, squeezed = shape[1], max(1, shape[1] // 24)
    layers = (squeezed, channels), (squeezed,), (channels, squeezed), (channels,)
    x, *rest = random_array(shape, dtype, layout), *(random_array(each, dtype, seed=seed) for seed, each in enumerate(layers, 1))
    for activation, gate in (("swish", "sigmoid"), ("relu", "hardsigmoid")):
        expected = reference.squeeze_excite(*map(taken, (x, *rest)), activation, gate)
        for _ in range(2):
            y = ops.squeeze_excite(x, *rest, activation=activation, gate=gate, pool=pool)
            assert error(y, expected) < 2 * TOLERANCE[dtype]


def test_more_elements_than_32_bits_count(pool, stream):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free memory, and there are {free >> 30}")
    x = cupy.zeros((33, 1 << 16, 1 << 10), np.float16)
    assert x.size > 1 << 31
    x[-1, -1, ::2] = 2
    y = ops.layer_norm(x, eps=1e-12, pool=pool)
    assert y[-1, -1, :2].tolist() == [1, -1]
    assert float(y[0].max()) == float(y[-1, -2].max()) == 0
    del y
    y = ops.pad(x, (0, 8), value=5, pool=pool)
    assert y[-1, -1, -10:].tolist() == [2, 0] + [5] * 8
    del y
    y = ops.softmax(x, out=x, pool=pool)
    assert abs(float(y[-1, -2].astype(np.float32).sum()) - 1) < 1e-2
    del x, y
    cupy.get_default_memory_pool().free_all_blocks()  # tests of other processes need memory as well


# By cuDNN


@LAYOUTS
@TYPES
def test_transposed_convolutions(pool, stream, random_array, dtype, layout):
    tolerance = 5e-3 if dtype == "float32" else TOLERANCE[dtype]  # float32 by TF32
    x, bias = random_array((2, 32, 9, 11), dtype, layout), random_array((24,), dtype, seed=2)
    for taps, how in (
        ((2, 2), {"stride": (2, 2)}),
        ((3, 3), {"stride": (2, 2), "padding": (1, 1), "output_padding": (1, 1)}),
        ((4, 4), {"stride": (2, 2), "padding": (1, 1)}),
        ((3, 2), {"dilation": (2, 1), "output_padding": (1, 0)}),
        ((3, 3), {"groups": 4, "stride": (1, 3)}),
    ):
        w = random_array((32, 24 // how.get("groups", 1), *taps), dtype, layout, seed=1)
        more = {**how, "padding": tuple((each, each) for each in how.get("padding", (0, 0)))}
        expected = reference.conv_transpose2d(taken(x), taken(w), **more, bias=taken(bias))
        for _ in range(2):
            y = ops.conv_transpose2d(x, w, **how, bias=bias, activation="relu", pool=pool)
            assert error(y, np.maximum(expected, 0)) < tolerance, how
    row, filters, one = (
        put(taken(x)[:, :, 0], dtype),
        random_array((24, 32, 4), dtype, seed=3),
        random_array((32, 24, 4), dtype, seed=4),
    )
    images = taken(row)[:, :, None]
    same = public.conv2d(images, taken(filters)[:, :, None], padding=((0, 0), (1, 2)), bias=taken(bias))[:, :, 0]
    assert error(ops.conv1d(row, filters, padding="same", bias=bias, pool=pool), same) < tolerance
    found = ops.conv1d(row, filters, padding="same", bias=bias, activation="relu", pool=pool)
    assert error(found, np.maximum(same, 0)) < tolerance
    expected = reference.conv_transpose2d(images, taken(one)[:, :, None], stride=(1, 2))[:, :, 0]
    assert error(ops.conv_transpose1d(row, one, stride=2, pool=pool), expected) < tolerance


@LAYOUTS
@TYPES
def test_one_filter_for_all_and_padding_by_name(pool, stream, random_array, dtype, layout):
    tolerance = 5e-3 if dtype == "float32" else TOLERANCE[dtype]
    x, one = random_array((2, 32, 9, 11), dtype, layout), random_array((1, 1, 3, 3), dtype, seed=1)
    blur = cupy.broadcast_to(one, (32, 1, 3, 3))
    expected = public.conv2d(taken(x), np.broadcast_to(taken(one), blur.shape), padding=1, groups=32)
    assert error(ops.conv2d(x, blur, padding="same", groups=32, pool=pool), expected) < tolerance
    every = cupy.broadcast_to(one, (16, 32, 3, 3))
    expected = public.conv2d(taken(x), np.broadcast_to(taken(one), every.shape), padding=1)
    assert error(ops.conv2d(x, every, padding=1, pool=pool), expected) < tolerance
    w = random_array((16, 32, 2, 4), dtype, layout, seed=2)
    expected = public.conv2d(taken(x), taken(w), padding=((0, 1), (1, 2)))
    assert error(ops.conv2d(x, w, padding="same", pool=pool), expected) < tolerance


SIZES = [(1, 12, 197, 197, 64, 64), (2, 8, 77, 33, 80, 40), (2, 4, 128, 128, 128, 128), (1, 2, 1, 55, 64, 64), (1, 1, 1, 1, 8, 8)]
"""Batch, heads, queries, keys, size of a head, of queries and of values."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention(pool, stream, random_array, sizes, dtype):
    n, h, queries, keys, size, values = sizes
    q, k, v = (
        random_array(shape, dtype, seed=seed)
        for seed, shape in enumerate([(n, h, queries, size), (n, h, keys, size), (n, h, keys, values)])
    )
    call = partial(ops.scaled_dot_product_attention, q, k, v, pool=pool)
    host = [*map(taken, (q, k, v))]
    masks = [random_array(shape, dtype, seed=9) for shape in ((queries, keys), (n, 1, 1, keys), (n, h, queries, keys))]
    hidden = put(np.where(np.arange(keys) < max(1, keys // 2), 0, -np.inf), dtype)
    for how in ({}, {"is_causal": True}, {"scale": 0.5}, *({"attn_mask": mask} for mask in (*masks, hidden))):
        expected = reference.attention(*host, **{key: taken(m) if key == "attn_mask" else m for key, m in how.items()})
        for _ in range(2):
            assert error(call(**how), expected) < TOLERANCE[dtype], {key: getattr(m, "shape", m) for key, m in how.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", range(8, 136, 8))
def test_each_head_size_and_the_layouts_that_are_taken_as_they_lie(pool, stream, random_array, size, dtype):
    products = random_array((2, 37, 3, 4, size), dtype)
    q, k, v = products.transpose(2, 0, 3, 1, 4)
    expected = reference.attention(*map(taken, (q, k, v)))
    out = cupy.empty((2, 37, 4, size), q.dtype).transpose(0, 2, 1, 3)
    assert error(ops.scaled_dot_product_attention(q, k, v, pool=pool), expected) < TOLERANCE[dtype]
    assert error(ops.scaled_dot_product_attention(q, k, v, out=out, pool=pool), expected) < TOLERANCE[dtype]
    dense = [put(taken(products)[:, :, place].swapaxes(1, 2), dtype) for place in range(3)]
    assert error(ops.scaled_dot_product_attention(*dense, pool=pool), expected) < TOLERANCE[dtype]
    odd = [each[:, 1:] for each in dense]  # fewer heads of larger arrays
    assert error(ops.scaled_dot_product_attention(*odd, pool=pool), expected[:, 1:]) < TOLERANCE[dtype]
    turned = [put(taken(each).swapaxes(2, 3), dtype).swapaxes(2, 3) for each in dense]  # copied
    assert error(ops.scaled_dot_product_attention(*turned, pool=pool), expected) < TOLERANCE[dtype]


# Order


def test_g17_branches_follow_their_data(pool, stream, random_array, kernels, latch):
    x, w = random_array((2, 32, 14, 14), layout="nhwc"), random_array((32, 32, 2, 2), seed=1)
    states = ParallelStates(4, pool=pool)

    def region():
        with states.fork() as fork:
            y = fork.run(ops.layer_norm, x, axis=1)
            larger = fork.run(ops.conv_transpose2d, y, w, stride=2)
            resized = fork.run(ops.interpolate2d, y, scale_factor=2, mode="bilinear")
            total = fork.run(ops.add, larger, resized)
            return fork.run(ops.softmax, fork.run(ops.pad, total, (1, 1, 1, 1), mode="reflect"), axis=1)

    region()  # loads every kernel
    stream.synchronize()
    values = taken(x)
    y = reference.layer_norm(values, 1)
    total = reference.conv_transpose2d(y, taken(w), stride=(2, 2)) + reference.interpolate2d(y, scale_factor=2, mode="bilinear")
    expected = reference.softmax(reference.pad(total, (1, 1, 1, 1), "reflect"), 1)
    x.fill(np.nan)
    stream.synchronize()
    latch.hold()
    kernels.copy(cupy.asarray(np.ascontiguousarray(values.transpose(0, 2, 3, 1)), np.float32), x.transpose(0, 2, 3, 1))
    found = region()
    latch.release()
    assert error(found, expected) < 2e-2  # of scores that TF32 has rounded


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_recording_gives_the_same_at_each_replay(pool, stream, random_array, lanes):
    x, w = random_array((2, 37, 64), "float16"), put(np.random.default_rng(1).standard_normal((192, 64)) / 8, "float16")

    def network(x):
        y = ops.layer_norm(x, pool=pool)
        products = ops.linear(y, w, pool=pool).reshape(2, 37, 3, 4, 16).transpose(2, 0, 3, 1, 4)
        seen = ops.scaled_dot_product_attention(*products, is_causal=True, pool=pool)
        return ops.add(
            ops.rms_norm(x, pool=pool), ops.to_contiguous(seen.transpose(0, 2, 1, 3), pool=pool).reshape(2, 37, 64), pool=pool
        )

    program = handlepool.record(network, x, lanes=lanes, pool=pool)
    for seed in (3, 4):
        x[...] = random_array((2, 37, 64), "float16", seed=seed)
        values = taken(x)
        program.replay()
        products = (reference.layer_norm(values) @ taken(w).T).reshape(2, 37, 3, 4, 16).transpose(2, 0, 3, 1, 4)
        seen = reference.attention(*products, is_causal=True).transpose(0, 2, 1, 3).reshape(2, 37, 64)
        assert error(program.outputs, reference.rms_norm(values) + seen) < 1e-2


def test_g9_a_capture_takes_kernels_that_are_new_in_it(pool, stream, random_array):
    x = random_array((3, 40, 17))
    expected = reference.layer_norm(taken(x), 1, eps=1e-3)
    out = cupy.empty(x.shape, np.float32)
    pool.get_handle()
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        ops.layer_norm(x, axis=1, eps=1e-3, out=out, pool=pool)
    finally:
        graph = stream.end_capture()
    for _ in range(2):
        out.fill(np.nan)
        graph.launch(stream)
        assert error(out, expected) < TOLERANCE["float32"]


# Beside torch


def in_torch(torch, array):
    """The values of an array as torch's, of the same type, strides and device."""
    values = torch.from_numpy(np.ascontiguousarray(array.get().astype(np.float32))).to(getattr(torch, array.dtype.name)).cuda()
    last = array.ndim == 4 and array.strides[1] == array.itemsize
    return values.contiguous(memory_format=torch.channels_last) if last else values


def of_torch(functional, torch):
    """Each operation, ours and torch's, of images (N, C, H, W), with three vectors of C; the third is positive."""
    return {
        "layer_norm": (
            lambda x, w, b, v: ops.layer_norm(x, axis=1, weight=w, bias=b),
            lambda x, w, b, v: functional.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2),
        ),
        "layer_norm of columns": (
            lambda x, w, b, v: ops.layer_norm(x),
            lambda x, w, b, v: functional.layer_norm(x, x.shape[-1:]),
        ),
        "group_norm": (
            lambda x, w, b, v: ops.group_norm(x, 4, weight=w, bias=b),
            lambda x, w, b, v: functional.group_norm(x, 4, w, b),
        ),
        "instance_norm": (
            lambda x, w, b, v: ops.instance_norm(x, weight=w, bias=b),
            lambda x, w, b, v: functional.instance_norm(x, weight=w, bias=b),
        ),
        "batch_norm": (
            lambda x, w, b, v: ops.batch_norm(x, b, v, weight=w, bias=b),
            lambda x, w, b, v: functional.batch_norm(x, b, v, w, b),
        ),
        "softmax": (lambda x, w, b, v: ops.softmax(x, axis=1), lambda x, w, b, v: torch.softmax(x, 1)),
        "reflect": (
            lambda x, w, b, v: ops.pad(x, (1, 2, 3, 1), mode="reflect"),
            lambda x, w, b, v: functional.pad(x, (1, 2, 3, 1), mode="reflect"),
        ),
        "constant": (
            lambda x, w, b, v: ops.pad(x, (1, 2, -1, 1), value=2),
            lambda x, w, b, v: functional.pad(x, (1, 2, -1, 1), value=2),
        ),
        "shuffle": (lambda x, w, b, v: ops.channel_shuffle(x, 4), lambda x, w, b, v: functional.channel_shuffle(x, 4)),
        "nearest": (
            lambda x, w, b, v: ops.interpolate2d(x, size=(31, 5)),
            lambda x, w, b, v: functional.interpolate(x, size=(31, 5)),
        ),
        "bilinear": (
            lambda x, w, b, v: ops.interpolate2d(x, scale_factor=1.7, mode="bilinear"),
            lambda x, w, b, v: functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
        ),
        "bilinear by corners": (
            lambda x, w, b, v: ops.interpolate2d(x, size=(31, 5), mode="bilinear", align_corners=True),
            lambda x, w, b, v: functional.interpolate(x, size=(31, 5), mode="bilinear", align_corners=True),
        ),
    }


@LAYOUTS
@TYPES
def test_the_values_are_those_of_torch(pool, stream, random_array, make_default, dtype, layout):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    make_default(pool)
    x, w, b = random_array((3, 16, 14, 15), dtype, layout), *(random_array((16,), dtype, seed=seed) for seed in (1, 2))
    arrays = x, w, b, put(taken(w) ** 2 + 1, dtype)
    tensors = [in_torch(torch, array) for array in arrays]
    for name, (ours, theirs) in of_torch(torch.nn.functional, torch).items():
        expected = theirs(*tensors).double().cpu().numpy()
        found = taken(ours(*arrays))
        assert found.shape == expected.shape, name
        exact = name in ("reflect", "constant", "shuffle", "nearest")
        bound = 0 if exact else 2 * TOLERANCE[dtype]
        assert np.abs(found - expected).max() <= bound * max(1, np.abs(expected).max()), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_and_transposed_convolutions_are_those_of_torch(pool, stream, random_array, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    functional = torch.nn.functional
    q, k, v = (random_array((2, 4, 65, 64), dtype, seed=seed) for seed in range(3))
    x, w, bias = random_array((2, 16, 9, 9), dtype), random_array((16, 8, 3, 3), dtype, seed=1), random_array((8,), dtype, seed=2)
    mask = random_array((65, 65), dtype, seed=4)
    for how in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.2}):
        given = {key: in_torch(torch, value) if key == "attn_mask" else value for key, value in how.items()}
        expected = functional.scaled_dot_product_attention(*(in_torch(torch, each) for each in (q, k, v)), **given)
        found = ops.scaled_dot_product_attention(q, k, v, **how, pool=pool)
        assert error(found, expected.double().cpu().numpy()) < 2 * TOLERANCE[dtype], [*how]
    for how in ({"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}):
        expected = functional.conv_transpose2d(*(in_torch(torch, each) for each in (x, w, bias)), **how)
        found = ops.conv_transpose2d(x, w, bias=bias, **how, pool=pool)
        assert error(found, expected.double().cpu().numpy()) < 2 * TOLERANCE[dtype], how
