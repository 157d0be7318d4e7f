"""Run the epilogue of a convolution or product: bias, residual, activation.

The epilogue is fused into the plan as far as that is known to be right. One more launch, in place over the result, does the
rest. Fusion covers a prefix of the epilogue: bias and activation together, the bias alone, or neither.
`handlepool.graphs.forms` and cuDNN decide which parts fuse.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.arrays import ConvertedArguments
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, check_arrays
from handlepool.ops.activations import activate
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout, share

Prepare = Callable[[tuple[str, ...], bool, tuple[Any, ...], Any, ConvertedArguments | None], GraphCall]
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


def finisher(name: str, axis: int) -> GraphFunction[..., Any]:
    """Make the graph function of the launch behind the operation.

    It takes the result, a bias along an axis if given, and an addend.
    """

    def finish(g: Any, y: Any, *rest: Any, biased: bool, activation: str | None) -> Any:
        rank = len(y.get_dim())
        for place, tensor in enumerate(rest):
            y = g.add(y, along(tensor, rank, axis) if biased and not place else tensor)
        return y if activation is None else activate(g, y, activation)

    return GraphFunction(finish, name=name)


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
    finish : GraphFunction
        From `finisher`.
    key : object
        Separates the options of this operation from other options.
    copying : bool
        Whether every form that is known to be right needs copies.
    """

    name: str
    pool: PoolInternals
    parts: tuple[str, ...]
    activation: str | None
    fused: Prepare
    finish: GraphFunction[..., Any]
    key: object
    copying: bool = False

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
        parts, splits = self.parts, self.pool.plans.fused_stage_counts
        given = (*arrays, *_outs(out))
        key = self._split_key(given)
        most = None if key is None else splits.get(key)
        if most is None:
            most = len(parts)
        # A known split skips the fused build that is refused. The checks of that build run here instead.
        else:
            driver = self.pool.driver
            check_arrays(self.name, driver, driver.current_device(), arrays, given[len(arrays) :])
        # The longest prefix of the epilogue that fuses wins, because each unfused part costs a launch.
        for count in range(most, -1, -1):
            some = parts[:count]
            first = 2 + sum(part != "activation" for part in some)
            try:
                call = self._attempt(some, arrays[:first], out, converted)
            except GraphNotSupportedError as error:
                if count:
                    # A shorter prefix of the epilogue may still fuse.
                    continue
                advice = _advice(arrays[0], _outs(out))
                if advice:
                    raise GraphNotSupportedError(f"{error}{advice}") from error
                raise
            if count == len(parts):
                return call
            # Remember the split, so that later calls skip the refused builds.
            if key is not None:
                splits[key] = count
            return self._finish(call, arrays, first, parts[count:], out)
        # The loop returns or raises when its count is 0.
        raise AssertionError

    def _split_key(self, given: tuple[Any, ...]) -> Hashable | None:
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
                if some and (some != self.parts or not _gaps((*arrays[:2], *_outs(out)))):
                    raise
        try:
            return self.fused(some, True, arrays, out, converted)
        # The operand is too large to be copied.
        except ArgumentError as error:
            # The unfused launch would fail in the same way.
            if not some or _gaps(_outs(out)):
                raise
            raise GraphNotSupportedError(str(error)) from error

    def _finish(self, call: GraphCall, arrays: tuple[Any, ...], first: int, rest: tuple[str, ...], out: object) -> GraphCall:
        result, others = call.operands[-1], arrays[first:]
        if out is not None:
            self._check_apart(result, others, first)
        options = {"biased": "bias" in rest, "activation": self.activation if "activation" in rest else None}
        return call.then(lambda _: self.finish.prepare(self.pool, (result, *others), result, options))

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
