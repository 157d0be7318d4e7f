"""Build plans of graphs.

The module declares arrays as graph tensors, gives every tensor its geometry, and has the driver compile the graph.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from handlepool.drivers.executable import ALIGNMENT, Executable, OperandCopy, scratch_of
from handlepool.drivers.kernel import Add
from handlepool.drivers.operands import operand_name
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.arrays import layout_of_spec
from handlepool.graphs.empty import without_empty
from handlepool.graphs.forms import conform
from handlepool.graphs.plan import Plan, at_their_places
from handlepool.graphs.plan_key import plan_key
from handlepool.graphs.signature import COMPILE_SETTINGS, GRAPH_SETTINGS, Recipe, normalise
from handlepool.graphs.trace import Draft, Request, check_out, draft, element_strides, layout_of
from handlepool.pool.device import DeviceSlots
from handlepool.pool.plan_directory import PlanDirectory
from handlepool.pool.slot import slot_on_stream
from handlepool.tensors import frontend
from handlepool.tensors.device_properties import DeviceProperties
from handlepool.tensors.graph_types import FrontendGraph, FrontendNode, FrontendTensor
from handlepool.tensors.inference import Shape, infer
from handlepool.tensors.layout import Layout

MOST_REASONS = 4
UNKEPT = (
    "the graph has a value that no text identifies, such as a callback or an array of fractions, or the plan's engine cannot be "
    "saved; give the graph's operations plain numbers, or let the first call build the plan"
)
"""Reason that a plan directory cannot keep a plan, with the fix."""
_ENGINE = re.compile(r'^\{"engineId":(\d+)')
_REASON = re.compile(r"Reason:\s*(.+)$")
_PLAN = re.compile(r"^\s*\[\d+\]\s+(\S+?):\s+(.+)$")


def refusal(name: str, graph: FrontendGraph, operands: list[Any], error: GraphNotSupportedError) -> GraphNotSupportedError:
    """Return the error for a graph that cuDNN refused to plan."""
    nodes = " -> ".join(map(_title, graph.nodes)) or "a graph without nodes"
    arrays = "; ".join(
        f"{tensor.name} {getattr(tensor.data_type, 'name', 'of no type')} {tuple(tensor.dim)} strides {tuple(tensor.stride)}"
        for tensor in operands
    )
    return GraphNotSupportedError(f"{name}: no plan for {nodes} over {arrays} (strides in elements). {shorten(str(error))}")


def shorten(answer: str) -> str:
    """Shorten cuDNN's answer to its first line and the distinct reasons.

    Each reason comes after the names of the engines or plans that gave it. For each engine only the first reason counts: it is
    the cause, and the later lines of that engine only report where cuDNN passed the cause on.
    """
    head, *lines = [line.strip() for line in answer.splitlines() if line.strip()] or [""]
    reasons: dict[str, list[str]] = {}
    # The engine of the current line: None before the first engine, and "" after the engine's first reason.
    engine: str | None = None
    for line in lines:
        if found := _ENGINE.search(line):
            engine = f"engine {found[1]}"
        elif found := _PLAN.search(line):
            reasons.setdefault(found[2], []).append(found[1])
        elif engine and (found := _REASON.search(line)):
            reasons.setdefault(found[1], []).append(engine)
            engine = ""
        elif engine is None:
            reasons.setdefault(line, [])
    listed = [f"{', '.join(names)}: {reason}" if names else reason for reason, names in reasons.items()]
    more = len(listed) - MOST_REASONS
    if more > 0:
        listed[MOST_REASONS:] = [f"and {more} other reasons"]
    return "; ".join([head.removesuffix(" _").removesuffix(":"), *listed])


def _title(node: FrontendNode) -> str:
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return node.name if str(node.name).startswith(f"{kind}.") else f"{node.name} ({kind})"


DEFAULTS = {"intermediate_dtype": np.dtype(np.float32), "compute_dtype": np.dtype(np.float32)}


class Builder(Protocol):
    """Build plans for one device.

    `OnDevice` builds for a device of a pool, and `DescribedDevice` for a device that only its properties describe.

    Attributes
    ----------
    device : int
        Device ordinal.
    """

    device: int

    def new_graph(self, **settings: object) -> Any:
        """Return an empty `cudnn.pygraph`."""

    def compile(
        self, graph: FrontendGraph, operands: Sequence[Any], *, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Plan and build a graph; see `handlepool.drivers.protocol.Driver.compile`."""

    def zeros(self, name: str, output: Layout, title: str) -> Executable:
        """Return a kernel that fills an array with zeros.

        ``name`` is the name of the function and ``title`` the name of the array, for messages.
        """

    def plan_environment(self) -> str:
        """Return the environment that plans depend on besides their graph.

        See `handlepool.drivers.protocol.Driver.plan_environment`.
        """


