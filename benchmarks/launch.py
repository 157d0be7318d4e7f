"""Measure the host cost of a planned convolution, beside the frontend's own call and torch's.

A call returns when its work is queued, so this is the time that a thread needs for each call. The queue never fills up: a
sample is a few hundred calls, and their work is waited for before the next sample. The floor is the raw entry beneath
`pygraph.execute`, with all its arguments at hand.
"""

import array
import sys
from typing import Any

from common import Case, Ratios, interleaved, pool_on_a_stream, publish, summary, synchronised
from options import arguments, parse, positive
from peers import array_of, tensor, torch_beside
from work import SMALL, TINY, Shape, check, graph_function

GIVEN, ALLOCATED = "graph function, out given", "graph function"
TORCH, EXECUTE = "torch.nn.functional.conv2d", "pygraph.execute, CuPy arrays"


def frontend_cases(pool: Any, shape: Shape, x: Any, w: Any, y: Any, names: dict[str, Any]) -> dict[str, str]:
    """The frontend's own calls, over a graph that is built here as its documentation has it."""
    import cudnn
    import cupy

    kind = {"float16": cudnn.data_type.HALF, "float32": cudnn.data_type.FLOAT}[shape.dtype]
    handle = pool.get_handle()
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    declared = [
        graph.tensor(dim=list(a.shape), stride=[s // a.itemsize for s in a.strides], data_type=kind, name=name)
        for name, a in (("x", x), ("w", w))
    ]
    out = graph.conv_fprop(*declared, padding=[shape.padding] * 2, stride=[1, 1], dilation=[1, 1])
    out.set_output(True).set_data_type(kind).set_stride([s // y.itemsize for s in y.strides])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    tensors = [*declared, out]
    workspace = cupy.empty(max(1, graph.get_workspace_size()), cupy.uint8)
    names |= {
        "graph": graph,
        "handle": handle,
        "by_array": dict(zip(tensors, (x, w, y), strict=True)),
        "by_pointer": {t.get_uid(): a.data.ptr for t, a in zip(tensors, (x, w, y), strict=True)},
        "workspace": workspace,
        "address": workspace.data.ptr,
    }
    found = {
        EXECUTE: "graph.execute(by_array, workspace, handle=handle)",
        "pygraph.execute, pointers": "graph.execute(by_pointer, address, handle=handle)",
    }
    lowered = getattr(graph, "_lowered_graph", None)
    if hasattr(lowered, "_execute_with_raw_ptrs"):
        lowered._prepare_variant_pack_template()
        pointers = array.array("Q", [names["by_pointer"][uid] for uid in lowered._get_variant_pack_uids_sorted()])
        index = graph._plans[graph._plan_index].cpp_index
        names |= {"raw": lowered._execute_with_raw_ptrs, "pointers": pointers, "at": pointers.buffer_info()[0]}
        names |= {"index": -1 if index is None else index, "backend": handle.backend_handle}
        found["raw entry"] = "raw(at, 3, address, backend, index)"
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=positive, default=200, help="calls in one sample (default: %(default)s)")
    parser.add_argument("--shape", type=Shape.parse, default=SMALL, help="the convolution (default: %(default)s)")
    options = parse(parser, {"shape": TINY}, calls=2)
    shape: Shape = options.shape
    with pool_on_a_stream(options.driver) as (pool, stream):
        import numpy as np

        import handlepool

        driver = pool.driver
        rng = np.random.default_rng(0)
        x, w, y = shape.image(driver, rng), shape.filter(driver, rng), shape.output(driver)
        names: dict[str, Any] = {"x": x, "w": w, "y": y, "conv2d": handlepool.conv2d, "conv": graph_function(shape)}
        names |= {"padding": shape.padding, "shape": y.shape, "strides": y.strides, "dtype": y.dtype}
        names |= {"get_handle": pool.get_handle, "empty": driver.empty}
        statements = {
            GIVEN: "conv(x, w, out=y)",
            ALLOCATED: "conv(x, w)",
            "conv2d, out given": "conv2d(x, w, padding=padding, out=y)",
            "conv2d": "conv2d(x, w, padding=padding)",
            "part: hit of get_handle": "get_handle()",
            "part: the output's allocation": "empty(shape, strides, dtype)",
        }
        skipped = []
        if driver.name == "cuda":
            statements |= frontend_cases(pool, shape, x, w, y, names)
        else:
            skipped.append("pygraph.execute and the raw entry: on a GPU alone")
        torch, why = torch_beside(driver, stream)
        if torch is None:
            skipped.append(why)
        else:
            names |= {"torch": torch, "tx": tensor(torch, x), "tw": tensor(torch, w), "F": torch.nn.functional}
            names["pair"] = [shape.padding] * 2
            statements |= {
                TORCH: "F.conv2d(tx, tw, padding=padding)",
                "torch.cudnn_convolution": "torch.cudnn_convolution(tx, tw, pair, [1, 1], [1, 1], 1, False, False, True)",
            }
        right = driver.asnumpy(handlepool.conv2d(x, w, padding=shape.padding, allow_tf32=False)).astype(np.float64)
        for name, statement in statements.items():
            if "part" not in name:
                y[...] = np.nan
                result = eval(statement, names)
                result = y if result is None or "given" in name else result
                check(driver, name, array_of(result), right)
        around = synchronised(driver, stream)
        samples = interleaved({n: Case(s, names, options.calls, around) for n, s in statements.items()}, options.repeats)
        samples = {name: [value / 1e3 for value in values] for name, values in samples.items()}
        bounded = shape == SMALL
        ratios = Ratios()
        ratios.compare(samples, GIVEN, TORCH, 0.80 if bounded else None)
        ratios.compare(samples, GIVEN, EXECUTE, 0.33 if bounded else None)
        ratios.compare(samples, ALLOCATED, TORCH, 1.0 if bounded else None)
        ratios.compare(samples, "conv2d, out given", TORCH, 0.80 if bounded else None)
        ratios.compare(samples, "conv2d, out given", EXECUTE, 0.33 if bounded else None)
        ratios.compare(samples, "conv2d", TORCH, 1.0 if bounded else None)
        ratios.compare(samples, GIVEN, "raw entry")
        times = {"microseconds a call": {name: summary(values) for name, values in samples.items()}}
        publish(options, "launch", driver.name, times, ratios, skipped, shape=str(shape), calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
