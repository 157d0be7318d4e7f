"""Operations in forks: data orders them as branches, in branches and in the fork's body, and nothing else does (guarantee 17)."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from harness.scenes import BranchError, Scene, over_seeds, works

import handlepool
from handlepool import CaptureError, ContractError, ParallelStates
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool.side_streams import MOST_SIDE_SLOTS

HELD = {}
"""What nobody sees in a call: it is global."""


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    HELD.clear()


def add(scene, y, value):
    scene.put(y, lambda x: x + value, y)


def times(scene, y, value):
    scene.put(y, lambda x: x * value, y)


adding, multiplying = handlepool.operation(add, mutates="y"), handlepool.operation(times, mutates="y")
lying = handlepool.operation(times, mutates=())


class Total:
    def __init__(self, scene):
        self.scene = scene
        self.state = scene.array(0)

    @handlepool.operation(mutates="self.state")
    def add(self, x):
        self.scene.put(self.state, lambda state, x: state + x, self.state, x)


# As branches


def chain(scene, multiply):
    x = scene.array(1)
    with scene.states.fork() as fork:
        y = fork.run(scene.plus, x, 2)
        fork.run(multiply, scene, y, 10)
        z = fork.run(scene.plus, y, 1)
        fork.run(adding, scene, y, 5)
    return scene.read(y), scene.read(z)


def test_g17_a_branch_comes_after_what_it_writes_in_place_was_made_and_before_what_reads_it_later():
    assert {*over_seeds(lambda scene: chain(scene, multiplying))} == {(35, 31)}


@pytest.mark.unmeasured
def test_g17_control_what_is_not_declared_is_not_ordered():
    assert {*over_seeds(lambda scene: chain(scene, lying), control=True)} != {(35, 31)}


def methods(scene, add):
    total = Total(scene)
    arrays = [scene.array(value) for value in range(1, 9)]
    with scene.states.fork() as fork:
        for array in arrays:
            fork.run(add, total, array)
        last = fork.run(scene.plus, total.state, 0)
    return scene.read(total.state), scene.read(last)


def test_g17_a_method_that_writes_its_objects_state_is_ordered_bound_or_not():
    assert {*over_seeds(lambda scene: methods(scene, Total.add))} == {(36, 36)}
    assert {*over_seeds(lambda scene: methods(scene, lambda total, array: total.add(array)))} == {(36, 36)}
    assert {*over_seeds(lambda scene: methods(scene, Total.add.__get__(None)))} == {(36, 36)}


class Whole(Total):
    @handlepool.operation(mutates="self")
    def add(self, x):
        self.scene.put(self.state, lambda state, x: state + x, self.state, x)


def in_turn(scene, kind):
    total = kind(scene)
    with scene.states.fork() as fork:
        for value in range(1, 5):
            fork.run(total.add, scene.array(value))
        read = fork.run(lambda: scene.plus(total.state, 0))
        fork.run(total.add, scene.array(100))
    return scene.read(read), scene.read(total.state)


def test_g17_who_mutates_an_object_mutates_the_arrays_in_its_attributes():
    assert {*over_seeds(lambda scene: in_turn(scene, Whole))} == {(10, 110)}


@pytest.mark.unmeasured
def test_g17_control_where_the_object_is_a_token_alone(without):
    without("arrays of tokens")
    assert {*over_seeds(lambda scene: in_turn(scene, Whole), control=True)} != {(10, 110)}


def bound(scene):
    total = Total(scene)
    with scene.states.fork() as fork:
        fork.map(total.add, [scene.array(value) for value in range(1, 9)])
    return scene.read(total.state)


def test_g17_a_bound_method_may_be_mapped():
    assert {*over_seeds(bound)} == {36}


@pytest.mark.unmeasured
def test_g17_control_a_method_that_declares_nothing_of_its_state_is_not_ordered():
    undeclared = handlepool.operation(Total.add.function, mutates=())
    assert {*over_seeds(lambda scene: methods(scene, undeclared), control=True)} != {(36, 36)}


def with_token(scene, function):
    HELD["array"] = scene.array(1)
    plan = object()
    with scene.states.fork() as fork:
        for value in range(2, 5):
            fork.run(function, scene, plan, value)
            fork.run(function, scene, plan, value)
    return scene.read(HELD["array"])


def on_held(scene, plan, value):
    held = HELD["array"]
    scene.put(held, lambda x: x * value + 1, held)


def test_g17_two_that_mutate_one_token_run_one_after_the_other():
    operation = handlepool.operation(on_held, mutates="plan")
    assert len({*over_seeds(lambda scene: with_token(scene, operation))}) == 1


def test_g17_control_two_that_share_no_token_do_not():
    operation = handlepool.operation(on_held, mutates=())
    assert len({*over_seeds(lambda scene: with_token(scene, operation), control=True)}) > 1


def read_beyond(scene, reads):
    held = HELD["array"] = scene.array(1)
    function = handlepool.operation(lambda: scene.put(scene.array(), lambda held: held + 1, HELD["array"]), reads=reads)
    with scene.states.fork() as fork:
        fork.run(adding, scene, held, 5)
        y = fork.run(function)
    return scene.read(y)


def test_g17_what_it_reads_beyond_its_arguments_is_waited_for():
    assert {*over_seeds(lambda scene: read_beyond(scene, lambda: HELD))} == {7}


def test_g17_control_what_it_does_not_say_that_it_reads_is_not_waited_for():
    assert {*over_seeds(lambda scene: read_beyond(scene, None), control=True)} != {7}


def waits(scene, function):
    y = scene.array(1)
    with scene.states.fork() as fork:
        for _ in range(4):
            fork.run(function, scene, y)
        scene.driver.calls.clear()
        for _ in range(4):
            fork.run(function, scene, y)
        return scene.driver.calls["wait_event"] - 4  # each branch waits for the caller's stream


@pytest.mark.filterwarnings("ignore:a branch waits because")
@pytest.mark.unmeasured
def test_g7_operations_that_only_read_an_array_run_beside_each_other_and_plain_kernels_do_not(make_driver):
    def look(scene, y):
        scene.driver.enqueue(scene.driver.current_stream().ptr, lambda x: None, reads=[y])

    with Scene(make_driver()) as scene:
        assert waits(scene, handlepool.operation(look, mutates=())) == 0
        assert waits(scene, look) == 0  # each goes on behind the last one, on one state
        with scene.states.fork() as fork:
            y = scene.array(1)
            assert len({fork.run(handlepool.operation(stream, mutates=()), scene, y) for _ in range(4)}) == 4
            assert len({fork.run(handlepool.operation(stream, mutates="y"), scene, y) for _ in range(4)}) == 1


def stream(scene, y):
    return scene.driver.current_stream().ptr


def results(scene, out):
    x = scene.array(1)
    function = handlepool.operation(lambda x, out=None: scene.put(scene.array() if out is None else out, lambda x: x + 1, x))
    given = {"out": scene.array(0)} if out else {}
    with scene.states.fork() as fork:
        y = fork.run(function, x, **given)
        z = fork.run(scene.plus, y, 1)
        fork.run(adding, scene, x, 10)
    return scene.read(y), scene.read(z), scene.read(x)


@pytest.mark.parametrize("out", [False, True])
def test_g17_what_it_returns_new_and_its_out_are_written(out):
    assert {*over_seeds(lambda scene: results(scene, out))} == {(2, 3, 11)}


def test_g17_one_that_raises_has_done_its_known_writes():
    def failing(scene, y):
        times(scene, y, 10)
        raise BranchError

    def scenario(scene):
        y = scene.array(1)
        with scene.states.fork() as fork:
            with pytest.raises(BranchError):
                fork.run(handlepool.operation(failing, mutates="y"), scene, y)
            z = fork.run(scene.plus, y, 1)
        assert works(scene)
        return scene.read(z)

    assert {*over_seeds(scenario)} == {11}


@pytest.mark.parametrize("free", [0, 1, 2])
def test_g17_where_side_slots_are_short_it_is_ordered_all_the_same(free):
    def scenario(scene):
        with ParallelStates(32, pool=scene.pool).fork() as hoard:
            for _ in range(32 - free):
                hoard.run(lambda: None)
            return chain(scene, multiplying), methods(scene, Total.add), in_the_body(scene, multiplying)

    assert {*over_seeds(scenario, seeds=range(20))} == {((35, 31), (36, 36), (30, 4, 31))}


# In the body, and in branches


def in_the_body(scene, multiply):
    with scene.states.fork() as fork:
        y = fork.run(scene.plus, scene.array(1), 2)
        z = fork.run(scene.plus, scene.array(1), 3)
        multiply(scene, y, 10)
        w = fork.run(scene.plus, y, 1)
    return scene.read(y), scene.read(z), scene.read(w)


def test_g17_in_the_body_it_waits_for_what_it_conflicts_with():
    assert {*over_seeds(lambda scene: in_the_body(scene, multiplying))} == {(30, 4, 31)}


def test_g17_control_in_the_body_plain_code_does_not():
    assert {*over_seeds(lambda scene: in_the_body(scene, times), control=True)} != {(30, 4, 31)}


def test_g7_in_the_body_it_waits_for_nothing_else(make_driver):
    with Scene(make_driver()) as scene, scene.states.fork() as fork:
        y, z = (fork.run(scene.plus, scene.array(1), value) for value in (2, 3))
        scene.driver.calls.clear()
        multiplying(scene, y, 10)
        multiplying(scene, y, 10)
        assert scene.driver.calls["wait_event"] == 1
        adding(scene, scene.array(0), 1)
        assert scene.driver.calls["wait_event"] == 1
        multiplying(scene, z, 10)
        assert scene.driver.calls["wait_event"] == 2


def in_branches(scene, multiply):
    """Of functions whose arguments say nothing."""
    held = HELD["array"] = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(lambda: multiply(scene, HELD["array"], 10) or scene.array())
        fork.run(lambda: multiply(scene, HELD["array"], 3) or scene.array())
        y = fork.run(scene.plus, held, 1)
    return scene.read(held), scene.read(y)


def test_g17_in_a_branch_it_waits_where_it_is_called():
    assert {*over_seeds(lambda scene: in_branches(scene, multiplying))} == {(30, 31)}


@pytest.mark.unmeasured
def test_g17_control_in_a_branch_plain_code_does_not():
    assert {*over_seeds(lambda scene: in_branches(scene, times), control=True)} != {(30, 31)}


def handed_on(scene, plus):
    """By way of a list that nobody sees."""
    box = HELD["box"] = []
    with scene.states.fork() as fork:
        fork.run(lambda: box_new(scene, plus))
        z = fork.run(scene.plus, box[0], 1)
    return scene.read(z)


def box_new(scene, plus):
    HELD["box"].append(plus(scene, scene.array(1), 2))
    return scene.array()


def test_g17_what_it_returns_in_a_branch_is_known_to_others():
    plus = handlepool.operation(lambda scene, x, value: scene.plus(x, value))
    assert {*over_seeds(lambda scene: handed_on(scene, plus))} == {4}


def test_g17_nested_forks_are_of_their_outermost_region():
    def inner(scene, y):
        with ParallelStates(2, pool=scene.pool).fork() as fork:
            fork.run(multiplying, scene, y, 10)
            fork.run(adding, scene, y, 1)
            multiplying(scene, y, 2)

    def scenario(scene):
        y, z = scene.array(1), scene.array(5)
        with scene.states.fork() as fork:
            fork.run(adding, scene, y, 1)
            fork.run(handlepool.operation(inner, mutates="y"), scene, y)
            fork.run(adding, scene, z, 1)
            w = fork.run(scene.plus, y, 1)
        return scene.read(y), scene.read(z), scene.read(w)

    assert {*over_seeds(scenario)} == {(42, 6, 43)}


def test_g17_in_a_recording_it_is_ordered_as_in_a_fork():
    def recorded(scene, x):
        with scene.states.fork() as fork:
            y = fork.run(scene.plus, x, 1)
            fork.run(multiplying, scene, y, 10)
            z = fork.run(scene.plus, y, 1)
            adding(scene, y, 100)
        return y, z

    def scenario(scene):
        x = scene.array(1)
        with handlepool.record(lambda x: recorded(scene, x), x, pool=scene.pool) as program:
            found = []
            for _ in range(2):
                program.replay()
                y, z = program.outputs
                found.append((scene.read(y), scene.read(z)))
        return tuple(found)

    assert {*over_seeds(scenario, seeds=range(20))} == {((120, 21), (120, 21))}


def test_an_unordered_fork_calls_it_as_it_is(make_driver):
    with Scene(make_driver()) as scene:
        y = scene.array(1)
        with scene.states.fork(ordered=False) as fork:
            fork.run(multiplying, scene, y, 10)
        assert scene.read(y) == 10


# What was not declared


def test_one_that_says_nothing_is_an_error_at_its_first_call_and_later_branches_come_after_it():
    def scenario(scene):
        y = scene.array(1)
        with scene.states.fork() as fork:
            with pytest.raises(ContractError, match="operation times declares nothing"):
                fork.run(handlepool.operation(times), scene, y, 10)
            with pytest.raises(ContractError, match="operation times declares nothing"):
                handlepool.operation(times)(scene, y, 10)
            z = fork.run(scene.plus, y, 1)
        assert works(scene)
        return scene.read(z)

    assert {*over_seeds(scenario)} == {101}


@pytest.fixture
def checked():
    with Scene(HostDriver(), check=True) as scene:
        yield scene


@pytest.mark.unmeasured
def test_with_checks_a_branch_that_writes_what_was_not_declared_is_an_error(checked):
    scene = checked
    y = scene.array(1)
    with scene.states.fork() as fork, pytest.raises(ContractError, match="times wrote argument y without declaring it"):
        fork.run(lying, scene, y, 10)
    with scene.states.fork() as fork:
        fork.run(adding, scene, y, 0)
        with pytest.raises(ContractError, match="times wrote argument y without declaring it"):
            lying(scene, y, 10)
    with scene.states.fork(ordered=False) as fork, pytest.raises(ContractError, match="times wrote argument y "):
        fork.run(lying, scene, y, 10)
    with scene.states.fork() as fork:
        fork.run(multiplying, scene, y, 10)
    assert works(scene)
    assert scene.read(y) == 10000


def new_and_in_place(scene, y):
    times(scene, y, 10)
    return scene.array(0)


def test_with_checks_a_plain_function_that_returns_new_arrays_and_changes_an_argument_is_an_error(checked):
    scene = checked
    y = scene.array(1)
    for ordered in (True, True, False):
        with (
            scene.states.fork(ordered=ordered) as fork,
            pytest.raises(ContractError, match="new_and_in_place wrote argument y "),
        ):
            fork.run(new_and_in_place, scene, y)
    assert works(scene)


@pytest.mark.filterwarnings("ignore:a branch waits because times")
@pytest.mark.filterwarnings("ignore:new_and_in_place returned new arrays")
def test_control_a_plain_function_that_returns_nothing_may_change_its_arguments_and_without_checks_any_may(checked, make_driver):
    y = checked.array(1)
    with checked.states.fork() as fork:
        fork.run(times, checked, y, 10)
        fork.run(times, checked, y, 10)
    assert checked.read(y) == 100
    with Scene(make_driver()) as scene:
        y = scene.array(1)
        with scene.states.fork() as fork:
            fork.run(new_and_in_place, scene, y)
        assert scene.read(y) == 10


def told_inside(scene, y, way):
    """Return a new array, and let what is known to write overwrite an argument."""
    if way == "an operation":
        multiplying(scene, y, 10)
    elif way == "a graph function":
        handlepool.add(y, y, out=y)
    else:
        with scene.states.fork() as fork:
            fork.run(times, scene, y, 10)
    return scene.array(0)


@pytest.mark.filterwarnings("ignore:a branch waits because times")
@pytest.mark.parametrize("way", ["an operation", "a graph function", "a fork of its own"])
@pytest.mark.parametrize("slots", [MOST_SIDE_SLOTS, 1, 0])
@pytest.mark.unmeasured
def test_with_checks_a_plain_function_may_overwrite_an_argument_by_what_is_ordered_itself(way, slots):
    with Scene(HostDriver(), check=True) as scene:
        sides = scene.pool.internals.device(0).sides
        held = [sides.lease() for _ in range(MOST_SIDE_SLOTS - slots)]
        x, y = scene.array(1), scene.driver.asarray(np.ones(8, np.float32))
        with scene.states.fork() as fork:
            for _ in range(2):
                fork.run(told_inside, scene, y, way)
                fork.run(adding, scene, x, 1)
            z = fork.run(scene.plus, y, 1)
        if slots:  # else nobody sees what a branch allocates
            with scene.states.fork() as fork, pytest.raises(ContractError, match="new_and_in_place wrote argument y "):
                fork.run(new_and_in_place, scene, y)
        assert scene.read(z) == (5 if way == "a graph function" else 101)
        for slot in held:
            sides.release(slot, captured=False)


def test_with_checks_a_counter_of_numpys_in_an_object_may_change(checked):
    counter, x = SimpleNamespace(count=np.zeros(1)), checked.array(1)

    def counted(counter, x):
        counter.count[0] += 1
        return checked.plus(x, 1)

    with checked.states.fork() as fork:
        for _ in range(3):
            y = fork.run(counted, counter, x)
    assert (checked.read(y), counter.count[0]) == (2, 3)


@pytest.mark.unmeasured
def test_with_checks_what_an_inner_fork_wrote_before_excuses_nobody(checked):
    scene = checked
    y = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(scene.array, 0)
        with scene.states.fork() as inner:
            inner.run(multiplying, scene, y, 10)
        with pytest.raises(ContractError, match="new_and_in_place wrote argument y "):
            fork.run(new_and_in_place, scene, y)


def test_with_checks_a_missing_order_is_found_all_the_same(checked):
    """The host waits to compare, and the checker of order takes that for nothing."""
    scene = checked
    held = HELD["array"] = scene.array(1)
    with scene.states.fork() as fork:
        fork.run(multiplying, scene, held, 10)
        with pytest.raises(ContractError, match="not ordered"):
            fork.run(lambda: scene.put(scene.array(), lambda x: x, HELD["array"]))


# Torch's versions


class StandIn:
    """A tensor with what is asked of torch's here: memory, and a count of the writes to its storage."""

    is_cuda = False

    def __init__(self, values, writes=None):
        self.values, self.writes = values, [0] if writes is None else writes
        self.shape, self.nbytes = values.shape, values.nbytes

    @classmethod
    def ones(cls, size):
        return cls(np.ones(size))

    def __getitem__(self, index):
        return StandIn(self.values[index], self.writes)

    def mul_(self, value):
        self.values *= value
        self.writes[0] += 1

    def data_ptr(self):
        return self.values.__array_interface__["data"][0]

    def element_size(self):
        return self.values.itemsize

    def stride(self):
        return [step // self.values.itemsize for step in self.values.strides]


@pytest.fixture(params=["stand-in", "torch"])
def ones(request, torch_door, monkeypatch):
    """Makes tensors: torch's own, or ones that act like them as far as is asked here."""
    if request.param == "torch":
        return pytest.importorskip("torch", reason="torch is not installed").ones
    door = SimpleNamespace(
        version=lambda x: x.writes[0], storage=lambda x: id(x.writes), read_unordered=lambda x: x.values.copy()
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=StandIn))
    torch_door(lambda: door, "order.undeclared")
    return StandIn.ones


