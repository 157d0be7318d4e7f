"""State that a replay cannot repeat, by name; documented forms of state; host data (guarantee 19)."""

import contextlib
import gc
import itertools
import random
import types
import weakref

import numpy as np
import pytest
from harness.hidden import hidden

import handlepool
from handlepool.errors import CaptureError
from handlepool.recording import state

SHAPE = (1, 4, 3, 4)
LANES = pytest.mark.parametrize("lanes", [None, 4])


@pytest.fixture(params=["adversarial", "strict"])
def asarray(request):
    from handlepool.drivers.host.driver import HostDriver
    from handlepool.testing.pools import substitute_default

    driver = HostDriver(scheduler="adversarial", seed=3, strict=request.param == "strict")
    with substitute_default(handlepool.HandlePool(driver=driver)):
        yield driver.asarray


def full(asarray, value, shape=SHAPE):
    return asarray(np.full(shape, value, np.float32))


class Net:
    def __init__(self, asarray):
        self.h, self.w = full(asarray, 1), full(asarray, 2)
        self.inner = types.SimpleNamespace(h=full(asarray, 3), n=1)
        self.n = 1

    def rebinds(self, x):
        self.h = handlepool.add(self.h, x)
        return self.h

    def rebinds_plainly(self, x):
        self.h = self.h + x
        return self.h

    def keeps_a_view(self, x):
        y = handlepool.concat([x, handlepool.add(self.h, x)], 1)
        self.h = y[:, 4:]
        return y

    def rebinds_deeper(self, x):
        self.inner.h = handlepool.add(self.inner.h, x)
        return self.inner.h

    def counts(self, x):
        self.n += 1
        return x * self.n

    def counts_deeper(self, x):
        self.inner.n += 1
        return x * self.inner.n

    def turns(self, x):
        handlepool.add(self.h, x, out=self.w)
        self.h, self.w = self.w, self.h
        return self.h

    @handlepool.operation
    def by_an_operation(self, x):
        self.h = self.h + x
        return self.h * 1


@LANES
@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("rebinds", "self.h"),
        ("rebinds_plainly", "self.h"),
        ("keeps_a_view", "self.h"),
        ("rebinds_deeper", "self.inner.h"),
        ("counts", r"self.n \(from 2 to 3\)"),
        ("counts_deeper", r"self.inner.n \(from 2 to 3\)"),
        ("turns", "self.h"),
        ("by_an_operation", "self.h"),
    ],
)
def test_g19_state_that_the_second_call_changes_is_refused_by_name_and_put_back(asarray, method, named, lanes):
    net, twin = Net(asarray), Net(asarray)
    xs = [full(asarray, value) for value in (1, 2, 3)]
    wanted = [getattr(twin, method)(x).get() for x in xs]
    with pytest.raises(CaptureError, match=f"Net.{method} changed {named}"):
        handlepool.record(getattr(net, method), xs[0].copy(), lanes=lanes)
    found = [getattr(net, method)(x).get() for x in xs[1:]]
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted[1:], strict=True))


@LANES
def test_g19_state_that_the_walk_does_not_see_is_found_by_its_memory(asarray, lanes):
    kept = hidden([full(asarray, 1)])

    def step(x):
        y = handlepool.concat([x, handlepool.add(kept()[0], x)], 1)
        kept()[0] = y[:, 4:]
        return y

    step(full(asarray, 1))
    with pytest.raises(CaptureError, match="keeps state in a new array at each call"):
        handlepool.record(step, full(asarray, 1), lanes=lanes)


def test_control_without_the_comparison_by_memory_it_is_recorded(asarray, without):
    without("comparison by memory")
    kept = hidden([full(asarray, 1)])

    def step(x):
        kept()[0] = handlepool.add(kept()[0], x)
        return kept()[0]

    with handlepool.record(step, full(asarray, 1)) as program:
        wrong = [program(None).get().flat[0] for _ in range(2)]
    assert wrong != [3, 4]


@LANES
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_g19_a_function_that_raises_at_its_second_call_leaves_its_object_as_the_first_call_did(asarray, error, lanes):
    net, calls = Net(asarray), hidden([])

    def step(x):
        net.h = handlepool.add(net.h, x)
        calls().append(1)
        if len(calls()) == 2:
            raise error
        return net.h

    with pytest.raises(error):
        handlepool.record(step, full(asarray, 1), lanes=lanes)
    assert net.h.get().flat[0] == 2


