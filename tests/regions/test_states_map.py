"""Maps: branches of a graph function that start together, and all else that a map may be given."""

import functools
import itertools
import threading

import numpy as np
import pytest
from harness.accounts import Accounts
from harness.graphs import both, double, plus
from harness.insides import fault_by, leases_of
from harness.lines import at_line, some_lines
from harness.scenes import TIMEOUT, Scene, Thread, leased, over_seeds, without_joins, without_starts

import handlepool
from handlepool import (
    ArgumentError,
    ContractError,
    DeviceMismatchError,
    HandlePool,
    OwnershipError,
    ParallelStateExecutor,
    ParallelStates,
    PoolClosedError,
    conv2d,
)
from handlepool.drivers.host.driver import HostDriver
from handlepool.pool import context
from handlepool.pool.default import substitute_default
from handlepool.regions import fork as forks
from handlepool.regions.leases import Leases


@pytest.fixture
def scene(make_driver, scheduler):
    with Scene(make_driver(scheduler=scheduler)) as scene:
        yield scene


@pytest.fixture
def together(monkeypatch):
    """How many branches each map started together."""
    counts = []
    start = Leases.start_together
    monkeypatch.setattr(Leases, "start_together", lambda leases, branches: (counts.append(branches), start(leases, branches)))
    return counts


@pytest.fixture
def no_python(monkeypatch):
    """No branch is a call of Python code."""
    monkeypatch.setattr(forks, "run_on", lambda *_: pytest.fail("a branch ran Python code"))


def warm(scene, function=double, count=1, sizes=(8,)):
    """Make the plans known: from then on, branches start together."""
    for size in sizes:
        scene.states.map(function, *[[scene.array(0, size)]] * count)


def read(scene, arrays):
    return [scene.read(array) for array in arrays]


def arrays(scene, values):
    return [scene.array(value) for value in values]


def in_order(scene):
    """Nothing is leased, kept or lost, and a map works."""
    assert leased(scene) == 0
    assert context.thread.region is None
    Accounts(scene.pool).check()
    assert read(scene, scene.states.map(double, arrays(scene, range(6)))) == [0, 2, 4, 6, 8, 10]
    return True


# Results


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 16])
def test_results_are_in_order_for_any_number_of_branches(scene, together, count, known):
    if known:
        warm(scene)
    outputs = scene.states.map(double, arrays(scene, range(count)))
    assert read(scene, outputs) == [2 * value for value in range(count)]
    assert together == ([count] if known and count > 1 else [])
    assert in_order(scene)


@pytest.mark.parametrize("form", [list, tuple, iter])
@pytest.mark.parametrize("function", ["graph", "python"])
def test_out_says_where_each_branch_writes(scene, form, function):
    def python(x, out=None):
        return scene.put(out, lambda x: 2 * x, x)

    warm(scene)
    outs = arrays(scene, [None] * 6)
    for _ in range(2):
        made = scene.states.map(double if function == "graph" else python, arrays(scene, range(6)), out=form(outs))
        assert all(array is out for array, out in zip(made, outs, strict=True))
        assert read(scene, outs) == [0, 2, 4, 6, 8, 10]
    assert in_order(scene)


def test_several_outputs_given_and_not(scene, together):
    xs, ys = arrays(scene, range(5)), arrays(scene, range(1, 6))
    expected = [(x + y, x * y) for x, y in zip(range(5), range(1, 6), strict=True)]
    outs = [tuple(arrays(scene, [None] * 2)) for _ in xs]
    for _ in range(2):
        assert [tuple(read(scene, pair)) for pair in scene.states.map(both, xs, ys)] == expected
        made = scene.states.map(both, xs, ys, out=outs)
        assert all(pair is out for pair, out in zip(made, outs, strict=True))
        assert [tuple(read(scene, pair)) for pair in made] == expected
    assert together == [5, 5]


