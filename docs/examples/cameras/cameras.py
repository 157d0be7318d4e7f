"""Six cameras in real time: each image goes through a network of its own, and one launch starts all six.

``python cameras.py`` draws the latency of each frame, from the moment when the cameras have it until the host has all scores.
"""

import sys
import time

import numpy as np

import handlepool

CAMERAS = 6


def network(rng, stages=((3, 16), (16, 32), (32, 64), (64, 128)), classes=10):
    """Return the weights of one camera's network, on the device."""

    def layer(filters, taken, size):
        w = rng.standard_normal((filters, taken, size, size), dtype=np.float32) / np.sqrt(taken * size * size, dtype=np.float32)
        return handlepool.asarray(w), handlepool.asarray(np.zeros(filters, np.float32))

    pairs = [(layer(filters, taken, 3), layer(filters, filters, 3)) for taken, filters in stages]
    return pairs, layer(classes, stages[-1][1], 1)


def scores(x, weights):
    """Return the scores of one image: stages of a strided convolution and a residual one."""
    pairs, (head, bias) = weights
    for (w, b), (v, c) in pairs:
        x = handlepool.conv2d(x, w, bias=b, stride=2, padding=1, activation="relu")
        x = handlepool.conv2d(x, v, bias=c, padding=1, add=x, activation="relu")
    return handlepool.conv2d(handlepool.mean2d(x, keepdims=True), head, bias=bias)


def recognizer(networks):
    """Return the recorded function of a frame, which is an image of each camera."""

    @handlepool.recorded(lanes=8)
    def frame(*images):
        return [scores(x, weights) for x, weights in zip(images, networks, strict=True)]

    return frame


def latencies(frame, images, count, period):
    """Run a frame each period; return each frame's milliseconds until its scores are on the host."""
    found, begin = [], time.perf_counter()
    for number in range(count):
        due = begin + number * period
        time.sleep(max(0.0, due - time.perf_counter()))
        frame.submit(*images).result()
        found.append((time.perf_counter() - due) * 1e3)
    return found


def draw(found, file, period, where):
    """Draw a histogram of latencies, with the median, the 99th percentile and the next frame."""
    from matplotlib import pyplot

    median, late = np.percentile(found, [50, 99])
    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=150, layout="constrained")
    axes.hist(found, bins=60, color="#9cc4ea")
    for value, name, colour in ((median, "median", "#0a7d55"), (late, "p99", "#d1552b"), (period * 1e3, "next frame", "#1c2126")):
        axes.axvline(value, color=colour, linewidth=1.6, label=f"{name}: {value:.1f} ms")
    axes.set(xlabel="milliseconds from the cameras to the scores on the host", ylabel="frames", xlim=(0, None))
    axes.set_title(f"{CAMERAS} cameras, a network each, {len(found)} frames ({where})", loc="left", weight="bold")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    on_gpu = handlepool.default_pool().driver.name == "cuda"
    side, period, where = (224, 1 / 30, "one GPU") if on_gpu else (32, 1 / 5, "host driver: NumPy on a CPU, not a GPU")
    rng = np.random.default_rng(0)
    recognize = recognizer([network(rng) for _ in range(CAMERAS)])
    views = [rng.standard_normal((1, 3, side, side), dtype=np.float32) for _ in range(CAMERAS)]
    recognize.submit(*views).result()  # this call records the program
    draw(latencies(recognize, views, 150, period), [*sys.argv, "cameras.png"][1], period, where)
