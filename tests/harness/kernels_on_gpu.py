"""Runs kernels of our own on the GPU over memory that tests lay out on the host."""

import numpy as np

from handlepool.tensors.layout import View


def launch(pool, kernel, operands):
    """Run a case on the GPU, and bring all memory back, which must be as it was but for the output."""
    import cupy

    driver = pool.driver
    titles = [f"operand {place}" for place in range(len(operands))]
    with driver.relaxed():
        executable = driver.kernel(kernel, operands, name="kernel", titles=titles)

    def run(arrays, memories):
        there = [cupy.empty(memory.nbytes + 16, np.uint8) for memory in memories]
        views = []
        for array, memory, block, layout in zip(arrays, memories, there, operands, strict=True):
            offset = array.__array_interface__["data"][0] - memory.ctypes.data
            first = (block.data.ptr + offset + 15) // 16 * 16 - offset - block.data.ptr  # the array begins at a multiple of 16
            part = block[first : first + memory.nbytes]
            part.set(memory.view(np.uint8))
            views.append(View(part.data.ptr + offset, layout.shape, layout.strides, layout.dtype, 0, False, part))
        executable.launch(pool.get_handle(), views, 0)
        for memory, view in zip(memories, views, strict=True):
            memory.view(np.uint8)[...] = view.owner.get()

    return run
