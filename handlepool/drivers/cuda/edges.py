"""Query and add edges of graphs and captures with edge data.

The calls without edge data cannot describe programmatic edges.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from handlepool.errors import CaptureError

_SET = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES: replace the former dependencies."""
_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""


def with_edge_data(bindings: object, name: str) -> Callable[..., tuple[Any, ...]]:
    """Find the version of a CUDA function that uses edge data.

    ``name`` is the function's name in cuda-bindings 13. In cuda-bindings 12.9, the name of this version has a suffix.

    The version without edge data returns CUDA_ERROR_LOSSY_QUERY if an edge is programmatic. cuDNN leaves such edges in a captured
    graph.

    Parameters
    ----------
    bindings : module
        ``cuda.bindings.driver``.
    name : str
        For example ``cuGraphGetEdges`` or ``cuStreamGetCaptureInfo``.
    """
    versions = (getattr(bindings, f"{name}_v{version}", None) for version in (3, 2))
    return next(filter(None, versions), None) or getattr(bindings, name)


def libcuda() -> Any:
    """Return CUDA's driver library, or None where it is missing.

    Calls of the library keep the interpreter's lock.
    """
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None


class _Answer(threading.local):
    """Hold the driver's output buffers for this thread.

    Each thread makes its buffers once, because making them takes longer than a call that fills them.
    """

    def __init__(self) -> None:
        self.state, self.count = ctypes.c_int(), ctypes.c_size_t()
        self.nodes, data = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
        # The arguments of `cuStreamGetCaptureInfo`. None asks for no identity and no graph. The edge data must be asked for,
        # because otherwise the driver refuses programmatic edges.
        self.places = ctypes.byref(self.state), None, None, *map(ctypes.byref, (self.nodes, data, self.count))


class Dependencies:
    """Read and set the dependencies of a capturing stream's next node.

    Nodes are integers here. `put` sets plain edges, so the next work waits for each node's end. If `read` found a programmatic
    edge, `put` therefore sets a plain edge in its place, whose order is stronger.

    ctypes calls the driver library directly. cuda-bindings makes an object of each node, which takes longer than the call. Also,
    names and arguments differ between versions of cuda-bindings, but not in the library.

    Parameters
    ----------
    library : ctypes.PyDLL or None
        The result of `libcuda`. Its calls keep the interpreter's lock, because releasing the lock would take as long as the call.
    name_of : callable
        Returns the name of a status.
    """

    def __init__(self, library: Any, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._answer = _Answer()
        try:
            self._info, self._update = library.cuStreamGetCaptureInfo_v3, library.cuStreamUpdateCaptureDependencies_v2
        except AttributeError:
            # The driver is older than CUDA 12.3.
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
                f"stream {pointer:#x} is not capturing, or its capture was invalidated (state {answer.state.value}), so CUDA "
                "cannot tell the dependencies of its next work. Ask only while the stream is being captured"
            )
        # The nodes lie in the driver's memory, which the next call on the capture may change. So they are copied.
        return tuple(answer.nodes[: answer.count.value])

    def put(self, pointer: int, nodes: Sequence[int]) -> None:
        """See `handlepool.drivers.protocol.Driver.set_dependencies`."""
        count = len(nodes)
        status = self._update(pointer, (ctypes.c_void_p * count)(*nodes), None, count, _SET)
        if status:
            self._refuse(status)

    def _refuse(self, status: int) -> None:
        raise RuntimeError(f"CUDA driver error: {self._name_of(status)}")
