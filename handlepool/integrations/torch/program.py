"""Run a lowered graph step by step, and record it.

The first run settles how each step runs. If this library refuses to compute a kernel, torch computes the kernel. If a view is
impossible in the given layout, the step copies the value before it takes the view.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

import handlepool
from handlepool import ArgumentError, ArrayTypeError, CaptureError, GraphNotSupportedError, TraceError
from handlepool.integrations.torch.capture import Captured
from handlepool.integrations.torch.cleaning import base_of, clean, free_of_values, is_view
from handlepool.integrations.torch.constants import Constants
from handlepool.integrations.torch.convolutions import lower_convolutions
from handlepool.integrations.torch.gates import lower_gates
from handlepool.integrations.torch.held import Held
from handlepool.integrations.torch.kernel import Kernel, Lowering, Value, arguments, value_of
from handlepool.integrations.torch.layers import ALIGNED, lower_layers, lower_slices
from handlepool.integrations.torch.outputs import Outputs, is_dense
from handlepool.integrations.torch.places import Place
from handlepool.integrations.torch.pointwise import lower_norms, lower_pointwise
from handlepool.integrations.torch.refusals import NotNow, NotTaken
from handlepool.integrations.torch.ways import quickest

aten = torch.ops.aten
HANDLEPOOL, TORCH, VIEW, COPY = "handlepool", "torch", "view", "copy"
_REFUSALS = (ArgumentError, ArrayTypeError, GraphNotSupportedError, TraceError, NotTaken)
MOST_TIMED = 4096
"""The maximum number of kernels whose quickest way is remembered."""
_quickest: dict[Any, str] = {}
"""The name of each timed kernel's quickest way.

