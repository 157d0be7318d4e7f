"""Mutants of the package, given to the tests: what survives is a hole in them, or changes nothing that matters.

``python tests/mutants.py pool/device pool/slot --count 50 --seed 1`` makes fifty mutants of ``handlepool/pool/device.py`` and
``handlepool/pool/slot.py``, one after the other, in a copy of the tree, and says of each whether a test failed. All tests run
once before, to learn which of them call which function and how long they take. For a mutant those run that call its function,
the quickest first, until together they would take longer than ``--budget``. As a plugin of pytest this module is what learns it.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "handlepool"
MODULES = [
    "pool/device",
    "pool/internals",
    "pool/thread_slots",
    "pool/workspace",
    "regions/memory",
    "regions/fork",
    "regions/future",
    "graphs/launch",
    "recording/capture",
]
OTHERS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "==", ast.IsNot: "!="}
OTHERS |= {ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+"}
WORDS = {"__repr__", "describe"}
"""Functions that make words alone."""


def functions_of(tree):
    """The nodes inside of functions, each with its function; but defaults, annotations, and what makes words alone."""
    left = [(node, None) for node in tree.body]
    while left:
        node, function = left.pop()
        if isinstance(node, ast.FunctionDef):
            left += [(inner, node) for inner in node.body if node.name not in WORDS]
        elif isinstance(node, ast.AnnAssign):
            left += [(node.value, function)] if node.value else []
        elif not isinstance(node, ast.JoinedStr) and not (isinstance(node, ast.Expr) and ast.unparse(node).startswith("_log.")):
            if function is not None:
                yield node, function
            left += [(inner, function) for inner in ast.iter_child_nodes(node)]


def mutants_of(source):
    """What is done, the line by which Python knows the function, and what stands between two places instead."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return f"({source[slice(*span(node))].decode()})"

    for node, function in functions_of(ast.parse(source)):
        found = []
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
                found = [("a statement is dropped", node, "pass")]
            case ast.Return(value=None):
                found = [("a statement is dropped", node, "pass")]
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) if function.name != "__init__":
                found = [("a statement is dropped", node, "pass")]
            case ast.If() | ast.IfExp():
                found = [("a condition is decided", node.test, value) for value in ("True", "False")]
            case ast.While():
                found = [("a condition is decided", node.test, "False")]
            case ast.comprehension():
                found = [("a condition is decided", test, "True") for test in node.ifs]
            case ast.BoolOp():
                word = " and " if isinstance(node.op, ast.And) else " or "
                rests = [word.join(text(value) for value in node.values if value is not left_out) for left_out in node.values]
                found = [("a part of a condition is left out", node, f"({rest})") for rest in rests]
            case ast.With():
                contexts = [item.context_expr for item in node.items if item.optional_vars is None]
                found = [("a context is left out", context, "__import__('contextlib').nullcontext()") for context in contexts]
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if not isinstance(right, ast.Constant):
                found = [("another operator", node, f"({text(left)} {OTHERS[type(operator)]} {text(right)})")]
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                found = [("another operator", node, f"({text(left)} {OTHERS[type(operator)]} {text(right)})")]
            case ast.Constant(value=bool() as value):
                found = [("another constant", node, repr(not value))]
            case ast.Constant(value=int() as value):
                found = [("another constant", node, repr(value + 1))]
        known_by = min(each.lineno for each in (function, *function.decorator_list))
        yield from ((what, known_by, *span(place), new) for what, place, new in found)


# As a plugin: which functions a test calls, and how long it takes

ANYTHING = ("", 0)
reach, seconds, called = {}, {}, set()


def profile(frame, event, _):
    if event == "call" and f"/{PACKAGE}/" in frame.f_code.co_filename:
        called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


def audit(event, _):
    if event in ("os.fork", "subprocess.Popen"):  # what another process calls is not seen: it may be anything
        called.add(ANYTHING)


def pytest_configure():
    sys.addaudithook(audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    called.clear()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        reach[item.nodeid] = sorted({f"{file.rpartition(PACKAGE + '/')[2]}:{line}" for file, line in called})


def pytest_runtest_logreport(report):
    seconds[report.nodeid] = seconds.get(report.nodeid, 0) + (report.duration if report.passed else float("inf"))


def pytest_sessionfinish():
    Path("reach.json").write_text(json.dumps(sorted((seconds[test], test, calls) for test, calls in reach.items())))


# The run


def run_pytest(tree, arguments, timeout=None, **environment):
    """What pytest returned in a tree, or None where it did not end in time, and what it printed."""
    paths = {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "HANDLEPOOL_SEED": "1", "HANDLEPOOL_EXAMPLES": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *arguments],
        cwd=tree,
        env=os.environ | paths | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


def judge(tree, name, new, tests, timeout):
    """What becomes of a mutant, and the test that failed."""
    if not tests:
        return "unreached", ""
    file = tree / PACKAGE / f"{name}.py"
    before = file.read_bytes()
    file.write_bytes(new)
    for some in (tests[::10], tests):  # most are killed by a few, which takes a third of the time
        (tree / "tests.txt").write_text("\n".join(some))
        code, output = run_pytest(tree, ["-x", "@tests.txt"], timeout, PYTHONDONTWRITEBYTECODE="1")
        if code != 0:
            break
    file.write_bytes(before)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {None: "timed out", 0: "survived"}.get(code, "killed"), "".join(failed[:1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES, help="of the package, without .py")
    parser.add_argument("--count", type=int, default=100, help="mutants to make")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among them all")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for each mutant, as they took before")
    options = parser.parse_args()
    sources = {name: (ROOT / PACKAGE / f"{name}.py").read_bytes() for name in options.modules}
    mutants = [(name, *mutant) for name, source in sources.items() for mutant in mutants_of(source)]
    sample = sorted(random.Random(options.seed).sample(mutants, min(options.count, len(mutants))))
    became = Counter()
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in (PACKAGE, "tests", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree)
        _, output = run_pytest(tree, ["-p", "mutants", "-m", "not alone and not gpu"])
        print(f"without a mutant: {output.splitlines()[-1]}", flush=True)
        known = [entry for entry in json.loads((tree / "reach.json").read_text()) if entry[0] < float("inf")]
        for name, what, function, start, end, text in sample:
            old = sources[name]
            new = old[:start] + text.encode() + old[end:]
            ours = [(cost, test) for cost, test, calls in known if f"{name}.py:{function}" in calls or ":0" in calls]
            tests = [
                test for (_, test), cost in zip(ours, accumulate(cost for cost, _ in ours), strict=True) if cost < options.budget
            ]
            verdict, failed = judge(tree, name, new, tests, 60 + 2 * options.budget)
            became[verdict] += 1
            lines = list(difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), n=0, lineterm=""))[3:]
            line = old[:start].count(b"\n") + 1
            print(f"\n{verdict}: {PACKAGE}/{name}.py:{line}, {what}; {len(tests)} of {len(ours)} tests")
            print(*lines, *filter(None, [failed]), sep="\n", flush=True)
    print(f"\n{len(sample)} of {len(mutants)} mutants, seed {options.seed}: {dict(became)}")


if __name__ == "__main__":
    main()