@pytest.mark.parametrize("form", [list, tuple, iter])
@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("lengths", [(6, 4, 5), (4, 6, 5), (6, 6, 4), (0, 6, 6), (6, 6, 0), (3, 3, 1), (1, 1, 3)])
def test_iterables_that_are_not_equally_long_are_refused_before_any_call(scene, lengths, known, form):
    if known:
        warm(scene, plus, 2)
    xs, ys, outs = (arrays(scene, [100] * length) for length in lengths)
    launched = scene.driver.calls["launch"]
    with scene.states.fork() as fork:
        for runs in (scene.states, fork):
            with pytest.raises(ArgumentError, match="its iterables have {} and {} entries, and out= has {}".format(*lengths)):
                runs.map(plus, form(xs), ys, out=form(outs))
            if lengths[0] != lengths[1]:
                with pytest.raises(ArgumentError, match="its iterables have {} and {} entries".format(*lengths)):
                    runs.map(lambda *_: pytest.fail("it was called"), xs, form(ys))
        assert leased(scene) == 0
    assert scene.driver.calls["launch"] == launched
    assert read(scene, outs) == [100] * lengths[2]
    assert in_order(scene)


def test_iterables_without_an_end_give_as_many_entries_as_the_others(scene, together):
    warm(scene, plus, 2)
    xs, y = arrays(scene, range(4)), scene.array(10)
    for form in (list, iter):
        assert read(scene, scene.states.map(plus, form(xs), itertools.repeat(y))) == [10, 11, 12, 13]
        assert read(scene, scene.states.map(plus, itertools.cycle([y, xs[0]]), form(xs))) == [10, 1, 12, 3]
    assert together == [4] * 4
    assert scene.states.map(max, itertools.repeat(2), itertools.repeat(1, 3)) == [2, 2, 2]
    assert scene.states.map(max, [], itertools.count()) == []
    with pytest.raises(ArgumentError, match="its iterables have 4 and 3 entries"):
        scene.states.map(plus, xs, itertools.repeat(y, 3))
    with pytest.raises(ArgumentError, match="its iterables have 4 and 0 entries"):
        scene.states.map(plus, xs, itertools.cycle([]))


def test_ranges_and_functions_that_are_no_graph_functions(scene, together):
    x = scene.array(1)
    assert read(scene, scene.states.map(scene.plus, [x] * 6, range(6))) == [1, 2, 3, 4, 5, 6]
    assert scene.states.map(lambda *values: values, "abc", range(3)) == [("a", 0), ("b", 1), ("c", 2)]
    assert scene.states.map(lambda: pytest.fail("there is nothing to call it with")) == []
    assert together == []


def sizes_mixed(scene):
    warm(scene, sizes=(8, 16))
    xs = [scene.array(value, size) for value, size in enumerate((8, 8, 16, 8, 24, 16, 24, 8))]
    outputs = scene.states.map(double, xs)
    assert [y.shape for y in outputs] == [x.shape for x in xs]
    return tuple(read(scene, outputs))


def test_a_function_that_runs_branches_of_the_same_fork_itself_is_called_for_each_item(scene):
    """What those branches launch at once says nothing about what the function does."""
    warm(scene)
    with scene.states.fork() as fork:

        def function(x):
            with scene.stream:
                return fork.run(double, x), "the function's own"

        results = fork.map(function, arrays(scene, range(6)))
    assert {text for _, text in results} == {"the function's own"}
    assert read(scene, [y for y, _ in results]) == [0, 2, 4, 6, 8, 10]


# Partials


def images(scene, count=6):
    numbers = np.random.default_rng(0)
    xs = [scene.driver.asarray(numbers.standard_normal((1, 4, 6, 6), np.float32)) for _ in range(count)]
    w, bias = (scene.driver.asarray(numbers.standard_normal(shape, np.float32)) for shape in ((3, 4, 3, 3), (3,)))
    return xs, w, bias


def alike(scene, arrays, others):
    return all(np.array_equal(scene.driver.asnumpy(a), scene.driver.asnumpy(b)) for a, b in zip(arrays, others, strict=True))


PARTIALS = {
    "options": lambda w, bias: functools.partial(conv2d, padding=1),
    "filters": lambda w, bias: functools.partial(conv2d, w=w, padding=1),
    "bias": lambda w, bias: functools.partial(conv2d, padding=1, bias=bias, activation="relu"),
    "all": lambda w, bias: functools.partial(functools.partial(conv2d, w=w), padding=1, bias=bias),
}


