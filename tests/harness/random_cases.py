"""Random calls of graph functions and ready-made operations, each from a seed, with what they must give in float64.

A case says how its arrays lie and how it is called. Most are likely ones: contiguous or channels-last arrays, new outputs. The
others have crops, steps, strides of 0 and below, layouts that differ, and an ``out=`` of any layout or over an input.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from scipy import special

import handlepool
from handlepool import ops

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 5e-3}
"""Of the largest sum of absolute products; float32 may be TF32 on tensor cores. What is wrong is wrong by much more."""
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "gelu": lambda x: x * special.ndtr(x),
    "swish": lambda x: x * special.expit(x),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
WAYS = {"call": 40, "branch": 15, "map": 15, "task": 10, "record": 20}
PAD = 64
"""Elements before and after each array, which nothing may touch; a multiple of 16 bytes in every type."""
MOST = 1 << 13
"""Elements of an array, about."""

Values = list[np.ndarray]
Expected = Callable[[Values], tuple[Values, float]]
"""Outputs in float64, and the largest sum of absolute products that went into one."""


# The functions that are called


@handlepool.graph
def unary(g, x, *, kind):
    return getattr(g, kind)(x)


@handlepool.graph
def binary(g, x, y, *, kind):
    return getattr(g, kind)(x, y)


@handlepool.graph
def chain(g, x, y, z):
    return g.relu(g.add(g.mul(x, y), z))


@handlepool.graph
def two(g, x, y):
    return g.add(x, y), g.mul(x, y)


@handlepool.graph
def fprop(g, x, w, *rest, epilogue, activation, **geometry):
    return _finish(g, g.conv_fprop(x, w, **_lists(geometry)), rest, epilogue, activation)


@handlepool.graph
def dgrad(g, dy, w, *, shape, **geometry):
    return g.conv_dgrad(dy, w, **_lists(geometry)).set_dim(list(shape))


@handlepool.graph
def wgrad(g, x, dy, *, shape, **geometry):
    return g.conv_wgrad(x, dy, **_lists(geometry)).set_dim(list(shape))


@handlepool.graph
def matmul(g, a, b, *rest, epilogue, activation):
    return _finish(g, g.matmul(a, b), rest, epilogue, activation)


def _lists(geometry):
    return {name: list(value) for name, value in geometry.items()}


def _finish(g, y, rest, epilogue, activation):
    """Add the nodes of an epilogue: b, c, z: a bias along one axis, another axis, a residual; s: a scale; a: the activation."""
    arrays = iter(rest)
    for letter in epilogue:
        if letter == "a":
            y = getattr(g, activation)(y)
        elif letter == "s":
            y = g.mul(y, next(arrays))
        elif letter == "b":
            y = g.bias(y, next(arrays))
        else:
            y = g.add(y, next(arrays))
    return y


def _finished(y, bound, rest, epilogue, activation):
    """The same in float64."""
    arrays = iter(rest)
    for letter in epilogue:
        if letter == "a":
            y = ACTIVATIONS[activation](y)
        elif letter == "s":
            y = y * next(arrays)
        else:
            y, bound = y + next(arrays), bound + 1
    return [y], max(bound, 1.0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (unary, binary, chain, two, fprop, dgrad, wgrad, matmul)
}
FUNCTIONS |= {"ops.matmul": ops.matmul, "linear": ops.linear}
FUNCTIONS |= {name: getattr(ops, name) for name in ("conv2d", "conv2d_input_grad", "conv2d_weight_grad", *ops.ACTIVATIONS)}
"""What cases call, by name; here a test can plant a fault."""


# Cases


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies: in which buffer, from which element of it on, with which strides in elements."""

    buffer: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The first element of the buffer that it touches, and the one after the last."""
        steps = [(extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True)]
        return self.first + sum(min(step, 0) for step in steps), self.first + sum(max(step, 0) for step in steps) + 1

    def __str__(self) -> str:
        return f"{self.shape}/{self.strides} at {self.first} of {self.buffer}"


@dataclass(frozen=True, slots=True)
class Round:
    """The arrays of one call; ``outs`` is empty where outputs are new."""

    inputs: tuple[Place, ...]
    outs: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """What is called, and what with.

    Attributes
    ----------
    function : str
        In `FUNCTIONS`.
    inputs, outputs : tuple of shape
    expected : callable
        See `Expected`.
    options : dict
        Keywords that are no arrays.
    static : tuple
        Positional arguments after the arrays.
    names : tuple of str
        Of the last arrays, where those are passed as keywords.
    """

    function: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    expected: Expected
    options: dict[str, Any]
    static: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A call, or several of one geometry, one after the other.

    Attributes
    ----------
    way : str
        In `WAYS`.
    own : bool
        Whether a stream of the caller's own is current, and not the null stream.
    update : bool
        Whether a program's inputs are changed before its last replay.
    plain : bool
        Whether all arrays are contiguous, or all channels-last, and nothing else is odd.
    """

    seed: int
    operation: Operation
    dtype: str
    rounds: tuple[Round, ...]
    way: str
    own: bool
    update: bool
    plain: bool

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.operation.options.items())
        lines = [f"seed {self.seed}: {self.operation.function}{self.operation.static}{options}, {self.dtype}, by {self.way}"]
        lines[0] += ", own stream" * self.own + ", updated" * self.update
        for number, arrays in enumerate(self.rounds, 1):
            outs = " -> " + "; ".join(map(str, arrays.outs)) if arrays.outs else ""
            lines.append(f"  round {number}: " + "; ".join(map(str, arrays.inputs)) + outs)
        return "\n".join(lines)


