"""Define activations as operations of their own.

The arrays may have any shape, and any layout without gaps.
"""

from collections.abc import Callable
from typing import Any, Never

from handlepool._util.names import shown
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, by_keyword, launches, misplaced, run_known
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout

ACTIVATIONS = ("relu", "sigmoid", "tanh", "gelu", "swish")
OWN_ACTIVATIONS = ("hardsigmoid", "hardswish")
"""Activations that cuDNN does not have.

They exist only as the ``activation`` of another operation. A kernel of this package computes them.
"""
FLOATING_TYPES = ("float16", "bfloat16", "float32")


def check_activation(name: str, activation: object) -> None:
    """Raise unless ``activation`` is the name of an activation, or None.

    Raises
    ------
    ArgumentError
    """
    # Compare only texts with the names. To compare an array with a name would give an array, and to read its truth would raise
    # another error.
    text = activation if isinstance(activation, str) else ""
    if activation is None or text in (*ACTIVATIONS, *OWN_ACTIVATIONS):
        return
    known = ", ".join((*ACTIVATIONS, *OWN_ACTIVATIONS))
    meant = "; torch's silu is swish" if text == "silu" else ""
    raise ArgumentError(f"{name}: activation={shown(activation)}; it can be {known}, or None{meant}")


def activate(g: object, x: DeviceArray, kind: str) -> Any:
    """Add an activation's node to a graph.

    ``gelu`` uses the exact formula, with the error function.
    """
    return getattr(g, kind)(x)


def activation_call(pool: PoolInternals, kind: str, x: object, out: object = None) -> GraphCall:
    """Return the call that applies the activation ``kind`` to ``x``.

    ``out`` may be ``x``.
    """
    return _functions[kind].prepare(pool, (x,), out, {})


@launches
@by_keyword
def relu(x: ArrayT, *extra: Never, out: Any = None, pool: HandlePool | None = None) -> ArrayT:
    """Apply max(x, 0), on the current stream.

    Parameters
    ----------
    x : array
        Any shape; float16, bfloat16 or float32; any layout without gaps.
    out : array, optional
        Array for the result, with the shape, strides and type of ``x``. It may be ``x`` itself.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array with the layout of ``x``.

    Raises
    ------
    ArgumentError
        For an unsupported type or strides, and for an ``out`` that does not fit.
    """
    return _apply(relu, x, extra, out, pool)


@launches
@by_keyword
def sigmoid(x: ArrayT, *extra: Never, out: Any = None, pool: HandlePool | None = None) -> ArrayT:
    """Apply 1 / (1 + exp(-x)), on the current stream."""
    return _apply(sigmoid, x, extra, out, pool)


@launches
@by_keyword
def tanh(x: ArrayT, *extra: Never, out: Any = None, pool: HandlePool | None = None) -> ArrayT:
    """Apply tanh(x), on the current stream."""
    return _apply(tanh, x, extra, out, pool)


@launches
@by_keyword
def gelu(x: ArrayT, *extra: Never, out: Any = None, pool: HandlePool | None = None) -> ArrayT:
    """Apply x (1 + erf(x / sqrt(2))) / 2, on the current stream."""
    return _apply(gelu, x, extra, out, pool)


@launches
@by_keyword
def swish(x: ArrayT, *extra: Never, out: Any = None, pool: HandlePool | None = None) -> ArrayT:
    """Apply x / (1 + exp(-x)), also called SiLU, on the current stream."""
    return _apply(swish, x, extra, out, pool)


def _apply(function: Callable[..., Any], x: object, extra: tuple[Any, ...], out: object, pool: HandlePool | None) -> Any:
    if extra:
        raise misplaced(function, extra)
    kind = function.__name__
    return run_known(kind, pool, (), (x,), out, (), lambda chosen: activation_call(chosen, kind, x, out))


def _builder(kind: str) -> Callable[[Any, Any], Any]:
    return lambda g, x: activate(g, x, kind)


def _checker(kind: str) -> Callable[[tuple[Layout, ...], tuple[Layout, ...]], None]:
    def check(layouts: tuple[Layout, ...], outs: tuple[Layout, ...]) -> None:
        (x,) = layouts
        if x.dtype.name not in FLOATING_TYPES:
            raise ArgumentError(f"{kind}: x is {x.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")

    return check


_functions = {kind: GraphFunction(_builder(kind), check=_checker(kind), name=kind) for kind in ACTIVATIONS}
for _function in (sigmoid, tanh, gelu, swish):
    # Parameters and errors are the same for every activation. So each docstring gets the text of `relu` after the first full
    # stop.
    _function.__doc__ = f"{_function.__doc__}{(relu.__doc__ or '').partition('.')[2]}"