@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
@pytest.mark.parametrize("name", PARTIALS)
def test_a_partial_of_conv2d_runs_as_a_graph_function(scene, no_python, name, given):
    xs, w, bias = images(scene)
    function = PARTIALS[name](w, bias)
    arguments = (xs,) if "w" in function.keywords else (xs, [w] * len(xs))
    expected = [function(*call, pool=scene.pool) for call in zip(*arguments, strict=True)]
    for _ in range(3):
        outs = [scene.driver.asarray(np.full((1, 3, 6, 6), np.nan, np.float32)) for _ in xs] if given else None
        assert alike(scene, scene.states.map(function, *arguments, out=outs), expected)
        with scene.states.fork() as fork:
            made = [fork.run(function, *call) for call in zip(*arguments, strict=True)]
        assert alike(scene, made, expected)
    assert in_order(scene)


def test_a_partial_of_a_graph_function_runs_as_one(scene, no_python, together):
    warm(scene, plus, 2)
    function = functools.partial(plus, scene.array(10))
    assert read(scene, scene.states.map(function, arrays(scene, range(6)))) == [10, 11, 12, 13, 14, 15]
    outs = arrays(scene, [None] * 6)
    for _ in range(2):  # the first makes the plan known
        scene.states.map(function, arrays(scene, range(6)), out=outs)
    assert read(scene, outs) == [10, 11, 12, 13, 14, 15]
    assert together == [6, 6]
    assert events(scene, lambda: scene.states.map(function, outs)) == (1 + 4, 4 + 4)


def scaled(x, w, *, padding, scale=1):
    return conv2d(x, w, padding=padding) * scale


@pytest.mark.parametrize("by", ["states", "fork", "executor", "record"])
@pytest.mark.parametrize(
    "function",
    [conv2d, scaled, functools.partial(scaled, scale=1), handlepool.operation(scaled)],
    ids=["conv2d", "plain", "partial", "operation"],
)
def test_keywords_that_map_does_not_know_are_the_functions(make_driver, by, function):
    with HandlePool(driver=make_driver()) as pool, substitute_default(pool):
        states, driver = ParallelStates(2, pool=pool), pool.driver
        x, w = (driver.asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3)))
        if by == "executor":
            with ParallelStateExecutor(2, pool=pool) as executor:
                ys = [*executor.map(function, [x] * 3, [w] * 3, padding=1, timeout=TIMEOUT)]
        elif by == "fork":
            with states.fork() as fork:
                ys = fork.map(function, [x] * 3, [w] * 3, padding=1)
        elif by == "record":
            with handlepool.record(states.map, function, [x] * 3, [w] * 3, padding=1) as program:
                ys = program([x] * 3, [w] * 3)
        else:
            ys = states.map(function, [x] * 3, [w] * 3, padding=1)
        assert [driver.asnumpy(y).max() for y in ys] == [36] * 3


def test_a_keyword_of_map_and_one_of_the_function_go_each_its_way(scene, no_python, together):
    xs, w, _ = images(scene)
    outs = [scene.driver.asarray(np.full((1, 3, 6, 6), np.nan, np.float32)) for _ in xs]
    for _ in range(2):
        ys = scene.states.map(conv2d, xs, [w] * len(xs), out=outs, padding=1)
    assert together == [len(xs)]
    assert all(y is out for y, out in zip(ys, outs, strict=True))
    assert alike(scene, outs, [conv2d(x, w, padding=1, pool=scene.pool) for x in xs])


def test_a_keyword_that_the_function_does_not_know_is_refused_by_it(scene):
    with pytest.raises(TypeError, match="unexpected keyword argument 'pading'"):
        scene.states.map(scene.plus, [scene.array(1)], [1], pading=1)


def test_a_partial_with_an_output_of_its_own_writes_there(scene):
    warm(scene)
    out = scene.array()
    for _ in range(2):
        made = ParallelStates(1, pool=scene.pool).map(functools.partial(double, out=out), arrays(scene, range(6)))
        assert all(array is out for array in made)
        assert scene.read(out) == 10
    assert in_order(scene)


# How many events


def events(scene, act):
    """How often events were recorded and waited for."""
    calls = scene.driver.calls
    before = calls["record_event"], calls["wait_event"]
    act()
    return calls["record_event"] - before[0], calls["wait_event"] - before[1]


