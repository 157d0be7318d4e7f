"""``handlepool info`` reports its findings, and never raises."""

import json
import os
import subprocess
import sys

import pytest

from handlepool.cli import info


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "handlepool", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_info_as_json_has_every_finding_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run("info", "--json", HANDLEPOOL_DRIVER="host", PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stderr
    assert "torch was imported" not in done.stdout
    found = json.loads(done.stdout)
    names = ["driver", "python", "system", "packages", "integrations", "cudnn", "libraries", "cuda_driver", "devices"]
    assert list(found) == [*names, "host_memory"]
    assert found["driver"] == {"name": "host", "reason": "set by HANDLEPOOL_DRIVER", "available": True, "missing": None}
    assert found["python"]["gil"] in (True, False)
    assert {"handlepool", "numpy", "nvidia-cudnn-frontend"} <= set(found["packages"])
    assert found["host_memory"]["bytes"] > 0


def test_info_as_text_is_aligned():
    done = run("info", HANDLEPOOL_DRIVER="host")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    column = lines[0].index("host (set by")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_an_unknown_driver_is_a_finding_and_the_version_is_printed():
    from handlepool import __version__

    found = json.loads(run("info", "--json", HANDLEPOOL_DRIVER="abacus").stdout)
    assert list(found["driver"]) == ["problem"]
    assert "abacus" in found["driver"]["problem"]
    assert run("--version").stdout == f"handlepool {__version__}\n"


def test_nothing_raises_when_every_probe_fails(monkeypatch, capsys):
    def broken():
        raise RuntimeError("out\nof order")

    monkeypatch.setattr(info, "_PROBES", {name: (broken, text) for name, (_, text) in info._PROBES.items()})
    found = info.collect()
    assert all(fields == {"problem": "out of order"} for fields in found.values())
    assert info.main(as_json=False) == 0
    assert info.main(as_json=True) == 0
    assert capsys.readouterr().out.count("out of order") == 2 * len(found)


def test_one_library_that_cannot_be_looked_for_hides_no_other(monkeypatch):
    monkeypatch.setattr(info, "_LIBRARIES", {"bad": "bad", "good": "good"})

    def locate(prefix):
        if prefix == "bad":
            raise PermissionError("no entry")
        return "/somewhere"

    monkeypatch.setattr(info, "_locate", locate)
    assert info.libraries() == {"bad": {"problem": "no entry"}, "good": "/somewhere"}


def test_devices_are_shown_with_memory_and_capability(monkeypatch):
    device = {"ordinal": 0, "name": "A card", "memory_bytes": 3 * 2**30, "compute_capability": "9.0"}
    text = info.render({"devices": [device, {**device, "ordinal": 1}], "cuda_driver": {"cuda": "13.0"}})
    assert text.splitlines() == [
        "devices      0: A card, 3.0 GiB, compute capability 9.0",
        "             1: A card, 3.0 GiB, compute capability 9.0",
        "cuda driver  CUDA 13.0",
    ]
    assert info.render({"devices": []}) == "devices  none"


def test_without_a_gpu_driver_the_devices_say_why(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(info.ctypes, "CDLL", no_library)
    found = info.collect()
    assert found["devices"] == {"problem": "libcuda.so.1: cannot open shared object file"}
    assert info.device_name() == "unavailable: libcuda.so.1: cannot open shared object file"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_standard_output_is_one_line(more):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "handlepool", "info", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "handlepool: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_closed_standard_output_is_no_error(more):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m handlepool info {more} >&-"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
