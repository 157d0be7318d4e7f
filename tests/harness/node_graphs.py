"""Graphs of the frontend's nodes, planned by the host driver below every rule and run on one of its streams."""

import numpy as np

from handlepool.drivers.host.driver import HostDriver
from handlepool.tensors import frontend
from handlepool.tensors.inference import infer


def declare(graph, array, name="array"):
    """The graph's tensor for an array."""
    strides = [step // array.itemsize for step in array.strides]
    return graph.tensor(dim=list(array.shape), stride=strides, data_type=frontend.data_type(array.dtype), name=name)


def placed(values, dtype, order=None, gap=False):
    """A copy with the axes in this order in memory, from the outermost; with ``gap`` every second element is somebody else's."""
    order = tuple(range(values.ndim)) if order is None else order
    turned = np.ascontiguousarray(np.transpose(values, order)).astype(dtype)
    if gap:
        turned = np.repeat(turned, 2, axis=-1)[..., ::2]
    return turned.transpose(np.argsort(order))


def graph_of(build, arrays, out_dtype=None):
    """A graph with `infer`'s shapes, its inputs and its output."""
    graph = frontend.new_graph(io_dtype=arrays[0].dtype, intermediate_dtype=np.float32, compute_dtype=np.float32)
    tensors = [declare(graph, array, f"x{i}") for i, array in enumerate(arrays)]
    output = build(graph, *tensors)
    infer(graph, [output], io_dtype=frontend.data_type(out_dtype or arrays[0].dtype))
    return graph, tensors, output


def compiled_and_run(build, *arrays, out_dtype=None, seed=0):
    """The graph's output as a plain array in float64, compiled by ``HostDriver.compile`` and launched on a side stream."""
    driver = HostDriver(scheduler="adversarial", seed=seed, check_order=True)
    graph, tensors, output = graph_of(build, arrays, out_dtype)
    executable = driver.compile(graph, [*tensors, output])
    dtype = frontend.numpy_dtype(output.data_type)
    with driver.create_stream() as stream:
        operands = [driver.empty(array.shape, array.strides, array.dtype) for array in arrays]
        for operand, array in zip(operands, arrays, strict=True):
            operand[...] = array
        y = driver.empty(output.dim, [step * dtype.itemsize for step in output.stride], dtype)
        handle = driver.create_handle()
        driver.bind_handle(handle, stream.ptr)
        executable.launch(handle, [*operands, y], driver.allocate(executable.workspace_size))
        result = driver.asnumpy(y).astype(np.float64)
        driver.synchronize_stream(stream.ptr)
    assert driver.order is None or not driver.order.found
    return result
