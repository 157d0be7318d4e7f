"""Graph functions: Python functions that build a cuDNN graph, compiled once per geometry, callable from any thread and stream."""

import math
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import numpy as np

from handlepool.devices import DeviceSlots
from handlepool.drivers import frontend
from handlepool.drivers.base import Driver, check_operands
from handlepool.errors import ArgumentError
from handlepool.inference import axis_order, dense_strides, infer
from handlepool.plans import Layout, Plan
from handlepool.pool import HandlePool, current_pool
from handlepool.slots import Slot

COMPILE_SETTINGS = ("workspace_limit", "allow_tf32", "deterministic", "heuristics")
GRAPH_SETTINGS = ("name", "io_dtype", "intermediate_dtype", "compute_dtype")

Settings = tuple[tuple[str, Any], ...]


class GraphCall:
    """A call of a graph function with its outputs allocated, to be launched on a slot."""

    __slots__ = ("_pool", "operands", "plan", "result")

    def __init__(self, pool: HandlePool, plan: Plan, operands: tuple[Any, ...], result: Any) -> None:
        self._pool = pool
        self.plan = plan
        self.operands = operands
        self.result = result

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, and return the outputs."""
        handle = slot.handle
        if handle.stream is not slot.pointer:
            handle = self._pool.sound(slot).handle
        executable = self.plan.executable
        executable.launch(handle, self.operands, slot.reserve(executable.workspace_size), slot.buffer)
        return self.result


class GraphFunction:
    """A function ``f(g, *tensors, **options)`` that builds with a `cudnn.pygraph`, as a callable over arrays.

    Positional arguments are arrays, keyword arguments are the function's own, static, hashable, and a part of the plan's key;
    ``out`` alone is ours. Compiled once for (device, each array's shape, strides and type, options); launched on the current
    stream with this thread's handle and scratch, from any thread.

    Parameters
    ----------
    function : callable
        Returns the graph tensor, or the tuple of graph tensors, to output. It may be called by several threads at a time.
    check : callable, optional
        ``check(arrays, outs, **options)`` is called before a build, to raise what the graph could not say as clearly.
    elementwise : bool
        Whether the graph knows no axes: arrays of any shape and layout, without gaps and alike, are declared as two axes that
        cuDNN takes. (It takes a pointwise operation alone for channels-last arrays only.)
    **settings
        ``name``, ``io_dtype``, ``intermediate_dtype``, ``compute_dtype``, ``workspace_limit`` (bytes), ``allow_tf32``,
        ``deterministic``, ``heuristics`` (names of cuDNN's modes).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        check: Callable[..., None] | None = None,
        elementwise: bool = False,
        **settings: Any,
    ) -> None:
        unknown = settings.keys() - {*COMPILE_SETTINGS, *GRAPH_SETTINGS}
        if unknown:
            known = ", ".join((*GRAPH_SETTINGS, *COMPILE_SETTINGS))
            raise ArgumentError(f"no setting is named {', '.join(sorted(unknown))}; the settings are {known}")
        self.function = function
        self._check = check
        self._elementwise = elementwise
        self._settings: Settings = tuple(sorted(settings.items()))
        self._name = str(settings.get("name") or getattr(function, "__name__", "graph"))
        update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<GraphFunction {self._name}>"

    def __call__(self, *arrays: Any, out: Any = None, **options: Any) -> Any:
        """Launch on the current stream; returns the output, or the tuple of outputs."""
        pool = current_pool()
        return self.prepare(pool, arrays, out, options).launch(pool.slot())

    def __handlepool_prepare__(self, pool: HandlePool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphCall:
        """What a fork calls before it starts the branch."""
        options = dict(kwargs)
        return self.prepare(pool, args, options.pop("out", None), options)

    def prepare(
        self, pool: HandlePool, arrays: tuple[Any, ...], out: Any, options: dict[str, Any], settings: Settings = ()
    ) -> GraphCall:
        """Find or build the plan, and allocate the outputs that are not given, on the current stream."""
        if out is None:
            plan = self.plan(pool, arrays, (), options, settings)
            empty = pool.driver.empty
            made = tuple([empty(layout.shape, layout.strides, layout.dtype) for layout in plan.outputs])
            return GraphCall(pool, plan, arrays + made, made[0] if plan.single else made)
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        plan = self.plan(pool, arrays, outs, options, settings)
        if not plan.in_place:
            _check_apart(self._name, pool.driver, plan, arrays, outs)
        return GraphCall(pool, plan, arrays + outs, out)

    def plan(
        self,
        pool: HandlePool,
        arrays: tuple[Any, ...],
        outs: tuple[Any, ...],
        options: dict[str, Any],
        settings: Settings = (),
    ) -> Plan:
        """The plan for these arrays, built when there is none yet."""
        driver = pool.driver
        device = driver.current_device()
        try:
            key = (
                self,
                tuple([(array.shape, array.strides, array.dtype) for array in arrays]),
                tuple([(array.shape, array.strides, array.dtype) for array in outs]),
                frozenset(options.items()) if options else None,
                settings,
            )
            plan = pool.plans.get(device, key)
        except AttributeError:
            _check_arrays(self._name, driver, device, arrays + outs)
            raise
        except TypeError:
            for name, value in options.items():
                _check_hashable(self._name, name, value)
            raise
        if plan is None:
            _check_arrays(self._name, driver, device, arrays + outs)
            plan = pool.plans.get_or_build(
                device, key, lambda: self._build(pool.device(device), driver, arrays, outs, options, settings)
            )
        return plan

    def _build(
        self,
        device: DeviceSlots,
        driver: Driver,
        arrays: tuple[Any, ...],
        outs: tuple[Any, ...],
        options: dict[str, Any],
        settings: Settings,
    ) -> Plan:
        name = self._name
        if self._check is not None:
            self._check(arrays, outs, **options)
        taken = tuple(Layout(array.shape, array.strides, array.dtype) for array in arrays)
        if self._elementwise:
            _check_alike(name, taken[0], arrays + outs)
        chosen: dict[str, Any] = {
            "io_dtype": arrays[0].dtype,
            "intermediate_dtype": np.float32,
            "compute_dtype": np.float32,
            **dict(self._settings),
            **dict(settings),
        }
        limit = chosen.get("workspace_limit")
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ArgumentError(f"{name}: workspace_limit={limit!r}; it must be 0 bytes or more, or None for no limit")
        with device.build_lock:
            handle = device.builder_handle()
        graph = driver.new_graph(handle, **{k: v for k, v in chosen.items() if k in GRAPH_SETTINGS} | {"name": name})
        declare = _declare_flat if self._elementwise else _declare
        inputs = [declare(graph, f"{name} argument {i}", array) for i, array in enumerate(arrays)]
        returned = self.function(graph, *inputs, **options)
        single = not isinstance(returned, (tuple, list))
        outputs: list[Any] = [returned] if single else list(returned)
        if not outputs or not all(hasattr(tensor, "get_uid") for tensor in outputs):
            raise ArgumentError(f"{name} returned {returned!r}; return the graph tensor to output, or a tuple of them")
        infer(graph, outputs, io_dtype=frontend.data_type(chosen["io_dtype"]))
        layouts = taken[:1] * len(outputs) if self._elementwise else tuple(_layout(tensor) for tensor in outputs)
        if outs:
            _check_out(name, layouts, outs)
            if not self._elementwise:
                for tensor, array in zip(outputs, outs, strict=True):
                    tensor.set_stride(_element_strides(f"out of {name}", array))
                layouts = tuple(_layout(tensor) for tensor in outputs)
        # Uids ascend in the order of the operands, since the raw entry takes its pointers in that order.
        for number, tensor in enumerate(outputs):
            if not tensor.uid_assigned:
                tensor.set_uid(1_000_000 + number)
        with device.build_lock, driver.relaxed():
            executable = driver.compile(graph, [*inputs, *outputs], **{k: v for k, v in chosen.items() if k in COMPILE_SETTINGS})
        in_place = all(node.node_type.name == "POINTWISE" for node in graph.nodes)
        return Plan(name, device.device, executable, taken, layouts, single, in_place)


def graph(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Decorate a function that builds a cuDNN graph; see `GraphFunction`.

    Examples
    --------
    >>> @handlepool.graph                                                                                # doctest: +SKIP
    ... def conv_relu(g, x, w, *, padding):
    ...     return g.relu(g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1]))
    >>> y = conv_relu(x, w, padding=1)                                                                   # doctest: +SKIP
    """
    if function is None:
        return lambda decorated: GraphFunction(decorated, **settings)
    return GraphFunction(function, **settings)


def _declare(graph: Any, name: str, array: Any) -> Any:
    return graph.tensor(
        dim=list(array.shape),
        stride=_element_strides(name, array),
        data_type=frontend.data_type(array.dtype),
        name=name,
    )


def _declare_flat(graph: Any, name: str, array: Any) -> Any:
    size = array.size
    strides = _element_strides(name, array)
    if sum((extent - 1) * step for extent, step in zip(array.shape, strides, strict=True)) + 1 != size or 0 in strides:
        raise ArgumentError(
            f"{name} of shape {array.shape} has strides {array.strides} bytes: an elementwise operation takes arrays without "
            f"gaps; pass a contiguous copy"
        )
    # Rows of a length that vector loads and the kernel's tiles divide, where the size has such a divisor.
    row = math.gcd(size, 256)
    if row < 8:
        row = next((extent for extent, step in zip(array.shape, strides, strict=True) if step == 1 and extent > 1), 1)
    return graph.tensor(
        dim=[size // row, row, 1, 1],
        stride=[row, 1, row, row],
        data_type=frontend.data_type(array.dtype),
        name=name,
    )


def _check_alike(name: str, first: Layout, arrays: Sequence[Any]) -> None:
    for array in arrays:
        if (array.shape, array.strides) != (first.shape, first.strides):
            raise ArgumentError(
                f"{name} was given arrays of shape {first.shape} with strides {first.strides} bytes and of shape {array.shape} "
                f"with strides {array.strides}; an elementwise operation takes arrays that lie alike"
            )


def _element_strides(name: str, array: Any) -> list[int]:
    """Strides in elements; those of axes of extent 1, which say nothing, as a dense array would have them."""
    shape, itemsize = array.shape, array.dtype.itemsize
    if any(stride < 0 or stride % itemsize for stride in array.strides):
        raise ArgumentError(
            f"{name} has the strides {array.strides} bytes for elements of {itemsize}: cuDNN takes none that are negative or "
            f"fall between elements; pass a contiguous copy"
        )
    strides = [stride // itemsize for stride in array.strides]
    dense = dense_strides(shape, axis_order(shape, strides))
    return [plain if extent == 1 else stride for extent, stride, plain in zip(shape, strides, dense, strict=True)]


def _layout(tensor: Any) -> Layout:
    dtype = frontend.numpy_dtype(tensor.data_type)
    return Layout(tuple(tensor.dim), tuple(step * dtype.itemsize for step in tensor.stride), dtype)


def _check_out(name: str, layouts: Sequence[Layout], outs: Sequence[Any]) -> None:
    if len(layouts) != len(outs):
        raise ArgumentError(f"{name} has {len(layouts)} outputs and out= holds {len(outs)} arrays; pass a tuple of all")
    for layout, array in zip(layouts, outs, strict=True):
        if (layout.shape, layout.dtype) != (array.shape, array.dtype):
            raise ArgumentError(
                f"out= of {name} is {array.dtype} of shape {array.shape}; the output is {layout.dtype} of shape {layout.shape}"
            )
        extents = sorted((step, extent) for step, extent in zip(array.strides, array.shape, strict=True) if extent > 1)
        reach = array.dtype.itemsize
        for step, extent in extents:
            if step < reach:
                raise ArgumentError(f"out= of {name} has strides {array.strides} bytes: its elements overlap")
            reach = step * extent


def _check_apart(name: str, driver: Driver, plan: Plan, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
    """Raise where an output lies over an input: its elements are written before all that need the input have read it."""
    pointer = driver.array_pointer
    taken = [(pointer(array), layout.reach) for array, layout in zip(arrays, plan.inputs, strict=True)]
    for out, layout in zip(outs, plan.outputs, strict=True):
        start = pointer(out)
        for index, (begin, reach) in enumerate(taken):
            if start < begin + reach and begin < start + layout.reach:
                raise ArgumentError(f"out= of {name} shares memory with argument {index}; pass an array of its own")


def _check_hashable(name: str, option: str, value: object) -> None:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{name} was given {option}={value!r}, which cannot be hashed; options are a part of the plan's key, so pass a "
            f"tuple for a list"
        ) from None


def _check_arrays(name: str, driver: Driver, device: int, arrays: tuple[Any, ...]) -> None:
    if not arrays:
        raise ArgumentError(f"{name} was called without arrays")
    check_operands(driver, name, device, arrays)
