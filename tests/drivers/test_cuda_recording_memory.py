"""Memory of a recording on the cuda driver, without a GPU: who is given what was freed (guarantee 8)."""

from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.cupy

from handlepool.drivers.cuda import capture  # noqa: E402

KNOWN, THEIRS, OTHERS = (1, 2), 3, 4
"""Pointers of streams."""


@pytest.fixture
def give(monkeypatch):
    """What allocates on a stream, of memory that is pretended."""
    addresses = count(512, 512)
    now = SimpleNamespace(ptr=0)

    def fresh(memory, nbytes):
        start = next(addresses)
        return SimpleNamespace(ptr=start, mem=SimpleNamespace(ptr=start, size=nbytes))

    monkeypatch.setattr(capture.CudaRecordingMemory, "_fresh", fresh)
    monkeypatch.setattr(capture.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(capture.cupy.cuda, "get_current_stream", lambda: now)

    def on(memory, stream):
        now.ptr = stream
        return memory.allocator(100)

    return on


def test_streams_that_are_known_take_each_others_memory_and_any_other_its_own(give):
    memory = capture.CudaRecordingMemory(lambda: None)
    memory.set_reuse_policy(lambda start, stop: True, KNOWN.__contains__)
    first, theirs = give(memory, KNOWN[0]), give(memory, THEIRS)
    freed = first.ptr, theirs.ptr
    del first, theirs
    others = give(memory, OTHERS)
    assert others.ptr not in freed
    again = give(memory, KNOWN[1]), give(memory, THEIRS)
    assert (again[0].ptr, again[1].ptr) == freed
    assert give(memory, KNOWN[0]).ptr not in (*freed, others.ptr)


def test_control_where_all_are_known_any_takes_it(give):
    memory = capture.CudaRecordingMemory(lambda: None)
    memory.set_reuse_policy(lambda start, stop: True, lambda stream: True)
    freed = give(memory, THEIRS).ptr  # let go of at once
    assert give(memory, OTHERS).ptr == freed
