"""Calls that are planned by cuDNN without being launched: every ready-made operation, and the networks of the benchmarks.

Each is a name and a function that makes the call on the default pool. The names are those of the golden files' lines.
"""

import sys
from functools import partial
from itertools import product

from harness.planning import TESTS
from seeds.test_graph_wrapper import SETTINGS, WAYS

import handlepool
from handlepool import ArraySpec, ops

sys.path.append(str(TESTS.parent / "benchmarks"))
from nets import NETWORKS, Parameters
from work import Shape, graph_function

ACTIVATIONS = ("relu", "sigmoid", "tanh", "gelu", "swish")
TYPES = ("float16", "bfloat16", "float32")
WIDE, NARROW = 64, 32
"""Channels of images and filters."""


class Arrays:
    """Makes arrays of one type and layout, with what they hold left open."""

    def __init__(self, driver, dtype, layout="NHWC"):
        self._driver = driver
        self._dtype = dtype
        self._layout = layout

    def __call__(self, *shape, layout=None):
        spec = ArraySpec(shape, self._dtype, layout or (self._layout if len(shape) == 4 else "NCHW"))
        return self._driver.empty(spec.shape, spec.strides, spec.dtype)


def convolutions(driver):
    """`conv2d` by type and layout: its geometry, its epilogue, views, and the settings."""
    for dtype, layout in product(TYPES, ("NHWC", "NCHW", "x NHWC, w NCHW")):
        a = Arrays(driver, dtype, "NCHW" if layout == "NCHW" else "NHWC")
        filters = partial(a, layout="NHWC" if layout == "NHWC" else "NCHW")
        x, w = a(2, WIDE, 28, 28), filters(NARROW, WIDE, 3, 3)
        name = f"{dtype} {layout}"
        bias, add = a(NARROW), a(2, NARROW, 28, 28)
        call = partial(handlepool.conv2d, x, w, padding=1)
        yield name, call
        yield f"{name} 1x1", partial(handlepool.conv2d, x, filters(NARROW, WIDE, 1, 1))
        yield f"{name} stride 2", partial(call, stride=2)
        yield f"{name} uneven padding", partial(call, padding=((0, 1), (0, 1)), stride=2)
        yield f"{name} 4 groups", partial(handlepool.conv2d, x, filters(NARROW, WIDE // 4, 3, 3), groups=4, padding=1)
        yield f"{name} depthwise", partial(handlepool.conv2d, x, filters(WIDE, 1, 3, 3), groups=WIDE, padding=1)
        yield f"{name} bias", partial(call, bias=bias)
        yield f"{name} bias relu", partial(call, bias=bias, activation="relu")
        yield f"{name} bias tanh", partial(call, bias=bias, activation="tanh")
        yield f"{name} bias add relu", partial(call, bias=bias, add=add, activation="relu")
        yield f"{name} add", partial(call, add=add)
        if dtype == "bfloat16" or layout not in ("NHWC", "NCHW"):
            continue
        yield f"{name} dilation 2", partial(call, dilation=2)
        yield f"{name} turned around", partial(call, mode="convolution")
        yield (
            f"{name} 7x7 of 3 channels",
            partial(handlepool.conv2d, a(1, 3, 224, 224), filters(WIDE, 3, 7, 7), padding=3, stride=2),
        )
        yield f"{name} odd sizes", partial(handlepool.conv2d, a(3, 5, 13, 11), filters(7, 5, 3, 2), stride=(2, 1))
        yield (
            f"{name} one pixel",
            partial(handlepool.conv2d, a(1, WIDE, 1, 1), filters(NARROW, WIDE, 1, 1), bias=bias, activation="relu"),
        )
        for activation in ("sigmoid", "gelu", "swish"):
            yield f"{name} bias {activation}", partial(call, bias=bias, activation=activation)
        yield f"{name} relu", partial(call, activation="relu")
        yield f"{name} bias add gelu", partial(call, bias=bias, add=add, activation="gelu")
        yield f"{name} uneven padding bias relu", partial(call, padding=((0, 1), (0, 1)), bias=bias, activation="relu")
        yield (
            f"{name} 4 groups bias relu",
            partial(handlepool.conv2d, x, filters(NARROW, WIDE // 4, 3, 3), groups=4, padding=1, bias=bias, activation="relu"),
        )
        yield (
            f"{name} depthwise bias relu",
            partial(handlepool.conv2d, x, filters(WIDE, 1, 3, 3), groups=WIDE, padding=1, bias=a(WIDE), activation="relu"),
        )
        larger = a(2, 2 * WIDE, 30, 30)
        views = {"crop": larger[:, :WIDE, 1:-1, 1:-1], "slice of channels": larger[:, WIDE:, :28, :28], "every row": x[:, :, ::2]}
        for view, image in views.items():
            yield f"{name} x a {view}", partial(handlepool.conv2d, image, w, padding=1)
        yield f"{name} x a crop, bias relu", partial(handlepool.conv2d, views["crop"], w, padding=1, bias=bias, activation="relu")
        yield f"{name} out a slice of channels", partial(call, out=a(2, WIDE, 28, 28)[:, NARROW:])
        yield (
            f"{name} out a slice of channels, bias relu",
            partial(call, out=a(2, WIDE, 28, 28)[:, NARROW:], bias=bias, activation="relu"),
        )
        for setting in ({"allow_tf32": False}, {"deterministic": True}, {"workspace_limit": 0}, {"workspace_limit": 1 << 20}):
            text = " ".join(f"{key}={value}" for key, value in setting.items())
            yield f"{name} {text}", partial(call, **setting)
            yield f"{name} bias relu {text}", partial(call, bias=bias, activation="relu", **setting)


def gradients(driver):
    """The gradients of `conv2d`, by type and layout."""
    for dtype, layout in product(TYPES, ("NHWC", "NCHW")):
        a = Arrays(driver, dtype, layout)
        x, w, dy = (2, WIDE, 28, 28), (NARROW, WIDE, 3, 3), (2, NARROW, 28, 28)
        forms = {
            "": (x, w, dy, {"padding": 1}),
            " stride 2": (x, w, (2, NARROW, 14, 14), {"padding": 1, "stride": 2}),
            " dilation 2": (x, w, dy, {"padding": 2, "dilation": 2}),
            " 4 groups": (x, (NARROW, WIDE // 4, 3, 3), dy, {"padding": 1, "groups": 4}),
            " depthwise": (x, (WIDE, 1, 3, 3), x, {"padding": 1, "groups": WIDE}),
            " deterministic": (x, w, dy, {"padding": 1, "deterministic": True}),
            " allow_tf32=False": (x, w, dy, {"padding": 1, "allow_tf32": False}),
            " workspace_limit=0": (x, w, dy, {"padding": 1, "workspace_limit": 0}),
        }
        for form, (x_shape, w_shape, dy_shape, how) in forms.items():
            if dtype == "bfloat16" and "=" in form:
                continue
            image = partial(handlepool.ops.conv2d_input_grad, a(*dy_shape), a(*w_shape), x_shape, **how)
            yield f"images {dtype} {layout}{form}", image
            yield f"filters {dtype} {layout}{form}", partial(ops.conv2d_weight_grad, a(*x_shape), a(*dy_shape), w_shape, **how)


def transposed(driver):
    """`conv_transpose2d`, the convolutions of one axis, and padding by name, by type and layout."""
    for dtype, layout in product(TYPES, ("NHWC", "NCHW")):
        a, name = Arrays(driver, dtype, layout), f"{dtype} {layout}"
        x, w, bias = a(2, WIDE, 14, 14), a(WIDE, NARROW, 3, 3), a(NARROW)
        two = partial(handlepool.conv_transpose2d, x)
        yield f"transposed {name}", partial(two, w)
        yield f"transposed {name} 2x2 stride 2 bias", partial(two, a(WIDE, NARROW, 2, 2), stride=2, bias=bias)
        yield (
            f"transposed {name} 4x4 stride 2 bias relu",
            partial(two, a(WIDE, NARROW, 4, 4), stride=2, padding=1, bias=bias, activation="relu"),
        )
        yield f"transposed {name} stride 2 output padding", partial(two, w, stride=2, padding=1, output_padding=1)
        yield f"transposed {name} dilation 2 output padding", partial(two, w, dilation=2, output_padding=1)
        yield f"transposed {name} 4 groups", partial(two, a(WIDE, NARROW // 4, 3, 3), groups=4)
        yield f"transposed {name} depthwise stride 2", partial(two, a(WIDE, 1, 3, 3), groups=WIDE, stride=2)
        rows = Arrays(driver, dtype)(2, WIDE, 100)
        rows = rows if layout == "NCHW" else Arrays(driver, dtype)(2, 100, WIDE).transpose(0, 2, 1)
        one, filters = partial(handlepool.conv1d, rows), a(NARROW, WIDE, 3)
        yield f"one axis {name}", partial(one, filters)
        yield f"one axis {name} same bias relu", partial(one, filters, padding="same", bias=bias, activation="relu")
        yield f"one axis {name} stride 2 bias", partial(one, filters, padding=1, stride=2, bias=bias)
        yield f"one axis {name} same of an even length", partial(one, a(NARROW, WIDE, 4), padding="same")
        yield (
            f"one axis transposed {name} stride 2 bias",
            partial(handlepool.conv_transpose1d, rows, a(WIDE, NARROW, 4), stride=2, bias=bias),
        )
        yield (
            f"same {name} bias relu",
            partial(handlepool.conv2d, x, a(NARROW, WIDE, 3, 3), padding="same", bias=bias, activation="relu"),
        )
        yield f"same {name} of even sizes", partial(handlepool.conv2d, x, a(NARROW, WIDE, 2, 4), padding="same")


def attentions(driver):
    """`scaled_dot_product_attention`, by type: sizes, layouts, masks."""
    for dtype in ("float16", "bfloat16"):
        a = partial(Arrays(driver, dtype), layout="NCHW")

        def heads(*shape, a=a):
            return [a(*shape)] * 3

        call = handlepool.scaled_dot_product_attention
        cross = a(2, 8, 77, 80), a(2, 8, 33, 80), a(2, 8, 33, 40)
        one = a(2, 8, 1, 64), a(2, 8, 55, 64), a(2, 8, 55, 64)
        yield f"{dtype} ViT-B/16", partial(call, *heads(1, 12, 197, 64))
        yield f"{dtype} ViT-B/16 by rows", partial(call, *[x.transpose(0, 2, 1, 3) for x in heads(1, 197, 12, 64)])
        yield f"{dtype} ViT-B/16 of one product, batch 8", partial(call, *a(8, 197, 3, 12, 64).transpose(2, 0, 3, 1, 4))
        yield f"{dtype} causal", partial(call, *heads(2, 8, 128, 64), is_causal=True)
        yield f"{dtype} causal, more queries than keys", partial(call, a(2, 8, 55, 64), *heads(2, 8, 20, 64)[1:], is_causal=True)
        yield f"{dtype} other keys and values", partial(call, *cross)
        yield f"{dtype} mask of the scores", partial(call, *heads(2, 8, 128, 64), attn_mask=a(128, 128))
        yield f"{dtype} mask of the keys", partial(call, *heads(2, 8, 197, 64), attn_mask=a(2, 1, 1, 197))
        yield f"{dtype} one query", partial(call, *one)
        yield f"{dtype} one query, causal", partial(call, *one, is_causal=True)
        for size in (8, 16, 24, 40, 72, 80, 96, 120, 128):
            yield f"{dtype} heads of {size}", partial(call, *heads(1, 2, 16, size))


def products(driver):
    """`matmul` and `linear`, by type."""
    for dtype in TYPES:
        a = Arrays(driver, dtype)
        x, w, bias = a(32, 512), a(1000, 512), a(1000)
        yield f"linear {dtype}", partial(handlepool.linear, x, w)
        for activation in (None, *ACTIVATIONS):
            yield (
                f"linear {dtype} bias {activation or ''}".rstrip(),
                partial(handlepool.linear, x, w, bias=bias, activation=activation),
            )
        yield f"linear {dtype} one row bias", partial(handlepool.linear, a(1, 512), w, bias=bias)
        yield f"linear {dtype} batch bias relu", partial(handlepool.linear, a(4, 8, 512), w, bias=bias, activation="relu")
        yield f"linear {dtype} odd bias gelu", partial(handlepool.linear, a(3, 17), a(5, 17), bias=a(5), activation="gelu")
        m, n = a(4, 64, 96), a(4, 96, 48)
        yield f"matmul {dtype} batch", partial(handlepool.matmul, m, n)
        yield f"matmul {dtype} batch transposed", partial(handlepool.matmul, a(4, 96, 64).transpose(0, 2, 1), n)
        yield f"matmul {dtype} two matrices", partial(handlepool.matmul, a(64, 96), a(96, 48))
        yield f"matmul {dtype} one for all", partial(handlepool.matmul, m, a(96, 48))
        yield f"matmul {dtype} broadcast", partial(handlepool.matmul, a(2, 1, 8, 24), a(3, 24, 16))
        yield f"matmul {dtype} odd sizes", partial(handlepool.matmul, a(3, 5, 7), a(3, 7, 9))
        yield f"matmul {dtype} one element", partial(handlepool.matmul, a(1, 7), a(7, 1), bias=a(1), activation="relu")
        yield f"matmul {dtype} bias relu", partial(handlepool.matmul, m, n, bias=a(48), activation="relu")
        yield f"matmul {dtype} allow_tf32=False", partial(handlepool.matmul, m, n, allow_tf32=False)
        yield f"matmul {dtype} workspace_limit=0", partial(handlepool.matmul, m, n, workspace_limit=0)


def activations(driver):
    """The activations alone, by type and layout."""
    for dtype, kind in product(TYPES, ACTIVATIONS):
        a = Arrays(driver, dtype)
        arrays = {"NHWC": a(2, WIDE, 28, 28), "NCHW": a(2, WIDE, 28, 28, layout="NCHW")}
        arrays |= {"odd": a(3, 7, 5), "one element": a(1), "a row": a(1000)}
        for name, x in arrays.items():
            if name in ("NHWC", "one element") or kind in ("relu", "gelu"):
                yield f"{kind} {dtype} {name}", partial(getattr(ops, kind), x)


def graphs(driver):
    """The graph functions of the seeds' tests and of the benchmarks, and what the seeds do with `conv2d`."""
    half, single = Arrays(driver, "float16"), Arrays(driver, "float32")
    for way, (function, inputs, outputs) in WAYS.items():
        wrapped = handlepool.graph(inputs=inputs, outputs=outputs, **SETTINGS)(function)
        yield f"graph wrapper, {way}", partial(wrapped, half(2, 16, 14, 14), half(8, 16, 3, 3))
    for text in (
        "1x64x14x64x3:float16:NHWC",
        "1x256x14x256x3:float16:NHWC",
        "2x512x14x512x3:float32:NCHW",
        "8x64x56x32x3:float16:NHWC",
    ):
        shape = Shape.parse(text)
        a = Arrays(driver, shape.dtype, shape.layout)
        x, w = (
            a(shape.batch, shape.channels, shape.side, shape.side),
            a(shape.filters, shape.channels, shape.kernel, shape.kernel),
        )
        yield f"benchmark {text}", partial(graph_function(shape), x, w)
    for layout, mode in product(("NCHW", "NHWC"), ("cross_correlation", "convolution")):
        a = Arrays(driver, "float32", layout)
        detect = partial(handlepool.conv2d, a(1, 3, 128, 96), a(3, 3, 3, 3), padding=1, mode=mode)
        yield f"edge detector {layout} {mode}", detect
        yield f"edge detector {layout} {mode} allow_tf32=False", partial(detect, allow_tf32=False)
        yield f"edge detector {layout} {mode} workspace_limit=1048576", partial(detect, workspace_limit=1 << 20)
    yield "edge detector sigmoid", partial(ops.sigmoid, single(1, 3, 128, 96))
    for name, a in (("float16", half), ("float32", single)):
        yield (
            f"custom op {name}",
            partial(handlepool.conv2d, a(2, 16, 10, 10, layout="NCHW"), a(8, 16, 3, 3, layout="NCHW"), padding=1),
        )


class Noted:
    """The library's operations, which note with what they are called, each geometry once."""

    def __init__(self):
        self.calls = {}

    def __getattr__(self, operation):
        def noted(*args, **kwargs):
            call = partial(getattr(ops, operation), *args, **kwargs)
            operands = args[0] if isinstance(args[0], list) else [arg for arg in args if hasattr(arg, "shape")]
            shapes = ", ".join("x".join(map(str, operand.shape)) for operand in operands)
            words = [key if hasattr(value, "shape") else f"{key}={value}" for key, value in kwargs.items()]
            self.calls.setdefault(" ".join([operation, shapes, *words]), call)
            return call()

        return noted


def networks(driver):
    """Every call of the benchmarks' networks, batch 1, fp16, channels-last."""
    for name, network in NETWORKS.items():
        noted = Noted()
        network(Parameters(driver.asarray), Arrays(driver, "float16")(1, 3, 224, 224), noted)
        for label, call in noted.calls.items():
            yield f"{name} {label}", call


GROUPS = {
    "conv2d": convolutions,
    "gradients": gradients,
    "transposed": transposed,
    "attention": attentions,
    "products": products,
    "activations": activations,
    "graphs": graphs,
    "networks": networks,
}
