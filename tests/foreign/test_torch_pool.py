"""The pool of torch's allocator that a recording has, with a stand-in for torch: an allocator that notes what it is asked for."""

import importlib.util
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import handlepool
from handlepool import CaptureError

MEBIBYTE = 1 << 20


class Allocator:
    """Takes 2 MiB from the device for each stream of each pool; of pools in use the first is asked."""

    def __init__(self):
        self.used, self.uses, self.segments, self.forgotten = [], {}, {}, []
        self.allocated, self.stream, self.last, self.live = 0, 7, 0, set()
        self.strided = object()
        self.uint8 = "uint8"
        self.__version__ = "2.8"
        self._C = SimpleNamespace(
            _cuda_beginAllocateCurrentThreadToPool=self.begin,
            _cuda_endAllocateToPool=self.end,
            _cuda_releasePool=self.release,
            _cuda_clearCublasWorkspaces=lambda: self.forgotten.append(bool(self.used)),
        )
        self.autograd = SimpleNamespace(set_multithreading_enabled=lambda on: nullcontext())
        self.cuda = SimpleNamespace(
            graph_pool_handle=self.handle,
            memory_stats_as_nested_dict=self.stats,
            memory_snapshot=self.snapshot,
            get_allocator_backend=lambda: "native",
        )
        self.Tensor = Tensor

    def handle(self):
        self.last += 1
        return 0, self.last

    def begin(self, device, pool):
        self.used.append(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def end(self, device, pool):
        self.used.remove(pool)

    def release(self, device, pool):
        self.uses[pool] -= 1

    def stats(self, device):
        taken = 2 * MEBIBYTE * len(self.segments)
        return {"allocation": {"all": {"allocated": self.allocated}}, "reserved_bytes": {"all": {"allocated": taken}}}

    def snapshot(self):
        return [
            {"address": start, "total_size": 2 * MEBIBYTE, "stream": stream, "segment_pool_id": owner or (0, 0)}
            | {"active_size": owner in self.live}
            for (owner, stream), start in self.segments.items()
        ]

    def empty(self, *size, **options):
        self.allocated += 1
        key = self.used[0] if self.used else None, self.stream
        start = self.segments.setdefault(key, 2 * MEBIBYTE * (100 + len(self.segments)))
        return Tensor(start + self.allocated)


class Tensor:
    is_cuda = True

    def __init__(self, pointer, layout=None):
        self.pointer, self.layout = pointer, layout

    def data_ptr(self):
        return self.pointer

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.pointer - 1)


@pytest.fixture
def torch(monkeypatch):
    torch = Allocator()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.autograd", SimpleNamespace(forward_ad=None))
    return torch


@pytest.fixture
def foreign(torch):
    place = f"{handlepool.__path__[0]}/foreign/torch.py"
    spec = importlib.util.spec_from_file_location("foreign_with_a_stand_in", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_allocated_meanwhile_is_from_the_pool_and_known_by_its_stream(torch, foreign):
    before = torch.empty(1)
    pool = foreign.recording_pool(0)
    pool.begin()
    torch.stream = 8
    first = torch.empty(1)
    assert pool.stream_of(first.data_ptr()) == 8
    torch.stream = 9
    assert pool.stream_of(torch.empty(1).data_ptr()) == 9
    assert pool.stream_of(first.data_ptr()) == 8
    assert pool.stream_of(before.data_ptr()) is None
    pool.check()
    pool.end()
    assert pool.nbytes == 4 * MEBIBYTE
    assert torch.used == []
    assert torch.forgotten == [False, False]  # workspaces, before and after
    assert pool.stream_of(torch.empty(1).data_ptr()) is None
    foreign._spare[0] = [(0, (0, 8)), (0, (0, 9))]
    for _ in range(2):
        pool.close()
    assert torch.uses == {(0, 1): 0}


def test_memory_from_elsewhere_is_looked_up_once_for_each_time_that_torch_takes_more(torch, foreign, monkeypatch):
    pool = foreign.recording_pool(0)
    pool.begin()
    torch.empty(1)
    pool.stream_of(5)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", None)
    assert [pool.stream_of(pointer) for pointer in range(1000)] == [None] * 1000


def test_another_pool_that_is_in_use_is_found_where_something_was_allocated(torch, foreign):
    torch.begin(0, (0, 1000))
    pool = foreign.recording_pool(0)
    pool.begin()
    pool.check()
    torch.empty(1)
    with pytest.raises(CaptureError, match="outside of torch"):
        pool.check()
    pool.end()
    assert pool.nbytes == 0


def test_other_threads_allocations_alone_are_no_error(torch, foreign):
    pool = foreign.recording_pool(0)
    pool.begin()
    torch.allocated += 1
    pool.check()
    pool.end()


def test_storages_are_told_of_tensors_and_views_and_of_others_the_tensors(torch, foreign):
    pool = foreign.recording_pool(0)
    strided, sparse = Tensor(101, torch.strided), Tensor(0, "sparse")
    view = foreign.View(101, (1,), (1,), None, 0, False, strided)
    found = [*pool.storages([strided, 5], {"a": view}, sparse)]
    assert [start for start, _ in found] == [100, 100, -id(sparse)]
    assert found[2][1] is sparse


def test_a_torch_without_pools_of_one_thread_is_refused(torch, foreign):
    del torch._C._cuda_beginAllocateCurrentThreadToPool
    with pytest.raises(CaptureError, match=r"2\.8 or newer"):
        foreign.recording_pool(0)


def test_the_drivers_own_allocator_has_no_pools(torch, foreign):
    torch.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
    assert foreign.recording_pool(0) is None


def test_what_begins_with_an_error_ends(torch, foreign):
    pool = foreign.recording_pool(0)

    def fails(device, pool):
        raise RuntimeError("in the middle")

    torch._C._cuda_beginAllocateCurrentThreadToPool = fails
    with pytest.raises(RuntimeError, match="in the middle"):
        pool.begin()
    pool.end()
    pool.close()
    assert (torch.used, torch.uses, pool.nbytes) == ([], {}, 0)


def recorded(torch, foreign):
    """Make a tensor for a recording; its pool, which is not closed."""
    pool = foreign.recording_pool(0)
    pool.begin()
    tensor = torch.empty(1)
    assert pool.stream_of(tensor.data_ptr()) == 7
    pool.check()
    pool.end()
    return pool


def test_recordings_that_follow_each_other_use_one_pool(torch, foreign):
    for _ in range(10):
        recorded(torch, foreign).close()
    assert len(torch.segments) == 1
    assert torch.uses == {(0, 1): 1}


def test_only_so_many_pools_are_kept(torch, foreign):
    for pool in [recorded(torch, foreign) for _ in range(5)]:
        pool.close()
    assert sorted(torch.uses.values()) == [0, 0, 0, 1, 1]
    assert len(foreign._spare[0]) == foreign.MOST_SPARE


def test_a_pool_with_a_live_tensor_is_not_used_again(torch, foreign):
    recorded(torch, foreign).close()
    torch.live.add((0, 1))
    recorded(torch, foreign).close()
    assert set(torch.uses) == {(0, 1), (0, 2)}
    torch.live.clear()
    recorded(torch, foreign).close()
    assert set(torch.uses) == {(0, 1), (0, 2)}


def test_of_a_pool_that_is_used_again_it_is_checked_that_tensors_come_from_it(torch, foreign):
    recorded(torch, foreign).close()
    torch.used.append((0, 99))
    pool = foreign.recording_pool(0)
    pool.begin()
    torch.empty(1)
    with pytest.raises(CaptureError, match="another pool"):
        pool.check()
    pool.end()
