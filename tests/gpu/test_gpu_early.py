"""Kernels that begin before what is before them has ended: nothing is read before it was written, however cuDNN launches.

cuDNN 9.19 launches convolutions with a residual so, and they read that too early.
"""

import numpy as np
import pytest
from harness.insides import recording_of

import handlepool
from handlepool import HandlePool, ParallelStates, ops

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("handlepool.drivers.cuda.driver", reason="the cuda driver's packages are not installed")
from handlepool.drivers.cuda import capture, executable, fast_launch  # noqa: E402
from handlepool.drivers.cuda.rewiring import Rewiring  # noqa: E402

BATCHES = [8, 1, 32]
DTYPES = ["float16", "float32"]
TIMES = 6
"""Runs that are queued at once: about seventy kernels each, of the thousand that a stream takes before a launch waits."""
SEEN_WITH = 91900
"""The version of cuDNN whose kernels read too early."""


@pytest.fixture
def trusting(monkeypatch):
    """A pool that leaves it to cuDNN's kernels to wait."""
    rewiring = Rewiring(capture.cu)
    rewiring.make_plain = rewiring.edges
    monkeypatch.setattr(capture, "_rewiring", rewiring)
    for module in (executable, fast_launch):
        monkeypatch.setattr(module, "barrier", lambda pointer: None)
    with HandlePool(driver="cuda") as pool:
        yield pool


class Blocks:
    """The blocks of resnet18, whose residuals are written right before they are read where their number of channels changes."""

    def __init__(self, dtype, batch):
        rng = np.random.default_rng(batch)

        def random(*shape, scale=None):
            scale = (2 / np.prod(shape[1:])) ** 0.5 if scale is None else scale  # keeps the variance through relu
            return cupy.asarray((rng.standard_normal(shape, np.float32) * scale).astype(dtype))

        def last(n, c, h, w, scale=None):
            return random(n, h, w, c, scale=scale).transpose(0, 3, 1, 2)

        self.x, self.blocks, before = last(batch, 64, 56, 56, scale=1), [], 64
        for channels in (64, 64, 128, 128, 256, 256, 512, 512):
            shortcut = None if channels == before else last(channels, before, 1, 1)
            filters = last(channels, before, 3, 3), last(channels, channels, 3, 3)
            self.blocks.append((*filters, shortcut, random(channels, scale=0.1)))
            before = channels
        self.matrix = random(1000, before)

    def __call__(self, pool, after=lambda: None):
        x = self.x
        for first, second, shortcut, bias in self.blocks:
            stride = 1 if shortcut is None else 2
            y = ops.conv2d(x, first, bias=bias, stride=stride, padding=1, activation="relu", pool=pool)
            after()
            if shortcut is not None:
                x = ops.conv2d(x, shortcut, bias=bias, stride=stride, pool=pool)
                after()
            x = ops.conv2d(y, second, bias=bias, padding=1, add=x, activation="relu", pool=pool)
            after()
        return ops.linear(ops.mean2d(x, pool=pool), self.matrix, pool=pool)

    def expected(self, pool):
        return self(pool, cupy.cuda.Device().synchronize)

    def wrong(self, found, expected):
        """How many of some results are wrong."""
        right = cupy.asnumpy(expected).astype(np.float64)
        errors = [np.linalg.norm(cupy.asnumpy(y) - right) / np.linalg.norm(right) for y in found]
        return sum(not error < 5e-3 for error in errors)


def behind_a_queue(pool, latch, blocks):
    """Results that were all queued before the first one began."""
    blocks(pool)
    latch.hold()
    found = [blocks(pool) for _ in range(TIMES)]
    latch.release()
    return found


def in_branches(pool, latch, blocks):
    states = ParallelStates(3, pool=pool)

    def several():
        with states.fork() as fork:
            return [fork.run(blocks, pool) for _ in range(3)]

    several()
    latch.hold()
    found = [y for _ in range(TIMES // 3) for y in several()]
    latch.release()
    return found


def replayed(lanes):
    def results(pool, latch, blocks):
        found = []
        for _ in range(3):
            with handlepool.record(blocks, pool, lanes=lanes, pool=pool) as program:
                for _ in range(TIMES // 3):
                    program.replay()
                    found.append(program.outputs.copy())
        return found

    return results


WAYS = {"queued": behind_a_queue, "branches": in_branches, "recorded": replayed(None), "lanes": replayed(8)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_g18_what_was_written_right_before_is_read(pool, stream, latch, way, dtype, batch):
    blocks = Blocks(dtype, batch)
    assert not blocks.wrong(WAYS[way](pool, latch, blocks), blocks.expected(pool))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residuals_are_in_the_plans_of_their_convolutions(pool, stream, monkeypatch, dtype):
    taken, conv2d = [], ops.conv2d

    def planned(x, w, **options):
        if "add" in options:
            taken.append(len(ops.conv2d_plan(x, w, **options).inputs))
        return conv2d(x, w, **options)

    monkeypatch.setattr(ops, "conv2d", planned)
    Blocks(dtype, 1)(pool)
    assert taken == [4] * 8  # images, filters, bias and residual


def programmatic(pool):
    """Whether an edge of a recording is."""
    with handlepool.record(Blocks("float16", BATCHES[0]), pool, lanes=8, pool=pool) as program:
        return Rewiring(capture.cu).begins_early(recording_of(program).captured.pointer)


def test_no_edge_of_a_recording_is_programmatic(pool, stream):
    assert not programmatic(pool)


def test_control_cudnn_leaves_edges_that_are(trusting, stream):
    import cudnn

    found = programmatic(trusting)
    if not found and cudnn.backend_version() != SEEN_WITH:
        pytest.skip(f"cuDNN {cudnn.backend_version()} was not seen to leave programmatic edges here")
    assert found


def test_g18_control_kernels_that_begin_early_read_too_early(trusting, stream, latch):
    import cudnn

    wrong = 0
    for dtype in DTYPES:
        for batch in BATCHES:
            blocks = Blocks(dtype, batch)
            expected = blocks.expected(trusting)
            for way in ("queued", "recorded", "lanes"):
                wrong += blocks.wrong(WAYS[way](trusting, type(latch)(), blocks), expected)
    if not wrong and cudnn.backend_version() != SEEN_WITH:
        pytest.skip(f"no kernel of cuDNN {cudnn.backend_version()} was seen to read too early here")
    assert wrong
