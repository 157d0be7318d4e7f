"""Writes ``docs/nodes.md``: which driver has which node of the frontend, and what it was compared with.

``PYTHONPATH=. python tests/node_table.py`` asks the frontend for its nodes, the host driver's evaluator and the rule of guarantee
18 for what they take, ``benchmarks/geometries.py`` for what it measures, and the tests' references for what they are. A test
holds the page to that.
"""

import inspect
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cudnn
import numpy as np
from frontend_types import stubbed
from harness.node_graphs import graph_of
from harness.node_references import ATTENTION, CONVOLUTIONS, MATMUL, MOVES, POINTWISE, REDUCTIONS

from benchmarks import geometries
from handlepool.drivers.host import evaluator
from handlepool.errors import GraphNotSupportedError, HandlePoolError
from handlepool.graphs.expression import VOCABULARY
from handlepool.graphs.forms import conform
from handlepool.tensors import frontend
from handlepool.tensors.inference import infer

PATH = Path(__file__).parent.parent / "docs" / "nodes.md"
CASES = 2000
"""Of the measurements' random cases, as many as are looked at for the nodes that are in them."""
WINDOW = {"padding": 0, "stride": 1, "dilation": 1}


@dataclass(frozen=True)
class Made:
    """A node by itself."""

    graph: Any
    node: Any

    def operands(self):
        """The graph with all outputs real, its operands, and the number of inputs."""
        outputs = [tensor for tensor in self.node.outputs.values() if tensor is not None]
        for tensor in outputs:
            tensor.set_output(True).set_data_type(cudnn.data_type.FLOAT).set_dim([2, 4, 4, 4]).set_stride([64, 16, 4, 1])
        return self.graph, [*self.node.inputs.values(), *outputs], len(self.node.inputs)


def makers():
    """Each method of the frontend's graphs that makes a node, with a new node of it named "it" over arrays of four axes."""
    made = {}
    for name, method in vars(stubbed("Graph")).items():
        if not inspect.isfunction(method) or name.startswith(("_", "tensor", "get_", "find_")):
            continue
        graph = frontend.new_graph(io_dtype=np.float32)

        def given(parameter, graph=graph):
            kind = parameter.annotation
            if "GraphTensor" in kind:
                x = graph.tensor(dim=[2, 4, 4, 4], stride=[64, 16, 4, 1], data_type=cudnn.data_type.FLOAT)
                return [x] if kind.startswith("Sequence") else x
            return {"int": 1, "float": 0.5, "Sequence[int]": [0, 1, 2, 3]}.get(kind)

        parameters = list(inspect.signature(method).parameters.values())[1:]
        wanted = [p for p in parameters if p.default is p.empty or p.name == "inputs"]
        getattr(graph, name)(**{p.name: given(p) for p in wanted}, name="it")
        made[name] = Made(graph, graph.nodes[-1])
    return made


# What the host driver has


def _array(*shape):
    return np.ones(shape, np.float32)


def _pointwise(name):
    reference = POINTWISE[name]
    return lambda g, *x: getattr(g, name)(*x, **reference.parameters or {}), [_array(2, 3, 4)] * reference.inputs


def _reduction(mode):
    return lambda g, x: g.reduction(x, mode=getattr(cudnn.reduction_mode, mode)).set_dim([2, 3, 1]), [_array(2, 3, 4)]


def _convolution(name, spatial):
    image, filters, result = (_array(2, 4, *[6] * spatial), _array(8, 4, *[3] * spatial), _array(2, 8, *[4] * spatial))
    arrays, shape = {
        "conv_fprop": ((image, filters), result),
        "conv_dgrad": ((result, filters), image),
        "conv_wgrad": ((image, result), filters),
    }[name]
    window = {key: [value] * spatial for key, value in WINDOW.items()}
    return lambda g, a, b: getattr(g, name)(a, b, **window).set_dim(list(shape.shape)), list(arrays)


SAMPLES = {
    **{name: {f"`{name}`": (_pointwise(name), POINTWISE[name])} for name in POINTWISE},
    "matmul": {"`matmul`": ((lambda g, a, b: g.matmul(a, b), [_array(2, 3, 4), _array(2, 4, 5)]), MATMUL)},
    "sdpa": {
        "`sdpa`": (
            (lambda g, q, k, v: g.sdpa(q, k, v, attn_scale=0.5, generate_stats=False)[0], [_array(2, 3, 4, 8)] * 3),
            ATTENTION,
        )
    },
    "reduction": {f"`reduction` {mode}": (_reduction(mode), reference) for mode, reference in REDUCTIONS.items()},
    **{
        name: {f"`{name}` in {n}-D": (_convolution(name, n), reference) for n in (1, 2, 3)}
        for name, reference in CONVOLUTIONS.items()
    },
    "reshape": {"`reshape`": ((lambda g, x: g.reshape(x).set_dim([24]), [_array(2, 3, 4)]), MOVES["reshape"])},
    "transpose": {
        "`transpose`": ((lambda g, x: g.transpose(x, permutation=[0, 2, 1]), [_array(2, 3, 4)]), MOVES["transpose"]),
    },
    "concatenate": {
        "`concatenate`": (
            (lambda g, x, y: g.concatenate(inputs=[x, y], axis=1), [_array(2, 3, 4)] * 2),
            MOVES["concatenate"],
        ),
    },
}
"""By the method that makes the node: by its words in the table, a graph of it with its arrays, and its reference."""


