"""Random calls of the ready-made operations, as Hypothesis draws them: what they must give in float64, and what torch gives."""

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np

from handlepool import ops
from handlepool.testing import reference

TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 5e-3}
"""Of the largest sum of absolute products; float32 may be TF32 on tensor cores. What is wrong is wrong by much more."""
VIEWS = {
    "dense": lambda of, n, c, h, w: of(n, c, h, w),
    "crop": lambda of, n, c, h, w: of(n, c, h + 1, w + 2)[:, :, :-1, :-2],
    "channels": lambda of, n, c, h, w: of(n, c + 8, h, w)[:, :c],
    "channels behind": lambda of, n, c, h, w: of(n, c + 8, h, w)[:, 8:],
    "rows": lambda of, n, c, h, w: of(n, c, 2 * h, w)[:, :, ::2],
    "rows of an odd height": lambda of, n, c, h, w: of(n, c, 2 * h - 1, w)[:, :, ::2],
    "columns": lambda of, n, c, h, w: of(n, c, h, 2 * w)[..., ::2],
    "columns of an odd width": lambda of, n, c, h, w: of(n, c, h, 3 * w - 2)[..., ::3],
    "second channels": lambda of, n, c, h, w: of(n, 2 * c, h, w)[:, ::2],
    "images": lambda of, n, c, h, w: of(2 * n, c, h, w)[::2],
}
MATRICES = {
    "dense": lambda of, *shape: of(*shape),
    "transposed": lambda of, *shape: of(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2),
    "crop": lambda of, *shape: of(*shape[:-1], shape[-1] + 8)[..., :-8],
    "columns of an odd width": lambda of, *shape: of(*shape[:-1], 2 * shape[-1] - 1)[..., ::2],
}
VECTORS = {
    "dense": lambda of, extent: of(extent),
    "second": lambda of, extent: of(2 * extent)[::2],
    "from the second on": lambda of, extent: of(extent + 1)[1:],
    "second from the second on": lambda of, extent: of(2 * extent + 1)[1::2],
}
KINDS = st.none() | st.sampled_from(ops.ACTIVATIONS)


@dataclass
class Call:
    """An operation, and how its arrays lie: by name a shape and a view in `VIEWS`, `MATRICES` or `VECTORS`."""

    name: str
    dtype: str
    layout: str
    shapes: dict[str, tuple[int, ...]]
    views: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    out: str | None = None

    def made(self, arrays: Any) -> dict[str, Any]:
        """The arrays, of random values."""
        return {name: self.lay(arrays.random, shape, self.views[name]) for name, shape in self.shapes.items()}

    def lay(self, of: Any, shape: tuple[int, ...], view: str) -> Any:
        """An array that lies so."""
        kinds = (
            VECTORS if len(shape) == 1 else MATRICES if self.name in ("matmul", "linear") else VIEWS if len(shape) == 4 else {}
        )
        return kinds.get(view, lambda of, *shape: of(*shape))(of, *shape)

    def check(self, arrays: Any, pool: Any, torch: Any = None, device: str = "cuda") -> None:
        """Call it twice, the second time with what is known by then; raise unless both are right and write nothing else.

        With ``torch`` also unless that gives the same.
        """
        given = self.made(arrays)
        values = {name: arrays.take(array) for name, array in given.items()}
        expected, bound = wanted(self, values)
        limit = TOLERANCE[self.dtype] * max(1.0, bound) if bound else 0.0
        for _ in range(2):
            whole: list[Any] = []

            def around(*shape: int, whole: list[Any] = whole) -> Any:
                whole.append(arrays.put(np.full(shape, 7.0)))
                return whole[-1]

            out = None if self.out is None else self.lay(around, expected.shape, self.out)
            y = launched(self, given, out, pool)
            assert out is None or y is out
            found = arrays.take(y)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= limit, f"off by {np.abs(found - expected).max()}, {limit} at most"
            if out is not None:
                out[...] = 7
                assert (arrays.take(whole[0]) == 7).all(), "something beside out was written"
        for name, array in given.items():
            assert np.array_equal(arrays.take(array), values[name]), f"{name} was written"
        if torch is not None:
            theirs = of_torch(
                self, torch, {k: torch.tensor(v, device=device, dtype=getattr(torch, self.dtype)) for k, v in values.items()}
            )
            assert np.abs(found - theirs.double().cpu().numpy()).max() <= 2 * limit


