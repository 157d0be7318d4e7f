"""Asks cuDNN itself, without a GPU, whether it plans convolutions whose outputs have the shapes that handlepool inferred.

``python plan_shapes.py STUB PROPERTIES < cases.json``: STUB is a libcuda.so.1 with nothing in it, loaded before cuDNN looks for
the real one; PROPERTIES are an H200's, serialised by cuDNN on the card. Prints one list: for each case, by how much its output
was enlarged (0 is the inferred shape), and cuDNN's refusal or null.
"""

import ctypes
import json
import sys
from pathlib import Path

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import cudnn  # noqa: E402

from handlepool.tensors.inference import axis_order, dense_strides, infer  # noqa: E402

properties = json.loads(Path(sys.argv[2]).read_text())
# What cuDNN has asked for since those were serialised: of a whole device, nothing beyond the usual, and as the data sheet says.
newer = {"smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 0, "memoryBusWidth": 6144}
try:
    device = cudnn.create_device_properties(json.dumps(properties))
except RuntimeError:
    device = cudnn.create_device_properties(json.dumps(properties | newer))


def refusal(case, surplus):
    """What cuDNN says to a case whose output is larger by ``surplus`` along its last axis."""
    half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        device_property=device, sm_version=90, io_data_type=half, intermediate_data_type=single, compute_data_type=single
    )
    inputs = [graph.tensor(dim=dim, stride=stride, data_type=half) for dim, stride in case["inputs"]]
    y = getattr(graph, case["operation"])(*inputs, **case["parameters"])
    if case["declared"]:
        y.set_dim(case["declared"])
    infer(graph, [y])
    if surplus:
        larger, order = [*y.dim[:-1], y.dim[-1] + surplus], axis_order(y.dim, y.stride)
        y.set_dim(larger).set_stride(list(dense_strides(larger, order)))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


json.dump([[(surplus, refusal(case, surplus)) for surplus in (0, 1)] for case in json.load(sys.stdin)], sys.stdout)
