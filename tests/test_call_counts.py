"""How many calls each hot path makes: counted, not timed, so a machine's noise is in none of it.

``python tests/test_call_counts.py`` prints the counts in the form of `BOUNDS`.

A call is counted when the package makes it, or when it enters a function of the package: Python's functions and C's apart. What
a driver does inside a call counts for nothing. Calls of the driver are Python's here, and mostly C's on a GPU. Frames of
comprehensions, which newer versions of Python do not make, are left out.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import handlepool
from handlepool import HandlePool, ParallelStates
from handlepool.drivers.host import HostDriver

BOUNDS = {
    "hit of get_handle": (2, 0),
    "hit of get_handle, stream given": (1, 0),
    "hit of get_workspace": (7, 0),
    "graph function, out given": (24, 1),
    "graph function": (24, 1),
    "conv2d, out given": (25, 1),
    "conv2d": (24, 1),
    "fork, 4 graph functions, join": (129, 48),
    "fork, 4 conv2d, join": (137, 44),
    "fork, 4 Python functions, join": (110, 60),
    "map of a graph function over 4": (121, 47),
    "replay": (5, 2),
}
"""For each path the most calls of Python's functions, and of C's; the same with Python 3.11, 3.12 and 3.13."""

OURS = str(Path(handlepool.__file__).parent)
DRIVER = str(Path(OURS, "drivers", "host"))
UNSEEN = {"<listcomp>", "<dictcomp>", "<setcomp>"}


@handlepool.graph
def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])


def paths(pool) -> dict[str, Callable[[], object]]:
    """The hot paths, each as a function without arguments."""
    driver = pool.driver
    x, w = (driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3)))
    outs = [conv(x, w) for _ in range(4)]
    y, stream = outs[0], driver.current_stream()
    states = ParallelStates(4, pool=pool)
    xs, ws = [x] * 4, [w] * 4
    conv2d, get_handle, get_workspace = handlepool.conv2d, pool.get_handle, pool.get_workspace

    def nothing(*_):
        pass

    def fork_of(function, **options):
        def region():
            with states.fork() as fork:
                for out in outs:
                    fork.run(function, x, w, out=out, **options)

        return region

    def functions():
        with states.fork() as fork:
            for out in outs:
                fork.run(nothing, x, out)

    program = handlepool.record(states.map, conv, xs, ws, pool=pool)
    return {
        "hit of get_handle": lambda: get_handle(),
        "hit of get_handle, stream given": lambda: get_handle(stream),
        "hit of get_workspace": lambda: get_workspace(4096),
        "graph function, out given": lambda: conv(x, w, out=y),
        "graph function": lambda: conv(x, w),
        "conv2d, out given": lambda: conv2d(x, w, padding=1, out=y),
        "conv2d": lambda: conv2d(x, w, padding=1),
        "fork, 4 graph functions, join": fork_of(conv),
        "fork, 4 conv2d, join": fork_of(conv2d, padding=1),
        "fork, 4 Python functions, join": functions,
        "map of a graph function over 4": lambda: states.map(conv, xs, ws),
        "replay": lambda: program.replay(),
    }


def counted(path: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python's functions and of C's that a path makes."""
    python = c = 0
    depth = 0  # of frames below one that is not ours

    def ours(name: str) -> bool:
        return name == __file__ or (name.startswith(OURS) and not name.startswith(DRIVER))

    def profile(frame, event, _):
        nonlocal python, c, depth
        name = frame.f_code.co_filename
        if event == "call":
            if depth:
                depth += 1
                return
            python += frame.f_code.co_name not in UNSEEN
            depth = not ours(name)
        elif event == "return":
            depth -= depth > 0
        elif event == "c_call" and not depth:
            c += 1

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(profile)
        path()
    finally:
        sys.setprofile(None)
        gc.enable()
    return python - 1, c - 1  # the path's own frame, and `sys.setprofile`


def count_all() -> dict[str, tuple[int, int]]:
    """The counts of every path once it is warm."""
    found = {}
    with HandlePool(driver=HostDriver(devices=1)) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("handlepool.pool._default", pool)
        with pool.driver.create_stream() as stream:
            for name, path in paths(pool).items():
                for _ in range(3):
                    path()
                stream.synchronize()
                found[name] = counted(path)
                stream.synchronize()
    return found


@pytest.fixture(scope="module")
def counts():
    return count_all()


@pytest.mark.parametrize("path", BOUNDS)
def test_a_hot_path_makes_no_more_calls_than_it_did(counts, path):
    for kind, found, most in zip(("Python", "C"), counts[path], BOUNDS[path], strict=True):
        assert found <= most, (
            f"{path}: {found} calls of {kind} functions, {most} at most. If the new ones are needed, "
            f"`python {Path(__file__).name}` prints what BOUNDS is to be"
        )


def test_every_path_has_a_bound(counts):
    assert counts.keys() == BOUNDS.keys()


def test_control_a_call_more_is_counted():
    def more():
        return len([])

    def path():
        return None

    def longer():
        return more()

    assert counted(path) == (0, 0)
    assert counted(longer) == (1, 1)


def test_what_a_driver_does_inside_is_not_counted():
    with HandlePool(driver=HostDriver()) as pool:
        stream = pool.driver.create_stream()
        assert counted(lambda: pool.driver.synchronize_stream(stream.ptr))[0] == 2  # and the pool's property


if __name__ == "__main__":
    for path, (python, c) in count_all().items():
        print(f'    "{path}": ({python}, {c}),')
