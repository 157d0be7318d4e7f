"""The CUDA source that is made for expressions, run on the CPU and compared with float64; tests/gpu runs it on a GPU."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from harness.expressions import LARGEST, Case, around, lying
from harness.kernel_cases import lying as dense
from harness.kernel_cases import placed
from harness.kernels_on_cpu import COMPILER, Compiled, planned

from handlepool.drivers import expression as expressions
from handlepool.drivers.cuda import elementwise, kernels
from handlepool.drivers.expression import Elementwise, bits_of
from handlepool.drivers.host import elementwise as on_host
from handlepool.errors import GraphNotSupportedError
from handlepool.graphs.expression import trace
from handlepool.tensors.layout import Layout

pytest.importorskip("ml_dtypes")
COUNT = int(os.environ.get("HANDLEPOOL_EXPRESSIONS", "40"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")


def kernel_of(case):
    """The expression of a case, and the shape and type of its result."""
    made, output = case.result()
    return Elementwise(made, tuple(map(bits_of, case.numbers))), output


def in_packs(kernel, operands, wide):
    """A launch of packs as large as there may be, in few blocks of few threads."""
    launch = planned(kernel, operands, {"THREADS": 16, "MOST_BLOCKS": 2})
    if wide:
        geometry = type(launch.geometry)("q", launch.geometry)
        macros = (("WIDE", "1"), *launch.macros[1:])
        launch = kernels.Launch(launch.entry, macros, geometry, launch.grid, launch.threads, launch.code)
    return launch


def test_each_driver_has_every_operation():
    wanted = {*expressions.OPERATIONS} - {"constant"}
    assert {*elementwise.FORMS} == wanted
    assert {*on_host.FUNCTIONS} == wanted


@needs_compiler
@pytest.mark.parametrize("part", range(4))
def test_random_expressions_are_the_reference_and_nothing_else_is_written(tmp_path, part):
    cases, launches, outputs = [Case(seed) for seed in range(part, COUNT, 4)], [], []
    for number, case in enumerate(cases):
        kernel, result = kernel_of(case)
        y, memory = placed(lying(case.random, result.shape, result.dtype.name))
        launches.append(in_packs(kernel, [*case.layouts, Layout.of(y)], number % 5 == 0))
        outputs.append((y, memory))
    compiled, tight, total = Compiled(launches, tmp_path), 0, 0
    for case, launch, (y, memory) in zip(cases, launches, outputs, strict=True):
        before = around(y, memory)
        compiled.run(launch, [*case.arrays, y])
        tight += case.check(y, launch.code)
        total += y.size
        assert around(y, memory) == before
    assert tight > 0.8 * total


@needs_compiler
def test_packs_tails_and_broadcast_operands(tmp_path):
    """Each way to have neighbours along the innermost axis: all, some, with a tail, across the ends of the axis, or none."""

    def scaled(x, s, b):
        return x * s + b

    layouts, packs = [], []
    for dtype in LARGEST:
        for order in ("NCHW", "NHWC"):
            x = dense((2, 24, 5, 7), dtype, order)
            shapes = ((2, 24, 1, 1), (1, 24, 1, 1), (1, 1, 1, 1), (24, 5, 7), (1, 1, 5, 7))
            bias = dense((24, 1, 1), "float32", "NCHW")
            layouts += [[x, dense(shape, dtype, "NCHW"), bias, x] for shape in shapes]
        x, number = dense((3, 7, 5, 5), dtype, "NCHW"), dense((), dtype, "NCHW")
        layouts.append([x, number, number, x])
        window = dense((3, 2, 3, 7, 7), dtype, "NCHW")
        layouts += [[window, dense((each, 7, 7), dtype, "NCHW"), number, window] for each in (3, 1)]
        turned = placed(dense((3, 2, 3, 7, 7), dtype, "NCHW"))[0].transpose(0, 1, 4, 3, 2)
        layouts.append([Layout.of(turned), dense((3, 2, 7, 7, 3), dtype, "NCHW"), number, dense((3, 2, 7, 7, 3), dtype, "NCHW")])
        layouts.append(
            [dense((2, 1, 5, 7), dtype, "NCHW"), dense((24, 1, 1), dtype, "NCHW"), bias, dense((2, 24, 5, 7), dtype, "NCHW")]
        )
    launches = []
    for operands in layouts:
        made, output = trace("scaled", scaled, operands[:-1], {})
        operands[-1] = Layout(output.shape, operands[-1].strides, operands[-1].dtype)
        assert output.dtype in (operands[0].dtype, np.dtype("float32"))
        if output.dtype != operands[0].dtype:
            operands[-1] = dense(output.shape, "float32", "NHWC" if operands[0].strides[1] < 8 else "NCHW")
        launches.append(in_packs(Elementwise(made), operands, False))
        packs.append(int(re.search(r"e < (\d)|$", launches[-1].code)[1] or 1))
    assert {*packs} == {1, 4, 8}
    compiled = Compiled(launches, tmp_path)
    random = np.random.default_rng(0)
    for operands, launch in zip(layouts, launches, strict=True):
        xs = [placed(each, random.standard_normal(each.shape))[0] for each in operands[:-1]]
        y, memory = placed(operands[-1])
        before = around(y, memory)
        compiled.run(launch, [*xs, y])
        x, s, b = (each.astype(np.float64) for each in xs)
        error = np.abs(y.astype(np.float64) - (x * s + b)).max()
        assert error < {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-5}[y.dtype.name], launch
        assert around(y, memory) == before


def test_one_source_serves_many_shapes_and_all_numbers(limits):
    limits(PLENTY=0)

    def code(shape, number):
        x, s = dense(shape, "float16"), dense((*shape[:2], 1, 1), "float16", "NCHW")
        made, _ = trace("f", lambda x, s, n: x * s + n, [x, s, None], {})
        return kernels.plan(Elementwise(made, (bits_of(number),)), [x, s, x]).code

    assert code((2, 64, 14, 14), 1.0) == code((2, 64, 28, 28), 2.0)
    assert code((2, 64, 14, 14), 1.0) != code((2, 64, 1, 1), 1.0)


def test_offsets_have_64_bits_where_32_are_too_few():
    most, more = ((1, 64, 1 << 12, columns) for columns in ((1 << 13) - 1, 1 << 13))  # 2**31 elements in the second one
    for shape, wide in ((most, "0"), (more, "1")):
        x, s = dense(shape, "float16"), dense((1, 64, 1, 1), "float16")
        made, _ = trace("f", lambda x, s: x * s, [x, s], {})
        launch = kernels.plan(Elementwise(made), [x, s, x])
        assert dict(launch.macros)["WIDE"] == wide
        assert launch.geometry.typecode == ("q" if wide == "1" else "i")


def test_more_arguments_than_cuda_takes_are_refused_with_the_numbers():
    def total(*xs):
        return sum(xs[1:], xs[0])

    backwards = Layout((2,) * 24, tuple(2 << axis for axis in range(24)), np.dtype(np.float16))
    straight = dense((2,) * 24, "float16", "NCHW")
    for count, fits in ((2, True), (62, False)):
        xs = [backwards, straight] * (count // 2)
        made, _ = trace("total", total, xs, {})
        if fits:
            kernels.plan(Elementwise(made), [*xs, straight])
            continue
        with pytest.raises(GraphNotSupportedError, match=r"63 operands over 24 axes .* 4,096"):
            kernels.plan(Elementwise(made), [*xs, straight])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.slow
def test_the_source_is_cuda(tmp_path):
    cases = [Case(seed) for seed in range(12)]
    for number, case in enumerate(cases):
        kernel, result = kernel_of(case)
        operands = [*case.layouts, lying(case.random, result.shape, result.dtype.name)]
        launch = kernels.plan(kernel, operands)
        file = tmp_path / f"{number}.cu"
        file.write_text(kernels.source(launch.code), encoding="utf-8")
        macros = [f"-D{name}={value}" for name, value in launch.macros]
        command = ["nvcc", "-ptx", "-arch=sm_80", "--std=c++17", *macros, str(file), "-o", str(file.with_suffix(".ptx"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + file.read_text(encoding="utf-8")
