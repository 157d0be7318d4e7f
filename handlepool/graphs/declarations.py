"""Declares arrays as graph tensors, and checks arrays against tensors that are declared."""

from typing import Any

from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors import frontend
from handlepool.tensors.inference import axis_order, dense_strides
from handlepool.tensors.layout import Layout
from handlepool.tensors.shapes import MOST_ELEMENTS


def declare(graph: Any, name: str, layout: Layout, title: str) -> Any:
    """A graph tensor for an array; ``title`` is what messages call the array."""
    return graph.tensor(
        dim=list(layout.shape) or [1],
        stride=element_strides(title, layout) or [1],
        data_type=frontend.data_type(layout.dtype),
        name=name,
    )


def element_strides(title: str, layout: Layout) -> list[int]:
    """Strides in elements; those of axes of extent 1, which say nothing, as a dense array would have them."""
    shape, itemsize = layout.shape, layout.dtype.itemsize
    if any(stride < 0 or stride % itemsize for stride in layout.strides):
        raise ArgumentError(
            f"{title} has the strides {layout.strides} bytes for elements of {itemsize}: cuDNN takes none that are negative or "
            f"fall between elements; pass a contiguous copy"
        )
    strides = [stride // itemsize for stride in layout.strides]
    dense = dense_strides(shape, axis_order(shape, strides))
    strides = [plain if extent == 1 else stride for extent, stride, plain in zip(shape, strides, dense, strict=True)]
    if (span := 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{title} of shape {shape} has strides of {strides} elements and spans {span:,}, gaps included; cuDNN's tensors span "
            f"at most {MOST_ELEMENTS:,}: pass parts of it, or a copy without gaps"
        )
    return strides


def layout_of(tensor: Any) -> Layout:
    """How the array of a declared tensor lies."""
    dtype = frontend.numpy_dtype(tensor.data_type)
    return Layout(tuple(tensor.dim), tuple(step * dtype.itemsize for step in tensor.stride), dtype)


def match(tensor: Any, layout: Layout, title: str) -> None:
    """Check an array against a tensor that the function declared; what it left open is taken from the array.

    Raises
    ------
    ArgumentError, ArrayTypeError
        For another shape or strides, and for another type.
    """
    strides = element_strides(title, layout)
    if tuple(tensor.dim) != layout.shape:
        raise ArgumentError(f"{title} is of shape {layout.shape}; tensor {tensor.name!r} was declared with {tuple(tensor.dim)}")
    if not tensor.stride_assigned:
        tensor.set_stride(strides)
    elif any(extent > 1 and a != b for extent, a, b in zip(layout.shape, strides, tensor.stride, strict=True)):
        raise ArgumentError(
            f"{title} has strides {tuple(strides)} elements; tensor {tensor.name!r} was declared with {tuple(tensor.stride)}"
        )
    kind = frontend.data_type(layout.dtype)
    if tensor.data_type is None:
        tensor.set_data_type(kind)
    elif tensor.data_type != kind:
        raise ArrayTypeError(f"{title} is {layout.dtype}; tensor {tensor.name!r} was declared as {tensor.data_type.name}")


def check_out(name: str, layout: Layout, out: Layout) -> None:
    """Raise where an array cannot take an output: the frontend would write past it without a word."""
    if (layout.shape, layout.dtype) != (out.shape, out.dtype):
        raise ArgumentError(
            f"out= of {name} is {out.dtype} of shape {out.shape}; the output is {layout.dtype} of shape {layout.shape}"
        )
    extents = sorted((step, extent) for step, extent in zip(out.strides, out.shape, strict=True) if extent > 1)
    reach = out.dtype.itemsize
    for step, extent in extents:
        if 0 <= step < reach:  # what is negative is refused elsewhere, and need not overlap
            raise ArgumentError(f"out= of {name} has strides {out.strides} bytes: its elements overlap")
        reach = step * extent
