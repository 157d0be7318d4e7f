"""Print or run the test files that cover a module of the package.

``python tests/tests_of.py handlepool/regions/fork.py [--run]`` reads the map ``tests/tests_of.txt``. ``--update`` makes the map.
A line of the map is a module and its test files, best first. A test file covers the lines of functions that its tests run, so
lines that run at import do not count. ``test_tests_of.py`` checks that the map is complete.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "tests" / "tests_of.txt"
MOST_FILES = 6
"""Files for a module. Each further file adds few lines."""
MOST_CASES = 2
"""Cases of one parametrized test that an update runs."""
QUICK = "not slow and not alone and not gpu"
BRIEF = "not control and not every_line and not any_line"
"""Leaves out tests that run many times over the lines of the others."""
VARIABLE = "HANDLEPOOL_TEST_LINES"
"""Environment variable: the folder for the lines that an update measures."""


def modules():
    """Return the paths of the package's modules, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "handlepool").rglob("*.py"))


def test_files():
    """Return the paths of the test files, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


test_files.__test__ = False  # pytest would collect the function


def read():
    """Return the map: the test files of each module, best first."""
    lines = (line.split(": ") for line in MAP.read_text(encoding="utf-8").splitlines())
    return {module: files.split() for module, files in lines}


def problems(found, modules, files):
    """Return a sentence for each gap of a map: modules without tests, unknown modules, unknown files."""
    said = [f"{module} has no test file" for module in modules if not found.get(module)]
    said += [f"there is no module {module}" for module in found if module not in modules]
    named = [(file, module) for module in found for file in found[module]]
    said += [f"there is no file {file}, which should cover {module}" for file, module in named if file not in files]
    return said


# The update


def function_lines(path):
    """Return the numbers of the lines inside functions of a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(*(range(each.lineno, each.end_lineno + 1) for each in node.body))
    return found


def best(module, covered, breadth=None):
    """Return the files that cover a module's lines, best first, from the lines that each file runs.

    The best file runs the most lines that no better file runs. A line counts double in a file of the module's own room, since
    such a file is about the module. Of equal files, the file that runs the fewest lines of all modules is best.
    """
    room, left, chosen = Path(module).parent.name, dict(covered), []

    def worth(file):
        return len(left[file]) * (2 if Path(file).parent.name == room else 1), -(breadth or {}).get(file, 0)

    while left and len(chosen) < MOST_FILES:
        file = max(sorted(left), key=worth)
        taken = left.pop(file)
        if not taken:
            break
        chosen.append(file)
        left = {each: lines - taken for each, lines in left.items()}
    return chosen


def naming(module, sources):
    """Return the test files for a module that no test here runs, as where it needs a GPU.

    The files that name the module come first. If there are none, the files of its room and of the GPU come, those first whose
    names share most words with its path.
    """
    parts = Path(module).with_suffix("").parts
    parent, name = ".".join(parts[:-1]), parts[-1]
    dotted = parent if name == "__init__" else rf"{parent}\.{name}"
    pattern = re.compile(rf"\b{dotted}\b|from {parent} import [^\n]*\b{name}\b|\b{'/'.join(parts[1:])}\b")
    words = {*re.findall("[a-z]+", module)}

    def rank(file):
        shared = words & {*re.findall("[a-z]+", Path(file).stem)}
        return -len(pattern.findall(sources[file])), -len(shared), file

    named = [file for file, source in sources.items() if pattern.search(source)]
    near = [file for file in sources if Path(file).parent.name in (*parts[1:-1], "gpu")]
    return sorted(named or near, key=rank)[:MOST_FILES]


def update():
    """Run the quick tests, note the lines that each file covers, and write the map."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [f"{ROOT}/tests", str(ROOT), os.environ.get("PYTHONPATH")]))
        how = ["-q", "-n", "2", "--dist", "loadfile", "-p", "tests_of", "-p", "no:cacheprovider", "--tb", "no", "-r", "N"]
        command = [sys.executable, "-m", "pytest", *how, "-m", QUICK, "-k", BRIEF]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: folder, "PYTHONPATH": path})
        covered = defaultdict(lambda: defaultdict(set))
        for path in Path(folder).iterdir():
            for module, by_file in json.loads(path.read_text()).items():
                for file, lines in by_file.items():
                    covered[module][file].update(lines)
    if not covered:
        raise SystemExit(f"no test was measured: pytest ended with {done.returncode}")
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in test_files()}
    former = read() if MAP.exists() else {}
    breadth, lines = Counter(), []
    for by_file in covered.values():
        breadth.update({file: len(found) for file, found in by_file.items()})
    for module in modules():
        inside = function_lines(ROOT / module)
        files = best(module, {file: found & inside for file, found in covered[module].items()}, breadth)
        # Without CuPy or torch, the files that a run with these found stay.
        files = files or [file for file in former.get(module, []) if file in sources] or naming(module, sources)
        lines.append(f"{module}: {' '.join(files)}\n")
    MAP.write_text("".join(lines), encoding="utf-8")


class Lines:
    """Notes the lines of the package that the tests of each file run. Tests that trace keep their traces for themselves."""

    def __init__(self, folder):
        import coverage

        self.folder, self.file = folder, None
        self.coverage = coverage.Coverage(data_file=None, source=[str(ROOT / "handlepool")], config_file=False, messages=False)
        self.coverage.set_option("run:core", "ctrace")
        self.coverage.set_option("run:disable_warnings", ["trace-changed", "module-not-imported", "no-data-collected"])

    def pytest_collection_modifyitems(self, items):
        cases = defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        items[:] = [item for each in cases.values() for item in each[:: -(-len(each) // MOST_CASES)]]

    def pytest_runtest_setup(self, item):
        file = item.nodeid.partition("::")[0]
        self.coverage.start()
        if file != self.file:
            self.file = file
            self.coverage.switch_context(file)

    def pytest_runtest_teardown(self):
        self.coverage.stop()

    def pytest_sessionfinish(self):
        data, found = self.coverage.get_data(), {}
        for path in data.measured_files():
            by_file = found[str(Path(path).relative_to(ROOT))] = defaultdict(list)
            for line, files in data.contexts_by_lineno(path).items():
                for file in filter(None, files):
                    by_file[file].append(line)
        (Path(self.folder) / f"{os.getpid()}.json").write_text(json.dumps(found))


def pytest_configure(config):
    if VARIABLE in os.environ and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Lines(os.environ[VARIABLE]))


def main():
    parser = argparse.ArgumentParser(description="Print or run the test files that cover modules of the package.")
    parser.add_argument("modules", nargs="*", type=Path, metavar="MODULE", help="a path, as handlepool/regions/fork.py")
    parser.add_argument("--run", action="store_true", help="run the files with pytest")
    parser.add_argument("--update", action="store_true", help="make the map anew; takes some minutes")
    options = parser.parse_args()
    if not options.modules and not options.update:
        parser.error("name a module, or --update")
    if options.update:
        update()
    found, files = read(), []
    for path in options.modules:
        module = os.path.relpath(path.resolve(), ROOT)
        if module not in found:
            parser.error(f"{path} is no module of the map {MAP.relative_to(ROOT)}. For a new module, run --update")
        files += [file for file in found[module] if file not in files]
    if options.run:
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", *files], cwd=ROOT))
    print("\n".join(files))


if __name__ == "__main__":
    main()
