"""Define matrix products with bias and activation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never

from handlepool.errors import ArgumentError, GraphNotSupportedError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.arrays import ConvertedArguments
from handlepool.graphs.forms import BEHIND_A_PRODUCT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, by_keyword, launches, misplaced, run_known
from handlepool.graphs.option_keys import typed_key
from handlepool.ops.activations import ACTIVATIONS, activate, check_activation
from handlepool.ops.convolution import check_type, check_vector, settings_of
from handlepool.ops.epilogue import Finisher, Stages, along, parts_of
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout


@launches
@by_keyword
def matmul(
    a: ArrayT,
    b: object,
    *extra: Never,
    bias: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Multiply matrices, then apply bias and activation, on the current stream.

    Parameters
    ----------
    a : array, shape (..., M, K)
        An array of float16, bfloat16 or float32. Its matrices are contiguous or transposed, and may have gaps. The array comes
        from CuPy, torch or another library (``docs/arrays.md``). With the host driver, it may come from NumPy.
    b : array, shape (..., K, N)
        An array of the same type. The batch axes of both arrays broadcast: their extents are equal or 1, and missing axes count
        as 1.
    bias : array, shape (N,), optional
        Added to each row. It may be a view with any stride that is not negative, and need not be aligned.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last. "gelu" uses the exact formula.
    out : array, shape (..., M, N), optional
        Array for the result. Without ``out`` the result is contiguous.
    workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv2d`.

    Returns
    -------
    array, shape (..., M, N)
        ``out``, or a new array of the kind and type of ``a``. If K is 0, the product is 0.

    Raises
    ------
    ArgumentError
        For unsupported shapes, types, strides or options.
    GraphNotSupportedError
        When cuDNN has no plan. An example is a workspace limit that every plan exceeds. There is also no plan for float32 with
        ``allow_tf32=False``, because cuDNN's plans use TF32 even if they claim otherwise.

    Notes
    -----
    Bias and activation are fused into the product's plan if such a plan is known to be right. Otherwise they need one more
    launch, and so does tanh in any case. Two kinds of arrays are copied, up to 16 MiB: an array that repeats along some of its
    batch axes but not along all, and an array of a layout that is not named above.
    """
    if extra:
        raise misplaced(matmul, extra)
    return _matmul(a, b, bias, out, (activation, workspace_limit, allow_tf32, deterministic), pool)


