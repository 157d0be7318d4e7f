"""Measure the graphs that cuDNN computes rightly: odd shapes and strides, plan by plan, against float64.

cuDNN accepts graphs that it computes wrongly, and graphs whose kernels end the context. Each case is built with the frontend
alone, with every operand exactly as the case describes it. Its plans run in a worker process, so that a lost context costs one
case. Then the case runs with the operands declared and copied as in `handlepool.graphs.forms`. The result is the table under
the rule of forms, ``benchmarks/results/geometries/cudnn-*.json``. By family of cases it counts the cases that were right,
wrong, ended their process ("dies"), or had no plan ("unsupported"). It lists each case that was wrong or died, so that the case
can be made again.

    python -m benchmarks.geometries --seconds 300 --workers 14 --out results.json
"""

import argparse
import json
import multiprocessing
import os
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 5e-3}
"""The allowed error, relative to the largest sum of absolute products. Wrong results exceed it by far; float32 is TF32 on
tensor cores.
"""
UNARY = ("relu", "sigmoid", "tanh", "gelu", "swish")
BINARY = ("add", "mul", "sub")
PAD = 64
"""Elements before and after each array that nothing may touch."""

# Cases. A case is plain data: the graph's kind, its parameters, and the shape and strides in elements of each operand and output.


def dense(shape, order=None):
    """Strides without gaps, the axes from the outermost to the innermost in ``order``."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return strides


def channels_last(shape):
    """Strides of an array whose axis 1 is innermost."""
    return dense(shape, (0, *range(2, len(shape)), 1))


def innermost(shape, strides):
    """The axis of the smallest stride."""
    telling = [axis for axis in range(len(shape)) if shape[axis] > 1] or [len(shape) - 1]
    return min(telling, key=lambda axis: strides[axis])


MODES = ("dense", "inner2", "padded", "outer2", "rows2", "stride0")


def place(rng, shape, layout, mode="dense", align=1):
    """Return (shape, strides) of an operand; ``layout`` is "row" or "cl", and ``mode`` selects the part of a larger array."""
    strides = dense(shape) if layout == "row" else channels_last(shape)
    inner = innermost(shape, strides)
    if mode == "inner2":
        strides = [2 * step for step in strides]
    elif mode == "padded":  # a crop along the innermost axis: a slice of channels, rows of a wider image
        extra = rng.choice((1, 3, 8)) * align
        grown = list(shape)
        grown[inner] += extra
        strides = dense(grown) if layout == "row" else channels_last(grown)
    elif mode == "outer2":
        strides[max(range(len(shape)), key=lambda axis: strides[axis] * (shape[axis] > 1))] *= 2
    elif mode == "rows2":
        order = sorted((axis for axis in range(len(shape)) if shape[axis] > 1), key=lambda axis: strides[axis])
        for axis in order[1:]:
            strides[axis] *= 2
    elif mode == "stride0":
        axis = rng.choice([axis for axis in range(len(shape)) if shape[axis] > 1] or [0])
        strides[axis] = 0
    return list(shape), strides


def extents(rng, rank):
    """Return a small shape, whose last or second axis often suits vector loads, and often does not."""
    shape = [rng.choice((1, 2, 3, 5, 8)) for _ in range(rank)]
    shape[-1] = rng.choice((1, 3, 7, 8, 16, 17, 24, 64))
    if rank > 1:
        shape[1] = rng.choice((1, 3, 5, 8, 16, 24, 32)) if rank > 2 else shape[1]
    return shape


def merged(rng, rank):
    """A canonical shape of ``rank`` axes as the frontend gets it, and its layout's axes from the outermost to the innermost."""
    sizes = [rng.choice((2, 3, 4, 7, 8, 16)) for _ in range(rank - 1)] + [rng.choice((2, 3, 7, 8, 16, 17, 24, 40, 64, 130))]
    if rank == 1:
        return [1, sizes[0], 1, 1]
    if rank == 2:
        return [sizes[0], sizes[1], 1, 1]
    if rank == 3:
        return [sizes[0], sizes[2], sizes[1], 1]
    return [sizes[0], sizes[-1], *sizes[1:-1]]


def broadcast(rng, shape, axes):
    """The shape with extent 1 along the axes."""
    return [1 if axis in axes else extent for axis, extent in enumerate(shape)]


