"""Squeeze-and-excite, as torchvision has it."""

from typing import Any


def squeeze_excite(p: Any, name: str, x: Any, squeezed: int, activation: str, gate: str, ops: Any) -> Any:
    """Scale the channels of images by a gate, which two small layers make of the channels' means."""
    w1, b1 = p.linear(f"{name}.squeeze", x, squeezed)
    w2, b2 = p.matrix(f"{name}.excite", x.shape[1], w1.shape[0])
    return ops.squeeze_excite(x, w1, b1, w2, b2, activation=activation, gate=gate)
