"""Run a graph function on an empty graph; find each array's tensor.

A reference to a tensor can be resolved only after the function has run. But the function cannot run before its parameters have
the geometry of their arrays. So the function first runs with a guessed assignment of arrays to parameters. It runs again if the
references show another assignment.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from handlepool._util.names import shown
from handlepool.drivers.operands import operand_name
from handlepool.errors import ArgumentError, ArrayTypeError, HandlePoolError
from handlepool.graphs.signature import Recipe, Settings, as_references
from handlepool.graphs.tensor_names import References, is_tensor, made_by_nodes
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import FrontendGraph, FrontendTensor
from handlepool.tensors.inference import MOST_ELEMENTS, axis_order, dense_strides
from handlepool.tensors.layout import Layout, overlaps_itself


def declare(graph: Any, name: str, layout: Layout, title: str) -> Any:
    """Return a graph tensor for an array.

    ``title`` is the array's name in messages.
    """
    return graph.tensor(
        # A scalar is declared with one axis of extent 1.
        dim=list(layout.shape) or [1],
        stride=element_strides(title, layout) or [1],
        data_type=frontend.data_type(layout.dtype),
        name=name,
    )


def element_strides(title: str, layout: Layout) -> list[int]:
    """Return an array's strides in elements.

    On an axis of extent 1 any stride means the same, so for such an axis the function returns the stride of a dense array.
    """
    shape, itemsize = layout.shape, layout.dtype.itemsize
    if any((stride < 0 or stride % itemsize) and extent > 1 for extent, stride in zip(shape, layout.strides, strict=True)):
        raise ArgumentError(
            f"{title} has the strides {layout.strides} bytes for elements of {itemsize} bytes: cuDNN takes no strides that are "
            f"negative or fall between elements; pass a contiguous copy"
        )
    strides = [stride // itemsize for stride in layout.strides]
    if 1 in shape:
        dense = dense_strides(shape, axis_order(shape, strides))
        strides = [plain if extent == 1 else stride for extent, stride, plain in zip(shape, strides, dense, strict=True)]
    if (span := 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) > MOST_ELEMENTS:
        raise ArgumentError(
            f"{title} of shape {shape} has strides of {strides} elements and spans {span:,} elements, gaps included; a tensor "
            f"of cuDNN spans at most {MOST_ELEMENTS:,} elements: pass parts of the array, or a copy without gaps"
        )
    return strides


def layout_of(tensor: FrontendTensor) -> Layout:
    """Return the layout that the array for a declared tensor must have."""
    dtype = frontend.numpy_dtype(tensor.data_type)
    return Layout(tuple(tensor.dim), tuple(step * dtype.itemsize for step in tensor.stride), dtype)


def match(tensor: FrontendTensor, layout: Layout, title: str) -> None:
    """Check an array against a tensor that the function declared.

    The array provides every property that the declaration left open.

    Raises
    ------
    ArgumentError, ArrayTypeError
        For another shape, other strides or another type.
    """
    strides = element_strides(title, layout)
    if tuple(tensor.dim) != layout.shape:
        raise ArgumentError(
            f"{title} is of shape {layout.shape}; tensor {tensor.name!r} was declared with {tuple(tensor.dim)}, so pass an array "
            f"of that shape"
        )
    if not tensor.stride_assigned:
        tensor.set_stride(strides)
    # Axes of extent 1 may have any stride.
    elif any(extent > 1 and a != b for extent, a, b in zip(layout.shape, strides, tensor.stride, strict=True)):
        raise ArgumentError(
            f"{title} has strides {tuple(strides)} elements; tensor {tensor.name!r} was declared with {tuple(tensor.stride)}, so "
            f"pass an array with these strides"
        )
    kind = frontend.data_type(layout.dtype)
    if tensor.data_type is None:
        tensor.set_data_type(kind)
    elif tensor.data_type != kind:
        raise ArrayTypeError(
            f"{title} is {layout.dtype}; tensor {tensor.name!r} was declared as {tensor.data_type.name}, so pass an array of "
            f"that type"
        )


def check_redeclared(tensor: FrontendTensor, layout: Layout, title: str) -> None:
    """Check the changes that the function made to an array's tensor.

    The function may declare other axes over the same elements, as for a vector. It may change nothing else.

    Raises
    ------
    ArgumentError, ArrayTypeError
        For another number of elements, more memory than the array has, or another type.
    """
    if tensor.data_type != frontend.data_type(layout.dtype):
        raise ArrayTypeError(
            f"{title} is {layout.dtype}, and the function set its tensor's type to {tensor.data_type.name}; pass an array of "
            f"that type"
        )
    shape, strides = tuple(tensor.dim), tuple(tensor.stride)
    if shape == layout.shape and strides == tuple(element_strides(title, layout)):
        return
    end = layout.dtype.itemsize * (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)))
    if math.prod(shape) != layout.size or min(strides) < 0 or end > max(layout.reach, layout.dtype.itemsize):
        raise ArgumentError(
            f"{title} is of shape {layout.shape}, and the function declared its tensor with shape {shape} and strides {strides} "
            f"(in elements), which are not the array's elements; declare the tensor over the array's elements, or pass another "
            f"array"
        )


def check_out(name: str, layout: Layout, out: Layout) -> None:
    """Raise if the caller's array ``out`` cannot take an output.

    The frontend does not check this, and a launch would write past such an array.
    """
    if (layout.shape, layout.dtype) != (out.shape, out.dtype):
        raise ArgumentError(
            f"out= of {name} is {out.dtype} of shape {out.shape}; an array for this output must be {layout.dtype} of shape "
            f"{layout.shape}"
        )
    if overlaps_itself(out.shape, out.strides, out.dtype.itemsize):
        raise ArgumentError(
            f"out= of {name} has strides {out.strides} bytes, so its elements overlap; pass an array without overlap"
        )


Assignment = dict[str, int | None]
"""For each parameter, the index of its array in `Request.layouts`.

