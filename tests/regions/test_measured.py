"""Writes that no function declares: they are measured at first calls (guarantee 17)."""

import contextlib
import threading
import warnings

import numpy as np
import pytest
from harness import measuring
from harness.insides import leases_of
from harness.scenes import BranchError, CarelessDriver, Scene, Thread, over_seeds

import handlepool
from handlepool import ContractError, HandlePool, ParallelStates
from handlepool._util import reachable
from handlepool.drivers.host.driver import HostDriver
from handlepool.order import measured, plain_calls

pytestmark = [pytest.mark.filterwarnings("ignore:.* returned new arrays and wrote"), pytest.mark.usefixtures("known")]


def adds(scene, h, x):
    """Write in place, and return a new array."""
    scene.put(h, lambda h, x: h + x, h, x)
    return scene.put(scene.array(), lambda h: 2 * h, h)


class Inner:
    def __init__(self, h):
        self.h = h


class Cell:
    def __init__(self, scene):
        self.scene, self.h, self.inner = scene, scene.array(0), Inner(scene.array(0))

    def step(self, x):
        return adds(self.scene, self.h, x)

    def deep(self, x):
        return adds(self.scene, self.inner.h, x)

    def __call__(self, x):
        return adds(self.scene, self.h, x)


def of_an_argument(scene):
    h = scene.array(0)
    return lambda fork, x: fork.run(adds, scene, h, x)


def of_a_keyword(scene):
    h = scene.array(0)
    return lambda fork, x: fork.run(adds, scene, x=x, h=h)


def of_a_closure(scene):
    h = scene.array(0)
    return lambda fork, x: fork.run(lambda x: adds(scene, h, x), x)


def of_a_method(scene):
    cell = Cell(scene)
    return lambda fork, x: fork.run(cell.step, x)


def of_an_attribute_of_an_attribute(scene):
    cell = Cell(scene)
    return lambda fork, x: fork.run(cell.deep, x)


def of_an_object_that_is_called(scene):
    cell = Cell(scene)
    return lambda fork, x: fork.run(cell, x)


WAYS = [
    of_an_argument,
    of_a_keyword,
    of_a_closure,
    of_a_method,
    of_an_attribute_of_an_attribute,
    of_an_object_that_is_called,
]


def six_branches(scene, way, forks=3):
    """Return, for each fork, whether six branches in turn saw each other's writes."""
    measuring.forget()
    right = []
    for _ in range(forks):
        run, one = way(scene), scene.array(1)
        with scene.states.fork() as fork:
            made = [run(fork, one) for _ in range(6)]
        right.append([scene.read(each) for each in made] == [2, 4, 6, 8, 10, 12])
    return tuple(right)


@pytest.mark.parametrize("way", WAYS)
def test_g17_a_write_that_no_function_declares_is_ordered_from_its_first_call_on(way):
    assert {*over_seeds(lambda scene: six_branches(scene, way), seeds=range(30))} == {(True, True, True)}


@pytest.mark.unmeasured
@pytest.mark.parametrize("way", WAYS)
def test_g17_control_where_nothing_is_measured(way, monkeypatch):
    assert {*over_seeds(lambda scene: six_branches(scene, way), seeds=range(30), control=True)} != {(True, True, True)}


def test_one_warning_for_each_function_names_the_argument_and_operation(scene):
    measuring.forget()
    h, x = scene.array(0), scene.array(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):
            with scene.states.fork() as fork:
                fork.run(adds, scene, h, x)
            measuring.settle(scene)
    (message,) = [str(each.message) for each in told if "returned new arrays and wrote" in str(each.message)]
    assert message.startswith("adds returned new arrays and wrote argument h")
    assert "@handlepool.operation(mutates=...)" in message


def test_g7_only_the_argument_that_was_found_counts_as_written(scene):
    """Cells of their own, which share an input, run beside each other."""
    measuring.forget()
    one = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(Cell(scene).step, one)
    measuring.settle(scene)
    cells = [Cell(scene) for _ in range(4)]
    with scene.states.fork() as fork:
        scene.driver.calls.clear()
        for cell in cells:
            fork.run(cell.step, one)
        # One wait of each is for the caller's stream.
        assert scene.driver.calls["wait_event"] == 4
        scene.driver.calls.clear()
        fork.run(cells[0].step, one)
        fork.run(scene.plus, cells[1].h, 1)
    assert scene.read(cells[0].h) == 2


