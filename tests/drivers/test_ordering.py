"""The host driver's checker of orders: what it catches whatever the schedule, and what it lets pass."""

import numpy as np
import pytest
from harness.insides import streams_of

from handlepool import ContractError, HandlePool
from handlepool.drivers.host.array import owner_of
from handlepool.drivers.host.driver import HostDriver


class World:
    """A driver that checks, two streams, and arrays of 16 float64 from their arenas."""

    def __init__(self, **options):
        options = {"scheduler": "adversarial", "check_order": True, **options}
        self.driver = HostDriver(**options)
        self.one, self.two, self.three = (self.driver.create_stream() for _ in range(3))

    def array(self, stream):
        with stream:
            return self.driver.empty((16,), (8,), np.dtype(np.float64))

    def write(self, stream, array, label="a write"):
        self.driver.enqueue(stream.ptr, lambda out: out.fill(1), writes=[array], label=label)

    def read(self, stream, array, label="a read"):
        self.driver.enqueue(stream.ptr, np.sum, reads=[array], label=label)

    def edge(self, first, then):
        event = first.record()
        then.wait_event(event)


def history(array):
    return owner_of(array).block.past


@pytest.fixture(params=["threads", "adversarial"])
def world(request):
    return World(scheduler=request.param)


def test_the_error_names_both_operations_their_streams_and_the_memory(world):
    x = world.array(world.one)
    world.write(world.one, x, "the first")
    with pytest.raises(ContractError) as caught:
        world.read(world.two, x[2:], "the second")
    message = str(caught.value)
    one, two = (f"{stream.ptr:#x}" for stream in (world.one, world.two))
    assert message.startswith(f"not ordered: 'the second' on <stream {two} of device 0, id ")
    assert f"reads bytes 16 to 128 of <512 bytes at {world.driver.array_pointer(x):#x} of device 0>" in message
    assert f"and 'the first' on <stream {one} of device 0, id " in message
    assert "writes bytes 0 to 128" in message
    assert world.driver.order.found == [caught.value]


@pytest.mark.parametrize(("first", "then"), [("write", "write"), ("write", "read"), ("read", "write")])
def test_conflicting_accesses_of_two_streams_are_caught(world, first, then):
    x = world.array(world.one)
    getattr(world, first)(world.one, x)
    with pytest.raises(ContractError, match="not ordered"):
        getattr(world, then)(world.two, x)


@pytest.mark.parametrize("seed", range(10))
def test_whether_the_work_has_run_by_then_makes_no_difference(seed):
    world = World(seed=seed)
    x = world.array(world.one)
    world.write(world.one, x)
    for _ in range(20):
        streams_of(world.driver).scheduler.nudge()
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.two, x)


def test_what_was_refused_is_not_queued(world):
    x = world.array(world.one)
    world.write(world.one, x)
    with pytest.raises(ContractError, match="not ordered"):
        world.driver.enqueue(world.two.ptr, lambda out: out.fill(7), writes=[x])
    world.edge(world.two, world.one)
    with world.one:
        assert set(world.driver.asnumpy(x)) == {1}


def test_two_reads_and_two_streams_of_other_bytes_pass(world):
    x = world.array(world.one)
    world.write(world.one, x)
    world.edge(world.one, world.two)
    world.read(world.one, x)
    world.read(world.two, x)
    world.edge(world.two, world.one)
    world.edge(world.one, world.two)
    world.write(world.one, x[:8])
    world.write(world.two, x[8:])
    world.write(world.three, x[:0])


def test_bytes_that_lie_between_each_other_pass_and_those_that_meet_do_not(world):
    x = world.array(world.one)
    world.write(world.one, x[::2])
    world.write(world.two, x[1::2])
    with pytest.raises(ContractError, match="not ordered"):
        world.write(world.three, x[5:7])


def test_an_event_orders_what_comes_after_it_and_nothing_else(world):
    x, y = world.array(world.one), world.array(world.one)
    world.write(world.one, x)
    event = world.one.record()
    world.write(world.one, y)
    world.two.wait_event(event)
    world.read(world.two, x)
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.two, y)


def test_an_order_through_a_third_stream_is_one_and_an_event_recorded_too_early_orders_nothing(world):
    x = world.array(world.one)
    event = world.one.record()
    world.write(world.one, x)
    world.two.wait_event(event)
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.two, x)
    world.edge(world.one, world.three)
    world.edge(world.three, world.two)
    world.write(world.two, x)


