"""`Program.tune(plans=True)`: other plans and forms are tried in the program, and stay where whole replays become quicker."""

import gc

import numpy as np
import pytest
from harness.accounts import Accounts
from harness.arrays import Arrays
from harness.insides import recording_of
from harness.scenes import Scene, Thread
from harness.timed_driver import Fake, TimedDriver

import handlepool
from handlepool import ArgumentError, DriverNotAvailableError, OwnershipError
from handlepool.pool.deferred import deferred
from handlepool.recording.first_call import FirstCall
from handlepool.recording.replanning import SAMPLES, Trials
from handlepool.testing import reference


@pytest.fixture
def scene(make_default):
    """A driver that proposes three plans, of which the second one is the quickest alone, and the third one hopeless."""
    driver = TimedDriver([Fake(10), Fake(9.5), Fake(100)], scheduler="threads", check_order=True)
    with Scene(driver) as scene:
        make_default(scene.pool)
        yield scene
        assert scene.driver.captures_under_way() == 0
        gc.collect()  # programs that errors hold
        # A step for a replay that runs is kept, so its events would still be there.
        scene.driver.synchronize_stream(scene.stream.ptr)
        deferred.run_all()
        Accounts(scene.pool).check()


@pytest.fixture
def times(monkeypatch):
    """Microseconds of a replay by the engines of its plans: ``times.of``."""

    class Times:
        of = staticmethod(lambda engines: 100.0)
        asked = 0

    def samples(trials, *recordings):
        Times.asked += 1
        return [[Times.of(recording.engines())] * SAMPLES for recording in recordings]

    monkeypatch.setattr(Trials, "_samples", samples)
    return Times


def network(arrays):
    """Two convolutions of two geometries, their arrays, and the right result."""
    x, v, w = arrays.random(1, 4, 6, 6), arrays.random(8, 4, 3, 3), arrays.random(8, 8, 1, 1)
    b = arrays.random(8)

    def run(x):
        y = handlepool.conv2d(x, v, bias=b, padding=1, activation="swish")
        return handlepool.conv2d(y, w, padding=0), handlepool.ops.add(x, x)

    def right(x):
        y = reference.conv2d(x, arrays.take(v), bias=arrays.take(b), padding=1, activation="swish")
        return reference.conv2d(y, arrays.take(w))

    return run, x, right


def program_of(scene):
    arrays = Arrays(scene.pool, layout="NHWC")
    run, x, right = network(arrays)
    program = handlepool.record(run, x, lanes=4)
    return arrays, program, run, x, right


def check(arrays, program, x, right):
    program.replay()
    assert arrays.error(program.outputs[0], right(arrays.take(x))) < 1e-5
    assert arrays.error(program.outputs[1], 2 * arrays.take(x)) == 0


def quicker_with(engine, gain):
    return lambda engines: 100 - gain * sum(each == engine for each in engines)


def test_changes_that_help_the_whole_program_stay(scene, times):
    arrays, program, _, x, right = program_of(scene)
    times.of = quicker_with("engine 1", 10)
    found = program.tune((1, 2), seconds=30, plans=True)
    assert [change.kept for change in found.plans] == [True, *[False] * (len(found.plans) - 1)]
    assert len(found.plans[0].changes) == 2  # at once
    assert found.plans[0].before - found.plans[0].after == 20
    assert "100.00 -> 80.00, kept" in str(found)
    assert recording_of(program).engines().count("engine 1") == 2
    check(arrays, program, x, right)
    fresh = arrays.random(1, 4, 6, 6)
    assert arrays.error(program(fresh)[0], right(arrays.take(fresh))) < 1e-5
    program.close()


def test_control_changes_that_help_alone_and_not_in_the_program_are_undone(scene, times):
    arrays, program, run, x, right = program_of(scene)
    times.of = quicker_with("engine 1", -10)
    outputs = program.outputs
    found = program.tune((1, 2), seconds=30, plans=True)
    assert not any(change.kept for change in found.plans)
    assert len(found.plans) >= 3  # together, and each alone
    assert program.outputs is outputs
    assert set(recording_of(program).engines()) == {"engine 0", "host_add"}
    check(arrays, program, x, right)
    with handlepool.record(run, x, lanes=4) as again:
        assert set(recording_of(again).engines()) == {"engine 0", "host_add"}


def test_of_changes_that_do_not_help_together_the_one_that_helps_stays(scene, times):
    _, program, *_ = program_of(scene)
    times.of = lambda engines: {0: 100, 1: 90, 2: 120}[engines.count("engine 1")]
    found = program.tune((1,), seconds=30, plans=True)
    assert [len(change.changes) for change in found.plans][:2] == [2, 1]
    assert [change.kept for change in found.plans][:2] == [False, True]
    assert recording_of(program).engines().count("engine 1") == 1


