"""Run the epilogue of a convolution or product: bias, residual, activation.

An operation has several forms. The plan contains some parts of the epilogue, as far as that is known to be right, and one more
launch, in place over the result, does the rest. By default the plan contains as many parts as `handlepool.graphs.forms` and
cuDNN allow: bias and activation together, the bias alone, or neither. A measurement may choose another form.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.arrays import ConvertedArguments
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.kernels import Described, KernelFunction
from handlepool.graphs.launch import GraphCall, check_arrays, misaligned_vectors
from handlepool.graphs.plan import Plan
from handlepool.ops.activations import ACTIVATIONS, OWN_ACTIVATIONS, activate
from handlepool.ops.elementwise import Arguments, describe, summed
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout, share

Form = tuple[str, ...]
"""The parts of an epilogue in one plan, in their order there."""
Prepare = Callable[[Form, bool, tuple[Any, ...], Any, ConvertedArguments | None], GraphCall]
"""Prepare a call with some parts of the epilogue fused.

The arguments are the parts, whether operands may be copied, the arrays, the outs and the converted arguments.
"""


def parts_of(bias: object, add: object, activation: object) -> tuple[str, ...]:
    """Return the parts of an epilogue that were given, in their order."""
    given = {"bias": bias, "add": add, "activation": activation}
    return tuple(part for part, value in given.items() if value is not None)


def along(tensor: Any, rank: int, axis: int) -> Any:
    """Declare a vector along one axis of several."""
    ((extent,), (step,)) = tensor.get_dim(), tensor.get_stride()
    dims, strides = [1] * rank, [max(extent * step, 1)] * rank
    dims[axis], strides[axis] = extent, step
    return tensor.set_dim(dims).set_stride(strides)


@dataclass(frozen=True, slots=True)
class Finisher:
    """Launch the rest of an epilogue behind an operation, in place.

    Attributes
    ----------
    axis : int
        The result's axis that a bias lies along.
    kernel : KernelFunction
        Takes the result and addends that broadcast, each of which begins at a multiple of 16 bytes.
    graph : GraphFunction
        Takes the result, a bias if given, and an addend. A bias may begin at any element.
    """

    axis: int
    kernel: KernelFunction
    graph: GraphFunction[..., Any]

    @classmethod
    def of(cls, name: str, axis: int) -> "Finisher":
        """Make the finisher of an operation, whose bias lies along an axis."""

        def describe_rest(layouts: tuple[Layout, ...], *, activation: str | None) -> Described:
            arguments = Arguments(name, (None,) * len(layouts), {"activation": activation})
            return describe(summed, name, layouts, arguments=arguments)

        def finish(g: Any, y: Any, *rest: Any, biased: bool, activation: str | None) -> Any:
            rank = len(y.get_dim())
            for place, tensor in enumerate(rest):
                y = g.add(y, along(tensor, rank, axis) if biased and not place else tensor)
            return y if activation is None else activate(g, y, activation)

        return cls(axis, KernelFunction(describe_rest, name), GraphFunction(finish, name=name))

    def calls(
        self, pool: PoolInternals, result: Any, others: tuple[Any, ...], biased: bool, activation: str | None
    ) -> Iterator[GraphCall]:
        """Yield the calls that bring the result to its end."""
        if misaligned_vectors(pool.driver, others):
            applied = activation if activation in ACTIVATIONS else None
            yield self.graph.prepare(pool, (result, *others), result, {"biased": biased, "activation": applied})
            if applied == activation:
                return
            others, biased = (), False
        if biased:
            bias, *rest = others
            behind = result.ndim - 1 - self.axis % result.ndim
            others = (bias[(slice(None), *(None,) * behind)], *rest)
        yield self.kernel.prepare(pool, (result, *others), result, {"activation": activation})


@dataclass(frozen=True, slots=True)
class Stages:
    """Run an operation with its epilogue in few launches.

    Attributes
    ----------
    name : str
        The operation's name, for messages.
    pool : PoolInternals
    parts : tuple of str
        From `parts_of`.
    activation : str or None
    fused : callable
        Raises `GraphNotSupportedError` for parts that cannot be fused.
    finish : Finisher
    key : object
        Separates the options of this operation from other options.
    copying : bool
        Whether every form that is known to be right needs copies.
    reorders : bool
        Whether a plan may add the residual before the bias.
    """

    name: str
    pool: PoolInternals
    parts: tuple[str, ...]
    activation: str | None
    fused: Prepare
    finish: Finisher
    key: object
    copying: bool = False
    reorders: bool = False

    def call(self, arrays: tuple[Any, ...], out: object) -> GraphCall:
        """Return the call for two factors, the bias and the addend.

        ``parts`` says which of bias and addend are given.
        """
        outs = _outs(out)
        try:
            natives = self.pool.driver.array_types
            if (out is not None and not outs) or all(type(array) in natives for array in arrays + outs):
                return self._prepare(arrays, out, None)
            converted = ConvertedArguments(self.name, self.pool, arrays, outs)
            return converted.prepare(lambda _pool, given, outs, _options, _settings, it: self._prepare(given, outs, it), out, {})
        except Exception as error:
            # Any call may be the first to report a lost context. Later calls then name the cause.
            self.pool.status.diagnose(error)
            raise

    def _prepare(self, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None) -> GraphCall:
        chosen, outs = self.pool.plans.fused_parts, _outs(out)
        key = self._key((*arrays, *outs))
        form = None if key is None else chosen.get(key)
        if form is not None:
            # A known form skips the fused builds that are refused. The checks of these builds run here instead.
            driver = self.pool.driver
            check_arrays(self.name, driver, driver.current_device(), arrays, outs)
            call = self.prepare(form, arrays, out, converted)
            self._note(key, form, call, arrays, outs)
            return call
        # The longest prefix of the epilogue that fuses is the default, because each unfused part costs a launch.
        for count in range(len(self.parts), -1, -1):
            form = self.parts[:count]
            try:
                call = self.prepare(form, arrays, out, converted)
            except GraphNotSupportedError as error:
                if count:
                    # A shorter prefix of the epilogue may still fuse.
                    continue
                advice = _advice(arrays[0], outs)
                if advice:
                    raise GraphNotSupportedError(f"{error}{advice}") from error
                raise
            if key is not None and count < len(self.parts):
                # Remember the form, so that later calls skip the refused builds.
                chosen[key] = form
            self._note(key, form, call, arrays, outs)
            return call
        # The loop returns or raises when its count is 0.
        raise AssertionError

    def prepare(self, form: Form, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None = None) -> GraphCall:
        """Return the call in a form.

        Raises
        ------
        GraphNotSupportedError
            If no plan is known to be right for these parts.
        """
        if "activation" in form and self.activation in OWN_ACTIVATIONS:
            raise GraphNotSupportedError(f"{self.name}: cuDNN has no {self.activation}")
        given = dict(zip((part for part in self.parts if part != "activation"), arrays[2:], strict=True))
        rest = tuple(part for part in self.parts if part not in form)
        factors = (*arrays[:2], *(array for part, array in given.items() if part in form))
        call = self._attempt(form, factors, out, converted)
        return self._finish(call, [given[part] for part in rest if part in given], rest, out) if rest else call

    def _note(self, key: Hashable, form: Form, call: GraphCall, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
        """Note the site of a call, whose form may be chosen later."""
        sites, plan = self.pool.plans.sites, call.plan
        if key is not None and self.parts and id(plan) not in sites:
            # The site holds the plan, so that its identity stays valid as a key.
            sites[id(plan)] = EpilogueSite(self, key, plan, form, tuple(map(Layout.of, arrays)), tuple(map(Layout.of, outs)))

    def _key(self, given: tuple[Any, ...]) -> Hashable | None:
        try:
            device = self.pool.driver.current_device()
            key = (self.name, device, self.key, self.parts, *((array.shape, array.strides, array.dtype) for array in given))
            hash(key)
        # Objects that are not arrays, and invalid options, raise a clearer error elsewhere.
        except (AttributeError, TypeError):
            return None
        return key

    def _attempt(
        self, some: tuple[str, ...], arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
    ) -> GraphCall:
        """Prepare without copies of operands if possible.

        Copies of views are allowed if all parts fuse with them, or if no other form is left.
        """
        if not self.copying:
            try:
                return self.fused(some, False, arrays, out, converted)
            except GraphNotSupportedError:
                # With copies, only a complete epilogue of views, or no epilogue, is tried.
                if some and ({*some} != {*self.parts} or not _gaps((*arrays[:2], *_outs(out)))):
                    raise
        try:
            return self.fused(some, True, arrays, out, converted)
        # The operand is too large to be copied.
        except ArgumentError as error:
            # The unfused launch would fail in the same way.
            if not some or _gaps(_outs(out)):
                raise
            raise GraphNotSupportedError(str(error)) from error

    def _finish(self, call: GraphCall, others: Sequence[Any], rest: Form, out: object) -> GraphCall:
        result, first = call.operands[-1], len(call.operands) - 1
        if out is not None:
            self._check_apart(result, others, first)
        activation = self.activation if "activation" in rest else None
        for more in self.finish.calls(self.pool, result, tuple(others), "bias" in rest, activation):
            call.then(more)
        return call

    def _check_apart(self, result: Any, others: Sequence[Any], first: int) -> None:
        """Raise for an addend that overlaps the result.

        The operation writes the result before the second launch reads the addend. A single plan would refuse such an
        addend.
        """
        pointer = self.pool.driver.array_pointer
        written = Layout.of(result).piece(pointer(result))
        for place, array in enumerate(others, first):
            if share(written, Layout.of(array).piece(pointer(array))):
                raise ArgumentError(f"out= of {self.name} shares memory with argument {place}; pass an array of its own")


@dataclass(slots=True)
class EpilogueSite:
    """An operation with an epilogue: see `handlepool.graphs.choices.Site`."""

    stages: Stages
    key: Hashable
    plan: Plan
    form: Form
    inputs: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def forms(self) -> list[Form]:
        """Return the prefixes, and the forms with the residual first."""
        parts = self.stages.parts
        found = [parts[:count] for count in range(len(parts), -1, -1)]
        if parts[:2] == ("bias", "add") and self.stages.reorders:
            turned = ("add", "bias", *parts[2:])
            found += [turned[:count] for count in range(len(parts), 1, -1)]
        return found

    def title(self, form: Form) -> str:
        """Return a form as text."""
        behind = [part for part in self.stages.parts if part not in form]
        return " + ".join((self.stages.name, *form)) + (f"; {' + '.join(behind)} behind it" if behind else "")

    def prepare(self, form: Form, arrays: tuple[Any, ...], out: Any) -> GraphCall:
        """Return the call in a form."""
        return self.stages.prepare(form, arrays, out)

    def choose(self, form: Form) -> None:
        """Take a form for all later calls."""
        plans = self.stages.pool.plans
        plans.fused_parts[self.key] = self.form = form
        # A shortcut would go on to launch the former form.
        plans.drop_shortcuts(self.stages.key, self.inputs[0].shape)


def _advice(x: DeviceArray, outs: tuple[Any, ...]) -> str:
    """Return the advice for a view that cuDNN cannot plan."""
    if _gaps(outs):
        return ". out is a view with gaps; leave it out, and copy the result: out[...] = result"
    return ". x is a view with gaps; pass a contiguous copy" if _gaps((x,)) else ""


def _outs(out: object) -> tuple[Any, ...]:
    return () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _gaps(arrays: Sequence[Any]) -> bool:
    """Tell whether an array has gaps between its elements."""
    return any(layout.reach > layout.size * layout.dtype.itemsize for layout in map(Layout.of, arrays))
