"""scaled_dot_product_attention on both drivers, against NumPy in float64, and the arguments that it refuses."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from harness import network_references as reference
from harness.arrays import Arrays
from harness.scenes import Scene

from handlepool import ArgumentError, GraphNotSupportedError, graph
from handlepool import scaled_dot_product_attention as attention

TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("queries", "keys", "size", "values"), [(17, 17, 64, 64), (5, 9, 16, 40), (1, 12, 8, 128), (33, 20, 128, 8)], ids=str
)
def test_it_is_the_reference(each_pool, queries, keys, size, values, dtype):
    arrays = Arrays(each_pool, dtype)
    q, k, v = arrays.random(2, 3, queries, size), arrays.random(2, 3, keys, size), arrays.random(2, 3, keys, values)
    mask = arrays.random(queries, keys)
    taken = [*map(arrays.take, (q, k, v))]
    for how in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}, {"scale": 2, "is_causal": True}):
        more = {name: arrays.take(value) if name == "attn_mask" else value for name, value in how.items()}
        for _ in range(2):  # the second one by the shortcut
            y = attention(q, k, v, **how)
            assert y.strides == arrays.put(np.zeros(y.shape)).strides
            assert arrays.error(y, reference.attention(*taken, **more)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_views_of_one_product_are_taken_as_they_lie(each_pool, dtype):
    arrays = Arrays(each_pool, dtype)
    whole = arrays.random(2, 11, 3, 4, 16)
    q, k, v = whole.transpose(2, 0, 3, 1, 4)
    out = arrays.poisoned(2, 11, 4, 16).transpose(0, 2, 1, 3)
    expected = reference.attention(*map(arrays.take, (q, k, v)))
    assert attention(q, k, v, out=out) is out
    assert arrays.error(out, expected) < TOLERANCE[dtype]
    new = attention(q, k, v)
    assert arrays.error(new, expected) < TOLERANCE[dtype]
    assert new.transpose(0, 2, 1, 3).strides == arrays.put(np.zeros((2, 11, 4, 16))).strides


@hypothesis.given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    sizes=st.tuples(st.sampled_from([8, 16, 24, 64]), st.sampled_from([8, 16, 72])),
    masked=st.sampled_from([None, (1, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 0), (1, 1), ()]),
    order=st.tuples(*[st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])] * 3),
    dtype=st.sampled_from([*TOLERANCE]),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_geometries(shape, sizes, masked, order, dtype, seed):
    (n, h, queries, keys), (size, values) = shape, sizes
    random = np.random.default_rng(seed)
    with Scene(seed=1) as scene:
        arrays = Arrays(scene.pool, dtype)

        def lying(extents, axes):
            turned = arrays.put(random.standard_normal([extents[axis] for axis in axes]))
            return turned.transpose(*np.argsort(axes))

        shapes = (n, h, queries, size), (n, h, keys, size), (n, h, keys, values)
        q, k, v = (lying(extents, axes) for extents, axes in zip(shapes, order, strict=True))
        how = {}
        if masked is not None:
            whole = (n, h, queries, keys)[4 - len(masked) :]
            extents = [extent if full else 1 for extent, full in zip(whole, masked, strict=True)]
            how["attn_mask"] = arrays.put(np.where(random.random(extents) < 0.2, -np.inf, random.standard_normal(extents)))
            scores = np.broadcast_to(arrays.take(how["attn_mask"]), (n, h, queries, keys))
            hypothesis.assume((scores.max(-1) > -np.inf).all())
        expected = reference.attention(*map(arrays.take, (q, k, v)), **{name: arrays.take(value) for name, value in how.items()})
        y = attention(q, k, v, **how, pool=scene.pool)
        np.testing.assert_allclose(arrays.take(y), expected, atol=5 * TOLERANCE[dtype], rtol=0)


def test_an_empty_batch_gives_an_empty_result(each_pool):
    arrays = Arrays(each_pool, "float16")
    q, k, v = arrays.random(0, 2, 4, 8), arrays.random(0, 2, 5, 8), arrays.random(0, 2, 5, 16)
    assert attention(q, k, v).shape == (0, 2, 4, 16)
    assert attention(arrays.random(2, 2, 0, 8), arrays.random(2, 2, 5, 8), arrays.random(2, 2, 5, 16)).shape == (2, 2, 0, 16)


def test_bad_input_is_a_typed_error_with_the_numbers(each_pool):
    arrays, single = Arrays(each_pool, "float16"), Arrays(each_pool)
    q = arrays.random(2, 2, 4, 16)
    mask = each_pool.driver.asarray(np.ones((4, 4), bool))
    for match, refused in {
        r"q of shape \(2, 2, 4, 12\) has heads of 12; cuDNN takes multiples of 8 up to 128": lambda: attention(q[..., :12], q, q),
        "has heads of 136": lambda: attention(*[arrays.random(1, 1, 4, 136)] * 3),
        "q is float32; cuDNN takes only float16 and bfloat16": lambda: attention(*[single.random(1, 1, 4, 16)] * 3),
        "k is bfloat16 and q is float16": lambda: attention(q, Arrays(each_pool, "bfloat16").random(2, 2, 4, 16), q),
        "q has 3 axes": lambda: attention(q[0], q, q),
        r"q \(2, 2, 4, 16\), k \(2, 1, 4, 16\)": lambda: attention(q, q[:, :1], q[:, :1]),
        r"k of shape \(2, 2, 0, 16\) has no keys": lambda: attention(q, q[:, :, :0], q[:, :, :0]),
        r"attn_mask of shape \(3, 4\) does not broadcast to the scores, .* \(2, 2, 4, 4\)": lambda: attention(
            q, q, q, attn_mask=arrays.random(3, 4)
        ),
        r"attn_mask is bool and q is float16; .*, such as where\(attn_mask, 0, -inf\)": lambda: attention(
            q, q, q, attn_mask=mask
        ),
        "attn_mask is float32": lambda: attention(q, q, q, attn_mask=single.random(4, 4)),
        "attn_mask was given with is_causal=True": lambda: attention(q, q, q, attn_mask=arrays.random(4, 4), is_causal=True),
        "is_causal=1": lambda: attention(q, q, q, is_causal=1),
        "scale='1'": lambda: attention(q, q, q, scale="1"),
        "scale=inf": lambda: attention(q, q, q, scale=float("inf")),
        "shares memory with argument 0": lambda: attention(q, q, q, out=q),
        "takes q, k, v by position": lambda: attention(q, q, q, None),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            refused()


def test_a_graph_function_may_have_the_node_and_its_stats_are_refused(each_pool):
    arrays = Arrays(each_pool, "float16")
    q = arrays.random(1, 2, 5, 16)

    @graph
    def attend(g, q, k, v, *, stats):
        return g.sdpa(q, k, v, attn_scale=0.25, generate_stats=stats)[0]

    assert arrays.error(attend(q, q, q, stats=False), reference.attention(*[arrays.take(q)] * 3)) < TOLERANCE["float16"]
    # cuDNN computes the statistics, and the host driver does not.
    if each_pool.driver.name == "host":
        with pytest.raises(GraphNotSupportedError):
            attend(q, q, q, stats=True)
