"""Define the gradients of two-dimensional convolution."""

from collections.abc import Callable, Sequence
from typing import Any, Never

from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, by_keyword, launches, misplaced, run_known
from handlepool.graphs.signature import Settings
from handlepool.ops.convolution import (
    Padding,
    Pair,
    Shape,
    as_shape,
    check_array,
    check_channels,
    check_result,
    geometry,
    parameters,
    settings_of,
)
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout


@launches
@by_keyword
def conv2d_input_grad(
    dy: ArrayT,
    w: DeviceArray,
    shape: Sequence[int],
    *extra: Never,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Compute the gradient of `handlepool.conv2d` with respect to the images.

    The work runs on the current stream.

    Parameters
    ----------
    dy : array, shape (N, K, P, Q)
        Gradient of the result, of float16, bfloat16 or float32. It is contiguous or channels-last in memory.
    w : array, shape (K, C / groups, R, S)
        Filters, of the same type.
    shape : (N, C, H, W)
        Shape of the images. The shape has to be given, because with a stride above 1 images of several sizes give results of
        the same size. Every size is allowed that torch's ``output_padding`` can give in a transposed convolution:
        ``output_padding`` is less than the stride or less than the dilation. If ``output_padding`` reaches the stride, images
        of that size give a result with more rows or columns than ``dy``. The gradient of these rows and columns counts as 0.
    stride, padding, dilation, groups
        As given to `handlepool.conv2d`.
    out, workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv2d`.

    Returns
    -------
    array, shape (N, C, H, W)
        ``out``, or a new array with the type and layout of ``dy``.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`.
    """
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    settings = settings_of(workspace_limit, allow_tf32, deterministic)
    return _run(conv2d_input_grad, _input_grad, extra, pool, (dy, w), out, shape, options, settings)


@launches
@by_keyword
def conv2d_weight_grad(
    x: ArrayT,
    dy: DeviceArray,
    shape: Sequence[int],
    *extra: Never,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Compute the gradient of `handlepool.conv2d` with respect to the filters.

    The work runs on the current stream.

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        Images of float16, bfloat16 or float32, contiguous or channels-last in memory.
    dy : array, shape (N, K, P, Q)
        Gradient of the result, of the same type.
    shape : (K, C / groups, R, S)
        Shape of the filters.
    stride, padding, dilation, groups
        As given to `handlepool.conv2d`.
    out, workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv2d`. cuDNN's fastest plans for this gradient may add in a different order in each run.
        ``deterministic`` excludes these plans.

    Returns
    -------
    array, shape (K, C / groups, R, S)
        ``out``, or a new array with the type and layout of ``x``. For a batch without images the gradient is 0.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`.
    """
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    settings = settings_of(workspace_limit, allow_tf32, deterministic)
    return _run(conv2d_weight_grad, _weight_grad, extra, pool, (x, dy), out, shape, options, settings)


def _run(
    function: Callable[..., Any],
    graph: GraphFunction[..., Any],
    extra: tuple[Any, ...],
    pool: HandlePool | None,
    arrays: tuple[Any, ...],
    out: object,
    shape: object,
    options: dict[str, Any],
    settings: Settings,
) -> Any:
    if extra:
        raise misplaced(function, extra)
    options = {"shape": as_shape(function.__name__, shape), **geometry(function.__name__, options)}

    def prepare(chosen: PoolInternals) -> GraphCall:
        return graph.prepare(chosen, arrays, out, options, settings)

    # The shape may be any sequence, of which no quick key can be made. So look for no shortcut.
    return run_known(function.__name__, pool, (), arrays, out, (), prepare)


def _build_input(g: Any, /, dy: Any, w: Any, *, shape: Shape, groups: int, **how: Any) -> Any:
    # If the stride is not 1, images of several shapes are possible. Without a declared shape, the frontend would use the
    # smallest shape.
    return g.conv_dgrad(dy, w, **parameters(**how)).set_dim(list(shape))


def _build_weight(g: Any, /, x: Any, dy: Any, *, shape: Shape, groups: int, **how: Any) -> Any:
    # The shapes of ``x`` and ``dy`` do not determine the shape of the filters, so declare it.
    return g.conv_wgrad(x, dy, **parameters(**how)).set_dim(list(shape))


def _check_input(layouts: tuple[Layout, ...], outs: tuple[Layout, ...], *, shape: Shape, groups: int, **how: object) -> None:
    dy, w = layouts
    _check("conv2d_input_grad", [("dy", dy), ("w", w)], outs)
    check_channels("conv2d_input_grad", ("shape", shape), ("w", w.shape), groups)
    check_result("conv2d_input_grad", shape, w.shape, dy.shape, how, transposed=True)


def _check_weight(layouts: tuple[Layout, ...], outs: tuple[Layout, ...], *, shape: Shape, groups: int, **how: object) -> None:
    x, dy = layouts
    _check("conv2d_weight_grad", [("x", x), ("dy", dy)], outs)
    check_channels("conv2d_weight_grad", ("x", x.shape), ("shape", shape), groups)
    check_result("conv2d_weight_grad", x.shape, shape, dy.shape, how)


def _check(name: str, layouts: list[tuple[str, Layout]], outs: tuple[Layout, ...]) -> None:
    first, layout = layouts[0]
    for argument, other in [*layouts, *(("out", out) for out in outs)]:
        check_array(name, argument, other, 4, (first, layout.dtype))


_input_grad = GraphFunction(_build_input, check=_check_input, name="conv2d_input_grad")
_weight_grad = GraphFunction(_build_weight, check=_check_weight, name="conv2d_weight_grad")
