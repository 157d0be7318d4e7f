"""What a graph that cannot be run is told: which function, which nodes, which arrays, and what cuDNN answered, in one message."""

import re
from typing import Any

from handlepool.errors import GraphNotSupportedError

MOST_REASONS = 3
_ENTRY = re.compile(r"^\s*\[\d+\]\s+\S+:\s*")


def refusal(name: str, graph: Any, operands: list[Any], error: GraphNotSupportedError) -> GraphNotSupportedError:
    """The error of a build that was refused."""
    nodes = " -> ".join(map(_title, graph.nodes)) or "a graph without nodes"
    arrays = "; ".join(
        f"{tensor.name} {getattr(tensor.data_type, 'name', 'of no type')} {tuple(tensor.dim)} strides {tuple(tensor.stride)}"
        for tensor in operands
    )
    return GraphNotSupportedError(f"{name}: no plan for {nodes} over {arrays} (strides in elements). {shorten(str(error))}")


def shorten(answer: str) -> str:
    """Bring cuDNN's answer of many lines, one for each plan or engine it tried, to the distinct reasons among them."""
    head, *lines = [line for line in answer.splitlines() if line.strip()] or [""]
    reasons = dict.fromkeys(_ENTRY.sub("", line).strip() for line in lines)
    shown = " / ".join(list(reasons)[:MOST_REASONS])
    more = len(reasons) - MOST_REASONS
    return f"{head.strip()} {shown}".strip() + (f" / and {more} other reasons" if more > 0 else "")


def _title(node: Any) -> str:
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return node.name if str(node.name).startswith(f"{kind}.") else f"{node.name} ({kind})"
