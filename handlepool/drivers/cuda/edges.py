"""Edges of a graph or a capture, asked for and made with edge data: the forms without cannot tell of programmatic ones."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from handlepool.errors import CaptureError

_SET = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES: in the place of those that were."""
_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""


def with_edge_data(bindings: object, name: str) -> Callable[..., tuple[Any, ...]]:
    """Find the form of a question that is answered with edge data, by its name in cuda-bindings 13; 12.9 adds a version to that.

    The form without answers CUDA_ERROR_LOSSY_QUERY where an edge is programmatic, as cuDNN leaves them in a captured graph.

    Parameters
    ----------
    bindings : module
        ``cuda.bindings.driver``.
    name : str
        As ``cuGraphGetEdges`` or ``cuStreamGetCaptureInfo``.
    """
    versions = (getattr(bindings, f"{name}_v{version}", None) for version in (3, 2))
    return next(filter(None, versions), None) or getattr(bindings, name)


def libcuda() -> Any:
    """Return CUDA's driver library, which keeps the interpreter's lock; None where there is none."""
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None


class _Answer(threading.local):
    """Where the driver writes what it answers, in each thread its own: made once, since that takes longer than the call."""

    def __init__(self) -> None:
        self.state, self.count = ctypes.c_int(), ctypes.c_size_t()
        self.nodes, data = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
        # No identity and no graph are asked for. The data must be: without a place for it, the driver refuses programmatic edges.
        self.places = ctypes.byref(self.state), None, None, *map(ctypes.byref, (self.nodes, data, self.count))


class Dependencies:
    """What the next node of a capturing stream will run after: read, and put to other nodes.

    Nodes are integers here. Edges that are put are plain, so whatever comes next waits for each node's end: a programmatic edge
    that was read is put back as more order than it was, never less.

    The driver library is called by ctypes: cuda-bindings make an object of each node, which takes longer than the call. The
    library's own names and arguments are the same under each generation of the bindings.

    Parameters
    ----------
    library : ctypes.PyDLL or None
        As of `libcuda`. The interpreter's lock is kept for calls that take no longer than to give it away would.
    name_of : callable
        Gives a status its name.
    """

    def __init__(self, library: Any, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._answer = _Answer()
        try:
            self._info, self._update = library.cuStreamGetCaptureInfo_v3, library.cuStreamUpdateCaptureDependencies_v2
        except AttributeError:  # a driver older than CUDA 12.3
            self._info = self._update = None
            return
        self._info.argtypes = [ctypes.c_void_p] * 7
        self._update.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]

    def read(self, pointer: int) -> tuple[int, ...] | None:
        """See `handlepool.drivers.protocol.Driver.dependencies`."""
        if self._info is None:
            return None
        answer = self._answer
        status = self._info(pointer, *answer.places)
        if status:
            self._refuse(status)
        if answer.state.value != _ACTIVE:
            raise CaptureError(
                f"stream {pointer:#x} is not capturing, or its capture was invalidated (state {answer.state.value})"
            )
        return tuple(answer.nodes[: answer.count.value])  # the driver's memory, which the next call on the capture may change

    def put(self, pointer: int, nodes: Sequence[int]) -> None:
        """See `handlepool.drivers.protocol.Driver.set_dependencies`."""
        count = len(nodes)
        status = self._update(pointer, (ctypes.c_void_p * count)(*nodes), None, count, _SET)
        if status:
            self._refuse(status)

    def _refuse(self, status: int) -> None:
        raise RuntimeError(f"CUDA driver error: {self._name_of(status)}")
