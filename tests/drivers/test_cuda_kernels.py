"""The CUDA kernels' source and geometry, run on the CPU and compared with float64; what only a GPU shows is in tests/gpu."""

import numpy as np
import pytest
from harness.kernels_on_cpu import COMPILER, Compiled, placed

from handlepool.drivers.cuda import kernels
from handlepool.drivers.kernel import Add, Concat, Windows
from handlepool.tensors.layout import ArraySpec, Layout
from handlepool.testing import reference

TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}


def lying(shape, dtype, layout="NHWC"):
    return Layout.of(ArraySpec(shape, dtype, layout))


def sliced(shape, dtype, of=1, first=0):
    """A slice of channels of a channels-last array of so many times as many."""
    whole = lying((shape[0], shape[1] * of, *shape[2:]), dtype)
    return Layout(shape, whole.strides, whole.dtype)


def additions():
    for dtype in TOLERANCE:
        alike = lying((2, 8, 5, 7), dtype)
        yield Add("relu"), [lying((3, 7, 5, 5), dtype, "NCHW")] * 3  # with a tail
        if dtype != "float16":
            continue
        for count, activation in ((1, None), (2, "sigmoid"), (3, "gelu"), (2, "tanh"), (4, "swish"), (9, None)):
            yield Add(activation), [alike] * (count + 1)
        yield Add(), [lying((2, 8, 5, 7), dtype, "NCHW"), alike, alike]
        yield Add(), [sliced((2, 8, 5, 7), dtype, 2), alike, sliced((2, 8, 5, 7), dtype, 3)]
        yield Add(), [lying((), dtype)] * 2
        yield Add(), [Layout((4, 6), (0, alike.dtype.itemsize), alike.dtype), lying((4, 6), dtype, "NCHW")]
        yield Add(), [lying((40_000,), dtype)] * 3
        yield Add(), [lying((2, 1, 3, 1, 2, 3, 2), dtype, "NCHW"), lying((2, 1, 3, 1, 2, 3, 2), dtype)]


def concatenations():
    for dtype in ("float16", "int8"):
        for channels in ((8, 16), (3, 5, 8), (1,), (2,) * 20):
            for layout in ("NCHW", "NHWC"):
                xs = [lying((2, each, 3, 4), dtype, layout) for each in channels]
                yield Concat(1), [*xs, lying((2, sum(channels), 3, 4), dtype, layout)]
        yield Concat(1), [lying((2, 8, 3, 4), dtype, "NCHW"), lying((2, 8, 3, 4), dtype), lying((2, 16, 3, 4), dtype)]
        yield Concat(2), [lying((2, 8, 1, 4), dtype), lying((2, 8, 5, 4), dtype), lying((2, 8, 6, 4), dtype)]
        yield Concat(0), [sliced((2, 8, 3, 4), dtype, 2), lying((1, 8, 3, 4), dtype), lying((3, 8, 3, 4), dtype)]
        yield Concat(1), [lying((1, 16, 3, 4), dtype)] * 2 + [sliced((1, 32, 3, 4), dtype, 2)]
        yield Concat(0), [lying((30_000,), dtype)] * 3 + [lying((90_000,), dtype)]


def poolings():
    for kind in ("max", "mean"):
        for dtype in TOLERANCE:
            for window, stride, padding in [
                ((3, 3), (1, 1), (1, 1)),
                ((3, 3), (2, 2), (0, 1)),
                ((6, 7), (1, 2), (3, 2)),
                ((1, 1), (2, 10**6), (0, 0)),
            ][: 4 if dtype == "float16" else 1]:
                kernel = Windows(kind, window, stride, padding, counted=window != (3, 3))
                for channels in (16, 3):
                    for layout in ("NCHW", "NHWC"):
                        x = lying((2, channels, 9, 8), dtype, layout)
                        yield kernel, [x, lying((2, channels, *kernel.count(9, 8)), dtype, layout)]
            if dtype == "float32":
                continue
            kernel = Windows(kind, (3, 3), (2, 2), (1, 1))
            yield kernel, [sliced((2, 8, 9, 8), dtype, 2), sliced((2, 8, 5, 4), dtype, 3)]
            yield kernel, [lying((2, 8, 9, 8), dtype, "NCHW"), lying((2, 8, 5, 4), dtype)]
            for layout in ("NCHW", "NHWC"):
                for shape in ((2, 40, 7, 7), (1, 3, 1, 9), (1, 70, 12, 11)):
                    kernel = Windows(kind, shape[2:])
                    yield kernel, [lying(shape, dtype, layout), lying((*shape[:2], 1, 1), dtype, layout)]


def result_of(kernel, xs):
    if isinstance(kernel, Add):
        total = np.sum([x.astype(np.float64) for x in xs], 0)
        return total if kernel.activation is None else reference.ACTIVATIONS[kernel.activation](total)
    if isinstance(kernel, Concat):
        return np.concatenate(xs, kernel.axis).astype(np.float64)
    options = {"stride": kernel.stride, "padding": kernel.padding}
    if kernel.kind == "max":
        return reference.max_pool2d(xs[0], kernel.window, **options)
    return reference.avg_pool2d(xs[0], kernel.window, **options, count_include_pad=kernel.counted)


CASES = [*additions(), *concatenations(), *poolings()]


def widened(launch, kernel, operands, monkeypatch):
    """The same launch with offsets of 64 bits."""
    with monkeypatch.context() as patch:
        plain = kernels._launch
        patch.setattr(kernels, "_launch", lambda *args, wide=False, **options: plain(*args, wide=True, **options))
        return kernels.plan(kernel, operands)


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile the kernels with")
def test_each_variant_computes_the_reference_and_writes_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("ml_dtypes")
    launches = [kernels.plan(*case) for case in CASES]
    wide = {n: widened(launches[n], *CASES[n], monkeypatch) for n in range(0, len(CASES), 7)}
    compiled = Compiled([*launches, *wide.values()], tmp_path)
    random = np.random.default_rng(0)
    for n, (kernel, operands) in enumerate(CASES):
        for launch in (launches[n], *([wide[n]] if n in wide else [])):
            xs = [placed(at, (random.standard_normal(at.shape) * 9).astype(at.dtype))[0] for at in operands[:-1]]
            y, memory = placed(operands[-1])
            before, inside = memory.copy(), np.zeros(memory.shape, bool)
            at = np.lib.stride_tricks.as_strided
            first = (y.__array_interface__["data"][0] - memory.ctypes.data) // y.dtype.itemsize
            at(inside[first:], y.shape, [step // y.dtype.itemsize for step in y.strides])[...] = True
            compiled.run(launch, [*xs, y])
            expected = result_of(kernel, xs)
            what = f"{kernel} over {', '.join(map(str, operands))} by {launch}"
            assert reference.relative_error(y.astype(np.float64), expected) < TOLERANCE.get(y.dtype.name, 1e-9), what
            assert before[~inside].tobytes() == memory[~inside].tobytes(), what
