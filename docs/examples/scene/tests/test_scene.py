"""The three networks have their own results, and lanes of their own. No GPU is needed."""

import numpy as np
import pytest
import scene

import handlepool

pytestmark = pytest.mark.usefixtures("handlepool_leak_check")


def image(rng, side=16):
    return handlepool.asarray(rng.standard_normal((1, 3, side, side), dtype=np.float32))


def flat(values):
    """Return all results as arrays of NumPy."""
    if not isinstance(values, (list, tuple)):
        return [handlepool.asnumpy(values)]
    return [each for value in values for each in flat(value)]


def test_a_program_has_the_results_of_the_networks_one_after_the_other(handlepool_host_pool, handlepool_no_gpu):
    rng = np.random.default_rng(0)
    recorded = scene.together(rng)
    for _ in range(3):
        x = image(rng)
        found = flat(recorded(x))
        for got, right in zip(found, flat(recorded.__wrapped__(x)), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    assert [each.shape for each in found[:2]] == [(1, 20, 4, 4), (1, 4, 4, 4)]
    assert [each.shape for each in found[-2:]] == [(1, 8, 16, 16), (1, 1, 16, 16)]


def test_no_network_waits_for_another_one(handlepool_host_pool):
    rng = np.random.default_rng(0)
    steps = scene.together(rng).program(image(rng)).explain().steps
    owners = [scene.network_of(step) for step in steps]
    assert {*owners} == {scene.detector, scene.segmenter, scene.depth}
    lanes = {net: {step.lane for step, owner in zip(steps, owners, strict=True) if owner is net} for net in {*owners}}
    for step, owner in zip(steps, owners, strict=True):
        assert all(owners[before] is owner for before in step.after)
    assert len({min(each) for each in lanes.values()}) == 3


def test_the_nodes_are_drawn(handlepool_host_pool, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, and it is not installed")
    rng = np.random.default_rng(0)
    found = scene.together(rng).program(image(rng)).explain(measure=True)
    scene.draw(found, tmp_path / "scene.png", "host driver")
    assert (tmp_path / "scene.png").stat().st_size > 1000
