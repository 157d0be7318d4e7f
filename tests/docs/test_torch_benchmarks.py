"""The scripts that time torch's models run one network a process, go on after failures, and say why figures are missing."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import json, sys
network = sys.argv[-1]
if network == "ends":
    sys.exit(3)
print("a line of a library")
print(json.dumps({"unavailable": "no such package"} if network == "missing" else {"network": network, "ways": sys.argv[1:3]}))
"""


@pytest.fixture
def module(monkeypatch):
    """A script as a module: ``module(name)``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run_each(module, script, path, names, monkeypatch, seconds=60.0):
    shown = []
    monkeypatch.setattr(sys, "argv", ["script", "--ways", "eager"])
    options = SimpleNamespace(json=path, seconds=seconds)
    keys = {name: f"{name}, batch 1" for name in names}
    module("torch_ways").run_each(script, options, keys, lambda network, key, found: shown.append((network, key, found)))
    return shown


def test_a_second_call_leaves_out_the_networks_that_have_figures(module, script, tmp_path, monkeypatch, capsys):
    path = tmp_path / "figures.json"
    first = run_each(module, script, path, ["a"], monkeypatch)
    assert first == [("a", "a, batch 1", {"network": "a", "ways": ["--ways", "eager"]})]
    second = run_each(module, script, path, ["a", "b"], monkeypatch)
    assert [network for network, _, _ in second] == ["b"]
    assert json.loads(path.read_text()).keys() == {"a, batch 1", "b, batch 1"}
    assert "a, batch 1 has figures" in capsys.readouterr().out


def test_a_network_without_figures_is_a_line_and_the_others_go_on(module, script, tmp_path, monkeypatch, capsys):
    path = tmp_path / "figures.json"
    shown = run_each(module, script, path, ["ends", "missing", "a"], monkeypatch)
    assert [network for network, _, _ in shown] == ["a"]
    assert json.loads(path.read_text()).keys() == {"a, batch 1"}
    out = capsys.readouterr().out
    assert "ends, batch 1: the process ended with 3" in out
    assert "missing, batch 1: not available: no such package" in out


def test_a_network_that_takes_too_long_is_a_line(module, script, tmp_path, monkeypatch, capsys):
    def run(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_each(module, script, tmp_path / "figures.json", ["lasts"], monkeypatch, seconds=1.0) == []
    assert "lasts, batch 1: no figures after 1 seconds" in capsys.readouterr().out


def figures(**device):
    """Figures as a process prints them."""
    found = {"gpu": "a GPU", "torch": "2", "dtype": "torch.float16", "width": {"nodes": 7, "width": 2.5}, "report": ""}
    return found | {
        "device": device,
        "clock": {way: 2 * time for way, time in device.items()},
        "error": dict.fromkeys(device, 1e-3),
        "seconds": dict.fromkeys(device, 1.0),
        "memory": dict.fromkeys(device, 10),
        "failed": {"vmap": "RuntimeError: unlike"},
    }


def test_a_workload_is_compared_with_its_peer(module, capsys):
    workloads = module("workloads")
    times = {"inductor": 100.0, "streams": 50.0, "ours": 42.0, "replay": 41.0, "together": 40.0, "dynamo": 45.0}
    workloads.show("cameras", "cameras", figures(**times))
    out = capsys.readouterr().out
    assert "7 nodes, width 2.50" in out
    assert "vmap" in out
    assert "together takes 0.80 of streams of at most 0.8" in out
    workloads.show("hrnet_w18", "hrnet_w18", figures(**times))
    assert "together takes 0.40 of inductor of at most 0.55" in capsys.readouterr().out
    workloads.show("pyramid", "pyramid", figures(graph=10.0, replay=5.0))
    assert "takes" not in capsys.readouterr().out


def test_a_network_of_torchvision_is_compared_with_its_bounds(module, capsys):
    module("torch_networks").show("googlenet", "googlenet, batch 1", figures(inductor=100.0, ours=70.0, replay=50.0))
    assert "device 0.50 of at most 0.6; clock 0.70 of at most 0.7" in capsys.readouterr().out


def test_each_workload_of_the_bounds_exists(module):
    workloads = module("workloads")
    assert {*workloads.BOUNDS} <= {*workloads.WORKLOADS}
    assert {*workloads.OURS} <= {*module("torch_ways").WAYS}


def test_the_gain_is_drawn_against_the_width(module, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, and it is not installed")
    draw_widths = module("draw_widths")
    path = tmp_path / "workloads.json"
    known = {name: figures(inductor=100.0, replay=time) for name, time in (("wide", 40.0), ("chain, batch 1", 100.0))}
    known["chain, batch 1"]["width"]["width"] = 1.0
    known |= {"untimed": figures(inductor=100.0), "unmeasured": figures(inductor=1.0, replay=1.0) | {"width": {}}}
    path.write_text(json.dumps(known))
    assert draw_widths.points([known]) == [("chain", 1.0, 1.0), ("wide", 2.5, 2.5)]
    assert draw_widths.claim(draw_widths.points([known])) == (
        "Beside Inductor, wide networks run 2.50 to 2.50 times, chains 1.00 to 1.00 times as fast"
    )
    draw_widths.main([str(path)])
    assert sorted(capsys.readouterr().out.split()) == [str(path.with_name(f"widths-{form}.png")) for form in ("dark", "light")]


def test_no_picture_is_drawn_without_figures(module, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, and it is not installed")
    path = tmp_path / "workloads.json"
    with pytest.raises(SystemExit):
        module("draw_widths").main([str(path)])
    path.write_text(json.dumps({"untimed": figures(inductor=100.0)}))
    with pytest.raises(SystemExit):
        module("draw_widths").main([str(path)])
    assert "no network has a width" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]


def test_a_workload_that_cannot_be_made_has_the_reason(module, monkeypatch):
    workloads = module("workloads")

    def missing(*_):
        raise ImportError("no package of that name")

    monkeypatch.setattr(workloads, "made", missing)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert workloads.figures("cameras", None) == {"unavailable": "ImportError: no package of that name"}
