"""Recorded programs on the host driver: what replays give, in which order, and from which memory."""

import gc
import threading
import weakref

import numpy as np
import pytest
from harness.insides import plans_of, recording_of
from harness.process import as_default
from harness.scenes import TIMEOUT, CarelessDriver, Scene, Thread, over_seeds, without_waits_of_the_last
from harness.uses import EFFECTS, FOREIGN, STREAMS, calls

import handlepool
from handlepool import ArgumentError, ContractError, ParallelStates
from handlepool.drivers.host.array import raw_view
from handlepool.pool.deferred import deferred


class Sharing(CarelessDriver):
    """Records with the arenas that everybody uses."""

    def recording_memory(self):
        class Shared:
            allocator = None
            nbytes = 0

            def on_allocate(self, of):
                pass

            def holds(self, value):
                return False

            def release(self):
                return True

        return Shared()


class Interface:
    """An array of another library."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = raw_view(array)[0].__array_interface__


def conv_arrays(driver, count=4, size=8):
    random = np.random.default_rng(7)
    images = [driver.asarray(random.standard_normal((1, 4, size, size)).astype("float32")) for _ in range(count)]
    return images, driver.asarray(random.standard_normal((4, 4, 3, 3)).astype("float32"))


def conv(x, w):
    return handlepool.conv2d(x, w, padding=1)


@pytest.fixture
def scene(make_driver, scheduler):
    """Its pool is the default one during the test."""
    with Scene(make_driver(scheduler=scheduler), default=True) as scene:
        yield scene


def steps(scene):
    """A function of an array, by way of a temporary."""
    return lambda x: scene.plus(scene.plus(x, 10), 100)


# Results


def test_replays_equal_eager_results_bit_for_bit_also_after_an_update(scene):
    images, w = conv_arrays(scene.driver)
    expected = [scene.driver.asnumpy(y) for y in scene.states.map(conv, images, [w] * 4)]
    with handlepool.record(scene.states.map, conv, images, [w] * 4, pool=scene.pool) as program:
        for order in (slice(None), slice(None, None, -1)):
            program.update([scene.driver.asarray(scene.driver.asnumpy(x)) for x in images[order]], None)
            for y in program.outputs:
                scene.put(y, lambda: np.nan)
            program.replay()
            got = [scene.driver.asnumpy(y) for y in program.outputs]
            assert all((y == z).all() for y, z in zip(got, expected[order], strict=True))
            images = [scene.driver.asarray(scene.driver.asnumpy(x)) for x in images]


def test_the_function_runs_for_real_once_and_the_recording_runs_nothing(scene):
    x = scene.array(1)
    program = handlepool.record(lambda: scene.put(x, lambda old: old + 1, x), pool=scene.pool)
    assert scene.read(x) == 2
    program.replay()
    program.replay()
    assert scene.read(x) == 4
    assert program.outputs is x


@pytest.mark.parametrize("kind", [*STREAMS, *FOREIGN])
def test_a_program_replays_on_every_kind_of_stream_in_turn(scene, kind):
    owned = scene.driver.create_stream()
    stream = FOREIGN[kind](scene.driver, owned) if kind in FOREIGN else STREAMS[kind](scene.driver)
    x = scene.array(0)
    program = handlepool.record(lambda: scene.put(x, lambda old: old + 1, x), pool=scene.pool)
    for _ in range(3):
        program.replay()
        program.replay(stream)
        program.replay(stream)
    program.replay()
    assert scene.read(x) == 11


@pytest.mark.parametrize("kind", STREAMS)
def test_a_program_is_recorded_with_every_kind_of_current_stream(scene, kind):
    with STREAMS[kind](scene.driver) as stream:
        x = scene.array(1)
        with handlepool.record(steps(scene), x, pool=scene.pool) as program:
            assert scene.driver.current_stream() is stream
            program.replay()
            assert scene.read(program.outputs) == 111


def test_a_program_belongs_to_the_device_that_was_current(scene):
    with scene.driver.device(1), scene.driver.create_stream():
        x = scene.array(1)
        with handlepool.record(scene.states.map, steps(scene), [x, x], pool=scene.pool) as program:
            assert program.device == 1
            program.replay()
            assert [scene.read(y) for y in program.outputs] == [111, 111]


def test_arrays_in_containers_and_keywords_are_inputs(scene):
    def body(pair, *, more, factor):
        return [scene.plus(x, factor) for x in (*pair, *more.values())]

    given = {"pair": (scene.array(1), scene.array(2)), "more": {"a": scene.array(3)}}
    program = handlepool.record(body, given["pair"], more=given["more"], factor=10, pool=scene.pool)
    program.update(more={"a": scene.array(30)})
    program.replay()
    assert [scene.read(y) for y in program.outputs] == [11, 12, 40]
    program.update([scene.array(10), given["pair"][1]])
    program.update(None, more=None)
    program.replay()
    assert [scene.read(y) for y in program.outputs] == [20, 12, 40]


def flat(value):
    """The arrays of nested containers, those of dictionaries in the order of their keys."""
    if isinstance(value, dict):
        return [array for key in sorted(value) for array in flat(value[key])]
    return [array for entry in value for array in flat(entry)] if isinstance(value, (list, tuple)) else [value]


def copying(scene):
    """A function that copies the arrays of its arguments, however they are nested."""
    return lambda *args, **kwargs: [scene.plus(x, 0) for x in flat([*args, kwargs])]


def values(scene, program):
    """What a replay reads in each input."""
    program.replay()
    return [scene.read(y) for y in program.outputs]


def test_dictionaries_are_matched_by_key_and_lists_by_structure(scene):
    new = iter(range(10, 100, 10))

    def array():
        return scene.array(next(new))

    program = handlepool.record(copying(scene), {"a": scene.array(1), "b": [scene.array(2), (scene.array(3), scene.array(4))]})
    program.update({"b": [array(), (array(), array())], "a": array()})
    assert values(scene, program) == [40, 10, 20, 30]
    program.update({"b": (array(), [array(), None]), "a": None})
    assert values(scene, program) == [40, 50, 60, 30]
    program.update({"b": [None, None], "a": array()})
    assert values(scene, program) == [70, 50, 60, 30]
    program.update(None)
    assert values(scene, program) == [70, 50, 60, 30]


def test_what_is_no_array_may_be_given_again_in_a_container(scene):
    program = handlepool.record(lambda given: scene.plus(given["x"], given["add"]), {"x": scene.array(1), "add": 10})
    program.update({"x": scene.array(2), "add": 10})
    program.replay()
    assert scene.read(program.outputs) == 12
    program.update({"x": scene.array(3), "add": None})
    program.replay()
    assert scene.read(program.outputs) == 13


def test_containers_may_be_changed_after_the_recording(scene):
    images = [scene.array(1), scene.array(2)]
    program = handlepool.record(copying(scene), images)
    images[0] = scene.array(10)
    [scene.array(9) for _ in range(8)]
    assert values(scene, program) == [1, 2]
    program.update(images)
    assert values(scene, program) == [10, 2]


def test_arrays_of_other_libraries_have_their_places_and_stay(scene):
    images, w = conv_arrays(scene.driver, 2)
    foreign = Interface(w)
    expected = scene.driver.asnumpy(conv(images[1], w))
    program = handlepool.record(conv, images[0], foreign, pool=scene.pool)
    for weights in (None, foreign):
        program.update(images[1], weights)
        program.replay()
        assert (scene.driver.asnumpy(program.outputs) == expected).all()


def test_work_that_another_thread_gives_meanwhile_is_not_recorded(scene, in_thread):
    x, other = scene.array(1), scene.array(0)
    scene.stream.synchronize()

    def elsewhere():
        with scene.driver.create_stream() as stream:
            scene.put(other, lambda old: old + 1, other)
            stream.synchronize()

    def body(x):
        in_thread(elsewhere)
        return scene.plus(x, 1)

    program = handlepool.record(body, x, pool=scene.pool)
    program.replay()
    assert (scene.read(program.outputs), scene.read(other)) == (2, 2)


@pytest.mark.parametrize("given", [True, False])  # or with the states' pool
def test_a_pool_with_checks_records_and_replays_also_where_it_is_that_of_the_states(make_pool, scheduler, given):
    pool = make_pool(scheduler=scheduler, check=given)
    states = ParallelStates(2, pool=pool)
    with pool.driver.create_stream():
        images, w = conv_arrays(pool.driver)
        expected = pool.driver.asnumpy(states.map(conv, images, [w] * 4)[3])
        with handlepool.record(states.map, conv, images, [w] * 4, **({"pool": pool} if given else {})) as program:
            program.replay()
            assert (pool.driver.asnumpy(program.outputs[3]) == expected).all()


# One launch


def test_a_replay_is_one_launch_and_a_following_one_costs_no_event(scene):
    images, w = conv_arrays(scene.driver, 16)
    program = handlepool.record(scene.states.map, conv, images, [w] * 16, pool=scene.pool)
    first, second = calls(scene.driver, program.replay), calls(scene.driver, program.replay)
    assert not first.keys() & EFFECTS
    assert second == {"current_stream": 1, "is_capturing": 1, "launch_graph": 1}


def test_a_replay_after_one_on_another_stream_costs_one_event(scene):
    program = handlepool.record(steps(scene), scene.array(1), pool=scene.pool)
    other = scene.driver.create_stream()
    made = calls(scene.driver, program.replay, other)
    assert {name: made[name] for name in (*EFFECTS, "launch_graph") if made[name]} == {
        "record_event": 1,
        "wait_event": 1,
        "launch_graph": 1,
    }
    assert not calls(scene.driver, program.replay, other).keys() & EFFECTS


def test_branches_stay_without_order_in_the_graph(scene):
    xs = [scene.array(i) for i in range(8)]
    program = handlepool.record(scene.states.map, steps(scene), xs, pool=scene.pool)
    nodes = recording_of(program).graph.graph.nodes
    assert program.nodes == len(nodes) == 16
    assert sum(not node.after for node in nodes) == len(scene.states) == 4
    assert len({node.lane for node in nodes}) == 4


def test_side_slots_go_back_when_the_recording_ends(scene):
    handlepool.record(scene.states.map, steps(scene), [scene.array(1)] * 4, pool=scene.pool).close()
    stats = scene.pool.stats()
    assert stats["handles_captured"] == stats["handles_leased"] == 0
    made = stats["handles_created"]
    for _ in range(3):
        handlepool.record(scene.states.map, steps(scene), [scene.array(1)] * 4, pool=scene.pool).close()
    assert scene.pool.stats()["handles_created"] == made


# Order, over adversarial schedules


def replays_on_two_streams(scene):
    """What a reader on the first stream saw, and one on the second, which replays with other inputs."""
    x = scene.array(1)
    program = handlepool.record(scene.states.map, steps(scene), [x, x, x], pool=scene.pool)
    program.replay()
    early = scene.plus(program.outputs[1], 0)
    other = scene.other = scene.driver.create_stream()
    with other:
        program.update([scene.array(2)] * 3)
        program.replay()
        late = scene.read(program.outputs[2])
    return scene.read(early), late


def test_a_replay_on_another_stream_starts_after_the_readers_of_the_last():
    assert set(over_seeds(replays_on_two_streams)) == {(111, 112)}


def test_control_without_that_wait_readers_are_overtaken():
    assert set(over_seeds(replays_on_two_streams, make=without_waits_of_the_last)) != {(111, 112)}


def test_replays_of_a_fork_hold_its_order():
    def scenario(scene):
        def body(x):
            with scene.states.fork() as fork:
                parts = [fork.run(steps(scene), x) for _ in range(6)]
            return scene.put(scene.array(), lambda *parts: sum(parts), *parts)

        program = handlepool.record(body, scene.array(0), pool=scene.pool)
        totals = []
        for turn in range(3):
            program.update(scene.array(turn))
            program.replay()
            totals.append(scene.read(program.outputs))
        return tuple(totals)

    assert set(over_seeds(scenario, seeds=range(40))) == {(660, 666, 672)}


# Updates from memory that they write to


def swapped(scene):
    """What replays read after two inputs were swapped, and after memory that this took was used by others."""
    a, b = scene.array(1), scene.array(2)
    program = handlepool.record(copying(scene), a, b)
    program.update(b, a)
    [scene.array(9) for _ in range(4)]
    return (*values(scene, program), scene.read(a), scene.read(b))


def test_inputs_can_be_swapped():
    assert set(over_seeds(with_pool(swapped), seeds=range(20))) == {(2, 1, 2, 1)}


def test_control_copies_one_by_one_read_what_was_just_written(monkeypatch):
    def one_by_one(driver, copies):
        for copy in copies:
            driver.copy(copy.target, copy.source)

    monkeypatch.setattr("handlepool.recording.program_call.copy_all", one_by_one)
    assert set(over_seeds(with_pool(swapped), seeds=range(20))) == {(2, 2, 2, 2)}


def with_pool(scenario):
    """With the scene's pool for what is recorded without one."""

    def run(scene):
        with as_default(scene.pool):
            return scenario(scene)

    return run