def in_place(t, *_):
    t.mul_(2)
    return ()


look = handlepool.operation(lambda t: None, mutates=())
unsaid, said = handlepool.operation(in_place, mutates=()), handlepool.operation(in_place, mutates="t")


def beside_a_reader(scene, function, t, *args):
    with scene.states.fork() as fork:
        fork.run(look, t)
        fork.run(function, t, *args)


@dataclass
class Wrapped:
    """As what a function returns."""

    value: object


def put_into_an_attribute(box, value):
    box.value = value


def put_into_a_list(box, value):
    box.found.append(value)


def put_into_a_global(box, value):
    HIDDEN[:] = [value]


HIDDEN = []


@pytest.mark.parametrize(("put", "waits"), [(None, 2), (put_into_an_attribute, 2), (put_into_a_list, 2), (put_into_a_global, 1)])
def test_g17_a_branch_waits_for_who_made_a_tensor_however_that_left_its_branch(scene, ones, put, waits):
    """For the caller, and for the maker; not where it is put into a global, so the other waits are for the maker indeed."""

    def making(box, t):
        made = ones(4)
        return Wrapped(made) if put is None else put(box, made)

    for _ in range(2):  # the second time the function is known
        box, t = SimpleNamespace(value=None, found=[]), ones(4)
        with scene.states.fork() as fork:
            fork.run(look, t)
            returned = fork.run(making, box, t)
            (made,) = [returned.value] if put is None else box.found or HIDDEN or [box.value]
            HIDDEN.clear()
            fork.run(look, made)  # may go on behind its maker, on that stream
            before = scene.driver.calls["wait_event"]
            fork.run(look, made)
            assert scene.driver.calls["wait_event"] - before == waits


