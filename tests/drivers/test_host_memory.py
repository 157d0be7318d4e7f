"""The host driver's memory, its arenas with CuPy's hazards, and graphs launched over them."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from harness.insides import streams_of

from handlepool.drivers.host import evaluator
from handlepool.drivers.host.array import owner_of, raw_view
from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import ArrayTypeError, ContractError, DeviceMismatchError
from handlepool.tensors import frontend

SEEDS = range(50)
TIMEOUT = 60
FLOAT = np.dtype(np.float32)


class Holder:
    """Something that takes weak references."""


TENSOR = SimpleNamespace(dim=[4], stride=[1])  # of `floats`, as a graph declares it


def floats(driver, n=4):
    return driver.empty((n,), (4,), FLOAT)


def record(driver, stream):
    event = driver.create_event()
    driver.record_event(event, stream.ptr)
    return event


# Scratch


@pytest.mark.parametrize("nbytes", [0, 1, 256, 1000])
def test_scratch_is_aligned_and_counted_in_steps_of_256_bytes(driver, nbytes):
    free, total = driver.memory_info()
    pointer = driver.allocate(nbytes)
    assert pointer % 256 == 0
    assert driver.memory_info() == (free - max(256, -(-nbytes // 256) * 256), total)
    driver.free(pointer)
    assert driver.memory_info() == (free, total)


def test_memory_is_poisoned_when_it_is_given_out_new_or_again(driver):
    pointer = driver.allocate(16)
    assert np.isnan(driver.scratch_array(pointer, 16, None).view(np.float32)).all()
    array = floats(driver)
    assert np.isnan(array).all()
    array[:] = 7
    del array
    assert np.isnan(floats(driver)).all()


def test_each_device_has_a_budget_of_its_own():
    driver = HostDriver(memory=4096)
    pointer = driver.allocate(4096)
    with pytest.raises(MemoryError, match=r"device 0: 256 bytes asked for, 0 free of 4,096; the memory is simulated: .*=4G"):
        driver.allocate(1)
    with driver.device(1):
        driver.allocate(4096)
    driver.free(pointer)
    driver.allocate(4096)


def test_memory_is_freed_once_and_where_it_begins(driver):
    pointer = driver.allocate(1024)
    with pytest.raises(ContractError, match="begins there"):
        driver.free(pointer + 256)
    with driver.device(1), pytest.raises(ContractError, match="begins there"):
        driver.free(pointer)
    driver.free(pointer)
    with pytest.raises(ContractError, match="begins there"):
        driver.free(pointer)


def test_free_waits_for_queued_work_that_touches_the_memory_and_for_no_other(driver):
    stream, other = driver.create_stream(), driver.create_stream()
    latch, log = driver.latch(other.ptr), []
    driver.enqueue(other.ptr, lambda: log.append("other"))
    pointer = driver.allocate(64)
    scratch = driver.scratch_array(pointer, 64, None)
    driver.enqueue(stream.ptr, lambda a: (a.fill(1), log.append("mine")), writes=[scratch])
    driver.free(pointer)
    assert log == ["mine"]
    latch.release()


def test_free_leaves_failures_of_queued_work_to_the_next_synchronisation(driver):
    stream, pointer = driver.create_stream(), driver.allocate(64)
    driver.enqueue(stream.ptr, lambda a: 1 // 0, writes=[driver.scratch_array(pointer, 64, None)])
    driver.free(pointer)
    assert driver.memory_info() == (1 << 30, 1 << 30)
    with pytest.raises(ZeroDivisionError):
        driver.synchronize_stream(stream.ptr)


def test_what_cannot_be_freed_yet_stays_allocated(driver):
    stream, pointer, array = driver.create_stream(), driver.allocate(64), floats(driver)
    info, latch = driver.memory_info(), driver.latch(stream.ptr)
    driver.enqueue(stream.ptr, lambda *arrays: None, writes=[driver.scratch_array(pointer, 64, None), array])
    del array
    for call in (lambda: driver.free(pointer), driver.release_cached):
        with pytest.raises(ContractError, match="would never end"):
            call()
    assert driver.memory_info() == info
    latch.release()
    driver.free(pointer)
    driver.release_cached()
    assert driver.memory_info() == (1 << 30, 1 << 30)


def test_a_scratch_array_is_the_memory_and_keeps_its_owner(driver):
    owner = Holder()
    reference, pointer = weakref.ref(owner), driver.allocate(512)
    part = driver.scratch_array(pointer + 256, 100, owner)[10:]
    del owner
    assert (part.shape, part.dtype) == ((90,), np.uint8)
    assert driver.array_pointer(part) == pointer + 266
    whole = driver.scratch_array(pointer, 512, None)
    driver.enqueue(0, lambda a: a.fill(3), writes=[part])
    assert (whole[266:356] == 3).all()
    assert (whole[:266] == 0xFF).all()
    assert reference() is not None
    del part
    assert reference() is None


def test_a_scratch_array_must_lie_in_allocated_memory(driver):
    pointer = driver.allocate(256)
    for start, nbytes, problem in ((pointer, 257, "257 bytes are needed, and .* has 256"), (pointer + 256, 0, "not in scratch")):
        with pytest.raises(ContractError, match=problem):
            driver.scratch_array(start, nbytes, None)


def test_work_that_runs_after_its_memory_was_freed_is_an_error(driver):
    stream, pointer = driver.create_stream(), driver.allocate(64)
    scratch = driver.scratch_array(pointer, 64, None)
    driver.free(pointer)
    driver.enqueue(stream.ptr, lambda a: a.fill(1), writes=[scratch], label="late")
    with pytest.raises(ContractError, match=r"late ran and touches .*freed before"):
        driver.synchronize_stream(stream.ptr)


# Arrays


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (12, 4)), ((2, 3), (4, 8)), ((1, 4, 5, 6), (480, 4, 96, 16)), ((3,), (0,)), ((), ()), ((0, 4), (16, 4))],
)
def test_empty_has_the_shape_and_strides_that_were_asked_for(driver, shape, strides):
    array = driver.empty(shape, strides, FLOAT)
    assert (array.shape, array.dtype) == (shape, FLOAT)
    assert array.size == 0 or array.strides == strides
    array[...] = 5
    assert (array == 5).all()
    assert driver.array_pointer(array) == array.data.ptr


def test_arrays_know_their_device_and_plain_ones_are_of_the_current(driver):
    array, plain = floats(driver), np.zeros(3)
    with driver.device(1):
        other = floats(driver)
        assert [driver.array_device(x) for x in (array[1:], other.reshape(2, 2), plain)] == [0, 1, 1]


def test_asarray_copies_the_values_of_the_moment_in_their_layout_on_the_current_stream(driver):
    source = np.arange(24, dtype=FLOAT).reshape(2, 3, 4).transpose(0, 2, 1)
    stream = driver.create_stream()
    with stream:
        latch = driver.latch(stream.ptr)
        array = driver.asarray(source)
        expected, source[...] = source.copy(), 0
        assert np.isnan(raw_view(array)[0]).all()
        latch.release()
        assert (driver.asnumpy(array) == expected).all()
    assert array.strides == source.strides
    assert driver.array_pointer(array) != driver.array_pointer(source)


def test_asnumpy_waits_for_the_current_stream_and_copies(driver):
    stream, array = driver.create_stream(), floats(driver)
    driver.enqueue(stream.ptr, lambda a: a.fill(2), writes=[array])
    with stream:
        values = driver.asnumpy(array)
    array[:] = 3
    assert (values == 2).all()


# Arenas


def test_a_block_goes_back_with_the_last_view_and_is_reused_last_in_first_out(driver):
    first, second = floats(driver), floats(driver)
    addresses = [driver.array_pointer(first), driver.array_pointer(second)]
    view = second.reshape(2, 2)[1:]
    del second
    third = floats(driver)
    assert driver.array_pointer(third) not in addresses
    del view
    del first
    again = [floats(driver), floats(driver)]
    assert [driver.array_pointer(x) for x in again] == addresses


def test_a_block_goes_back_to_the_arena_of_the_stream_that_was_current_whoever_drops_it(driver, in_thread):
    a, b = driver.create_stream(), driver.create_stream()
    with a:
        array = floats(driver)
    address = driver.array_pointer(array)
    held = [array]
    del array

    def drop():
        with b:
            held.clear()

    in_thread(drop)
    with b:
        assert driver.array_pointer(floats(driver)) != address
    with a:
        assert driver.array_pointer(floats(driver)) == address


def test_an_arena_outlives_its_stream_under_the_recycled_pointer(driver):
    old = driver.create_stream()
    with old:
        address = driver.array_pointer(floats(driver))
    pointer = old.ptr
    del old
    new = driver.create_stream()
    assert new.ptr == pointer
    with new:
        assert driver.array_pointer(floats(driver)) == address


def test_per_thread_default_streams_have_an_arena_a_thread(driver, in_thread):
    driver.push_stream(driver.per_thread_stream)
    address, others = driver.array_pointer(floats(driver)), []

    def elsewhere():
        driver.push_stream(driver.per_thread_stream)
        others.append(driver.array_pointer(floats(driver)))

    in_thread(elsewhere)
    assert others[0] != address
    assert driver.array_pointer(floats(driver)) == address


def test_release_cached_gives_free_blocks_back_and_full_memory_does_it_by_itself():
    driver = HostDriver(memory=2048)
    floats(driver)
    assert driver.memory_info() == (1536, 2048)
    driver.release_cached()
    assert driver.memory_info() == (2048, 2048)
    kept = floats(driver)
    floats(driver, 130)  # two steps of 512 bytes, cached again
    assert driver.memory_info() == (512, 2048)
    driver.allocate(1536)
    assert driver.memory_info() == (0, 2048)
    with pytest.raises(MemoryError, match="512 bytes asked for, 0 free"):
        floats(driver)
    assert kept.shape == (4,)


def test_queued_work_does_not_keep_an_array_alive_and_survives_its_end(driver):
    stream = driver.create_stream()
    latch, array, result = driver.latch(stream.ptr), floats(driver), floats(driver)
    address, owner = driver.array_pointer(array), weakref.ref(owner_of(array))
    array[:] = 5
    driver.enqueue(stream.ptr, np.copyto, writes=[result], reads=[array])
    del array
    gc.collect()
    assert owner() is None
    assert driver.array_pointer(floats(driver)) == address  # reused under the work that still reads it
    latch.release()
    driver.release_cached()
    driver.synchronize_stream(stream.ptr)
    assert np.isnan(result).all()  # of the new owner, whose memory is poisoned


def freed_by_another_thread_after_the_branch_began(seed, in_thread, *, region):
    """What the caller's stream reads of a block that a branch reuses. CuPy on a GPU gives the former work's or the branch's."""
    driver = HostDriver(scheduler="adversarial", seed=seed)
    home, side = driver.create_stream(), driver.create_stream()
    result = driver.asarray(np.zeros(4, FLOAT))
    with home:
        held = [driver.asarray(np.full(4, 7, FLOAT))]
        driver.synchronize_stream(home.ptr)
        driver.wait_event(side.ptr, record(driver, home))  # the branch begins
        driver.enqueue(home.ptr, np.copyto, writes=[result], reads=held)  # another thread of this stream, then drops it
        in_thread(held.clear)
        kept = []
        if region:
            allocator = driver.region_allocator(home, kept.append, lambda _: allocator)
            driver.swap_allocator(allocator)
            driver.push_stream(side)
        temporary = floats(driver)  # in the branch: from home's arena
        driver.swap_allocator(None)
    driver.enqueue(side.ptr, lambda a: a.fill(1), writes=[temporary])
    driver.synchronize_stream(side.ptr)
    driver.synchronize_stream(home.ptr)
    assert len(kept) == region
    return float(result[0])


