"""Schedules: a recorded graph on fewer lanes has all the order that was recorded, and no more steps at once than lanes."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from harness.operations import plus, times

import handlepool
from handlepool import CaptureError, ContractError
from handlepool.drivers.host.graphs import RecordedGraph
from handlepool.recording import schedule as schedules
from handlepool.recording.explain import Step
from handlepool.recording.schedule import Schedule, estimated
from handlepool.tensors.layout import Token

SEEDS = range(60)


class Recorded:
    """A graph as a recording leaves it: nodes are (step, number)."""

    def __init__(self):
        self.edges, self.steps, self.ends = [], [], []

    def step(self, after=(), nodes=1, shape="chain", partly=None):
        """A step behind others; its nodes in a row, or side by side; ``partly``, a step that its last node alone comes after."""
        number = len(self.steps)
        mine = [(number, index) for index in range(nodes)]
        firsts, lasts = (mine[:1], mine[-1:]) if shape == "chain" else (mine, mine)
        behind = [(end, each) for each in after for end in self.ends[each]]
        self.edges += [(end, first) for end, _ in behind for first in firsts]
        if shape == "chain":
            self.edges += pairwise(mine)
        if partly is not None and nodes > 1:
            self.edges += [(end, mine[-1]) for end in self.ends[partly]]
        self.ends.append(lasts or [end for end, _ in behind])
        self.steps.append(Step("step", "here", number % 7, tuple(sorted(after))))
        return number

    def schedule(self, lanes=32):
        nodes = {node for edge in self.edges for node in edge}.union(*self.ends)
        return Schedule(SimpleNamespace(edges=lambda: self.edges, nodes=len(nodes)), self.steps, self.ends, lanes)


def rewired(recorded, arrangement):
    """The edges of a schedule."""
    edges = [*recorded.edges]
    for edge in arrangement.remove:
        edges.remove(edge)
    assert not {*edges} & {*arrangement.add}
    return edges + arrangement.add


def order(edges):
    """Of each node, all that it comes after."""
    before, known = {}, {}
    for one, other in edges:
        before.setdefault(other, set()).add(one)
        before.setdefault(one, set())

    def of(node):
        if node not in known:
            known[node] = set().union(*({each} | of(each) for each in before[node]))
        return known[node]

    for node in before:
        of(node)
    return known


def random_recording(rng):
    recorded = Recorded()
    for number in range(rng.randint(2, 50)):
        near = range(max(0, number - 12), number)
        after = rng.sample(near, min(len(near), rng.choice([0, 1, 1, 2, 3])))
        shape = rng.choice(["chain", "side by side"])
        nodes = rng.choice([0, 1, 1, 1, 2, 3]) if after else rng.choice([1, 2])
        known = order(recorded.edges)
        ends = {each: recorded.ends[each] for each in after}
        direct = [
            each
            for each in after  # as a recording has them, of which none implies another
            if not any(other != each and {*ends[each]} & ({*ends[other]} | known.get(ends[other][0], set())) for other in after)
        ]
        partly = rng.choice(near) if near and rng.random() < 0.1 and shape == "chain" else None
        if partly is not None and (partly in after or not recorded.ends[partly]):
            partly = None
        recorded.step(direct, nodes if direct else nodes or 1, shape, partly)
    recorded.edges = list(dict.fromkeys(recorded.edges))
    return recorded


def check(recorded, lanes, times):
    arrangement = recorded.schedule().on(lanes, times)
    edges = rewired(recorded, arrangement)
    was, now = order(recorded.edges), order(edges)
    assert all(now[node] >= was[node] for node in was)
    made = {number for number, _ in was}
    for lane in range(lanes):
        steps = [number for number in made if arrangement.steps[number].lane == lane]
        for one in steps:
            for other in steps:
                assert one == other or follows(now, one, other) or follows(now, other, one)
    assert {step.lane for step in arrangement.steps} <= {*range(lanes)}
    return arrangement, edges, now


def follows(now, one, other):
    """Whether a step comes after all of another."""
    mine, theirs = ([node for node in now if node[0] == number] for number in (one, other))
    return all(now[node] >= {*theirs} for node in mine)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_g17_all_recorded_order_stays_and_steps_of_a_lane_run_one_after_the_other(seed, lanes):
    rng = random.Random(seed)
    recorded = random_recording(rng)
    check(recorded, lanes, [rng.choice([0.5, 1, 2, 5, 30]) for _ in recorded.steps])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_no_edge_between_steps_follows_from_others(seed, lanes):
    rng = random.Random(seed)
    recorded = Recorded()
    for number in range(40):
        near = range(max(0, number - 9), number)
        known = order(recorded.edges)
        after = rng.sample(near, min(len(near), rng.choice([0, 1, 2])))
        recorded.step([each for each in after if not any((each, 0) in known.get((other, 0), ()) for other in after)])
    _, edges, now = check(recorded, lanes, [rng.random() for _ in range(40)])
    for one, other in edges:
        assert not any(end == other and one in now[middle] for middle, end in edges if middle != one)


@pytest.mark.parametrize("broken", ["empty steps have a place", "what is behind in part counts as a whole"])
def test_control_what_a_schedule_may_not_take_for_order_is_found(broken, monkeypatch):
    former = schedules._parts

    def parts(*given):
        made = former(*given)
        for number, part in enumerate(made):
            if broken.startswith("empty") and not part.entries:
                part.entries.append(("nowhere", number))
                part.after = {number - 1}
            elif broken.startswith("what"):
                part.whole = {*part.after}
        return made

    monkeypatch.setattr(schedules, "_parts", parts)
    wrong = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        recorded = random_recording(rng)
        try:
            check(recorded, 3, [1.0] * len(recorded.steps))
        except (AssertionError, ValueError, KeyError):
            wrong += 1
    assert wrong > 5


def test_as_many_lanes_as_were_recorded_change_nothing():
    recorded = Recorded()
    for _ in range(5):
        recorded.step()
    schedule = recorded.schedule(5)
    assert schedule.on(5, [1.0] * 5) is schedule.on(32, [1.0] * 5) is schedule.recorded
    assert schedule.on(4, [1.0] * 5) is not schedule.recorded


def test_on_one_lane_steps_run_as_they_were_recorded():
    recorded = Recorded()
    for number in range(12):
        recorded.step([number - 4] if number >= 4 else [])
    arrangement = recorded.schedule().on(1, [float(number) for number in range(12)])
    assert rewired(recorded, arrangement) == [((number, 0), (number + 1, 0)) for number in range(11)]
    assert [step.after for step in arrangement.steps] == [()] + [(number,) for number in range(11)]
    assert arrangement.lanes == 1


def test_a_step_of_which_parts_follow_parts_of_another_comes_after_all_of_it_on_its_lane():
    recorded = Recorded()
    recorded.step(nodes=2, shape="side by side")
    recorded.step(nodes=2, shape="side by side")
    recorded.step()
    recorded.edges += [((0, 0), (1, 0)), ((0, 1), (1, 1))]
    recorded.steps[1] = recorded.steps[1]._replace(after=(0,))
    schedule = recorded.schedule()
    one, two = (schedule.on(lanes, [1.0] * 3) for lanes in (1, 2))
    both = {((0, end), (1, first)) for end in (0, 1) for first in (0, 1)}
    assert both <= {*rewired(recorded, one)}
    assert {*recorded.edges} <= {*rewired(recorded, two)}
    assert one.steps[1].after == two.steps[1].after == (0,)


def test_a_graph_with_more_in_it_than_steps_is_refused():
    recorded = Recorded()
    for _ in range(4):
        recorded.step()
    recorded.edges.append((("nobody's", 0), (3, 0)))
    assert recorded.schedule().on(2, [1.0] * 4).lanes == 2
    recorded.edges.append(((3, 0), ("nobody's", 1)))
    with pytest.raises(CaptureError, match="1 of 6 nodes of the CUDA graph reached the stream of a call after"):
        recorded.schedule()


def test_steps_in_a_circle_stay_as_they_are():
    recorded = Recorded()
    first = recorded.step(nodes=2)
    recorded.step([first])
    recorded.step()
    recorded.edges += [((1, 0), (0, 1))]
    recorded.edges.remove(((0, 1), (1, 0)))
    recorded.edges.append(((0, 0), (1, 0)))
    recorded.ends[0] = [(0, 1), (1, 0)]
    schedule = recorded.schedule()
    assert schedule.on(1, [1.0] * 3) is schedule.recorded or follows(order(rewired(recorded, schedule.on(1, [1.0] * 3))), 2, 0)


# How good it is


def ensemble(networks, blocks):
    """Independent networks of residual blocks, one after the other: two convolutions, and a shortcut beside them."""
    recorded, times = Recorded(), []
    for _ in range(networks):
        x = [recorded.step()]
        times.append(10.0)
        for _ in range(blocks):
            shortcut = recorded.step(x)
            left = recorded.step([recorded.step(x)])
            x = [recorded.step([left, shortcut])]
            times += [4.0, 10.0, 10.0, 2.0]
    return recorded, times


def duration(recorded, edges, times):
    ends = {}
    before = {}
    for one, other in edges:
        before.setdefault(other, []).append(one)

    def end(node):
        if node not in ends:
            ends[node] = times[node[0]] + max([end(each) for each in before.get(node, ())], default=0.0)
        return ends[node]

    return max(end((number, 0)) for number in range(len(recorded.steps)))


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_independent_networks_are_not_put_behind_each_others_shortcuts(lanes):
    recorded, times = ensemble(8, 4)
    arrangement = recorded.schedule().on(lanes, times)
    longest = 10 + 4 * (10 + 10 + 2)
    assert duration(recorded, rewired(recorded, arrangement), times) <= max(longest, sum(times) / lanes) * 1.1
    assert arrangement.lanes <= lanes


def test_the_longest_way_comes_first():
    recorded = Recorded()
    times = []
    for _ in range(6):
        recorded.step()
        times.append(1.0)
    x = recorded.step()
    for _ in range(5):
        x = recorded.step([x])
    times += [1.0] * 6
    arrangement = recorded.schedule().on(2, times)
    assert duration(recorded, rewired(recorded, arrangement), times) == 6


def test_dense_edges_are_reduced():
    recorded = Recorded()
    for number in range(64):
        recorded.step(range(max(0, number - 8), number))
    arrangement = recorded.schedule().on(2, [1.0] * 64)
    assert len(recorded.edges) > 450
    assert len(rewired(recorded, arrangement)) == 63


def test_times_are_estimated_by_what_is_moved():
    token = Token(object())
    short, long = estimated([([(0, 1000, None)], [token]), ([(0, 50_000_000, None)], [(0, 50_000_000, None)])])
    assert 0 < short < 3
    assert long > 50 * short / 3


# On the host driver


def wide(scene, x):
    made = [plus(scene, plus(scene, x, value), 10) for value in range(6)]
    for y in made:
        times(scene, y, 2)
    return made


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5])
def test_a_recording_runs_on_as_many_lanes_as_it_was_asked_for(scene, lanes):
    with handlepool.record(wide, scene, scene.array(1), lanes=lanes) as program:
        how = program.explain()
        assert (how.limit, how.got, how.recorded) == (lanes, lanes, 1 if lanes == 1 else 6)
        assert {step.lane for step in how.nodes} == {*range(lanes)}
        assert ("brought onto" in str(how)) == (lanes > 1)
        program.replay()
        assert [scene.read(y) for y in program.outputs] == [2 * (11 + value) for value in range(6)]
    assert not scene.driver.order.found


def test_control_a_schedule_without_an_edge_is_caught(scene, monkeypatch):
    former = RecordedGraph.arranged

    def arranged(graph, add=(), remove=()):
        return former(graph, add, [*remove, next(edge for edge in graph.edges() if edge not in remove)])

    monkeypatch.setattr(RecordedGraph, "arranged", arranged)
    with handlepool.record(wide, scene, scene.array(1), lanes=3) as program, pytest.raises(ContractError, match="not ordered"):
        program.replay()
    scene.driver.order.found.clear()


def test_a_graph_that_cannot_be_copied_runs_as_it_was_recorded(scene, monkeypatch):
    def arranged(graph, add=(), remove=()):
        raise handlepool.CaptureError("it allocates memory")

    monkeypatch.setattr(RecordedGraph, "arranged", arranged)
    with handlepool.record(wide, scene, scene.array(1), lanes=2) as program:
        assert program.explain().got == 6
        program.replay()
        assert scene.read(program.outputs[5]) == 32


def test_edges_that_are_not_there_and_edges_in_a_circle_are_refused(scene):
    driver, pointer = scene.driver, scene.stream.ptr
    driver.begin_capture(pointer)
    with driver.relaxed():
        x = scene.plus(scene.array(1), 1)
        scene.plus(x, 1)
        graph = driver.end_capture(pointer)
        ((one, other), *_) = graph.edges()
        with pytest.raises(ContractError, match="circle"):
            graph.arranged([(other, one)])
        with pytest.raises(ContractError, match="can be removed"):
            graph.arranged((), [(other, one)])