@pytest.mark.unmeasured
def test_g17_a_tensor_that_was_written_beside_its_reader_and_not_declared_is_an_error(scene, ones):
    t = ones(4)
    with pytest.raises(ContractError, match=r"in_place wrote argument t without declaring it, and a concurrent branch "):
        beside_a_reader(scene, unsaid, t)
    with pytest.raises(ContractError, match=r"in_place wrote argument t without declaring it"):
        beside_a_reader(scene, unsaid, t[:2])
    with scene.states.fork() as fork:
        fork.run(look, t)
        with pytest.raises(ContractError, match=r"in_place wrote argument t without declaring it"):
            unsaid(t)
    assert works(scene)


@pytest.mark.unmeasured
def test_g17_a_tensor_that_was_written_and_not_declared_is_an_error_where_it_is_recorded_on_lanes(scene, ones):
    t, x = ones(4), scene.array(1)

    def function(write):
        look(t)
        write(t)
        return scene.plus(x, 1)

    with pytest.raises(ContractError, match=r"in_place wrote argument t without declaring it: declare"):
        handlepool.record(function, unsaid, pool=scene.pool, lanes=2)
    with pytest.raises(CaptureError, match=r"in_place at .* gave no work"):  # as CPU tensors are written at once
        handlepool.record(function, said, pool=scene.pool, lanes=2)
    assert works(scene)


