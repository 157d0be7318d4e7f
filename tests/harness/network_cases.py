"""Kernels of normalisations and of copies with operands that lie in many ways, for the CPU and for a GPU."""

import numpy as np
from harness import network_references as reference
from harness.kernel_cases import TOLERANCE, lying, random_layout, sliced

from handlepool.drivers.kernel import Affine, Excite, Layer, Normalise, Pad, Resample, Shuffle, Squeeze
from handlepool.tensors.layout import Layout, as_dtype

TINY = 1e-5


def vector(extent, dtype, step=1):
    dtype = as_dtype(dtype)
    return Layout((extent,), (dtype.itemsize * step,), dtype)


def rows(kind, axes, x, *, weighted=False, biased=False, dtype=None, y=None):
    dtype = dtype or x.dtype.name
    extents = tuple(x.shape[axis] for axis in axes)
    parameters = [lying(extents, dtype, "NCHW")] * (weighted + biased)
    return Normalise(kind, axes, None, TINY, weighted, biased), [x, *parameters, y or x]


def groups(number, x, *, weighted=False, biased=False, dtype=None, step=1):
    parameters = [vector(x.shape[1], dtype or x.dtype.name, step)] * (weighted + biased)
    return Normalise("mean", tuple(range(2, x.ndim)), number, TINY, weighted, biased), [x, *parameters, x]


def normalisations():
    for dtype in TOLERANCE:
        for layout in ("NCHW", "NHWC"):
            x = lying((2, 16, 5, 6), dtype, layout)
            for kind in ("mean", "square", "softmax"):
                for axes in ((3,), (1,), (1, 2, 3), (2, 3)):
                    whole = kind != "softmax" and axes != (2, 3)
                    yield rows(kind, axes, x, weighted=whole, biased=kind == "mean" and whole)
            yield groups(4, x, weighted=True, biased=True)
            yield groups(16, x, biased=True)
            yield groups(1, x, weighted=True, biased=True, dtype="float32")
            if dtype == "float16":
                yield groups(2, x, weighted=True, step=3)
                yield rows("mean", (1,), sliced((2, 16, 5, 6), dtype, 2), weighted=True, y=lying((2, 16, 5, 6), dtype, layout))
                yield groups(8, lying((1, 8, 40, 20), dtype, layout), weighted=True)
                yield groups(4, sliced((2, 16, 5, 6), dtype, 3), biased=True)
        yield rows("mean", (1,), lying((7, 96), dtype, "NCHW"), weighted=True, biased=True, dtype="float32")
        yield rows("softmax", (2,), lying((2, 3, 197), dtype, "NCHW"))
        yield rows("mean", (0,), lying((300,), dtype, "NCHW"), weighted=True, biased=True)
        yield rows("square", (0, 2), lying((3, 4, 8), dtype, "NCHW"), weighted=True)
        yield rows("mean", (0,), lying((1,), dtype, "NCHW"))


def affines():
    for dtype in TOLERANCE:
        for layout in ("NCHW", "NHWC"):
            x = lying((2, 16, 5, 6), dtype, layout)
            for weighted, biased, activation in (
                (True, True, "relu"),
                (False, True, None),
                (True, False, "swish"),
                (False,) * 2 + (None,),
            ):
                for kind in (dtype, "float32"):
                    many = 2 + weighted + biased
                    yield Affine(TINY, weighted, biased, activation), [x, *[vector(16, kind)] * many, x]
            yield Affine(TINY, True), [sliced(x.shape, dtype, 2), *[vector(16, dtype, 2)] * 3, x]
            yield Affine(TINY), [lying((3, 7), dtype, "NCHW"), *[vector(7, dtype)] * 2, lying((3, 7), dtype, "NCHW")]