def test_control_a_block_freed_by_another_thread_is_overwritten_under_its_reader(in_thread):
    values = {freed_by_another_thread_after_the_branch_began(seed, in_thread, region=False) for seed in SEEDS}
    assert values == {1, 7}


def test_a_region_allocators_edge_lets_the_reader_finish_first(in_thread):
    assert {freed_by_another_thread_after_the_branch_began(seed, in_thread, region=True) for seed in SEEDS} == {7}


def test_a_region_allocator_takes_from_its_streams_arena_and_keeps(driver, in_thread):
    home, side, other, kept = driver.create_stream(), driver.create_stream(), driver.create_stream(), []
    with home:
        address = driver.array_pointer(floats(driver))
    with driver.device(0):
        allocator = driver.region_allocator(home, kept.append, lambda pointer: allocator if pointer == side.ptr else None)
    assert driver.swap_allocator(allocator) is None
    with side:
        array = floats(driver)
        assert driver.array_pointer(array) == address
        del array
        assert driver.array_pointer(floats(driver)) != address  # the region keeps the first
    with driver.device(1):
        floats(driver)  # nothing to do with the region's stream
    with other:
        floats(driver)  # nor has what runs on a stream that no join waits for
    assert len(kept) == 2
    in_thread(lambda: kept.append(driver.swap_allocator(None)))
    assert kept.pop() is None  # per thread
    assert driver.swap_allocator(None) is allocator
    kept.clear()
    with home:
        assert address in {driver.array_pointer(x) for x in (floats(driver), floats(driver))} | {
            driver.array_pointer(x) for x in [floats(driver), floats(driver)]
        }


