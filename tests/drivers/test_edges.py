"""Which form of a question about edges is asked: the one that is answered with edge data, in each generation of cuda-bindings."""

from types import SimpleNamespace

import pytest

from handlepool.drivers.cuda.edges import with_edge_data

QUESTIONS = ["cuGraphGetEdges", "cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes", "cuStreamGetCaptureInfo"]


def lossy(*_):
    return 402, None


def answered(*_):
    return 0, "edge data"


@pytest.mark.parametrize(
    "bindings",
    [{"question": answered}, {"question": lossy, "question_v2": answered}, {"question": lossy, "question_v3": answered}],
    ids=["13", "12.9", "12.9, third"],
)
def test_the_form_with_edge_data_is_asked(bindings):
    assert with_edge_data(SimpleNamespace(**bindings), "question")() == (0, "edge data")


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_bindings_that_are_installed_have_that_form(name):
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    assert "CUgraphEdgeData" in with_edge_data(driver, name).__doc__
