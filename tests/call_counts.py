"""How many calls each hot path makes: counted, not timed, so a machine's noise is in none of it.

``python tests/call_counts.py`` prints the counts in the form of `BOUNDS`.

A call is counted when the package makes it, or when it enters a function of the package: Python's functions and C's apart. What
a driver does inside a call counts for nothing. Calls of the driver are Python's here, and mostly C's on a GPU. Frames of
comprehensions, which newer versions of Python do not make, are left out.
"""

import gc
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.graphs import convolution as conv
from harness.process import as_default

import handlepool
from handlepool import HandlePool, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred

BOUNDS = {
    "hit of get_handle": (2, 0),
    "hit of get_handle, stream given": (1, 0),
    "hit of get_workspace": (7, 0),
    "graph function, out given": (24, 1),
    "graph function": (24, 1),
    "conv2d, out given": (25, 1),
    "conv2d": (23, 1),
    "conv2d, a list given": (25, 2),
    "kernel of our own, out given": (22, 1),
    "kernel of our own with options": (17, 1),
    "fork, 4 graph functions, join": (260, 150),
    "fork, 4 conv2d, join": (270, 150),
    "fork, 4 Python functions, join": (545, 805),
    "map of a graph function over 4": (144, 54),
    "call of a program": (17, 4),
    "call of a recorded function": (24, 6),
    "replay": (4, 2),
    "2 items of a spread": (90, 46),
}
CUDA_BOUNDS = {
    "graph function, out given": (6, 0),
    "graph function": (8, 0),
    "conv2d, out given": (7, 0),
    "conv2d": (7, 0),
    "conv2d, a list given": (9, 1),
    "kernel of our own, out given": (7, 0),
    "kernel of our own with options": (8, 0),
    "fork, 4 graph functions, join": (180, 150),
    "fork, 4 conv2d, join": (190, 150),
    "fork, 4 Python functions, join": (560, 805),
    "map of a graph function over 4": (65, 54),
    "call of a program": (12, 6),
    "call of a recorded function": (23, 8),
    "replay": (4, 2),
    "2 items of a spread": (86, 46),
}
"""The same on the cuda driver, over a stand-in for the GPU, whose functions are Python's."""
"""For each path the most calls of Python's functions, and of C's; the same with Python 3.11, 3.12 and 3.13. Those of a fork
depend on where its arrays happen to lie: far from each other nothing is looked up. So their bounds have room."""

SHAPES = (1, 4, 6, 6), (4, 4, 3, 3)
OURS = str(Path(handlepool.__file__).parent)
DRIVER = str(Path(OURS, "drivers", "host"))
WRITTEN = "<a plan's launch>", "<a prepared call>", "<a program's guards>"
UNSEEN = {"<listcomp>", "<dictcomp>", "<setcomp>"}


def paths(pool, x, w) -> dict[str, Callable[[], object]]:
    """The hot paths, each as a function without arguments."""
    outs = [conv(x, w) for _ in range(4)]
    y, stream = outs[0], pool.driver.current_stream()
    sum_of_two = handlepool.add(x, x)
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

    return {
        "hit of get_handle": lambda: get_handle(),
        "hit of get_handle, stream given": lambda: get_handle(stream),
        "hit of get_workspace": lambda: get_workspace(4096),
        "graph function, out given": lambda: conv(x, w, out=y),
        "graph function": lambda: conv(x, w),
        "conv2d, out given": lambda: conv2d(x, w, padding=1, out=y),
        "conv2d": lambda: conv2d(x, w, padding=1),
        "conv2d, a list given": lambda: conv2d(x, w, padding=[1, 1]),
        "kernel of our own, out given": lambda: handlepool.add(x, x, out=sum_of_two),
        "kernel of our own with options": lambda: handlepool.max_pool2d(x, 3, stride=1, padding=1),
        "fork, 4 graph functions, join": fork_of(conv),
        "fork, 4 conv2d, join": fork_of(conv2d, padding=1),
        "fork, 4 Python functions, join": functions,
        "map of a graph function over 4": lambda: states.map(conv, xs, ws),
    }


