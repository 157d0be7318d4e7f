"""ViT-B/16, as torchvision has it."""

from typing import Any

from handlepool import ops as library
from nets.kinds import permuted

PATCH, HEADS, HEAD, LAYERS = 16, 12, 64, 12
EPS = 1e-6


def vit_b_16(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W), in float16 or bfloat16."""
    hidden = max(1, HEADS // p.thin) * HEAD
    w, b = p.filters("patches", hidden, x.shape[1], PATCH)
    x = permuted(ops.conv2d(x, w, bias=b, stride=PATCH), 0, 2, 3, 1)
    x = x.reshape(len(x), -1, hidden)
    token, _ = p.tokens("token", 1, hidden)
    x = ops.concat([ops.concat([token] * len(x), 0), x], 1)
    places, _ = p.tokens("places", x.shape[1], hidden)
    x = ops.add(x, places)
    for number in range(LAYERS):
        x = layer(p, f"{number}", x, ops)
    w, b = p.norm("norm", hidden)
    x = ops.layer_norm(x, weight=w, bias=b, eps=EPS)
    w, b = p.matrix("fc", p.width(1000), hidden)
    return ops.linear(x[:, 0], w, bias=b)


def layer(p: Any, name: str, x: Any, ops: Any) -> Any:
    """Apply attention and two layers to each token, each with its input added."""
    n, tokens, hidden = x.shape
    w, b = p.norm(f"{name}.norm1", hidden)
    y = ops.layer_norm(x, weight=w, bias=b, eps=EPS)
    w, b = p.matrix(f"{name}.products", 3 * hidden, hidden)
    y = ops.linear(y, w, bias=b).reshape(n, tokens, 3, hidden // HEAD, HEAD)
    q, k, v = (permuted(y[:, :, place], 0, 2, 1, 3) for place in range(3))
    y = permuted(ops.scaled_dot_product_attention(q, k, v), 0, 2, 1, 3).reshape(n, tokens, hidden)
    w, b = p.matrix(f"{name}.projection", hidden, hidden)
    x = ops.add(ops.linear(y, w, bias=b), x)
    w, b = p.norm(f"{name}.norm2", hidden)
    y = ops.layer_norm(x, weight=w, bias=b, eps=EPS)
    w, b = p.matrix(f"{name}.widen", 4 * hidden, hidden)
    y = ops.linear(y, w, bias=b, activation="gelu")
    w, b = p.matrix(f"{name}.narrow", hidden, 4 * hidden)
    return ops.add(ops.linear(y, w, bias=b), x)