def test_inputs_can_be_swapped_in_a_branch_on_every_stream_in_turn():
    def scenario(scene):
        a, b = scene.array(1), scene.array(2)
        program = handlepool.record(copying(scene), a, b)

        def branch():
            program.update(b, a)
            [scene.array(9) for _ in range(4)]

        branch()
        with scene.driver.create_stream():
            branch()
        with scene.states.fork() as fork:
            fork.run(branch)
        [scene.array(8) for _ in range(4)]
        return tuple(values(scene, program))

    assert set(over_seeds(with_pool(scenario), seeds=range(20))) == {(2, 1)}


def test_where_a_source_is_written_over_all_are_read_first(scene):
    a, b, c = (scene.array(i) for i in range(3))
    program = handlepool.record(copying(scene), a, b, c)
    for given, copies in (
        ((a, b, c), 0),
        ((scene.array(5), scene.array(5), None), 2),
        ((b, c, scene.array(6)), 6),
        ((b, a, None), 4),
        ((c, a, b), 6),
    ):
        assert calls(scene.driver, program.update, *given).get("copy", 0) == copies
    program = handlepool.record(copying(scene), a[1:])
    assert calls(scene.driver, program.update, a[:-1])["copy"] == 2  # a copy onto its own source reads what it wrote


def test_views_beside_each_other_are_no_conflict(scene):
    base = scene.driver.asarray(np.zeros((4, 6)))
    program = handlepool.record(lambda *views: scene.plus(scene.array(1), 0), base[:, :3], base[:, 3:])
    ones, twos = (scene.driver.asarray(np.full((4, 6), value)) for value in (1.0, 2.0))
    program.update(ones[:, :3], twos[:, 3:])
    assert (scene.driver.asnumpy(base) == [1, 1, 1, 2, 2, 2]).all()
    program.update(base[:, 3:], base[:, :3])
    assert (scene.driver.asnumpy(base) == [2, 2, 2, 1, 1, 1]).all()