def launched(call: Call, given: dict[str, Any], out: Any, pool: Any) -> Any:
    """What handlepool makes of the arrays."""
    arrays, options = dict(given), dict(call.options)
    if call.name == "concat":
        return ops.concat([*arrays.values()], options["axis"], out=out, pool=pool)
    if call.name == "add":
        return ops.add(*arrays.values(), **options, out=out, pool=pool)
    first = [arrays.pop(name) for name in [*arrays][: 2 if call.name in ("conv2d", "matmul", "linear") else 1]]
    window = [options.pop("window")] if "window" in options else []
    return getattr(ops, call.name)(*first, *window, **arrays, **options, out=out, pool=pool)


def wanted(call: Call, values: dict[str, Any]) -> tuple[Any, float]:
    """The result in float64, and the largest sum of absolute values that went into an element; 0 where nothing is rounded."""
    options = call.options
    xs = [*values.values()]
    if call.name == "concat":
        return np.concatenate(xs, options["axis"]), 0
    if call.name == "add":
        total = np.sum(xs, 0)
        kind = options["activation"]
        return total if kind is None else reference.ACTIVATIONS[kind](total), float(np.sum(np.abs(xs), 0).max())
    if call.name in ("conv2d", "matmul", "linear"):
        one, other, *_ = xs
        rest = {name: values[name] for name in ("bias", "add") if name in values}
        how = dict(options)
        if call.name == "linear":
            other = other.T
        function = reference.conv2d if call.name == "conv2d" else reference.matmul
        absolute = function(np.abs(one), np.abs(other), **how | {"activation": None})
        return function(one, other, **how, **rest), float(absolute.max()) + sum(np.abs(value).max() for value in rest.values())
    (x,) = xs
    if call.name == "mean2d":
        return x.mean((2, 3), keepdims=options["keepdims"]), float(np.abs(x).max())
    return getattr(reference, call.name)(x, **options), 0 if call.name == "max_pool2d" else float(np.abs(x).max())


def of_torch(call: Call, torch: Any, values: dict[str, Any]) -> Any:
    """What torch makes of the same values, in the same type."""
    functional, options, xs = torch.nn.functional, dict(call.options), [*values.values()]
    kinds = {None: lambda y: y, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
    kinds |= {"gelu": functional.gelu, "swish": functional.silu}
    applied = kinds[options.pop("activation", None)]
    if call.name == "concat":
        return torch.cat(xs, options["axis"])
    if call.name == "add":
        return applied(sum(x.float() for x in xs).to(xs[0].dtype))
    if call.name == "conv2d":
        (above, below), (left, right) = options.pop("padding")
        x = functional.pad(values["x"], (left, right, above, below))
        y = functional.conv2d(x, values["w"], values.get("bias"), **options)
        return applied(y + values["add"] if "add" in values else y)
    if call.name in ("matmul", "linear"):
        a, b, *bias = xs
        y = a @ (b.T if call.name == "linear" else b)
        return applied(y + bias[0] if bias else y)
    if call.name == "mean2d":
        return xs[0].mean((2, 3), keepdim=options["keepdims"])
    names = {"window": "kernel_size"}
    return getattr(functional, call.name)(xs[0], **{names.get(name, name): value for name, value in options.items()})


# What is drawn

extents = st.sampled_from((1, 2, 3, 5, 8, 16, 24))
views = st.just("dense") | st.sampled_from([*VIEWS])
pairs = st.tuples


def _lies(draw: Any, layout: str) -> str:
    return draw(views) if layout == "NHWC" else "dense"


@st.composite
def conv2d(draw: Any, dtype: str) -> Call:
    """A convolution with what may come behind it."""
    layout = draw(st.sampled_from(("NHWC", "NHWC", "NCHW")))
    per, groups = draw(extents), draw(st.sampled_from((1, 1, 1, 2, 8)))
    deep = draw(st.integers(0, 4)) == 0
    per, groups, k = (1, draw(st.sampled_from((2, 8, 24))), None) if deep else (per, groups, groups * draw(extents))
    channels = per * groups
    taps, stride, dilation = (draw(pairs(st.integers(1, most), st.integers(1, most))) for most in (3, 2, 2))
    sides = draw(pairs(*[pairs(st.integers(0, 2), st.integers(0, 2))] * 2)) if draw(st.integers(0, 3)) == 0 else None
    padding = sides or tuple((pad, pad) for pad in draw(pairs(st.integers(0, 2), st.integers(0, 2))))
    least = [max(1, (t - 1) * d + 1 - sum(p)) for t, d, p in zip(taps, dilation, padding, strict=True)]
    size = [low + draw(st.integers(0, 7)) for low in least]
    x, w = (draw(st.integers(1, 2)), channels, *size), (k or channels, per, *taps)
    result = [
        (e + sum(p) - (t - 1) * d - 1) // s + 1 for e, p, t, d, s in zip(size, padding, taps, dilation, stride, strict=True)
    ]
    y = (x[0], w[0], *result)
    shapes, lie = {"x": x, "w": w}, {"x": _lies(draw, layout), "w": "dense"}
    if draw(st.booleans()):
        shapes["bias"], lie["bias"] = (w[0],), draw(st.sampled_from([*VECTORS]))
    if draw(st.integers(0, 2)) == 0:
        shapes["add"], lie["add"] = y, draw(views)
        if lie["add"] == "channels behind" and layout == "NCHW":  # which begins at no multiple of 16 bytes
            lie["add"] = "channels"
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "activation": draw(KINDS)}
    return Call("conv2d", dtype, layout, shapes, lie, options, draw(st.none() | st.just(_lies(draw, layout))))