@LANES
def test_g19_two_recorded_functions_share_state_in_one_array(asarray, lanes):
    net = Net(asarray)
    adding = handlepool.record(lambda x: handlepool.add(net.h, x, out=net.h), full(asarray, 1), lanes=lanes)
    double = handlepool.record(lambda: handlepool.add(net.h, net.h, out=net.h), lanes=lanes)
    net.h[...] = 1
    adding(full(asarray, 2))
    double.replay()
    adding(full(asarray, 5))
    assert net.h.get().flat[0] == 11


@LANES
def test_g19_state_that_changes_at_the_third_call_only_is_refused(asarray, lanes):
    class Late:
        calls = 0

        def step(self, x):
            Late.calls += 1
            return x * 2 if Late.calls < 3 else x

    with pytest.raises(CaptureError, match=r"changed .*Late\.calls"):
        handlepool.record(Late().step, full(asarray, 1), lanes=lanes)
    assert Late.calls == 1


@LANES
def test_g19_an_iterator_is_named_before_the_second_call_takes_from_it(asarray, lanes):
    numbers = itertools.count()
    with pytest.raises(CaptureError, match="took values from nonlocal numbers"):
        handlepool.record(lambda x: x * next(numbers), full(asarray, 1), lanes=lanes)
    assert next(numbers) == 1


@LANES
@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda: random.random(), "random"),
        (lambda: float(np.random.random()), "numpy.random"),
    ],
)
def test_g19_random_numbers_of_the_host_are_refused_and_drawn_again_as_they_were(asarray, draw, named, lanes):
    random.seed(1)
    np.random.seed(1)
    wanted = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(CaptureError, match=f"drew random numbers from {named}"):
        handlepool.record(lambda x: x * draw(), full(asarray, 1), lanes=lanes)
    assert draw() == wanted[1]


def test_g19_an_argument_that_the_first_call_keeps_is_refused_by_name(asarray):
    net = Net(asarray)

    def step(x):
        y = handlepool.add(x, net.h)
        net.h = x[:, :2]
        net.h = x
        return y

    with pytest.raises(CaptureError, match=r"keeps an argument's array in nonlocal net\.h"):
        handlepool.record(step, full(asarray, 1))


@LANES
def test_g19_an_attribute_that_held_the_argument_before_is_taken(asarray, lanes):
    net = Net(asarray)
    with handlepool.record(lambda x: handlepool.add(x, net.w, out=net.h), net.w, lanes=lanes) as program:
        assert program(full(asarray, 5)).get().flat[0] == 10


@LANES
def test_g19_a_refused_recording_leaves_the_arguments_containers_as_the_first_call_did(asarray, lanes):
    net = Net(asarray)

    def step(x, made, items):
        made["y"] = handlepool.add(x, x)
        items.append(handlepool.add(x, made["y"]))
        net.n += 1
        return items[0]

    made, items = {}, [full(asarray, 7)]
    with pytest.raises(CaptureError, match=r"changed nonlocal net\.n"):
        handlepool.record(step, full(asarray, 1), made, items, lanes=lanes)
    assert [made["y"].get().flat[0], *[each.get().flat[0] for each in items]] == [2, 7, 3]


class Inner:
    """An object that another one may know weakly."""

    def __init__(self):
        self.n = 1


class Marked(dict):
    """A dictionary with an attribute."""

    n = 1


class Backwards(list):
    """A list whose class gives other entries than it has."""

    def __iter__(self):
        return iter(())


@LANES
def test_g19_the_attributes_of_a_container_among_the_arguments_are_state(asarray, lanes):
    def step(x, marked):
        marked.n += 1
        return x * marked.n

    marked = Marked()
    with pytest.raises(CaptureError, match=r"argument 1\.n \(from 2 to 3\)"):
        handlepool.record(step, full(asarray, 1), marked, lanes=lanes)
    assert marked.n == 2