def make_case(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    style = rng.choices(("plain", "mixed", "odd"), (50, 17, 33))[0]
    target = rng.choices(("new", "given", "alias"), (60, 28, 12))[0]
    operation = rng.choices(list(MAKERS), list(MAKERS.values()))[0](rng, target == "alias")
    order = rng.choice(("row", "last"))
    inputs = tuple(_lay(rng, shape, order, style, index) for index, shape in enumerate(operation.inputs))
    if len(inputs) > 1 and inputs[0].shape == inputs[1].shape and rng.random() < 0.1:
        inputs = (inputs[0], replace(inputs[0]), *inputs[2:])
    plain = style == "plain" and target == "new"
    outs: tuple[Place, ...] = ()
    apart = outs
    if target != "new":
        apart = tuple(
            _lay(rng, shape, order, style, len(inputs) + index, out=True) for index, shape in enumerate(operation.outputs)
        )
        outs = apart
    if target == "alias":
        outs = tuple(_over(rng, place, inputs) if not i or rng.random() < 0.3 else place for i, place in enumerate(apart))
        # The same strides in memory of its own lead to the same plan: what a first call may do, the next one may not.
        apart = tuple(replace(place, buffer=len(inputs) + i, first=_first(place)) for i, place in enumerate(outs))
    twisted = Round(inputs, outs)
    if rng.random() < 0.03:
        twisted, plain = _misaligned(rng, twisted), False
    odd = target == "alias" or twisted.inputs != inputs
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    rounds: tuple[Round, ...] = (twisted,)
    if rng.random() < 0.5 and way != "record":
        rounds = (Round(inputs, apart) if odd else twisted, twisted)
    own, update = rng.random() < 0.5, target != "alias" and rng.random() < 0.5
    dtype = rng.choice(("float16", "float16", "bfloat16", "float32"))
    return Case(seed, operation, dtype, rounds, way, own, way == "record" and update, plain)


def _misaligned(rng: random.Random, arrays: Round) -> Round:
    places = [*arrays.inputs, *arrays.outs]
    index = rng.randrange(len(places))
    places[index] = replace(places[index], first=places[index].first + rng.randrange(1, 8))
    return Round(tuple(places[: len(arrays.inputs)]), tuple(places[len(arrays.inputs) :]))


# Layouts


def dense(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides without gaps, the axes from the outermost to the innermost in ``order``."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return strides


ODD = {"rows": 3, "crop": 3, "channels": 3, "step": 3, "zero": 2, "negative": 1}


def _lay(rng: random.Random, shape: tuple[int, ...], order: str, style: str, buffer: int, out: bool = False) -> Place:
    """An array in a buffer of its own, the first element at a multiple of 16 bytes."""
    rank = len(shape)
    if style != "plain" and rng.random() < 0.5:
        order = rng.choice(("row", "last", "any"))
    axes = list(range(rank))
    if order == "last" and rank > 2:
        axes = [0, *range(2, rank), 1]
    elif order == "any":
        rng.shuffle(axes)
    what = None
    if style == "odd" and rng.random() < 0.6:
        what = rng.choices(list(ODD), list(ODD.values()))[0]
    if out and what == "zero" and rng.random() < 0.8:  # an out= that overlaps itself, now and then
        what = "rows"
    wide = [axis for axis in range(rank) if shape[axis] > 1] or [0]
    grown = list(shape)
    if what == "rows":
        grown[axes[-1]] += rng.choice((1, 3, 8, 16))
    elif what == "crop":
        for axis in wide:
            grown[axis] += rng.choice((0, 1, 2, 8))
    elif what == "channels":
        grown[min(1, rank - 1)] += rng.choice((1, 8, 16, 32))
    strides = dense(grown, axes)
    axis = rng.choice(wide)
    if what == "step":
        strides[axis] *= rng.choice((2, 2, 3))
    elif what == "zero":
        strides[axis] = 0
    elif what == "negative":
        strides[axis] *= -1
    place = Place(buffer, 0, shape, tuple(strides))
    return replace(place, first=_first(place))


def _first(place: Place) -> int:
    """The first element's place in a buffer that has room before it: a multiple of 8, so of 16 bytes in every type."""
    below = replace(place, first=0).span[0]
    return PAD - below // 8 * 8


def _over(rng: random.Random, out: Place, inputs: Sequence[Place]) -> Place:
    """An output over an input: the same array, a transposed view of it, or memory that overlaps."""
    source = rng.choice(inputs)
    if source.shape == out.shape and rng.random() < 0.7:
        alike = [(a, b) for b in range(len(out.shape)) for a in range(b) if out.shape[a] == out.shape[b] > 1]
        if alike and rng.random() < 0.4:
            a, b = rng.choice(alike)
            strides = list(source.strides)
            strides[a], strides[b] = strides[b], strides[a]
            return replace(source, strides=tuple(strides))
        return source
    low, high = source.span
    shift = rng.choice((0, 8, -8, (high - low) // 2 // 8 * 8, (high - low - 1) // 8 * 8))
    return replace(out, buffer=source.buffer, first=max(source.first + shift, _first(out)))


# Makers of operations


def _shape(rng: random.Random, rank: int, alike: bool = False) -> tuple[int, ...]:
    """A small shape; the last or the second axis is often what vector loads like."""
    if alike:
        return (rng.choice((2, 3, 4, 8)),) * rank
    shape = [rng.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(rank)]
    shape[-1] = rng.choice((1, 3, 7, 8, 16, 17, 24, 32, 64))
    if rank > 2:
        shape[1] = rng.choice((1, 3, 5, 8, 16, 24, 32))
    while math.prod(shape) > MOST:
        axis = shape.index(max(shape))
        shape[axis] = (shape[axis] + 1) // 2
    return tuple(shape)


def _spread(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an operand that broadcasts to this one."""
    rank = len(shape)
    kept = rng.choices(
        (range(rank), (rank - 1,), (min(1, rank - 1),), range(1, rank), range(rank - 1), (), None), (8, 2, 2, 2, 1, 1, 4)
    )[0]
    if kept is None:
        kept = [axis for axis in range(rank) if rng.random() < 0.5]
    return tuple(extent if axis in kept else 1 for axis, extent in enumerate(shape))


def _pointwise(rng: random.Random, alias: bool) -> Operation:
    """Graphs of pointwise nodes over one to six axes."""
    shape = _shape(rng, rng.choices((1, 2, 3, 4, 5, 6), (2, 4, 4, 6, 2, 1))[0], alias and rng.random() < 0.5)
    kind = rng.choices(("unary", "binary", "chain", "two"), (2, 5, 2, 2))[0]
    options: dict[str, Any] = {}
    expected: Expected
    if kind == "unary":
        name = options["kind"] = rng.choice(list(ACTIVATIONS))
        return Operation(kind, (shape,), (shape,), lambda values: ([ACTIVATIONS[name](values[0])], 1.0), options)
    rest = [shape if alias and rng.random() < 0.7 else _spread(rng, shape) for _ in range(2 if kind == "chain" else 1)]
    shapes = [shape, *rest]
    if rng.random() < 0.1:
        shapes[0] = _spread(rng, shape)
    elif kind == "binary" and rng.random() < 0.2:
        shapes.reverse()
    shape = tuple(max(extents) for extents in zip(*shapes, strict=True))
    if kind == "binary":
        name = options["kind"] = rng.choice(list(BINARY))
        expected = lambda values: ([BINARY[name](*values)], 2.0)  # noqa: E731
    elif kind == "chain":
        expected = lambda values: ([np.maximum(values[0] * values[1] + values[2], 0)], 2.0)  # noqa: E731
    else:
        expected = lambda values: ([values[0] + values[1], values[0] * values[1]], 2.0)  # noqa: E731
    return Operation(kind, tuple(shapes), (shape,) * (2 if kind == "two" else 1), expected, options)


def _activation(rng: random.Random, alias: bool) -> Operation:
    """An activation's own function."""
    shape = _shape(rng, rng.randrange(1, 7), alias and rng.random() < 0.5)
    name = rng.choice(list(ACTIVATIONS))
    return Operation(name, (shape,), (shape,), lambda values: ([ACTIVATIONS[name](values[0])], 1.0), {})


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Geometry of a convolution, and the shapes of image, filters and result."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    after: tuple[int, ...] = ()
    """Padding on the other side, where that differs."""

    @classmethod
    def random(cls, rng: random.Random, spatial: int, alias: bool) -> "_Convolution":
        groups = rng.choice((1, 1, 1, 1, 2, 4, 8))
        c, k = groups * rng.choice((1, 2, 3, 4, 8, 8, 16)), groups * rng.choice((1, 2, 4, 5, 8, 8, 16))
        if alias and rng.random() < 0.5:  # so that the result can be the image
            one = (1,) * spatial
            x = (rng.choice((1, 2)), c, *(rng.choice((3, 4, 7, 8)) for _ in one))
            return cls(one, (0,) * spatial, one, groups, x, (c, c // groups, *one), x)
        taps = [rng.choice((1, 1, 2, 3, 3, 5)) for _ in range(spatial)]
        stride, padding, dilation = (
            tuple(rng.choice(options) for _ in range(spatial)) for options in ((1, 1, 2, 3), (0, 0, 1, 2), (1, 1, 1, 2, 3))
        )
        cover = [(tap - 1) * gap + 1 for tap, gap in zip(taps, dilation, strict=True)]
        sizes = (3, 4, 7, 8, 14) if spatial < 3 else (2, 3, 4, 7)
        image = [max(rng.choice(sizes), extent - 2 * margin) for extent, margin in zip(cover, padding, strict=True)]
        n = rng.choice((1, 1, 2, 3, 5))
        while n > 1 and n * c * math.prod(image) > MOST:
            n -= 1
        result = [
            (extent + 2 * margin - covered) // step + 1
            for extent, margin, covered, step in zip(image, padding, cover, stride, strict=True)
        ]
        return cls(stride, padding, dilation, groups, (n, c, *image), (k, c // groups, *taps), (n, k, *result))

    @property
    def geometry(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def _taps(self, padded: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Each tap of the filters, with the view of the padded images that it meets."""
        for tap in np.ndindex(*self.w[2:]):
            window = [
                slice(t * gap, t * gap + step * (extent - 1) + 1, step)
                for t, gap, step, extent in zip(tap, self.dilation, self.stride, self.y[2:], strict=True)
            ]
            yield tap, padded[(slice(None), slice(None), *window)]

    def _group(self, array: np.ndarray, axis: int, group: int) -> np.ndarray:
        size = array.shape[axis] // self.groups
        return array[(slice(None),) * axis + (slice(group * size, (group + 1) * size),)]

    def _padded(self, x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, 0), *zip(self.padding, self.after or self.padding, strict=True)])

    def forward(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = np.zeros(self.y)
        for tap, seen in self._taps(self._padded(x)):
            filters = w[(slice(None), slice(None), *tap)]
            for group in range(self.groups):
                part = np.tensordot(self._group(filters, 0, group), self._group(seen, 1, group), (1, 1))
                self._group(y, 1, group)[...] += np.moveaxis(part, 0, 1)
        return y

    def input_grad(self, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
        padded = self._padded(np.zeros(self.x))
        for tap, seen in self._taps(padded):
            filters = w[(slice(None), slice(None), *tap)]
            for group in range(self.groups):
                part = np.tensordot(self._group(filters, 0, group), self._group(dy, 1, group), (0, 1))
                self._group(seen, 1, group)[...] += np.moveaxis(part, 0, 1)
        inner = [slice(margin, margin + extent) for margin, extent in zip(self.padding, self.x[2:], strict=True)]
        return padded[(slice(None), slice(None), *inner)]

    def weight_grad(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        w = np.zeros(self.w)
        over = (0, *range(2, len(self.x)))
        for tap, seen in self._taps(self._padded(x)):
            for group in range(self.groups):
                part = np.tensordot(self._group(dy, 1, group), self._group(seen, 1, group), (over, over))
                self._group(w, 0, group)[(slice(None), slice(None), *tap)] = part
        return w

    def gradient(self, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Expected:
        return lambda values: ([function(*values)], max(1.0, _largest(function, *values)))


def _largest(function: Callable[[np.ndarray, np.ndarray], np.ndarray], a: np.ndarray, b: np.ndarray) -> float:
    return float(function(np.abs(a), np.abs(b)).max())


EPILOGUES = {"": 6, "b": 4, "a": 3, "ba": 5, "z": 3, "za": 2, "bz": 2, "bza": 3, "s": 2, "sb": 1, "sba": 1}


def _conv(rng: random.Random, alias: bool) -> Operation:
    """A convolution over one to three axes with what follows it, in one graph."""
    spatial = rng.choices((1, 2, 3), (2, 8, 1))[0]
    it = _Convolution.random(rng, spatial, alias)
    epilogue, activation = rng.choices(list(EPILOGUES), list(EPILOGUES.values()))[0], rng.choice(list(ACTIVATIONS))
    channels = (1, it.y[1], *(1,) * spatial)
    rest = [it.y if letter == "z" and rng.random() < 0.8 else channels for letter in epilogue if letter != "a"]
    if "z" in epilogue and channels in rest and rng.random() < 0.3:
        rest[-1] = _spread(rng, it.y)

    def expected(values: Values) -> tuple[Values, float]:
        x, w, *others = values
        return _finished(it.forward(x, w), _largest(it.forward, x, w), others, epilogue, activation)

    options = it.geometry | {"epilogue": epilogue, "activation": activation}
    return Operation("fprop", (it.x, it.w, *rest), (it.y,), expected, options)


def _conv_grad(rng: random.Random, alias: bool) -> Operation:
    """A gradient of a convolution as a graph."""
    it = _Convolution.random(rng, rng.choices((1, 2, 3), (2, 8, 1))[0], alias)
    if rng.random() < 0.5:
        return Operation("dgrad", (it.y, it.w), (it.x,), it.gradient(it.input_grad), it.geometry | {"shape": it.x})
    return Operation("wgrad", (it.x, it.y), (it.w,), it.gradient(it.weight_grad), it.geometry | {"shape": it.w})


def _uneven(rng: random.Random, it: _Convolution) -> _Convolution:
    """The same with another padding on the other side."""
    after = tuple(margin + rng.choice((0, 1, 1, 2)) for margin in it.padding)
    cover = [(tap - 1) * gap + 1 for tap, gap in zip(it.w[2:], it.dilation, strict=True)]
    sides = zip(it.x[2:], it.padding, after, cover, it.stride, strict=True)
    result = [(extent + low + high - covered) // step + 1 for extent, low, high, covered, step in sides]
    before, after = (after, it.padding) if rng.random() < 0.5 else (it.padding, after)
    return replace(it, padding=before, after=after, y=(*it.y[:2], *result))


def _pairs(rng: random.Random, it: _Convolution) -> dict[str, Any]:
    options = {name: value[0] if len(set(value)) == 1 and rng.random() < 0.5 else value for name, value in it.geometry.items()}
    if it.groups > 1:
        options["groups"] = it.groups
    if rng.random() < 0.1:
        options["allow_tf32"] = False
    return options


def _conv2d(rng: random.Random, alias: bool) -> Operation:
    """`handlepool.conv2d`."""
    it = _Convolution.random(rng, 2, alias)
    options = _pairs(rng, it)
    if rng.random() < 0.15:
        it = _uneven(rng, it)
        options["padding"] = list(zip(it.padding, it.after, strict=True))
    biased, added, activation = rng.random() < 0.5, rng.random() < 0.3, rng.choice((None, *ACTIVATIONS))
    if activation or rng.random() < 0.2:
        options["activation"] = activation
    turned = rng.random() < 0.1
    if turned:
        options["mode"] = "convolution"

    def expected(values: Values) -> tuple[Values, float]:
        x, w, *others = values
        w = w[:, :, ::-1, ::-1] if turned else w
        epilogue = "b" * biased + "z" * added + "a" * (activation is not None)
        others = [array.reshape(1, -1, 1, 1) if array.ndim == 1 else array for array in others]
        return _finished(it.forward(x, w), _largest(it.forward, x, w), others, epilogue, activation)

    inputs = (it.x, it.w, *((it.y[1],),) * biased, *(it.y,) * added)
    return Operation("conv2d", inputs, (it.y,), expected, options, names=("bias",) * biased + ("add",) * added)


def _conv2d_grad(rng: random.Random, alias: bool) -> Operation:
    """`handlepool.conv2d_input_grad` and `conv2d_weight_grad`."""
    it = _Convolution.random(rng, 2, alias)
    options = _pairs(rng, it)
    if rng.random() < 0.5:
        return Operation("conv2d_input_grad", (it.y, it.w), (it.x,), it.gradient(it.input_grad), options, (it.x,))
    return Operation("conv2d_weight_grad", (it.x, it.y), (it.w,), it.gradient(it.weight_grad), options, (it.w,))


def _matmul(rng: random.Random, alias: bool) -> Operation:
    """A matrix product of two to four axes with what follows it."""
    batch = tuple(rng.choice((1, 2, 3)) for _ in range(rng.choices((0, 1, 2), (3, 4, 2))[0]))
    m, k, n = (rng.choice((1, 3, 8, 16, 17, 24, 32, 64)) for _ in range(3))
    if alias and rng.random() < 0.6:
        m = k = n = rng.choice((4, 8, 16))
    alone = (1,) * len(batch)
    shapes = [(*(alone if rng.random() < 0.15 else batch), m, k), (*(alone if rng.random() < 0.15 else batch), k, n)]
    result = (*(max(pair) for pair in zip(shapes[0][:-2], shapes[1][:-2], strict=True)), m, n)
    epilogue = rng.choices(("", "a", "b", "ba", "c", "ca", "z", "za", "bz"), (6, 2, 3, 3, 1, 1, 2, 1, 1))[0]
    some = tuple(rng.choice((1, extent)) for extent in result[:-2])  # as the mask of an attention repeats
    letters = {"b": (*some, 1, n), "c": (*some, m, 1), "z": (*some, m, n)}
    activation = rng.choice(list(ACTIVATIONS))
    rest = [letters[letter] for letter in epilogue if letter != "a"]

    def expected(values: Values) -> tuple[Values, float]:
        a, b, *others = values
        return _finished(a @ b, _largest(np.matmul, a, b), others, epilogue.replace("b", "c"), activation)

    # The bias of a matrix product is an addition: `bias` means channels.
    options = {"epilogue": epilogue.replace("b", "c"), "activation": activation}
    return Operation("matmul", (*shapes, *rest), (result,), expected, options)


def _product(rng: random.Random, alias: bool) -> Operation:
    """`handlepool.matmul` and `handlepool.linear`."""
    batch = tuple(rng.choice((1, 2, 3)) for _ in range(rng.choices((0, 1, 2), (3, 4, 2))[0]))
    m, k, n = (rng.choice((1, 3, 8, 16, 17, 24, 32, 64)) for _ in range(3))
    if alias and rng.random() < 0.6:
        m = k = n = rng.choice((4, 8, 16))
    name = rng.choice(("ops.matmul", "linear"))
    fewer = [tuple(extent if rng.random() < 0.8 else 1 for extent in batch)[rng.choice((0, 0, 1)) :] for _ in range(2)]
    shapes = [(*batch, m, k), (n, k)] if name == "linear" else [(*fewer[0], m, k), (*fewer[1], k, n)]
    result = (*np.broadcast_shapes(*(shape[:-2] for shape in shapes)), m, n)
    biased, activation = rng.random() < 0.5, rng.choice((None, *ACTIVATIONS))
    epilogue = "c" * biased + "a" * (activation is not None)

    def expected(values: Values) -> tuple[Values, float]:
        a, b, *others = values
        b = b.T if name == "linear" else b
        return _finished(a @ b, _largest(np.matmul, a, b), others, epilogue, activation)

    inputs = (*shapes, *((n,),) * biased)
    return Operation(name, inputs, (result,), expected, {"activation": activation}, names=("bias",) * biased)


MAKERS = {_pointwise: 24, _conv: 24, _conv2d: 20, _matmul: 10, _product: 8, _conv2d_grad: 6, _conv_grad: 5, _activation: 5}