def pointwise_case(rng):
    """Graphs of pointwise nodes alone."""
    form = rng.choice(("m1", "m2", "m2", "m3", "m3", "m4", "m4", "m5", "n2", "n3", "n4row", "n4cl", "n5row"))
    layout = "cl" if form[0] == "m" or form == "n4cl" else "row"
    shape = merged(rng, int(form[1])) if form[0] == "m" else extents(rng, int(form[1]))
    kind = rng.choice(("unary", "binary", "binary", "binary", "chain", "two"))
    count = {"unary": 1, "binary": 2, "chain": 3, "two": 2}[kind]
    modes = [rng.choices(MODES, (6, 1, 2, 1, 1, 1))[0] for _ in range(count)] if rng.random() < 0.4 else ["dense"] * count
    out_mode = rng.choices(MODES[:5], (8, 1, 2, 1, 1))[0] if rng.random() < 0.3 else "dense"
    operands, words = [], []
    for index, mode in enumerate(modes):
        axes = ()
        if index:
            telling = [axis for axis in range(len(shape)) if shape[axis] > 1]
            axes = tuple(axis for axis in telling if rng.random() < 0.5) if rng.random() < 0.8 else ()
        its = broadcast(rng, shape, axes)
        if mode != "dense" and its.count(1) >= len(its) - 1 and mode in ("outer2", "rows2"):
            mode = "dense"
        operands.append(place(rng, its, layout, mode, 1))
        if index:
            words.append("b" + "".join(map(str, axes)) + ("" if mode == "dense" else ":" + mode))
        else:
            words.append(mode)
    out = place(rng, shape, layout, out_mode)
    label = f"pointwise {kind} {form} {' '.join(words)} -> {out_mode}"
    return {
        "kind": "pointwise",
        "sub": kind,
        "op": rng.choice(UNARY if kind == "unary" else BINARY),
        "in": operands,
        "out": [out] * (2 if kind == "two" else 1),
        "label": label,
    }


EPILOGUES = ("", "b", "a", "A", "ba", "bA", "z", "za", "zA", "bz", "bza", "bzA", "s", "oa", "boa", "pa", "pb")
"""Letters of an epilogue. b: bias, z: a residual, a: relu, A: another activation, s: times a row of channels, c: plus a column;
o: the value so far is an output as well; p, at the begin: relu of the first operand before the product.
"""


