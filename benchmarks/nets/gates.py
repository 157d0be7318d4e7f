"""Squeeze-and-excite, as torchvision has it."""

from typing import Any


def squeeze_excite(p: Any, name: str, x: Any, squeezed: int, activation: str, gate: str, ops: Any) -> Any:
    """Scale the channels of images by a gate, which two small layers make of the channels' means."""
    w, b = p.linear(f"{name}.squeeze", x, squeezed)
    s = ops.linear(ops.mean2d(x), w, bias=b, activation=activation)
    w, b = p.matrix(f"{name}.excite", x.shape[1], s.shape[1])
    s = ops.linear(s, w, bias=b, activation=gate)
    return ops.multiply(x, s.reshape(*s.shape, 1, 1))