def test_a_map_of_known_branches_has_one_edge_for_each_state(scene):
    warm(scene)
    xs, outs = arrays(scene, range(16)), arrays(scene, [None] * 16)
    scene.states.map(double, xs, out=outs)
    for out in (None, outs):
        # Of the start, and of the joins.
        assert events(scene, lambda out=out: scene.states.map(double, xs, out=out)) == (1 + 4, 4 + 4)


@pytest.mark.parametrize("region", ["run", "generator"])
def test_branches_that_do_not_start_together_have_an_edge_each(scene, region):
    warm(scene)
    xs = arrays(scene, range(16))
    scene.states.map(double, xs)

    def run():
        if region == "generator":
            scene.states.map(double, iter(xs))
        else:
            with scene.states.fork() as fork:
                for x in xs:
                    fork.run(double, x)

    assert events(scene, run) == (16 + 4, 16 + 4)


def test_a_map_over_more_items_than_states_leases_no_more_than_the_states_though_others_are_free(scene):
    warm(scene)
    scene.pool.prewarm(states=8)
    with ParallelStates(3, pool=scene.pool).fork() as fork:
        fork.map(double, arrays(scene, range(16)))
        assert leased(scene) == 3


# Order


def filled_before(scene, careless=None):
    warm(scene)
    xs = arrays(scene, range(8))
    if careless is not None:
        careless(scene)
    return tuple(map(str, read(scene, scene.states.map(double, xs))))


@pytest.mark.parametrize("careless", [without_starts, without_joins])
def test_g6_control_branches_that_start_together_without_a_wait(careless):
    assert len(set(over_seeds(lambda scene: filled_before(scene, careless), seeds=range(100), control=True))) > 1


def overwritten_after(scene, careless=None):
    warm(scene)
    xs, outs = arrays(scene, range(8)), arrays(scene, [None] * 8)
    if careless is not None:
        careless(scene)
    scene.states.map(double, xs, out=outs)
    sides = [slot.side_stream for slot in scene.pool.internals.device(0).sides.free]
    for x in xs:
        scene.put(x, lambda: 100)
    for side in sides:
        side.synchronize()
    return tuple(read(scene, outs))


def test_g6_control_without_the_joins_it_is_overwritten_under_the_map():
    results = over_seeds(lambda scene: overwritten_after(scene, without_joins), control=True)
    assert any(200 in values for values in results)


def filled_by_a_generator(scene):
    """What a generator gives the caller's stream between items."""
    warm(scene)
    xs = arrays(scene, [None] * 8)

    def items():
        for value, x in enumerate(xs):
            scene.put(x, lambda value=value: value)
            yield x

    return tuple(read(scene, scene.states.map(double, items())))


def filled_between(scene, form):
    """The caller's stream is given the next item's values while a branch is launched."""
    xs, left = arrays(scene, [None] * 8), []

    def fill():
        value = len(xs) - len(left)
        scene.put(left.pop(0), lambda: value)

    def noting(name):
        if name == "launch" and left:
            fill()

    fault_by(scene.driver, noting)
    warm(scene)
    left[:] = xs
    fill()
    return tuple(map(str, read(scene, scene.states.map(double, form(xs)))))


def test_g6_control_what_comes_between_the_branches_of_a_list_is_not(together):
    assert len(set(over_seeds(lambda scene: filled_between(scene, list), control=True))) > 1
    assert set(together) == {8}


# Memory


def another_thread_frees_a_block(scene, number, region="map"):
    """Before an output of a map is allocated, another thread gives the caller's stream work that reads a block, and frees it."""
    y, xs = scene.array(), arrays(scene, [1] * 6)
    scene.driver.synchronize_stream(scene.stream.ptr)
    empty, due, freed = scene.driver.empty, [], []

    def other():
        with scene.stream:
            x = scene.array(5)
            scene.put(y, lambda value: value + 1, x)
            freed.append(scene.driver.array_pointer(x))

    def allocating(*layout):
        if due and threading.current_thread() is mine:
            due.pop()
            if not due:
                Thread(other).finish()
        return empty(*layout)

    mine = threading.current_thread()
    scene.driver.empty = allocating
    warm(scene)
    due[:] = range(number)
    if region == "map":
        outputs = scene.states.map(double, xs)
    else:
        with scene.states.fork() as fork:
            outputs = [fork.run(double, x) for x in xs]
    assert scene.driver.array_pointer(outputs[number - 1]) == freed[0]
    return scene.read(y), *read(scene, outputs)


