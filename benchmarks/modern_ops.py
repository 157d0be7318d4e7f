"""Normalisations, gates, softmax, attention, resampling and copies on the sizes of networks, beside torch's own kernels.

Each operation is recorded many times over in one program, and that is replayed, beside a CUDA graph of as many of torch's, and
with `--inductor` beside one of what Inductor compiles of torch's. The result is the device's time for one of them. All find
their operands in the cache. On a GPU every result is first compared with that of torch in float64.

Sizes are those of convnext_tiny (layer norm of channels-last images), ViT-B/16 (layer norm, softmax, attention),
efficientnet_b0 and mobilenet_v3_large (batch norm, squeeze-and-excite), shufflenet_v2 (channel shuffle, copies) and a U-Net with
bilinear upsampling.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common import Ratios, paired, pool_on_a_stream, publish, regions, summary
from options import arguments, parse, positive
from peers import array_of, graph_of, tensor, torch_beside
from work import check

import handlepool
from handlepool import ops

OURS, TORCH_GRAPH, INDUCTOR = "handlepool", "torch graph", "Inductor graph"
MOST_OF_TORCH, MOST_OF_INDUCTOR = 1.05, 1.1
NETWORKS = ("convnext_tiny", "vit_b_16", "efficientnet_b0", "mobilenet_v3_large", "shufflenet_v2", "unet")
CONVNEXT = {(96, 56): 4, (192, 28): 4, (384, 14): 10, (768, 7): 4}
"""Channels and side of convnext_tiny's layer norms: how often."""
BATCH_NORMS = {
    "efficientnet_b0": {(32, 112): 2, (96, 112): 1, (144, 56): 3, (240, 28): 3, (480, 14): 5, (672, 14): 5, (1152, 7): 8},
    "mobilenet_v3_large": {(16, 112): 1, (64, 112): 1, (72, 56): 3, (120, 28): 4, (240, 28): 1, (480, 14): 2, (960, 7): 5},
}
"""Channels and side of batch norms that an activation follows: how often, about."""
GATES = {
    "efficientnet_b0": {
        (32, 112, 8): 1,
        (96, 56, 4): 1,
        (144, 56, 6): 1,
        (144, 28, 6): 1,
        (240, 28, 10): 1,
        (240, 14, 10): 1,
        (480, 14, 20): 3,
        (672, 14, 28): 2,
        (672, 7, 28): 1,
        (1152, 7, 48): 4,
    },
    "mobilenet_v3_large": {
        (72, 28, 24): 1,
        (120, 28, 32): 2,
        (480, 14, 120): 1,
        (672, 14, 168): 1,
        (672, 7, 168): 1,
        (960, 7, 240): 2,
    },
}
"""Channels and side of squeeze-and-excite, and the numbers between its layers: how often."""
GATED = {"efficientnet_b0": ("swish", "sigmoid"), "mobilenet_v3_large": ("relu", "hardsigmoid")}
"""The activations of both layers."""
SHUFFLES = {(116, 28): 3, (232, 14): 7, (464, 7): 3}
UPSAMPLED = {(512, 14): 1, (256, 28): 1, (128, 56): 1, (64, 112): 1}


@dataclass(slots=True)
class Call:
    """An operation with its operands, in the library's words and in torch's, and how often a network has it."""

    name: str
    arrays: tuple[Any, ...]
    ours: Callable[..., Any]
    theirs: Callable[[Any, tuple[Any, ...]], Any]
    count: int