class OnDevice:
    """Build plans for the current device.

    The device's builder handle, a handle for building alone, plans the graphs.
    """

    def __init__(self, slots: DeviceSlots, driver: Driver) -> None:
        self.device = slots.device
        self._slots = slots
        self._driver = driver
        # Keep the stream alive, so that this thread's slot on the stream stays with this thread.
        self._stream = driver.current_stream(slots.device)

    def new_graph(self, **settings: object) -> Any:
        """Return an empty graph, which the driver makes."""
        return self._driver.new_graph(**settings)

    def _own(self) -> Handle | None:
        """Return this thread's handle of its current stream, or None.

        cuDNN needs a handle to read a saved plan, and the plan needs no handle afterwards. To create another handle would take
        2 ms. If a finalizer launches with this handle during the read, the launch finds the handle bound to another stream,
        and binds the handle again.
        """
        slot = slot_on_stream(self._stream)
        mine = slot is not None and slot.owner is self._slots.status and slot.device == self.device and slot.intact
        return slot.handle if slot is not None and mine else None

    def compile(
        self, graph: FrontendGraph, operands: Sequence[Any], *, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Compile ``graph`` without ending any thread's capture (guarantee 9)."""
        handles = self._slots.handles
        with handles.building(), self._driver.relaxed():
            # A new plan needs the builder handle. A saved plan can be read with this thread's handle. If the builder handle
            # exists already, it reads saved plans as well.
            own = None if settings.get("saved") is None or handles.builder else self._own()
            handle = own or handles.for_building()
            return self._driver.compile(graph, operands, handle=handle, copies=copies, **settings)

    def zeros(self, name: str, output: Layout, title: str) -> Executable:
        """Return a kernel that fills an array with zeros.

        The kernel is an `Add` of no arrays, whose sum is 0.
        """
        with self._slots.handles.build_lock, self._driver.relaxed():
            return self._driver.kernel(Add(), (output,), name=name, titles=(title,))

    def plan_environment(self) -> str:
        """Return the environment that the driver's plans depend on."""
        return self._driver.plan_environment()


def build(
    recipe: Recipe,
    request: Request,
    builder: Builder,
    choose: Callable[[int | Plan | None, bool], Plan] | None,
    index: int | None = None,
    compare: Callable[[Plan, Any, list[Any]], None] | None = None,
    files: PlanDirectory | None = None,
    anew: bool = False,
) -> Plan:
    """Build one plan, or load it from a plan directory.

    ``index`` is the index of cuDNN's candidate to build. Without ``index``, the driver chooses. `Plan.select` and similar methods
    call ``choose`` to replace the plan. ``compare`` gets the plan, the graph before `conform` changed it, and the real tensors of
    that graph. ``compare`` raises if the plan's results are wrong. If the directory ``files`` has the plan, the plan is loaded,
    unless ``index`` or ``anew`` is given.
    """
    name = recipe.name
    if recipe.check is not None:
        recipe.check(request.layouts, request.outs, **request.options)
    recipe.signature.check_options(name, request.options)
    # Settings of the request override settings of the decorator, and both override the defaults.
    settings = DEFAULTS | dict(recipe.settings) | dict(normalise(dict(request.settings)))
    own = {"name": name} | {key: value for key, value in settings.items() if key in GRAPH_SETTINGS}
    drafted = draft(recipe, request, lambda: builder.new_graph(**own))
    graph, outputs = drafted.graph, drafted.outputs
    inputs, given = drafted.operands()
    # A tensor must have an axis, so a scalar array is declared with one axis of extent 1. Below, `_layout` drops this axis again.
    scalar = all(not layout.shape for layout in request.layouts)
    try:
        shapes = _measure(name, drafted, inputs, given, scalar, settings)
        layouts = tuple(_layout(tensor, scalar) for tensor in outputs)
        operands = [*inputs, *outputs]
        titles = drafted.titles()
        made = partial(
            Plan,
            name,
            builder.device,
            inputs=drafted.taken(),
            outputs=layouts,
            single=drafted.single,
            keys=drafted.keys,
            places=drafted.places(),
            _graph=graph,
            _choose=choose,
            asked=(recipe.function, recipe.settings, request),
        )
        # Drivers take no extent of 0. So a graph with an empty array gets an executable from `without_empty`.
        if any(0 in tensor.dim for tensor in operands):
            return made(without_empty(graph, len(inputs), layouts, name, titles, partial(builder.zeros, name)), in_place=())
        copies = conform(
            graph, operands, len(inputs), shapes, lambda place: f"{name}: {titles[place]}", recipe.copies, request.copied
        )
        _number(operands)
        asked = {key: value for key, value in settings.items() if key in COMPILE_SETTINGS}
        if not asked.get("allow_tf32", True) and _multiplies_float32(graph):
            raise GraphNotSupportedError(
                "cuDNN multiplies float32 matrices in TF32 only, even where a plan claims full precision: leave "
                "allow_tf32=True, or multiply with the array library"
            )
        if index is not None:
            asked["plan_index"] = index
        if (limit := asked.get("workspace_limit")) is not None:
            taken = scratch_of(copies)
            if taken > limit:
                raise GraphNotSupportedError(
                    f"copies of the operands take {taken:,} bytes of scratch, more than workspace_limit={limit:,}; raise "
                    f"workspace_limit"
                )
            # In the scratch, the copies come after the plan's own part, at a multiple of the alignment. So the limit for the
            # plan's own part is rounded down to such a multiple.
            asked["workspace_limit"] = (limit - taken) // ALIGNMENT * ALIGNMENT if taken else limit
        make = partial(builder.compile, graph, operands, copies=copies, name=name, titles=titles)
        key = "" if files is None else plan_key(graph, operands, asked, builder.plan_environment())
        executable: Executable | None = None
        if files is not None and key and index is None and not anew and (saved := files.load(key)) is not None:
            try:
                executable = make(saved=saved)
            except GraphNotSupportedError:
                # The driver refused the saved plan, so drop the plan and build a new plan below.
                files.reject(key)
        if executable is None:
            executable = make(**asked)
    except GraphNotSupportedError as error:
        raise refusal(name, graph, [*inputs, *outputs], error) from error
    # If all nodes are pointwise, each output element depends only on the input elements at the same place. Only then may the
    # output be the same array as an input.
    pointwise = all(node.node_type.name == "POINTWISE" for node in graph.nodes)
    in_place = at_their_places(drafted.taken(), layouts) if pointwise else ()
    plan = made(executable, in_place=in_place, copies=copies, key=key)
    # A plan from the plan directory is untried until its first launch. Ask now, because the comparison launches the plan.
    loaded = executable.untried
    if compare is not None:
        # `conform` has changed the first graph, so draft the graph again.
        original = draft(recipe, request, lambda: builder.new_graph(**own))
        inputs, given = original.operands()
        _measure(name, original, inputs, given, scalar, settings)
        compare(plan, original.graph, [*inputs, *original.outputs])
    # A plan that was loaded from the directory need not be saved again.
    if index is None and not loaded:
        save(plan, files)
    return plan


def build_for(
    device: DeviceProperties,
    recipe: Recipe,
    arrays: Sequence[Any],
    outs: Sequence[Any],
    options: dict[str, Any],
    files: PlanDirectory,
) -> Plan:
    """Build a plan for a described device, and save it in ``files``.

    Raises
    ------
    ArgumentError
        If the directory cannot keep the plan, or if cuDNN refuses the properties.
    """
    # Import `planning` only here: it loads cuDNN's frontend, which a call on the current device may not need.
    from handlepool.drivers.cuda.planning import DescribedDevice

    name = recipe.name
    layouts = tuple(
        layout_of_spec(name, operand_name(place, len(arrays), len(outs)), array) for place, array in enumerate((*arrays, *outs))
    )
    request = Request(layouts[: len(arrays)], layouts[len(arrays) :], None, options)
    plan = build(recipe, request, DescribedDevice(device), None, files=files)
    if not plan.candidates:
        raise ArgumentError(
            f"{name}.compile(device=...) was given an empty array, for which cuDNN plans nothing; leave this call out, because "
            f"a call with an empty array needs no plan"
        )
    if not plan.key or plan.executable.save() is None:
        raise ArgumentError(f"{name}.compile(device=...) cannot save the plan, because {UNKEPT}")
    return plan


def _measure(
    name: str,
    drafted: Draft,
    inputs: Sequence[Any],
    given: Sequence[Layout | None],
    scalar: bool,
    settings: Mapping[str, Any],
) -> dict[int, Shape]:
    """Give every tensor of a graph a shape; return the shapes.

    If the caller gave an array for an output, the output takes the array's strides.
    """
    # Without the setting ``io_dtype``, real tensors without a type get the type of the first array.
    io_dtype = frontend.data_type(settings.get("io_dtype") or frontend.numpy_dtype(inputs[0].data_type))
    drafted.graph.context.io_data_type = io_dtype
    shapes = infer(drafted.graph, drafted.outputs, io_dtype=io_dtype)
    for tensor, array in zip(drafted.outputs, given, strict=True):
        if array is not None:
            check_out(name, _layout(tensor, scalar), array)
            tensor.set_stride(element_strides(f"out of {name}", array) or [1])
    return shapes


def save(plan: Plan, files: PlanDirectory | None) -> None:
    """Save ``plan`` in the plan directory ``files``, if there is one.

    In the directory, the plan replaces an earlier plan of the same graph.
    """
    if files is not None and plan.key and (saved := plan.executable.save()) is not None:
        files.save(plan.key, saved)


def _multiplies_float32(graph: FrontendGraph) -> bool:
    """Return whether a graph has a product of float32 matrices.

    On an H200 with cuDNN 9.19, every plan of four such products had an error of 3e-4, even plans without cuDNN's note
    TENSOR_CORE. For a fifth product, with one row, the plans without that note were exact. No property of a product tells whether
    its plans are exact.
    """
    single = frontend.data_type("float32")
    products = [node for node in graph.nodes if node.node_type.name == "MATMUL"]
    return any(tensor.data_type == single for node in products for tensor in node.inputs.values())


def _layout(tensor: FrontendTensor, scalar: bool) -> Layout:
    layout = layout_of(tensor)
    return Layout((), (), layout.dtype) if scalar and layout.size == 1 else layout


def _number(operands: list[Any]) -> None:
    """Make uids ascend in the order of the operands.

    The cuda driver's fast launch passes cuDNN an array of pointers. cuDNN assigns the pointers to the uids in ascending order.
    Uids that ascend already stay as they are.
    """
    uids = [tensor.uid for tensor in operands]
    if uids != sorted(uids):
        # The new uids must differ from all uids in the graph, so they begin far above the operands' uids.
        first = max(uids) + 1_000_000
        for number, tensor in enumerate(operands):
            tensor.set_uid(first + number)