def plain(scene, x):
    return scene.plus(x, 1)


def other(scene, x):
    return scene.plus(x, 2)


def are_apart(scene, x):
    """Whether calls of two functions that read one array run beside each other: on two streams, of which none waits."""
    scene.driver.calls.clear()
    with scene.states.fork() as fork:
        for function in (plain, other):
            fork.run(function, scene, x)
        return scene.driver.calls["wait_event"] == 2 and len(leases_of(fork).slots) == 2


def test_g7_functions_that_only_read_wait_for_each_other_until_the_answer_is_there_and_never_after(scene):
    measuring.forget()
    x = scene.array(1)
    assert not are_apart(scene, x)
    measuring.settle(scene)
    assert all(are_apart(scene, x) for _ in range(3))


def test_until_the_answer_is_there_further_calls_count_as_writing():
    measuring.forget()
    driver = HostDriver(scheduler="threads")
    with Scene(driver) as scene:
        x = scene.array(1)
        held = []

        def latched(scene, x):
            if not held:
                held.append(driver.latch(driver.current_stream().ptr))
            return scene.plus(x, 1)

        with scene.states.fork() as fork:
            fork.run(latched, scene, x)
            calls = [plain_calls.PlainCall(driver, latched, (scene, x), {}) for _ in range(2)]
            assert all(call.assumed_writes for call in calls)
            held[0].release()
        scene.read(x)
        measuring.settle(scene)
        assert not plain_calls.PlainCall(driver, latched, (scene, x), {}).assumed_writes


def test_calls_three_and_ten_are_measured_again_and_no_other_one(scene):
    measuring.forget()
    x = scene.array(1)
    measured_calls = []
    for number in range(1, 13):
        scene.driver.calls.clear()
        with scene.states.fork() as fork:
            fork.run(plain, scene, x)
        if scene.driver.calls["checksums"]:
            assert scene.driver.calls["checksums"] == 2
            measured_calls.append(number)
        measuring.settle(scene)
    assert measured_calls == [1, 3, 10]


def test_a_function_that_returns_nothing_is_measured_once(scene):
    measuring.forget()
    scene.driver.calls.clear()
    for _ in range(4):
        with scene.states.fork() as fork:
            fork.run(tenfold, scene, scene.array(1))
    assert scene.driver.calls["checksums"] == 1


@pytest.mark.parametrize("late", [3, 10])
def test_a_write_that_begins_later_is_found_at_the_next_measured_call(scene, late):
    measuring.forget()
    h, x, calls = scene.array(0), scene.array(1), []

    def late_writer(scene, h, x):
        calls.append(1)
        return adds(scene, h, x) if len(calls) >= late else scene.plus(x, 1)

    for _ in range(late):
        with scene.states.fork() as fork:
            fork.run(late_writer, scene, h, x)
        measuring.settle(scene)
    call = plain_calls.PlainCall(scene.driver, late_writer, (scene, h, x), {})
    start = scene.driver.array_pointer(h)
    assert [piece[0] for piece in call.writes] == [start]


def test_control_a_write_of_equal_values_is_not_seen(scene):
    """The documentation says so."""
    measuring.forget()
    h = scene.array(0)
    for _ in range(3):
        with scene.states.fork() as fork:
            fork.run(adds, scene, h, scene.array(0))
        measuring.settle(scene)
    assert not plain_calls.PlainCall(scene.driver, adds, (scene, h, scene.array(0)), {}).writes


# Failures


def test_where_a_measurement_fails_the_call_counts_as_writing_and_the_next_one_is_measured(scene):
    measuring.forget()
    x = scene.array(1)
    scene.driver.fail_at(1, "checksums", MemoryError("no memory"))
    with scene.states.fork() as fork:
        fork.run(plain, scene, x)
    measuring.settle(scene)
    assert plain_calls.PlainCall(scene.driver, plain, (scene, x), {}).assumed_writes
    with scene.states.fork() as fork:
        z = fork.run(plain, scene, x)
    measuring.settle(scene)
    assert not plain_calls.PlainCall(scene.driver, plain, (scene, x), {}).assumed_writes
    assert scene.read(z) == 2


