"""``python -m handlepool plans``: what is in a plan directory; what is planned for a device elsewhere is in tests/planning."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness.graphs import double, plus
from harness.planning import h200
from harness.scenes import Scene

import handlepool
from handlepool.__main__ import main
from handlepool.drivers.executable import SavedPlan
from handlepool.pool import plan_directory
from handlepool.pool.plan_directory import PlanDirectory

X = handlepool.ArraySpec((1, 2, 8, 8), "float16")


@pytest.fixture
def path(make_driver, tmp_path):
    """A plan directory with two plans, used at different times."""
    with Scene(make_driver(), plan_directory=tmp_path / "plans", default=True) as scene:
        double(scene.array(1))
        plus(scene.array(1), scene.array(2))
        scene.driver.synchronize_stream(scene.stream.ptr)
    return tmp_path / "plans"


def test_plans_are_listed_by_what_they_compute(path, capsys):
    assert main(["plans", "list", "--directory", str(path)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    told = sorted(line.partition("host: ")[2] for line in lines)
    assert told == [f"pointwise over {', '.join(['1x8x1x1'] * count)}: host_pointwise" for count in (3, 2)]
    assert total.startswith("2 plans, ")


def test_the_directory_may_be_named_by_the_environment(path, capsys, monkeypatch):
    monkeypatch.setenv("HANDLEPOOL_PLAN_DIRECTORY", str(path))
    assert main(["plans", "verify"]) == 0
    assert capsys.readouterr().out == "2 of 2 files are good\n"


def test_a_damaged_file_is_found_listed_and_cleared(path, capsys):
    damaged = min(path.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["plans", "verify", "--directory", str(path)]) == 1
    assert damaged.name in capsys.readouterr().out
    assert main(["plans", "list", "--directory", str(path)]) == 0
    assert f"cannot be used: {damaged.name}" in capsys.readouterr().out
    assert main(["plans", "clear", "--directory", str(path)]) == 0
    assert capsys.readouterr().out == "2 files removed\n"
    assert list(path.iterdir()) == []


def test_a_plan_that_another_version_named_otherwise_is_listed_by_its_file(path, capsys):
    before = set(path.iterdir())
    files = PlanDirectory(path)
    for key in (
        "a graph",
        "[]",
        "3",
        '{"made for": 1}',
        '{"made for": {}, "nodes": [], "tensors": [], "operands": [0]}',
        "[" * 100_000,
    ):
        files.save(key, SavedPlan("an engine", 0, 1, b""))
    assert main(["plans", "list", "--directory", str(path)]) == 0
    listed = capsys.readouterr().out
    assert listed.count("of another version of handlepool: ") == 6
    assert all(file.name in listed for file in {*path.iterdir()} - before)


@pytest.mark.parametrize(("key", "engine"), [("\ud800", "an engine"), ("a graph", "\ud800"), ("a graph", "\x1b[31m")])
def test_a_file_whose_text_is_not_ours_is_found_whatever_its_digest(path, capsys, key, engine):
    name = plan_directory._name("a graph")
    (path / name).write_bytes(plan_directory._encoded(key, SavedPlan(engine, 0, 1, b"")))
    assert main(["plans", "verify", "--directory", str(path)]) == 1
    assert "2 of 3 files are good" in capsys.readouterr().out
    assert main(["plans", "list", "--directory", str(path)]) == 0
    assert f"cannot be used: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["list", "verify", "clear"])
def test_a_directory_that_is_not_there_is_not_made(action, tmp_path, capsys):
    assert main(["plans", action, "--directory", str(tmp_path / "none")]) == 2
    assert "plan directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("action", ["list", "verify", "clear"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "it is a file"),
        ("link", "it is a symbolic link to no directory"),
        ("~nobody-is-called-so/plans", "cannot be found: .*home.*; pass an absolute path"),
    ],
)
def test_what_is_no_directory_is_told_so(action, name, why, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert main(["plans", action, "--directory", name if name.startswith("~") else str(tmp_path / name)]) == 2
    assert re.search(why, capsys.readouterr().err)


def test_a_reader_that_has_had_enough_is_no_error(path):
    command = [sys.executable, "-u", "-m", "handlepool", "plans", "list", "--directory", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def within(x):
    return x + None


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((handlepool.conv2d, (X,)), "missing 1 required positional argument: 'w'"),
        ((handlepool.conv2d, (X, X), {"nope": 1}), "unexpected keyword argument 'nope'"),
        ((handlepool.conv2d, (X, X), {3: 1}), "keywords must be strings"),
        ((handlepool.conv2d, (X, X), {"stride": 0}), "stride=0; it must be an integer"),
        ((handlepool.conv2d, (X, 3)), "is a int"),
    ],
)
def test_an_entry_that_cannot_be_called_is_one_line_and_the_next_one_is_tried(entry, why, tmp_path, capsys, monkeypatch):
    (tmp_path / "device.json").write_text(h200().text)
    monkeypatch.setitem(sys.modules, "given", SimpleNamespace(PLANS=[entry, entry]))
    build = [
        "plans",
        "build",
        "given",
        "--device-properties",
        str(tmp_path / "device.json"),
        "--directory",
        str(tmp_path / "plans"),
    ]
    assert main(build) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("conv2d cannot be planned: ") and why in line for line in lines)
    assert total == "0 plans for NVIDIA H200, 2 refused"
    monkeypatch.setitem(sys.modules, "given", SimpleNamespace(PLANS=[(within, (X,))]))
    with pytest.raises(TypeError, match="unsupported operand"):  # of the module's own function
        main(build)


@pytest.mark.parametrize("action", ["list", "verify", "clear"])
def test_without_a_directory_the_usual_directory_counts_and_is_not_made(action, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HANDLEPOOL_PLAN_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plans", action]) == 0
    assert capsys.readouterr().out == f"0 plans: {tmp_path / 'handlepool' / 'plans'} does not exist yet\n"
    assert not [*tmp_path.iterdir()]


def test_plans_in_the_usual_directory_are_listed(path, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HANDLEPOOL_PLAN_DIRECTORY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # A relative path there is invalid, and the home counts.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    usual = tmp_path / "home" / ".cache" / "handlepool" / "plans"
    usual.parent.mkdir(parents=True)
    path.rename(usual)
    assert main(["plans", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 plans")


def test_a_build_without_a_directory_says_where_programs_find_the_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HANDLEPOOL_PLAN_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "device.json").write_text(h200().text)
    monkeypatch.setitem(sys.modules, "given", SimpleNamespace(PLANS=[]))
    assert main(["plans", "build", "given", "--device-properties", str(tmp_path / "device.json")]) == 0
    assert f"HANDLEPOOL_PLAN_DIRECTORY={tmp_path / 'cache' / 'handlepool' / 'plans'}" in capsys.readouterr().out


def test_a_directory_that_others_may_write_to_is_refused(path, capsys):
    path.chmod(0o777)
    assert main(["plans", "clear", "--directory", str(path)]) == 2
    assert "is writable by other users" in capsys.readouterr().err
    assert len(list(path.iterdir())) == 2


@pytest.mark.parametrize("name", ["", ".mymodule", "mymodule.", "my..module"])
def test_what_is_no_name_of_a_module_is_told_so(name, tmp_path, capsys):
    properties = tmp_path / "device.json"
    properties.write_text(h200().text)
    build = ["plans", "build", name, "--device-properties", str(properties), "--directory", str(tmp_path / "plans")]
    assert main(build) == 2
    assert f"{name!r} is no name of a module; pass a name as in an import" in capsys.readouterr().err


def test_a_description_that_is_no_text_is_told_so(tmp_path, capsys):
    properties = tmp_path / "device.json"
    properties.write_bytes(b"\xff\xfe{}")
    build = ["plans", "build", "mymodule", "--device-properties", str(properties), "--directory", str(tmp_path / "plans")]
    assert main(build) == 2
    assert "device.json is no file that handlepool info --device-properties wrote" in capsys.readouterr().err
