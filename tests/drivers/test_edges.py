"""Which forms of calls about edges are made: those with edge data, in each generation of cuda-bindings."""

import ctypes
import threading
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

ACTIVE, INVALIDATED = 1, 2


class Library:
    """libcuda, with one stream that captures; ``given`` is what it was put behind."""

    def __init__(self, state=ACTIVE, nodes=(7, 8), status=0):
        self.state, self.nodes, self.status, self.given = state, nodes, status, None
        self.array = (ctypes.c_void_p * len(nodes))(*nodes)
        self.cuStreamGetCaptureInfo_v3 = lambda *places: self.info(*places)
        self.cuStreamUpdateCaptureDependencies_v2 = lambda *given: self.update(*given)

    def info(self, pointer, state, identity, graph, nodes, data, count):
        assert (pointer, identity, graph) == (3, None, None)
        assert data is not None  # or the driver refuses programmatic edges
        # What `byref` refers to.
        state._obj.value, count._obj.value = self.state, len(self.nodes)
        nodes._obj.contents = self.array if self.nodes else ctypes.c_void_p()
        return self.status

    def update(self, pointer, nodes, data, count, flags):
        assert (data, count, flags) == (None, len(nodes), 1)
        self.given = pointer, tuple(nodes)
        return self.status


def dependencies(library):
    return Dependencies(library, lambda status: f"CUDA_ERROR_{status}")


@pytest.mark.parametrize("nodes", [(), (7,), (7, 8, 2**63 + 9)])
def test_dependencies_are_read_with_edge_data_and_put_without(nodes):
    library = Library(nodes=nodes)
    found = dependencies(library)
    assert found.read(3) == nodes
    found.put(3, nodes)
    assert library.given == (3, nodes)


def test_what_was_read_stays_as_it_was_when_the_driver_answers_another_question():
    library = Library(nodes=(7, 8))
    found = dependencies(library)
    first = found.read(3)
    library.nodes, library.array = (9,), (ctypes.c_void_p * 1)(9)
    assert (first, found.read(3)) == ((7, 8), (9,))


def test_each_thread_has_a_place_of_its_own_for_the_answer():
    found, places = dependencies(Library()), []
    threads = [threading.Thread(target=lambda: places.append(found._answer.places)) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert places[0] is not places[1]


@pytest.mark.parametrize("library", [None, SimpleNamespace(cuStreamGetCaptureInfo_v2=answered)])
def test_a_driver_without_the_call_says_so(library):
    assert dependencies(library).read(3) is None


def test_a_refusal_of_the_driver_and_an_invalidated_capture_raise():
    refused = dependencies(Library(status=901))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_901"):
        refused.read(3)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_901"):
        refused.put(3, (7,))
    with pytest.raises(CaptureError, match="0x3 is not capturing"):
        dependencies(Library(state=INVALIDATED)).read(3)


@pytest.mark.cupy
def test_the_bindings_that_are_installed_agree_on_the_numbers():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    flags = driver.CUstreamUpdateCaptureDependencies_flags
    assert int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES) == 1
    assert int(driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE) == ACTIVE
    assert driver.CUresult(901).name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
