"""Type checkers find an error in each line that ends so: # expect: error, and in no other. Never run."""

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import handlepool
import handlepool.ops
from handlepool import Graph, GraphFunction, GraphTensor

Half = NDArray[np.float16]


@handlepool.graph
def conv_relu(g: Graph, x: GraphTensor, w: GraphTensor, *, padding: int, name: str = "conv") -> GraphTensor:
    y = g.conv_fprop(x, w, padding=[padding] * 2, stride=(1, 1), name=name)
    g.conv_frop(x, w)  # expect: error
    g.conv_fprop(x, w, pading=[padding] * 2)  # expect: error
    g.conv_fprop(x)  # expect: error
    g.conv_fprop(x, 3)  # expect: error
    g.execute({})  # expect: error
    x.set_nam("x")  # expect: error
    x.set_name("x").set_output(3)  # expect: error
    y.set_output(True).set_name("y")
    return g.relu(y, negative_slope=0.1)


@handlepool.graph(allow_tf32=False, io_dtype="bfloat16", compute_dtype=np.float32, heuristics=["A"], workspace_limit=1 << 20)
def norms(
    g: Graph, x: GraphTensor, scale: GraphTensor | None = None, *, epsilon: float = 1e-5
) -> tuple[GraphTensor, GraphTensor]:
    y, mean, _ = g.layernorm(x, scale, epsilon=g.tensor_scalar(epsilon, None))
    return y, mean


@handlepool.graph(allow_tf=False)  # expect: error
def misspelt(g: Graph, x: GraphTensor) -> GraphTensor:
    return g.relu(x)


@handlepool.graph(deterministic=3.5)  # expect: error
def mistaken(g: Graph, x: GraphTensor) -> GraphTensor:
    return g.relu(x)


@handlepool.graph(inputs=["X", "w"], outputs=["y"])
def declared(g: Graph, w: GraphTensor) -> None:
    x = g.tensor(name="X", dim=[2, 16, 14, 14])
    g.conv_fprop(x, w).set_name("y")


@handlepool.graph(outputs=["y"])
def named(g: Graph, x: GraphTensor, *, slope: float = 0.0) -> None:
    g.relu(x, negative_slope=slope).set_name("y")


@handlepool.graph
def mapped(g: Graph, x: GraphTensor) -> dict[str, list[str]]:
    g.relu(x).set_name("y")
    return {"outputs": ["y"]}


def no_graph(g: int, x: GraphTensor) -> GraphTensor:
    return x


@handlepool.graph
def total(g: Graph, *tensors: GraphTensor, twice: bool = False) -> GraphTensor:
    first, second = tensors
    return g.add_square(first, second) if twice else g.add(first, second)


def calls(x: Half, w: Half, y: NDArray[Any], maybe: Half | None) -> None:
    assert_type(conv_relu(x, w, padding=1), Half)
    assert_type(conv_relu(x, w, padding=1, name="c"), Half)
    assert_type(conv_relu(x, w, padding=1, out=y), NDArray[Any])
    assert_type(conv_relu(x, w, padding=1, out=None), Half)
    result: Half = conv_relu(x, w, padding=1, out=maybe)
    assert_type(conv_relu.options(allow_tf32=True)(x, w, padding=1), Half)
    conv_relu(x, w, pading=1)  # expect: error
    conv_relu(x, w, padding="1")  # expect: error
    conv_relu(x, w)  # expect: error
    conv_relu(x, padding=1)  # expect: error
    conv_relu(x, w, w, padding=1)  # expect: error
    conv_relu([1, 2], w, padding=1)  # expect: error
    conv_relu(x, w, padding=1, out=3)  # expect: error
    conv_relu.options(allow_tf=True)  # expect: error
    conv_relu.optins()  # expect: error
    result.no_such_method()  # expect: error

    assert_type(norms(x), tuple[Half, ...])
    assert_type(norms(x, w, epsilon=0.1), tuple[Half, ...])
    assert_type(norms(x, out=(y, y)), tuple[NDArray[Any], NDArray[Any]])
    norms(x, epsilom=0.1)  # expect: error
    norms(x, w, w)  # expect: error
    first, second = norms(x, w)
    first.no_such_method(second)  # expect: error

    declared(x, w)
    declared(x, w, out=y)
    named(x, slope=0.1)
    named(x, slop=0.1)  # expect: error
    mapped(x)
    handlepool.graph(no_graph)  # expect: error
    handlepool.graph(no_graph, inputs=["x"])  # expect: error
    total(x, w)
    total(x, w, twice=True)
    total(x, w, twise=True)  # expect: error