def test_any_views_of_one_memory_are_copied_as_if_all_were_read_first_or_refused():
    random = np.random.default_rng(11)
    ended = {"updated": 0, "refused": 0, "aside": 0}
    for seed in range(400):
        with Scene(CarelessDriver(scheduler="adversarial", seed=seed, check_order=True)) as scene:
            base, model = scene.driver.asarray(np.arange(24.0)), np.arange(24.0)
            places = [_views(random) for _ in range(random.integers(1, 4))]
            targets, sources = [base[to] for to, _ in places], [base[of] for _, of in places]
            program = handlepool.record(lambda xs, scene=scene: scene.plus(scene.array(1), 0), targets, pool=scene.pool)
            wanted = {}
            for to, of in places:
                for place, value in zip(np.arange(24)[to], np.arange(24.0)[of], strict=True):
                    wanted.setdefault(place, set()).add(value)
            if any(len(different) > 1 for different in wanted.values()):
                with pytest.raises(ArgumentError, match="two different arrays"):
                    program.update(sources)
                ended["refused"] += 1
            else:
                ended["aside"] += calls(scene.driver, program.update, sources)["empty"] > 0
                for place, (value,) in wanted.items():
                    model[place] = value
                ended["updated"] += 1
            assert (scene.driver.asnumpy(base) == model).all()
            program.close()
    assert min(ended.values()) > 50


