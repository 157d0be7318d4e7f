"""Makes the tables of what cuDNN has plans for, one for each version; they are reviewed as diffs, and compared by tests.

    HANDLEPOOL_TEST_CUDNN=/tmp/cudnn-9.19:/tmp/cudnn-9.28 PYTHONPATH=.:tests python tests/planning/table.py

writes ``tests/data/plans/cudnn-*.json`` for the versions that are there. A line says for each launch of a call: cuDNN's engine of
how many candidates, bytes of scratch, and what was refused. Under "raw" and "ruled" stand the cases of
``benchmarks/geometries.py`` by family, as in the table of what a GPU computed rightly: without our rules, and with them, which
refuse some.
"""

import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import planning

from handlepool import GraphNotSupportedError, HandlePool, HandlePoolError
from handlepool.pool.default import substitute_default

sys.path.append(str(planning.TESTS.parent))
from benchmarks import geometries

GOLDEN = planning.TESTS / "data" / "plans"
CASES = 500
"""How many of the cases of ``benchmarks/geometries.py`` are planned."""


def described():
    """Return the table of this process's cuDNN, for the described H200; see `harness.planning.call`."""
    import cudnn

    device = planning.h200()
    driver = planning.PlanningDriver(device, computes=False, memory=1 << 32)
    with HandlePool(driver=driver) as pool:
        found = lines(pool, driver.launched)
    return {
        "cudnn": cudnn.backend_version(),
        "frontend": cudnn.__version__,
        "device": device.name,
        **found,
        **families({"device_property": device.native, "sm_version": device.architecture}),
    }


def lines(pool, launched):
    """Make every call on a pool, and say what was launched for it, by group and name."""
    from planning.cases import GROUPS

    found = {}
    with substitute_default(pool):
        for group, cases in GROUPS.items():
            found[group] = {}
            for name, call in cases(pool.driver):
                launched.clear()
                try:
                    call()
                except HandlePoolError as error:
                    found[group][name] = _refusal(error)
                else:
                    if launched:  # else it is a kernel of our own
                        found[group][name] = "; ".join(map(_launch, launched))
    return found


def _launch(executable):
    scratch = f", {executable.workspace_size:,} B" if executable.workspace_size else ""
    return f"{executable.engine.partition('_')[0]} of {executable.candidates}{scratch}"


def _refusal(error):
    return "no plan" if isinstance(error, GraphNotSupportedError) else f"refused, {type(error).__name__}"


def supported(line):
    """Whether a line says that there is a plan."""
    return not line.startswith(("no plan", "refused"))


def families(where, kinds=("raw", "ruled")):
    """Plan the cases of the table of what is right, by family, without our rules ("raw") and with them ("ruled")."""
    from handlepool.drivers.cuda import planning as cuda

    found = {}
    for name in kinds:
        table = defaultdict(Counter)
        for number in range(CASES):
            case = geometries.make_case(number, tuple(geometries.MAKERS))
            try:
                graph, operands, _ = geometries.declare(case, where, name == "ruled")
                cuda.plan(graph, operands)
                outcome = "planned"
            except Exception as error:  # the frontend's own, too
                outcome = "refused" if isinstance(error, HandlePoolError) and "answered" not in str(error) else "unsupported"
                if "COMPILATION_FAILED" in str(error):  # by a real compiler: the one that tests have takes everything
                    outcome = "not compiled"
            table[geometries.family(case["label"])][outcome] += 1
        found[name] = {family: dict(sorted(counts.items())) for family, counts in sorted(table.items())}
    return found


def golden(version):
    """Return the table that is in the repository, or None."""
    path = GOLDEN / f"cudnn-{version}.json"
    return json.loads(path.read_text()) if path.exists() else None


def differences(found, table):
    """List the lines of one table that are others in another, or are missing there."""
    told = []
    for group in (name for name in {**table, **found} if isinstance(table.get(name, found.get(name)), dict)):
        ours, theirs = found.get(group, {}), table.get(group, {})
        told += [
            f"{group}, {name}: {ours.get(name, 'nothing')}; in the table {theirs.get(name, 'nothing')}"
            for name in {**theirs, **ours}
            if ours.get(name) != theirs.get(name)
        ]
    return told


def main():
    """Make all tables, each in a process of its own, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder)
        planning.compile_stubs(stubs)
        installed = planning.installed()
        if not installed:
            sys.exit(f"{planning.VARIABLE}={os.environ.get(planning.VARIABLE, '')} names no cuDNN")
        GOLDEN.mkdir(exist_ok=True)
        with ThreadPoolExecutor(len(installed)) as threads:
            made = {v: threads.submit(planning.call, stubs, at, "planning.table.described") for v, at in installed.items()}
            for version, table in made.items():
                path = GOLDEN / f"cudnn-{version}.json"
                path.write_text(geometries.dump(table.result()))
                print(path)


if __name__ == "__main__":
    main()
