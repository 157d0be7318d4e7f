"""Tuning, on a host driver that proposes several plans and whose clock is told how long each takes, alone and side by side."""

import threading
import traceback
from collections import Counter

import numpy as np
import pytest
from harness.accounts import RESTORES, Accounts
from harness.arrays import Arrays
from harness.graphs import convolution as conv
from harness.hidden import hidden
from harness.lines import some_lines
from harness.scenes import TIMEOUT, Scene, Thread
from harness.timed_driver import Fake, TimedDriver
from harness.uses import assert_usable

import handlepool
from handlepool import (
    ArgumentError,
    ArraySpec,
    ArrayTypeError,
    CaptureError,
    ContractError,
    DriverNotAvailableError,
    GraphNotSupportedError,
    HandlePool,
    HandlePoolError,
    ParallelStateExecutor,
    ParallelStates,
    PoolClosedError,
    StateBusyError,
    drivers,
)
from handlepool.graphs.timing import ROUNDS, SCREENING
from handlepool.pool.context import thread
from handlepool.pool.deferred import deferred
from handlepool.testing import reference

SHAPES = (1, 4, 6, 6), (4, 4, 3, 3)


def arrays_of(driver):
    random = np.random.default_rng(3)
    return [driver.asarray(random.standard_normal(shape).astype(np.float32)) for shape in SHAPES]


@pytest.fixture
def make(make_default):
    """Makes scenes with a driver that proposes the plans given; in the end nothing is captured and the pool is in order."""
    scenes = []

    def scene_of(*plans, scheduler="threads", check_order=True, **options):
        driver = TimedDriver(plans, scheduler=scheduler, check_order=check_order, devices=2)
        scene = Scene(driver, **options)
        scene.__enter__()
        make_default(scene.pool)
        scenes.append(scene)
        return scene

    yield scene_of
    for scene in scenes:
        if not scene.pool.closed:
            in_order(scene)
        scene.__exit__(None, None, None)
        assert not scene.driver.order.found


def in_order(scene, complete=True):
    assert scene.driver.captures_under_way() == 0
    assert scene.driver.current_stream() is scene.stream
    assert (thread.recording, thread.region, thread.pool) == (None, None, None)
    stats = scene.pool.stats()
    assert stats["handles_captured"] == stats["handles_leased"] == 0
    deferred.run()
    scene.pool.internals.release_left()
    if complete:
        Accounts(scene.pool).check()
    assert_usable(scene.pool)


ACTIVATED = {"activation": "swish", "padding": 1}


def layer(scene, **options):
    """Arrays of a convolution with a bias, the call, and its right result."""
    arrays = Arrays(scene.pool, layout="NHWC")
    x, w, b = arrays.random(1, 4, 6, 6), arrays.random(8, 4, 3, 3), arrays.random(8)
    expected = reference.conv2d(*map(arrays.take, (x, w)), bias=arrays.take(b), **ACTIVATED)
    return arrays, lambda: handlepool.conv2d(x, w, bias=b, **ACTIVATED, **options), expected


@pytest.mark.parametrize(
    ("of_nodes", "launches", "form"),
    [
        ({}, 1, "conv2d + bias + activation"),
        ({3: 20}, 2, "conv2d + bias; activation in a second launch"),
        ({3: 20, 2: 19}, 2, "conv2d; bias + activation in a second launch"),
        ({3: 0.5, 2: 0}, 1, "conv2d + bias + activation"),  # the launch behind it takes longer than that
    ],
)
def test_the_quickest_form_of_an_epilogue_is_taken(make, of_nodes, launches, form):
    scene = make(Fake(alone=10), Fake(alone=5))
    scene.driver.of_nodes = of_nodes
    arrays, call, expected = layer(scene)
    (tuning, *_) = handlepool.tune(call)
    assert tuning.form == form
    assert dict(tuning.forms)[form] == min(time for _, time in tuning.forms)
    assert f"{form}, chosen" in str(tuning)
    for _ in range(3):  # by the slow way, which makes a shortcut, and by that
        before = scene.driver.calls["launch"]
        assert arrays.error(call(), expected) < 1e-5
        assert scene.driver.calls["launch"] - before == launches