@pytest.mark.parametrize("how", ["stream", "event", "poll", "done"])
def test_what_the_host_has_waited_for_comes_before_all_that_follows(world, how):
    x = world.array(world.one)
    world.write(world.one, x)
    event = world.driver.create_event()
    world.driver.record_event(event, world.one.ptr)
    if how == "stream":
        world.one.synchronize()
    elif how == "event":
        world.driver.synchronize_event(event)
    elif how == "done":
        while not world.one.done:
            pass
    else:
        while not world.driver.event_done(event):
            pass
    world.write(world.two, x)


READS = {
    "get": lambda y: y.get(),
    "float": lambda y: float(y[0]),
    "asarray": np.asarray,
    "median": np.median,
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("scheduler", ["threads", *range(5)])
def test_who_asks_for_values_has_waited_for_the_current_stream_whatever_had_run_by_then(scheduler, how):
    options = {"scheduler": scheduler} if scheduler == "threads" else {"seed": scheduler}
    world = World(**options)
    with world.one:
        x = world.driver.asarray(np.ones(4, np.float32))
        y = x * 2
        READS[how](y)
    with world.two:
        assert set((y + x).get()) == {3}
        y += 1
    with world.three, pytest.raises(ContractError, match="not ordered"):  # nobody has asked since
        y + x


def test_a_stream_for_each_request_that_ends_with_its_values_passes():
    for seed in range(10):
        world = World(seed=seed)
        for _ in range(3):
            with world.driver.create_stream():
                assert set((world.driver.asarray(np.ones(4, np.float32)) * 2).get()) == {2}


def test_who_asks_for_values_has_not_waited_for_other_streams(world):
    x, y = world.array(world.one), world.array(world.two)
    world.write(world.one, x)
    world.write(world.two, y)
    with world.two:
        y.get()
        with pytest.raises(ContractError, match="not ordered"):
            x.get()


@pytest.mark.parametrize("seed", range(5))
def test_who_asks_for_values_has_not_waited_for_bytes_between_them_that_another_stream_writes(seed):
    world = World(seed=seed)
    x = world.array(world.one)
    world.write(world.one, x[::2])
    world.write(world.two, x[1::2])
    with world.two:
        x[1::2].get()
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.two, x[::2])


def test_the_null_stream_orders_nothing_by_itself(world):
    x = world.array(world.one)
    world.write(world.driver.legacy_stream, x)
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.two, x)


def test_the_host_reads_after_what_it_waited_for(world):
    x = world.array(world.one)
    world.write(world.one, x)
    with world.two, pytest.raises(ContractError, match=r"'copy to the host' on the host reads .* and 'a write' on <stream"):
        world.driver.asnumpy(x)
    with world.one:
        world.driver.asnumpy(x)


def test_a_block_that_the_allocator_gave_to_another_owner_counts_as_written(world):
    x = world.array(world.one)
    world.edge(world.one, world.two)
    world.read(world.two, x)
    del x
    with pytest.raises(ContractError, match="the allocator gave the memory to another owner"):
        world.array(world.one)


def test_a_block_that_its_own_stream_reuses_passes(world):
    for _ in range(3):
        x = world.array(world.one)
        world.write(world.one, x)
        del x


class Subclass(np.ndarray):
    pass


class Convertible:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


OPERANDS = {
    "a ufunc": lambda y, m: y + m,
    "a ufunc's other side": np.add,
    "at": lambda y, m: np.add.at(y, np.arange(4), m),
    "where": lambda y, m: np.where(y > 0, m, y),
    "a list": lambda y, m: np.concatenate([y, m]),
    "a keyword": lambda y, m: np.clip(y, None, a_max=m),
    "an assignment": lambda y, m: y.__setitem__(..., m),
}


@pytest.mark.parametrize("use", OPERANDS)
@pytest.mark.parametrize("kind", [np.asarray, lambda values: values.view(Subclass), Convertible])
@pytest.mark.parametrize("early", [True, False])
def test_what_the_host_overwrites_before_queued_work_reads_it_is_caught_whatever_its_class(kind, use, early):
    world = World()
    with world.one:
        y = world.driver.asarray(np.ones(4, np.float32))
        y.get()
        latch = world.driver.latch(world.one.ptr)
        values = np.ones(4, np.float32)
        OPERANDS[use](y, kind(values))
        if early:
            values[:] = 100
        latch.release()
        if early:
            with pytest.raises(ContractError, match="the host wrote to that array before the work ran"):
                world.one.synchronize()
        world.one.synchronize()


