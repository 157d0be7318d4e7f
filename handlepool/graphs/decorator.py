"""`graph`, the decorator that makes graph functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar, Unpack, overload

from handlepool.graphs.annotations import P
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.settings import Given

if TYPE_CHECKING:
    from handlepool.tensors.frontend_types import Graph

R = TypeVar("R")


@overload
def graph(
    function: Callable[Concatenate[Graph, P], R], *, inputs: None = None, outputs: Any = None, **settings: Unpack[Given]
) -> GraphFunction[P, R]: ...
@overload
def graph(
    *, inputs: None = None, outputs: Any = None, **settings: Unpack[Given]
) -> Callable[[Callable[Concatenate[Graph, P], R]], GraphFunction[P, R]]: ...
@overload
def graph(
    function: Callable[Concatenate[Graph, ...], R], *, inputs: Any, outputs: Any = None, **settings: Unpack[Given]
) -> GraphFunction[Concatenate[Any, ...], R]: ...  # how many arrays there are, inputs alone says
@overload
def graph(
    *, inputs: Any, outputs: Any = None, **settings: Unpack[Given]
) -> Callable[[Callable[Concatenate[Graph, ...], R]], GraphFunction[Concatenate[Any, ...], R]]: ...
def graph(function: Callable[..., Any] | None = None, *, inputs: Any = None, outputs: Any = None, **settings: Any) -> Any:
    """Decorate a function ``f(g, *tensors, **options)`` that builds a cuDNN graph: it becomes a callable over arrays.

    Positional arguments are arrays; f gets a graph tensor for each, declared with its shape, strides and type, and named after
    f's parameter. Keyword arguments are f's own, static and hashable; ``out`` alone is ours. The graph is compiled once for
    (device, each array's shape, strides and type, options), and launched on the current stream with this thread's handle and
    scratch, from any thread.

    f returns the graph tensor to output, or a tuple of them; or a mapping with the references ``"inputs"`` and ``"outputs"``; or
    nothing, where ``outputs`` names them or f marks them with ``set_output(True)``. f may declare tensors itself with
    ``g.tensor(name=…, dim=…, stride=…)``; the arrays for them are given by ``inputs`` or `GraphFunction.run`, and must be what
    was declared.

    Parameters
    ----------
    function : callable, optional
    inputs : list of reference, optional
        What the positional arrays are, in their order; f's parameters in their order by default. A reference is a graph tensor,
        its uid, a name (of a parameter, or one that was set), or ``"node::port"`` with the port's name in cuDNN, the keyword of
        the method that made the node, or the position of an input: ``"conv2d::image"``, ``"conv2d::0"``, ``"conv2d::Y"``. Nodes
        without a name are called ``"conv_fprop.0"``, ``"relu.1"``.
    outputs : list of reference, optional
        What is output, in order; a list of one gives an array, not a tuple.
    **settings
        ``name`` for messages; ``io_dtype``, the type of real tensors that have none (the first array's by default),
        ``intermediate_dtype`` of tensors between nodes and ``compute_dtype`` of the arithmetic (float32), each whatever NumPy
        takes for a type, or "bfloat16"; ``workspace_limit``, most bytes of scratch of a plan; ``allow_tf32`` (True), whether
        float32 may be rounded to TF32; ``deterministic`` (False), whether only plans that give the same bits each time are
        taken; ``heuristics``, names of cuDNN's modes in the order to ask them ("A", "FALLBACK").

    Returns
    -------
    GraphFunction

    Raises
    ------
    ArgumentError, ArrayTypeError
        For settings that no call could succeed with.

    Examples
    --------
    >>> @handlepool.graph                                                                                # doctest: +SKIP
    ... def conv_relu(g, x, w, *, padding):
    ...     return g.relu(g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1]))
    >>> y = conv_relu(x, w, padding=1)                                                                   # doctest: +SKIP
    """
    if function is None:
        return lambda decorated: GraphFunction(decorated, inputs=inputs, outputs=outputs, **settings)
    return GraphFunction(function, inputs=inputs, outputs=outputs, **settings)
