"""Convolve torch tensors, with gradients.

The module defines three operations of torch's dispatcher: the convolution, its gradient for the images, and its gradient for
the filters. The gradients of each operation are computed by the other two operations. Torch allocates each result in the layout
that the operation's fake kernel gives. Tensors, above all gradients, come in any layout. A tensor that is neither contiguous
nor channels-last is copied.
"""

import operator
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import handlepool
from handlepool import ArgumentError, ArrayTypeError, DeviceMismatchError
from handlepool.integrations.torch.derivatives import define, derive

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups, bool? allow_tf32, bool? deterministic"


def conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    allow_tf32: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Convolve images with filters, with gradients.

    The call runs the operation ``handlepool::conv2d`` on torch's current stream.

    Parameters
    ----------
    x : Tensor, shape (N, C, H, W)
        Images of float16, bfloat16 or float32. A tensor that is neither contiguous nor channels-last is copied.
    w : Tensor, shape (K, C / groups, R, S)
        Filters, of the same type.
    bias : Tensor, shape (K,), optional
        Added to each channel.
    stride, padding, dilation : int or sequence of two
        Along height and width, in pixels.
    groups : int
        Number of groups of channels. Each group is convolved separately.
    allow_tf32, deterministic : bool, optional
        As in `handlepool.conv2d`. By default torch's settings decide when each pass runs:
        ``torch.backends.cudnn.allow_tf32`` or ``.conv.fp32_precision``, and ``torch.backends.cudnn.deterministic`` or
        `torch.use_deterministic_algorithms`.

    Returns
    -------
    Tensor, shape (N, K, P, Q)
        Has the layout of ``x``, without gaps. Under autocast, the arguments are converted as for torch's own convolution.

    Raises
    ------
    ArgumentError, GraphNotSupportedError
        As in `handlepool.conv2d`. The backward pass raises these errors if a gradient cannot be computed.
    ArrayTypeError, DeviceMismatchError
        For objects other than tensors, and for tensors on several devices.
    """
    _check("x", x, x)
    _check("w", w, x)
    if bias is not None:
        _check("bias", bias, x)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w, bias = _cast(x, dtype), _cast(w, dtype), None if bias is None else _cast(bias, dtype)
    pairs = [_pair(name, value) for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation))]
    numbers = [groups] if type(groups) is int else _integers([groups], 1)
    _check_groups(groups, numbers)
    y: Tensor = torch.ops.handlepool.conv2d(x, w, bias, *pairs, *numbers, allow_tf32, deterministic)
    return y


def _check(name: str, value: Tensor, x: Tensor) -> None:
    """Raise for a value that `conv2d` does not take.

    Torch's dispatcher would accept such a value, or refuse it with an unclear message.
    """
    if not isinstance(value, Tensor):
        raise ArrayTypeError(
            f"conv2d: {name} is a {type(value).__name__}, and this function takes only torch tensors; use "
            "handlepool.conv2d for other arrays"
        )
    if value.layout is not torch.strided:
        raise ArgumentError(f"conv2d: {name} has the layout {value.layout}; pass a dense tensor, such as {name}.to_dense()")
    if value.device != x.device:
        raise DeviceMismatchError(f"conv2d: {name} is on {value.device} and x is on {x.device}; move both to one device")


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor as autocast does.

    float64 and integers stay unchanged.
    """
    return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    least = 0 if name == "padding" else 1
    # `_integers` takes microseconds, so plain integers skip it.
    pair = [value, value] if type(value) is int else _integers(value, 2)
    if not pair or min(pair) < least:
        raise ArgumentError(
            f"conv2d: {name} is {value!r}; give an integer of at least {least}, or two such integers for height and width"
        )
    return pair


def _check_groups(groups: object, numbers: list[int]) -> None:
    if not numbers or numbers[0] < 1:
        raise ArgumentError(f"conv2d: groups is {groups!r}; give an integer of at least 1")


def _integers(value: Any, count: int) -> list[int]:
    """Return ``value`` as a list of ``count`` Python integers.

    A single integer is repeated. The list is empty if ``value`` is neither an integer nor a sequence of ``count`` integers. As
    in torch, True is not an integer.
    """
    try:
        values = [*value] if isinstance(value, Iterable) else [value] * count
        if len(values) != count or bool in [type(one) for one in values]:
            return []
        return [operator.index(one) for one in values]
    except TypeError:
        return []


