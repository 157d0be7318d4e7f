"""The cases of docs/history/wrong-results.md are what they say: each graph's value is what the case expects, on the host."""

import re
import sys
from types import ModuleType

import numpy as np
import pytest
import wrong_results

from handlepool.drivers.host import evaluator
from handlepool.tensors import frontend
from handlepool.tensors.inference import infer

if not wrong_results.PAGE.exists():
    pytest.skip("docs/ is not here", allow_module_level=True)
SHARED, CASES = wrong_results.programs()


def test_every_block_is_a_case_or_what_they_share():
    assert wrong_results.PAGE.read_text(encoding="utf-8").count("```python") == 1 + len(CASES) > 30
    for name, code in CASES.items():
        assert re.findall(r'run\("(\w+)",', code) == [name]


@pytest.fixture
def names(monkeypatch):
    """What cases share, with a `run` on the host's evaluator."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    names = {}
    exec(SHARED, names)

    def run(case, build, want, xs, y, dtype="float16", plan=0):
        kind = names["TYPES"][dtype]
        g = frontend.new_graph(intermediate_dtype=np.dtype("float32"), compute_dtype=np.dtype("float32"))
        tensors = [g.tensor(dim=list(shape), stride=list(strides), data_type=kind) for shape, strides in xs]
        tensors.append(build(g, *tensors).set_stride(list(y[1])))
        infer(g, tensors[-1:], io_dtype=kind)
        assert tuple(tensors[-1].dim) == y[0]
        rng, arrays = np.random.default_rng(0), []
        for shape, strides in [*xs, y]:
            arrays.append(names["place"](shape, strides, np.nan, dtype)[1])
            if len(arrays) <= len(xs):
                arrays[-1][...] = rng.uniform(-1, 1, shape).astype(arrays[-1].dtype)
        wanted = want(*(array.astype(np.float64) for array in arrays[:-1]))
        evaluation = evaluator.plan(g, tensors)
        evaluation.run(arrays, np.empty(evaluation.workspace_size, np.uint8))
        names["compare"](case, arrays[-1].astype(np.float64), wanted)

    names["run"] = run
    return names


@pytest.mark.parametrize("case", CASES)
def test_a_graph_means_what_is_expected(names, capsys, case):
    exec(CASES[case], names)
    assert capsys.readouterr().out.startswith(f"{case}: right (max error ")


def test_another_expectation_is_reported(names, capsys):
    exec(CASES["pointwise_row"].replace("x * z,", "x * z + 1,"), names)
    assert capsys.readouterr().out == "pointwise_row: wrong (max error 1, 256 of 256 elements)\n"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("print('a: right (max error 0)')", "a: right (max error 0)"),
        ("raise ValueError('no plan')", "a: refused (ValueError: no plan)"),
        ("class CUDARuntimeError(Exception): pass\nraise CUDARuntimeError('x')", "a: dies (CUDARuntimeError: x)"),
        ("import os; os.abort()", "a: dies (the process ended with -6)"),
    ],
)
def test_how_a_case_ended_is_said(program, line):
    assert wrong_results.outcome(program, "a") == line