@pytest.mark.parametrize("region", ["map", "run"])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_g8_the_outputs_of_branches_are_allocated_before_the_edge_that_starts_them(number, region):
    results = set(over_seeds(lambda scene: another_thread_frees_a_block(scene, number, region), seeds=range(50)))
    assert results == {(6, 2, 2, 2, 2, 2, 2)}


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_g8_control_an_edge_before_the_outputs_of_a_map_are_allocated(number, monkeypatch):
    run = forks.Fork._map_known

    def early(fork, *args):
        driver = fork._driver
        record = driver.record_event

        def late(event, pointer):
            driver.record_event = record

        leases_of(fork).start_together(6)
        leases_of(fork).end_together()
        driver.record_event = late
        return run(fork, *args)

    monkeypatch.setattr(forks.Fork, "_map_known", early)
    results = over_seeds(lambda scene: another_thread_frees_a_block(scene, number), control=True)
    assert 3 in [y for y, *_ in results]


@pytest.mark.slow
def test_g8_a_finaliser_at_every_line_of_a_map_frees_a_block_and_no_output_takes_it_too_late():
    """Outputs that are given for some branches alone are no less allocated before the edge."""
    for out in ("none", "some"):
        for k in some_lines(4):
            with Scene(HostDriver(scheduler="adversarial", check_order=True)) as scene:
                xs, copy = arrays(scene, range(6)), scene.array()
                outs = [None, None, scene.array(), None, scene.array(), None] if out == "some" else [None] * 6
                for _ in range(2):
                    scene.states.map(double, xs, out=outs)

                def map_(scene=scene, xs=xs, outs=outs, made=(made := [])):
                    made += scene.states.map(double, xs, out=outs)

                def finaliser(scene=scene, copy=copy):
                    freed = scene.array(7)
                    scene.put(copy, lambda freed: freed, freed)

                where = at_line(k, map_, finaliser)
                assert read(scene, made) == [0, 2, 4, 6, 8, 10]
            if where is None:
                break
        assert k > 100


@pytest.mark.parametrize("stream", ["own", "null"])
def test_g3_a_map_inside_another_device_in_the_forks_body_is_on_the_forks_own(stream):
    driver = HostDriver(devices=2, scheduler="adversarial", check_order=True)
    with Scene(driver, default=True) as scene, scene.stream if stream == "own" else driver.legacy_stream:
        xs = arrays(scene, range(6))
        for _ in range(2):
            scene.states.map(double, xs)
        with scene.states.fork() as fork:
            with driver.device(1), driver.create_stream():
                theirs = [driver.asarray(np.zeros(8)) for _ in range(6)]
                double(theirs[0])
                ys = fork.map(double, xs)
                with pytest.raises(DeviceMismatchError):
                    fork.map(double, theirs)
            ys += fork.map(double, xs)
        assert {driver.array_device(y) for y in ys} == {0}
        assert read(scene, ys) == [0, 2, 4, 6, 8, 10] * 2


def blocks_that_another_stream_still_reads(scene):
    """A map inside ``with other:``, where blocks were freed that work on ``other`` reads which has not run yet."""
    warm(scene)
    xs = arrays(scene, range(6))
    scene.states.map(double, xs)
    other = scene.driver.create_stream()
    with scene.states.fork() as fork, other:
        copies = arrays(scene, [None] * 6)
        for value, copy in enumerate(copies):
            scene.put(copy, lambda freed: freed + 1, scene.array(10 * value))
        ys = fork.map(double, xs)
    with other:
        found = read(scene, copies)
    return *found, *read(scene, ys)


def test_g8_the_outputs_of_a_map_inside_another_stream_take_no_block_that_this_still_reads():
    assert set(over_seeds(blocks_that_another_stream_still_reads)) == {(1, 11, 21, 31, 41, 51, 0, 2, 4, 6, 8, 10)}


