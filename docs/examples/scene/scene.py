"""A detector, a segmenter and a depth network over one image, as one program whose lanes run them side by side.

``python scene.py`` draws when each node ran, and the time of the same nodes one after the other.
"""

import sys
from functools import partial

import numpy as np

import handlepool

raw, double = partial(handlepool.conv2d, padding=1), partial(handlepool.interpolate2d, scale_factor=2)
conv, halve = partial(raw, activation="relu"), partial(raw, activation="relu", stride=2)


def detector(x, stem, fine, coarse, lateral, scores, boxes):
    """Return scores and boxes at two scales, from a pyramid of features."""
    above = halve(halve(x, stem), fine)
    below = halve(above, coarse)
    above = conv(above, lateral, add=double(below))
    return [(raw(level, scores), raw(level, boxes)) for level in (above, below)]


def segmenter(x, first, second, third, joined, scores):
    """Return the scores of the classes of each pixel, from an encoder and a decoder."""
    fine = halve(x, first)
    coarse = double(conv(halve(fine, second), third))
    return double(raw(conv(handlepool.concat([fine, coarse], 1), joined), scores))


def depth(x, first, second, third, up, last):
    """Return the depth of each pixel."""
    coarse = conv(halve(halve(x, first), second), third)
    return double(raw(handlepool.conv_transpose2d(coarse, up, stride=2, activation="relu"), last))


SHAPES = {
    detector: [(16, 3, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3), (32, 32, 3, 3), (20, 32, 3, 3), (4, 32, 3, 3)],
    segmenter: [(16, 3, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3), (16, 48, 3, 3), (8, 16, 3, 3)],
    depth: [(16, 3, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3), (32, 16, 2, 2), (1, 16, 3, 3)],
}
COLOURS = {detector: "#0b6bcb", segmenter: "#0a7d55", depth: "#d1552b"}


def together(rng):
    """Return the recorded function of an image, with random weights on the device."""
    drawn = {net: [rng.standard_normal(shape, dtype=np.float32) / 12 for shape in shapes] for net, shapes in SHAPES.items()}
    weights = {net: [*map(handlepool.asarray, filters)] for net, filters in drawn.items()}
    return handlepool.recorded(lambda x: [net(x, *filters) for net, filters in weights.items()], lanes=8)


def network_of(step):
    """Return the network in whose lines a node was called."""
    return [net for net in SHAPES if net.__code__.co_firstlineno <= int(step.place.rpartition(":")[2])][-1]


def draw(found, file, where):
    """Draw the nodes of a measured program by lane and time, above the sum of their times."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4), dpi=150, layout="constrained")
    left, seen = 0.0, {}
    for net, step, (begin, end), alone in zip(map(network_of, found.steps), found.steps, found.ran, found.times, strict=True):
        for row, start, length in ((step.lane, begin, end - begin), (found.got, left, alone)):
            seen[net] = axes.barh(row, length / 1e3, left=start / 1e3, color=COLOURS[net], edgecolor="white", linewidth=0.6)
        left += alone
    axes.legend(seen.values(), [net.__name__ for net in seen], loc="upper right", frameon=False)
    axes.set_yticks(range(found.got + 1), [*(f"lane {lane}" for lane in range(found.got)), "one after the other"])
    axes.set(xlabel="milliseconds", xlim=(0, None), ylim=(found.got + 0.6, -0.6))
    title = f"{max(found.ends) / 1e3:,.2f} ms on {found.got} lanes, {left / 1e3:,.2f} ms one after the other\n({where})"
    axes.set_title(title, loc="left", weight="bold")
    figure.savefig(file)


if __name__ == "__main__":
    on_gpu, rng = handlepool.default_pool().driver.name == "cuda", np.random.default_rng(0)
    image = rng.standard_normal((1, 3, 384, 384) if on_gpu else (1, 3, 64, 64), dtype=np.float32)
    found = together(rng).program(handlepool.asarray(image)).explain(measure=True)
    draw(found, [*sys.argv, "scene.png"][1], "one GPU" if on_gpu else "host driver: NumPy on a CPU, not a GPU")
