"""Prepare operations on images and filters, with a bias and an activation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlepool._util.arguments import as_integer, at_least
from handlepool._util.names import shown
from handlepool.errors import ArgumentError
from handlepool.graphs.arrays import ConvertedArguments
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, run_known
from handlepool.graphs.option_keys import typed_key
from handlepool.ops.activations import check_activation
from handlepool.ops.convolution import settings_of
from handlepool.ops.epilogue import Finisher, Stages, parts_of
from handlepool.pool.internals import PoolInternals

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Filtering:
    """An operation on images and filters.

    Attributes
    ----------
    name : str
        The operation's name, for messages.
    options : callable
        ``options(arrays, values)`` checks the options of a call. It returns them by name, as they enter a plan's key.
    plain, copying : GraphFunction
        Graph functions of the images, the filters and perhaps a bias. Only ``copying`` may copy operands.
    finish : Finisher
        Applies the parts of the epilogue that the plan does not contain.
    """

    name: str
    options: Callable[[tuple[Any, ...], tuple[Any, ...]], dict[str, Any]]
    plain: GraphFunction[..., Any]
    copying: GraphFunction[..., Any]
    finish: Finisher

    @classmethod
    def of(
        cls,
        name: str,
        options: Callable[[tuple[Any, ...], tuple[Any, ...]], dict[str, Any]],
        build: Callable[..., Any],
        check: Callable[..., None],
    ) -> "Filtering":
        """Make an operation from a function that builds its graph.

        ``check`` raises for arguments that the operation does not take.
        """
        plain, copying = (GraphFunction(build, check=check, name=name, copies=copies) for copies in (False, True))
        return cls(name, options, plain, copying, Finisher.of(name, axis=1))

    def call(
        self, arrays: tuple[Any, ...], activation: object, out: Any, values: tuple[Any, ...], limits: tuple[Any, ...], pool: Any
    ) -> Any:
        """Launch the operation for a call of its public function.

        The last of ``arrays`` is the bias, or None. ``values`` are the arguments of the callable ``options``, and ``limits``
        are the arguments of `settings_of`.
        """
        arrays = arrays if arrays[-1] is not None else arrays[:-1]
        key = typed_key((activation, *values, *limits))

        def prepare(chosen: PoolInternals) -> GraphCall:
            return self._prepare(chosen, arrays, activation, out, values, limits, key)

        return run_known(self.name, pool, (self.plain, self.copying), arrays, out, key, prepare)

    def _prepare(
        self,
        pool: PoolInternals,
        arrays: tuple[Any, ...],
        activation: Any,
        out: Any,
        values: tuple[Any, ...],
        limits: tuple[Any, ...],
        key: tuple[Any, ...],
    ) -> GraphCall:
        check_activation(self.name, activation)
        options, settings = self.options(arrays, values), settings_of(*limits)
        parts = parts_of(arrays[2] if len(arrays) > 2 else None, None, activation)

        def fused(
            some: tuple[str, ...], copies: bool, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
        ) -> GraphCall:
            applied = activation if "activation" in some else None
            function = self.copying if copies else self.plain
            known = key if some == parts else None
            return function.prepare(pool, arrays, out, options | {"activation": applied}, settings, converted, known)

        uneven = any(one != other for one, other in options["padding"])
        return Stages(self.name, pool, parts, activation, fused, self.finish, key, uneven).call(arrays, out)


def steps(function: str, name: str, value: Any, axes: int, least: int = 1) -> Shape:
    """Return one integer for each spatial axis."""
    try:
        sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
        entries = tuple(map(as_integer, value)) if sequence else (as_integer(value),) * axes
        if len(entries) == axes and min(entries) >= least:
            return entries
    except TypeError:
        pass
    many = "or a sequence of one integer, with a value of" if axes == 1 else "or two integers, each"
    raise ArgumentError(f"{function}: {name}={shown(value)}; it must be an integer, {many} {least} or more")


def windows(function: str, values: Mapping[str, Any], axes: int) -> dict[str, Any]:
    """Return stride, padding, dilation and groups for a plan's key."""
    padding = steps(function, "padding", values["padding"], axes, 0)
    return {
        "stride": steps(function, "stride", values["stride"], axes),
        "padding": tuple((each, each) for each in padding),
        "dilation": steps(function, "dilation", values["dilation"], axes),
        "groups": at_least(1, f"{function}: groups", values["groups"]),
    }