def test_scratch_is_watched_as_arrays_are(world):
    block = world.driver.allocate(1024)
    first, second = (world.driver.scratch_array(block + offset, 512, None) for offset in (0, 512))
    world.write(world.one, first)
    world.write(world.two, second)
    with pytest.raises(ContractError, match="not ordered"):
        world.write(world.three, world.driver.scratch_array(block, 1024, None))


# Captured graphs: checked when they are launched


def captured(world, *, joined=True):
    """A graph of two branches that write the two halves of an array, or, without the join, the same half."""
    x = world.array(world.one)
    world.one.begin_capture()
    world.edge(world.one, world.two)
    world.write(world.two, x[:8] if joined else x[8:])
    world.write(world.one, x[8:])
    world.edge(world.two, world.one)
    return x, world.one.end_capture()


def test_branches_of_a_graph_without_an_edge_are_caught_when_it_is_launched(world):
    _, graph = captured(world, joined=False)
    with pytest.raises(
        ContractError, match=r"'a write' on a recorded graph, at .*py:\d+ writes .* and 'a write' on a recorded graph"
    ):
        graph.launch(world.one)


def test_launches_of_one_graph_are_in_order_on_any_streams(world):
    x, graph = captured(world)
    graph.launch(world.one)
    graph.launch(world.two)
    world.read(world.two, x)
    with pytest.raises(ContractError, match="not ordered"):
        world.read(world.three, x)


def test_eager_work_beside_a_launch_is_caught(world):
    x, graph = captured(world)
    world.read(world.three, x)
    with pytest.raises(ContractError, match="not ordered"):
        graph.launch(world.one)


# Off by default


def test_it_is_off_by_default():
    world = World(check_order=False)
    x = world.array(world.one)
    world.write(world.one, x)
    world.write(world.two, x)
    assert world.driver.order is None
    assert not history(x)


def test_the_history_of_a_block_does_not_grow_with_its_use(world):
    x = world.array(world.one)
    for _ in range(50):
        world.write(world.one, x)
        world.read(world.one, x)
        world.edge(world.one, world.two)
        world.read(world.two, x)
        world.edge(world.two, world.one)
    assert len(history(x)) < 10


@pytest.mark.parametrize("part", [np.s_[::2], np.s_[::-2], np.s_[3:1:-1]])
def test_the_history_of_a_block_keeps_one_access_of_each_geometry(world, part):
    x = world.array(world.one)
    world.write(world.one, x)
    for _ in range(50):
        world.read(world.one, x[part])
        world.read(world.one, x[1:9:3])
    assert len(history(x)) == 3
    with pytest.raises(ContractError, match="not ordered"):
        world.write(world.two, x[part][:1])


def test_an_access_stands_for_none_of_another_geometry(world):
    x = world.array(world.one)
    with world.one:
        square = np.reshape(x, (4, 4))
    world.read(world.one, square[:, ::3])  # the same first and last bytes as the next
    world.read(world.one, square[::3])
    for part in (square[2, :1], square[0, 1:2]):
        with pytest.raises(ContractError, match="not ordered"):
            world.write(world.two, part)


def test_pools_that_check_turn_the_checks_on_and_the_last_one_off():
    driver = HostDriver(scheduler="adversarial")
    x, streams = driver.asarray(np.ones(4, np.float32)), [driver.create_stream() for _ in range(2)]

    def write_on_two_streams():
        for stream in streams:
            driver.enqueue(stream.ptr, lambda values: values.fill(2), writes=[x])

    write_on_two_streams()
    pools = [HandlePool(driver=driver, check=True) for _ in range(2)]
    for pool in pools:
        pool.get_handle()
    with pytest.raises(ContractError, match="not ordered"):
        write_on_two_streams()
    pools[0].close()
    pools[0].close()
    with pytest.raises(ContractError, match="not ordered"):
        write_on_two_streams()
    pools[1].close()
    write_on_two_streams()
    with HandlePool(driver=driver, check=True) as again:
        again.get_handle()
        driver.enqueue(streams[0].ptr, lambda values: values.fill(2), writes=[x])  # what came before is forgiven