def _views(random):
    """Slices of a target and a source of one shape and stride, anywhere in 24 elements."""
    extent, step = random.integers(1, 5), random.choice([-3, -2, -1, 1, 2, 3])
    reach = (extent - 1) * abs(step)
    starts = random.integers(0, 24 - reach, 2) + (0 if step > 0 else reach)
    ends = starts + extent * step
    return [slice(start, None if end < 0 else end, step) for start, end in zip(starts, ends, strict=True)]


# Memory


def beside_eager_work(scene):
    """What eager work finds in its own memory after replays, on the very stream that was captured, and what replays give."""
    side = scene.pool.internals.device(0).sides
    scene.pool.prewarm(states=1)
    (slot,) = side.free
    with slot.side_stream:
        prepared = [scene.array() for _ in range(3)]  # free blocks, so that a careless recording needs no fresh ones
        del prepared
    program = handlepool.record(steps(scene), scene.array(1), pool=scene.pool)
    with slot.side_stream as stream:
        mine = [scene.array(5) for _ in range(3)]
        stream.synchronize()
    program.replay()
    result = scene.read(program.outputs)
    scene.driver.synchronize_stream(scene.stream.ptr)
    with slot.side_stream:
        return (result, *[scene.read(array) for array in mine])


def test_temporaries_of_a_recording_are_used_by_nobody_else():
    assert set(over_seeds(beside_eager_work, seeds=range(20))) == {(111, 5, 5, 5)}


