"""Which forms of calls about edges are made: those with edge data, in each generation of cuda-bindings."""

from types import SimpleNamespace

import pytest

from handlepool.drivers.cuda.edges import Dependencies, with_edge_data
from handlepool.errors import CaptureError

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


@pytest.mark.cupy
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_bindings_that_are_installed_have_that_form(name):
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    assert "CUgraphEdgeData" in with_edge_data(driver, name).__doc__


# Dependencies of a capturing stream


class Status(int):
    name = "CUDA_ERROR_OF_A_TEST"


class Node(int):
    pass


ACTIVE, INVALIDATED = SimpleNamespace(name="ACTIVE"), SimpleNamespace(name="INVALIDATED")
MISSING = RuntimeError('Function "cuStreamGetCaptureInfo_v3" not found')


class Stream:
    """A stream that captures, behind the calls of one generation of the bindings; ``given`` is what it was put behind."""

    def __init__(self, state=ACTIVE, nodes=(7, 8), status=0, error=None):
        self.state, self.nodes, self.status, self.error, self.given = state, nodes, status, error, None

    def info(self, pointer):
        if self.error:
            raise self.error
        nodes = None if self.nodes is None else [Node(node) for node in self.nodes]
        return Status(self.status), self.state, 5, "graph", nodes, "edge data", len(nodes or ())

    def lossy(self, pointer):
        return Status(402), None, None, None, None, None, 0

    def update_plain(self, pointer, nodes, count, flags):
        return self.update(pointer, nodes, None, count, flags)

    def update(self, pointer, nodes, data, count, flags):
        assert (data, count, flags) == (None, len(nodes), 1)
        assert all(type(node) is Node for node in nodes)
        self.given = pointer, tuple(nodes)
        return (Status(self.status),)


INFO, UPDATE = "cuStreamGetCaptureInfo", "cuStreamUpdateCaptureDependencies"
GENERATIONS = {
    "13": {INFO: "info", UPDATE: "update"},
    "12.9": {INFO: "lossy", f"{INFO}_v2": "lossy", f"{INFO}_v3": "info", UPDATE: "update_plain", f"{UPDATE}_v2": "update"},
    "12, the plain form alone": {INFO: "lossy", f"{INFO}_v2": "info", UPDATE: "update_plain"},
}


def dependencies(stream, generation="13"):
    calls = {name: getattr(stream, call) for name, call in GENERATIONS[generation].items()}
    flags = SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1)
    states = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=ACTIVE)
    names = {"CUgraphNode": Node, "CUstreamUpdateCaptureDependencies_flags": flags, "CUstreamCaptureStatus": states}
    return Dependencies(SimpleNamespace(**calls, **names))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("nodes", [(), (7,), (7, 8, 9)])
def test_dependencies_are_read_with_edge_data_and_put_without(generation, nodes):
    stream = Stream(nodes=nodes)
    found = dependencies(stream, generation)
    assert found.read(3) == nodes
    found.put(3, nodes)
    assert stream.given == (3, nodes)


def test_no_dependencies_are_none_of_the_answer_in_some_bindings():
    assert dependencies(Stream(nodes=None)).read(3) == ()


def test_a_driver_without_the_call_says_so_and_another_error_goes_on():
    assert dependencies(Stream(error=MISSING)).read(3) is None
    with pytest.raises(RuntimeError, match="anything else"):
        dependencies(Stream(error=RuntimeError("anything else"))).read(3)
    assert Dependencies(SimpleNamespace(cuStreamGetCaptureInfo=answered)).read(3) is None


def test_a_refusal_of_the_driver_and_an_invalidated_capture_raise():
    refused = dependencies(Stream(status=901))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OF_A_TEST"):
        refused.read(3)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OF_A_TEST"):
        refused.put(3, (7,))
    with pytest.raises(CaptureError, match=r"0x3 is not capturing.*INVALIDATED"):
        dependencies(Stream(state=INVALIDATED)).read(3)


@pytest.mark.cupy
def test_the_bindings_that_are_installed_have_the_forms_that_are_called():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    called = with_edge_data(driver, UPDATE)
    assert "dependencyData" in called.__doc__
    assert called is getattr(driver, f"{UPDATE}_v2", called)
    assert int(driver.CUgraphNode(7)) == 7
    assert Dependencies(driver).read is not None
