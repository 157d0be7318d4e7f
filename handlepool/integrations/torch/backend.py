"""Provide the back end ``handlepool`` for `torch.compile`.

Torch finds the back end by the entry point ``handlepool`` of the group ``torch_dynamo_backends``. Dynamo passes graphs to the
back end, with the weights among their arguments. Each graph becomes a module that holds these weights. The module is recorded
as any other model is.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from handlepool import ArgumentError
from handlepool.integrations.torch.door import RecordedModel, Settings

_made: "weakref.WeakSet[Graph]" = weakref.WeakSet()
"""All graphs of this process, for reports.

The references are weak, so a graph ends with the code that torch compiled."""


class _Bound(nn.Module):  # type: ignore[misc]
    """A module that calls a graph with the weights it holds."""

    def __init__(self, graph: Callable[..., Any], weights: Mapping[int, Tensor], count: int) -> None:
        super().__init__()
        self.eval()
        self._graph = [graph]
        self._names = {place: f"weight_{place}" for place in weights}
        for place, tensor in weights.items():
            name = self._names[place]
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._order = [self._names.get(place) for place in range(count)]

    def forward(self, *args: Any) -> Any:
        left = iter(args)
        given = [next(left) if name is None else getattr(self, name) for name in self._order]
        return self._graph[0](*given)


class Graph:
    """A graph from Dynamo, with the recorded model that runs it.

    Parameters
    ----------
    graph : GraphModule
    inputs : sequence
        Example arguments of the graph.
    settings : Settings

    Attributes
    ----------
    model : RecordedModel or None
        The recorded graph; None before the first call.
    """

    def __init__(self, graph: Callable[..., Any], inputs: Sequence[Any], settings: Settings) -> None:
        self._graph, self._settings = graph, settings
        self._static = [place for place, each in enumerate(inputs) if _is_weight(each)]
        self._moving = [place for place in range(len(inputs)) if place not in set(self._static)]
        self._weights: list[Any] = []
        self.model: RecordedModel | None = None
        _made.add(self)

    def __call__(self, *args: Any) -> Any:
        """Call the graph with its arguments, which include the weights."""
        weights = [args[place] for place in self._static]
        model = self.model
        # Dynamo's guards compare types and shapes of weights, but not their identity. So a call may pass other weights than the
        # last call, and other weights need a new model.
        if model is None or not all(map(is_, weights, self._weights)):
            self._weights = weights
            bound = _Bound(self._graph, dict(zip(self._static, weights, strict=True)), len(args))
            model = self.model = RecordedModel(bound, self._settings)
        return model(*[args[place] for place in self._moving])


def _is_weight(value: object) -> bool:
    # Dynamo marks buffers, and tensors passed to `torch._dynamo.mark_static_address`, with this attribute.
    return isinstance(value, nn.Parameter) or (
        isinstance(value, Tensor) and getattr(value, "_dynamo_static_input_type", None) is not None
    )


def handlepool(
    graph: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a `Graph` that runs a graph of Dynamo.

    This is the back end of ``torch.compile(model, backend="handlepool")``.

    Parameters
    ----------
    graph : GraphModule
    inputs : sequence
        Example arguments of the graph.
    mode : None
        No other mode than "default" is accepted, because only Inductor has modes.
    options : dict, optional
        The keywords of `handlepool.integrations.torch.recorded`.

    Returns
    -------
    callable

    Raises
    ------
    ArgumentError
        For a mode, and for an unknown option.
    """
    if mode not in (None, "default"):
        raise ArgumentError(f"backend='handlepool' was given mode={mode!r}; only Inductor has modes. Pass options= instead")
    return Graph(graph, inputs, Settings.of('torch.compile(backend="handlepool")', dict(options or {})))


def graphs_of(model: nn.Module) -> list[Graph]:
    """Return the graphs of this process that read a weight of ``model``."""
    known = {id(each) for each in (*model.parameters(), *model.buffers())}
    return [each for each in _made if any(id(weight) in known for weight in each._weights)]