def test_a_map_whose_builder_runs_a_branch_of_the_same_fork_launches_its_own_graph(scene):
    xs = arrays(scene, range(6))
    scene.states.map(double, xs)
    with scene.states.fork() as fork:

        @handlepool.graph
        def square(g, x):
            fork.run(double, xs[1])
            return g.mul(x, x)

        ys = fork.map(square, xs)
    assert read(scene, ys) == [0, 1, 4, 9, 16, 25]


def inputs_come_late(scene, before, number):
    """A map in a fork that ran branches before; the caller's stream fills its inputs between."""
    warm(scene)
    earlier = arrays(scene, range(before))
    with scene.states.fork() as fork:
        ys = [fork.run(double, x) for x in earlier]
        xs = arrays(scene, [0] * number)
        for place, x in enumerate(xs):
            scene.put(x, lambda place=place: place)
        ys += fork.map(double, xs)
    return tuple(read(scene, ys))


@pytest.mark.parametrize("number", [3, 4, 7])
@pytest.mark.parametrize("before", [1, 2, 3, 9])
def test_g6_a_map_after_other_branches_of_its_fork_starts_every_state_that_it_uses(together, before, number):
    results = set(over_seeds(lambda scene: inputs_come_late(scene, before, number), seeds=range(20), count=8))
    assert results == {(*range(0, 2 * before, 2), *range(0, 2 * number, 2))}
    assert set(together) == {number}


@pytest.mark.parametrize("before", [1, 2, 3, 9])
def test_g6_control_a_map_after_other_branches_that_starts_only_the_states_of_those(monkeypatch, before):
    def leased_before(leases, branches, start=Leases.start_together):
        most = min(leases._next + branches, leases.count)
        start(leases, 1 - leases._next)
        while len(leases.slots) < most:
            leases._lease()

    monkeypatch.setattr(Leases, "start_together", leased_before)
    results = over_seeds(lambda scene: inputs_come_late(scene, before, 7), seeds=range(20), count=16, control=True)
    assert any(found[before:] != tuple(range(0, 14, 2)) for found in results)


def arguments_are_dropped(scene, keeps=True):
    """The caller drops a map's arguments inside the fork, and gives their blocks to other arrays. The books keep them, too."""
    outs = arrays(scene, [None] * 6)
    scene.states.map(double, arrays(scene, range(6)), out=outs)
    with scene.states.fork(ordered=keeps) as fork:
        if not keeps:
            leases_of(fork).keep = lambda _: None
        fork.map(double, arrays(scene, range(6)), out=outs)
        arrays(scene, [100] * 6)
    return tuple(read(scene, outs))


def test_g8_control_arguments_of_a_map_that_are_not_kept_are_overwritten():
    results = over_seeds(lambda scene: arguments_are_dropped(scene, keeps=False), control=True)
    assert any(200 in values for values in results)


DOUBLES = tuple(2.0 * value for value in range(8))
ORDERED = {  # with how many branches start together
    filled_before: (tuple(map(str, DOUBLES)), {8}),
    sizes_mixed: (DOUBLES, {8}),
    overwritten_after: (DOUBLES, set()),  # known without outputs alone
    filled_by_a_generator: (DOUBLES, set()),
    arguments_are_dropped: (DOUBLES[:6], {6}),
}


@pytest.mark.parametrize(("scenario", "expected"), ORDERED.items())
def test_g6_g8_maps_are_ordered_and_keep_what_they_read(together, scenario, expected):
    assert set(over_seeds(scenario)) == {expected[0]}
    assert set(together) == expected[1]


def test_g6_what_comes_between_the_branches_of_an_iterator_is_waited_for():
    assert set(over_seeds(lambda scene: filled_between(scene, iter))) == {tuple(map(str, DOUBLES))}


# Errors


def wrong_in_the_middle(scene, place=3, careless=None):
    warm(scene, plus, 2)
    xs, ys, outs = arrays(scene, range(6)), arrays(scene, range(6)), arrays(scene, [None] * 6)
    scene.states.map(plus, xs, ys, out=arrays(scene, [None] * 6))
    ys[place] = scene.array(0, 5)
    if careless is not None:
        careless(scene)
    with pytest.raises(ArgumentError):
        scene.states.map(plus, xs, ys, out=outs)
    return tuple(map(str, read(scene, outs[:place])))


