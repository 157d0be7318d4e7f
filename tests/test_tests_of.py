"""The map of test files is complete, and its tool prints and runs the files."""

import subprocess
import sys

import pytest
import tests_of


def run(*arguments):
    return subprocess.run([sys.executable, tests_of.__file__, *arguments], capture_output=True, text=True, cwd=tests_of.ROOT)


def test_each_module_has_a_test_file_and_each_name_of_the_map_exists():
    assert tests_of.problems(tests_of.read(), tests_of.modules(), tests_of.test_files()) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"b.py": ["t.py"]}, "a.py has no test file"),
        ({"a.py": [], "b.py": ["t.py"]}, "a.py has no test file"),
        ({"a.py": ["t.py"], "b.py": ["t.py"], "gone.py": ["t.py"]}, "there is no module gone.py"),
        ({"a.py": ["t.py", "gone.py"], "b.py": ["t.py"]}, "there is no file gone.py, which should cover a.py"),
    ],
)
def test_control_a_gap_of_the_map_is_named(found, problem):
    assert tests_of.problems(found, ["a.py", "b.py"], ["t.py"]) == [problem]


def test_the_map_is_sorted():
    assert list(tests_of.read()) == sorted(tests_of.read())


def test_the_best_file_is_first_and_a_file_that_adds_no_line_is_left_out():
    covered = {"tests/pool/a.py": {1, 2}, "tests/pool/b.py": {1, 2, 3}, "tests/ops/c.py": {1, 2, 3, 4, 5}, "tests/pool/d.py": {6}}
    assert tests_of.best("handlepool/pool/slot.py", covered) == ["tests/pool/b.py", "tests/ops/c.py", "tests/pool/d.py"]


def test_of_equal_files_the_one_that_runs_the_least_of_the_package_is_best():
    covered = {"tests/ops/a.py": {1, 2}, "tests/ops/b.py": {1, 2}}
    assert tests_of.best("handlepool/pool/slot.py", covered, {"tests/ops/a.py": 90, "tests/ops/b.py": 5}) == ["tests/ops/b.py"]


def test_lines_of_functions_alone_count(tmp_path):
    lines = ["X = 1", "def f(y=X):", "    return y", "class C:", "    Z = 2", "    def g(self):", "        return 3"]
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert tests_of.function_lines(tmp_path / "module.py") == {3, 7}


def test_the_files_of_a_module_are_printed():
    done = run("handlepool/errors.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == tests_of.read()["handlepool/errors.py"]


@pytest.mark.parametrize("module", ["handlepool/gone.py", "tests/conftest.py"])
def test_a_path_that_is_no_module_is_refused_in_a_line(module):
    done = run(module)
    assert done.returncode == 2
    assert f"{module} is no module of the map" in done.stderr


def test_without_a_module_it_says_how_it_is_used():
    assert "name a module, or --update" in run().stderr
