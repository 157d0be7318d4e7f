"""What comes behind a convolution or a product: bias, residual, activation. In its plan as far as that is known to be right.

The rest is one launch more, over the result in place. An epilogue is fused from its begin on: with a bias and an activation that
is both, or the bias alone, or neither. What may be fused is `handlepool.graphs.forms` to say, and cuDNN.
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
"""Prepares a call with some parts of the epilogue fused: parts, whether operands may be copied, arrays, outs, converted."""


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
    """Make the graph function of a launch behind: of the result, a bias along an axis where there is one, and an addend."""

    def finish(g: Any, y: Any, *rest: Any, biased: bool, activation: str | None) -> Any:
        rank = len(y.get_dim())
        for place, tensor in enumerate(rest):
            y = g.add(y, along(tensor, rank, axis) if biased and not place else tensor)
        return y if activation is None else activate(g, y, activation)

    return GraphFunction(finish, name=name)


@dataclass(frozen=True, slots=True)
class Stages:
    """An operation with its epilogue, in as few launches as are right.

    Attributes
    ----------
    name : str
        Of the operation, for messages.
    pool : PoolInternals
    parts : tuple of str
        From `parts_of`.
    activation : str or None
    fused : callable
        Raises `GraphNotSupportedError` for what cannot be fused.
    finish : GraphFunction
        From `finisher`.
    key : object
        Tells the operation's options from others.
    copying : bool
        Whether there is no form that is known to be right without copies.
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
        """Return the call for two factors, then the bias and the addend, as ``parts`` has them."""
        outs = _outs(out)
        try:
            natives = self.pool.driver.array_types
            if (out is not None and not outs) or all(type(array) in natives for array in arrays + outs):
                return self._prepare(arrays, out, None)
            converted = ConvertedArguments(self.name, self.pool, arrays, outs)
            return converted.prepare(lambda _pool, given, outs, _options, _settings, it: self._prepare(given, outs, it), out, {})
        except Exception as error:
            self.pool.status.diagnose(error)
            raise

    def _prepare(self, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None) -> GraphCall:
        parts, splits = self.parts, self.pool.plans.fused_stage_counts
        given = (*arrays, *_outs(out))
        key = self._split_key(given)
        most = None if key is None else splits.get(key)
        if most is None:
            most = len(parts)
        else:  # what a build that is refused would have checked
            driver = self.pool.driver
            check_arrays(self.name, driver, driver.current_device(), arrays, given[len(arrays) :])
        for count in range(most, -1, -1):
            some = parts[:count]
            first = 2 + sum(part != "activation" for part in some)
            try:
                call = self._attempt(some, arrays[:first], out, converted)
            except GraphNotSupportedError as error:
                if count:
                    continue
                advice = _advice(arrays[0], _outs(out))
                if advice:
                    raise GraphNotSupportedError(f"{error}{advice}") from error
                raise
            if count == len(parts):
                return call
            if key is not None:
                splits[key] = count
            return self._finish(call, arrays, first, parts[count:], out)
        raise AssertionError

    def _split_key(self, given: tuple[Any, ...]) -> Hashable | None:
        try:
            device = self.pool.driver.current_device()
            key = (self.name, device, self.key, self.parts, *((array.shape, array.strides, array.dtype) for array in given))
            hash(key)
        except (AttributeError, TypeError):  # what is no array, or no option, is said elsewhere
            return None
        return key

    def _attempt(
        self, some: tuple[str, ...], arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
    ) -> GraphCall:
        """Prepare without copies of operands, but where all can be fused with copies of views, or where nothing else is left."""
        if not self.copying:
            try:
                return self.fused(some, False, arrays, out, converted)
            except GraphNotSupportedError:
                if some and (some != self.parts or not _gaps((*arrays[:2], *_outs(out)))):
                    raise
        try:
            return self.fused(some, True, arrays, out, converted)
        except ArgumentError as error:  # too large to be copied
            if not some or _gaps(_outs(out)):  # as it would be behind, too
                raise
            raise GraphNotSupportedError(str(error)) from error

    def _finish(self, call: GraphCall, arrays: tuple[Any, ...], first: int, rest: tuple[str, ...], out: object) -> GraphCall:
        result, others = call.operands[-1], arrays[first:]
        if out is not None:
            self._check_apart(result, others, first)
        options = {"biased": "bias" in rest, "activation": self.activation if "activation" in rest else None}
        return call.then(lambda _: self.finish.prepare(self.pool, (result, *others), result, options))

    def _check_apart(self, result: Any, others: Sequence[Any], first: int) -> None:
        """Raise for an addend that the result lies over: it is written before that is read, while one plan would refuse it."""
        pointer = self.pool.driver.array_pointer
        written = Layout.of(result).piece(pointer(result))
        for place, array in enumerate(others, first):
            if share(written, Layout.of(array).piece(pointer(array))):
                raise ArgumentError(f"out= of {self.name} shares memory with argument {place}; pass an array of its own")


def _advice(x: DeviceArray, outs: tuple[Any, ...]) -> str:
    """Say what to do about a view that cuDNN has no plan for."""
    if _gaps(outs):
        return ". out is a view with gaps; leave it out, and copy what is returned: out[...] = it"
    return ". x is a view with gaps; pass a contiguous copy" if _gaps((x,)) else ""


def _outs(out: object) -> tuple[Any, ...]:
    return () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _gaps(arrays: Sequence[Any]) -> bool:
    """Whether one of the arrays has gaps between its elements."""
    return any(layout.reach > layout.size * layout.dtype.itemsize for layout in map(Layout.of, arrays))
