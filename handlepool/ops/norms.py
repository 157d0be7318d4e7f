"""Define normalisations and softmax, by kernels of this package."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Never

from handlepool._util.arguments import as_integer, at_least
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.kernel import Affine, Normalise
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, lying_as
from handlepool.graphs.launch import by_keyword, launches, misplaced
from handlepool.ops.activations import FLOATING_TYPES, check_activation
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout

Axes = int | Sequence[int]


@launches
@by_keyword
def layer_norm(
    x: ArrayT,
    *extra: Never,
    axis: Axes = -1,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    out: Any = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Normalise each row by mean and variance, on the current stream.

    Each element is then multiplied by the weight, and the bias is added.

    Parameters
    ----------
    x : array
        An array of float16, bfloat16 or float32. It may be any view without negative strides.
    axis : int or sequence of int
        The axes of a row. Examples are -1 for the last axis, 1 for the channels of (N, C, H, W), and (-2, -1) for torch's
        ``normalized_shape`` with two axes.
    weight, bias : array, optional
        Arrays whose shape has the extents of x along ``axis``, in the order of x's axes. Both have the type of x, or both are
        float32.
    eps : float
        Added to the variance, under the root. The variance is the sum of squares divided by the number of elements, without
        Bessel's correction.
    out : array, optional
        Array for the result, with any strides. It may be x itself. Without ``out`` the result has the layout of x, without
        gaps.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind, shape and type of x. The result is computed in float32 and rounded once.

    Raises
    ------
    ArgumentError
        For unsupported shapes, types, strides and numbers.

    Examples
    --------
    >>> y = handlepool.layer_norm(x, axis=1, weight=w, bias=b)  # of channels            # doctest: +SKIP
    """
    if extra:
        raise misplaced(layer_norm, extra)
    return _call(_layer_norm, x, weight, bias, out, pool, (axis, eps))


