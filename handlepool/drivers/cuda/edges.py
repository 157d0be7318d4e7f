"""Edges of a graph or a capture, asked for and made in the forms of the cuda-bindings that there are."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from handlepool.errors import CaptureError


def with_edge_data(bindings: Any, name: str) -> Callable[..., tuple[Any, ...]]:
    """Find the form of a question that is answered with edge data, by its name in cuda-bindings 13; 12.9 adds a version to that.

    The form without answers CUDA_ERROR_LOSSY_QUERY where an edge is programmatic, as cuDNN 9.28 leaves them in a captured graph.

    Parameters
    ----------
    bindings : module
        ``cuda.bindings.driver``.
    name : str
        As ``cuGraphGetEdges`` or ``cuStreamGetCaptureInfo``.
    """
    versions = (getattr(bindings, f"{name}_v{version}", None) for version in (3, 2))
    return next(filter(None, versions), None) or getattr(bindings, name)


MOST_NODES = 256
"""Nodes that are kept in the bindings' form."""


class Dependencies:
    """What the next node of a capturing stream will run after: read, and put to other nodes.

    Nodes are integers here. Edges that are put are plain, so whatever comes next waits for each node's end: a programmatic edge
    that was read is put back as more order than it was, never less.

    Parameters
    ----------
    bindings : module
        ``cuda.bindings.driver``.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self._info = with_edge_data(bindings, "cuStreamGetCaptureInfo")
        self._update: Callable[..., tuple[Any, ...]] | None = None
        name = "cuStreamUpdateCaptureDependencies"
        if hasattr(bindings, name):
            self._update = with_edge_data(bindings, name)
            # Only 13 has both under the plain names, with edge data.
            self._plain = self._update is getattr(bindings, name) and self._info is not bindings.cuStreamGetCaptureInfo
            self._node = lru_cache(MOST_NODES)(bindings.CUgraphNode)  # the same few are put again and again
            self._flags = int(bindings.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

    def read(self, pointer: int) -> tuple[int, ...] | None:
        """See `handlepool.drivers.protocol.Driver.dependencies`."""
        if self._update is None:
            return None
        try:
            status, state, _, _, nodes, *_ = self._info(pointer)
        except RuntimeError as error:  # the driver is older than the bindings
            if "not found" in str(error):
                return None
            raise
        self._check(status)
        if state != self._bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise CaptureError(f"stream {pointer:#x} is not capturing, or its capture was invalidated ({state.name})")
        return tuple(map(int, nodes or ()))

    def put(self, pointer: int, nodes: Sequence[int]) -> None:
        """See `handlepool.drivers.protocol.Driver.set_dependencies`."""
        assert self._update is not None
        handles = [*map(self._node, nodes)]
        data = () if self._plain else (None,)
        (status,) = self._update(pointer, handles, *data, len(handles), self._flags)
        self._check(status)

    @staticmethod
    def _check(status: Any) -> None:
        if status:
            raise RuntimeError(f"CUDA driver error: {status.name}")
