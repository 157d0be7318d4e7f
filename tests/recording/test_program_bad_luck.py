"""A replay, an update, a call or a close in which a driver call fails, or an interrupt comes.

Afterwards, what comes next is ordered after what was enqueued, and nothing leaks. Guarantees 6, 8 and 9.
"""

import contextlib
import gc
import itertools

import pytest
from harness.accounts import RESTORES
from harness.insides import inputs_of, is_free, recording_of
from harness.lines import at_line, interrupt, line_of, some_lines
from harness.scenes import Scene

import handlepool
from handlepool import CaptureError, ContractError, DeviceMismatchError, HandlePoolError, PoisonedContextError, Program
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import deferred

# What is raised in a destructor is lost, as Python says it is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STREAMS = {
    "own": lambda driver: driver.create_stream(),
    "legacy": lambda driver: driver.legacy_stream,
    "per-thread": lambda driver: driver.per_thread_stream,
    "wrapper": lambda driver: driver.wrap_stream((owner := driver.create_stream()).ptr, owner),
}
USES = {
    "replay": lambda program, x: program.replay(),
    "update": lambda program, x: program.update(x, x),
    "swap": lambda program, x: program.update(*reversed(inputs_of(program))),
    "call": lambda program, x: program(x, x, out=inputs_of(program)[1]),
    "close": lambda program, x: program.close(),
}
SPARED = (  # where only a tracer can interrupt: nothing is called before, or a lock is freed
    "with self._lock:",
    "try:",
    "self._busy, self._updating = None, 0",
    "self._busy = None",
    "lock.release()",
    "if self._last is None or self._lent:",
    "self._driver.record_event(self._event",
    "self._last, self._pointer, self._owner = ",
    "self._bound, self._launch = ",
    "self._recording = ",
    "self._inputs = ",
    "if held",
    "defer(recording.settle)",
)


def recorded(scene, stream):
    """A program of two inputs with scratch and a temporary, replayed twice on a stream."""

    def function(x, y):
        scene.pool.get_workspace(1000)
        return scene.plus(scene.plus(x, 10), 100)

    with stream:
        program = handlepool.record(function, scene.array(1), scene.array(1), pool=scene.pool)
        program.replay()
        program.replay()
    return program


def use(scene, program, stream, act, how):
    """A use on a stream in which something happens; then others on other streams, and the end."""
    driver, pool, memory = scene.driver, scene.pool, recording_of(program)._memory
    third = driver.create_stream()
    with stream:
        new = scene.array(3)
    with stream:
        happened = how(lambda: USES[act](program, new))
    assert is_free(program)
    if not program.closed:
        with third:
            program.replay()
            assert scene.read(program.outputs) in (111, 113)
            five = scene.array(5)
            program.update(five, five)
            program.replay()
            assert scene.read(program.outputs) == 115
    program.close()
    for each in (stream, third, scene.stream):
        each.synchronize()
    gc.collect()  # the error refers to itself through the frame of `at_line`
    deferred.deferred.run(1000)
    pool.trim()
    assert memory.nbytes == pool.stats()["scratch_bytes_recorded"] == 0
    assert not driver.order.found
    return happened


@pytest.mark.parametrize("act", USES)
@pytest.mark.parametrize("to", STREAMS)
@pytest.mark.parametrize("last", ["own", "per-thread"])
def test_g6_after_any_call_of_a_use_that_fails_the_next_one_is_ordered(last, to, act):
    for k in itertools.count(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            driver, error = scene.driver, RuntimeError("injected")

            def fails(call, driver=driver, error=error, k=k):
                driver.fail_at(k, None, error, RESTORES)
                with contextlib.suppress(RuntimeError, HandlePoolError):
                    call()
                driver.fail_at(0)
                fired = error.__traceback__ is not None
                error.__traceback__ = error.__context__ = None  # whose frames hold outputs
                return fired

            if not use(scene, recorded(scene, STREAMS[last](driver)), STREAMS[to](driver), act, fails):
                break
    assert k > 2


@pytest.mark.slow
@pytest.mark.parametrize("act", USES)
@pytest.mark.parametrize("to", ["own", "per-thread"])
@pytest.mark.parametrize("last", ["own", "per-thread"])
def test_g6_after_an_interrupt_at_any_line_of_a_use_the_next_one_is_ordered(last, to, act):
    where = ""
    for k in some_lines(8) if act == "call" else itertools.count(1):
        with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
            spared = []

            def interrupted(call, k=k, spared=spared):
                try:
                    return at_line(k, call, interrupt)
                except KeyboardInterrupt as error:
                    spared += [line for line in SPARED if line_of(error).startswith(line)]
                    return "somewhere"

            stream = STREAMS[last](scene.driver)
            program = recorded(scene, stream)
            try:
                where = use(scene, program, STREAMS[to](scene.driver), act, interrupted)
            except (AssertionError, ContractError):
                if not spared:
                    raise
        if where is None:
            break
    assert k > 20


def test_g6_control_a_use_whose_end_is_marked_only_where_it_succeeds_is_caught(monkeypatch):
    def enqueue(program, step):
        step()
        if program._last is None:
            program._driver.record_event(program._event, program._pointer)

    monkeypatch.setattr(Program, "_enqueue", enqueue)
    with pytest.raises(ContractError, match="not ordered"):
        test_g6_after_any_call_of_a_use_that_fails_the_next_one_is_ordered("own", "per-thread", "update")


def test_g6_control_a_close_that_leaves_nothing_behind_when_it_is_interrupted_is_caught(without):
    without("deferred ends of programs")
    with pytest.raises(AssertionError):
        test_g6_after_an_interrupt_at_any_line_of_a_use_the_next_one_is_ordered("own", "own", "close")


def test_g6_the_null_stream_of_another_device_is_not_that_of_the_last_replay():
    with Scene(HostDriver(scheduler="adversarial")) as scene:
        program = recorded(scene, scene.driver.legacy_stream)
        with scene.driver.device(1):
            assert scene.driver.current_stream() is scene.driver.legacy_stream
            for stream in (None, scene.driver.legacy_stream):
                with pytest.raises(DeviceMismatchError, match="the current device is 1"):
                    program.replay(stream)


def test_an_error_of_a_replay_says_what_it_means():
    with Scene(HostDriver(scheduler="adversarial")) as scene:
        program = recorded(scene, scene.stream)
        for injected, meant in ((RuntimeError("injected"), RuntimeError), (CaptureError("injected"), CaptureError)):
            scene.driver.fail_at(1, "launch_graph", injected)
            with pytest.raises(meant, match="injected"):
                program.replay()
            scene.driver.fail_at(0)
        program.replay()
        assert scene.read(program.outputs) == 111


def test_a_replay_that_meets_a_lost_context_says_so(make_pool):
    pool = make_pool()
    with Scene(pool.driver) as scene:
        program = handlepool.record(lambda x: scene.plus(x, 1), scene.array(1), pool=pool)
        program.replay()
        program.replay()
        lost = pool.driver.lose_context()
        with pytest.raises(PoisonedContextError) as info:
            program.replay()
        assert repr(info.value.__cause__) == repr(lost)