def test_g19_a_list_is_looked_at_past_the_methods_of_its_class(asarray):
    numbers = Backwards([1])

    def step(x):
        numbers[0] += 1
        return x * numbers[0]

    with pytest.raises(CaptureError, match=r"numbers\[0\] \(from 2 to 3\)"):
        handlepool.record(step, full(asarray, 1))
    assert numbers[0] == 2


def test_g19_state_behind_a_weak_proxy_or_a_view_to_read_is_seen(asarray):
    inner, numbers = Inner(), np.ones(2)
    lent = hidden((inner, numbers.__setitem__))
    proxy, view = weakref.proxy(inner), numbers[:]
    view.flags.writeable = False

    def by_proxy(x):
        lent()[0].n += 1
        return x * proxy.n

    def by_view(x):
        lent()[1](0, view[0] + 1)
        return x * float(view[0])

    for function in (by_proxy, by_view):
        with pytest.raises(CaptureError, match=r"changed nonlocal (proxy|view)"):
            handlepool.record(function, full(asarray, 1))
    assert (inner.n, numbers[0]) == (2, 2)


class Unseen:
    """An object that raises at a look."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a context")


ODD = [random.SystemRandom(), weakref.proxy(Inner()), Unseen()]


def test_objects_that_raise_at_a_look_do_not_stand_in_the_way(asarray):
    with handlepool.record(lambda x: x * len(ODD), full(asarray, 1)) as program:
        assert program(full(asarray, 1)).get().flat[0] == 3


@LANES
def test_a_refused_recording_keeps_no_object(asarray, lanes):
    net = Net(asarray)
    gone = weakref.ref(net)
    with contextlib.suppress(CaptureError):
        handlepool.record(net.rebinds, full(asarray, 1), lanes=lanes)
    del net
    gc.collect()
    assert gone() is None


# Host data


@LANES
def test_g19_an_array_with_equal_values_is_a_constant_that_the_function_may_write(asarray, lanes):
    def step(x):
        total = asarray(np.ones(SHAPE, np.float32))
        total += x
        return handlepool.add(total, asarray(np.full(SHAPE, 5, np.float32)))

    with handlepool.record(step, full(asarray, 0), lanes=lanes) as program:
        assert [program(full(asarray, value)).get().flat[0] for value in (1, 2, 3)] == [7, 8, 9]


@LANES
def test_g19_a_constant_that_the_first_call_left_in_an_argument_or_in_a_cycle_is_made_anew(asarray, lanes):
    def step(x, kept):
        if "ones" not in kept:
            kept["ones"] = asarray(np.ones(SHAPE, np.float32))
        twos = asarray(np.full(SHAPE, 2, np.float32))

        def again(y, count):
            return y if count == 0 else again(handlepool.add(y, twos), count - 1)

        return again(handlepool.add(x, kept["ones"]), 2)

    with handlepool.record(step, full(asarray, 1), {}, lanes=lanes) as program:
        assert program(full(asarray, 3)).get().flat[0] == 8


def test_control_a_constant_that_is_not_copied_adds_up(asarray, without):
    without("copies of constants")

    def step(x):
        total = asarray(np.ones(SHAPE, np.float32))
        total += x
        return total

    with handlepool.record(step, full(asarray, 0)) as program:
        assert [program(full(asarray, value)).get().flat[0] for value in (1, 2)] != [2, 3]


def test_g19_constants_with_lanes_leave_other_calls_side_by_side(asarray):
    def step(x):
        return [handlepool.add(x, asarray(np.full(SHAPE, value, np.float32))) for value in range(4)]

    with handlepool.record(step, full(asarray, 0), lanes=4) as program:
        found = program.explain()
        assert [y.get().flat[0] for y in program(full(asarray, 1))] == [1, 2, 3, 4]
    assert all(step.lane is not None for step in found.steps)


@LANES
@pytest.mark.parametrize(
    "values",
    [
        lambda rng, _: rng.standard_normal(SHAPE, np.float32),
        lambda rng, buffer: rng.standard_normal(out=buffer, dtype=np.float32),
    ],
)
def test_g19_an_array_with_other_values_is_refused_with_its_line_and_both_remedies(asarray, values, lanes):
    rng, buffer = np.random.default_rng(0), np.zeros(SHAPE, np.float32)
    with pytest.raises(
        CaptureError, match=r"asarray makes at .*test_state.*Pass the array as an argument, or make it on the dev"
    ):
        handlepool.record(lambda x: handlepool.add(x, asarray(values(rng, buffer))), full(asarray, 1), lanes=lanes)


def test_g19_a_refusal_that_the_function_catches_is_raised_in_the_end(asarray):
    rng = hidden(np.random.default_rng(0))

    def step(x):
        try:
            return handlepool.add(x, asarray(rng().standard_normal(SHAPE, np.float32)))
        except CaptureError:
            return x * 2

    with pytest.raises(CaptureError, match="has other values than in the first call"):
        handlepool.record(step, full(asarray, 1))


@LANES
@pytest.mark.parametrize(
    "write",
    [
        lambda array, values: array.set(values),
        lambda array, values: array.__setitem__(slice(None), asarray_of(array, values)),
        lambda array, values: np.copyto(array, values),
    ],
    ids=["set", "assignment", "copyto"],
)
def test_g19_other_copies_from_the_host_are_refused(write, lanes):
    from handlepool.drivers.host.driver import HostDriver
    from handlepool.testing.pools import substitute_default

    with substitute_default(handlepool.HandlePool(driver=HostDriver(scheduler="adversarial", seed=1))):
        make = handlepool.default_pool().driver.asarray
        buffer, values = full(make, 0), np.ones(SHAPE, np.float32)

        def step(x):
            write(buffer, values)
            return handlepool.add(x, buffer)

        with pytest.raises(CaptureError, match=r"would copy NumPy's .* from the host"):
            handlepool.record(step, full(make, 1), lanes=lanes)


def asarray_of(array, values):
    return values


def test_g19_numpys_memory_that_stays_is_read_where_it_is_and_a_temporary_is_refused(asarray):
    driver = handlepool.default_pool().driver
    if driver.array_types[-1] is not np.ndarray:
        pytest.skip("a strict driver takes no arrays of NumPy's")
    weights, rng = np.ones(SHAPE, np.float32), hidden(np.random.default_rng(0))
    with handlepool.record(lambda x: x * weights, full(asarray, 1)) as program:
        weights[...] = 3
        assert program(full(asarray, 2)).get().flat[0] == 6
    for function in (
        lambda x: x * rng().standard_normal(SHAPE, np.float32),
        lambda x: handlepool.add(x, rng().standard_normal(SHAPE, np.float32)),
    ):
        with pytest.raises(CaptureError, match="with other values than in the first call"):
            handlepool.record(function, full(asarray, 1))


# Documented forms of state


@LANES
def test_g19_a_streaming_window_a_recurrent_cell_and_a_pair_that_takes_turns_are_recorded(asarray, lanes):
    class Window:
        def __init__(self):
            self.buffer = full(asarray, 0, (1, 4, 3, 4))

        def step(self, x):
            self.buffer[:, :, :-1] = self.buffer[:, :, 1:].copy()
            self.buffer[:, :, -1:] = x[:, :, :1]
            return handlepool.mean2d(self.buffer)

    class Recurrent:
        def __init__(self):
            self.h = full(asarray, 0)

        def step(self, x):
            handlepool.add(self.h, x, out=self.h)
            return self.h * 0.5

    class Pair:
        def __init__(self):
            self.now, self.next = full(asarray, 1), full(asarray, 1)

        def step(self, x):
            handlepool.add(self.now, x, out=self.next)
            self.now[...] = self.next
            return handlepool.add(self.now, self.now)

    for kind in (Window, Recurrent, Pair):
        plain, recorded = kind(), kind()
        xs = [full(asarray, value) for value in range(1, 6)]
        wanted = [plain.step(x).get() for x in xs]
        with handlepool.record(recorded.step, xs[0].copy(), lanes=lanes) as program:
            found = [program(x).get() for x in xs[1:]]
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted[1:], strict=True)), kind


def test_the_walk_is_bounded_and_skips_libraries(asarray):
    many = [[index] for index in range(state.MOST_PLACES + 10)]
    with handlepool.record(lambda x: x * len(many), full(asarray, 1)) as program:
        assert program(full(asarray, 1)).get().flat[0] == len(many)
