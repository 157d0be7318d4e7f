"""Run the epilogue of a convolution or product: bias, residual, activation.

The parts of an epilogue are a bias, a residual and an activation, applied in this order. An operation's plan contains ("fuses")
some of the given parts. Another launch applies the remaining parts, in place over the result. The form of the operation says
which parts the plan contains. By default the plan fuses as many parts as possible, from the first part on: cuDNN must have such
a plan, and `handlepool.graphs.forms` must know it to be right. `handlepool.tune` may choose another form by measurement.
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
"""The parts of an epilogue that a plan contains, in order."""
Prepare = Callable[[Form, bool, tuple[Any, ...], Any, ConvertedArguments | None], GraphCall]
"""A function that prepares a call with some parts fused.

Its arguments are the fused parts, whether operands may be copied, the arrays, ``out``, and the converted arguments or None.
"""


def parts_of(bias: object, add: object, activation: object) -> tuple[str, ...]:
    """Return the parts of an epilogue that were given, in their order."""
    given = {"bias": bias, "add": add, "activation": activation}
    return tuple(part for part, value in given.items() if value is not None)


def along(tensor: Any, rank: int, axis: int) -> Any:
    """Declare a vector along one axis of a tensor of ``rank`` axes."""
    ((extent,), (step,)) = tensor.get_dim(), tensor.get_stride()
    dims, strides = [1] * rank, [max(extent * step, 1)] * rank
    dims[axis], strides[axis] = extent, step
    return tensor.set_dim(dims).set_stride(strides)


@dataclass(frozen=True, slots=True)
class Finisher:
    """Launch the unfused parts of an epilogue, in place over the result.

    Attributes
    ----------
    axis : int
        The axis of the result along which a bias varies.
    kernel : KernelFunction
        A kernel that takes the result, and addends that broadcast. The addresses of these arrays must be multiples of 16 bytes.
    graph : GraphFunction
        A graph function for a misaligned bias. It takes the result, the bias, and the residual if there is one.
    """

    axis: int
    kernel: KernelFunction
    graph: GraphFunction[..., Any]

    @classmethod
    def of(cls, name: str, axis: int) -> "Finisher":
        """Make the finisher of an operation whose bias varies along ``axis``."""

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
        """Yield the calls that apply the unfused parts to ``result``."""
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
    """An operation with an epilogue, which runs in one launch or several.

    Attributes
    ----------
    name : str
        The operation's name, for messages.
    pool : PoolInternals
    parts : tuple of str
        The parts that were given, from `parts_of`.
    activation : str or None
    fused : callable
        Prepares the call with some parts fused. It raises `GraphNotSupportedError` if these parts cannot be fused.
    finish : Finisher
    key : object
        Identifies the options of the operation.
    copying : bool
        Whether the operation needs copies of operands in every form.
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
        """Return the call over ``arrays``.

        ``arrays`` are the two factors, then the bias and the residual if they are among ``parts``.
        """
        outs = _outs(out)
        try:
            natives = self.pool.driver.array_types
            if (out is not None and not outs) or all(type(array) in natives for array in arrays + outs):
                return self._prepare(arrays, out, None)
            converted = ConvertedArguments(self.name, self.pool, arrays, outs)
            return converted.prepare(lambda _pool, given, outs, _options, _settings, it: self._prepare(given, outs, it), out, {})
        except Exception as error:
            # This call may be the first to find that the context is lost. `diagnose` notes the cause for later errors.
            self.pool.status.diagnose(error)
            raise

    def _prepare(self, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None) -> GraphCall:
        chosen, outs = self.pool.plans.fused_parts, _outs(out)
        key = self._key((*arrays, *outs))
        form = None if key is None else chosen.get(key)
        if form is not None:
            # The form is known, so forms that were refused before are not built again. Such a build would have checked the
            # arrays, so check them here.
            driver = self.pool.driver
            check_arrays(self.name, driver, driver.current_device(), arrays, outs)
            call = self.prepare(form, arrays, out, converted)
            self._note(key, form, call, arrays, outs)
            return call
        # By default fuse as many parts as possible, from the first part on. Another launch applies the remaining parts.
        for count in range(len(self.parts), -1, -1):
            form = self.parts[:count]
            try:
                call = self.prepare(form, arrays, out, converted)
            except GraphNotSupportedError as error:
                if count:
                    # These parts cannot be fused, but fewer parts may be.
                    continue
                advice = _advice(arrays[0], outs)
                if advice:
                    raise GraphNotSupportedError(f"{error}{advice}") from error
                raise
            if key is not None and count < len(self.parts):
                # Note the form, so that later calls skip the builds that were refused.
                chosen[key] = form
            self._note(key, form, call, arrays, outs)
            return call
        # With a count of 0, the loop has returned or raised.
        raise AssertionError

    def prepare(self, form: Form, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None = None) -> GraphCall:
        """Return the call that runs the operation in ``form``.

        Raises
        ------
        GraphNotSupportedError
            If no plan with the parts of ``form`` is known to be right.
        """
        if "activation" in form and self.activation in OWN_ACTIVATIONS:
            raise GraphNotSupportedError(f"{self.name}: cuDNN has no {self.activation}")
        given = dict(zip((part for part in self.parts if part != "activation"), arrays[2:], strict=True))
        rest = tuple(part for part in self.parts if part not in form)
        factors = (*arrays[:2], *(array for part, array in given.items() if part in form))
        call = self._attempt(form, factors, out, converted)
        return self._finish(call, [given[part] for part in rest if part in given], rest, out) if rest else call

    def _note(self, key: Hashable, form: Form, call: GraphCall, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
        """Note an `EpilogueSite` for the call, so that tunings can choose forms."""
        sites, plan = self.pool.plans.sites, call.plan
        if key is not None and self.parts and id(plan) not in sites:
            # The site keeps the plan alive, so no other plan can get the same ``id``, which is the key.
            sites[id(plan)] = EpilogueSite(self, key, plan, form, tuple(map(Layout.of, arrays)), tuple(map(Layout.of, outs)))

    def _key(self, given: tuple[Any, ...]) -> Hashable | None:
        try:
            device = self.pool.driver.current_device()
            key = (self.name, device, self.key, self.parts, *((array.shape, array.strides, array.dtype) for array in given))
            hash(key)
        # An object that is no array, or an invalid option, has no key. Such arguments raise a clearer error when the call is
        # prepared.
        except (AttributeError, TypeError):
            return None
        return key

    def _attempt(
        self, some: tuple[str, ...], arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
    ) -> GraphCall:
        """Prepare the call with ``some`` parts fused, without copies if possible.

        Copies of operands are tried only if no part is to be fused, or if all parts are to be fused and an operand is a view
        with gaps.
        """
        if not self.copying:
            try:
                return self.fused(some, False, arrays, out, converted)
            except GraphNotSupportedError:
                # In all other cases do not try copies, because a form with fewer parts may need none.
                if some and ({*some} != {*self.parts} or not _gaps((*arrays[:2], *_outs(out)))):
                    raise
        try:
            return self.fused(some, True, arrays, out, converted)
        # An operand is too large to be copied.
        except ArgumentError as error:
            # If no part is fused, or if ``out`` has gaps, no other form avoids the copy. Otherwise let the caller try fewer
            # parts.
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

        The first launch writes the result before the second launch reads the addend. If one plan had all parts, the alias check
        of its launch would refuse such an addend.
        """
        pointer = self.pool.driver.array_pointer
        written = Layout.of(result).piece(pointer(result))
        for place, array in enumerate(others, first):
            if share(written, Layout.of(array).piece(pointer(array))):
                raise ArgumentError(
                    f"out= of {self.name} shares memory with argument {place}; pass an array with memory of its own"
                )


@dataclass(slots=True)
class EpilogueSite:
    """An operation with an epilogue, as a `handlepool.graphs.choices.Site`.

    A tuning times the forms of the operation, and chooses a form for later calls.
    """

    stages: Stages
    key: Hashable
    plan: Plan
    form: Form
    inputs: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def forms(self) -> list[Form]:
        """Return all forms that may be tried.

        The forms are the beginnings of ``parts``, the longest first. If the plan may add the residual before the bias, the
        forms with that order follow.
        """
        parts = self.stages.parts
        found = [parts[:count] for count in range(len(parts), -1, -1)]
        if parts[:2] == ("bias", "add") and self.stages.reorders:
            turned = ("add", "bias", *parts[2:])
            found += [turned[:count] for count in range(len(parts), 1, -1)]
        return found

    def title(self, form: Form) -> str:
        """Return a text that describes ``form``, for reports."""
        behind = [part for part in self.stages.parts if part not in form]
        return " + ".join((self.stages.name, *form)) + (f"; {' + '.join(behind)} in a second launch" if behind else "")

    def prepare(self, form: Form, arrays: tuple[Any, ...], out: Any) -> GraphCall:
        """Return the call that runs the operation in ``form``."""
        return self.stages.prepare(form, arrays, out)

    def choose(self, form: Form) -> None:
        """Make all later calls run the operation in ``form``."""
        plans = self.stages.pool.plans
        plans.fused_parts[self.key] = self.form = form
        # Existing shortcuts launch the operation in its former form, so drop them.
        plans.drop_shortcuts(self.stages.key, self.inputs[0].shape)


def _advice(x: DeviceArray, outs: tuple[Any, ...]) -> str:
    """Return advice for an error, if ``x`` or an output has gaps."""
    if _gaps(outs):
        return ". out is a view with gaps; leave out= away, and copy the result: out[...] = result"
    return ". x is a view with gaps; pass a contiguous copy of x" if _gaps((x,)) else ""


def _outs(out: object) -> tuple[Any, ...]:
    return () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _gaps(arrays: Sequence[Any]) -> bool:
    """Return whether any of the arrays has gaps between its elements."""
    return any(layout.reach > layout.size * layout.dtype.itemsize for layout in map(Layout.of, arrays))