def conv_case(rng):
    """A convolution with an epilogue."""
    spatial = rng.choice((2, 2, 2, 2, 2, 1, 3))
    groups = rng.choice((1, 1, 1, 2, 4, 8))
    c, k = groups * rng.choice((1, 2, 3, 4, 8, 16, 24)), groups * rng.choice((1, 2, 4, 5, 8, 16))
    n = rng.choice((1, 2, 3, 5))
    taps = [rng.choice((1, 1, 2, 3, 3, 5)) for _ in range(spatial)]
    stride, pad, dil = ([rng.choice(options) for _ in range(spatial)] for options in ((1, 1, 2, 3), (0, 0, 1, 2), (1, 1, 1, 2)))
    after = [rng.choice((0, 1, 2, 3)) for _ in range(spatial)] if rng.random() < 0.2 else pad
    cover = [(tap - 1) * d + 1 for tap, d in zip(taps, dil, strict=True)]
    both = [p + q for p, q in zip(pad, after, strict=True)]
    image = [max(rng.choice((3, 4, 7, 8, 14)), cov - margins) for cov, margins in zip(cover, both, strict=True)]
    result = [(i + margins - cov) // s + 1 for i, margins, cov, s in zip(image, both, cover, stride, strict=True)]
    xs, ws, ys = [n, c, *image], [k, c // groups, *taps], [n, k, *result]
    sub = rng.choice(("fprop", "fprop", "fprop", "fprop", "dgrad", "wgrad"))
    epilogue = rng.choice(EPILOGUES) if sub == "fprop" else ""
    lx, lw, ly = (rng.choice(("row", "cl", "cl")) for _ in range(3))
    if rng.random() < 0.6:
        lw = ly = lx
    odd = rng.random() < 0.35
    mx, mw, my = (rng.choices(MODES, (8, 1, 2, 1, 1, 1))[0] if odd else "dense" for _ in range(3))
    my = "dense" if my == "stride0" else my
    x, w, y = place(rng, xs, lx, mx), place(rng, ws, lw, mw), place(rng, ys, ly, my)
    words = {"x": f"{lx}:{mx}", "w": f"{lw}:{mw}", "y": f"{ly}:{my}"}
    extra = []
    for letter in epilogue:
        if letter in "bs":
            mode = rng.choice(("dense", "dense", "inner2", "stride0")) if odd else "dense"
            step = {"dense": 1, "inner2": 2, "stride0": 0}[mode]
            extra.append(([1, k] + [1] * spatial, [k * max(step, 1), step] + [k * max(step, 1)] * spatial))
            words[letter] = mode
        elif letter == "z":
            lz = ly if rng.random() < 0.6 else rng.choice(("row", "cl"))
            mz = rng.choices(MODES, (6, 1, 2, 1, 1, 1))[0] if odd else "dense"
            axes = rng.choice(((), (), (), (0,), (2,), (0, 1), (1,), tuple(range(spatial + 2))))
            zs = broadcast(rng, ys, axes)
            extra.append(place(rng, zs, lz, mz))
            words["z"] = f"{lz}:{mz}:b" + "".join(map(str, axes))
    operands = {"fprop": [x, w, *extra], "dgrad": [y, w], "wgrad": [x, y]}[sub]
    out = {"fprop": y, "dgrad": x, "wgrad": w}[sub]
    if 0 in out[1]:
        return conv_case(rng)
    marks = "groups " * (groups > 1) + "uneven " * (after != pad)
    label = f"conv{spatial}d {sub} {marks}+{epilogue} " + " ".join(f"{a}={b}" for a, b in sorted(words.items()))
    return {
        "kind": "conv",
        "sub": sub,
        "epilogue": epilogue,
        "activation": rng.choice(UNARY[1:]),
        "stride": stride,
        "padding": pad,
        "after": after,
        "dilation": dil,
        "in": operands,
        "out": [out] * (1 + epilogue.count("o")),
        "label": label,
    }


def matmul_case(rng):
    """A matrix product with an epilogue."""
    rank = rng.choice((2, 3, 3, 3, 4))
    batch = [rng.choice((1, 2, 3)) for _ in range(rank - 2)]
    m, k, n = (rng.choice((1, 3, 8, 16, 17, 24, 64)) for _ in range(3))
    odd = rng.random() < 0.5
    words, operands = {}, []
    for name, shape in (("A", [*batch, m, k]), ("B", [*batch, k, n])):
        axes = tuple(range(rank - 2)) if not operands and rng.random() < 0.2 else ()
        if operands and rng.random() < 0.2 and not words["A"].endswith(":b"):
            axes = tuple(range(rank - 2))
        shape = broadcast(rng, shape, axes)
        layout = rng.choice(("row", "row", "col"))
        mode = rng.choices(MODES, (6, 1, 2, 1, 1, 1))[0] if odd else "dense"
        operands.append(_matrix(rng, shape, layout, mode))
        words[name] = f"{layout}:{mode}" + (":b" if axes else "")
    epilogue = rng.choice(("", "", "b", "c", "ba", "z", "za", "bz", "a", "A", "bA", "oa", "pa"))
    shape = [*batch, m, n]
    for letter in epilogue:
        if letter in "bc":
            its = [1] * rank
            axis = rank - 1 if letter == "b" else rank - 2
            its[axis] = shape[axis]
            mode = rng.choice(("dense", "inner2", "stride0")) if odd else "dense"
            operands.append(place(rng, its, "row", mode))
            words[letter] = mode
        elif letter == "z":
            mode = rng.choices(MODES, (6, 1, 2, 1, 1, 1))[0] if odd else "dense"
            layout = rng.choice(("row", "row", "row", "col"))
            axes = tuple(range(rank - 2)) if rng.random() < 0.2 else ()
            operands.append(_matrix(rng, broadcast(rng, shape, axes), layout, mode))
            words["z"] = f"{layout}:{mode}" + (":b" if axes else "")
    layout, mode = rng.choice(("row", "row", "row", "col")), rng.choices(MODES[:5], (6, 1, 2, 1, 1))[0] if odd else "dense"
    out = _matrix(rng, shape, layout, mode)
    words["out"] = f"{layout}:{mode}"
    far = rng.random() < 0.2  # sums in the hundreds, where exp overflows
    label = f"matmul{rank} {'far ' * far}+{epilogue} " + " ".join(f"{a}={b}" for a, b in sorted(words.items()))
    return {
        "kind": "matmul",
        "scale": 30 if far else 1,
        "epilogue": epilogue,
        "activation": rng.choice(UNARY[1:]),
        "in": operands,
        "out": [out] * (1 + epilogue.count("o")),
        "label": label,
    }


def _matrix(rng, shape, layout, mode):
    if layout == "row":
        return place(rng, shape, "row", mode)
    turned = [*shape[:-2], shape[-1], shape[-2]]
    _, strides = place(rng, turned, "row", mode)
    return list(shape), [*strides[:-2], strides[-1], strides[-2]]


REDUCTIONS = ("ADD", "MAX", "MIN", "AVG", "AMAX", "NORM1", "NORM2", "MUL")


def reduction_case(rng):
    """A reduction."""
    rank = rng.choice((2, 3, 4, 4, 5))
    shape = extents(rng, rank)
    layout = rng.choice(("row", "cl"))
    mode = rng.choices(MODES, (8, 1, 2, 1, 1, 1))[0] if rng.random() < 0.4 else "dense"
    axes = tuple(axis for axis in range(rank) if rng.random() < 0.5) or (rank - 1,)
    out_layout = layout if rng.random() < 0.8 else rng.choice(("row", "cl"))
    out = place(rng, broadcast(rng, shape, axes), out_layout, "dense")
    label = f"reduction{rank} {layout}:{mode} over {axes} -> {out_layout}"
    return {
        "kind": "reduction",
        "op": rng.choice(REDUCTIONS),
        "in": [place(rng, shape, layout, mode)],
        "out": [out],
        "label": label,
    }


def as_declared(shape, strides):
    """The strides as handlepool declares them: those of axes of extent 1 as a dense array would have them."""
    from handlepool.tensors.inference import axis_order, dense_strides

    plain = dense_strides(shape, axis_order(shape, strides))
    return [int(a) if extent == 1 else b for extent, a, b in zip(shape, plain, strides, strict=True)]


MAKERS = {"pointwise": pointwise_case, "conv": conv_case, "matmul": matmul_case, "reduction": reduction_case}


def make_case(seed, kinds):
    """The case of a seed."""
    rng = random.Random(seed)
    case = MAKERS[rng.choice(kinds)](rng)
    case["dtype"] = rng.choice(("float16", "float16", "float32", "bfloat16"))
    case["seed"] = seed
    return case


# The reference, in float64


def activation(name, x):
    """As cuDNN defines it."""
    from scipy.special import erf

    return {
        "relu": lambda: np.maximum(x, 0),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "tanh": lambda: np.tanh(x),
        "gelu": lambda: x * (1 + erf(x / np.sqrt(2))) / 2,
        "swish": lambda: x / (1 + np.exp(-x)),
    }[name]()


def _taps(case, x, w, y):
    """For each tap of the filter: the view of the padded image that it meets, its index, by group."""
    spatial = len(case["stride"])
    for tap in np.ndindex(*w.shape[2:]):
        window = tuple(
            slice(t * d, t * d + s * (extent - 1) + 1, s)
            for t, d, s, extent in zip(tap, case["dilation"], case["stride"], y.shape[2:], strict=True)
        )
        yield (slice(None), slice(None), *window)[: spatial + 2], (slice(None), slice(None), *tap)


def convolve(case, x, w, y):
    """Fill in whichever of image, filters and result is None-like zeros: ``y`` for fprop, ``x`` for dgrad, ``w`` for wgrad."""
    after = case.get("after", case["padding"])
    padded = np.pad(x, [(0, 0), (0, 0), *zip(case["padding"], after, strict=True)])
    groups = x.shape[1] // w.shape[1]
    per, filters = w.shape[1], w.shape[0] // groups
    for window, tap in _taps(case, padded, w, y):
        for g in range(groups):
            cs, ks = slice(g * per, (g + 1) * per), slice(g * filters, (g + 1) * filters)
            view = padded[window][:, cs]
            if case["sub"] == "fprop":
                y[:, ks] += np.einsum("nc...,kc->nk...", view, w[tap][ks])
            elif case["sub"] == "dgrad":
                view += np.einsum("nk...,kc->nc...", y[:, ks], w[tap][ks])
            else:
                flat = [part.reshape(*part.shape[:2], -1) for part in (view, y[:, ks])]
                w[tap][ks] += np.einsum("ncp,nkp->kc", *flat)
    inner = tuple(slice(p, p + extent) for p, extent in zip(case["padding"], x.shape[2:], strict=True))
    return {"fprop": y, "dgrad": padded[(slice(None), slice(None), *inner)], "wgrad": w}[case["sub"]]


def reference(case, arrays):
    """The outputs in float64, and for each a bound of the sums that went into it."""
    shapes = [shape for shape, _ in case["out"]]
    if case["kind"] == "pointwise":
        x, *rest = arrays
        functions = {"add": np.add, "mul": np.multiply, "sub": np.subtract}
        if case["sub"] == "unary":
            results = [activation(case["op"], x)]
        elif case["sub"] == "binary":
            results = [functions[case["op"]](x, rest[0])]
        elif case["sub"] == "chain":
            results = [np.maximum(x * rest[0] + rest[1], 0)]
        else:
            results = [x + rest[0], x * rest[0]]
        return [np.broadcast_to(result, shape) for result, shape in zip(results, shapes, strict=True)], [1.0] * len(results)
    if case["kind"] == "reduction":
        (x,) = arrays
        axes = tuple(axis for axis, (a, b) in enumerate(zip(x.shape, shapes[0], strict=True)) if a != b)
        functions = {
            "ADD": np.sum,
            "MAX": np.max,
            "MIN": np.min,
            "AVG": np.mean,
            "MUL": np.prod,
            "AMAX": lambda x, **k: np.max(np.abs(x), **k),
            "NORM1": lambda x, **k: np.sum(np.abs(x), **k),
            "NORM2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
        }
        return [
            functions[case["op"]](x, axis=axes, keepdims=True)
            if axes
            else np.abs(x)
            if case["op"] in ("AMAX", "NORM1", "NORM2")
            else x
        ], [max(1.0, float(np.abs(x).sum(axis=axes).max()))]
    if case["epilogue"].startswith("p"):
        arrays = [np.maximum(arrays[0], 0), *arrays[1:]]
    if case["kind"] == "matmul":
        a, b, *rest = arrays
        y, bound = a @ b, float((np.abs(a) @ np.abs(b)).max())
    else:
        zeros = np.zeros(shapes[0])
        parts = {"fprop": (*arrays[:2], zeros), "dgrad": (zeros, arrays[1], arrays[0]), "wgrad": (arrays[0], zeros, arrays[1])}
        y = convolve(case, *parts[case["sub"]])
        absolute = [np.abs(array) for array in arrays[:2]] + [np.zeros(shapes[0])]
        parts = {
            "fprop": absolute,
            "dgrad": (absolute[2], absolute[1], absolute[0]),
            "wgrad": (absolute[0], absolute[2], absolute[1]),
        }
        bound = float(convolve(case, *parts[case["sub"]]).max())
        rest = arrays[2:]
    rest, ys = iter(rest), []
    for letter in case["epilogue"]:
        if letter in "bcz":
            y = y + next(rest)
        elif letter == "s":
            y = y * next(rest)
        elif letter == "o":
            ys.append(y)
        elif letter != "p":
            y = activation("relu" if letter == "a" else case["activation"], y)
    return [*ys, y], [max(bound, 1.0)] * (1 + len(ys))


# On the GPU


def build(case, where):
    """Return the case's graph with its plans listed, and its real tensors; ``where`` describes the device to the frontend."""
    import cudnn

    types = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16, "float32": cudnn.data_type.FLOAT}
    kind = types[case["dtype"]]
    g = cudnn.pygraph(
        **where, io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT
    )
    xs = [g.tensor(dim=shape, stride=strides, data_type=kind, name=f"x{i}") for i, (shape, strides) in enumerate(case["in"])]
    if case["kind"] == "pointwise":
        if case["sub"] == "unary":
            ys = [getattr(g, case["op"])(xs[0])]
        elif case["sub"] == "binary":
            ys = [getattr(g, case["op"])(xs[0], xs[1])]
        elif case["sub"] == "chain":
            ys = [g.relu(g.add(g.mul(xs[0], xs[1]), xs[2]))]
        else:
            ys = [g.add(xs[0], xs[1]), g.mul(xs[0], xs[1])]
    elif case["kind"] == "reduction":
        ys = [g.reduction(xs[0], mode=getattr(cudnn.reduction_mode, case["op"]))]
    else:
        first = g.relu(xs[0]) if case["epilogue"].startswith("p") else xs[0]
        if case["kind"] == "matmul":
            y = g.matmul(first, xs[1])
        else:
            how = {name: case[name] for name in ("stride", "padding", "dilation")}
            if case.get("after", case["padding"]) != case["padding"]:
                how |= {"pre_padding": how.pop("padding"), "post_padding": case["after"]}
            y = getattr(g, "conv_" + case["sub"])(first, xs[1], **how)
        rest, ys = iter(xs[2:]), []
        for letter in case["epilogue"]:
            if letter in "bc":
                y = g.bias(y, next(rest)) if case["kind"] == "conv" else g.add(y, next(rest))
            elif letter == "z":
                y = g.add(y, next(rest))
            elif letter == "s":
                y = g.mul(y, next(rest))
            elif letter == "o":
                ys.append(y)
            elif letter != "p":
                y = getattr(g, "relu" if letter == "a" else case["activation"])(y)
        ys.append(y)
    for y, (shape, strides) in zip(ys, case["out"], strict=True):
        y.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kind)
    return g, xs, ys


