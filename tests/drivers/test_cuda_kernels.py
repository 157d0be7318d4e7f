"""The CUDA kernels' source and geometry, run on the CPU and compared with float64; what only a GPU shows is in tests/gpu."""

from functools import partial

import numpy as np
import pytest
from harness.kernel_cases import CASES, check, filled, lying, random_case, sliced
from harness.kernels_on_cpu import COMPILER, Compiled, planned

from handlepool.drivers.cuda import kernels
from handlepool.drivers.kernel import Add, Concat, Depthwise, Windows
from handlepool.tensors.layout import Layout

pytest.importorskip("ml_dtypes")


SMALL = {"MOST_BLOCKS": 2, "MOST_PARTS": 2, "THREADS": 16, "LANES": 8, "SHARES": 4, "MOST_PIXELS": 2, "LARGEST_BLOCK": 64}
in_packs = partial(planned, limits=SMALL)
widened = partial(in_packs, wide=True)


def check_all(cases, launches, folder):
    compiled = Compiled(launches, folder)
    for (kernel, operands), launch in zip(cases, launches, strict=True):
        check(kernel, operands, lambda arrays, _, launch=launch: compiled.run(launch, arrays), f"by {launch}")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")
def test_each_variant_computes_the_reference_and_writes_nothing_else(tmp_path):
    some = CASES[::7]
    launches = [*(in_packs(*case) for case in CASES), *(make(*case) for make in (kernels.plan, widened) for case in some)]
    assert {dict(launch.macros)["WIDE"] for launch in launches} == {"0", "1"}
    assert {dict(launch.macros)["PACK"] for launch in launches} == {"1", "2", "4", "8", "16"}
    check_all([*CASES, *some, *some], launches, tmp_path)


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")
def test_a_concatenation_leaves_what_lies_in_its_place(tmp_path):
    part, whole = sliced((2, 8, 3, 4), "float16", 2), lying((2, 16, 3, 4), "float16")
    launch = in_packs(Concat(1), [part, part, whole])
    compiled = Compiled([launch], tmp_path)
    for place in range(2):
        (x, _), (y, _) = filled(part), filled(whole, 1)
        parts = [x, x]
        parts[place] = y[:, 8 * place :][:, :8]
        expected = np.concatenate(parts, 1)
        compiled.run(launch, [*parts, y])
        assert np.array_equal(y, expected)


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")
@pytest.mark.slow
def test_random_operands(tmp_path):
    cases = [random_case(seed) for seed in range(60)]
    check_all(cases, [in_packs(*case) for case in cases], tmp_path)


def macros_of(kernel, *operands):
    return dict(kernels.plan(kernel, operands).macros)


def test_offsets_have_64_bits_where_32_are_too_few():
    most, more = ((1, 64, 1 << 12, columns) for columns in ((1 << 13) - 1, 1 << 13))  # 2**31 elements in the second one
    for dtype in ("float16", "float32"):
        for shape, wide in ((most, "0"), (more, "1")):
            x = lying(shape, dtype)
            small = lying((*shape[:2], 1, 1), dtype)
            assert macros_of(Add(), x, x)["WIDE"] == wide
            assert macros_of(Windows("max", shape[2:]), x, small)["WIDE"] == wide
            assert macros_of(Windows("max", (1, 1)), x, x)["WIDE"] == wide
    half, byte = lying((1, 64, 1 << 12, 1 << 12), "float16"), lying((1, 64, 1 << 12, 4095), "int8")
    assert macros_of(Concat(1), half, half)["WIDE"] == "1"  # it counts bytes
    assert macros_of(Concat(1), byte, byte)["WIDE"] == "0"


def test_strides_of_axes_of_extent_1_may_be_anything():
    x, y = lying((1, 64, 9, 8), "float16"), lying((1, 64, 1, 1), "float16")
    far = Layout(x.shape, (1 << 50, *x.strides[1:]), x.dtype)
    for kernel, result in ((Add(), x), (Concat(1), x), (Windows("max", (1, 1)), x), (Windows("mean", (9, 8)), y)):
        assert kernels.plan(kernel, [far, result]) == kernels.plan(kernel, [x, result])


def test_steps_that_lead_nowhere_fit_whatever_they_are():
    x, w = lying((1, 8, 9, 9), "float16"), lying((8, 1, 1, 1), "float16")
    far = kernels.plan(Depthwise(dilation=(1 << 40, 1 << 70)), [x, w, x])
    assert far.geometry == kernels.plan(Depthwise(dilation=(9, 9)), [x, w, x]).geometry


def test_the_larger_images_are_the_more_threads_share_one():
    def threads(side, order="NHWC"):
        x, y = lying((8, 64, side, side), "float16", order), lying((8, 64, 1, 1), "float16", order)
        launch = kernels.plan(Windows("mean", (side, side)), [x, y])
        assert launch.threads == int(dict(launch.macros)["LANES"]) * int(dict(launch.macros)["SHARES"])
        return launch.threads

    assert [threads(side) for side in (7, 14, 28, 112)] == [256, 512, 1024, 1024]
    assert [threads(side, "NCHW") for side in (7, 14, 28, 112)] == [256, 256, 512, 1024]


def test_packs_are_as_large_as_operands_allow():
    def pack(kernel, *operands):
        return macros_of(kernel, *operands)["PACK"]

    big = lying((32, 64, 56, 56), "float16")
    assert pack(Add(), big, big) == pack(Windows("max", (1, 1)), big, big) == "8"
    assert pack(Concat(0), big, lying((32, 64, 56, 56), "float16")) == "16"
    assert pack(Add(), lying((32, 64, 56, 56), "float32"), lying((32, 64, 56, 56), "float32")) == "4"
    odd = lying((32, 63, 56, 56), "float16")
    assert pack(Windows("max", (1, 1)), odd, odd) == "1"
    assert pack(Add(), odd, odd) == "8"  # without gaps, with a tail
    assert pack(Concat(1), odd, lying((32, 63, 56, 56), "float16", "NCHW")) == "2"
    small = lying((1, 64, 7, 7), "float16")
    assert pack(Add(), small, small) == "1"  # threads for a whole GPU come first