def test_a_gain_within_the_noise_is_none(scene, times, monkeypatch):
    _, program, *_ = program_of(scene)
    noise = np.random.default_rng(0).normal(0, 5, (2, SAMPLES))
    monkeypatch.setattr(Trials, "_samples", lambda trials, *recordings: [[*(100 + noise[0])], [*(99.5 + noise[1])]])
    assert not any(change.kept for change in program.tune((1,), seconds=30, plans=True).plans)


def test_a_form_is_chosen_by_whole_replays(scene, times):
    arrays, program, _, x, right = program_of(scene)
    times.of = lambda engines: 100 - 30 * any("elementwise" in each for each in engines)
    found = program.tune((1,), seconds=30, plans=True)
    assert any(change.kept and "in a second launch" in " ".join(change.changes) for change in found.plans)
    assert any("elementwise" in each for each in recording_of(program).engines())
    check(arrays, program, x, right)


def test_what_the_function_changes_is_restored(scene, times):
    arrays = Arrays(scene.pool)
    x, w = arrays.random(1, 4, 6, 6), arrays.random(4, 4, 1, 1)

    def run(x):
        handlepool.ops.add(x, x, out=x)
        return handlepool.conv2d(x, w)

    program = handlepool.record(run, x, lanes=4)
    times.of = quicker_with("engine 1", 10)
    before = arrays.take(x)
    found = program.tune((1,), seconds=30, plans=True)
    assert found.plans[0].kept
    assert np.array_equal(arrays.take(x), before)
    program.replay()
    assert arrays.error(x, 2 * before) == 0
    assert arrays.error(program.outputs, reference.conv2d(2 * before, arrays.take(w))) < 1e-5


@pytest.mark.parametrize("place", ["the function", "the timing"])
def test_after_an_error_all_is_as_before(scene, times, monkeypatch, place):
    arrays = Arrays(scene.pool, layout="NHWC")
    run, x, right = network(arrays)
    state = {"broken": False}

    def fails(x):
        if state["broken"]:
            raise ValueError("now")
        return run(x)

    program = handlepool.record(fails, x, lanes=4)
    with monkeypatch.context() as patch:
        trial = Trials._trial

        def breaks(trials, *args):
            state["broken"] = place == "the function"
            return trial(trials, *args)

        def raises(trials, *recordings):
            raise ValueError("now")

        patch.setattr(Trials, "_trial", breaks)
        if place == "the timing":
            patch.setattr(Trials, "_samples", raises)
        with pytest.raises(ValueError, match="now"):
            program.tune((1,), seconds=30, plans=True)
    check(arrays, program, x, right)
    assert set(recording_of(program).engines()) == {"engine 0", "host_add"}
    with handlepool.record(run, x, lanes=4) as again:
        assert set(recording_of(again).engines()) == {"engine 0", "host_add"}


def test_g15_the_function_is_called_without_the_lock_and_other_uses_are_refused(scene, times, monkeypatch):
    arrays, program, _, x, right = program_of(scene)
    found, call = [], FirstCall.run

    def asks(first, *args):
        thread = Thread(lambda: program(x.copy(order="K")))
        with pytest.raises(OwnershipError):
            thread.finish()
        found.append(first)
        return call(first, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FirstCall, "run", asks)
        program.tune((1,), seconds=30, plans=True)
    assert len(found) > 1
    found.clear()
    check(arrays, program, x, right)


def test_outputs_that_the_caller_holds_keep_their_values(scene, times):
    arrays, program, *_ = program_of(scene)
    times.of = quicker_with("engine 1", 10)
    program.replay()
    held, before = program.outputs, [arrays.take(y) for y in program.outputs]
    assert program.tune((1,), seconds=30, plans=True).plans[0].kept
    assert program.outputs is not held
    program(arrays.random(1, 4, 6, 6))
    assert all(np.array_equal(arrays.take(y), each) for y, each in zip(held, before, strict=True))


def test_no_more_is_tried_when_the_time_is_up(scene, times):
    _, program, *_ = program_of(scene)
    assert program.tune((1,), seconds=1e-6, plans=True).plans == ()
    assert times.asked == 0


def test_what_cannot_be_tuned_is_refused(scene, times):
    _, program, run, x, _ = program_of(scene)
    with pytest.raises(ArgumentError, match="plans"):
        program.tune(plans=1)
    with handlepool.record(run, x) as without, pytest.raises(ArgumentError, match="record"):
        without.tune(plans=True)
    recorded = handlepool.recorded(run, lanes=4)
    recorded(x)
    with pytest.raises((ArgumentError, TypeError)):
        recorded.program(x).tune(plans=True)


def test_the_host_driver_has_no_plans_to_tune(each_pool):
    y = Arrays(each_pool).random(1, 2, 3, 3)
    with handlepool.record(lambda y: handlepool.ops.add(y, y), y, lanes=4) as program:
        if each_pool.driver.name == "host":
            with pytest.raises(DriverNotAvailableError):
                program.tune(plans=True)
        else:
            assert program.tune((1,), plans=True).plans == ()