def test_a_form_that_was_chosen_can_lose_again(make):
    scene = make(Fake(alone=10), Fake(alone=5))
    arrays, call, expected = layer(scene)
    for of_nodes, launches in (({3: 20}, 2), ({2: 20, 1: 20}, 1)):
        scene.driver.of_nodes = of_nodes
        handlepool.tune(call)
        before = scene.driver.calls["launch"]
        assert arrays.error(call(), expected) < 1e-5
        assert scene.driver.calls["launch"] - before == launches


def test_states_side_by_side_leave_the_form(make):
    scene = make(Fake(alone=10), Fake(alone=5))
    scene.driver.of_nodes = {3: 20}
    _, call, _ = layer(scene)
    (tuning, *_) = handlepool.tune(call, states=ParallelStates(2))
    assert (tuning.form, tuning.forms) == ("", ())


GREEDY, SOCIABLE = Fake(alone=10, concurrent=50), Fake(alone=12, concurrent=20)


# What is chosen


def test_the_best_alone_need_not_be_the_best_side_by_side(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    alone = conv.tune(x, w)
    assert (alone.winner.index, conv.plan_for(x, w).engine) == (0, "engine 0")
    together = conv.tune(x, w, states=scene.states)
    assert (together.winner.index, conv.plan_for(x, w).engine) == (1, "engine 1")
    assert [(each.alone, each.concurrent) for each in alone.candidates] == [(10, None), (12, None)]
    assert [(each.alone, each.concurrent) for each in together.candidates] == [(10, 50), (12, 20)]
    assert (alone.states, together.states) == (1, 4)


def test_calls_use_the_winner_and_are_right(make):
    scene = make(GREEDY, SOCIABLE)
    driver = scene.driver
    x, w = arrays_of(driver)
    expected = driver.asnumpy(conv(x, w))
    conv.tune(x, w, states=scene.states)
    driver.eager.clear()
    for y in (conv(x, w), *scene.states.map(conv, [x, x], [w, w])):
        assert (driver.asnumpy(y) == expected).all()
    assert [index for index, _ in driver.eager] == [1, 1, 1]


def test_what_was_used_before_is_told(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    first, second = (conv.tune(x, w, states=scene.states) for _ in range(2))
    assert (first.previous.index, second.previous.index) == (0, 1)


@pytest.mark.parametrize(("quicker", "chosen"), [(99, 0), (97.2, 0), (97, 1)])
@pytest.mark.parametrize("together", [False, True])
def test_another_plan_is_worth_the_change_if_it_is_quicker_by_three_percent(make, quicker, chosen, together):
    alike = {"alone": 100} if together else {"concurrent": 100}
    which = "concurrent" if together else "alone"
    scene = make(*(Fake(**alike, **{which: time}) for time in (100, quicker)))
    x, w = arrays_of(scene.driver)
    plan = conv.plan_for(x, w)
    tuning = conv.tune(x, w, states=scene.states if together else None)
    assert (tuning.winner.index, tuning.previous.index) == (chosen, 0)
    assert (conv.plan_for(x, w) is plan) == (chosen == 0)
    assert conv.plan_for(x, w).engine == f"engine {chosen}"


def test_a_plan_is_kept_for_calls_of_the_same_form(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    y = conv(x, w)
    conv.tune(x, w, states=scene.states, out=y)
    assert (conv.plan_for(x, w).engine, conv.plan_for(x, w, out=y).engine) == ("engine 0", "engine 1")


def test_options_are_the_functions_own(make):
    @handlepool.graph
    def padded(g, x, w, *, padding):
        return g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1])

    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    padded.tune(x, w, states=scene.states, padding=2)
    assert [padded.plan_for(x, w, padding=padding).engine for padding in (1, 2)] == ["engine 0", "engine 1"]


def test_a_hiccup_changes_nothing(make):
    """The clock of these tests is far out at every fifth question; a median does not see it."""
    scene = make(*(Fake(alone=10 + index, concurrent=30 - index) for index in range(7)))
    tuning = conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert [each.concurrent for each in tuning.candidates] == [30 - index for index in range(7)]
    assert not any(each.skipped for each in tuning.candidates)


def test_the_pool_is_that_of_the_states(make, make_pool):
    scene = make(GREEDY, SOCIABLE)
    other = make_pool(driver=scene.driver)
    x, w = arrays_of(scene.driver)
    conv.tune(x, w, states=ParallelStates(3, pool=other))
    assert (scene.pool.stats()["plans_built"], other.stats()["plans_built"]) == (0, 2)


def chain(x, w):
    """Three convolutions of two geometries, a sum that is no graph, and an activation."""
    y = conv(conv(x, w), w)
    return handlepool.ops.relu(handlepool.add(y, handlepool.conv2d(x, w[:2], padding=1, bias=w[0, 0, 0, :2])[:, [0, 1, 0, 1]]))


def test_every_plan_that_a_function_used_is_tuned_and_nothing_else(make):
    scene = make(GREEDY, SOCIABLE, Fake(alone=5, concurrent=30))
    driver = scene.driver
    x, w = arrays_of(driver)
    other = conv.plan_for(ArraySpec((2, 4, 6, 6), "float32"), w)
    expected = driver.asnumpy(chain(x, w))
    for _ in range(2):  # the second time all is known
        tunings = handlepool.tune(chain, x, w)
        assert [each.name for each in tunings] == ["convolution", "conv2d", "relu"]
        assert [each.inputs[0].shape for each in tunings] == [x.shape] * 3
        assert [each.winner.index for each in tunings] == [2, 2, 2]
    assert handlepool.ops.conv2d_plan(x, w[:2], padding=1, bias=w[0, 0, 0, :2]).engine == "engine 2"
    assert conv.plan_for(x, w).engine == "engine 2"
    assert conv.plan_for(ArraySpec((2, 4, 6, 6), "float32"), w) is other
    assert other.engine == "engine 0"
    assert (driver.asnumpy(chain(x, w)) == expected).all()


def test_one_convolution_is_tuned_with_its_options_and_as_calls_with_an_out(make):
    scene = make(GREEDY, SOCIABLE, Fake(alone=5, concurrent=30))
    x, w = arrays_of(scene.driver)
    out = scene.driver.asarray(np.zeros(SHAPES[0], np.float32))
    (tuning,) = handlepool.tune(handlepool.conv2d, x, w, padding=1, out=out)
    assert (tuning.winner.index, tuning.states, len(tuning.candidates)) == (2, 1, 3)
    assert handlepool.ops.conv2d_plan(x, w, padding=1, out=out).engine == "engine 2"
    assert handlepool.ops.conv2d_plan(x, w, padding=1).engine == "engine 0"
    (together,) = handlepool.tune(handlepool.conv2d, x, w, padding=1, states=scene.states)
    assert (together.winner.index, together.states) == (1, 4)


def test_the_first_candidates_are_tried_and_the_one_in_use(make):
    scene = make(*(Fake(alone=time) for time in (9, 8, 7, 6, 5)))
    x, w = arrays_of(scene.driver)
    assert handlepool.tune(conv, x, w, candidates=2)[0].winner.index == 1
    assert handlepool.tune(conv, x, w)[0].winner.index == 4
    (tuning,) = handlepool.tune(conv, x, w, candidates=2)  # the fifth is in use, so all are tried
    assert (tuning.winner.index, tuning.previous.index) == (4, 4)
    conv.plan_for(x, w).select(0)
    (tuning,) = handlepool.tune(conv, x, w, candidates=3)
    assert [each.skipped for each in tuning.candidates] == [
        "",
        "",
        "",
        *["not tried, because it comes after the first 3 plans"] * 2,
    ]
    for wrong in (0, -1, 1.5, True, "all"):
        with pytest.raises(ArgumentError, match="tune: candidates="):
            handlepool.tune(conv, x, w, candidates=wrong)


def test_plans_of_a_forks_branches_are_tuned(make):
    scene = make(GREEDY, SOCIABLE, Fake(alone=5))
    x, w = arrays_of(scene.driver)

    def fork(x, w):
        with scene.states.fork() as fork:
            return fork.run(conv, fork.run(conv, x, w), w)

    (tuning,) = handlepool.tune(fork, x, w)
    assert (tuning.name, tuning.winner.index) == ("convolution", 2)


def test_where_nothing_can_be_tuned_the_function_is_not_even_called(make, make_pool, make_default):
    scene = make(GREEDY, SOCIABLE)
    called = []
    with scene.states.fork() as fork, pytest.raises(CaptureError, match="handlepool cannot be tuned inside a branch"):
        fork.run(handlepool.tune, called.append, 3)
    make_default(make_pool())
    with pytest.raises(DriverNotAvailableError, match=r"handlepool\.tune times plans on a GPU, and the host driver"):
        handlepool.tune(called.append, 3)
    assert called == []


def test_a_function_that_fails_goes_on_and_nothing_is_tuned(make):
    scene = make(GREEDY, SOCIABLE, Fake(alone=5))
    x, w = arrays_of(scene.driver)

    def failing():
        conv(x, w)
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        handlepool.tune(failing)
    assert conv.plan_for(x, w).engine == "engine 0"
    assert handlepool.tune(lambda: None) == ()
    for wrong in (None, 3):
        with pytest.raises(ArgumentError, match="tune takes a function, not"):
            handlepool.tune(wrong, x)
    with pytest.raises(ArgumentError, match=r"handlepool\.tune was given states=4"):
        handlepool.tune(conv, x, w, states=4)


def test_arrays_of_another_library_are_read_where_they_are(make):
    class Other:
        def __init__(self, values):
            self.values = values
            self.__array_interface__ = values.__array_interface__

    scene = make(GREEDY, SOCIABLE)
    x, w = (Other(np.array(scene.driver.asnumpy(array))) for array in arrays_of(scene.driver))
    assert conv.tune(x, w, states=scene.states).winner.index == 1


# What is run


def test_side_by_side_every_state_launches_the_same_plan_on_a_stream_of_its_own(make):
    scene = make(GREEDY, SOCIABLE)
    conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert [(index, len(set(streams))) for index, streams, _ in scene.driver.graphs] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    for _, streams, _ in scene.driver.graphs:
        assert {streams.count(stream) for stream in streams} == {16}


def test_the_chains_of_a_graph_have_no_order_between_them(make):
    scene = make(GREEDY)
    conv.tune(*arrays_of(scene.driver), states=scene.states)
    for (*_, graph), chains in zip(scene.driver.graphs, (1, 4), strict=True):
        nodes = graph.graph.nodes
        assert sum(not node.after for node in nodes) == len({node.lane for node in nodes}) == chains
        assert all({before.lane for before in node.after} <= {node.lane} for node in nodes)


def test_candidates_take_turns_and_those_far_behind_have_fewer(make):
    scene = make(GREEDY, SOCIABLE)
    order = []
    end_capture = scene.driver.end_capture

    def noted(pointer):
        graph = end_capture(pointer)
        launch, number = graph.launch, len(scene.driver.graphs)
        graph.launch = lambda pointer: (order.append(number), launch(pointer))
        return graph

    scene.driver.end_capture = noted
    conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert order == [1, 1, 2, 2, 3, 3, 4, 4] * (SCREENING + 1) + [3, 3, 4, 4] * (ROUNDS - SCREENING)


def test_a_candidate_is_built_once_and_costs_so_many_launches_and_waits(make):
    scene = make(Fake(alone=10), Fake(alone=11), Fake(alone=14), Fake(alone=16))
    driver = scene.driver
    x, w = arrays_of(driver)
    conv.plan_for(x, w)
    built = []
    compile_graph = driver.compile
    driver.compile = lambda *args, **settings: (built.append(settings["plan_index"]), compile_graph(*args, **settings))[1]
    driver.eager.clear()
    driver.calls.clear()
    tuning = conv.tune(x, w)
    assert built == [0, 1, 2, 3]
    assert Counter(index for index, _ in driver.eager) == dict.fromkeys(range(4), 7)  # one warms up, three pairs are timed
    assert [len(streams) for _, streams, _ in driver.graphs] == [16] * 4
    samples = 3 * (ROUNDS + 1) + (SCREENING + 1)  # the last one takes more than half as long again as the first
    assert driver.calls["synchronize_event"] == 4 * 3 + samples
    assert driver.calls["synchronize_stream"] == 4 + 3  # the copies of the arrays, the end, and the end of the slot
    assert (tuning.winner.index, tuning.candidates[3].alone) == (0, 16)
    assert 0 < tuning.building < tuning.seconds


@pytest.mark.parametrize("seed", range(5))
def test_it_reads_what_the_callers_stream_wrote_and_writes_nothing_of_the_callers(make, seed):
    scene = make(GREEDY, SOCIABLE, scheduler="adversarial")
    driver = scene.driver
    x, w = arrays_of(driver)
    y = conv(x, w)
    before = [driver.asnumpy(array) for array in (x, w)]
    scene.put(y, lambda: np.nan)
    scene.put(x, lambda: before[0])  # queued, and not run yet
    conv.tune(x, w, states=scene.states, out=y)
    assert all((driver.asnumpy(array) == values).all() for array, values in zip((x, w), before, strict=True))
    assert np.isnan(driver.asnumpy(y)).all()


def test_control_without_waiting_for_the_copies_they_are_read_too_early(make, monkeypatch):
    scene = make(GREEDY, SOCIABLE, scheduler="adversarial")
    x, w = arrays_of(scene.driver)
    synchronize = scene.driver.synchronize_stream
    with monkeypatch.context() as patch:
        patch.setattr(scene.driver, "synchronize_stream", lambda pointer: pointer == scene.stream.ptr or synchronize(pointer))
        with pytest.raises(ContractError, match="not ordered"):
            conv.tune(x, w, states=scene.states)
    scene.driver.order.found.clear()


def test_it_leaves_no_scratch_event_graph_or_plan_behind(make):
    scene = make(Fake(concurrent=5), Fake(scratch=1 << 20), Fake(scratch=1 << 22))
    x, w = arrays_of(scene.driver)
    conv(x, w)
    scene.states.map(conv, [x] * 4, [w] * 4)

    def left():
        scene.stream.synchronize()
        scene.pool.trim()
        scene.driver.release_cached()
        return scene.driver.alive(), scene.driver.memory_info(), scene.pool.stats()["plans_cached"]

    before = left()
    for _ in range(2):
        conv.tune(x, w, states=scene.states)
        assert scene.pool.stats()["scratch_bytes"] < 1 << 20
    assert left() == before


def test_a_pool_with_checks_tunes(make):
    scene = make(GREEDY, SOCIABLE, check=True)
    assert conv.tune(*arrays_of(scene.driver), states=scene.states).winner.index == 1
    scene.pool.close()


def test_captures_of_another_thread_survive(make):
    scene = make(GREEDY, Fake(scratch=1 << 20), SOCIABLE)
    x, w = arrays_of(scene.driver)
    out = scene.array(0)
    begun, done = threading.Event(), threading.Event()

    def other():
        with scene.driver.create_stream() as stream:
            stream.begin_capture(mode="global")
            try:
                scene.put(out, lambda: 3)
                begun.set()
                assert done.wait(TIMEOUT)
            finally:
                graph = stream.end_capture()
            return graph

    beside = Thread(other)
    assert begun.wait(TIMEOUT)
    try:
        conv.tune(x, w, states=scene.states)
    finally:
        done.set()
    beside.finish().launch(scene.stream)
    assert scene.read(out) == 3


# What is skipped


SKIPPED = {
    "cannot be built": (Fake(refused=True), "Deselecting execution plan"),
    "fails": (Fake(concurrent=1, fails=True), "EXECUTION_FAILED"),
}


@pytest.mark.parametrize("what", SKIPPED)
def test_what_cannot_be_built_or_fails_is_skipped(make, what):
    fake, says = SKIPPED[what]
    scene = make(Fake(), fake, Fake(concurrent=5))
    tuning = conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert (tuning.winner.index, [bool(each.skipped) for each in tuning.candidates]) == (2, [False, True, False])
    assert says in tuning.candidates[1].skipped


def test_what_exceeds_the_workspace_limit_is_skipped(make):
    limited = conv.options(workspace_limit=1 << 16)
    scene = make(Fake(), Fake(concurrent=1, scratch=1 << 20), Fake(concurrent=5))
    tuning = limited.tune(*arrays_of(scene.driver), states=scene.states)
    assert tuning.winner.index == 2
    assert "excluded by a setting" in tuning.candidates[1].skipped


def test_what_exceeds_the_scratch_limit_on_all_streams_at_a_time_is_skipped(make):
    scene = make(Fake(), Fake(alone=1, concurrent=1, scratch=1 << 20), Fake(concurrent=5), scratch_limit=3 << 20)
    x, w = arrays_of(scene.driver)
    tuning = conv.tune(x, w, states=scene.states)
    assert (tuning.winner.index, tuning.candidates[1].skipped) == (
        2,
        "no room for 1,048,576 bytes of scratch on each of 4 streams",
    )
    assert conv.tune(x, w).winner.index == 1


def test_a_launch_that_fails_under_capture_is_skipped_and_no_capture_stays_open(make):
    scene = make(Fake(), Fake(concurrent=1), Fake(concurrent=5))
    compile_graph = scene.driver.compile

    def fragile(*args, **settings):
        made = compile_graph(*args, **settings)
        launch = made.launch

        def launched(*args):
            if scene.driver._launches and len(scene.driver._launches) > 20:  # with several streams in the capture
                raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
            launch(*args)

        if settings.get("plan_index") == 1:
            made.launch = launched
        return made

    scene.driver.compile = fragile
    tuning = conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert tuning.winner.index == 2
    assert "its launch failed" in tuning.candidates[1].skipped


def test_what_is_far_too_slow_is_not_timed_further(make):
    scene = make(Fake(alone=10), Fake(alone=39, concurrent=5), Fake(alone=41, concurrent=1))
    tuning = conv.tune(*arrays_of(scene.driver), states=scene.states)
    assert (tuning.winner.index, tuning.candidates[2].skipped[:8]) == (1, "too slow")
    eight = conv.tune(*arrays_of(scene.driver), states=ParallelStates(8, pool=scene.pool))
    assert eight.winner.index == 2  # eight launches of the quickest, one after the other, take longer


def test_long_launches_are_repeated_less(make):
    scene = make(Fake(alone=200), Fake(alone=240))
    tuning = conv.tune(*arrays_of(scene.driver))
    assert [streams.count(streams[0]) for _, streams, _ in scene.driver.graphs] == [2, 2]
    assert [each.alone for each in tuning.candidates] == [200, 240]


# The report


def test_the_report_can_be_read(make):
    scene = make(GREEDY, SOCIABLE, Fake(refused=True))
    text = str(conv.tune(*arrays_of(scene.driver), states=scene.states))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    size = format(conv.plan_for(*arrays_of(scene.driver)).workspace_size, ",")
    assert lines == [
        "convolution: 2 of 3 plans timed alone, and 4 states side by side; times in microseconds, scratch in bytes",
        "plan alone concurrent scratch engine",
        f"1 12.00 20.00 {size} engine 1, chosen",
        f"0 10.00 50.00 {size} engine 0, used before",
        "2 excluded by a setting, or cuDNN cannot build it: cuDNN answered: Deselecting execution plan",
    ]
    assert "None" not in str(conv.tune(*arrays_of(scene.driver)))


# Refusals


def refused(scene, error, says, *arrays, **options):
    """Nothing is launched, and the plan stays."""
    x, w = arrays_of(scene.driver)
    plan = conv.plan_for(x, w)
    scene.driver.eager.clear()
    with pytest.raises(error, match=says):
        conv.tune(*(arrays or (x, w)), **options)
    assert conv.plan_for(x, w) is plan
    assert (scene.driver.eager, scene.driver.graphs) == ([], [])


def test_tuning_without_a_gpu_is_refused(make_pool, make_default):
    pool = make_pool()
    make_default(pool)
    x, w = arrays_of(pool.driver)
    for states in (None, ParallelStates(2, pool=pool)):
        with pytest.raises(DriverNotAvailableError, match=r"convolution\.tune times plans on a GPU"):
            conv.tune(x, w, states=states)
    assert pool.driver.captures_under_way() == 0
    assert pool.driver.calls["launch"] == pool.driver.calls["begin_capture"] == pool.stats()["plans_built"] == 0


@pytest.mark.skipif(drivers.available("cuda") is None, reason="is about machines without a GPU")
def test_tuning_with_the_cuda_driver_and_no_gpu_says_what_is_missing():
    with HandlePool(driver="cuda") as pool, pytest.raises(DriverNotAvailableError):
        conv.tune(*(np.ones(shape, np.float32) for shape in SHAPES), states=ParallelStates(2, pool=pool))


def test_tuning_in_a_capture_is_refused_and_the_capture_lives(make):
    scene = make(GREEDY, SOCIABLE)
    x = scene.array(1)
    scene.stream.begin_capture()
    scene.put(x, lambda old: old + 1, x)
    specs = [ArraySpec(shape, np.float32) for shape in SHAPES]
    with pytest.raises(CaptureError, match="while the current stream is being captured"):
        conv.tune(*specs, states=scene.states)
    graph = scene.stream.end_capture()
    graph.launch()
    assert scene.read(x) == 2


def test_tuning_in_a_recording_a_branch_or_a_task_is_refused(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    y = conv(x, w)
    told = hidden([])

    def inside(*_):
        with pytest.raises(CaptureError) as error:
            conv.tune(x, w, states=scene.states)
        told().append(str(error.value).partition(":")[0])

    def recorded():
        if thread.recording is not None:
            inside()
        return conv(x, w, out=y)

    handlepool.record(recorded).close()
    with scene.states.fork() as fork:
        fork.run(inside)
    with ParallelStateExecutor(1, pool=scene.pool) as executor:
        executor.submit(inside).result()
    scene.states.with_state(0, inside)
    assert len(told()) == 4
    assert "inside a recording" in told()[0]
    assert all("inside a branch or a task" in text for text in told()[1:])


SPECS = [ArraySpec(shape, np.float32) for shape in SHAPES]
REFUSED = {
    "states": (ArgumentError, "pass a ParallelStates", {}, {"states": 4}),
    "states by name": (ArgumentError, "pass a ParallelStates", {}, {"states": "four"}),
    "states in a list": (ArgumentError, "pass a ParallelStates", {}, {"states": [1, 2]}),
    "the first array": (ArrayTypeError, "argument 0 is a", {0: SPECS[0]}, {}),
    "the second array": (ArrayTypeError, "argument 1 is a", {1: SPECS[1]}, {}),
    "an option": (ArgumentError, "no option stride", {}, {"stride": 2}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_array_no_states_or_no_option_is_refused(make, what):
    error, says, places, options = REFUSED[what]
    scene = make(GREEDY, SOCIABLE)
    arrays = arrays_of(scene.driver)
    for place, array in places.items():
        arrays[place] = array
    refused(scene, error, says, *arrays, **{"states": scene.states, **options})


def test_too_few_side_streams_are_refused(make):
    scene = make(GREEDY, SOCIABLE)
    conv.plan_for(*arrays_of(scene.driver))
    sides = scene.pool.internals.device(0).sides
    leased = [sides.lease() for _ in range(30)]
    refused(scene, StateBusyError, "needs 4 side streams, and 2 are free", states=scene.states)
    for slot in leased:
        sides.release(slot, captured=False)


def test_a_closed_pool_is_refused(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    scene.pool.close()
    with pytest.raises(PoolClosedError):
        conv.tune(x, w, states=scene.states)


def test_where_nothing_can_be_timed_the_plan_stays(make):
    scene = make(GREEDY, SOCIABLE)
    x, w = arrays_of(scene.driver)
    plan = conv.plan_for(x, w)
    for fake in scene.driver.plans:
        fake.fails = True
    with pytest.raises(GraphNotSupportedError, match=r"none of 2 plans could be timed.*EXECUTION_FAILED"):
        conv.tune(x, w, states=scene.states)
    for fake in scene.driver.plans:
        fake.fails = False
    assert conv.plan_for(x, w) is plan


@pytest.mark.parametrize("interrupt", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "method",
    ["synchronize_event", "begin_capture", "end_capture", "launch", "elapsed", pytest.param(None, marks=pytest.mark.slow)],
)
def test_any_call_may_fail_and_nothing_is_left_captured_leased_or_lost(method, interrupt, limits):
    limits(ROUNDS=1, MOST_LAUNCHES=2)
    for k in some_lines(4):  # of calls, here
        with Scene(TimedDriver([Fake(), Fake(concurrent=5)], scheduler="adversarial", seed=k)) as scene:
            x, w = arrays_of(scene.driver)
            conv.plan(scene.pool.internals, (x, w), (), {})
            error = interrupt(f"injected failure of call {k}")
            scene.driver.fail_at(k, method, error, RESTORES)
            try:
                conv.tune(x, w, states=scene.states)
            except (interrupt, HandlePoolError):
                pass
            scene.driver.fail_at(0)
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            failed = bool(frames)
            error = None
            scene.pool.trim()
            # An event or a block that an interrupt meets in its end may be gone or not; it is not destroyed again, and lost.
            lost = interrupt is KeyboardInterrupt and not {"destroy_event", "free"}.isdisjoint(frames)
            in_order(scene, complete=not lost)
            assert scene.pool.stats()["plans_cached"] == 1
        if not failed:
            break
    assert k > 4