def test_control_temporaries_from_the_arenas_of_all_are_overwritten():
    results = set()
    for seed in range(20):
        with Scene(Sharing(scheduler="adversarial", seed=seed)) as scene:
            results.add(beside_eager_work(scene))
    assert results != {(111, 5, 5, 5)}


def test_replays_beside_eager_work_in_this_and_another_thread_stay_right(scene):
    images, w = conv_arrays(scene.driver)
    expected = [scene.driver.asnumpy(y) for y in scene.states.map(conv, images, [w] * 4)]
    program = handlepool.record(scene.states.map, conv, images, [w] * 4, pool=scene.pool)
    stop = threading.Event()

    def beside():
        while not stop.is_set():
            with scene.driver.create_stream() as own:
                churn(own)

    def churn(stream):
        ParallelStates(2, pool=scene.pool).map(conv, images, [w] * 4)
        scene.pool.get_workspace(4096)
        stream.synchronize()

    thread = Thread(beside)
    try:
        for _ in range(30):
            program.replay()
            churn(scene.stream)
            assert all((scene.driver.asnumpy(y) == z).all() for y, z in zip(program.outputs, expected, strict=True))
    finally:
        stop.set()
        thread.finish()


def workspaces(scene):
    images, w = conv_arrays(scene.driver)
    program = handlepool.record(scene.states.map, conv, images, [w] * 4, pool=scene.pool)
    return program, scene.driver.asnumpy(conv(images[0], w))


def test_scratch_of_a_program_is_its_own_until_it_is_closed(scene):
    program, expected = workspaces(scene)
    stats = scene.pool.stats()
    assert stats["scratch_bytes_recorded"] > 0
    assert stats["scratch_bytes_captured"] == 0
    assert program.nbytes > stats["scratch_bytes_recorded"]
    scene.pool.trim(captured=True)
    program.replay()
    assert (scene.driver.asnumpy(program.outputs[0]) == expected).all()
    program.close()
    assert scene.pool.stats()["scratch_bytes_recorded"] == program.nbytes == 0
    assert scene.driver.alive()["scratch_bytes"] == scene.pool.stats()["scratch_bytes"]


