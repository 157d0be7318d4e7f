"""Other weights and other plans: what replays see of them, and that no graph is made for new values."""

import numpy as np
import pytest
from harness.graphs import convolution as conv
from harness.insides import plans_of
from harness.scenes import Scene
from harness.timed_driver import Fake, TimedDriver

import handlepool


@pytest.fixture
def scene():
    with Scene(TimedDriver([Fake(alone=20), Fake(alone=10)], check_order=True), default=True) as scene:
        yield scene
        assert not scene.driver.order.found


def random(scene, seed, shape=(4, 4, 3, 3)):
    return scene.driver.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def read(scene, program):
    program.replay()
    return scene.driver.asnumpy(program.outputs)


@pytest.fixture
def made(scene, monkeypatch):
    """How often the driver was asked for what makes graphs."""
    scene.driver.calls.clear()
    return scene.driver.calls


def as_an_argument(scene, program, w, new):
    program.update(None, new)


def in_place(scene, program, w, new):
    scene.driver.copy(w, new)


@pytest.mark.parametrize("lanes", [None, 4])
@pytest.mark.parametrize("change", [as_an_argument, in_place])
def test_new_values_of_a_weight_are_seen_and_no_graph_is_made_for_them(scene, made, change, lanes):
    x, w, new = random(scene, 1, (1, 4, 6, 6)), random(scene, 2), random(scene, 3)
    right = [scene.driver.asnumpy(conv(conv(x, each), each)) for each in (w, new)]
    network = (lambda x, w: conv(conv(x, w), w)) if change is as_an_argument else (lambda x: conv(conv(x, w), w))
    with handlepool.record(network, x, *([w] if change is as_an_argument else []), lanes=lanes) as program:
        assert (read(scene, program) == right[0]).all()
        made.clear()
        change(scene, program, w, new)
        assert (read(scene, program) == right[1]).all()
        assert made["launch_graph"] == 1
        assert not made.keys() & {"begin_capture", "arrange_graph", "instantiate_graph"}


def test_another_array_under_the_same_name_is_not_seen(scene):
    x, held = random(scene, 1, (1, 4, 6, 6)), [random(scene, 2)]
    right = scene.driver.asnumpy(conv(x, held[0]))
    with handlepool.record(lambda x: conv(x, held[0]), x) as program:
        held[0] = random(scene, 3)
        assert (read(scene, program) == right).all()


def test_a_plan_that_was_chosen_since_is_for_calls_and_for_recordings_from_then_on(scene):
    x, w = random(scene, 1, (1, 4, 6, 6)), random(scene, 2)
    right = scene.driver.asnumpy(conv(x, w))

    def recorded():
        program = handlepool.record(conv, x, w)
        (plan,) = plans_of(program)
        return program, plan.engine

    first, engine = recorded()
    conv.tune(x, w)
    second, another = recorded()
    assert (engine, another, conv.plan_for(x, w).engine) == ("engine 0", "engine 1", "engine 1")
    for program in (first, second):
        assert (read(scene, program) == right).all()
        program.close()