def test_g17_a_tensor_that_a_plain_function_wrote_beside_its_reader_is_an_error(scene, ones):
    def new(t):
        in_place(t)
        return scene.array(0)

    t = ones(4)
    with scene.states.fork() as fork:  # from now on it is known to return new arrays
        fork.run(new, t)
    with pytest.raises(ContractError, match=r"new wrote argument t without declaring it"):
        beside_a_reader(scene, new, t)


def test_g17_control_a_tensor_that_was_declared_or_not_written_or_has_no_other_reader_is_no_error(scene, ones):
    t, u = ones(4), ones(4)
    beside_a_reader(scene, said, t)
    beside_a_reader(scene, said, t[:2], t)
    beside_a_reader(scene, handlepool.operation(lambda t: (), mutates=()), t)
    with scene.states.fork() as fork:
        fork.run(look, t)
        fork.run(unsaid, u)
        fork.run(unsaid, u)


def test_g17_a_tensor_that_was_written_and_not_declared_counts_as_written(scene, ones):
    def waits(function):
        t = ones(4)
        with scene.states.fork() as fork:
            fork.run(function, t)
            scene.driver.calls.clear()
            look(t)
            return scene.driver.calls["wait_event"]

    assert waits(look) == 0
    assert waits(unsaid) == waits(said) == 1


def test_with_checks_tensors_are_compared(checked, ones):
    t = ones(4)

    def by_the_back_door(t):
        getattr(t, "data", t).mul_(2)

    for _ in range(2):
        with pytest.raises(ContractError, match="by_the_back_door wrote argument t"), checked.states.fork() as fork:
            fork.run(handlepool.operation(by_the_back_door, mutates=()), t)
    with checked.states.fork() as fork:
        fork.run(handlepool.operation(by_the_back_door, mutates="t"), t)
        fork.run(look, t)
