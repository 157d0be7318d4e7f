"""The CUDA source of normalisations and copies, run on the CPU and compared with float64; a GPU runs the same cases."""

from functools import partial

import pytest
from harness.kernel_cases import check, lying
from harness.kernels_on_cpu import COMPILER, Compiled, planned
from harness.network_cases import CASES, expects, groups, random_case, rows

from handlepool.drivers.cuda import kernels
from handlepool.drivers.kernel import Normalise, Resample

pytest.importorskip("ml_dtypes")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")


SMALL = {"MOST_BLOCKS": 2, "THREADS": 16, "LANES": 4, "SHARES": 4, "MOST_PIXELS": 2, "LARGEST_BLOCK": 64}
SMALL |= {"SQUEEZED_LANES": 3, "SQUEEZED_THREADS": 16, "EXCITED_LANES": 3, "EXCITED_THREADS": 32, "LAYER_THREADS": 64}
SMALL |= {"EXCITED_EACH": 1, "EXCITED_BLOCKS": 8}
in_packs = partial(planned, limits=SMALL)
widened = partial(in_packs, wide=True)


def check_all(cases, launches, folder):
    compiled = Compiled(launches, folder)
    for (kernel, operands), launch in zip(cases, launches, strict=True):
        run = lambda arrays, _, launch=launch: compiled.run(launch, arrays)  # noqa: E731
        check(kernel, operands, run, f"by {launch}", expects(operands[-1].shape))


@needs_compiler
def test_each_variant_computes_the_reference_and_writes_nothing_else(tmp_path):
    some = CASES[::9]
    launches = [*(in_packs(*case) for case in CASES), *(widened(*case) for case in some)]
    macros = [dict(launch.macros) for launch in launches if launch.entry == "normalise"]
    assert {each["PACK"] for each in macros} == {"1", "2", "4", "8"}
    assert {each["ACROSS"] for each in macros} == {"0", "1"}
    assert {"0", "1"} < {each["EACH"] for each in macros}
    assert {each["WEIGHT_WAY"] for each in macros} == {"0", "1", "2"}
    assert {launch.entry for launch in launches} == {"normalise", "affine", "gather", "resample", "squeeze", "layer", "excite"}
    check_all([*CASES, *some], launches, tmp_path)


@needs_compiler
def test_rows_of_more_than_a_warp_are_summed_as_a_whole(tmp_path):
    cases = [rows(kind, (1,), lying((3, 640), "float32", "NCHW")) for kind in ("mean", "square", "softmax")]
    launches = [kernels.plan(*case) for case in cases]
    assert {dict(launch.macros)["SHARES"] for launch in launches} == {"256"}
    check_all(cases, launches, tmp_path)


@needs_compiler
def test_few_rows_side_by_side_are_summed_as_a_whole(tmp_path):
    cases = [
        rows("mean", (1,), lying((1, 40, 3, 8), "float16", "NCHW"), weighted=True, biased=True),
        groups(16, lying((1, 16, 9, 8), "float32"), biased=True),
        rows("softmax", (2, 3), lying((1, 8, 40, 9), "bfloat16")),
    ]
    launches = [kernels.plan(*case) for case in cases]
    assert {dict(launch.macros)["ACROSS"] for launch in launches} == {"1"}
    check_all(cases, launches, tmp_path)


@needs_compiler
@pytest.mark.slow
def test_random_operands(tmp_path):
    cases = [random_case(seed) for seed in range(60)]
    check_all(cases, [in_packs(*case) for case in cases], tmp_path)


def test_few_rows_have_many_threads_each_and_many_rows_few():
    def threads(count, extent):
        launch = kernels.plan(*rows("mean", (1,), lying((count, extent), "float16", "NCHW")))
        macros = dict(launch.macros)
        return int(macros["LANES"]), int(macros["SHARES"]), int(macros["EACH"])

    assert threads(197, 768) == (1, 128, 1)
    assert threads(64 * 197, 768) == (4, 32, 3)
    assert threads(12 * 197, 197) == (4, 32, 7)  # a warp a row, without barriers
    assert threads(56 * 56 * 8, 96) == (32, 4, 3)


def test_few_rows_side_by_side_are_spread_over_blocks():
    def launch(images, channels, side):
        x = lying((images, channels, side, side), "float16")
        found = kernels.plan(Normalise("mean", (2, 3), channels, 1e-5), [x, x])
        macros = dict(found.macros)
        return found.grid[0], *(int(macros[name]) for name in ("PACK", "LANES", "SHARES"))

    assert launch(8, 64, 112) == (32, 2, 8, 128)
    assert launch(512, 512, 7) == (1024, 8, 32, 8)


def test_offsets_have_64_bits_where_32_are_too_few():
    x, y = lying((1, 64, 1 << 12, 1 << 12), "float16"), lying((1, 64, 1 << 13, 1 << 12), "float16")
    assert dict(kernels.plan(*rows("mean", (1,), x)).macros)["WIDE"] == "0"
    assert dict(kernels.plan(*rows("mean", (1,), y)).macros)["WIDE"] == "1"
    assert dict(kernels.plan(Resample("nearest", (0.5, 1.0)), [x, y]).macros)["WIDE"] == "1"
