"""What a graph that cannot be run is told: which function, which nodes, which arrays, and what cuDNN answered, in one message."""

import re
from typing import Any

from handlepool.errors import GraphNotSupportedError

MOST_REASONS = 4
_ENGINE = re.compile(r'^\{"engineId":(\d+)')
_REASON = re.compile(r"Reason:\s*(.+)$")
_PLAN = re.compile(r"^\s*\[\d+\]\s+(\S+?):\s+(.+)$")


def refusal(name: str, graph: Any, operands: list[Any], error: GraphNotSupportedError) -> GraphNotSupportedError:
    """The error of a build that was refused."""
    nodes = " -> ".join(map(_title, graph.nodes)) or "a graph without nodes"
    arrays = "; ".join(
        f"{tensor.name} {getattr(tensor.data_type, 'name', 'of no type')} {tuple(tensor.dim)} strides {tuple(tensor.stride)}"
        for tensor in operands
    )
    return GraphNotSupportedError(f"{name}: no plan for {nodes} over {arrays} (strides in elements). {shorten(str(error))}")


def shorten(answer: str) -> str:
    """Bring cuDNN's answer of many lines to its first, and to the distinct reasons with the engines or plans that gave them.

    What an engine's own lines begin with is the cause; the others are where the cause was passed on.
    """
    head, *lines = [line.strip() for line in answer.splitlines() if line.strip()] or [""]
    reasons: dict[str, list[str]] = {}
    engine: str | None = None  # whose lines these are; empty once its cause was read
    for line in lines:
        if found := _ENGINE.search(line):
            engine = f"engine {found[1]}"
        elif found := _PLAN.search(line):
            reasons.setdefault(found[2], []).append(found[1])
        elif engine and (found := _REASON.search(line)):
            reasons.setdefault(found[1], []).append(engine)
            engine = ""
        elif engine is None:
            reasons.setdefault(line, [])
    listed = [f"{', '.join(names)}: {reason}" if names else reason for reason, names in reasons.items()]
    more = len(listed) - MOST_REASONS
    if more > 0:
        listed[MOST_REASONS:] = [f"and {more} other reasons"]
    return "; ".join([head.removesuffix(" _").removesuffix(":"), *listed])


def _title(node: Any) -> str:
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return node.name if str(node.name).startswith(f"{kind}.") else f"{node.name} ({kind})"
