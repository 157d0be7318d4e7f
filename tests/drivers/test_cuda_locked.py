"""Functions of CUDA's driver that keep Python's lock, over a library that is pretended."""

from ctypes import PyDLL, c_int

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
pytestmark = pytest.mark.cupy

from handlepool.drivers.cuda import locked as module  # noqa: E402

LIBC = PyDLL(None)


def test_a_failure_is_asked_again_with_the_same_arguments_and_success_is_not():
    asked = []
    # `abs` returns its argument, which stands for a status.
    function = module.locked(LIBC, "abs", (c_int,), asked.append)
    assert function(0) is None
    assert asked == []
    assert function(-7) is None
    assert asked == [-7]


def test_the_second_function_raises_the_error():
    def again(status):
        raise RuntimeError(f"status {status}")

    with pytest.raises(RuntimeError, match="status 3"):
        module.locked(LIBC, "abs", (c_int,), again)(3)


def test_two_functions_of_one_name_have_their_own_checks():
    one, two = [], []
    first, second = (module.locked(LIBC, "abs", (c_int,), each.append) for each in (one, two))
    first(1), second(2)
    assert (one, two) == ([1], [2])


def test_without_the_library_it_is_the_runtimes_function(monkeypatch):
    assert module.locked(None, "abs", (c_int,), print) is print
    assert module.capture_query(None) is module.runtime.streamIsCapturing


class Library(dict):
    """A query that finds a status and a flag."""

    def __init__(self, status, flag):
        def query(pointer, place):
            place._obj.value = flag
            return status

        super().__init__(cuStreamIsCapturing=query)


@pytest.mark.parametrize(("status", "flag", "asks"), [(0, 0, False), (0, 1, True), (0, 2, True), (900, 0, True)])
def test_the_runtime_tells_of_captures_and_failures(monkeypatch, status, flag, asks):
    asked = []
    monkeypatch.setattr(module.runtime, "streamIsCapturing", lambda pointer: asked.append(pointer) or flag == 1)
    query = module.capture_query(Library(status, flag))
    assert query(0x77) == (flag == 1)
    assert asked == [0x77] * asks
