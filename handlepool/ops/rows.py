"""Define one-dimensional convolution, with a bias and an activation."""

from collections.abc import Sequence
from typing import Any, Never

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import activate
from handlepool.ops.convolution import (
    SATURATED,
    check_array,
    check_channels,
    check_vector,
    named_padding,
    parameters,
)
from handlepool.ops.epilogue import along
from handlepool.ops.filtering import Filtering, steps, windows
from handlepool.pool.pool import HandlePool
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import Layout


@launches
@by_keyword
def conv1d(
    x: ArrayT,
    w: DeviceArray,
    *extra: Never,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: object = None,
    activation: str | None = None,
    out: object = None,
    workspace_limit: int | None = None,
    allow_tf32: bool = True,
    deterministic: bool = False,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Convolve rows with filters, on the current stream.

    If a bias is given, it is added. If an activation is given, it is applied last.

    Parameters
    ----------
    x : array, shape (N, C, L)
        Rows with channels, of float16, bfloat16 or float32. They are contiguous or channels-last in memory.
    w : array, shape (K, C / groups, R)
        Filters, of the same type, without gaps.
    stride, dilation : int or sequence of one
        Stride and dilation along the one spatial axis, in elements.
    padding : int, sequence of one, ((before, behind),), "same" or "valid"
        Number of zeros at each end of a row. The names mean the same as in `handlepool.conv2d`.
    groups, bias, activation, out, workspace_limit, allow_tf32, deterministic, pool
        As in `handlepool.conv2d`.

    Returns
    -------
    array, shape (N, K, P)
        ``out``, or a new array with the kind, type and layout of x.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`.

    Examples
    --------
    >>> y = handlepool.conv1d(x, w, padding="same", bias=b, activation="relu")           # doctest: +SKIP
    """
    if extra:
        raise misplaced(conv1d, extra)
    values, limits = (stride, padding, dilation, groups), (workspace_limit, allow_tf32, deterministic)
    return _rows.call((x, w, bias), activation, out, values, limits, pool)


def _options(arrays: tuple[Any, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    stride, padding, dilation, groups = values
    options = windows("conv1d", {"stride": stride, "padding": 0, "dilation": dilation, "groups": groups}, 1)
    if isinstance(padding, str):
        return options | {"padding": named_padding("conv1d", padding, arrays[1], options["stride"], options["dilation"])}
    if isinstance(padding, (list, tuple)) and len(padding) == 1 and isinstance(padding[0], (list, tuple)):
        try:
            before, behind = map(as_integer, padding[0])
        except (TypeError, ValueError):
            # Replace a wrong pair by -1. The test below refuses negative numbers, with the message for all wrong pairs.
            before = behind = -1
        if min(before, behind) < 0:
            raise ArgumentError(f"conv1d: padding={shown(padding)}; the inner pair must be two integers, each 0 or more")
        return options | {"padding": ((before, behind),)}
    (each,) = steps("conv1d", "padding", padding, 1, 0)
    return options | {"padding": ((each, each),)}


def _build(g: Any, /, x: Any, w: Any, bias: Any = None, *, groups: int, activation: str | None, **how: Any) -> Any:
    # The frontend derives the groups from the channels. `_check` has ensured that ``groups`` agrees with the channels.
    y = g.conv_fprop(x, w, **parameters(**how))
    if bias is not None:
        y = g.bias(y, along(bias, 3, 1))
    if activation == "tanh":
        # As in `handlepool.conv2d`, clipping keeps cuDNN from an engine for bias and tanh that gives NaN for large arguments.
        y = g.relu(y, negative_slope=0.0, lower_clip=-SATURATED, upper_clip=SATURATED)
    return y if activation is None else activate(g, y, activation)


def _check(layouts: tuple[Layout, ...], outs: tuple[Layout, ...], *, groups: int, activation: str | None, **how: object) -> None:
    """Raise for arrays that no convolution accepts, before a plan is built."""
    x, w, *rest = layouts
    like = ("x", x.dtype)
    for title, layout in [("x", x), ("w", w), *(("out", out) for out in outs)]:
        check_array("conv1d", title, layout, 3, like)
    check_channels("conv1d", ("x", x.shape), ("w", w.shape), groups)
    for bias in rest:
        check_vector("conv1d", bias, w.shape[0], "filters", like)


_rows = Filtering.of("conv1d", _options, _build, _check)