@pytest.mark.parametrize("place", [1, 3, 5])
def test_g6_a_map_with_a_wrong_item_joins_what_came_before_it(place):
    results = over_seeds(lambda scene: wrong_in_the_middle(scene, place), seeds=range(50))
    assert set(results) == {tuple(str(2.0 * value) for value in range(place))}


def test_g6_control_a_map_with_a_wrong_item_that_does_not_join():
    results = over_seeds(lambda scene: wrong_in_the_middle(scene, careless=without_joins), control=True)
    assert set(results) != {("0.0", "2.0", "4.0")}


@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
@pytest.mark.parametrize("place", range(6))
def test_a_map_with_a_wrong_item_loses_nothing(scene, place, given):
    warm(scene, plus, 2)
    warm(scene)
    xs, ys = arrays(scene, range(6)), arrays(scene, range(6))
    ys[place] = scene.array(0, 5)
    outs = arrays(scene, [None] * 6) if given else None
    for _ in range(2):
        with scene.states.fork() as fork:
            with pytest.raises(ArgumentError):
                fork.map(plus, xs, ys, out=outs)
            y = fork.run(double, xs[1])
        assert scene.read(y) == 2
        assert not leases_of(fork).kept
        assert in_order(scene)


CALLS = {"record_event": 1 + 4, "wait_event": 4 + 4, "launch": 6}


@pytest.mark.parametrize(("method", "k"), [(method, k) for method, count in CALLS.items() for k in range(1, count + 1)])
def test_nothing_is_lost_by_a_failure_of_any_driver_call_in_a_map(scene, method, k):
    warm(scene)
    xs = arrays(scene, range(6))
    scene.states.map(double, xs)
    scene.driver.fail_at(k, method)
    with pytest.raises(RuntimeError, match="injected"):
        scene.states.map(double, xs)
    scene.driver.fail_at(0)
    assert in_order(scene)


# Anywhere


def test_g15_a_map_inside_a_branch_a_map_and_a_state(together):
    def inner(value, scene, y):
        x = scene.array(value)
        for number, z in enumerate(scene.states.map(double, [x] * 4)):
            scene.put(y[number], lambda z: z + 1, z)

    def scenario(scene):
        warm(scene)
        ys = [arrays(scene, [None] * 4) for _ in range(4)]
        with scene.states.fork() as fork:
            fork.run(inner, 1, scene, ys[0])
        scene.states.map(inner, [2, 3], [scene] * 2, ys[1:3])
        scene.states.with_state(2, lambda state: inner(4, scene, ys[3]))
        return tuple(scene.read(y) for four in ys for y in four)

    assert set(over_seeds(scenario, seeds=range(50))) == {(3.0,) * 4 + (5.0,) * 4 + (7.0,) * 4 + (9.0,) * 4}
    assert set(together) == {4}


@pytest.mark.parametrize("free", [0, 1, 2])
def test_g15_a_map_where_side_slots_are_short(free, together):
    def scenario(scene):
        warm(scene)
        xs, outs = arrays(scene, range(6)), arrays(scene, [None] * 6)
        with ParallelStates(32, pool=scene.pool).fork() as hoard:
            hoard.map(lambda _: None, range(32 - free))
            assert leased(scene) == 32 - free
            made = scene.states.map(double, xs)
            scene.states.map(double, xs, out=outs)
            return tuple(read(scene, made + outs))

    assert set(over_seeds(scenario, seeds=range(30))) == {(0.0, 2.0, 4.0, 6.0, 8.0, 10.0) * 2}
    assert set(together) == {6}


def test_g15_a_map_with_all_side_slots_out_orders_nothing(scene):
    warm(scene)
    xs = arrays(scene, range(6))
    scene.states.map(double, xs)
    with ParallelStates(32, pool=scene.pool).fork() as hoard:
        hoard.map(lambda _: None, range(32))
        assert events(scene, lambda: scene.states.map(double, xs)) == (0, 0)


def test_g9_a_map_under_capture_is_recorded(scene, together):
    warm(scene)
    xs, outs = arrays(scene, range(6)), arrays(scene, [None] * 6)
    scene.states.map(double, xs, out=outs)
    scene.stream.begin_capture()
    scene.states.map(double, xs, out=outs)
    assert scene.pool.stats()["handles_captured"] == 4
    graph = scene.stream.end_capture()
    for value in (10, 20):
        for x in xs:
            scene.put(x, lambda value=value: value)
        graph.launch(scene.stream)
        assert read(scene, outs) == [2 * value] * 6
    assert in_order(scene)
    assert scene.pool.stats()["handles_captured"] == 0
    assert together[:1] == [6]