def _images(driver: Any, options: Any, channels: int, side: int) -> Any:
    rng = np.random.default_rng(channels * side)
    channels = channels if options.thin == 1 else max(8, channels // options.thin // 8 * 8)
    shape = options.batch, side, side, channels
    values = rng.standard_normal(shape, np.float32).astype(options.dtype)
    return driver.asarray(values).transpose(0, 3, 1, 2)


def _vector(driver: Any, options: Any, extent: int, positive: bool = False) -> Any:
    values = np.random.default_rng(extent).standard_normal(extent, np.float32)
    return driver.asarray((values * values + 0.5 if positive else values).astype(options.dtype))


def _rows(driver: Any, options: Any, *shape: int) -> Any:
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return driver.asarray(values.astype(options.dtype))


def calls_of(network: str, driver: Any, options: Any) -> Iterator[Call]:
    """The operations of a network, each geometry once."""
    if network == "convnext_tiny":
        for (channels, side), count in CONVNEXT.items():
            x = _images(driver, options, channels, side)
            w, b = (_vector(driver, options, x.shape[1]) for _ in range(2))
            yield Call(
                f"layer_norm of {x.shape}",
                (x, w, b),
                lambda x, w, b: ops.layer_norm(x, axis=1, weight=w, bias=b, eps=1e-6),
                lambda torch, a: torch.nn.functional.layer_norm(a[0].permute(0, 2, 3, 1), a[1].shape, a[1], a[2], 1e-6).permute(
                    0, 3, 1, 2
                ),
                count,
            )
    elif network == "vit_b_16":
        heads, size, tokens = max(1, 12 // options.thin), 64, 197 if options.thin == 1 else 17
        x = _rows(driver, options, options.batch, tokens, heads * size)
        w, b = (_vector(driver, options, heads * size) for _ in range(2))
        yield Call(
            f"layer_norm of {x.shape}",
            (x, w, b),
            lambda x, w, b: ops.layer_norm(x, weight=w, bias=b, eps=1e-6),
            lambda torch, a: torch.nn.functional.layer_norm(a[0], a[1].shape, a[1], a[2], 1e-6),
            25,
        )
        scores = _rows(driver, options, options.batch, heads, tokens, tokens)
        yield Call(f"softmax of {scores.shape}", (scores,), ops.softmax, lambda torch, a: torch.softmax(a[0], -1), 12)
        products = _rows(driver, options, options.batch, tokens, 3, heads, size)
        if options.dtype != "float32":
            yield Call(
                f"attention of {products.shape}",
                (products,),
                lambda p: ops.scaled_dot_product_attention(*p.transpose(2, 0, 3, 1, 4)),
                lambda torch, a: torch.nn.functional.scaled_dot_product_attention(*a[0].permute(2, 0, 3, 1, 4)),
                12,
            )
    elif network in BATCH_NORMS:
        for (channels, side), count in BATCH_NORMS[network].items():
            x = _images(driver, options, channels, side)
            m, w, b = (_vector(driver, options, x.shape[1]) for _ in range(3))
            yield Call(
                f"batch_norm of {x.shape}",
                (x, m, _vector(driver, options, x.shape[1], True), w, b),
                lambda x, m, v, w, b: ops.batch_norm(x, m, v, weight=w, bias=b),
                lambda torch, a: torch.nn.functional.batch_norm(*a),
                count,
            )
        for (channels, side, squeezed), count in GATES[network].items():
            yield _gate(driver, options, channels, side, squeezed, count, *GATED[network])
    elif network == "shufflenet_v2":
        for (channels, side), count in SHUFFLES.items():
            x = _images(driver, options, channels, side)
            yield Call(
                f"channel_shuffle of {x.shape}",
                (x,),
                lambda x: ops.channel_shuffle(x, 2),
                lambda torch, a: torch.nn.functional.channel_shuffle(a[0], 2),
                count,
            )
            yield Call(f"to_contiguous of {x.shape}", (x,), ops.to_contiguous, lambda torch, a: a[0].contiguous(), count)
    else:
        for (channels, side), count in UPSAMPLED.items():
            x = _images(driver, options, channels, side // (1 if options.thin == 1 else 7))
            how = {"scale_factor": 2, "mode": "bilinear"}
            yield Call(
                f"interpolate2d of {x.shape}",
                (x,),
                partial(ops.interpolate2d, **how),
                lambda torch, a, how=how: torch.nn.functional.interpolate(a[0], **how),
                count,
            )
            yield Call(
                f"pad of {x.shape}",
                (x,),
                lambda x: ops.pad(x, (1, 1, 1, 1), mode="reflect"),
                lambda torch, a: torch.nn.functional.pad(a[0], (1, 1, 1, 1), mode="reflect"),
                0,
            )


def _gate(driver: Any, options: Any, channels: int, side: int, squeezed: int, count: int, activation: str, gate: str) -> Call:
    """Squeeze-and-excite, in torch by the operations that it consists of."""
    x = _images(driver, options, channels, side)
    w1, b1 = _rows(driver, options, squeezed, x.shape[1]), _vector(driver, options, squeezed)
    w2, b2 = _rows(driver, options, x.shape[1], squeezed), _vector(driver, options, x.shape[1])

    def theirs(torch: Any, a: tuple[Any, ...]) -> Any:
        functional = torch.nn.functional
        between = functional.silu if activation == "swish" else torch.relu
        last = torch.sigmoid if gate == "sigmoid" else functional.hardsigmoid
        hidden = between(functional.linear(a[0].mean((2, 3)), a[1], a[2]))
        return a[0] * last(functional.linear(hidden, a[3], a[4]))[:, :, None, None]

    ours = partial(ops.squeeze_excite, activation=activation, gate=gate)
    return Call(f"squeeze_excite of {x.shape} by {squeezed}", (x, w1, b1, w2, b2), ours, theirs, count)


def repeated(call: Callable[[], Any], times: int) -> Callable[[], Any]:
    """So many calls in a row; the result is the last one's."""

    def run() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    return run


def cases_of(call: Call, driver: Any, torch: Any, options: Any, skipped: list[str]) -> dict[str, Callable[[], object]]:
    """Return the functions to time, once each gave the right result."""
    own = partial(call.ours, *call.arrays)
    program = handlepool.record(repeated(own, options.times))
    program.replay()
    eager = driver.asnumpy(own()).astype(np.float64)
    check(driver, f"{call.name}, recorded", program.outputs, eager)
    cases: dict[str, Callable[[], object]] = {OURS: program.replay}
    if torch is not None:
        tensors = tuple(tensor(torch, array) for array in call.arrays)
        exact = driver.asnumpy(array_of(call.theirs(torch, tuple(each.double() for each in tensors)))).astype(np.float64)
        check(driver, call.name, own(), exact)
        cases[TORCH_GRAPH] = graph_of(torch, repeated(partial(call.theirs, torch, tensors), options.times))
        if options.inductor:
            try:
                torch.compiler.reset()  # or the geometries before count as recompilations
                fused = torch.compile(lambda tensors: call.theirs(torch, tensors), dynamic=False)
                check(driver, f"{call.name}, Inductor", array_of(fused(tensors)), exact)
                cases[INDUCTOR] = graph_of(torch, repeated(partial(fused, tensors), options.times))
            except Exception as error:  # whatever a compiler may say; its times are left out
                skipped.append(f"{call.name}, Inductor: {type(error).__name__}")
    return cases


def add_sums(ratios: Ratios, network: str, found: list[tuple[int, dict[str, list[float]]]], options: Any) -> None:
    """The sum over a network beside torch's own kernels, and beside Inductor's."""
    judged = (options.batch, options.thin, options.dtype) == (1, 1, "float16")
    for peer, bound in ((TORCH_GRAPH, None), (INDUCTOR, MOST_OF_INDUCTOR)):
        both = [(count, samples) for count, samples in found if count and peer in samples]
        if both:
            sums = [
                [sum(count * samples[name][sample] for count, samples in both) for sample in range(options.repeats)]
                for name in (OURS, peer)
            ]
            ratios.add(f"{OURS} / {peer}, {network}, the sum", paired(*sums), bound if judged else None)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=3, help="replays in one sample (default: %(default)s)")
    parser.add_argument("--times", type=positive, default=50, help="calls in one program (default: %(default)s)")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=NETWORKS, help="(default: all)")
    parser.add_argument("--batch", type=positive, default=1, help="images (default: %(default)s)")
    parser.add_argument("--thin", type=positive, default=1, help="divides the numbers of channels (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="(default: %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="time what Inductor compiles as well, which takes seconds each")
    options = parse(parser, {"thin": 16, "times": 3}, calls=1, times=2)
    times: dict[str, Any] = {}
    ratios = Ratios()
    skipped: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    with pool_on_a_stream(options.driver) as (pool, stream):
        driver = pool.driver
        torch, why = torch_beside(driver, stream)
        if torch is None:
            skipped.append(why)
        for network in options.network:
            found = []
            counts[network] = {}
            for call in calls_of(network, driver, options):
                samples = regions(
                    cases_of(call, driver, torch, options, skipped), options.repeats, options.calls, driver, stream
                )["device"]
                samples = {name: [value / options.times for value in values] for name, values in samples.items()}
                times[f"{network}, {call.name}, microseconds a call, device"] = {n: summary(v) for n, v in samples.items()}
                counts[network][call.name] = call.count
                bound = MOST_OF_TORCH if (options.batch, options.thin) == (1, 1) else None
                ratios.compare(samples, OURS, TORCH_GRAPH, bound, f", {network}, {call.name}")
                ratios.compare(samples, OURS, INDUCTOR, None, f", {network}, {call.name}")
                found.append((call.count, samples))
            add_sums(ratios, network, found, options)
        sizes = {key: getattr(options, key) for key in ("batch", "thin", "dtype")}
        publish(
            options, "modern_ops", driver.name, times, ratios, skipped, **sizes, times_in_a_program=options.times, counts=counts
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