@launches
@by_keyword
def rms_norm(
    x: ArrayT,
    *extra: Never,
    axis: Axes = -1,
    weight: Any = None,
    eps: float = 1e-6,
    out: Any = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Divide each row by its root mean square, on the current stream.

    Parameters
    ----------
    x, axis, weight, out, pool
        As in `handlepool.layer_norm`.
    eps : float
        Added to the mean square, under the root. Torch's default differs, and depends on the type of x.

    Returns
    -------
    array
        As in `handlepool.layer_norm`.

    Raises
    ------
    ArgumentError
        As in `handlepool.layer_norm`.

    Examples
    --------
    >>> y = handlepool.rms_norm(x, weight=w)                                             # doctest: +SKIP
    """
    if extra:
        raise misplaced(rms_norm, extra)
    return _call(_rms_norm, x, weight, None, out, pool, (axis, eps))


@launches
@by_keyword
def group_norm(
    x: ArrayT,
    groups: int,
    *extra: Never,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    out: Any = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Normalise each group of channels, on the current stream.

    A normalised group has mean 0 and variance 1. Then the weight and the bias of each channel are applied.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        As in `handlepool.layer_norm`.
    groups : int
        Number of groups of neighbouring channels. It must divide C.
    weight, bias : array, shape (C,), optional
        Of the type of x, or both float32.
    eps, out, pool
        As in `handlepool.layer_norm`.

    Returns
    -------
    array
        As in `handlepool.layer_norm`.

    Raises
    ------
    ArgumentError
        As in `handlepool.layer_norm`.

    Examples
    --------
    >>> y = handlepool.group_norm(x, 32, weight=w, bias=b)                               # doctest: +SKIP
    """
    if extra:
        raise misplaced(group_norm, extra)
    return _call(_group_norm, x, weight, bias, out, pool, (groups, eps))


@launches
@by_keyword
def instance_norm(
    x: ArrayT,
    *extra: Never,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    out: Any = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Normalise each channel of each image, on the current stream.

    A normalised channel has mean 0 and variance 1. Then its weight and its bias are applied.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        As in `handlepool.layer_norm`.
    weight, bias : array, shape (C,), optional
        Of the type of x, or both float32.
    eps, out, pool
        As in `handlepool.layer_norm`.

    Returns
    -------
    array
        As in `handlepool.layer_norm`.

    Raises
    ------
    ArgumentError
        As in `handlepool.layer_norm`.

    Examples
    --------
    >>> y = handlepool.instance_norm(x)                                                  # doctest: +SKIP
    """
    if extra:
        raise misplaced(instance_norm, extra)
    return _call(_instance_norm, x, weight, bias, out, pool, (eps,))


@launches
@by_keyword
def batch_norm(
    x: ArrayT,
    mean: object,
    variance: object,
    *extra: Never,
    weight: object = None,
    bias: object = None,
    eps: float = 1e-5,
    activation: str | None = None,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Normalise channels by given means and variances, on the current stream.

    The operation is batch normalisation for inference, with the means and variances of the training.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        As in `handlepool.layer_norm`.
    mean, variance : array, shape (C,)
        Of the type of x, or float32.
    weight, bias : array, shape (C,), optional
        Of the type of the means.
    activation : {"relu", "sigmoid", "tanh", "gelu", "swish", "hardsigmoid", "hardswish"}, optional
        Applied last. "gelu" uses the exact formula.
    eps, out, pool
        As in `handlepool.layer_norm`.

    Returns
    -------
    array
        As in `handlepool.layer_norm`.

    Raises
    ------
    ArgumentError
        As in `handlepool.layer_norm`.

    Examples
    --------
    >>> y = handlepool.batch_norm(x, mean, variance, weight=w, bias=b, activation="relu")  # doctest: +SKIP
    """
    if extra:
        raise misplaced(batch_norm, extra)
    arrays = (x, mean, variance, *(each for each in (weight, bias) if each is not None))
    return _batch_norm.call(arrays, out, pool, (eps, activation, weight is not None, bias is not None))


@launches
@by_keyword
def softmax(x: ArrayT, *extra: Never, axis: Axes = -1, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Compute the softmax of each row, on the current stream.

    Each exp(x) is divided by the sum of exp(x) over its row.

    Parameters
    ----------
    x, axis, out, pool
        As in `handlepool.layer_norm`.

    Returns
    -------
    array
        As in `handlepool.layer_norm`. As in torch, a row is NaN if it contains a NaN or positive infinity, or if all its
        elements are negative infinity.

    Raises
    ------
    ArgumentError
        As in `handlepool.layer_norm`.

    Examples
    --------
    >>> y = handlepool.softmax(scores, axis=-1)                                          # doctest: +SKIP
    """
    if extra:
        raise misplaced(softmax, extra)
    return _softmax.call((x,), out, pool, (axis,))


def _call(function: KernelFunction, x: object, weight: Any, bias: Any, out: Any, pool: Any, values: tuple[Any, ...]) -> Any:
    arrays = (x, *(each for each in (weight, bias) if each is not None))
    return function.call(arrays, out, pool, (*values, weight is not None, bias is not None))


# Options


def _eps(name: str, eps: Any) -> float:
    try:
        if isinstance(eps, (bool, str)) or holds_values(eps):
            raise TypeError
        number = float(eps)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentError(f"{name}: eps={shown(eps)}; it must be a number, 0 or more")
    return number


def _axes(name: str, axis: object) -> tuple[int, ...]:
    try:
        if isinstance(axis, Sequence) and not isinstance(axis, (str, bytes, bytearray, memoryview)):
            found = tuple(map(as_integer, axis))
        elif holds_values(axis):
            raise TypeError
        else:
            found = (as_integer(axis),)
        if found:
            return found
    except TypeError:
        pass
    raise ArgumentError(
        f"{name}: axis={shown(axis)}; it must be an integer, such as -1 for the last axis, or a sequence of integers"
    )


def _options_of_rows(name: str, axis: object, eps: object, weighted: bool, biased: bool) -> dict[str, Any]:
    return {"axis": _axes(name, axis), "eps": _eps(name, eps), "weighted": weighted, "biased": biased}


def _options_of_groups(groups: object, eps: object, weighted: bool, biased: bool) -> dict[str, Any]:
    number = at_least(1, "group_norm: groups", groups)
    return {"groups": number, "eps": _eps("group_norm", eps), "weighted": weighted, "biased": biased}


def _options_of_instances(eps: object, weighted: bool, biased: bool) -> dict[str, Any]:
    return {"eps": _eps("instance_norm", eps), "weighted": weighted, "biased": biased}


def _options_of_batches(eps: object, activation: object, weighted: bool, biased: bool) -> dict[str, Any]:
    check_activation("batch_norm", activation)
    return {"eps": _eps("batch_norm", eps), "activation": activation, "weighted": weighted, "biased": biased}


def _options_of_softmax(axis: object) -> dict[str, Any]:
    return {"axis": _axes("softmax", axis)}


# Descriptions


def _check(name: str, layouts: Sequence[Layout], titles: Sequence[str]) -> None:
    """Raise for unsupported types and strides.

    The parameters must all have the type of x, or all be float32.
    """
    x, *parameters = layouts
    if x.dtype.name not in FLOATING_TYPES:
        raise ArgumentError(f"{name}: x is {x.dtype}; it must be one of {', '.join(FLOATING_TYPES)}")
    for title, layout in zip(("x", *titles), layouts, strict=True):
        check_strides(f"{title} of {name}", layout)
    for title, layout in zip(titles, parameters, strict=True):
        if layout.dtype != x.dtype and layout.dtype.name != "float32":
            raise ArgumentError(f"{name}: {title} is {layout.dtype} and x is {x.dtype}; {title} must be {x.dtype} or float32")
        if layout.dtype != parameters[0].dtype:
            raise ArgumentError(
                f"{name}: {title} is {layout.dtype} and {titles[0]} is {parameters[0].dtype}; convert one to the type of the "
                f"other"
            )


def _titles(weighted: bool, biased: bool) -> list[str]:
    return [title for title, there in (("weight", weighted), ("bias", biased)) if there]


def _describe_rows(
    name: str,
    kind: Any,
    layouts: tuple[Layout, ...],
    *,
    axis: tuple[int, ...],
    eps: float = 0.0,
    weighted: bool = False,
    biased: bool = False,
) -> Described:
    x, *parameters = layouts
    titles = _titles(weighted, biased)
    _check(name, layouts, titles)
    rank = x.ndim
    if any(not -rank <= each < rank for each in axis):
        raise ArgumentError(f"{name}: axis={axis} for x of shape {x.shape}; each axis must be from {-rank} to {rank - 1}")
    axes = tuple(sorted({each % rank for each in axis}))
    if len(axes) < len(axis):
        raise ArgumentError(f"{name}: axis={axis} names an axis of x, of shape {x.shape}, twice; name each axis once")
    extents = tuple(x.shape[each] for each in axes)
    for title, layout in zip(titles, parameters, strict=True):
        if layout.shape != extents:
            raise ArgumentError(
                f"{name}: {title} of shape {layout.shape} for x of shape {x.shape} and axis={axis}; its shape must be {extents}"
            )
    return Normalise(kind, axes, None, eps, weighted, biased), lying_as(x, x.shape)


def _check_channels(name: str, layouts: Sequence[Layout], titles: Sequence[str]) -> None:
    """Raise unless x has channels and each parameter has the shape (C,)."""
    x, *parameters = layouts
    _check(name, layouts, titles)
    if x.ndim < 2:
        raise ArgumentError(f"{name}: x has {x.ndim} axes, shape {x.shape}; it must have 2 or more, (N, C, ...)")
    for title, layout in zip(titles, parameters, strict=True):
        if layout.shape != x.shape[1:2]:
            raise ArgumentError(
                f"{name}: {title} of shape {layout.shape} for {x.shape[1]} channels; its shape must be ({x.shape[1]},)"
            )


def _describe_groups(
    layouts: tuple[Layout, ...],
    *,
    groups: int | None = None,
    eps: float,
    weighted: bool,
    biased: bool,
    name: str = "group_norm",
) -> Described:
    x = layouts[0]
    _check_channels(name, layouts, _titles(weighted, biased))
    number = x.shape[1] if groups is None else groups
    if number and x.shape[1] % number:
        raise ArgumentError(
            f"{name}: {number} groups do not divide the {x.shape[1]} channels of x {x.shape}; the channels must be a "
            "multiple of the groups"
        )
    axes = tuple(range(2, x.ndim))
    # If x has no channels, the number of groups may be 0. The kernel divides by the number of groups, so pass 1 instead of 0.
    return Normalise("mean", axes, number or 1, eps, weighted, biased), lying_as(x, x.shape)


def _describe_batches(
    layouts: tuple[Layout, ...], *, eps: float, activation: str | None, weighted: bool, biased: bool
) -> Described:
    x = layouts[0]
    _check_channels("batch_norm", layouts, ["mean", "variance", *_titles(weighted, biased)])
    return Affine(eps, weighted, biased, activation), lying_as(x, x.shape)


_layer_norm = KernelFunction(partial(_describe_rows, "layer_norm", "mean"), "layer_norm", partial(_options_of_rows, "layer_norm"))
_rms_norm = KernelFunction(partial(_describe_rows, "rms_norm", "square"), "rms_norm", partial(_options_of_rows, "rms_norm"))
_group_norm = KernelFunction(_describe_groups, "group_norm", _options_of_groups)
_instance_norm = KernelFunction(partial(_describe_groups, name="instance_norm"), "instance_norm", _options_of_instances)
_batch_norm = KernelFunction(_describe_batches, "batch_norm", _options_of_batches)
_softmax = KernelFunction(partial(_describe_rows, "softmax", "softmax"), "softmax", _options_of_softmax)