# The three operations follow, with the shapes and layouts of their results.


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new tensor of ``shape``, in the memory format of ``x``.

    The format is channels-last or contiguous.
    """
    channels_last = x.dim() == 4 and x.stride(1) == 1 and not x.is_contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _result(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], *_: object
) -> Tensor:
    if x.dim() != 4 or w.dim() != 4:
        raise ArgumentError(f"conv2d: x has {x.dim()} axes and w has {w.dim()}; pass tensors of four axes each")
    extents = [
        (x.shape[axis + 2] + 2 * padding[axis] - (w.shape[axis + 2] - 1) * dilation[axis] - 1) // stride[axis] + 1
        for axis in (0, 1)
    ]
    if min(extents) < 1:
        raise ArgumentError(f"conv2d: images {tuple(x.shape)} and filters {tuple(w.shape)} give an empty result; add padding")
    return _like(x, [x.shape[0], w.shape[0], *extents])


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Check the arguments, and return the value of `_result`.

    Torch calls this function for tensors without memory, which never reach `handlepool.conv2d`. So the function itself raises
    for each argument that `handlepool.conv2d` refuses.
    """
    y = _result(x, w, bias, *geometry)
    groups = geometry[3]
    _check_groups(groups, [groups])
    for name, value in (("x", x), ("w", w), ("bias", bias)):
        if value is not None and value.dtype not in _TYPES:
            raise ArgumentError(f"conv2d: {name} is {_named(value)}; it must be one of float16, bfloat16, float32")
        if value is not None and value.dtype is not x.dtype:
            raise ArgumentError(f"conv2d: {name} is {_named(value)} and x is {_named(x)}; convert both to one type")
    filters, channels = w.shape[:2]
    if x.shape[1] != channels * groups or filters % groups:
        raise ArgumentError(
            f"conv2d: {x.shape[1]} channels in x and groups={groups} do not fit w of shape {tuple(w.shape)}; the shape of w "
            f"must be (K, C / groups, R, S), with C channels in x and K a multiple of groups"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != filters):
        raise ArgumentError(
            f"conv2d: bias of shape {tuple(bias.shape)} for {filters} filters; the shape of bias must be ({filters},)"
        )
    return y


def _named(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _options(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    allow_tf32: bool | None,
    deterministic: bool | None,
) -> dict[str, Any]:
    if allow_tf32 is None:
        # Torch has ``conv`` from 2.9 on. In a program that sets ``conv``, reading the older ``allow_tf32`` may raise.
        own = getattr(torch.backends.cudnn, "conv", None)
        allow_tf32 = torch.backends.cudnn.allow_tf32 if own is None else own.fp32_precision == "tf32"
    if deterministic is None:
        deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    how = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation), "groups": groups}
    return {**how, "allow_tf32": allow_tf32, "deterministic": deterministic}


def _dense(x: Tensor) -> Tensor:
    """Return ``x``, or a copy in a layout that cuDNN takes."""
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous(memory_format=torch.channels_last if x.stride(1) == 1 else torch.contiguous_format)


def _plainly() -> ExitStack:
    """Return a context in which autograd records no derivatives.

    `derive` gives the operation its derivatives. So autograd must record nothing inside the kernel.
    """
    entered = ExitStack()
    entered.enter_context(torch.no_grad())
    entered.enter_context(forward_ad._set_fwd_grad_enabled(False))  # noqa: SLF001 - it has no public name
    return entered


def _conv2d(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    with _plainly():
        return handlepool.conv2d(_dense(x), _dense(w), bias=bias, out=_result(x, w, bias, *geometry), **_options(*geometry))


def _input_grad(dy: Tensor, w: Tensor, shape: Sequence[int], *geometry: Any) -> Tensor:
    with _plainly():
        return handlepool.conv2d_input_grad(_dense(dy), _dense(w), tuple(shape), out=_like(dy, shape), **_options(*geometry))


def _weight_grad(x: Tensor, dy: Tensor, shape: Sequence[int], *geometry: Any) -> Tensor:
    with _plainly():
        return handlepool.conv2d_weight_grad(_dense(x), _dense(dy), tuple(shape), out=_like(x, shape), **_options(*geometry))


_forward = define("conv2d", f"Tensor x, Tensor w, Tensor? bias, {_GEOMETRY}", _conv2d, _fake)
_to_input = define(
    "conv2d_input_grad",
    f"Tensor dy, Tensor w, SymInt[] shape, {_GEOMETRY}",
    _input_grad,
    lambda dy, w, shape, *_: _like(dy, shape),
)
_to_weight = define(
    "conv2d_weight_grad",
    f"Tensor x, Tensor dy, SymInt[] shape, {_GEOMETRY}",
    _weight_grad,
    lambda x, dy, shape, *_: _like(x, shape),
)


# The functions below compute the gradients of the three operations.


def _of_conv2d(x: Tensor, w: Tensor, geometry: Sequence[Any], needed: Sequence[bool], dy: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_w, need_bias, *_ = needed
    dx = _to_input(dy, w, x.shape, *geometry) if need_x else None
    dw = _to_weight(x, dy, w.shape, *geometry) if need_w else None
    return dx, dw, dy.sum((0, 2, 3)) if need_bias else None


def _of_input_grad(
    dy: Tensor, w: Tensor, geometry: Sequence[Any], needed: Sequence[bool], ddx: Tensor
) -> tuple[Tensor | None, ...]:
    need_dy, need_w, *_ = needed
    ddy = _forward(ddx, w, None, *geometry) if need_dy else None
    dw = _to_weight(ddx, dy, w.shape, *geometry) if need_w else None
    return ddy, dw


def _of_weight_grad(
    x: Tensor, dy: Tensor, geometry: Sequence[Any], needed: Sequence[bool], ddw: Tensor
) -> tuple[Tensor | None, ...]:
    need_x, need_dy, *_ = needed
    dx = _to_input(dy, ddw, x.shape, *geometry) if need_x else None
    ddy = _forward(x, ddw, None, *geometry) if need_dy else None
    return dx, ddy


derive(_forward, _of_conv2d, folds=True)
derive(_to_input, _of_input_grad, folds=True)
derive(_to_weight, _of_weight_grad, folds=False)
