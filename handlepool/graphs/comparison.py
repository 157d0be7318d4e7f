"""Compare a new plan's outputs with the host driver's evaluator in float64.

A pool compares each new plan if the pool was made with ``check=True``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from handlepool.errors import ContractError, GraphNotSupportedError
from handlepool.graphs.plan import Plan
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import FrontendGraph
from handlepool.tensors.layout import HOST, View

TOLERANCE = {"float64": 1e-6, "float32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest allowed error, as a fraction of the largest result, by type.

The coarsest type of the operands decides. The value for float32 is large because cuDNN may compute float32 as TF32.
"""
COARSE = 0.3
"""Largest allowed error for the types of 8 bits."""
_JUMPS = ("ceil", "floor", "mod", "cmp", "logical", "binary_select")


def compare(pool: PoolInternals, plan: Plan, graph: FrontendGraph, operands: Sequence[Any]) -> None:
    """Launch a plan once on random data and compare its outputs.

    The launch runs on the current stream, and this function waits for that stream. The evaluator computes ``graph``, and the plan
    may copy operands into another form. So the comparison also covers these copies. Nothing is compared during a capture,
    because a wait would break the capture. Nothing is compared for a graph that the evaluator does not know.

    Parameters
    ----------
    pool : PoolInternals
    plan : Plan
        The new plan, on the current device.
    graph : cudnn.pygraph
        The graph as the graph function built it, before `conform` declared its operands in other forms.
    operands : sequence of graph tensor
        Inputs, then outputs.

    Raises
    ------
    ContractError
        If an output differs from the evaluator's result.
    """
    # Only pools with ``check=True`` need the evaluator, so import it here.
    from handlepool.drivers.host import evaluator

    driver = pool.driver
    stream = driver.current_stream()
    if thread.recording is not None or (stream.ptr and driver.is_capturing(stream.ptr)):
        return
    try:
        evaluation = evaluator.plan(graph, operands, exact=True)
    except GraphNotSupportedError:
        return
    # A fixed seed makes a failure repeatable.
    random = np.random.default_rng(0)
    inputs = len(plan.inputs)
    arrays, exact, kept = [], [], []
    for tensor in operands:
        dtype, shape, steps = frontend.numpy_dtype(tensor.data_type), tuple(tensor.dim), tuple(tensor.stride)
        strides = tuple(step * dtype.itemsize for step in steps)
        memory = random.uniform(-1, 1, sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True)) + 1)
        # Integers become -3 to 3, because values between -1 and 1 would all round to 0.
        memory = (memory if dtype.kind in "fV" else memory * 4).astype(dtype)
        there = driver.asarray(memory)
        kept.append(there)
        arrays.append(driver.adopt(View(driver.array_pointer(there), shape, strides, dtype, _where(pool), False, there)))
        exact.append(as_strided(memory.astype(np.float64), shape, [step * 8 for step in steps]))
    slot = pool.slot()
    with slot.in_launch() as handle:
        plan.executable.launch(handle, arrays, slot.reserve(plan.workspace_size))
    evaluation.run(exact, np.zeros(evaluation.workspace_size, np.uint8))
    tolerance = max(TOLERANCE.get(str(layout.dtype), COARSE) for layout in plan.inputs + plan.outputs)
    # Functions such as ceil and mod jump at some inputs. A rounding error can move an input across a jump, so a few elements of
    # the output may differ.
    jumps = any(str(node.params.get("mode", "")).startswith(_JUMPS) for node in graph.nodes)
    for place in range(inputs, len(operands)):
        got = driver.asnumpy(kept[place]).astype(np.float64)
        wanted = exact[place]
        result = as_strided(got, wanted.shape, wanted.strides)
        # Infinite and undefined results have no error to measure.
        known = np.isfinite(wanted)
        # The error is relative to the largest result, but to at least 1. So tiny results do not demand a tiny error.
        largest = max(1.0, float(np.abs(wanted[known]).max(initial=0)))
        wrong = known & ~(np.abs(result - wanted) <= tolerance * largest)
        if wrong.sum() > wrong.size * 0.02 * jumps:
            worst = float(np.nan_to_num(np.abs(result - wanted)[wrong], nan=np.inf).max())
            raise ContractError(
                f"{plan.name}: plan {plan.engine} for {', '.join(map(str, plan.inputs))} computes {int(wrong.sum())} of "
                f"{wrong.size} elements of output {place - inputs} wrongly, with errors up to {worst:.3g} against "
                "float64; choose another plan with Plan.select, and report this plan"
            )


def _where(pool: PoolInternals) -> int:
    return pool.driver.current_device() if pool.driver.name == "cuda" else HOST