def test_where_the_second_checksum_fails_the_call_counts_as_writing(scene):
    measuring.forget()
    x = scene.array(1)
    scene.driver.fail_at(2, "checksums", MemoryError("no memory"))
    with scene.states.fork() as fork:
        z = fork.run(plain, scene, x)
    measuring.settle(scene)
    assert plain_calls.PlainCall(scene.driver, plain, (scene, x), {}).assumed_writes
    assert scene.read(z) == 2


def test_a_first_call_that_raises_tells_nothing(scene):
    measuring.forget()
    h, x = scene.array(0), scene.array(1)

    def failing(scene, h, x, fails):
        made = adds(scene, h, x)
        if fails:
            raise BranchError
        return made

    with scene.states.fork() as fork:
        with pytest.raises(BranchError):
            fork.run(failing, scene, h, x, 1)
        made = [fork.run(failing, scene, h, x, 0) for _ in range(3)]
    assert [scene.read(each) for each in made] == [4, 6, 8]


def test_two_threads_may_call_a_function_for_the_first_time_at_once():
    measuring.forget()
    driver = HostDriver(scheduler="threads")
    with HandlePool(driver=driver) as pool:
        barrier = threading.Barrier(2)

        def run():
            states = ParallelStates(2, pool=pool)
            with driver.create_stream():
                h, one = (driver.asarray(np.full(64, value, np.float32)) for value in (0, 1))
                barrier.wait(60)
                with states.fork() as fork:
                    made = [fork.run(in_place, h, one) for _ in range(6)]
                return [float(each.get().max()) for each in made]

        found = [thread.finish() for thread in [Thread(run), Thread(run)]]
    assert found == [[2, 4, 6, 8, 10, 12]] * 2


def in_place(h, x):
    h += x
    return h * 2


def test_under_a_callers_capture_nothing_is_measured_and_calls_count_as_writing(scene):
    measuring.forget()
    driver, h = scene.driver, scene.array(0)
    x = scene.array(1)
    scene.pool.prewarm(states=4)
    scene.read(x)
    with driver.relaxed():
        driver.begin_capture(scene.stream.ptr)
    driver.calls.clear()
    with scene.states.fork() as fork:
        for _ in range(3):
            fork.run(lambda: scene.put(h, lambda h, x: h + x, h, x))
    assert not driver.calls["checksums"]
    with driver.relaxed():
        graph = driver.end_capture(scene.stream.ptr)
        graph.instantiate()
    graph.launch(scene.stream.ptr)
    assert scene.read(h) == 3


# Calls inside a call


def test_what_an_operation_inside_writes_is_its_own(scene):
    measuring.forget()
    h, x = scene.array(0), scene.array(1)
    add = handlepool.operation(lambda scene, h, x: scene.put(h, lambda h, x: h + x, h, x), mutates="h")

    def calls_an_operation(scene, h, x):
        add(scene, h, x)
        return scene.plus(x, 1)

    for _ in range(4):
        with scene.states.fork() as fork:
            fork.run(calls_an_operation, scene, h, x)
        measuring.settle(scene)
    call = plain_calls.PlainCall(scene.driver, calls_an_operation, (scene, h, x), {})
    assert not call.writes
    assert not call.assumed_writes


# Operations


def lying_operation():
    return handlepool.operation(adds)


def test_an_operation_that_writes_what_it_does_not_declare_is_an_error_at_its_next_call(scene):
    step, h, x = lying_operation(), scene.array(0), scene.array(1)
    # The answer may be there at the join.
    with contextlib.suppress(ContractError), scene.states.fork() as fork:
        fork.run(step, scene, h, x)
    scene.driver.synchronize_stream(scene.stream.ptr)
    for _ in range(2):
        with scene.states.fork() as fork, pytest.raises(ContractError, match="adds wrote argument h without"):
            fork.run(step, scene, h, x)


