"""The command line itself: bad input, help, progress, colour, closed pipes and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness.terminal import run_on_terminal

import handlepool
from handlepool import __main__ as command
from handlepool.cli import check, info, plans, terminal

COMMANDS = ("info", "check", "demo", "plans", "plans list", "plans verify", "plans clear", "plans build")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "handlepool", *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_script_of_the_package_is_the_command():
    root = Path(__file__).parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = scripts["handlepool"].partition(":")
    program = f"import sys; sys.argv = ['handlepool', '--version']; from {module} import {name}; sys.exit({name}())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"handlepool {handlepool.__version__}\n")


def test_the_script_imports_neither_the_package_nor_a_library_before_it_can_be_interrupted():
    program = "import sys, handlepool_command; print([m for m in ('handlepool', 'numpy', 'cudnn') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "helps"),
    [
        ((), "handlepool"),
        (("nonsense",), "handlepool"),
        (("--nonsense",), "handlepool"),
        (("info", "--nonsense"), "handlepool info"),
        (("info", "more"), "handlepool info"),
        (("info", "--json", "--device-properties"), "handlepool info"),
        (("check", "--driver", "abacus"), "handlepool check"),
        (("check", "--nonsense"), "handlepool check"),
        (("demo", "--nonsense"), "handlepool demo"),
        (("demo", "--states", "many"), "handlepool demo"),
        (("plans",), "handlepool plans"),
        (("plans", "list", "--nonsense"), "handlepool plans list"),
        (("plans", "build"), "handlepool plans build"),
    ],
)
def test_a_bad_command_is_one_line_that_names_its_own_help_and_exit_status_2(arguments, helps, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"{helps}: .*; see {helps} --help\n", output.err)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_of_40_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as exit:
        command.main([*name.split(), "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: handlepool {name}")
    # The usage never splits an option from its value.
    _, _, described = text.partition("\n\n")
    # An indivisible word may be wider, such as a variable's name.
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in described.splitlines()), text


# Ctrl-C


INTERRUPTED_IMPORT = """
import signal, sys

NAME = sys.argv[1]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from {module} import run
sys.argv = ["handlepool", "info"]
sys.exit(run())
"""


def interrupted_at_the_import_of(name, module="handlepool_command", handler=signal.SIG_DFL):
    # A background job of a shell ignores Ctrl-C, and so do its children. So the command gets the handler of a terminal's job.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, handler)}
    program = INTERRUPTED_IMPORT.format(module=module)
    command = [sys.executable, "-c", program, name]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("name", ["handlepool", "numpy", "handlepool.pool.slot", "handlepool.__main__"])
def test_ctrl_c_while_the_package_is_imported_is_one_line_and_exit_status_130(name):
    done = interrupted_at_the_import_of(name)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "handlepool: interrupted\n")


def test_control_without_the_entry_ctrl_c_during_the_import_is_a_traceback():
    done = interrupted_at_the_import_of("handlepool.pool.slot", module="handlepool.__main__")
    assert "Traceback" in done.stderr


def test_ctrl_c_that_the_process_ignores_stays_ignored():
    done = interrupted_at_the_import_of("numpy", handler=signal.SIG_IGN)
    assert done.returncode == 0
    assert "interrupted" not in done.stderr


def test_ctrl_c_after_the_import_reaches_the_command():
    done = interrupted_at_the_import_of("handlepool.cli.info")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "handlepool: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "module", "name"),
    [
        (["info"], info, "collect"),
        (["info", "--device-properties"], info, "describe"),
        (["check"], check, "_run"),
        (["plans", "list"], plans, "PlanDirectory"),
        (["plans", "build", "os", "--device-properties", __file__], plans, "_build"),
    ],
)
def test_an_interrupt_is_one_line_and_exit_status_130(arguments, module, name, monkeypatch, capsys, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    monkeypatch.setattr(command, "silence", lambda: None)
    monkeypatch.setenv("HANDLEPOOL_PLAN_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["handlepool", *arguments])
    assert command.run() == 130
    assert capsys.readouterr().err == "handlepool: interrupted\n"


def test_ctrl_c_ends_the_demo_while_its_work_runs(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo's extra is not installed")
    output, status = run_on_terminal("demo", "--driver", "host", "--out", tmp_path / "x.png", interrupt_at="comparing filter 2")
    assert status == 130
    assert "Traceback" not in output
    assert output.endswith("handlepool: interrupted\r\n")
    assert not (tmp_path / "x.png").exists()


# Steps with work behind them: a late reader of the terminal would interrupt a command that has ended.
@pytest.mark.parametrize("step", ["handles", "order"])
def test_ctrl_c_ends_the_check_while_its_threads_wait_for_each_other(step):
    output, status = run_on_terminal("check", "--driver", "host", interrupt_at=f"check: {step}")
    assert status == 130
    assert "Traceback" not in output
    assert output.endswith("handlepool: interrupted\r\n")


# Progress and colour


def test_a_terminal_of_40_columns_shows_progress_that_each_step_replaces():
    output, status = run_on_terminal("check", "--driver", "host", columns=40)
    assert status == 0
    lines = output.replace("\r\n", "\n").split("\n")
    steps = [step for line in lines for step in line.split("\r")[:-1]]
    assert "handlepool check: recorded ..." in steps
    assert max(map(len, steps)) == 39
    # Blanks replace the step before the result of its check.
    assert all(line.split("\r")[-2].strip() == "" for line in lines if line.count("\r") > 1)


def test_a_pipe_shows_no_progress_and_no_colour():
    done = run("check", "--driver", "host")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_that_were_not_told_otherwise(environment, coloured, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(terminal, "_is_terminal", lambda stream: True)
    assert (terminal.coloured("ok", good=True) != "ok") is coloured
    assert (terminal.coloured("no", good=False) != "no") is coloured


# Closed pipes


def test_the_demo_writes_its_picture_when_the_pipe_was_closed(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo's extra is not installed")
    (tmp_path / "filters.json").write_text('{"same": [[1]]}', encoding="utf-8")
    out = tmp_path / "out.png"
    arguments = ["demo", "--driver", "host", "--size", "32", "--filters", str(tmp_path / "filters.json"), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "handlepool", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert out.stat().st_size > 10_000


def test_the_check_writes_its_bundle_when_the_pipe_was_closed(tmp_path):
    arguments = ["check", "--driver", "host", "--bundle", str(tmp_path / "bundle.json")]
    with subprocess.Popen([sys.executable, "-m", "handlepool", *arguments], stdout=subprocess.PIPE) as process:
        process.stdout.close()
    assert process.returncode == 0
    assert (tmp_path / "bundle.json").exists()


# Output that cannot be written


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("demo", "--driver", "host", "--out", "nowhere/out.png"), "lies in a folder that does not exist"),
        (("check", "--bundle", "nowhere/bundle.json"), "is a folder, or lies in no folder that exists"),
        (("check", "--bundle", "."), "is a folder, or lies in no folder that exists"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_before_any_work(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert complaint in output.err
    assert output.err.count("\n") == 1


def test_a_bundle_that_fails_at_its_end_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(check, "_run", lambda driver: ([], {}))
    assert command.main(["check", "--bundle", "/dev/full"]) == 2
    assert (
        capsys.readouterr().err == "handlepool check: cannot write '/dev/full': No space left on device; pass another --bundle\n"
    )


def test_a_picture_that_this_user_may_not_write_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the demo's extra is not installed")
    # The superuser may write anywhere, so the answer of the system is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert command.main(["demo", "--driver", "host", "--out", str(tmp_path / "out.png")]) == 2
    assert "may not be written" in capsys.readouterr().err