The index is None for a parameter without an array.
"""

UNKNOWN = Layout((1, 1, 1, 1), (4, 4, 4, 4), np.dtype(np.float32))
"""A layout in place of a missing array's layout.

With this layout the function can run, so that the error can name the missing array.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """The arrays, options and settings for which a plan is wanted.

    Attributes
    ----------
    layouts : tuple of Layout
        Layouts of the arrays, in the order given.
    outs : tuple of Layout
        Layouts of ``out=``. Empty if the call allocates the outputs.
    references : tuple of reference or None
        The reference of each array, outputs included, if the arrays were given by reference.
    options, settings
        Options and settings of this call.
    copied : tuple of int
        Places of the vectors that do not begin at a multiple of 16 bytes. A launch copies such vectors, whatever their layout.
    """

    layouts: tuple[Layout, ...]
    outs: tuple[Layout, ...] = ()
    references: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = ()
    copied: tuple[int, ...] = ()


def draft(recipe: Recipe, request: Request, new_graph: Callable[[], Any]) -> "Draft":
    """Run the graph function, and run it again after a wrong guess.

    The guess assigns the arrays to the function's parameters. Return the last run.
    """
    assignment = _guess(recipe, request)
    drafted = Draft(recipe, request, new_graph(), assignment)
    found = drafted.assignment()
    if found != assignment:
        drafted = Draft(recipe, request, new_graph(), found)
        # If the function names its tensors after their shapes, each run may give another assignment, so stop here.
        if drafted.assignment() != found:
            raise ArgumentError(
                f"{recipe.name} gives its tensors other names for other shapes, so its references cannot be resolved; use the "
                f"names of the function's parameters as references"
            )
    return drafted