def test_g17_until_then_its_branches_are_ordered():
    def scenario(scene):
        step, h, x = lying_operation(), scene.array(0), scene.array(1)
        made = []
        try:
            with scene.states.fork() as fork:
                made += [fork.run(step, scene, h, x) for _ in range(4)]
        except ContractError:  # the answer was there already
            pass
        found = [scene.read(each) for each in made]
        return found == [2, 4, 6, 8][: len(found)]

    assert {*over_seeds(scenario)} == {True}


@pytest.mark.unmeasured
def test_g17_control_where_operations_are_not_measured():
    def scenario(scene):
        step, h, x = lying_operation(), scene.array(0), scene.array(1)
        with scene.states.fork() as fork:
            made = [fork.run(step, scene, h, x) for _ in range(4)]
        return [scene.read(each) for each in made] == [2, 4, 6, 8]

    assert False in {*over_seeds(scenario, control=True)}


def run_to_its_answer(scene, step):
    """Run a branch of an operation, and leave the fork when the answer is there."""
    h, x = scene.array(0), scene.array(1)
    with scene.states.fork() as fork:
        fork.run(step, scene, h, x)
        for writes in step._measured.values():
            for answer in writes.pending:
                answer.wait()


def test_a_join_reports_it_where_the_answer_is_there(scene):
    with pytest.raises(ContractError, match="adds wrote argument h"):
        run_to_its_answer(scene, lying_operation())


@pytest.mark.parametrize("lanes", [None, 1, 8])
def test_g19_record_refuses_an_operation_that_does_not_say_what_it_writes(make_pool, lanes):
    pool = make_pool()
    array = pool.driver.asarray
    with pool.driver.create_stream():
        h, one = array(np.zeros(64, np.float32)), array(np.ones(64, np.float32))
        step = handlepool.operation(in_place)
        with pytest.raises(ContractError, match="in_place wrote argument h without declaring it"):
            handlepool.record(lambda a: [step(h, a) for _ in range(4)], one, lanes=lanes, pool=pool)
        assert float(h.get().max()) <= 4


@pytest.mark.parametrize("lanes", [None, 8])
def test_g19_a_recorded_operation_that_says_so_is_right(make_pool, lanes):
    pool = make_pool()
    array = pool.driver.asarray
    with pool.driver.create_stream():
        h, one = array(np.zeros(64, np.float32)), array(np.ones(64, np.float32))
        step = handlepool.operation(in_place, mutates="h")
        with handlepool.record(lambda a: [step(h, a) for _ in range(4)], one, lanes=lanes, pool=pool) as program:
            h[...] = 0
            program.replay()
            assert [float(each.get().max()) for each in program.outputs] == [2, 4, 6, 8]


def test_record_waits_for_the_answer_once_so_its_nodes_run_side_by_side(make_pool):
    """Two nodes that read one array have no edge."""
    pool = make_pool()
    with pool.driver.create_stream():
        one = pool.driver.asarray(np.ones(64, np.float32))
        twice = handlepool.operation(lambda a: a * 2)
        with handlepool.record(lambda a: [twice(a), twice(a)], one, lanes=8, pool=pool) as program:
            assert [step.after for step in program.explain().steps] == [(), ()]


# Opaque arguments

HIDDEN = {}
"""Arrays that objects compute their values from."""


class Computes:
    """Holds no array."""

    def __getitem__(self, index):
        return HIDDEN["h"]


class Iterates:
    def __iter__(self):
        return iter([HIDDEN["h"]])


class Held(Computes):
    def __init__(self):
        self.inner = Inner(None)


OPAQUE = {
    "items": (Computes, lambda given: given[0]),
    "an iterator": (Iterates, lambda given: next(iter(given))),
    "an iterator of items": (lambda: iter(Computes()), next),
    "in a list": (lambda: [[Computes()]], lambda given: given[0][0][0]),
    "an attribute": (lambda: Inner(Computes()), lambda given: given.h[0]),
    "many": (lambda: [[None, HIDDEN["h"]] for _ in range(6000)], lambda given: given[-1][1]),
}


