"""`record(plans=True)`: the heaviest plans are measured between the two calls, and the program launches those that win."""

import re
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from harness.accounts import RESTORES, Accounts
from harness.graphs import convolution as conv
from harness.hidden import hidden
from harness.insides import plans_of
from harness.lines import some_lines
from harness.scenes import Scene, leased
from harness.timed_driver import Fake, TimedDriver
from harness.uses import assert_usable

import handlepool
from handlepool import (
    ArgumentError,
    CaptureError,
    DriverNotAvailableError,
    GraphNotSupportedError,
    HandlePoolError,
    StateBusyError,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.graphs import tuning
from handlepool.graphs.timing import TimingRig
from handlepool.pool.context import recordings, thread
from handlepool.pool.deferred import deferred
from handlepool.recording import record as recording

record = partial(handlepool.record, plans=True)
SLOW, QUICK = Fake(alone=20), Fake(alone=10)


@pytest.fixture
def make(make_default):
    """Makes scenes with a driver that proposes the plans given; in the end all is given back."""
    scenes = []

    def scene_of(*plans, scheduler="threads", **options):
        scene = Scene(TimedDriver(plans, scheduler=scheduler, check_order=True, **options))
        scene.__enter__()
        make_default(scene.pool)
        scenes.append(scene)
        return scene

    yield scene_of
    for scene in scenes:
        in_order(scene)
        scene.__exit__(None, None, None)
        assert not scene.driver.order.found


def in_order(scene, complete=True):
    assert scene.driver.captures_under_way() == 0
    assert (thread.recording, thread.rehearsal, thread.launched, recordings) == (None, None, None, [])
    assert leased(scene) == 0
    deferred.run()
    scene.pool.internals.release_left()
    if complete:
        Accounts(scene.pool).check()
    assert_usable(scene.pool)


def arrays_of(scene, *shapes):
    random = np.random.default_rng(3)
    return [scene.driver.asarray(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


@pytest.fixture
def launched(monkeypatch):
    """The index of each plan that a recording keeps."""
    found = []
    keep = recording.Recording.keep
    monkeypatch.setattr(
        recording.Recording, "keep", lambda made, plan: found.append(plan.engine.removeprefix("engine ")) or keep(made, plan)
    )
    return found


X, W = (1, 4, 6, 6), (4, 4, 3, 3)


def chain(x, w):
    return conv(conv(x, w), w)


def branches(x, w):
    return handlepool.ParallelStates(2).map(conv, [x, x], [w, w])


# What is chosen


@pytest.mark.parametrize("lanes", [None, 1, 4])
@pytest.mark.parametrize("function", [chain, branches])
def test_a_program_launches_what_won_and_is_right(make, launched, function, lanes):
    scene = make(SLOW, QUICK)
    x, w = arrays_of(scene, X, W)
    expected = [scene.driver.asnumpy(y) for y in ([chain(x, w)] if function is chain else branches(x, w))]
    with record(function, x, w, lanes=lanes) as program:
        (found,) = program.tunings
        assert (found.winner.index, found.previous.index, found.states) == (1, 0, 1)
        assert launched == ["1", "1"]
        program.replay()
        outputs = program.outputs if function is branches else [program.outputs]
        assert all((scene.driver.asnumpy(y) == right).all() for y, right in zip(outputs, expected, strict=True))
    assert conv.plan_for(x, w).engine == "engine 1"


@pytest.mark.parametrize("options", [{}, {"plans": False}])
def test_control_without_it_nothing_is_measured(make, launched, options):
    scene = make(SLOW, QUICK)
    with handlepool.record(chain, *arrays_of(scene, X, W), **options) as program:
        assert (program.tunings, launched) == ((), ["0", "0"])


@pytest.mark.parametrize(("quicker", "chosen"), [(99, "0"), (97.2, "0"), (97, "1")])
def test_a_plan_stays_unless_another_is_quicker_by_three_percent(make, launched, quicker, chosen):
    scene = make(Fake(alone=100), Fake(alone=quicker))
    with record(chain, *arrays_of(scene, X, W)) as program:
        assert launched == [chosen, chosen]
        assert str(program.tunings[0].winner.index) == chosen


def test_a_plan_that_a_setting_excludes_is_not_chosen(make, launched):
    scene = make(SLOW, Fake(alone=1, scratch=1 << 20), QUICK)
    small = conv.options(workspace_limit=1 << 16)
    with record(lambda x, w: small(x, w), *arrays_of(scene, X, W)) as program:
        assert launched == ["2"]
        assert "excluded by a setting" in program.tunings[0].candidates[1].skipped


def test_the_function_is_called_twice_and_its_arrays_are_read_by_that_alone(make):
    scene = make(SLOW, QUICK)
    x, w = arrays_of(scene, X, W)
    calls = hidden([])

    def function(y, w):
        calls().append(1)
        return conv(x, w, out=y)

    y = scene.driver.asarray(np.zeros(X, np.float32))
    with record(function, y, w) as program:
        assert (len(calls()), len(program.tunings)) == (2, 1)
        before = scene.driver.asnumpy(y)
        assert before.any()
        scene.driver.copy(y, scene.driver.asarray(np.zeros(X, np.float32)))
        program.replay()
        assert (scene.driver.asnumpy(y) == before).all()


# The heaviest


def weighing(monkeypatch, microseconds):
    """What a launch takes is told by the extent of the arrays."""
    monkeypatch.setattr(TimingRig, "estimate", lambda rig, plan: microseconds[plan.inputs[0].shape[2]])


def of_sizes(scene, counts):
    """A function that calls a graph function on arrays of several extents, so often each; with what it is given."""
    (w,) = arrays_of(scene, W)
    given = arrays_of(scene, *((1, 4, size, size) for size in counts))

    def function(w, *xs):
        return [conv(x, w) for x, count in zip(xs, counts.values(), strict=True) for _ in range(count)]

    return function, w, *given


@pytest.mark.parametrize(
    ("counts", "microseconds", "tuned"),
    [
        ({4: 1, 6: 1, 8: 1}, {4: 1, 6: 80, 8: 11}, [6, 8]),
        ({4: 1, 6: 1, 8: 1}, {4: 1, 6: 1, 8: 98}, [8]),
        ({4: 9, 6: 1}, {4: 20, 6: 30}, [4, 6]),
        ({4: 9, 6: 1}, {4: 40, 6: 30}, [4]),
        ({4: 1, 6: 1}, {4: 0, 6: 0}, []),
    ],
)
def test_plans_are_measured_by_weight_until_most_of_the_time_is_met(make, monkeypatch, counts, microseconds, tuned):
    scene = make(SLOW, QUICK)
    weighing(monkeypatch, microseconds)
    with record(*of_sizes(scene, counts)) as program:
        assert [each.inputs[0].shape[2] for each in program.tunings] == tuned


def test_what_a_launch_takes_is_measured(make):
    scene = make(Fake(alone=40), Fake(alone=10))
    function, *given = of_sizes(scene, {6: 1})
    with handlepool.record(function, *given) as program:
        (plan,) = plans_of(program)
    home = scene.driver.current_stream().ptr
    internals = scene.pool.internals
    with tuning.side_slots(internals, "a test", 1) as slots:
        assert tuning._estimated(internals, plan, slots, home) == 40


def test_time_is_bounded(make, limits):
    scene = make(SLOW, QUICK)
    limits(MOST_SECONDS=0.0)
    with record(*of_sizes(scene, {4: 1, 6: 1})) as program:
        assert program.tunings == ()


def test_candidates_of_a_plan_are_left_out_when_the_time_is_up(make, monkeypatch):
    scene = make(SLOW, QUICK, QUICK)
    former = TimingRig.time
    monkeypatch.setattr(TimingRig, "time", lambda rig, plan, most, until: former(rig, plan, most, 0.0))
    with record(chain, *arrays_of(scene, X, W)) as program:
        (found,) = program.tunings
        assert [each.skipped for each in found.candidates] == ["", *["not tried, because the time was up"] * 2]
        assert found.winner.index == 0


def test_no_more_candidates_are_tried_than_by_default(make):
    scene = make(SLOW, *[QUICK] * 15)
    with record(chain, *arrays_of(scene, X, W)) as program:
        (found,) = program.tunings
        assert sum(not each.skipped for each in found.candidates) == tuning.MOST_CANDIDATES


def test_what_calls_no_graph_function_has_nothing_to_measure(make):
    scene = make(SLOW, QUICK)
    with record(scene.plus, scene.array(1), 2) as program:
        assert program.tunings == ()
        program.replay()
        assert scene.read(program.outputs) == 3


def test_progress_is_shown_on_a_terminal(make, monkeypatch, capfd):
    scene = make(SLOW, QUICK)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    record(chain, *arrays_of(scene, X, W)).close()
    shown = capfd.readouterr().err
    assert re.search(r"chain: other plans of convolution are timed, \d\.\d of 10 s", shown)
    assert shown.endswith("\r\x1b[K")


# Bad input, and bad luck


def test_on_the_host_driver_it_is_refused_before_anything_is_called():
    with Scene(HostDriver(), default=True) as scene:
        calls = []
        with pytest.raises(DriverNotAvailableError, match=r"^record\(plans=True\) times plans on a GPU, and the host driver"):
            record(calls.append, scene.array(1))
        assert not calls


@pytest.mark.parametrize("plans", [1, None, "yes", 4])
def test_other_values_are_refused(make, plans):
    scene = make(SLOW)
    with pytest.raises(ArgumentError, match=rf"^record: plans={plans!r}; it must be True or False"):
        handlepool.record(chain, *arrays_of(scene, X, W), plans=plans)


def test_in_a_recording_or_a_branch_it_is_refused_as_ever(make):
    scene = make(SLOW, QUICK)
    x, w = arrays_of(scene, X, W)
    inside = partial(record, chain, x, w)
    with pytest.raises(CaptureError, match="inside a branch or a task"), scene.states.fork() as fork:
        fork.run(inside)

    def function(x, w):
        if thread.recording is not None:
            with pytest.raises(CaptureError, match="inside another recording"):
                inside()
        return conv(x, w)

    handlepool.record(function, x, w).close()


def test_without_a_side_stream_to_spare_it_says_so(make):
    scene = make(SLOW, QUICK)
    arrays = arrays_of(scene, X, W)
    sides = scene.pool.internals.device(0).sides
    taken = []
    while (slot := sides.lease()) is not None:
        taken.append(slot)
    with pytest.raises(StateBusyError, match=r"record\(plans=True\) needs 1 side stream, and 0 are free"):
        record(chain, *arrays)
    for slot in taken:
        sides.release(slot, captured=False)


@pytest.mark.parametrize("error", [GraphNotSupportedError, MemoryError])
def test_a_plan_that_cannot_be_timed_stays_and_the_recording_goes_on(make, monkeypatch, launched, error):
    scene = make(SLOW, QUICK)

    def refused(*_):
        raise error("no")

    monkeypatch.setattr(TimingRig, "time", refused)
    with record(chain, *arrays_of(scene, X, W)) as program:
        assert (program.tunings, launched) == ((), ["0", "0"])


@pytest.mark.parametrize("interrupt", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["synchronize_event", "begin_capture", "launch", pytest.param(None, marks=pytest.mark.slow)])
def test_any_call_may_fail_and_nothing_is_left_captured_or_leased(limits, method, interrupt):
    limits(ROUNDS=1, MOST_LAUNCHES=2)
    for k in some_lines(2):  # of calls, here
        with Scene(TimedDriver([SLOW, QUICK], scheduler="adversarial", seed=k), default=True) as scene:
            arrays = arrays_of(scene, X, W)
            chain(*arrays)
            error = interrupt(f"injected failure of call {k}")
            scene.driver.fail_at(k, method, error, RESTORES)
            with suppress(interrupt, HandlePoolError):
                record(chain, *arrays).close()
            scene.driver.fail_at(0)
            failed, error = error.__traceback__ is not None, None
            deferred.run(1000)
            scene.pool.trim(captured=True)
            in_order(scene, complete=False)
        if not failed:
            break
    assert k > 3