def _guess(recipe: Recipe, request: Request) -> Assignment:
    """Assign arrays to parameters.

    Without references, the order decides. With references, names of parameters decide first, and then the order.
    """
    name, signature, options = recipe.name, recipe.signature, request.options
    count = len(request.layouts)
    references = request.references
    if references is None:
        if recipe.inputs is None:
            names = signature.tensors(name, count, options)
            return {parameter: place for place, parameter in enumerate(names)}
        references = recipe.inputs
        if len(references) != count:
            listed = ", ".join(map(shown, references))
            raise ArgumentError(
                f"{name} takes {len(references)} arrays, for {listed}, and was called with {count}; pass an array for each"
            )
    names = signature.referred(name, references, options)
    assignment: Assignment = {parameter: references.index(parameter) if parameter in references else None for parameter in names}
    # The remaining arrays fill the remaining parameters in order, until the first run shows the true assignment.
    rest = iter([place for place in range(count) if place not in assignment.values()])
    return {parameter: next(rest, None) if place is None else place for parameter, place in assignment.items()}


class Draft:
    """One run of a graph function on a graph of its own.

    Attributes
    ----------
    graph : cudnn.pygraph
    outputs : list of graph tensor
    keys : tuple of str or int
        References of the outputs in `GraphFunction.run`.
    single : bool
        Whether the outputs are one array, not a tuple.
    """

    def __init__(self, recipe: Recipe, request: Request, graph: FrontendGraph, assignment: Assignment) -> None:
        self.graph = graph
        self._recipe = recipe
        self._request = request
        self._parameters: dict[str, Any] = {}
        for parameter, place in assignment.items():
            # A parameter without an array gets any layout. So the function can run, and the error can name the missing array.
            layout = next(iter(request.layouts), UNKNOWN) if place is None else request.layouts[place]
            title = f"{recipe.name}: {parameter}" if place is None else self._title(place, parameter)
            self._parameters[parameter] = declare(graph, parameter, layout, title)
        returned = self._run()
        self._references = References(graph, self._parameters)
        self._made = made_by_nodes(graph)
        inputs = self._read(returned)
        self._sources = self._resolve_arrays(inputs)
        # If a node makes the tensor of an array, the array is an output that was given by reference.
        self._inputs = [(place, tensor) for place, tensor in enumerate(self._sources) if id(tensor) not in self._made]

    # Results of the function

    def _run(self) -> Any:
        recipe, request = self._recipe, self._request
        order = (*recipe.signature.required, *recipe.signature.optional)
        in_order: list[Any] = []
        named = dict(request.options)
        for place, (parameter, tensor) in enumerate(self._parameters.items()):
            # After the first omitted parameter, the remaining parameters can only be passed by name.
            if recipe.signature.variadic is not None or (len(in_order) == place and order[place : place + 1] == (parameter,)):
                in_order.append(tensor)
            else:
                named[parameter] = tensor
        try:
            return recipe.function(self.graph, *in_order, **named)
        except HandlePoolError:
            raise
        except Exception as error:
            alone = recipe.signature.variadic is None and not order
            hint = ". Its one parameter is the graph; parameters for arrays follow, as in f(g, x)" if alone else ""
            raise ArgumentError(
                f"{recipe.name} raised {type(error).__name__}: {error}; it was building its graph for "
                f"{', '.join(map(str, request.layouts))}{hint}"
            ) from error

    def _read(self, returned: Any) -> tuple[Any, ...] | None:
        """Read the outputs from the function's result; return its input references.

        The references are None if the function named no inputs.
        """
        recipe = self._recipe
        inputs, wanted = None, recipe.outputs
        if isinstance(returned, Mapping):
            excess = returned.keys() - {"inputs", "outputs"}
            if recipe.inputs is not None:
                excess |= returned.keys() & {"inputs"}
            if wanted is not None:
                excess |= returned.keys() & {"outputs"}
            if excess:
                raise ArgumentError(
                    f"{recipe.name} returned a mapping with {', '.join(map(shown, returned))}; the mapping may have 'inputs' and "
                    f"'outputs', but no key that the decorator sets"
                )
            inputs = as_references("inputs", returned.get("inputs"))
            wanted = wanted or as_references("outputs", returned.get("outputs"))
            returned = None
        elif wanted is not None and returned is not None:
            raise ArgumentError(
                f"{recipe.name} returned {shown(returned)}, and its decorator names outputs=; return nothing, or drop outputs="
            )
        if wanted is not None:
            self.outputs = [self._references.resolve(reference) for reference in wanted]
            self.single = len(wanted) == 1
        elif returned is None:
            # Without a result, the outputs are the tensors marked with ``set_output(True)``.
            self.outputs = [tensor for tensor in self._made.values() if not tensor.is_virtual]
            self.single = len(self.outputs) == 1
        else:
            self.single = not isinstance(returned, (tuple, list))
            self.outputs = [returned] if self.single else list(returned)
        if not self.outputs or not all(is_tensor(tensor) for tensor in self.outputs):
            what = "nothing" if returned is None else shown(returned)
            raise ArgumentError(
                f"{recipe.name} returned {what}; return the graph tensor to output, or a tuple of graph tensors, or set "
                f"outputs= in the decorator"
            )
        for tensor in self.outputs:
            if id(tensor) not in self._made:
                raise ArgumentError(
                    f"{recipe.name}: no node of this graph makes tensor {tensor.name!r}, so it cannot be an output; return "
                    "the result of an operation (g.identity(x) makes an output of an input x)"
                )
        self.keys = tuple(
            reference if isinstance(reference, (str, int)) else self._references.name(tensor)
            for reference, tensor in zip(wanted or self.outputs, self.outputs, strict=True)
        )
        listed = {id(tensor) for tensor in self.outputs}
        for tensor in self._made.values():
            if not tensor.is_virtual and id(tensor) not in listed:
                raise ArgumentError(
                    f"{recipe.name} marked {self._references.name(tensor)!r} with set_output(True) and does not name it among "
                    f"its outputs; add the tensor to the outputs, or drop the mark"
                )
        return inputs

    def _resolve_arrays(self, inputs: tuple[Any, ...] | None) -> list[Any]:
        """Return the tensor of each array."""
        name, count = self._recipe.name, len(self._request.layouts)
        references = self._request.references or inputs or self._recipe.inputs
        if references is None:
            sources = list(self._parameters.values())
            if len(sources) != count:
                listed = ", ".join(self._parameters) or "no arrays"
                raise ArgumentError(
                    f"{name} takes {listed}, and was called with {count} arrays; if {name} declares tensors itself, list the "
                    f"tensors of all arrays in inputs="
                )
            return sources
        if len(references) != count:
            listed = ", ".join(map(self._shown, references))
            raise ArgumentError(
                f"{name} takes {len(references)} arrays, for {listed}, and was called with {count}; pass an array for each"
            )
        sources = [self._references.resolve(reference) for reference in references]
        for place, tensor in enumerate(sources):
            if any(tensor is other for other in sources[:place]):
                raise ArgumentError(
                    f"{name} was given two arrays for one tensor: {self._shown(references[place])} and another reference both "
                    f"mean {self._references.name(tensor)!r}, so leave one of them out"
                )
        return sources

    def assignment(self) -> Assignment:
        """Return the place of each parameter's array, as the run showed.

        The method raises if an input lacks an array, or if an array belongs to no input.
        """
        found: Assignment = {}
        for parameter, tensor in self._parameters.items():
            found[parameter] = next((place for place, source in enumerate(self._sources) if source is tensor), None)
        self._check_complete()
        return found

    def _check_complete(self) -> None:
        name = self._recipe.name
        outputs = {id(tensor) for tensor in self.outputs}
        needed = {id(tensor): tensor for tensor in self._needed()}
        covered = {id(tensor) for tensor in self._sources}
        missing = [self._references.label(tensor) for key, tensor in needed.items() if key not in covered]
        if missing:
            raise ArgumentError(f"{name} needs an array for {', '.join(missing)}. {self._references.listing()}")
        for place, tensor in enumerate(self._sources):
            if id(tensor) in needed or (self._request.references is not None and id(tensor) in outputs):
                continue
            why = (
                "is made by the graph and is no output; leave its array out"
                if id(tensor) in self._made
                else "is used by no node; leave its array out"
            )
            if id(tensor) in outputs:
                why = "is an output; pass its array as out="
            raise ArgumentError(f"{self._title(place)}: tensor {self._references.name(tensor)!r} {why}")

    def _needed(self) -> Iterator[Any]:
        for node in self.graph.nodes:
            for port, tensor in node.inputs.items():
                # A ragged offset is a tensor, and needs an array as well.
                for source in (tensor, tensor.ragged_offset):
                    if source is None or source.is_virtual or id(source) in self._made or source.pass_by_value is not None:
                        continue
                    if source.is_pass_by_value:
                        raise ArgumentError(
                            f"{self._recipe.name}: {node.name}::{port} is passed by value and has no value; make this tensor "
                            f"with g.tensor_scalar(value, type)"
                        )
                    yield source

    # Operands of the plan

    def operands(self) -> tuple[list[Any], list[Layout | None]]:
        """Return the checked input tensors, and the given layout of each output.

        The layout is None for an output that the call allocates.
        """
        request = self._request
        own = {id(tensor) for tensor in self._parameters.values()}
        inputs = []
        for place, tensor in self._inputs:
            if id(tensor) not in own:
                match(tensor, request.layouts[place], self._title(place))
            else:
                check_redeclared(tensor, request.layouts[place], self._title(place))
            inputs.append(tensor)
        if not inputs:
            raise ArgumentError(f"{self._recipe.name} has no inputs; a graph needs at least one input")
        if request.references is None:
            if request.outs and len(request.outs) != len(self.outputs):
                raise ArgumentError(
                    f"{self._recipe.name} has {len(self.outputs)} outputs and out= holds {len(request.outs)} arrays; pass a "
                    f"tuple with an array for each output"
                )
            return inputs, list(request.outs) or [None] * len(self.outputs)
        places = self.places()[len(inputs) :]
        return inputs, [None if place < 0 else request.layouts[place] for place in places]

    def taken(self) -> tuple[Layout, ...]:
        """Return the layouts of the inputs, in the order of the operands."""
        return tuple(self._request.layouts[place] for place, _ in self._inputs)

    def places(self) -> tuple[int, ...]:
        """Return the place of each operand's array in the request.

        The place is -1 for an output that the call allocates.
        """
        by_tensor = {id(tensor): place for place, tensor in enumerate(self._sources)}
        return tuple(place for place, _ in self._inputs) + tuple(by_tensor.get(id(tensor), -1) for tensor in self.outputs)

    def titles(self) -> list[str]:
        """Return the names of the operands for messages, in order."""
        references, inputs = self._request.references, self._inputs
        named = [f"argument {place} ({tensor.name})" for place, tensor in inputs]
        titles = named + [operand_name(place, 0, len(self.outputs)) for place in range(len(self.outputs))]
        if references is not None:
            for operand, place in enumerate(self.places()):
                if place >= 0:
                    titles[operand] = f"the array for {self._shown(references[place])}"
        return titles

    def _title(self, place: int, parameter: str | None = None) -> str:
        """Return the name of an array for messages."""
        name, references = self._recipe.name, self._request.references
        if references is not None:
            return f"{name}: the array for {self._shown(references[place])}"
        return f"{name} argument {place}" + (f" ({parameter})" if parameter else "")

    @staticmethod
    def _shown(reference: Any) -> str:
        return shown(reference.name if is_tensor(reference) else reference)