def copies():
    for dtype in ("float16", "float32", "int8", "int64"):
        for layout in ("NCHW", "NHWC"):
            x = lying((2, 16, 5, 6), dtype, layout)
            for mode in ("constant", "reflect", "replicate"):
                for before, shape in (
                    ((0, 0, 1, 2), (2, 16, 8, 9)),
                    ((0, 0, -1, 3), (2, 16, 5, 8)),
                    ((1, 2, 0, 0), (3, 19, 5, 6)),
                    ((0, 0, 4, 5), (2, 16, 13, 16)),
                ):
                    bits = 7 if mode == "constant" else 0
                    yield Pad(before, mode, bits), [x, lying(shape, dtype, layout)]
            for number in (2, 4, 16, 1):
                yield Shuffle(number), [x, lying(x.shape, dtype, "NHWC")]
        yield Shuffle(2), [lying((3, 8), dtype, "NCHW")] * 2
        yield Pad((2,)), [lying((5,), dtype, "NCHW"), lying((9,), dtype, "NCHW")]
        # A crop to one row or one image leaves an axis of one place, which no pack may lie along.
        yield Pad((0, 0, -1, 0)), [lying((1, 16, 3, 5), dtype, "NHWC"), lying((1, 16, 1, 5), dtype, "NHWC")]
        yield Pad((-1, 0, 0, 0)), [lying((3, 16, 2, 5), dtype, "NCHW"), lying((1, 16, 2, 5), dtype, "NCHW")]


def resamplings():
    for dtype in TOLERANCE:
        for layout in ("NCHW", "NHWC"):
            x = lying((2, 16, 5, 6), dtype, layout)
            for size in ((10, 12), (3, 7), (5, 6), (1, 13)):
                y = lying((2, 16, *size), dtype, layout)
                scale = tuple(float(np.float32(a) / np.float32(b)) for a, b in zip(x.shape[2:], size, strict=True))
                corners = tuple((a - 1) / (b - 1) if b > 1 else 0.0 for a, b in zip(x.shape[2:], size, strict=True))
                yield Resample("nearest", scale), [x, y]
                yield Resample("bilinear", scale), [x, y]
                yield Resample("bilinear", tuple(float(np.float32(each)) for each in corners), True), [x, y]
            yield Resample("bilinear", (0.5, 0.5)), [sliced((1, 3, 4, 4), dtype, 2), lying((1, 3, 8, 8), dtype, layout)]


def excitation(x, squeezed, parts, activation, gate, y=None):
    images, channels = x.shape[:2]
    dtype = x.dtype.name
    sums = lying((images, parts, channels), "float32", "NCHW")
    weights = [lying((squeezed, channels), dtype, "NCHW"), lying((channels, squeezed), dtype, "NCHW")]
    (w1, w2), b1, b2 = weights, vector(squeezed, dtype), vector(channels, dtype)
    yield Excite(gate, False, activation), [x, sums, w1, b1, w2, b2, y or x]
    hidden = lying((images, squeezed), "float32", "NCHW")
    yield Layer(activation), [x, sums, w1, b1, hidden]
    yield Excite(gate, True), [x, hidden, w2, b2, y or x]


def gatings():
    for dtype in TOLERANCE:
        for layout in ("NCHW", "NHWC"):
            x = lying((2, 16, 5, 6), dtype, layout)
            yield Squeeze(1), [x, lying((2, 1, 16), "float32", "NCHW")]
            yield Squeeze(4), [x, lying((2, 4, 16), "float32", "NCHW")]
            yield from excitation(x, 3, 4, "swish", "sigmoid")
        x = lying((1, 40, 9, 7), dtype)
        yield Squeeze(3), [x, lying((1, 3, 40), "float32", "NCHW")]
        yield from excitation(x, 10, 1, "relu", "hardsigmoid")
        yield from excitation(sliced((2, 9, 3, 4), dtype, 2), 1, 2, None, "sigmoid", lying((2, 9, 3, 4), dtype))


CASES = [*normalisations(), *affines(), *copies(), *resamplings(), *gatings()]
"""Kernels with the layouts of their operands, inputs before the output."""


