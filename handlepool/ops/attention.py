"""Define scaled dot-product attention, by cuDNN's own node."""

import math
from typing import Any, Never

from handlepool._util.arguments import flag
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.errors import ArgumentError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.function import GraphFunction
from handlepool.graphs.launch import GraphCall, by_keyword, launches, misplaced, run_known
from handlepool.graphs.option_keys import typed_key
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.tensors.layout import Layout

TYPES = ("float16", "bfloat16")
HEAD_STEP, MOST_HEAD = 8, 128
"""Each head size must be a multiple of the first number.

The second number is the largest head size. cuDNN's documentation of the node gives these limits for every GPU from Ampere on,
for any number of queries. Support for larger heads depends on the GPU and on cuDNN's version.
"""


@launches
@by_keyword
def scaled_dot_product_attention(
    q: ArrayT,
    k: object,
    v: object,
    *extra: Never,
    attn_mask: object = None,
    is_causal: bool = False,
    scale: float | None = None,
    out: object = None,
    pool: HandlePool | None = None,
) -> ArrayT:
    """Compute softmax(q kᵀ scale + attn_mask) v, on the current stream.

    Parameters
    ----------
    q : array, shape (N, H, L, E)
        Queries of float16 or bfloat16. E is a multiple of 8, at most 128. The elements of a head should be adjacent in memory,
        as in a contiguous array or in a transposed view of (N, L, H, E). Arrays of other layouts are copied, up to 16 MiB.
    k : array, shape (N, H, S, E)
        Keys, of the same type.
    v : array, shape (N, H, S, D)
        Values, of the same type. D is a multiple of 8, at most 128.
    attn_mask : array, optional
        Added to the scores. It has the type of q and a shape that broadcasts to (N, H, L, S). Negative infinity excludes a key.
        The result of a query whose keys are all excluded is undefined.
    is_causal : bool
        Whether the query at place i uses only the keys up to place i.
    scale : number, optional
        The factor of the scores, by default 1 / sqrt(E).
    out : array, shape (N, H, L, D), optional
        Array for the result.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array, shape (N, H, L, D)
        ``out``, or a new array of the kind and type of q, with q's order of axes in memory.

    Raises
    ------
    ArgumentError
        For unsupported shapes, types, head sizes and options.
    GraphNotSupportedError
        When cuDNN has no plan.

    Examples
    --------
    >>> y = handlepool.scaled_dot_product_attention(q, k, v, is_causal=True)             # doctest: +SKIP
    """
    if extra:
        raise misplaced(scaled_dot_product_attention, extra)
    arrays = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    values = (is_causal, scale)
    key = typed_key(values)

    def prepare(chosen: PoolInternals) -> GraphCall:
        return _prepare(chosen, arrays, out, values, key)

    return run_known("scaled_dot_product_attention", pool, (_attention,), arrays, out, key, prepare)


def _prepare(
    pool: PoolInternals, arrays: tuple[Any, ...], out: object, values: tuple[Any, ...], key: tuple[Any, ...]
) -> GraphCall:
    name = "scaled_dot_product_attention"
    is_causal, scale = values
    causal = flag(f"{name}: is_causal", is_causal)
    if causal and len(arrays) > 3:
        raise ArgumentError(f"{name}: attn_mask was given with is_causal=True; pass only one of these arguments, as in torch")
    options = {"is_causal": causal, "scale": None if scale is None else _scale(name, scale)}
    return _attention.prepare(pool, arrays, out, options, key=key)


def _scale(name: str, scale: Any) -> float:
    try:
        # `float` would accept booleans, texts and arrays. For an array on the device, `float` would even wait for the stream.
        if isinstance(scale, (bool, str, bytes)) or holds_values(scale):
            raise TypeError
        number = float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: scale={shown(scale)}; it must be a finite number, or None for 1 / sqrt(E)")
    return number


def _build(g: Any, /, q: Any, k: Any, v: Any, attn_mask: Any = None, *, is_causal: bool, scale: float | None) -> Any:
    factor = 1 / math.sqrt(q.get_dim()[3]) if scale is None else scale
    more = {}
    if attn_mask is not None:
        dims, strides = list(attn_mask.get_dim()), list(attn_mask.get_stride())
        missing = 4 - len(dims)
        outer = max(map(int.__mul__, dims, strides), default=1)
        more["bias"] = attn_mask.set_dim([1] * missing + dims).set_stride([max(outer, 1)] * missing + strides)
    y, _ = g.sdpa(q, k, v, attn_scale=factor, use_causal_mask=is_causal, generate_stats=False, **more)
    return y


def _check(layouts: tuple[Layout, ...], outs: tuple[Layout, ...], *, is_causal: bool, scale: float | None) -> None:
    name = "scaled_dot_product_attention"
    q, k, v, *masks = layouts
    for title, layout in zip(("q", "k", "v"), (q, k, v), strict=True):
        if layout.ndim != 4:
            raise ArgumentError(f"{name}: {title} has {layout.ndim} axes, shape {layout.shape}; it must have 4, (N, H, L, E)")
        if layout.dtype.name not in TYPES:
            raise ArgumentError(f"{name}: {title} is {layout.dtype}; cuDNN takes only {' and '.join(TYPES)}. Convert {title}")
        if layout.dtype != q.dtype:
            raise ArgumentError(f"{name}: {title} is {layout.dtype} and q is {q.dtype}; convert one to the type of the other")
        if layout.shape[3] % HEAD_STEP or not 0 < layout.shape[3] <= MOST_HEAD:
            raise ArgumentError(
                f"{name}: {title} of shape {layout.shape} has heads of {layout.shape[3]}; cuDNN takes multiples of {HEAD_STEP} "
                f"up to {MOST_HEAD}. Append zeros to each head, and pass the scale for the size without zeros"
            )
    if k.shape != (*q.shape[:2], k.shape[2], q.shape[3]) or v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"{name}: q {q.shape}, k {k.shape} and v {v.shape}; these shapes must be (N, H, L, E), (N, H, S, E) and (N, H, S, D)"
        )
    # Without keys, each row of the softmax would divide 0 by 0. If q is empty, there is no row.
    if math.prod(q.shape) and not k.shape[2]:
        raise ArgumentError(f"{name}: k of shape {k.shape} has no keys; pass at least one key")
    scores = (*q.shape[:3], k.shape[2])
    for mask in masks:
        if mask.dtype != q.dtype:
            remedy = ", such as where(attn_mask, 0, -inf)" if mask.dtype.name == "bool" else ""
            raise ArgumentError(
                f"{name}: attn_mask is {mask.dtype} and q is {q.dtype}; pass a mask of q's type to add to the scores{remedy}"
            )
        padded = (1,) * (4 - mask.ndim) + mask.shape
        if len(padded) != 4 or any(extent not in (1, whole) for extent, whole in zip(padded, scores, strict=True)):
            raise ArgumentError(
                f"{name}: attn_mask of shape {mask.shape} does not broadcast to the scores, whose shape (N, H, L, S) is {scores}"
            )


_attention = GraphFunction(_build, check=_check, name="scaled_dot_product_attention")
