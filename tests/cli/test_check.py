"""``handlepool check`` passes here, finds planted faults, and writes a bundle."""

import json
from argparse import Namespace

import numpy as np
import pytest

from handlepool import drivers
from handlepool.cli import check
from handlepool.pool.pool import HandlePool


def run(tmp_path, driver="host"):
    bundle = tmp_path / "bundle.json"
    status = check.main(Namespace(driver=driver, bundle=bundle))
    return status, json.loads(bundle.read_text(encoding="utf-8"))


def test_every_check_passes_and_is_in_the_bundle(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    status, bundle = run(tmp_path)
    assert status == 0
    assert [each["name"] for each in bundle["checks"] if each["good"]] == ["driver", "handles", "order", "recorded", "scratch"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["ok", each["name"]] for each in bundle["checks"]]
    assert bundle["info"]["packages"]["numpy"] == np.__version__
    assert bundle["stats"]["handles_created"] > 0
    assert str(tmp_path) not in json.dumps(bundle)


@pytest.mark.gpu
def test_every_check_passes_on_a_gpu(tmp_path):
    if problem := drivers.available("cuda"):
        pytest.skip(f"needs an NVIDIA GPU: {problem}")
    status, bundle = run(tmp_path, "cuda")
    assert status == 0, bundle["checks"]


def test_a_driver_that_is_missing_is_the_only_line(tmp_path, capsys, no_gpu):
    status, bundle = run(tmp_path, "cuda")
    assert status == 1
    assert [each["name"] for each in bundle["checks"]] == ["driver"]
    assert "there is no GPU" in bundle["checks"][0]["said"]
    assert "Traceback" in bundle["checks"][0]["trace"]


def failed(bundle):
    return {each["name"]: each["said"] for each in bundle["checks"] if not each["good"]}


@pytest.fixture
def spoil(monkeypatch):
    """Replace a method of the pool that is checked: ``spoil("get_handle", make)``, where make takes the pool."""

    def spoil(name, make):
        def spoiled(**options):
            pool = HandlePool(**options)
            setattr(pool, name, make(pool))
            return pool

        monkeypatch.setattr(check, "HandlePool", spoiled)

    return spoil


def test_a_shared_handle_is_found(tmp_path, spoil):
    def shared(pool):
        handle = pool.get_handle()
        return lambda stream=None: handle

    spoil("get_handle", shared)
    status, bundle = run(tmp_path)
    assert status == 1
    assert "had only 1 handles" in failed(bundle)["handles"]


def test_shared_scratch_is_found(tmp_path, spoil):
    def shared(pool):
        scratch = pool.get_workspace(1 << 20)
        return lambda nbytes, stream=None: scratch

    spoil("get_workspace", shared)
    status, bundle = run(tmp_path)
    assert status == 1
    assert "scratch" in failed(bundle)


@pytest.mark.parametrize("name", ["driver", "handles", "order", "recorded", "scratch"])
def test_a_wrong_result_is_found(name, tmp_path, monkeypatch):
    compared = check._compare

    def spoiled(driver, where, *pairs):
        compared(driver, where, *[(found, expected + 1e-2 * np.abs(expected).max()) for found, expected in pairs])

    def when(check_of, *arguments):
        monkeypatch.setattr(check, "_compare", spoiled)
        try:
            return check_of(*arguments)
        finally:
            monkeypatch.setattr(check, "_compare", compared)

    if name == "driver":
        monkeypatch.setattr(check, "_driver", lambda *a, known=check._driver: when(known, *a))
    else:
        known = check._CHECKS[name]
        monkeypatch.setitem(check._CHECKS, name, lambda pool: when(known, pool))
    status, bundle = run(tmp_path)
    assert status == 1
    assert list(failed(bundle)) == [name]
    assert "relative error" in failed(bundle)[name]
