"""Every benchmark script runs on the host driver and writes what it found; its figures say nothing there."""

import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.process import as_default

import handlepool
from handlepool import drivers

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("acquire", "launch", "forks", "order", "overlap", "record", "wrong", "memory", "networks")
"""Those whose results are drawn."""
NETWORKS = ("modern_ops", "operations", "elementwise", "plans")
DRAWN = (*(name for name in SCRIPTS if name != "order"), "devices", "serving")  # a table is all that there is to see of order


def run(name, *arguments, folder=FOLDER, **environment):
    """Run a script as a person would, from a checkout."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(folder / f"{name}.py"), *map(str, arguments)],
        env={**os.environ, "HANDLEPOOL_DRIVER": "host", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def refused(done, says):
    """An end with one line that says why, and nothing run before it."""
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def module(monkeypatch):
    """A script as a module: ``module(name)``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # or the import would set it for good
    return importlib.import_module


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """What a script wrote: ``written(name)``. All processes of a test run share the files."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "results"
    folder.mkdir(exist_ok=True)

    def results(name):
        path = folder / f"{name}.json"
        # A script runs once. A process that needs its file meanwhile waits for the lock.
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = folder / f"{name}.unfinished"
                done = run(name, "--quick", "--driver", "host", "--json", unfinished)
                assert done.returncode == 0, done.stderr
                assert done.stderr == ""  # no progress in a pipe
                # Other tests read the folder, and see whole files alone.
                unfinished.rename(path)
        return path, json.loads(path.read_text())

    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, *NETWORKS, "devices", "recorded_host", "device_serving", "serving", "sizing"])
def test_a_script_runs_without_a_gpu_and_writes_what_it_found(name, written):
    _, results = written(name)
    assert results["benchmark"] == name
    assert results["conditions"]["driver"] == "host"
    assert results["conditions"]["packages"]["handlepool"]
    for cases in results["times"].values():
        for times in cases.values():
            assert times["q1"] <= times["median"] <= times["q3"]
    assert results["times"] or name in results
    assert all(ratio["kept"] is None for ratio in results["ratios"].values())  # not judged


@pytest.mark.slow
def test_a_shared_workspace_gives_wrong_results_on_the_host_driver_too(written):
    _, results = written("wrong")
    (counts,) = results["wrong"].values()
    assert counts["one workspace for all"] > 0
    assert counts["a workspace each"] == counts["handlepool's fork"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_every_script_has_a_picture_in_two_forms(name, written):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, and it is not installed")
    path, _ = written(name)
    done = run("draw", path.parent, "--only", name)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [str(path.with_name(f"{name}-{form}.png")) for form in ("dark", "light")]


def test_a_folder_without_results_is_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, and it is not installed")
    refused(run("draw", tmp_path), "has none of")


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/when-it-pays.md", "README.md"])
def test_the_pages_have_the_figures_that_were_committed(page):
    done = run("tables", FOLDER / "results" / "h200", FOLDER.parent / page, "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run benchmarks/tables.py"


def test_the_page_of_several_gpus_has_the_figures_of_four():
    done = run("tables", FOLDER / "results" / "h200-x4", FOLDER.parent / "docs" / "spreading.md", "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run benchmarks/tables.py"


def test_pages_whose_figures_are_missing_are_an_error(tmp_path):
    page = FOLDER.parent / "docs" / "performance.md"
    refused(run("tables", tmp_path / "nowhere", page, "--check"), "acquire.json")
    refused(run("tables", tmp_path / "nowhere", page), "acquire.json")
    for path in (FOLDER / "results" / "h200").glob("*.json"):
        if path.name != "memory.json":
            shutil.copy(path, tmp_path)
    refused(run("tables", tmp_path, page, "--check"), "memory.json")


@pytest.mark.slow
def test_the_pages_can_be_filled(written, tmp_path):
    for name in SCRIPTS:
        folder = written(name)[0].parent
    for page in ("performance", "when-it-pays"):
        copy = tmp_path / f"{page}.md"
        copy.write_text((FOLDER.parent / "docs" / copy.name).read_text(encoding="utf-8"), encoding="utf-8")
    pages = sorted(tmp_path.glob("*.md"))
    assert run("tables", folder, *pages, "--check").returncode == 1
    assert run("tables", folder, *pages).returncode == 0
    assert run("tables", folder, *pages, "--check").returncode == 0
    assert all("| median |" in page.read_text(encoding="utf-8") or "| side streams |" in page.read_text() for page in pages)


@pytest.mark.slow
def test_all_runs_a_selection_and_says_which_bounds_are_kept(tmp_path):
    (tmp_path / "captures.json").write_text("{}")
    done = run("all", tmp_path, "--only", "acquire", "lifetimes", "exits", "captures", "--quick", "--driver", "host")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "== captures: on a GPU alone" in done.stdout
    verdicts = done.stdout.partition("\nbound ")[2].splitlines()[1:7]
    assert [line.partition(":")[0] for line in verdicts] == [*["acquire"] * 4, "lifetimes", "exits"]
    assert all(line.endswith(("not judged", "  kept")) for line in verdicts)
    assert all((tmp_path / f"{name}.json").exists() for name in ("acquire", "lifetimes", "exits"))


@pytest.mark.parametrize(("count", "bounds"), [(2, (1.9, 1.8, 1.8)), (4, (3.7, 3.4, 3.4)), (8, (7.2, 6.0, 6.0))])
def test_what_several_devices_must_give(module, count, bounds):
    devices, names = module("devices"), ("spread", "spread, host to host", "dask, host to host")
    for copies, expected in ((1.0, bounds), (1e9, (bounds[0], None, None))):  # where the bus is too slow there is no bound
        ratios = module("common").Ratios()
        samples = {devices.ONE: [100.0], devices.BUS: [copies], **{name: [100.0 / count] for name in names}}
        devices.compare(ratios, samples, 20, count)
        found = [bound and round(1 / bound, 6) for _, bound in ratios.found.values()]
        assert found == [*expected]


@pytest.fixture
def devices_on(module, make_driver, monkeypatch, tmp_path):
    """`devices.py` on a host driver of three devices: ``devices_on(*options)`` gives the exit status and the results."""
    devices, driver = module("devices"), make_driver(devices=3, memory=1 << 26, check_order=False)

    def run(*options):
        path = tmp_path / "devices.json"
        quick = ["--quick", "--driver", "host", "--way", "recorded", "spread", "--json", str(path), *options]
        monkeypatch.setattr(sys, "argv", ["devices.py", *quick])
        with handlepool.HandlePool(driver=driver) as pool, as_default(pool):
            monkeypatch.setattr(pool, "close", lambda: None)
            status = devices.main()
            driver.fail_at(0)
            monkeypatch.undo()
        return status, json.loads(path.read_text())

    return SimpleNamespace(run=run, driver=driver, module=devices)


def test_a_device_that_is_full_is_left_out_which_is_said(devices_on, capsys):
    with devices_on.driver.device(1):
        full = devices_on.driver.empty((devices_on.driver.memory_info()[0] - 500,), (1,), np.dtype("u1"))
    status, results = devices_on.run("--items", "0.2")
    del full
    assert (status, results["devices"]) == (1, 2)
    assert "out of memory" in results["left_out"]["1"]
    assert "device 1 is left out: " in capsys.readouterr().out
    assert "spread / one device, recorded, 0.2 ms, 2 devices" in results["ratios"]


def test_a_device_that_is_taken_away_ends_a_length_and_the_next_one_goes_on_without_it(devices_on, monkeypatch):
    sampled, taken = devices_on.module.sampled, []

    def sample(cases, repeats):
        taken.append(len(cases))
        if len(taken) == 2:  # of the first length that is timed
            devices_on.driver.lose_device(2)
        return sampled(cases, repeats)

    monkeypatch.setattr(devices_on.module, "sampled", sample)
    status, results = devices_on.run("--items", "0.2", "0.3")
    assert status == 1
    assert "device 2 was taken away" in results["left_out"]["2"]
    assert [line.partition(",")[0] for line in results["not_timed"]] == ["items of 0.2 ms"]
    assert "device 2 was taken away" in results["not_timed"][0]
    assert "spread / one device, recorded, 0.3 ms, 2 devices" in results["ratios"]


def test_a_process_that_ends_is_named(module):
    devices = module("devices")
    here, there = devices.multiprocessing.Pipe()
    there.close()
    processes = object.__new__(devices.Processes)
    processes.devices, processes.pipes = [3], [here]
    with pytest.raises(ChildProcessError, match="process of device 3 has ended"):
        processes._received()


def test_a_client_that_fails_is_named(module, make_pool, make_default):
    serving, pool = module("device_serving"), make_pool()
    make_default(pool)
    options = SimpleNamespace(network="ensemble", side=9, thin=32, dtype="float32", threads=2)
    server = serving.Server(pool.driver, [0, 1], options)
    assert len(server.sample(0.01)) >= 4
    pool.driver.lose_device(1)
    with pytest.raises(SystemExit, match=r"a client of device 1 failed: .*device 1 was taken away"):
        server.sample(0.01)
    pool.driver.fail_at(0)
    server.close()
    serving.check("same", server.scores, server.scores[0])
    with pytest.raises(SystemExit, match=r"other: relative error 1\.0e\+00"):
        serving.check("other", [2 * server.scores[0]], server.scores[0])


@pytest.mark.slow
def test_all_devices_goes_on_after_a_part_that_is_cut_off(tmp_path):
    done = run("all_devices", tmp_path, "--only", "sizing", "device_serving", "--quick", "--driver", "host", "--limit", "9.5")
    assert done.returncode == 1
    assert "sizing: cut off after" in done.stdout
    assert any(line.split() == ["device_serving", "not", "begun", "0"] for line in done.stdout.splitlines())
    assert "sizing.py" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_all_devices_writes_what_its_parts_found(tmp_path):
    done = run("all_devices", tmp_path, "--only", "device_serving", "--quick", "--driver", "host")
    assert done.returncode == 0, done.stdout
    assert "a process for each device" in done.stdout
    assert json.loads((tmp_path / "device_serving.json").read_text())["served"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_pairs_are_all_and_disjoint_in_a_round(count, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parent / "tests" / "gpu"))
    rounds = importlib.import_module("pairs").rounds(range(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({device for pair in pairs for device in pair}) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.slow
def test_handles_of_each_device_are_as_many_as_the_formula_says(written):
    _, results = written("sizing")
    assert len(results["sizes"]) == 4
    for found in results["sizes"].values():
        assert {each["device"] for each in found} == {0, 1}
        assert all(each["handles"] == each["formula"] > 0 for each in found)


@pytest.mark.slow
def test_figures_of_several_gpus_fill_a_page_by_themselves(written, tmp_path):
    folder = written("devices")[0].parent
    for name in ("device_serving", "sizing"):
        written(name)
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- figures: {name} -->\n<!-- end -->\n" for name in ("devices", "device_serving", "sizing")))
    shutil.copy(folder / "devices.json", tmp_path)
    refused(run("tables", tmp_path, page, "--check"), "device_serving.json")
    assert run("tables", folder, page).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "| 2 devices, times the items of one | 0.2 ms" in text
    assert "| one process for all devices |" in text
    assert "| one process, every thread uses every device | 8 | 8 |" in text
    assert run("tables", folder, page, "--check").returncode == 0


@pytest.mark.slow
def test_all_says_what_failed_and_goes_on(tmp_path):
    done = run("all", tmp_path, "--only", "exits", "acquire", "--quick", "--driver", "host", "--limit", "0.01")
    assert done.returncode == 1
    assert done.stderr.startswith("failed: exits (more than 0.01 seconds), acquire (more than 0.01 seconds)")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("captures", "a capture of a GPU's stream is needed"),
        ("tune", "on a GPU alone"),
        ("networks_jax", "JAX is compared on a GPU alone"),
    ],
)
def test_a_script_for_gpus_alone_says_so(name, says):
    refused(run(name, "--quick", "--driver", "host"), says)


@pytest.mark.slow
def test_operations_are_those_of_the_networks(written):
    _, results = written("operations")
    assert {name.split()[0] for name in results["counts"]["googlenet"]} == {
        "add", "avg_pool2d", "concat", "conv2d", "linear", "max_pool2d", "mean2d"
    }  # fmt: skip
    assert {name.split()[0] for name in results["counts"]["mobilenet_v3_large"]} == {"add", "conv2d", "mean2d"}
    assert len(results["times"]) == sum(map(len, results["counts"].values()))


def test_own_kernels_are_bounded_on_the_sizes_of_googlenet_and_their_sum_by_how_often_they_occur(module):
    operations = module("operations")
    options = SimpleNamespace(batch=1, side=224, thin=1, dtype="float16", repeats=1, most=None)
    options.operation = [*operations.OWN_KERNELS, "conv2d", "linear"]

    def bounds(network, **given):
        ratios = module("common").Ratios()
        found = {}
        for operation, count, ours, torchs in (("concat", 3, 1.0, 2.0), ("mean2d", 1, 9.0, 4.0), ("conv2d", 5, 7.0, 7.0)):
            call = operations.Call(operation, (), {}, count)
            found[operation] = call, {operations.OURS: [ours], operations.TORCH_GRAPH: [torchs]}
        operations.compare(ratios, network, found, SimpleNamespace(**{**vars(options), **given}))
        return {name.rpartition(", ")[2]: (round(values[0], 3), bound) for name, (values, bound) in ratios.found.items()}

    assert bounds("googlenet") == {
        "concat": (0.5, 1.0),
        "mean2d": (2.25, 1.0),
        "conv2d": (1.0, None),
        "the sum of own kernels": (1.2, 0.9),
    }
    assert bounds("mobilenet_v3_large")["conv2d"] == (1.0, 1.0)
    assert {bound for _, bound in bounds("googlenet", side=40).values()} == {None}
    assert bounds("googlenet", most=1)["the sum of own kernels"] == (1.2, None)


@pytest.mark.slow
def test_a_network_with_a_fork_is_compared_with_one_stream(written):
    _, results = written("networks")
    assert "one fork, 2 states / one stream, googlenet, wall" in results["ratios"]
    assert "recorded, one fork, 2 states / recorded, one stream, ensemble, device" in results["ratios"]


@pytest.fixture
def small_network(module, make_pool, make_default):
    """A network with few channels and small images: ``small_network(name)``."""
    pool = make_pool()
    make_default(pool)

    def make(name):
        dtype = "float16" if name == "vit_b_16" else "float32"  # attention takes no float32
        return module("networks").Network(pool.driver, name, SimpleNamespace(dtype=dtype, thin=32, batch=1, side=33))

    return make


FIRST_LAYERS = dict.fromkeys(("googlenet", "squeezenet1_1", "resnet18", "resnet50", "inception_v3", "googlenet_stacked"), "1")
FIRST_LAYERS |= {"ensemble": "0.0", "unet": "0.1"}
MODERN_LAYERS = dict.fromkeys(("efficientnet_b0", "mobilenet_v3_large", "convnext_tiny", "shufflenet_v2"), "stem")
MODERN_LAYERS |= {"vit_b_16": "patches", "unet_bilinear": "0.1"}
EVERY = FIRST_LAYERS | MODERN_LAYERS


@pytest.mark.parametrize("name", EVERY)
def test_a_network_is_right_eagerly_and_recorded_with_lanes(name, small_network):
    network = small_network(name)
    network.checked("right", lambda: network.run(network.p, network.x))
    for lanes in (1, 8):
        with handlepool.record(network.run, network.p, network.x, lanes=lanes) as program:
            network.checked("right", program.replay, lambda program=program: program.outputs)


def test_every_network_is_tested(module):
    assert set(module("nets").NETWORKS) == set(FIRST_LAYERS)
    assert set(module("nets").MODERN) == set(MODERN_LAYERS)


@pytest.mark.parametrize(("name", "layer"), EVERY.items())
def test_control_a_network_with_other_weights_is_stopped(name, layer, small_network):
    network = small_network(name)
    w, _ = network.p.values[layer]
    network.p.values[layer] = w, np.full(len(w), 9, w.dtype)
    network.p = network.p.elsewhere(network.driver.asarray)
    with pytest.raises(SystemExit, match="wrong: relative error"):
        network.checked("wrong", lambda: network.run(network.p, network.x))


@pytest.mark.parametrize("name", EVERY)
def test_a_network_of_torch_is_right(name, small_network, module):
    torch = pytest.importorskip("torch")
    network = small_network(name)
    p = network.p.elsewhere(lambda values: torch.from_numpy(np.ascontiguousarray(values)))
    x = torch.from_numpy(np.ascontiguousarray(network.driver.asnumpy(network.x)))
    eager = partial(network.run, p, x, module("nets.kinds").Torch(torch))
    ways = eager, partial(module("compiled").module_of(torch, network.run, p), x)
    for way in ways:
        with torch.no_grad():
            network.checked("torch", lambda way=way: [y.numpy() for y in module("networks").several(way())])


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_a_network_of_jax_is_right(name, small_network, module):
    jax = pytest.importorskip("jax")
    network = small_network(name)
    network.checked("JAX", *module("networks_jax").compiled(jax, network))


def test_a_peer_that_fails_is_a_line_and_what_is_ours_is_an_end(small_network, module):
    networks, network = module("networks"), small_network("ensemble")

    def fails():
        raise ValueError("no kernel\nand much more")

    def wrong():
        return lambda: [np.zeros_like(network.right)][0], None

    network.add("compiler", fails, networks.ANY)
    network.add("careless", wrong, networks.ANY)
    assert network.skipped[0] == "ensemble, compiler: ValueError: no kernel"
    assert network.skipped[1].startswith("ensemble, careless: SystemExit: careless: relative error 1.0e+00")
    assert not network.cases
    with pytest.raises(ValueError, match="no kernel"):
        network.add("ours", fails)
    with pytest.raises(SystemExit, match="ours: relative error"):
        network.add("ours", wrong, (handlepool.HandlePoolError,))


def test_networks_are_written_one_after_the_other(module, tmp_path, monkeypatch, make_default):
    networks, path = module("networks"), tmp_path / "networks.json"
    monkeypatch.setitem(networks.NETWORKS, "unet", lambda p, x, ops=None: 1 / 0)
    quick = ["--quick", "--driver", "host", "--network", "ensemble", "unet", "--way", "lanes", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["networks.py", *quick])
    make_default(None)
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
    with pytest.raises(ZeroDivisionError):
        networks.main()
    assert "ensemble, microseconds, wall" in json.loads(path.read_text())["times"]


def test_tuned_networks_are_bounded_by_their_peers_at_full_size(module):
    networks = module("networks")
    options = SimpleNamespace(batch=1, side=224, thin=1, dtype="float16", states=[4], lanes=[1, 4], goal="clock")
    names = ("recorded, 1 lane, tuned plans", "recorded, tuned, tuned plans", "recorded, tuned", "Inductor", "torch")
    samples = {clock: {name: [1.0] for name in names} for clock in ("host", "device", "wall")}

    def bounds(network, **given):
        ratios = module("common").Ratios()
        found = SimpleNamespace(name=network, seconds={}, errors=dict.fromkeys(names, 1e-3))
        networks.compare(ratios, found, samples, SimpleNamespace(**{**vars(options), **given}))
        return [(name.partition(f", {network}")[0], bound) for name, (_, bound) in ratios.found.items() if bound]

    ours, one = "recorded, tuned, tuned plans", "recorded, tuned, tuned plans / recorded, 1 lane, tuned plans"
    error = f"error of {ours} / torch's", 1.5
    assert bounds("googlenet") == [(f"{ours} / Inductor", 0.66), (one, 1.03), (f"{ours} / Inductor", 0.7), (one, 1.03), error]
    assert bounds("googlenet", batch=8) == [(one, 1.03), (one, 1.03), error]
    assert bounds("googlenet", side=40) == []
    assert bounds("ensemble") == [(one, 0.25), (one, 1.03), error]


@pytest.fixture
def networks_of(module, tmp_path):
    """Files as the scripts write them: ``networks_of(script, batch, number, **microseconds)``, each name a case of googlenet."""

    def written(script, batch, number, **cases):
        found = {name.replace("_", " "): dict.fromkeys(("median", "q1", "q3", "min"), us) for name, us in cases.items()}
        results = {"benchmark": script, "repeats": 2, "batch": batch, "dtype": "float16", "ratios": {}}
        results["times"] = {f"googlenet, microseconds, {clock}": found for clock in ("device", "wall")}
        results["conditions"] = {"packages": {"handlepool": "1"}, "python": "3", "date": "today"}
        (tmp_path / f"{script}-{number}.json").write_text(json.dumps(results))
        return module("network_figures").gathered(tmp_path, script)

    return written


def test_what_loses_is_said(networks_of):
    ours = {"recorded, tuned": 10.0, "recorded, tuned, tuned plans": 8.0, "recorded, 4 lanes": 5.0}
    (networks,) = networks_of("networks", 1, 1, **ours, Inductor=7.0, torch=90.0)
    assert networks.rows(["tuned", "torch", "Inductor"]) == [["googlenet", "8 (8)", "90 (90)", "**7 (7)**"]]
    assert networks.losses() == (
        "Quicker than ours: Inductor on googlenet on the device (0.88 of our time), "
        "Inductor on googlenet by the clock (0.88 of our time)."
    )
    (networks,) = networks_of("networks", 1, 2, **ours, Inductor=9.0)  # a later file replaces what was there
    assert networks.losses() == "None of these is quicker than ours: Inductor."


def test_networks_without_tuning_stand_with_the_best_number_of_lanes(networks_of):
    *_, eight = networks_of("networks", 8, 1, **{"recorded, 4 lanes": 5.0, "recorded, 8 lanes": 6.0, "recorded, 1 lanes": 9.0})
    assert eight.columns() == ["one lane", "tuned"]
    assert eight.rows(["one lane", "tuned"]) == [["googlenet", "9 (9)", "**5 (5)**, 4 lanes"]]


def test_jax_is_told_beside_those_of_the_same_batch_alone(networks_of, module, tmp_path):
    networks_of("networks_jax", 8, 1, JAX=3.0)
    for number, cell in ((8, ""), (1, " **4 (4)** |")):
        jax = networks_of("networks_jax", number, 2, JAX=4.0)
        text = module("tables").networks_short(networks_of("networks", 1, 1, torch_graph=7.0, **{"recorded, tuned": 5.0}), jax)
        ours = "5 (5)" if cell else "**5 (5)**"
        assert text.splitlines()[2] == f"| googlenet | {ours} | 7 (7) |{cell}"


def test_there_is_a_picture_for_each_batch_with_the_networks_of_all_files(networks_of, module, tmp_path):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib, and it is not installed")
    networks_of("networks", 1, 1, torch=50.0, torch_graph=7.0, **{"recorded, tuned": 5.0})
    networks_of("networks", 8, 2, torch=50.0)
    networks_of("networks", 1, 3, torch=50.0, torch_graph=9.0, **{"recorded, tuned": 5.0})
    networks_of("networks_jax", 1, 1, JAX=4.0)
    draw = module("draw")
    (first, results), _ = draw.sources(tmp_path, "networks")
    assert first == "networks"
    assert results[draw.ALL].rows(["torch graph", "JAX"]) == [["googlenet", "9 (9)", "**4 (4)**"]]
    done = run("draw", tmp_path, "--only", "networks")
    assert done.returncode == 0, done.stderr
    names = [f"{stem}-{form}.png" for stem in ("networks-8-float16", "networks") for form in ("dark", "light")]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names


def test_a_profile_is_of_one_call_with_the_longest_kernels_apart(module):
    kernels = module("kernels")
    events = [(f"k{number}", 10, 100.0 + number) for number in range(kernels.MOST)]
    found = kernels.summed([*events, ("short", 5, 10.0), ("shorter", 15, 5.0), ("on the host", 99, 0.0)])
    assert next(iter(found)) == f"k{kernels.MOST - 1}"
    assert found["k0"] == {"launches": 2.0, "microseconds": 20.0}
    assert found[kernels.REST] == {"launches": 4.0, "microseconds": 3.0}
    assert len(found) == kernels.MOST + 1


def test_a_profile_tells_how_long_any_kernel_ran_and_what_convolutions_took(module):
    kernels = module("kernels")
    call = [("sm90_xmma_fprop", 0.0, 10.0, 7), ("loop_convert_fusion", 5.0, 12.0, 8), ("pool", 20.0, 24.0, 7)]
    seen = [(name, at + begin, at + end, lane) for at in range(0, 500, 100) for name, begin, end, lane in call]
    found = kernels.told(seen[::-1])
    assert (found["launches"], found["microseconds"], found["products"]) == (3.0, 21.0, 10.0)
    assert (found["busy"], found["span"]) == (16.0, 24.0)
    assert found["last"] == [["sm90_xmma_fprop", 0.0, 10.0, 7], ["loop_convert_fusion", 5.0, 7.0, 8], ["pool", 20.0, 4.0, 7]]
    assert kernels.told(seen[1:])["span"] is None  # one call had fewer: what is whose cannot be told
    with pytest.raises(RuntimeError, match="no kernel"):
        kernels.told([])


def test_a_call_takes_on_the_device_what_several_take_longer_than_one(module, monkeypatch):
    networks_jax = module("networks_jax")
    held = object.__new__(networks_jax.Held)
    held._cases = {"a": None, "slow": None}
    took = {"a": 50.0, "slow": 20_000.0}  # of the host

    def time(name, count):
        return 7 + held._hold[name] + count * 30.0 if count * took[name] < held._hold[name] else None

    monkeypatch.setattr(held, "_alone", lambda name: 100.0)
    monkeypatch.setattr(held, "_time", time)
    assert held.samples(2) == {"a": [30.0, 30.0]}  # the other's calls would take more than may be held back
    assert held._hold["slow"] > networks_jax.LONGEST_HOLD


@pytest.mark.slow
def test_a_recording_is_compared_at_every_number_of_states(written):
    _, results = written("record")
    for count in results["states"]:
        assert f"replay, {count} states / eager map, {count} states, host" in results["ratios"]
        assert f"record and 3 replays, {count} states / 3 eager maps, {count} states" in results["ratios"]


def test_a_replay_is_bounded_at_every_number_of_states(module):
    names = [f"{what}, {count} states" for what in ("replay", "bare graph launch", "eager map") for count in (1, 8)]
    samples = {clock: {name: [1.0] for name in names} for clock in ("host", "wall")}
    ratios = module("common").Ratios()
    module("record").compare(ratios, samples, {}, [1, 8], 100, bounded=True)
    bounds = {name: bound for name, (_, bound) in ratios.found.items() if "bare" in name}
    assert list(bounds.values()) == [1.2, 1.2]


def test_each_bound_of_a_recording_is_in_the_table_kept_or_not(module):
    def entry(median, bound, kept):
        return {"median": median, "q1": median, "q3": median, "min": median, "bound": bound, "kept": kept}

    ratios = {"one": entry(1.31, 1.2, False), "eight": entry(1.09, 1.2, True), "unbounded": entry(1.31, None, None)}
    rows = module("tables").bounds({"record": {"ratios": ratios}}).splitlines()[2:]
    assert [(row.split()[1], row.split("|")[-2].strip()) for row in rows] == [("one", "**not kept**"), ("eight", "kept")]


def test_a_gain_within_the_spread_is_none_and_any_way_over_side_streams_counts(module):
    def times(kernel, **others):
        found = {"one stream": 160.0, "recorded, one stream": 16.0 * kernel} | others
        return {name: {"median": median} for name, median in found.items()}

    cases = {
        "a": times(5, **{"fork, 4 states": 159.8}),
        "b": times(9, **{"fork, 4 states": 170.0, "map into outputs, 2 states": 140.0}),
    }
    results = {"count": 16, "shapes": list(cases)}
    results["times"] = {f"16 x {shape}, microseconds, device": found for shape, found in cases.items()}
    text = module("tables").crossover({"overlap": results})
    assert "| `b` | 9.0 | 1.14 |" in text
    assert "more than 5 % between 5.0 and 9.0 µs a kernel" in text


def test_the_host_clock_has_the_region_alone_and_pairs_are_of_one_repeat(module, monkeypatch):
    common = module("common")
    now = 0
    costs = iter([9000, 9000, 3000, 2000, 6000, 4000])  # the first repeat warms up, the last meets a slower host

    def take(nanoseconds):
        nonlocal now
        now += nanoseconds

    driver = SimpleNamespace(
        create_event=lambda timing: None,
        destroy_event=lambda event: None,
        record_event=lambda event, pointer: take(500),
        synchronize_stream=lambda pointer: take(700),
        elapsed=lambda start, end: 0.0,
    )
    monkeypatch.setattr(common, "perf_counter_ns", lambda: now)
    cases = dict.fromkeys("ab", lambda: take(next(costs)))
    found = common.regions(cases, 2, 1, driver, SimpleNamespace(ptr=0))
    assert found["host"] == {"a": [3.0, 6.0], "b": [2.0, 4.0]}
    assert found["wall"]["a"] == [4.2, 7.2]
    assert common.paired(found["host"]["a"], found["host"]["b"]) == [1.5, 1.5]


@pytest.mark.slow
def test_the_host_driver_has_small_shapes_unless_others_are_given(tmp_path):
    few = "--driver", "host", "--repeats", "1", "--json", tmp_path / "x.json"
    for given, shape in ((), "1x4x6x4x3:float32:NCHW"), (("--shape", "1x2x5x3x1:float32:NHWC"), "1x2x5x3x1:float32:NHWC"):
        done = run("launch", *few, "--calls", "1", *given)
        assert done.returncode == 0, done.stderr
        assert "on the host driver, sizes are small where none are given" in done.stdout
        assert json.loads((tmp_path / "x.json").read_text())["shape"] == shape
    assert run("wrong", *few, "--rounds", "1").returncode == 0


@pytest.mark.slow
def test_all_has_a_folder_of_its_own_where_none_is_given(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "benchmarks")
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    python_path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("all", "--only", "acquire", "--quick", "--driver", "host", folder=folder, PYTHONPATH=python_path)
    assert done.returncode == 0, done.stderr
    (written,) = set(folder.rglob("*.json")) - set(before)
    assert written.match("benchmarks/results/host-????-??-??/acquire.json")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert str(written.parent) in done.stdout


@pytest.mark.parametrize(
    ("name", "option", "value", "says"),
    [
        ("launch", "--shape", "64x64", "1x64x14x64x3:float16:NHWC"),
        ("launch", "--shape", "1x4x6x4x2:float32:NCHW", "the kernel must be odd"),
        ("forks", "--shape", "0x4x6x4x3:float32:NCHW", "an extent of 0"),
        ("overlap", "--shape", "1x4x6x4x0:float32:NCHW", "an extent of 0"),
        ("record", "--states", "33", "it must be 32 or less"),
        ("forks", "--states", "40", "it must be 32 or less"),
        ("wrong", "--states", "40", "it must be 32 or less"),
        ("overlap", "--states", "64", "it must be 32 or less"),
        ("acquire", "--json", FOLDER, "is a folder"),
        ("memory", "--json", FOLDER / "nowhere" / "x.json", "there is no folder"),
        ("all", "--limit", "nan", "a number of seconds above 0"),
        ("all", "--driver", "none", "invalid choice"),
        ("all", "--quick", FOLDER / "all.py", "is a file; name a folder"),
        ("all", "--quick", FOLDER / "all.py" / "x", "is a file; name a folder"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_a_line(name, option, value, says):
    refused(run(name, option, value), says)


@pytest.mark.parametrize("name", ["launch", "exits", "captures", "all"])
def test_a_driver_that_is_none_is_refused_in_a_line(name):
    refused(run(name, HANDLEPOOL_DRIVER="foo"), "no driver is named 'foo'")


@pytest.mark.parametrize("name", ["acquire", "exits", "all"])
def test_a_script_says_at_once_that_there_is_no_gpu(name):
    if drivers.available("cuda") is None:
        pytest.skip("there is a GPU")
    refused(run(name, "--driver", "cuda"), "the cuda driver (asked for by name) cannot run here")


@pytest.mark.slow
def test_two_trees_are_compared_and_another_package_than_the_trees_is_refused(tmp_path):
    few = "--repeats", 1, "--calls", 16, "--nodes", 2
    done = run("compare", FOLDER.parent, *few, "--json", tmp_path / "compare.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "compare.json").read_text())
    assert results["ratios"].keys() == results["times"].keys() >= {"get_handle", "planned call", "replay"}
    done = run("compare", tmp_path, *few)
    assert done.returncode == 1
    assert "give a folder that holds the package handlepool" in done.stderr
