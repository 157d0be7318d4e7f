"""Guarantee 8 for graph functions: outputs are known beforehand, and cost a branch no allocator. Controls must go wrong."""

from harness.graphs import double
from harness.insides import leases_of
from harness.scenes import Scene, over_seeds

from handlepool.regions.fork import Fork


def an_output_takes_a_freed_block(scene):
    """The caller's stream still reads a block that was freed, and that a graph function's output takes."""
    y, z, x = scene.array(), scene.array(50), scene.array(1)
    address = scene.driver.array_pointer(x)
    scene.put(y, lambda value: value + 1, x)
    del x
    with scene.states.fork() as fork:
        output = fork.run(double, z)
    assert scene.driver.array_pointer(output) == address
    return scene.read(y), scene.read(output)


def test_g8_the_output_of_a_graph_function_is_allocated_before_the_edge_that_starts_the_branch():
    assert set(over_seeds(an_output_takes_a_freed_block, seeds=range(50))) == {(2, 100)}


def test_g8_control_a_graph_function_without_the_start_wait():
    def make(scene):
        scene.driver.leave_out = lambda pointer: pointer != scene.stream.ptr

    assert set(over_seeds(an_output_takes_a_freed_block, seeds=range(50), make=make)) > {(2, 100)}


def test_g8_a_graph_function_in_a_branch_costs_two_events_and_two_waits_and_no_allocator():
    with Scene() as scene:
        x = scene.array(1)
        scene.states.map(double, [x])
        scene.driver.calls.clear()
        scene.states.map(double, [x])
        calls = scene.driver.calls
        assert (calls["record_event"], calls["wait_event"]) == (2, 2)
        assert not calls["region_allocator"] + calls["swap_allocator"] + calls["push_stream"]


def a_graph_functions_argument_is_dropped(scene):
    with scene.states.fork() as fork:
        x = scene.array(1)
        y = fork.run(double, x)
        del x
        scene.array(100)
    return scene.read(y)


def test_g8_the_arguments_of_a_graph_function_are_kept():
    assert set(over_seeds(a_graph_functions_argument_is_dropped, seeds=range(50))) == {2}


def forgetful(fork, enter=Fork.__enter__):
    """Enter a fork that keeps nothing."""
    leases_of(enter(fork)).keep = lambda _: None
    return fork


def test_g8_control_a_graph_function_whose_arguments_are_not_kept(monkeypatch):
    monkeypatch.setattr(Fork, "__enter__", forgetful)
    assert 200 in over_seeds(a_graph_functions_argument_is_dropped, seeds=range(50), control=True)


def test_g8_the_dropped_output_of_a_graph_function_is_kept():
    def scenario(scene):
        y, z = scene.array(3), scene.array(50)
        with scene.states.fork() as fork:
            fork.run(double, z)
            x = scene.array(1)  # would be the output's block
            fork.run(scene.put, y, lambda value: value + 1, x)
        return scene.read(y)

    assert set(over_seeds(scenario, seeds=range(50))) == {2}