def declare(case, where, ruled):
    """The case's graph, its operands, and the copies that the rule asks for; without the rule as the case says."""
    if not ruled:
        g, xs, ys = build(case, where)
        return g, [*xs, *ys], ()
    from handlepool.graphs.forms import conform
    from handlepool.tensors.inference import infer

    told = {**case}
    for side in ("in", "out"):
        told[side] = [(shape, as_declared(shape, strides)) for shape, strides in case[side]]
    g, xs, ys = build(told, where)
    shapes = infer(g, ys)
    return g, [*xs, *ys], conform(g, [*xs, *ys], len(xs), shapes, lambda place: f"operand {place}")


def run_case(case, handle, most_plans, ruled):
    """Yield the outcome of each plan; a lost context ends the process."""
    import cudnn
    import cupy
    import ml_dtypes

    dtype = np.dtype(case["dtype"]) if case["dtype"] != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    try:
        g, operands, copies = declare(case, {"handle": handle}, ruled)
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        count = g.get_execution_plan_count()
    except Exception as error:
        yield -1, "unsupported", str(error)[:300]
        return
    rng = np.random.default_rng(case["seed"])
    inputs = len(case["in"])
    views = [
        _view(shape, strides, dtype, np.nan if place < inputs else 777)
        for place, (shape, strides) in enumerate(case["in"] + case["out"])
    ]
    for _, view in views[:inputs]:
        view[...] = (case.get("scale", 1) * rng.uniform(-1, 1, view.shape)).astype(dtype)
    wanted, bounds = reference(case, [view.astype(np.float64) for _, view in views[:inputs]])
    memories = [memory for memory, _ in views]
    copied = {copy.operand: copy for copy in copies}
    for place, copy in copied.items():
        memory = np.full(copy.nbytes // dtype.itemsize + 2 * PAD, 777).astype(dtype)
        if place < inputs:
            _ours(memory, copy)[...] = np.lib.stride_tricks.as_strided(views[place][1], copy.shape, copy.strides)
        memories[place] = memory
    arrays = [cupy.asarray(memory) for memory in memories]
    pack = {tensor.get_uid(): array.data.ptr + PAD * dtype.itemsize for tensor, array in zip(operands, arrays, strict=True)}
    indices = list(range(count))
    if count > most_plans:
        half = most_plans // 2
        indices = indices[:half] + random.Random(case["seed"]).sample(indices[half:], most_plans - half)
    for index in indices:
        try:
            g.build_plan_at_index(index)
            size = g.get_workspace_size_plan_at_index(index)
        except Exception as error:
            yield index, "unsupported", str(error)[:100]
            continue
        if size > 1 << 30:
            continue
        for array, memory in zip(arrays[inputs:], memories[inputs:], strict=True):
            array.set(memory)
        workspace = cupy.empty(size + 256, np.uint8)
        try:
            g.execute_plan_at_index(pack, workspace.data.ptr, index=index, handle=handle)
        except Exception as error:
            cupy.cuda.Device().synchronize()
            yield index, "refused", str(error)[:100]
            continue
        cupy.cuda.Device().synchronize()
        verdict, detail = "right", ""
        for place, (want, bound) in enumerate(zip(wanted, bounds, strict=True), inputs):
            got, memory, like = arrays[place].get(), memories[place], views[place][1]
            if place in copied:
                copy = copied[place]
                dense = _ours(got, copy)
                its = np.full(like.shape, np.nan)
                np.lib.stride_tricks.as_strided(its, copy.shape, _along(copy, like, its))[...] = dense
            else:
                its = np.lib.stride_tricks.as_strided(got[PAD:], like.shape, like.strides)
                restored = got.copy()
                np.lib.stride_tricks.as_strided(restored[PAD:], like.shape, like.strides)[...] = like
                if not np.array_equal(restored.view(np.uint8), memory.view(np.uint8)):
                    verdict, detail = "wrong", "writes outside"
                    break
            error = np.abs(its.astype(np.float64) - want)
            worst = float(np.nan_to_num(error, nan=1e30).max()) / bound
            if worst > TOLERANCE[case["dtype"]]:
                count = int((~(error <= bound * TOLERANCE[case["dtype"]])).sum())
                verdict, detail = "wrong", f"off by {worst:.2g} in {count} of {error.size}"
                break
        yield index, verdict, detail


def _view(shape, strides, dtype, fill):
    """Memory with a margin, and the view of it that an operand is."""
    memory = np.full(sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + 1 + 2 * PAD, fill).astype(dtype)
    return memory, np.lib.stride_tricks.as_strided(memory[PAD:], shape, [s * dtype.itemsize for s in strides])


def _ours(memory, copy):
    """The elements of a copy that are the operand's, in memory with a margin."""
    steps = copy.steps or [step * memory.itemsize for step in dense(copy.shape)]
    return np.lib.stride_tricks.as_strided(memory[PAD + copy.first // memory.itemsize :], copy.shape, steps)


def _along(copy, like, dense):
    """The strides in ``dense``, a contiguous array of the output's shape, of the axes of its copy."""
    by_step = {step: own for extent, step, own in zip(like.shape, like.strides, dense.strides, strict=True) if extent > 1}
    return [by_step.get(step, 0) for step in copy.strides]


def worker(pipe, most_plans, ruled):
    """Run cases until None comes. Each plan's outcome is sent at once, so that the parent knows where a process died."""
    import cudnn
    import cupy

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cupy.cuda.Device(0).use()
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, cupy.cuda.get_current_stream().ptr)
    cupy.arange(3).sum()
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        try:
            for outcome in run_case(case, handle, most_plans, ruled):
                pipe.send(outcome)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pipe.send((-2, "dies", str(error)[:100]))
            os._exit(1)
        except Exception as error:
            pipe.send((-1, "error", f"{type(error).__name__}: {error}"[:200]))
        pipe.send(None)


def family(label):
    """Return the family of a label's cases: the graph, whether an operand lies oddly, and the layouts of convolutions."""
    graph, *words = label.split()
    odd = "odd" if any(mode in label for mode in MODES[1:]) else "dense"
    if graph == "pointwise":
        repeats = "repeats" if any(word[0] == "b" and word[1:2].isdigit() for word in words) else ""
        return " ".join(filter(None, (graph, *words[:2], odd, repeats)))
    if graph.startswith("reduction"):
        return f"{graph} {odd}"
    epilogue = next(word for word in words if word[0] == "+")
    if graph.startswith("matmul"):
        return f"{graph} {'far ' * ('far' in words)}{epilogue} {odd}"
    layouts = {word[2:].partition(":")[0] for word in words if word[:2] in ("x=", "w=", "y=")}
    layout = {"row": "contiguous", "cl": "channels-last"}[layouts.pop()] if len(layouts) == 1 else "mixed"
    addend = " repeats" if any(word.startswith("z=") and not word.endswith(":b") for word in words) else ""
    return f"{graph} {words[0]} {'uneven ' * ('uneven' in words)}{epilogue} {layout} {odd}{addend}"


QUESTIONS = {
    "a residual and another activation than relu, channels-last": ("fprop", "zA", "channels-last dense"),
    "a padding that differs from side to side": ("uneven",),
    "a product and an activation, far from zero": ("matmul", "far", "A "),
    "a product, a bias and an activation": ("matmul", "+bA"),
    "a convolution, a residual and relu, channels-last": ("fprop", "za ", "channels-last dense"),
    "a convolution alone over channels-last views": ("conv", " + ", "channels-last odd"),
}
"""The forms that `handlepool.graphs.forms` separates until they are measured, and the forms that it accepts, by words of a
family's name.
"""


def answers(table):
    """For each question how many cases came out how; addends that repeat are another matter."""
    found = {}
    for question, words in QUESTIONS.items():
        counts = Counter()
        for name, counter in table.items():
            if all(word in name for word in words) and "repeats" not in name:
                counts.update(counter)
        found[question] = dict(counts)
    return found


class Results:
    """Return the outcomes by family, and the cases that were wrong or died."""

    def __init__(self):
        self.lock = threading.Lock()
        self.table = defaultdict(Counter)
        self.bad = []
        self.plans = 0

    def add(self, case, outcomes):
        """Take the outcomes of a case's plans."""
        verdicts = {verdict for _, verdict, _ in outcomes}
        worst = next((v for v in ("dies", "wrong", "error", "right") if v in verdicts), "unsupported")
        with self.lock:
            self.plans += sum(verdict in ("right", "wrong", "dies") for _, verdict, _ in outcomes)
            self.table[family(case["label"])][worst] += 1
            if worst in ("dies", "wrong", "error"):
                detail = next(d for _, v, d in outcomes if v == worst)
                plans = {v: [i for i, w, _ in outcomes if w == v] for v in sorted(verdicts)}
                self.bad.append({**case, "verdict": worst, "detail": detail, "plans": plans})

    def summary(self):
        """How many cases came out how."""
        totals = Counter()
        for counter in self.table.values():
            totals.update(counter)
        return {"plans": self.plans, **totals}


def drive(results, cases, most_plans, ruled, deadline):
    """Feed one worker at a time with cases, a new one after each death."""
    context = multiprocessing.get_context("spawn")
    process = pipe = None
    while time.time() < deadline:
        try:
            case = cases.get_nowait()
        except queue.Empty:
            break
        if process is None:
            pipe, other = context.Pipe()
            process = context.Process(target=worker, args=(other, most_plans, ruled), daemon=True)
            process.start()
            other.close()
            if not pipe.poll(120) or pipe.recv() != "ready":
                raise RuntimeError("a worker did not start")
        outcomes = []
        try:
            pipe.send(case)
            while True:
                if not pipe.poll(60):
                    outcomes.append((-3, "dies", "no answer in 60 s"))
                    raise EOFError
                outcome = pipe.recv()
                if outcome is None:
                    break
                outcomes.append(outcome)
                if outcome[1] == "dies":
                    raise EOFError
        except (EOFError, OSError):
            if not outcomes or outcomes[-1][1] != "dies":
                outcomes.append((-2, "dies", "the process ended"))
            process.kill()
            process = None
        results.add(case, outcomes)
    if process is not None:
        process.kill()


def main():
    """Measure for so many seconds, and write the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=8)
    parser.add_argument("--kinds", default=",".join(MAKERS))
    parser.add_argument("--out", type=Path, default=Path("geometries.json"))
    args = parser.parse_args()
    outcome = {"raw": Results(), "ruled": Results()}
    for results in outcome.values():
        cases: queue.Queue = queue.Queue()
        for index in range(100_000):
            cases.put(make_case(args.seed * 1_000_003 + index, args.kinds.split(",")))
        rest = (cases, args.plans, results is outcome["ruled"], time.time() + args.seconds / 2)
        threads = [threading.Thread(target=drive, args=(results, *rest)) for _ in range(args.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    import cudnn
    import cupy

    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    date = time.strftime("%Y-%m-%d")
    versions = {"cudnn": cudnn.backend_version(), "frontend": cudnn.__version__, "gpu": gpu, "date": date}
    for name, results in outcome.items():
        print(name, results.summary())
        for question, counts in answers(results.table).items():
            print(f"  {question}: {counts or 'not met'}")
    tables = {name: {k: dict(v) for k, v in sorted(results.table.items())} for name, results in outcome.items()}
    bad = {f"{name} bad": results.bad for name, results in outcome.items()}
    summaries = {f"{name} summary": results.summary() for name, results in outcome.items()}
    args.out.write_text(dump({**versions, "seed": args.seed, **summaries, **tables, **bad}))


def dump(values):
    """JSON with a line for each entry of a table."""
    parts = []
    for name, value in values.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join("  " + json.dumps(entry) for entry in value) + "\n ]" if value else "[]"
        elif isinstance(value, dict):
            text = "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