def expects(shape):
    """What computes a kernel's result of a shape in float64."""

    def expected_of(kernel, xs):
        x, *parameters = xs
        if isinstance(kernel, (Normalise, Affine)):
            rest = [*parameters]
            fixed = [rest.pop(0), rest.pop(0)] if isinstance(kernel, Affine) else []
            weight = rest.pop(0) if kernel.weighted else None
            bias = rest.pop(0) if kernel.biased else None
            with np.errstate(invalid="ignore"):
                if fixed:
                    return reference.batch_norm(x, *fixed, weight, bias, kernel.eps, kernel.activation)
                if kernel.groups:
                    return reference.group_norm(x, kernel.groups, weight, bias, kernel.eps)
                if kernel.kind == "softmax":
                    return reference.softmax(x, kernel.axes)
                if kernel.kind == "square":
                    return reference.rms_norm(x, kernel.axes, weight, kernel.eps)
                return reference.layer_norm(x, kernel.axes, weight, bias, kernel.eps)
        if isinstance(kernel, Squeeze):
            pixels = x.astype(np.float64).reshape(*x.shape[:2], -1)
            each = -(-pixels.shape[2] // kernel.parts)
            parts = [pixels[:, :, part * each : (part + 1) * each].sum(2) for part in range(kernel.parts)]
            return np.stack(parts, 1)
        if isinstance(kernel, (Excite, Layer)):
            given, *layers = (each.astype(np.float64) for each in parameters)
            means = given.sum(1) / np.prod(x.shape[2:]) if given.ndim == 3 else None
            hidden = given if means is None else reference.layer(means, *layers[:2], kernel.activation)
            return hidden if isinstance(kernel, Layer) else reference.excited(x, hidden, *layers[-2:], kernel.gate)
        if isinstance(kernel, Shuffle):
            return reference.channel_shuffle(x, kernel.groups).astype(np.float64)
        if isinstance(kernel, Pad):
            axes = [*zip(kernel.before, x.shape, shape, strict=True)]
            widths = [width for before, extent, whole in reversed(axes) for width in (before, whole - extent - before)]
            value = np.frombuffer(kernel.bits.to_bytes(8, "little")[: x.itemsize], x.dtype)[0]
            return reference.pad(x, widths, kernel.mode, value).astype(np.float64)
        factors = [1 / scale if scale else 1 for scale in kernel.scale]
        if kernel.corners:
            return reference.interpolate2d(x, shape[2:], None, kernel.mode, True)
        found = reference.interpolate2d(x, shape[2:], None, kernel.mode)
        assert factors
        return found

    return expected_of


def random_case(seed):
    """A kernel and its operands."""
    random = np.random.default_rng(seed)
    dtype = str(random.choice([*TOLERANCE]))

    def lies(shape, kind=dtype):
        return random_layout(random, [int(extent) for extent in shape], kind)

    shape = [int(random.choice([1, 2, 3, 5, 8, 16, 24, 70])) for _ in range(random.integers(2, 5))]
    weighted, biased = map(bool, random.integers(0, 2, 2))
    parameters = str(random.choice([dtype, "float32"]))
    which = random.integers(5)
    if which == 0:
        axes = tuple(sorted(map(int, random.choice(len(shape), random.integers(1, len(shape) + 1), replace=False))))
        kind = str(random.choice(["mean", "square", "softmax"]))
        weighted, biased = (weighted and kind != "softmax"), (biased and kind == "mean")
        extents = [shape[axis] for axis in axes]
        return Normalise(kind, axes, None, TINY, weighted, biased), [
            lies(shape),
            *(lies(extents, parameters) for _ in range(weighted + biased)),
            lies(shape),
        ]
    vectors = [lies(shape[1:2], parameters) for _ in range(4)]
    if which == 1:
        number = int(random.choice([each for each in range(1, shape[1] + 1) if shape[1] % each == 0]))
        kernel = Normalise("mean", tuple(range(2, len(shape))), number, TINY, weighted, biased)
        return kernel, [lies(shape), *vectors[: weighted + biased], lies(shape)]
    if which == 2:
        kernel = Affine(TINY, weighted, biased, [None, "relu", "gelu"][random.integers(3)])
        return kernel, [lies(shape), *vectors[: 2 + weighted + biased], lies(shape)]
    if which == 3:
        mode = str(random.choice(["constant", "reflect", "replicate"]))
        most = [max(extent - 1, 0) if mode == "reflect" else 4 for extent in shape]
        before, behind = ([int(random.integers(0, min(each, 4) + 1)) for each in most] for _ in range(2))
        return Pad(tuple(before), mode), [lies(shape), lies([sum(each) for each in zip(before, shape, behind, strict=True)])]
    shape = (shape * 2)[:4]
    size = [int(random.integers(1, 12)) for _ in range(2)]
    scale = tuple(float(np.float32(a) / np.float32(b)) for a, b in zip(shape[2:], size, strict=True))
    return Resample(str(random.choice(["nearest", "bilinear"])), scale), [lies(shape), lies([*shape[:2], *size])]