# Graphs


@dataclass
class Step:
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    run: object


def staged_copy(graph, operands, *, workspace_limit):
    """The input to the workspace in one step, and from there to the output in the next, as a convolution does."""

    def stage(arrays, workspace):
        workspace[:16].view(FLOAT)[:] = arrays[0]

    def finish(arrays, workspace):
        arrays[1][:] = workspace[:16].view(FLOAT)

    steps = [Step("stage", (0,), (), stage), Step("finish", (), (1,), finish)]
    return SimpleNamespace(workspace_size=1024, engine="staged", steps=steps, limit=workspace_limit)


@pytest.fixture
def staged(monkeypatch):
    monkeypatch.setattr(evaluator, "plan", staged_copy)


def bound_handle(driver, stream):
    handle = driver.create_handle()
    driver.bind_handle(handle, stream.ptr)
    return handle


@pytest.mark.usefixtures("staged")
def test_launch_checks_workspace_operands_and_handle(driver):
    executable, stream = driver.compile(None, [TENSOR, TENSOR], workspace_limit=5), driver.create_stream()
    handle, pair = bound_handle(driver, stream), [floats(driver), floats(driver)]
    assert (executable.workspace_size, executable.engine, executable.candidates) == (1024, "staged", 1)
    good, small, freed = driver.allocate(1024), driver.allocate(512), driver.allocate(1024)
    driver.free(freed)
    with driver.device(1):
        foreign, elsewhere = floats(driver), driver.allocate(1024)
        stranger = driver.create_handle()
    for workspace, problem in (
        (0, "null workspace"),
        (small, "1024 bytes are needed, and .* has 512"),
        (good + 256, "1024 bytes are needed, and .* has 768"),
        (good + 16, "not aligned to 256"),
        (freed, "not in scratch memory"),
        (elsewhere, "not in scratch memory"),
    ):
        with pytest.raises(ContractError, match=problem):
            executable.launch(handle, pair, workspace)
    with pytest.raises(DeviceMismatchError, match=r"argument 1 is on device 1"):
        executable.launch(handle, [pair[0], foreign], good)
    with driver.device(1), pytest.raises(ContractError, match="launched with"):
        executable.launch(stranger, pair, elsewhere)
    with pytest.raises(ContractError, match="while device 0 is current"):
        executable.launch(stranger, pair, good)
    driver.fail_at(1, "launch")
    with pytest.raises(RuntimeError, match="injected"):
        executable.launch(handle, pair, good)
    executable.launch(handle, pair, good)
    driver.synchronize_stream(stream.ptr)