def tenfold(scene, y):
    scene.put(y, lambda x: 10 * x, y)


def reads_opaque(scene, form, way):
    make, take = OPAQUE[form]
    HIDDEN["h"] = h = scene.array(1)
    given = make()

    def read(given):
        return scene.plus(take(given), 1)

    call = handlepool.operation(read) if way == "operation" else read
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, h)
        z = call(given) if way == "body" else fork.run(call, given)
        fork.run(tenfold, scene, h)
    return scene.read(z), scene.read(h)


@pytest.mark.parametrize("way", ["argument", "operation"])
@pytest.mark.parametrize("form", OPAQUE)
def test_g17_an_opaque_argument_comes_after_all_before_it_and_before_all_after_it(form, way):
    assert {*over_seeds(lambda scene: reads_opaque(scene, form, way), seeds=range(30))} == {(11, 100)}


@pytest.mark.parametrize("form", [form for form in OPAQUE if form != "many"])
def test_g17_control_where_it_is_no_barrier(form, without):
    without("barriers")
    assert {*over_seeds(lambda scene: reads_opaque(scene, form, "argument"), seeds=range(30), control=True)} != {(11, 100)}


def waits_for_opaque(scene, form):
    make, take = OPAQUE[form]
    HIDDEN["h"] = h = scene.array(1)
    given = make()
    with scene.states.fork() as fork:
        fork.run(tenfold, scene, h)
        return scene.read(scene.plus(take(fork.wait(given)), 1))


@pytest.mark.parametrize("form", ["items", "in a list"])
def test_g17_wait_for_an_opaque_object_waits_for_all_branches(form):
    assert {*over_seeds(lambda scene: waits_for_opaque(scene, form), seeds=range(30))} == {11}


@pytest.mark.parametrize("form", ["items", "in a list"])
def test_g17_control_where_wait_takes_it_for_empty(form, without):
    without("all calls so far")
    assert {*over_seeds(lambda scene: waits_for_opaque(scene, form), seeds=range(30), control=True)} != {11}


def test_g17_graph_functions_wait_for_a_branch_with_an_opaque_argument(make_pool):
    pool = make_pool(scheduler="adversarial")
    states = ParallelStates(4, pool=pool)
    with pool.driver.create_stream():
        x = pool.driver.asarray(np.ones((1, 4, 4, 4), np.float32))
        with states.fork() as fork:
            fork.run(handlepool.add, x, x)
            fork.run(lambda given: x * 2, Computes())
            pool.driver.calls.clear()
            y = fork.run(handlepool.add, x, x)
            z = fork.run(handlepool.add, x, x)
            waits = pool.driver.calls["wait_event"]
        # Each waits for the caller's stream, and for the branch.
        assert waits >= 3
        assert (y.get() == 2).all()
        assert (z.get() == 2).all()


def test_g7_an_object_that_holds_its_arrays_is_no_barrier(scene):
    class Layers:
        def __init__(self, *arrays):
            self.arrays = arrays

        def __getitem__(self, index):
            return self.arrays[index]

    call = plain_calls.PlainCall(scene.driver, lambda given: given[0], (Layers(scene.array(1)),), {})
    assert not call.opaque
    assert len(call.reads) == 1


def test_a_huge_argument_is_not_walked_to_its_end(scene):
    huge = [[None, each] for each in range(200_000)]
    call = plain_calls.PlainCall(scene.driver, lambda given: given[0], (huge,), {})
    assert call.opaque
    # The branch keeps the entries, though the caller may empty the list.
    (held,) = [each for each in call.reached.values if isinstance(each, reachable.Opaque)]
    assert len(held.held) == len(huge)


def test_g17_attributes_are_looked_into_two_deep(scene):
    deep = Inner(Inner(scene.array(1)))
    assert len(plain_calls.PlainCall(scene.driver, lambda given: given, (deep,), {}).reads) == 1
    assert not plain_calls.PlainCall(scene.driver, lambda given: given, (Inner(deep),), {}).reads


def test_careless_drivers_are_measured_like_others():
    """Controls stand on them."""
    assert "checksums" not in vars(CarelessDriver)
    assert measured.AGAIN == (3, 10)
