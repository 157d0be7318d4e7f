"""Kernels of our own with operands that lie in many ways, and what they compute of them in float64: for the CPU and for a GPU."""

import numpy as np

from handlepool.drivers.kernel import MOST_TAPS, Add, Concat, Depthwise, Windows
from handlepool.tensors.layout import ArraySpec, Layout, as_dtype
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
        for count, activation in (
            (1, None),
            (2, "sigmoid"),
            (3, "gelu"),
            (2, "tanh"),
            (4, "swish"),
            (2, "hardsigmoid"),
            (3, "hardswish"),
            (9, None),
        ):
            yield Add(activation), [alike] * (count + 1)
        yield Add(), [lying((2, 8, 5, 7), dtype, "NCHW"), alike, alike]
        yield Add(), [sliced((2, 8, 5, 7), dtype, 2), alike, sliced((2, 8, 5, 7), dtype, 3)]
        yield Add(), [lying((), dtype)] * 2
        yield Add(), [Layout((4, 6), (0, alike.dtype.itemsize), alike.dtype), lying((4, 6), dtype, "NCHW")]
        yield Add(), [lying((40_000,), dtype)] * 3
        yield from ((Add(), [each]) for each in (alike, lying((3, 7, 5, 5), dtype, "NCHW"), sliced((2, 8, 5, 7), dtype, 2)))
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
            if kind == "max" and dtype == "float32":
                continue
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
            for stride, padding in [((2, 3), (1, 0)), ((3, 3), (1, 1))][: 2 if dtype == "float16" else 0]:
                kernel = Windows(kind, (3, 2), stride, padding, ceiling=True)
                for layout in ("NCHW", "NHWC"):
                    x = lying((2, 16, 8, 9), dtype, layout)
                    yield kernel, [x, lying((2, 16, *kernel.count(8, 9)), dtype, layout)]
            if dtype == "float32":
                continue
            kernel = Windows(kind, (3, 3), (2, 2), (1, 1))
            yield kernel, [sliced((2, 8, 9, 8), dtype, 2), sliced((2, 8, 5, 4), dtype, 3)]
            yield kernel, [lying((2, 8, 9, 8), dtype, "NCHW"), lying((2, 8, 5, 4), dtype)]
            for layout in ("NCHW", "NHWC"):
                for shape in ((1, 3, 1, 9), (1, 72, 12, 11), (2, 40, 7, 7))[: 3 if kind == "max" else 2]:
                    kernel = Windows(kind, shape[2:])
                    yield kernel, [lying(shape, dtype, layout), lying((*shape[:2], 1, 1), dtype, layout)]


