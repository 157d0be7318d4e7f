"""Questions about the edges of a graph or a capture, in the forms of the cuda-bindings that there are."""

from collections.abc import Callable
from typing import Any


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