def test_control_scratch_that_the_program_does_not_keep_is_freed_under_it(scene, without):
    without("scratch of programs")
    program, _ = workspaces(scene)
    scene.pool.trim(captured=True)
    program.replay()
    with pytest.raises(ContractError, match="freed before"):
        scene.stream.synchronize()


@pytest.mark.parametrize("held", [False, True])
def test_plans_live_as_long_as_the_program_whatever_the_cache_does_though_its_outputs_are_held(scene, held):
    program, _ = workspaces(scene)
    plans = [weakref.ref(plan.executable) for plan in plans_of(program)]
    outputs = program.outputs if held else None
    scene.pool.cache_clear()
    gc.collect()
    assert len(plans) == 1
    assert plans[0]() is not None
    program.close()
    gc.collect()
    assert plans[0]() is None
    assert (outputs is not None) == held


def test_inputs_and_what_the_closure_held_are_kept(scene):
    kept = scene.array(40)
    x = scene.array(1)
    program = handlepool.record(lambda x: scene.put(scene.array(), np.add, x, kept), x, pool=scene.pool)
    del x
    kept = None
    [scene.array(9) for _ in range(8)]
    program.replay()
    assert scene.read(program.outputs) == 41


def test_memory_goes_back_at_the_close_and_that_of_held_outputs_after_them(scene):
    x = scene.array(1, size=1000)
    with scene.driver.relaxed():
        scene.driver.release_cached()
    program = handlepool.record(big, scene, x, pool=scene.pool)
    with scene.driver.relaxed():
        scene.driver.release_cached()
    program.replay()
    held = program.outputs
    recorded = program.nbytes
    before = scene.driver.memory_info()[0]
    program.close()
    given = scene.driver.memory_info()[0] - before
    assert 0 < given < recorded
    assert (scene.driver.asnumpy(held) == 3).all()
    deferred.run()
    assert scene.driver.memory_info()[0] - before == given
    del held
    deferred.run()
    assert scene.driver.memory_info()[0] - before == recorded


def big(scene, x):
    middle = scene.put(scene.array(size=1000), lambda x: x + 1, x)
    return scene.put(scene.array(size=1000), lambda x: x + 1, middle)


# The end


def test_a_program_that_nobody_closed_makes_no_call_when_it_goes_and_is_given_back_later(scene):
    program, _ = workspaces(scene)
    latch = scene.driver.latch(scene.stream.ptr)
    program.replay()
    ending = weakref.ref(recording_of(program))

    def drop():
        nonlocal program
        del program
        gc.collect()

    made = calls(scene.driver, drop)
    assert not made
    assert any(getattr(step.__self__, "_recording", None) is ending() for step in deferred)
    deferred.run()
    assert scene.pool.stats()["scratch_bytes_recorded"] > 0  # the replay has not passed
    latch.release()
    scene.stream.synchronize()
    deferred.run()
    assert scene.pool.stats()["scratch_bytes_recorded"] == 0


def test_close_waits_for_the_last_replay_and_is_idempotent(scene):
    x = scene.array(0)
    program = handlepool.record(lambda: scene.put(x, lambda old: old + 1, x), pool=scene.pool)
    other = scene.driver.create_stream()
    program.replay(other)
    program.close()
    assert other.done
    program.close()
    assert program.closed
    assert repr(program).endswith(", closed>")


def test_replays_of_one_program_from_several_threads_come_one_after_the_other(scene):
    x = scene.array(0)
    program = handlepool.record(lambda: scene.put(x, lambda old: old + 1, x), pool=scene.pool)
    start, turn = threading.Barrier(4), threading.Lock()

    def body():
        with scene.driver.create_stream() as stream:
            start.wait(TIMEOUT)
            for _ in range(25):
                with turn:
                    program.replay()
                    program.hand_over()
            stream.synchronize()

    for thread in [Thread(body) for _ in range(4)]:
        thread.finish()
    program.replay()
    assert scene.read(x) == 102