A key has the kernel's name, its options, and the geometry of its arguments.
"""


@dataclass(eq=False, slots=True)
class Step:
    """One operation of a program.

    Attributes
    ----------
    node : Node
    kind : str
        `HANDLEPOOL`, `TORCH` or `VIEW`.
    name : str
    inputs : list of int
        The slots of the step's arguments. Here a slot is an index in the list of all values of a run.
    output : int
        The slot of the step's value.
    run : callable
    dropped : list of int
        The slots whose values no later step reads. These values are released after this step.
    why : str
        The reason why torch computes the step, or why the view needs a copy. Empty for any other step.
    """

    node: fx.Node
    kind: str
    name: str
    inputs: list[int]
    output: int
    run: Callable[..., Any]
    dropped: list[int]
    why: str = ""


class Program:
    """A graph's steps, for arguments of one geometry.

    Parameters
    ----------
    graph : Captured
    place : Place
    device : device
    name : str
        The model's name, for messages.
    tune : bool
        Whether the ways to compute each kernel are timed, so that the quickest way is used.
    options : dict
        The options of `handlepool.recorded`.

    Attributes
    ----------
    steps : list of Step
    recorded : RecordedFunction
    times : dict of float
        Microseconds of a call by this program and by Inductor; empty if they were not compared.
    """

    def __init__(
        self, graph: Captured, place: Place, device: torch.device, name: str, tune: bool, options: dict[str, Any]
    ) -> None:
        _check(graph.graph)
        self._place = place
        self._inputs = [(at, node) for at, node in enumerate(graph.inputs) if node is not None]
        written = {id(target) for _, target in graph.writes if isinstance(target, Tensor)}
        # A buffer that the model writes is passed as an argument of each call. As a weight, the buffer would count as changed
        # after each call.
        self._state = [(node, tensor) for node, tensor in graph.weights.items() if id(tensor) in written]
        fixed = {node: tensor for node, tensor in graph.weights.items() if id(tensor) not in written}
        self._outputs = Outputs(graph)
        self._constants = Constants(fixed)
        self.weights = [*fixed.values()]
        clean(graph.graph, {*self._outputs.returned})
        free_of_values(graph.graph)
        with torch.no_grad():
            self._constants.fold(graph.graph)
            lowering = Lowering(graph.graph, self._constants, place.kind)
            _bring_to_device(lowering, device)
            for lower in (lower_gates, lower_convolutions, lower_layers, lower_norms, lower_pointwise, lower_slices):
                lower(lowering)
        self.steps: list[Step] = []
        self._slots: dict[fx.Node, int] = {}
        self._build(graph.graph)
        self._settled = False
        self.times: dict[str, float] = {}
        self._tunes = tune and place.kind == "cuda"
        self._copies = place.operation("copy", _copied) if place.kind == "cuda" else _copied
        # The program owns the recorded function. The recorded function refers back to the program by a weak reference. With a
        # strong reference, only Python's garbage collector could free the two objects.
        run = partial(_run, self._arrays, Held(weakref.ref(self)))
        run.__name__ = run.__qualname__ = name  # type: ignore[attr-defined]
        self.recorded = handlepool.recorded(run, strict=True, **options)

    # Building

    def _build(self, graph: fx.Graph) -> None:
        """Make a step for each node that a run has to compute."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        self._returned: list[fx.Node] = [*output.args[0]]
        for node in [node for _, node in self._inputs] + [node for node, _ in self._state]:
            self._slot(node)
        steps: list[tuple[fx.Node, str, str, list[fx.Node], Callable[..., Any]]] = []
        for node in graph.nodes:
            if node.op != "call_function" or node in self._constants:
                continue
            if isinstance(node.target, Kernel):
                steps.append((node, HANDLEPOOL, node.target.__name__, [*node.args], node.target))
            elif is_view(node):
                if isinstance(value_of(node), Tensor):
                    steps.append((node, VIEW, _name(node), [_source(node)], _view(node)))
            elif _lays(node) and not any(base_of(each) is node for each in self._returned):
                steps.append((node, COPY, "copy", [node.args[0]], _same))
            elif node.target is operator.getitem:
                steps.append((node, VIEW, "item", [node.args[0]], operator.itemgetter(node.args[1])))
            else:
                inputs = node.all_input_nodes
                steps.append((node, TORCH, _name(node), inputs, _plain(node.target, node.args, node.kwargs, inputs)))
        read = {each for _, _, _, inputs, _ in steps for each in inputs}
        self._kept = [node for node in self._constants.values if node in read]
        self._arrays = tuple([self._place.array(self._constants.values[node]) for node in self._kept])
        for node in self._kept:
            self._slot(node)
        for node, kind, name, inputs, run in steps:
            slots = [self._slots[each] for each in inputs]
            self.steps.append(Step(node, kind, name, slots, self._slot(node), run, []))
        self._find_ends()
        self._slots_returned = [self._slots[node] for node in self._returned if node not in self._constants]

    def _slot(self, node: fx.Node) -> int:
        return self._slots.setdefault(node, len(self._slots))

    def _find_ends(self) -> None:
        """Note at each step the values that no later step reads."""
        kept = {self._slots[node] for node in self._returned if node in self._slots}
        last: dict[int, Step] = {step.output: step for step in self.steps}
        for step in self.steps:
            last |= dict.fromkeys(step.inputs, step)
        for slot, step in last.items():
            if slot not in kept:
                step.dropped.append(slot)

    # Running

    def run(self, inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
        """Run all steps without autocast; return the program's results."""
        with _without_modes(self._place.kind):
            return self._steps(inputs, constants)

    def _steps(self, inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
        values: list[Any] = [*inputs, *constants, *[None] * len(self.steps)]
        for step in self.steps:
            given = [values[slot] for slot in step.inputs]
            values[step.output] = step.run(*given) if self._settled else self._settle(step, given)
            for slot in step.dropped:
                values[slot] = None
        found = [values[slot] for slot in self._slots_returned]
        if not self._settled:
            self._lay_results(found)
            self._settled = True
        return tuple([lay(value) for lay, value in zip(self._lays, found, strict=True)])

    def settle(self, leaves: Sequence[Any]) -> None:
        """Run all steps once without recording, to decide how each step runs."""
        self.run(self._place.arrays(self._given(leaves)), self._arrays)

    def _given(self, leaves: Sequence[Any]) -> list[Tensor]:
        given = [leaves[at] for at, _ in self._inputs] + [tensor for _, tensor in self._state]
        if len(given) > 1:
            given = self._apart(given)
        return given

    def _apart(self, given: list[Tensor]) -> list[Tensor]:
        """Return ``given``, with copies of tensors that share memory.

        A tensor is copied if it shares memory with an earlier tensor. A recorded function would refuse such arguments.
        """
        seen: set[int] = set()
        apart = []
        for each in given:
            storage = each.untyped_storage().data_ptr()
            if storage in seen:
                if self.writes:
                    raise NotNow(
                        "the model writes an argument, and some arguments of this call share memory: pass separate tensors"
                    )
                each = each.clone(memory_format=torch.preserve_format)
            seen.add(storage)
            apart.append(each)
        return apart

    def _settle(self, step: Step, given: list[Any]) -> Any:
        """Decide how a step runs from now on, and run it."""
        if step.kind is HANDLEPOOL:
            return self._settle_kernel(step, given)
        if step.kind is COPY:
            expected = value_of(step.node)
            if _lies_so(given[0], expected):
                step.kind, step.run = VIEW, _same
            else:
                step.kind, step.run = HANDLEPOOL, self._lay(expected, given[0])
        if step.kind is VIEW and step.name not in ("item", "copy"):
            return self._settle_view(step, given[0])
        if step.kind is TORCH:
            step.run = self._place.operation(step.name, step.run)
        return step.run(*given)

    def _settle_kernel(self, step: Step, given: list[Any]) -> Any:
        kernel: Any = step.node.target
        expected = value_of(step.node)
        ways, aligned = self._ways(kernel, step, given, expected), False
        if not ways and self._misaligned(given):
            ways, aligned = self._ways(kernel, step, [self._copy(each) for each in given], expected), True
        if not ways:
            step.kind, step.run = TORCH, self._place.operation(step.name, kernel.plain)
        else:
            if self._tunes and not aligned:
                ways = {**ways, TORCH: self._place.operation(step.name, kernel.plain)}
            name = self._chosen(kernel, ways, given) if self._tunes and not aligned else next(iter(ways))
            step.kind, step.run, step.why = HANDLEPOOL, ways[name], ""
            if name == TORCH:
                step.kind, step.why = TORCH, "torch's kernel is quicker"
            if aligned:
                run = step.run
                step.run = lambda *values: run(*[self._copy(each) for each in values])
        return step.run(*given)

    def _ways(self, kernel: Kernel, step: Step, given: list[Any], expected: Tensor) -> dict[str, Callable[..., Any]]:
        """Return the functions in ``kernel.ways`` that give the right geometry.

        The result of a function must have the shape and the type of ``expected``. If a function is left out, ``step.why`` gets
        the reason.
        """
        found = {}
        for name, way in kernel.ways.items():
            try:
                value = way(*given)
            except _REFUSALS as error:
                step.why = f"{type(error).__name__}: {error}"
                continue
            if tuple(value.shape) == tuple(expected.shape) and _dtype(value) == _dtype(expected):
                found[name] = way
            else:
                step.why = (
                    f"handlepool's result has shape {tuple(value.shape)} and type {_dtype(value)}, "
                    f"torch's has shape {tuple(expected.shape)} and type {_dtype(expected)}"
                )
        return found

    def _chosen(self, kernel: Kernel, ways: dict[str, Callable[..., Any]], given: list[Any]) -> str:
        """Return the name of the quickest function in ``ways``.

        Each kernel is timed once in the process for each geometry of its arguments.
        """
        if kernel.key is None:
            return next(iter(ways))
        lies = tuple([(tuple(each.shape), _strides(each), each.dtype, each.data_ptr() % ALIGNED) for each in given])
        key = kernel.__name__, repr(kernel.key), lies
        if key not in _quickest:
            if len(_quickest) >= MOST_TIMED:
                _quickest.clear()
            _quickest[key] = quickest(ways, given)[0]
        return _quickest[key]

    def _misaligned(self, given: list[Any]) -> bool:
        """Return whether an array in ``given`` is misaligned for this library."""
        return any(self._place.pointer(each) % ALIGNED for each in given)

    def _copy(self, value: Value) -> Any:
        """Return the value if it is aligned, else an aligned copy."""
        return self._copies(value) if self._place.pointer(value) % ALIGNED else value

    def _settle_view(self, step: Step, value: Value) -> Any:
        function, place = step.run, self._place
        look = partial(place.view, function)
        source = value_of(_source(step.node))
        strided = step.node.target is aten.as_strided.default
        if not strided or _strides(value) == tuple(source.stride()):
            try:
                found = look(value)
            except RuntimeError as error:
                step.why = f"the view needs a copy of its argument: {str(error)[:100]}"
            else:
                step.run = look
                return found
        lay = self._lay(source, value)
        step.run = lambda value: look(lay(value))
        return step.run(value)

    def _lay(self, expected: Tensor, value: Value) -> Callable[[Any], Any]:
        """Return a function that copies a value into the strides of ``expected``."""
        shape, strides, dtype = tuple(expected.shape), expected.stride(), expected.dtype
        forms = ((handlepool.to_contiguous, torch.contiguous_format), (handlepool.to_channels_last, torch.channels_last))
        for copy, form in forms:
            if (len(shape) == 4 or form is torch.contiguous_format) and expected.is_contiguous(memory_format=form):
                try:
                    copy(value)
                except _REFUSALS:
                    continue
                return copy

        def laid(tensor: Tensor) -> Tensor:
            return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)

        return self._place.operation("copy", laid)

    def _lay_results(self, found: list[Any]) -> None:
        """Decide for each result whether it is copied into its traced strides."""
        self._lays: list[Callable[[Any], Any]] = []
        varying = [node for node in self._returned if node not in self._constants]
        for node, value in zip(varying, found, strict=True):
            expected = value_of(node)
            same = _lies_so(value, expected)
            # A recorded function returns copies without gaps. So a result that was traced with gaps, such as an expanded tensor,
            # is not copied into its traced strides.
            self._lays.append(_same if same or not is_dense(expected) else self._lay(expected, value))

    # Calls

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Call the program with the leaves of the arguments."""
        place = self._place
        if not self._slots_returned:
            # All results are constants, so there is nothing to record.
            return self._outputs.build([self._constants.values[node].clone() for node in self._returned], leaves)
        try:
            own = place.tensors(self.recorded(*place.arrays(self._given(leaves))))
        except CaptureError as error:
            raise NotTaken(str(error)) from error
        if len(own) != len(self._returned):
            left = iter(own)
            # The program goes on to use its constants, so a call returns copies of the constants.
            own = [self._constants.values[node].clone() if node in self._constants else next(left) for node in self._returned]
        return self._outputs.build(own, leaves)

    def program(self, leaves: Sequence[Any]) -> handlepool.Program:
        """Return the recorded program for the leaves of the arguments.

        Raises
        ------
        CaptureError
        """
        if not self._slots_returned:
            raise CaptureError("all results of the model are constants, so the model has no program")
        return self.recorded.program(*self._place.arrays(self._given(leaves)))

    def tune(self, seconds: float) -> None:
        """Find the best number of lanes within about ``seconds``."""
        self.recorded.tune(seconds=seconds)

    def refresh(self) -> None:
        """Compute the constants again from the present weights."""
        self._constants.refresh({*self._kept, *[node for node in self._returned if node in self._constants]})
        for node, array in zip(self._kept, self._arrays, strict=True):
            self._place.refresh(array, self._constants.values[node])

    @property
    def writes(self) -> bool:
        """Whether a call writes buffers or arguments of the model."""
        return bool(self._outputs.writes)


def _run(constants: tuple[Any, ...], program: Held, *inputs: Any) -> tuple[Any, ...]:
    """Run ``program``; `handlepool.recorded` records this function."""
    found: tuple[Any, ...] = program.value().run(inputs, constants)
    return found


def _without_modes(kind: str) -> AbstractContextManager[Any]:
    """Return a context without autocast.

    The graph already contains autocast's conversions as operations.
    """
    return torch.autocast(kind, enabled=False, cache_enabled=False)


def _same(value: Value) -> Any:
    return value


def _copied(tensor: Value) -> Any:
    return tensor.clone() if isinstance(tensor, Tensor) else tensor.copy(order="K")


def _lays(node: fx.Node) -> bool:
    """Return whether a node copies a tensor into another layout."""
    form = node.kwargs.get("memory_format")
    return node.target is aten.clone.default and form in (torch.contiguous_format, torch.channels_last)


def _lies_so(value: Value, expected: Tensor) -> bool:
    """Return whether a value has the strides of the traced tensor ``expected``."""
    return all(a == b for extent, a, b in zip(expected.shape, _strides(value), expected.stride(), strict=True) if extent != 1)


def _strides(value: Value) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        return value.stride()
    return tuple([step // value.dtype.itemsize for step in value.strides])


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def _name(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return name.removeprefix("aten.").partition(".")[0]


def _source(node: fx.Node) -> fx.Node:
    """Return the node whose tensor a view reads.

    If the view picks a result of an operation such as `split`, the node that this operation reads is returned.
    """
    source = node.all_input_nodes[0]
    return source if isinstance(value_of(source), Tensor) else _source(source)


def _view(node: fx.Node) -> Callable[[Tensor], Any]:
    """Return a function that applies the view ``node`` to a tensor."""
    if node.target is operator.getitem:
        parts, at = _view(node.args[0]), node.args[1]
        return lambda tensor: parts(tensor)[at]
    target: Any = node.target
    source, args, kwargs = node.all_input_nodes[0], node.args, node.kwargs

    def view(tensor: Tensor) -> Any:
        given, named = fx.node.map_arg((args, kwargs), {source: tensor}.__getitem__)
        return target(*given, **named)

    return view


def _plain(target: Any, args: Any, kwargs: Any, inputs: Sequence[fx.Node]) -> Callable[..., Any]:
    """Return a torch operation as a function of its tensors alone."""

    def run(*values: Value) -> Any:
        given, named = fx.node.map_arg((args, kwargs), dict(zip(inputs, values, strict=True)).__getitem__)
        return target(*given, **named)

    return run


def _check(graph: fx.Graph) -> None:
    """Raise for a graph whose replay would differ from the model.

    Raises
    ------
    NotTaken
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotTaken(f"the model has the operation {node.target}, and handlepool knows only operations of aten")
        tags = node.target.tags
        drawn = torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(node)
        if drawn:
            raise NotTaken(f"the model draws random numbers, in the operation {node.target}")
        if node.target._schema.is_mutable:
            raise NotTaken(f"the model writes in place, in the operation {node.target}")
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_sparse):
                raise NotTaken(
                    f"the model's operation {node.target} makes a tensor of the layout {value.layout}, which no program can hold"
                )
            symbols = [value, *(value.shape if isinstance(value, Tensor) else ())]
            if any(isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool)) for each in symbols):
                raise NotTaken(
                    f"the model's operation {node.target} makes a shape or the control flow depend on values of tensors"
                )


def _draws_nothing(node: fx.Node) -> bool:
    """Return whether an operation's dropout option is switched off."""
    named = dict(zip([each.name for each in node.target._schema.arguments], arguments(node), strict=True))
    return named.get("dropout_p", named.get("dropout")) == 0 or named.get("train") is False


def _bring_to_device(lowering: Lowering, device: torch.device) -> None:
    """Move constant CPU tensors of a single number to the device.

    Raises
    ------
    NotTaken
        For any other tensor that is not on ``device``.
    """
    for node in [*lowering.graph.nodes]:
        value = node.meta.get("val")
        users = [user for user in node.users if lowering.varies(user)]
        if not isinstance(value, Tensor) or value.device == device or not (users or lowering.varies(node)):
            continue
        if node not in lowering.constants or value.dim():
            raise NotTaken(
                f"the model uses a tensor on {value.device} and other tensors on {device}: move all tensors to {device}"
            )
        moved = lowering.made(_moved, node, device)
        for user in users:
            user.replace_input_with(node, moved)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)