def counted(path: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python's functions and of C's that a path makes."""
    python = c = 0
    depth = 0  # of frames below one that is not ours

    def ours(name: str) -> bool:
        return name in (__file__, path.__code__.co_filename, *WRITTEN) or (name.startswith(OURS) and not name.startswith(DRIVER))

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


def count_each(paths: dict[str, Callable[[], object]]) -> dict[str, tuple[int, int]]:
    """The counts of every path once it is warm, with nothing left of other tests that a fork would give back."""
    gc.collect()
    while deferred.deferred:
        deferred.deferred.run()
    for path in paths.values():
        for _ in range(3):
            path()
    return {name: counted(path) for name, path in paths.items()}


def count_recorded(pool, x, w, program) -> dict[str, tuple[int, int]]:
    """The counts of every path, those of a program, and of a spread, which goes on."""
    with handlepool.spread(conv, repeat(x), shared=(w,), lanes=None) as results:
        double = handlepool.recorded(lambda x: handlepool.add(x, x), lanes=None)
        called = handlepool.record(double.__wrapped__, handlepool.add(x, x), lanes=None, pool=pool)
        more = {"call of a program": lambda: called(x), "call of a recorded function": lambda: double(x)}
        more |= {"replay": lambda: program.replay(), "2 items of a spread": lambda: (next(results), next(results))}
        return count_each(paths(pool, x, w) | more)


def count_all() -> dict[str, tuple[int, int]]:
    """On the host driver."""
    with HandlePool(driver=HostDriver(devices=1)) as pool, as_default(pool):
        driver = pool.driver
        x, w = (driver.asarray(np.ones(shape, np.float32)) for shape in SHAPES)
        with driver.create_stream():
            program = handlepool.record(ParallelStates(4, pool=pool).map, conv, [x] * 4, [w] * 4, pool=pool)
            driver.event_done = lambda event, **_: driver.synchronize_event(event) is None  # or counts depend on luck
            return count_recorded(pool, x, w, program)


def count_cuda() -> dict[str, tuple[int, int]]:
    """On the cuda driver, with CuPy's arrays and no GPU."""
    from harness.no_gpu import NoGpuDriver, World

    from handlepool.drivers.cuda import prepared

    def nothing(*_):
        pass

    class Graph(SimpleNamespace):
        __hash__ = object.__hash__

    class Recording(NoGpuDriver):
        """What it captures is a graph of one node, of which every stream is a part."""

        capturing = False

        def is_capturing(self, pointer):
            return self.capturing

        def capture_id(self, pointer):
            return int(self.capturing)

        def begin_capture(self, pointer):
            self.capturing = True

        def end_capture(self, pointer):
            self.capturing = False
            graph = Graph(nodes=1, launch=nothing, upload=nothing, instantiate=nothing, destroy=nothing)
            graph.arranged = lambda: graph
            graph.host_copies = list
            return graph

        def recording_memory(self):
            return SimpleNamespace(allocator=None, nbytes=0, holds=lambda _: True, release=lambda: True, on_allocate=nothing)

    with World(driver=Recording()) as world, as_default(world.pool), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_move", nothing)
        patch.setattr(prepared, "runtime", SimpleNamespace(memcpyAsync=nothing, memcpyDefault=4))
        x, w = (world.array(*shape) for shape in SHAPES)
        program = handlepool.record(world.states.map, conv, [x] * 4, [w] * 4, pool=world.pool)
        found = count_recorded(world.pool, x, w, program)
        return {name: found[name] for name in found if not name.startswith("hit")}


if __name__ == "__main__":
    for title, found in (("BOUNDS", count_all()), ("CUDA_BOUNDS", count_cuda())):
        print(f"{title} = {{")
        for path, (python, c) in found.items():
            print(f'    "{path}": ({python}, {c}),')
        print("}")
