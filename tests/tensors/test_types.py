"""Graph functions keep their types, and both type checkers see by them what is misspelt."""

import json
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import get_type_hints

import cudnn
import numpy as np
import pytest
from frontend_types import PATH, generate, stubbed
from harness.process import as_default

import handlepool
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.signature import COMPILE_SETTINGS, GRAPH_SETTINGS, Given

ROOT = Path(__file__).parents[2]
TYPES = ROOT / "tests" / "data" / "types"


def said_by(*command):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # it found errors, and did not fail itself
    return done.stdout


def mypys(folder):
    options = ("--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={folder}")
    found = [re.match(r"(.*?):(\d+): error: (.*)", line) for line in said_by("mypy", *options, TYPES).splitlines()]
    return [(Path(error[1]).name, int(error[2]), error[3]) for error in found if error]


def pyrights(folder):
    project = {"include": [str(TYPES)], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(project))
    said = said_by("basedpyright", "--outputjson", "--project", folder, "--pythonpath", sys.executable)
    errors = [error for error in json.loads(said)["generalDiagnostics"] if error["severity"] == "error"]
    return [(Path(error["file"]).name, error["range"]["start"]["line"] + 1, error["message"]) for error in errors]


@pytest.mark.slow
@pytest.mark.parametrize("errors", [mypys, pyrights])
def test_a_type_checker_finds_each_mistake_and_nothing_else(errors, tmp_path):
    expected = {
        (path.name, number): line
        for path in TYPES.glob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# expect: error")
    }
    found = {(name, number): said for name, number, said in errors(tmp_path)}
    assert len(expected) > 25
    assert {place: said for place, said in found.items() if place not in expected} == {}
    assert {place: line for place, line in expected.items() if place not in found} == {}


def test_the_frontends_types_are_those_of_the_installed_one():
    written = PATH.read_text(encoding="utf-8")
    if f"nvidia-cudnn-frontend {cudnn.__version__} " not in written:
        pytest.skip(f"tensors/frontend_types.pyi is not of version {cudnn.__version__}; if it should be, generate it again")
    assert generate() == written


def test_every_builder_of_a_graph_is_typed():
    names = {*cudnn.pygraph._POINTWISE_TENSOR_ARGS, *cudnn._pygraph._STRUCTURED_OPS, *cudnn._pygraph._CAPTURED_OPS}
    assert names | {"matmul", "tensor", "tensor_like", "tensor_scalar"} <= vars(stubbed("Graph")).keys()


def test_every_setting_is_typed():
    assert Given.__annotations__.keys() == {*GRAPH_SETTINGS, *COMPILE_SETTINGS}


def test_annotations_work_at_run_time_without_the_stub():
    def build(g: handlepool.Graph, b: handlepool.GraphTensor | None) -> None: ...

    assert get_type_hints(build) == {"g": handlepool.Graph, "b": handlepool.GraphTensor | None, "return": NoneType}
    assert get_type_hints(handlepool.graph)
    assert pickle.loads(pickle.dumps((handlepool.Graph, handlepool.GraphTensor))) == (handlepool.Graph, handlepool.GraphTensor)
    assert find_spec("handlepool.tensors.frontend_types") is None


def test_types_add_nothing_to_a_call():
    assert GraphFunction.__mro__ == (GraphFunction, partial, object)
    assert not {"__call__", "__getattribute__"} & vars(GraphFunction).keys()


def test_a_graph_function_with_annotations_runs(make_driver):
    @handlepool.graph
    def biased(g: handlepool.Graph, x: handlepool.GraphTensor, b: handlepool.GraphTensor | None = None) -> handlepool.GraphTensor:
        return g.relu(x) if b is None else g.add(x, b)

    with handlepool.HandlePool(driver=make_driver()) as pool, as_default(pool):
        x = pool.driver.empty((2, 3), (12, 4), np.dtype(np.float32))
        assert biased(x).shape == biased(x, x).shape == (2, 3)