def depthwise_operands(kernel, x, taps, biases, layout=None):
    """The operands of a depthwise convolution: as many zeros behind the images as before them."""
    axes = zip(x.shape[2:], kernel.padding, taps, kernel.dilation, kernel.stride, strict=True)
    counts = [(extent + 2 * pad - (count - 1) * apart - 1) // step + 1 for extent, pad, count, apart, step in axes]
    w, shape = lying((x.shape[1], 1, *taps), x.dtype.name), (*x.shape[:2], *counts)
    bias = Layout((x.shape[1],), (biases * x.dtype.itemsize,), x.dtype)
    return [x, w, *([bias] if biases else []), layout(shape) if layout else lying(shape, x.dtype.name)]


def depthwise():
    for dtype in TOLERANCE:
        few = 1 if dtype != "float16" else None
        for taps, kernel in [
            ((3, 3), Depthwise((1, 1), (1, 1), (1, 1), "relu")),
            ((5, 5), Depthwise((2, 2), (2, 2), (1, 1), "swish")),
            ((2, 3), Depthwise((1, 3), (0, 4), (3, 2), None)),
            ((1, 1), Depthwise((10**6, 1), (0, 0), (1, 1), "gelu")),
            ((7, 7), Depthwise((1, 1), (3, 3), (1, 1), "tanh")),
            ((3, 3), Depthwise((1, 1), (1, 1), (1, 1), "hardswish")),
        ][:few]:
            for place, (channels, layout) in enumerate([(16, "NHWC"), (3, "NCHW"), (72, "NHWC"), (7, "NHWC")][:few]):
                x = lying((2, channels, 9, 8), dtype, layout)
                yield kernel, depthwise_operands(kernel, x, taps, place % 3, lambda s, d=dtype, o=layout: lying(s, d, o))
        x, w, y = depthwise_operands(Depthwise(), lying((2, 16, 9, 8), dtype), (3, 3), 0)
        yield Depthwise(), [x, Layout(w.shape, (0, *w.strides[1:]), w.dtype), y]
        kernel = Depthwise((1, 1), (1, 1), (1, 1), "sigmoid")
        views = depthwise_operands(kernel, sliced((1, 24, 6, 5), dtype, 2), (3, 3), 1, lambda s, d=dtype: sliced(s, d, 3))
        yield kernel, views


def expected_of(kernel, xs):
    """What the kernel is to compute of NumPy's arrays, in float64."""
    if isinstance(kernel, Add):
        total = np.sum([x.astype(np.float64) for x in xs], 0) if xs else np.zeros(())
        return total if kernel.activation is None else reference.ACTIVATIONS[kernel.activation](total)
    if isinstance(kernel, Concat):
        return np.concatenate(xs, kernel.axis).astype(np.float64)
    options = {"stride": kernel.stride, "padding": kernel.padding}
    if isinstance(kernel, Depthwise):
        x, w, *bias = xs
        options |= {"dilation": kernel.dilation, "groups": x.shape[1], "activation": kernel.activation}
        return reference.conv2d(x, w, **options, bias=bias[0] if bias else None)
    options["ceil_mode"] = kernel.ceiling
    if kernel.kind == "max":
        return reference.max_pool2d(xs[0], kernel.window, **options)
    return reference.avg_pool2d(xs[0], kernel.window, **options, count_include_pad=kernel.counted)


CASES = [*additions(), *concatenations(), *poolings(), *depthwise()]
"""Kernels with the layouts of their operands, inputs before the output."""


def random_layout(random, shape, dtype):
    """Contiguous or channels-last or in any order of the axes, dense or a view of a larger array."""
    order = [range(len(shape)), (0, *range(2, len(shape)), 1)[: len(shape)], random.permutation(len(shape))][random.integers(3)]
    strides, step = [0] * len(shape), np.dtype(as_dtype(dtype)).itemsize
    for axis in reversed([*order]):
        strides[axis] = step * int(random.choice([1, 1, 1, 1, 1, 2]))
        step = strides[axis] * (shape[axis] + int(random.choice([0, 0, 0, 0, 1, 8])))
    return Layout(tuple(shape), tuple(strides), as_dtype(dtype))


def random_case(seed):
    """A kernel and its operands."""
    random = np.random.default_rng(seed)
    dtype = str(random.choice([*TOLERANCE]))

    def extents(rank):
        return [int(random.choice([1, 2, 3, 5, 8, 16, 24])) for _ in range(rank)]

    def lies(shape):
        return random_layout(random, [int(extent) for extent in shape], dtype)

    kind = random.integers(4)
    if kind == 0:
        shape = extents(random.integers(0, 5))
        activation = [None, "relu", *reference.ACTIVATIONS][random.integers(7)]
        return Add(activation), [lies(shape) for _ in range(random.integers(2, 7))]
    if kind == 1:
        shape = extents(random.integers(1, 5))
        axis = int(random.integers(len(shape)))
        parts = [[*shape[:axis], int(random.integers(1, 20)), *shape[axis + 1 :]] for _ in range(random.integers(1, 7))]
        whole = [*shape[:axis], sum(part[axis] for part in parts), *shape[axis + 1 :]]
        return Concat(axis), [*map(lies, parts), lies(whole)]
    window, stride = ([int(random.integers(1, 8)) for _ in range(2)] for _ in range(2))
    padding = [int(random.integers(0, extent // 2 + 1)) for extent in window]
    if kind == 2:
        taps, step, pad, apart = (tuple(map(int, random.integers(low, 6, 2))) for low in (1, 1, 0, 1))
        kernel = Depthwise(step, pad, apart, [None, "relu", *reference.ACTIVATIONS][random.integers(7)])
        least = [max((count - 1) * d + 1 - 2 * p, 1) for count, d, p in zip(taps, apart, pad, strict=True)]
        x = lies([*extents(2), *(each + int(random.integers(0, 9)) for each in least)])
        assert taps[0] * taps[1] <= MOST_TAPS
        return kernel, depthwise_operands(kernel, x, taps, int(random.integers(3)), lies)
    kind, counted, ceiling = str(random.choice(["max", "mean"])), bool(random.integers(2)), bool(random.integers(2))
    kernel = Windows(kind, tuple(window), tuple(stride), tuple(padding), counted, ceiling)
    shape = [*extents(2), *(max(w - 2 * p, 1) + int(random.integers(0, 9)) for w, p in zip(window, padding, strict=True))]
    if random.integers(4) == 0:
        kernel = Windows(kernel.kind, tuple(shape[2:]))
    return kernel, [lies(shape), lies((*shape[:2], *kernel.count(*shape[2:])))]


def placed(layout, values=None, margin=64):
    """An array that lies so, at a multiple of 16 bytes, in memory that is NaN, and that memory."""
    itemsize = layout.dtype.itemsize
    memory = np.full(layout.reach // itemsize + 2 * margin + 16, np.nan if layout.dtype.kind in "fV" else 119, layout.dtype)
    first = margin + -(memory.ctypes.data + margin * itemsize) % 16 // itemsize
    array = np.lib.stride_tricks.as_strided(memory[first:], layout.shape, layout.strides)
    if values is not None:
        array[...] = values
    return array, memory


def filled(layout, seed=0):
    """An array that lies so, of random values, in memory that is NaN, and that memory."""
    return placed(layout, (np.random.default_rng(seed).standard_normal(layout.shape) * 9).astype(layout.dtype))


def check(kernel, operands, run, what="", expects=expected_of):
    """Raise unless ``run(arrays, memories)``, of NumPy's arrays and the memory around each, leaves there what is to be.

    ``expects(kernel, arrays)`` computes that in float64.
    """
    made = [*(filled(layout, place) for place, layout in enumerate(operands[:-1])), placed(operands[-1])]
    arrays, memories = [array for array, _ in made], [memory for _, memory in made]
    spread = max(getattr(kernel, "dilation", (1, 1))) > 1  # the reference has zeros between the taps, which make NaN of it
    if arrays[0].ndim > 2 and arrays[0].dtype.kind in "fV" and not spread:  # the last element
        arrays[0][(-1,) * arrays[0].ndim] = np.nan
    y, memory = made[-1]
    inside, before = np.zeros(memory.shape, bool), memory.copy()
    first, steps = (
        (y.__array_interface__["data"][0] - memory.ctypes.data) // y.itemsize,
        [step // y.itemsize for step in y.strides],
    )
    np.lib.stride_tricks.as_strided(inside[first:], y.shape, steps)[...] = True
    run(arrays, memories)
    what = f"{kernel} over {', '.join(map(str, operands))} {what}"
    found, expected = y.astype(np.float64), np.broadcast_to(expects(kernel, arrays[:-1]), y.shape)
    assert np.array_equal(np.isnan(found), np.isnan(expected)), what
    found, expected = np.nan_to_num(found), np.nan_to_num(expected)
    error = np.linalg.norm(found - expected) / max(
        np.linalg.norm(expected), 1e-3
    )  # gelu leaves nothing of what is far below zero
    assert error < TOLERANCE.get(y.dtype.name, 1e-9), f"{what}: {error}"
    assert before[~inside].tobytes() == memory[~inside].tobytes(), what
