"""Whom a program belongs to: `update`, `replay` and `outputs` are for one thread at a time, until it hands the program over."""

import gc
import threading
import weakref

import pytest
from harness.scenes import TIMEOUT, Thread

import handlepool
from handlepool import OwnershipError, PoolClosedError

USES = {
    "update": lambda program, scene: program.update(scene.array(7)),
    "replay": lambda program, scene: program.replay(),
    "replay on a stream": lambda program, scene: program.replay(scene.stream),
    "outputs": lambda program, scene: program.outputs,
}


@pytest.fixture
def program(scene):
    with handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) as program:
        yield program


class Elsewhere:
    """A thread that lives on, and calls functions one after the other."""

    def __init__(self, scene):
        self._calls, self._answers = [], []
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._scene = scene
        self._thread = threading.Thread(target=self._run, name="elsewhere", daemon=True)

    def _run(self):
        with self._scene.driver.create_stream() as stream:
            while self._asked.acquire(timeout=TIMEOUT) and (call := self._calls.pop()) is not None:
                try:
                    self._answers.append((call(), None))
                except Exception as error:
                    self._answers.append((None, error))
                stream.synchronize()
                del call
                self._answered.release()

    def __call__(self, function, *args):
        self._calls.append(lambda: function(*args))
        self._asked.release()
        assert self._answered.acquire(timeout=TIMEOUT)
        value, error = self._answers.pop()
        if error is not None:
            raise error
        return value

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._calls.append(None)
        self._asked.release()
        self._thread.join(TIMEOUT)


@pytest.fixture
def elsewhere(scene):
    with Elsewhere(scene) as elsewhere:
        yield elsewhere


@pytest.mark.parametrize("theirs", USES)
@pytest.mark.parametrize("mine", USES)
def test_each_use_is_refused_where_another_thread_made_one(scene, program, elsewhere, mine, theirs):
    elsewhere(USES[theirs], program, scene)
    with pytest.raises(OwnershipError, match=r"belongs to thread 'elsewhere'.*'MainThread'.*hand_over"):
        USES[mine](program, scene)
    with pytest.raises(OwnershipError, match="belongs to thread 'elsewhere'"):
        program.hand_over()
    elsewhere(program.hand_over)
    USES[mine](program, scene)
    with pytest.raises(OwnershipError, match="belongs to thread 'MainThread'"):
        elsewhere(USES[theirs], program, scene)


def mixed(scene, program, value, turns, refused):
    """Update, replay and read as two threads that know nothing of each other, step by step in turn."""
    turns.wait(TIMEOUT)
    wrong = 0
    for _ in range(20):
        try:
            for step in (lambda: program.update(scene.array(value)), program.replay):
                step()
                turns.wait(TIMEOUT)
            wrong += scene.read(program.outputs) != value + 10
        except OwnershipError:
            refused.append(value)
            turns.abort()
        except threading.BrokenBarrierError:
            pass
    return wrong


def two_threads(scene, program):
    turns, refused = threading.Barrier(2), []
    threads = [Thread(mixed, scene, program, value, turns, refused) for value in (1, 2)]
    return sum(thread.finish() for thread in threads), {*refused}


def test_two_threads_mix_no_values(scene, program):
    wrong, refused = two_threads(scene, program)
    assert not wrong
    assert len(refused) == 1


def test_control_two_threads_mix_values_where_none_is_refused(scene, program, without):
    without("owners of programs")
    wrong, refused = two_threads(scene, program)
    assert wrong
    assert not refused


def test_a_thread_that_has_ended_owns_nothing(scene, program):
    def on_the_stream(function, *args):
        with scene.stream:
            function(*args)

    for value in range(3):
        Thread(on_the_stream, program.update, scene.array(value)).finish()
        Thread(on_the_stream, program.replay).finish()
        assert scene.read(program.outputs) == value + 10
        program.hand_over()


def test_a_thread_that_was_given_the_number_of_the_owner_is_another(scene, program, elsewhere, monkeypatch):
    elsewhere(program.replay)
    own, real = threading.get_ident(), threading.get_ident
    # Only this thread is given the other number. Python removes a thread that ends by its number.
    monkeypatch.setattr("threading.get_ident", lambda: elsewhere._thread.ident if real() == own else real())
    with pytest.raises(OwnershipError):
        program.replay()


def test_a_recorded_program_belongs_to_none(scene):
    with (
        handlepool.record(lambda x: scene.plus(x, 10), scene.array(1), pool=scene.pool) as program,
        Elsewhere(scene) as elsewhere,
    ):
        program.hand_over()
        elsewhere(program.replay)


def test_any_thread_calls_at_any_time_and_has_the_program_then(scene, program, elsewhere):
    program.update(scene.array(5))
    assert elsewhere(lambda: scene.read(program(scene.array(1)))) == 11
    for use in USES.values():  # it would replay with the other's input, and read the other's output
        with pytest.raises(OwnershipError, match="belongs to thread 'elsewhere'"):
            use(program, scene)
    assert elsewhere(lambda: scene.read(program.outputs)) == 11
    assert scene.read(program(scene.array(2))) == 12
    assert scene.read(program.outputs) == 12


def test_a_call_that_is_refused_takes_the_program_from_none(scene, program, elsewhere):
    program.update(scene.array(5))
    with pytest.raises(handlepool.ArgumentError):
        elsewhere(program, scene.array(1), scene.array(2))
    program.replay()
    assert scene.read(program.outputs) == 15


@pytest.mark.parametrize("use", USES)
def test_of_a_closed_program_every_thread_is_told_that(scene, program, elsewhere, use):
    elsewhere(program.replay)
    program.close()
    for where in (lambda call, *args: call(*args), elsewhere):
        with pytest.raises(PoolClosedError):
            where(USES[use], program, scene)
    program.hand_over()


def test_any_thread_explains_and_closes(scene, program, elsewhere):
    elsewhere(program.replay)
    assert program.explain().operations == 1
    program.close()
    assert program.closed


def test_a_program_keeps_nothing_of_its_owner(scene, program):
    class Local:
        pass

    gone, local = [], threading.local()

    def run():
        local.value = Local()
        gone.append(weakref.ref(local.value))
        program.replay()

    Thread(run).finish()
    gc.collect()
    assert gone[0]() is None