def ready_made(x: Half, w: Half) -> None:
    assert_type(handlepool.conv2d(x, w, padding=1, activation="relu"), Half)
    assert_type(handlepool.conv2d_input_grad(x, w, x.shape), Half)
    assert_type(handlepool.conv2d_weight_grad(x, w, w.shape), Half)
    assert_type(handlepool.conv2d(x, w, add=x, stride=[1, 2], padding=((0, 1), [1, 0])), Half)
    assert_type(handlepool.matmul(x, w), Half)
    assert_type(handlepool.linear(x, w, bias=w, activation="gelu"), Half)
    assert_type(handlepool.ops.gelu(x), Half)
    handlepool.conv2d(x, w, pading=1)  # expect: error
    assert_type(handlepool.add(x, w, activation="relu"), Half)
    assert_type(handlepool.concat([x, w], 1), Half)
    assert_type(handlepool.max_pool2d(x, [3, 3], stride=2), Half)
    assert_type(handlepool.mean2d(x), Half)
    assert_type(handlepool.layer_norm(x, axis=[1], weight=w), Half)
    assert_type(handlepool.pad(x, (1, 1), mode="reflect"), Half)
    assert_type(handlepool.interpolate2d(x, scale_factor=(2, 1.5)), Half)
    assert_type(handlepool.squeeze_excite(x, w, w, w, w, gate="hardsigmoid"), Half)
    assert_type(handlepool.conv_transpose2d(x, w, stride=2, bias=w), Half)
    assert_type(handlepool.conv1d(x, w, padding="same"), Half)
    assert_type(handlepool.scaled_dot_product_attention(x, x, x, is_causal=True), Half)
    handlepool.softmax(x, dim=1)  # expect: error
    handlepool.concat([x, w])  # expect: error
    handlepool.avg_pool2d(x, 3, count_include_padding=True)  # expect: error


def elsewhere(x: Half, w: Half, cupys: Any) -> None:
    states = handlepool.ParallelStates(4)
    with states.fork() as fork:
        fork.run(conv_relu, x, w, padding=1)
    states.map(conv_relu, [x], [w])
    handlepool.record(conv_relu, x, w, padding=1)
    conv_relu.compile(handlepool.ArraySpec((2, 16, 14, 14), "float16"), w, padding=1)
    conv_relu(cupys, cupys, padding=1).get()
    conv_relu(cupys, cupys, pading=1)  # expect: error
    kept: dict[str, GraphFunction[..., Any]] = {"conv": conv_relu, "norms": norms, "declared": declared}
    kept["conv"](x, w, padding=1)


@handlepool.operation(mutates="y")
def scaled(y: Half, factor: float = 2.0) -> None:
    y *= factor


@handlepool.operation
def sums(x: Half, *, axis: int = 0) -> list[Half]:
    return [x.sum(axis)]


class Accumulator:
    @handlepool.operation(mutates=("self.state", lambda *_: "a token"), reads="x")
    def add(self, x: Half) -> int:
        return x.ndim


@handlepool.operation(mutates=3)  # expect: error
def entryless(x: Half) -> None:
    x += 1


@handlepool.operation(mutate="x")  # expect: error
def unnamed(x: Half) -> None:
    x += 1


def operations(x: Half, accumulator: Accumulator) -> None:
    scaled(x)
    scaled(x, factor=3.0)
    scaled(x, factr=3.0)  # expect: error
    scaled("x")  # expect: error
    assert_type(sums(x, axis=1), list[Half])
    assert_type(accumulator.add(x), int)
    assert_type(Accumulator.add(accumulator, x), int)
    accumulator.add(3)  # expect: error
    accumulator.add(x, x)  # expect: error
    with handlepool.ParallelStates(4).fork() as fork:
        assert_type(fork.run(sums, x, axis=1), list[Half])
        assert_type(fork.run(accumulator.add, x), int)
    kept: list[Callable[[Half], object]] = [sums, accumulator.add, scaled]
    kept[0](x)
