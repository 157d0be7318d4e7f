"""Networks by torch.compile: as its users have it with CUDA graphs, and Inductor at its best, captured by hand."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from nets.kinds import Torch
from peers import graphed

WARM_UP = 3
"""Calls until a compiled function replays its own CUDA graph: one compiles, one warms up, one captures."""
Case = tuple[Callable[[], Any], Callable[[], Any]]
"""A function to time, and a function that returns its scores."""


def module_of(torch: Any, network: Callable[..., Any], p: Any) -> Any:
    """A network of `nets` as a module of torch's with parameters ``p``, which are its tensors already."""
    kind = Torch(torch)

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Gives the network its parameters by name, as `nets.Parameters` does."""

        thin = p.thin

        def __init__(self) -> None:
            super().__init__()
            for name, (w, b) in p.placed.items():
                for part, values in (("w", w), ("b", b)):
                    self.register_parameter(f"{part}_{name.replace('.', '_')}", torch.nn.Parameter(values, requires_grad=False))

        def conv(self, name: str, x: Any, filters: int, kernel: int, least: int = 0) -> tuple[Any, Any]:
            name = name.replace(".", "_")
            return getattr(self, f"w_{name}"), getattr(self, f"b_{name}")

        def linear(self, name: str, x: Any, features: int) -> tuple[Any, Any]:
            return self.conv(name, x, features, 1)

        def transposed(self, name: str, x: Any, filters: int, kernel: int) -> Any:
            return self.conv(name, x, filters, kernel)[0]

        def depthwise(self, name: str, x: Any, kernel: int) -> tuple[Any, Any]:
            return self.conv(name, x, 0, kernel)

        def filters(self, name: str, filters: int, channels: int, kernel: int) -> tuple[Any, Any]:
            return self.conv(name, None, filters, kernel)

        def matrix(self, name: str, features: int, taken: int) -> tuple[Any, Any]:
            return self.conv(name, None, features, 1)

        def norm(self, name: str, channels: int) -> tuple[Any, Any]:
            return self.conv(name, None, channels, 1)

        def scale(self, name: str, channels: int) -> tuple[Any, Any]:
            return self.conv(name, None, channels, 1)

        def tokens(self, name: str, count: int, features: int) -> tuple[Any, Any]:
            return self.conv(name, None, count, 1)

        def width(self, channels: int) -> int:
            return p.width(channels)

        def forward(self, x: Any) -> Any:
            return network(self, x, kind)

    return Module()


def reduce_overhead(torch: Any, module: Any, x: Any) -> Case:
    """As torch's users write it."""
    case = partial(torch.compile(module, mode="reduce-overhead", dynamic=False, fullgraph=True), x)
    for _ in range(WARM_UP):
        case()
    return case, case


def inductor(torch: Any, module: Any, x: Any) -> Case:
    """Inductor with frozen weights and the quickest of cuDNN's kernels, in a CUDA graph made by hand."""
    config = import_module("torch._inductor.config")
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        with config.patch(freezing=True):
            case, kept = graphed(torch, partial(torch.compile(module, dynamic=False, fullgraph=True), x))
    finally:
        torch.backends.cudnn.benchmark = before
    return case, lambda: kept