@pytest.mark.usefixtures("staged")
def test_steps_of_a_launch_are_operations_of_their_own(driver):
    executable, stream = driver.compile(None, [TENSOR, TENSOR]), driver.create_stream()
    source, output = driver.asarray(np.ones(4, FLOAT)), floats(driver)
    workspace, latch = driver.allocate(1024), driver.latch(stream.ptr)
    executable.launch(bound_handle(driver, stream), [source, output], workspace)
    assert [operation.label for operation in streams_of(driver).scheduler.users(_block_of(output))] == ["finish"]
    latch.release()
    driver.free(workspace)  # waits for both
    assert (output == 1).all()


def _block_of(array):
    return owner_of(array).block


# The frontend


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_data_types_go_there_and_back(name):
    assert frontend.numpy_dtype(frontend.data_type(name)) == np.dtype(name)


def test_types_that_one_side_has_not_are_refused_by_name():
    import cudnn

    with pytest.raises(ArrayTypeError, match="complex64"):
        frontend.data_type(np.complex64)
    with pytest.raises(ArrayTypeError, match="NOT_SET"):
        frontend.numpy_dtype(cudnn.data_type.NOT_SET)


def test_bfloat16_is_ml_dtypes_and_the_message_says_so_where_it_is_missing():
    import cudnn

    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(ArrayTypeError, match="pip install ml_dtypes"):
            frontend.numpy_dtype(cudnn.data_type.BFLOAT16)
    else:
        dtype = np.dtype(ml_dtypes.bfloat16)
        assert frontend.numpy_dtype(cudnn.data_type.BFLOAT16) == dtype
        assert frontend.data_type(dtype) == cudnn.data_type.BFLOAT16


def test_copies_on_a_stream_that_is_told(driver):
    """A copy of bytes refuses what a GPU would copy wrongly, and one from the host has the values of the call."""
    stream = driver.create_stream()
    x, y = (driver.asarray(np.full((2, 3), value, np.float32)) for value in (1, 2))
    latch = driver.latch(stream.ptr)
    driver.copy_run(x, y, stream.ptr)
    values = np.full((2, 3), 5, np.float32)
    with driver.relaxed():
        kept = driver.copy_from_host(y, values, stream.ptr)
        host = driver.copy_to_host(x, stream.ptr)
    values[...] = 7
    latch.release()
    driver.synchronize_stream(stream.ptr)
    assert kept is not values
    assert [np.unique(each).tolist() for each in (driver.asnumpy(x), driver.asnumpy(y), host)] == [[2], [5], [2]]
    for other in (y[:1], y[:, ::2], y.T, driver.asarray(np.zeros((2, 3)))):
        with pytest.raises(ContractError, match="copy_run"):
            driver.copy_run(x, other, stream.ptr)