def test_g9_a_map_that_is_recorded(scene):
    warm(scene)
    xs = arrays(scene, range(6))
    scene.states.map(double, xs)
    with handlepool.record(lambda: scene.states.map(double, xs), pool=scene.pool) as program:
        for value in (10, 20):
            for x in xs:
                scene.put(x, lambda value=value: value)
            program.replay()
            assert read(scene, program.outputs) == [2 * value] * 6
    assert in_order(scene)


def test_a_map_of_a_checked_pool(make_driver, scheduler, together):
    with Scene(make_driver(scheduler=scheduler), check=True) as scene:
        warm(scene)
        xs = arrays(scene, range(6))
        assert read(scene, scene.states.map(double, xs)) == [0, 2, 4, 6, 8, 10]
        assert together == [6]
        handles = [slot.handle for slot in scene.pool.internals.device(0).sides.free]
        with pytest.raises(OwnershipError, match="whose thread, stream or fork has ended"):
            Thread(lambda: handles[0].backend_handle).finish()
        workspace = scene.pool.get_workspace(64).view(np.float64)
        with pytest.raises(ContractError, match="lies in the workspace of"):
            scene.states.map(double, [*xs[:3], workspace, *xs[3:]])
        assert leased(scene) == 0
        assert read(scene, scene.states.map(double, xs)) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("by", ["the body", "a generator"])
def test_a_map_of_a_pool_that_was_closed(scene, by):
    warm(scene)
    xs = arrays(scene, range(6))

    def items():
        yield from xs[:2]
        scene.pool.close()
        yield xs[2]

    with scene.states.fork() as fork:
        if by == "the body":
            fork.map(double, xs)
            scene.pool.close()
        with pytest.raises(PoolClosedError):
            fork.map(double, xs if by == "the body" else items())
    with pytest.raises(PoolClosedError):
        scene.states.map(double, xs)
    stats = scene.pool.stats()
    assert stats["handles_created"] == stats["handles_destroyed"]


def test_a_fork_maps_in_its_own_thread_and_while_it_is_open(scene):
    warm(scene)
    xs = arrays(scene, range(6))
    with scene.states.fork() as fork:
        with pytest.raises(OwnershipError, match="belongs to the thread"):
            Thread(fork.map, double, xs).finish()
        assert len(fork.map(double, xs)) == len(xs)
        assert leases_of(fork).kept
    assert not leases_of(fork).kept
    with pytest.raises(PoolClosedError, match="was left"):
        fork.map(double, xs)
    assert in_order(scene)


def test_maps_of_several_threads_at_a_time(make_driver):
    with Scene(make_driver()) as scene:
        warm(scene)
        meeting = threading.Barrier(8)

        def work(number):
            with scene.driver.create_stream():
                xs, found = arrays(scene, range(number, number + 9)), []
                meeting.wait(TIMEOUT)
                for _ in range(5):
                    outs = arrays(scene, [None] * 9)
                    scene.states.map(double, xs, out=outs)
                    found += [read(scene, outs), read(scene, scene.states.map(double, xs))]
                return found

        threads = [Thread(work, number) for number in range(8)]
        for number, thread in enumerate(threads):
            assert thread.finish() == [[2 * value for value in range(number, number + 9)]] * 10
        assert in_order(scene)


CALLS = {
    "an argument missing": ((["x"],), {}, r"missing 1 required positional argument: 'w'"),
    "an argument too many": ((["x"], ["w"], [1]), {}, r"takes x, w by position, and was given 1 as a further argument"),
    "an unknown option": ((["x"], ["w"]), {"pad": 1}, r"got an unexpected keyword argument 'pad'"),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments_of_a_convolution_are_said_in_its_own_terms(make_driver, call):
    iterables, options, message = CALLS[call]
    with Scene(make_driver()) as scene, pytest.raises(TypeError, match=message) as info:
        scene.states.map(functools.partial(conv2d, **options), *iterables)
    assert "_hit" not in str(info.value)