@st.composite
def product(draw: Any, dtype: str) -> Call:
    """A product of matrices, or a layer."""
    name = draw(st.sampled_from(("matmul", "linear")))
    batch = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    m, k, n = (draw(st.sampled_from((1, 3, 8, 17, 64))) for _ in range(3))
    factors = {"a": (*batch, m, k), "b": (n, k) if name == "linear" else (*draw(st.sampled_from((batch, ()))), k, n)}
    lie = {factor: draw(st.sampled_from([*MATRICES])) for factor in factors}
    if draw(st.booleans()):
        factors["bias"], lie["bias"] = (n,), draw(st.sampled_from([*VECTORS]))
    out = draw(st.none() | st.sampled_from(("dense", "crop", "columns of an odd width")))
    return Call(name, dtype, "NCHW", factors, lie, {"activation": draw(KINDS)}, out)


@st.composite
def kernel(draw: Any, dtype: str) -> Call:
    """A sum, a concatenation, or pooling, by a kernel of our own."""
    name = draw(st.sampled_from(("add", "concat", "max_pool2d", "avg_pool2d", "mean2d")))
    layout = draw(st.sampled_from(("NHWC", "NCHW")))
    shape = (draw(st.integers(1, 2)), draw(extents), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    ways = [way for way in VIEWS if way != "channels behind" or layout == "NHWC"]
    lies = st.just("dense") | st.sampled_from(ways)
    out = draw(st.none() | lies)
    if name in ("add", "concat"):
        count, axis = draw(st.integers(1, 4)), draw(st.integers(-4, 3))
        shapes = [list(shape) for _ in range(count)]
        for each in shapes if name == "concat" else ():
            each[axis] = draw(st.integers(1, 9))
        arrays = {f"x{place}": tuple(each) for place, each in enumerate(shapes)}
        options = {"axis": axis} if name == "concat" else {"activation": draw(KINDS)}
        return Call(name, dtype, layout, arrays, {each: draw(lies) for each in arrays}, options, out)
    if name == "mean2d":
        return Call(
            name,
            dtype,
            layout,
            {"x": shape},
            {"x": draw(lies)},
            {"keepdims": draw(st.booleans())},
            draw(st.none() | st.just("dense")),
        )
    window = tuple(draw(st.integers(1, min(4, extent))) for extent in shape[2:])
    padding = tuple(draw(st.integers(0, min(extent // 2, size))) for extent, size in zip(window, shape[2:], strict=True))
    options = {"window": window, "stride": draw(pairs(st.integers(1, 3), st.integers(1, 3))), "padding": padding}
    options["ceil_mode"] = draw(st.booleans())
    if name == "avg_pool2d":
        options["count_include_pad"] = draw(st.booleans())
    return Call(name, dtype, layout, {"x": shape}, {"x": draw(lies)}, options, out)


def calls(maker: Any) -> Any:
    """Calls of one maker, of any type."""
    return st.sampled_from([*TOLERANCE]).flatmap(maker)


MAKERS = {"convolutions": conv2d, "products": product, "kernels": kernel}