@launches
@by_keyword
def linear(
    x: ArrayT,
    w: DeviceArray,
    *extra: Never,
    bias: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Multiply rows by weights, then apply bias and activation.

    The work runs on the current stream.

    Parameters
    ----------
    x : array, shape (..., M, I)
        Rows of I features, of float16, bfloat16 or float32.
    w : array, shape (O, I)
        Weights of the same type, in torch's order of axes.
    bias : array, shape (O,), optional
    activation, workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.matmul`.
    out : array, shape (..., M, O), optional
        Array for the result. Without ``out`` the result is contiguous.

    Returns
    -------
    array, shape (..., M, O)
        ``out``, or a new array of the kind and type of ``x``.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.matmul`.
    """
    if extra:
        raise misplaced(linear, extra)
    return _linear(x, w, bias, out, (activation, workspace_limit, allow_tf32, deterministic), pool)


@dataclass(frozen=True, slots=True)
class _Product:
    """Launch the calls of `matmul`, or of `linear`.

    ``plain`` and ``copying`` are graph functions of the product. Only ``copying`` may copy operands. ``finish`` applies the parts
    of the epilogue that the plan does not contain.
    """

    name: str
    plain: GraphFunction[..., Any]
    copying: GraphFunction[..., Any]
    finish: Finisher

    @classmethod
    def of(cls, name: str, build: Callable[..., Any], names: tuple[str, str], transposed: bool) -> "_Product":
        check = _checker(name, names, transposed)
        plain, copying = (GraphFunction(build, check=check, name=name, copies=copies) for copies in (False, True))
        return cls(name, plain, copying, Finisher.of(name, axis=-1))

    def __call__(self, a: object, b: object, bias: object, out: Any, values: tuple[Any, ...], pool: Any) -> Any:
        arrays = (a, b) if bias is None else (a, b, bias)
        _, workspace_limit, allow_tf32, deterministic = values
        # Values of these types can serve as a key directly, which is quicker than `typed_key`.
        plain = workspace_limit is None and type(allow_tf32) is type(deterministic) is bool
        key = values if plain else typed_key(values)

        def prepare(chosen: PoolInternals) -> GraphCall:
            return self.prepare(chosen, arrays, out, values, key)

        return run_known(self.name, pool, (self.plain,), arrays, out, key, prepare)

    def prepare(
        self, pool: PoolInternals, arrays: tuple[Any, ...], out: object, values: tuple[Any, ...], key: tuple[Any, ...]
    ) -> GraphCall:
        activation, *limits = values
        check_activation(self.name, activation)
        settings = settings_of(*limits)
        parts = parts_of(arrays[2] if len(arrays) > 2 else None, None, activation)

        def fused(
            some: tuple[str, ...], copies: bool, arrays: tuple[Any, ...], out: object, converted: ConvertedArguments | None
        ) -> GraphCall:
            applied = activation if "activation" in some else None
            # If a fused plan of the activation was not measured, the activation runs in a separate launch.
            if applied in ACTIVATIONS and applied not in BEHIND_A_PRODUCT:
                raise GraphNotSupportedError(f"{self.name}: {applied} after a product was not measured in one plan")
            function = self.copying if copies else self.plain
            # Later calls look for this key only among the shortcuts of ``plain``, so a plan with copies gets no shortcut.
            known = key if some == parts and not copies else None
            return function.prepare(pool, arrays, out, {"activation": applied}, settings, converted, known)

        return Stages(self.name, pool, parts, activation, fused, self.finish, key).call(arrays, out)


def _build_matmul(g: object, a: object, b: object, bias: object = None, *, activation: str | None) -> Any:
    return _product(g, a, b, bias, activation, False)


def _build_linear(g: object, x: object, w: DeviceArray, bias: object = None, *, activation: str | None) -> Any:
    return _product(g, x, w, bias, activation, True)


def _product(g: Any, a: Any, b: Any, bias: Any, activation: str | None, transposed: bool) -> Any:
    rank = max(len(a.get_dim()), len(b.get_dim()))
    y = g.matmul(_of_rank(a, rank), _of_rank(b, rank, transposed))
    if bias is not None:
        y = g.add(y, along(bias, rank, -1))
    return y if activation is None else activate(g, y, activation)


def _of_rank(tensor: Any, rank: int, transposed: bool = False) -> Any:
    """Declare a tensor of matrices with ``rank`` axes.

    With ``transposed``, the last two axes are exchanged.
    """
    dims, strides = list(tensor.get_dim()), list(tensor.get_stride())
    if transposed:
        dims[-2:], strides[-2:] = dims[:-3:-1], strides[:-3:-1]
    more = rank - len(dims)
    return tensor.set_dim([1] * more + dims).set_stride([max(map(int.__mul__, dims, strides))] * more + strides)


def _checker(name: str, names: tuple[str, str], transposed: bool) -> Callable[..., None]:
    def check(layouts: tuple[Layout, ...], outs: Sequence[Layout], *, activation: str | None) -> None:
        a, b, *rest = layouts
        one, other = names
        for title, layout in ((one, a), (other, b), *(("out", out) for out in outs)):
            if layout.ndim < 2 or (transposed and layout is b and layout.ndim > 2):
                many = "2" if transposed and layout is b else "2 or more"
                raise ArgumentError(f"{name}: {title} has {layout.ndim} axes, shape {layout.shape}; it must have {many}")
            check_type(name, title, layout, (one, a.dtype))
        summed, columns = (b.shape[-1], b.shape[-2]) if transposed else (b.shape[-2], b.shape[-1])
        if a.shape[-1] != summed:
            form = "(O, I)" if transposed else "(..., K, N)"
            raise ArgumentError(
                f"{name}: {one} {a.shape} has {a.shape[-1]} columns and {other} {b.shape} has {summed} "
                f"{'columns' if transposed else 'rows'}, which must be equal; {other} must be {form} for {one} "
                f"{'(..., M, I)' if transposed else '(..., M, K)'}"
            )
        for x, y in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
            if x != y and 1 not in (x, y):
                raise ArgumentError(
                    f"{name}: batch axes {a.shape[:-2]} of {one} and {b.shape[:-2]} of {other} do not broadcast; counted from "
                    "the last axis, two extents must be equal, or one must be 1"
                )
        for bias in rest:
            check_vector(name, bias, columns, "columns", (one, a.dtype))

    return check


_matmul = _Product.of("matmul", _build_matmul, ("a", "b"), False)
_linear = _Product.of("linear", _build_linear, ("x", "w"), True)
