"""Call this package's own kernels as functions of arrays.

The pool plans, launches, orders and records these functions in the same way as graph functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from handlepool.drivers.executable import Executable
from handlepool.drivers.expression import Elementwise
from handlepool.drivers.kernel import Add, Affine, Concat, Depthwise, Excite, Kernel, Normalise
from handlepool.drivers.operands import operand_name
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.empty import WithoutEmpty
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, check_arrays, run_known
from handlepool.graphs.option_keys import typed_key
from handlepool.graphs.plan import Plan, at_their_places
from handlepool.graphs.trace import check_out
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors.inference import axis_order, dense_strides
from handlepool.tensors.layout import Layout

Described = tuple[Kernel, Layout]
"""The kernel to launch, and the layout of a new output."""
MOST_OPERANDS = 64
"""The maximum number of operands of a launch, including the output.

The limit is the capacity of a slot's buffer.
"""


class KernelFunction(GraphFunction[..., Any]):
    """A `GraphFunction` whose plans hold a kernel instead of a graph.

    Each plan has at least one input, and one output.

    Parameters
    ----------
    describe : callable
        ``describe(layouts, **options)`` checks the inputs and returns a `Described`.
    name : str
        Name for messages.
    options : callable, optional
        ``options(*values)`` checks the ``values`` of `call`, and returns them by name. The names and values enter the plan's key.
    """

    def __init__(self, describe: Callable[..., Described], name: str, options: Callable[..., dict[str, Any]] = dict) -> None:
        super().__init__(describe, name=name)
        self._describe = describe
        self._options = options

    def call(self, arrays: tuple[Any, ...], out: object, pool: HandlePool | None, values: tuple[Any, ...]) -> Any:
        """Launch the kernel with the arguments of the public function.

        ``values`` are the public function's options, in the order in which the callable ``options`` takes them.
        """
        types = tuple(map(type, values))
        # Without sequences, the values and their types already form a key, at less cost.
        key = typed_key(values) if tuple in types or list in types else (values, types)

        def prepare(chosen: PoolInternals) -> GraphCall:
            return self._prepared(chosen, arrays, out, values, key)

        return run_known(self._name, pool, (self,), arrays, out, key, prepare)

    def _prepared(self, pool: PoolInternals, arrays: tuple[Any, ...], out: Any, values: tuple[Any, ...], key: Any) -> GraphCall:
        # The key does not show the types inside a value of a subclass of tuple. So a call with such a value gets no shortcut.
        told = all(type(value) is tuple or not isinstance(value, tuple) for value in values)
        return self.prepare(pool, arrays, out, self._options(*values), key=key if told else None)

    def _build(self, pool: PoolInternals, device: int, key: Any, arrays: Any, outs: Any, options: dict[str, Any]) -> Plan:
        name, driver, misaligned = self._name, pool.driver, key[-1]
        inputs, given = tuple(map(Layout.of, arrays)), tuple(map(Layout.of, outs))

        def build() -> Plan:
            if len(inputs) >= MOST_OPERANDS:
                raise ArgumentError(
                    f"{name}: {len(inputs)} arrays; one call takes at most {MOST_OPERANDS - 1}. Call {name} for the first "
                    f"{MOST_OPERANDS - 1} arrays, then for that result and the remaining arrays"
                )
            if len(given) > 1:
                raise ArgumentError(f"{name}: out= holds {len(given)} arrays, but the function has one output; pass one array")
            kernel, output = self._describe(inputs, **options)
            if misaligned and isinstance(kernel, Depthwise):
                raise GraphNotSupportedError(
                    f"{name}: the bias does not begin at a multiple of 16 bytes, as this package's kernel requires; pass a copy "
                    f"of the bias"
                )
            check_arrays(name, driver, device, arrays, outs, vectors=False)
            for out in given:
                check_out(name, output, out)
                check_strides(f"out= of {name}", out)
                output = out
            operands = (*inputs, _with_axes(output, inputs[0].ndim))
            titles = [operand_name(place, len(inputs), len(given)) for place in range(len(operands))]
            executable: Executable
            # A result without elements needs no kernel.
            if not output.size:
                executable = WithoutEmpty(name, titles)
            else:
                full = [place for place, layout in enumerate(operands) if layout.size]
                if len(full) < len(operands) and not isinstance(kernel, Concat):
                    raise GraphNotSupportedError(
                        f"{name}: an array is empty, and this package's kernel takes none; pass arrays that have elements"
                    )
                with pool.device(device).handles.build_lock, driver.relaxed():
                    executable = driver.kernel(
                        kernel, [operands[place] for place in full], name=name, titles=[titles[place] for place in full]
                    )
                if len(full) < len(operands):
                    executable = WithoutEmpty(name, titles, executable, full)
            return Plan(name, device, executable, inputs, (output,), True, _in_place(kernel, inputs, output), asked=key)

        return cast("Plan", pool.plans.get_or_build(device, key, build))


def _in_place(kernel: Kernel, inputs: tuple[Layout, ...], output: Layout) -> tuple[int | None, ...]:
    """Return `Plan.in_place`: the offsets at which inputs may lie in the output.

    An input of an elementwise kernel may cover the whole output. An input of a concatenation may lie in the output at the place
    to which it is copied.
    """
    if isinstance(kernel, (Add, Elementwise)):
        return at_their_places(inputs, (output,))
    if isinstance(kernel, Normalise | Affine | Excite):
        # The threads that write a row read the whole row first, so the first input may be the output. Every row reads the
        # parameters, so these may not overlap with the output. The gates of `Excite` come from sums over the images, which an
        # earlier launch made, so the images may be overwritten.
        return (*at_their_places(inputs[:1], (output,)), *(None for _ in inputs[1:]))
    # A depthwise convolution reads the neighbours of an element, so its output may not overlap with an input.
    if not isinstance(kernel, Concat):
        return ()
    firsts = kernel.firsts(inputs, output)
    parts = [Layout(x.shape, output.strides, output.dtype) for x in inputs]
    return tuple(first if part.lies_as(x) else None for x, part, first in zip(inputs, parts, firsts, strict=True))


def _with_axes(layout: Layout, rank: int) -> Layout:
    """Return a layout with axes of extent 1 appended."""
    more, itemsize = rank - layout.ndim, layout.dtype.itemsize
    return Layout((*layout.shape, *(1,) * more), (*layout.strides, *(itemsize,) * more), layout.dtype) if more else layout


def check_strides(title: str, layout: Layout) -> None:
    """Raise for strides that no kernel of this package takes."""
    itemsize = layout.dtype.itemsize
    if any((stride < 0 or stride % itemsize) and extent > 1 for extent, stride in zip(layout.shape, layout.strides, strict=True)):
        raise ArgumentError(
            f"{title} has the strides {layout.strides} bytes for elements of {itemsize} bytes: the kernel takes no strides that "
            f"are negative or fall between elements; pass a contiguous copy"
        )


def dense(shape: tuple[int, ...], dtype: np.dtype[Any], order: Sequence[int] | None = None) -> Layout:
    """Return the layout of a new array without gaps.

    ``order`` lists the array's axes from the outermost to the innermost. The default is row-major.
    """
    return Layout(shape, tuple(stride * dtype.itemsize for stride in dense_strides(shape, order)), dtype)


def lying_as(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return a layout of ``shape``, with the axis order of ``layout``.

    ``shape`` has the rank of ``layout``. The new layout has no gaps. It is contiguous or channels-last if ``layout`` is.
    """
    return dense(shape, layout.dtype, axis_order(layout.shape, layout.strides))
