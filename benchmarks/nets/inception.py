"""inception_v3, as torchvision has it, but padded where that is not, so that it takes small images."""

from typing import Any

from handlepool import ops as library


def inception_v3(p: Any, x: Any, ops: Any = library) -> Any:
    """Scores (N, 1000) of images (N, 3, H, W)."""

    def conv(name: str, x: Any, filters: int, kernel: Any = 1, stride: int = 1) -> Any:
        rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        w, b = p.conv(name, x, filters, (rows, columns))
        return ops.conv2d(x, w, bias=b, stride=stride, padding=(rows // 2, columns // 2), activation="relu")

    def chain(name: str, x: Any, *layers: tuple[int, Any]) -> Any:
        for number, (filters, kernel) in enumerate(layers):
            x = conv(f"{name}.{number}", x, filters, kernel)
        return x

    def pooled(name: str, x: Any, filters: int) -> Any:
        return conv(name, ops.avg_pool2d(x, 3, stride=1, padding=1), filters)

    def smaller(x: Any) -> Any:
        return ops.max_pool2d(x, 3, stride=2, padding=1)

    x = conv("1", x, 32, 3, stride=2)
    x = smaller(chain("2", x, (32, 3), (64, 3)))
    x = smaller(chain("3", x, (80, 1), (192, 3)))
    for name, filters in (("5b", 32), ("5c", 64), ("5d", 64)):
        one = conv(f"{name}.1", x, 64)
        five = chain(f"{name}.5", x, (48, 1), (64, 5))
        three = chain(f"{name}.3", x, (64, 1), (96, 3), (96, 3))
        x = ops.concat([one, five, three, pooled(f"{name}.pool", x, filters)], 1)
    three = conv("6a.3", x, 384, 3, stride=2)
    twice = conv("6a.4", chain("6a.5", x, (64, 1), (96, 3)), 96, 3, stride=2)
    x = ops.concat([three, twice, smaller(x)], 1)
    flat, tall = (1, 7), (7, 1)
    for name, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        one = conv(f"{name}.1", x, 192)
        seven = chain(f"{name}.7", x, (inner, 1), (inner, flat), (192, tall))
        twice = chain(f"{name}.8", x, (inner, 1), (inner, tall), (inner, flat), (inner, tall), (192, flat))
        x = ops.concat([one, seven, twice, pooled(f"{name}.pool", x, 192)], 1)
    three = conv("7a.3", conv("7a.1", x, 192), 320, 3, stride=2)
    seven = conv("7a.4", chain("7a.7", x, (192, 1), (192, flat), (192, tall)), 192, 3, stride=2)
    x = ops.concat([three, seven, smaller(x)], 1)
    for name in ("7b", "7c"):
        one = conv(f"{name}.1", x, 320)
        three = conv(f"{name}.3", x, 384)
        twice = chain(f"{name}.4", x, (448, 1), (384, 3))
        parts = [conv(f"{name}.{y}.{k}", z, 384, k) for y, z in enumerate((three, twice)) for k in ((1, 3), (3, 1))]
        x = ops.concat([one, *parts, pooled(f"{name}.pool", x, 192)], 1)
    w, b = p.linear("fc", x, 1000)
    return ops.linear(ops.mean2d(x), w, bias=b)