# What is asked


def evaluated(graph, operands):
    """Whether the host driver can."""
    try:
        return bool(evaluator.plan(graph, operands).steps)
    except GraphNotSupportedError:
        return False


def taken(graph, operands, inputs):
    """Whether the rule hands the graph on."""
    try:
        conform(graph, operands, inputs, infer(graph, []), lambda place: f"operand {place}")
    except HandlePoolError:
        return False
    return True


@cache
def measured():
    """The nodes in the graphs that were measured on GPUs: modes, kinds, and of convolutions their dimensions."""
    found = set()
    for seed in range(CASES):
        graph, _, _ = geometries.build(geometries.make_case(seed, list(geometries.MAKERS)), {})
        for node in graph.nodes:
            kind = node.node_type.name
            if kind == "POINTWISE":
                found.add(f"`{node.params['mode']}`")
            elif kind == "REDUCTION":
                found.add(f"`reduction` {node.params['mode'].name}")
            elif kind.startswith("CONV"):
                found.add(f"`{kind.lower()}` in {len(next(iter(node.inputs.values())).dim) - 2}-D")
            else:
                found.add(f"`{kind.lower()}`")
    return frozenset(found)


def rows():
    """By what is said of them, the nodes of which it is said."""
    said = defaultdict(list)
    for samples in SAMPLES.values():
        for words, ((build, arrays), reference) in samples.items():
            graph, tensors, output = graph_of(build, arrays)
            host = "yes" if evaluated(graph, [*tensors, output]) else "no"
            gpu = "cuDNN, measured" if words in measured() else "cuDNN"
            ruled = "yes" if taken(graph, [*tensors, output], len(tensors)) else "refused"
            said[host, reference.words, gpu, ruled].append(words)
    for name, made in makers().items():
        if name not in SAMPLES:
            graph, operands, inputs = made.operands()
            ruled = "cuda alone" if taken(graph, operands, inputs) else "refused"
            said["yes" if evaluated(graph, operands) else "no", "-", "cuDNN", ruled].append(f"`{name}`")
    return said


PAGE = """# Nodes

Which driver has which node of cudnn-frontend's graphs. Generated for nvidia-cudnn-frontend {version} by
`tests/node_table.py`: do not edit.

- **host**: whether the host driver evaluates it, and against what its tests compare it, in float64, over random shapes and
  layouts (`tests/drivers/test_nodes.py`). All else is a `GraphNotSupportedError` with the node's name.
- **cuda**: cuDNN has it or refuses it, by its version and by the shapes. *Measured*: it is in the graphs that
  `benchmarks/geometries.py` compares with float64 on a GPU, and did on H100s (`benchmarks/results/geometries/`).
- **graph function**: whether a graph of this node alone goes through `handlepool.graph`. What goes through is the same on both
  drivers. So a node that the host driver has, and whose operands nobody measured on a GPU, is refused on both, by its name. A
  reduction goes through alone, not among other nodes. What the host driver has not ("cuda alone") is handed to cuDNN with dense
  operands, unmeasured. How operands may lie is said in [graph functions](graphs.md#how-arrays-may-lie).

| node | host | compared with | cuda | graph function |
|---|---|---|---|---|
{table}

## Kernels of our own

No graph has these: they are functions over arrays, nodes of recordings, and branches. Both drivers have each. The tests compare
both with NumPy in float64, over random shapes, layouts and types.

| function | what it is |
|---|---|
| `add`, `multiply` | sums and products of arrays that broadcast, and of numbers ([elementwise functions](elementwise.md)) |
| `elementwise` | any expression of {vocabulary} |
| `concat`, `max_pool2d`, `avg_pool2d`, `mean2d` | [concatenation and pooling](pooling.md) |
| `layer_norm`, `group_norm`, `instance_norm`, `rms_norm`, `batch_norm`, `softmax` | [networks' operations](networks.md) |
| `pad`, `channel_shuffle`, `to_channels_last`, `to_contiguous`, `interpolate2d` | [networks' operations](networks.md) |
| `squeeze_excite` | [networks' operations](networks.md) |
"""


def generate():
    """The page."""
    table = "\n".join(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows().items())
    vocabulary = ", ".join(f"`{name}`" for name in sorted(VOCABULARY))
    return PAGE.format(version=cudnn.__version__, table=table, vocabulary=vocabulary)


if __name__ == "__main__":
    PATH.write_text(generate(), encoding="utf-8")
