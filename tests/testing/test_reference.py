"""The float64 reference against the definition, written as loops, and its refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlepool.errors import ArgumentError
from handlepool.testing.reference import conv2d, relative_error


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


def by_definition(x, w, stride, padding, dilation, groups, flipped):
    """Every output as the sum that defines it."""
    (images, _, *size), (filters, width, *taps) = x.shape, w.shape
    rows, columns = ((size[i] + 2 * padding[i] - (taps[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in range(2))
    y = np.zeros((images, filters, rows, columns))
    for n, k, p, q, c, r, s in np.ndindex(*y.shape, width, *taps):
        i = p * stride[0] + r * dilation[0] - padding[0]
        j = q * stride[1] + s * dilation[1] - padding[1]
        if 0 <= i < size[0] and 0 <= j < size[1]:
            tap = w[k, c, -1 - r, -1 - s] if flipped else w[k, c, r, s]
            y[n, k, p, q] += x[n, k // (filters // groups) * width + c, i, j] * tap
    return y


@settings(max_examples=60, deadline=None)
@given(
    stride=pairs(1, 3),
    padding=pairs(0, 2),
    dilation=pairs(1, 2),
    taps=pairs(1, 3),
    groups=st.integers(1, 3),
    flipped=st.booleans(),
    seed=st.integers(0, 100),
)
def test_it_is_the_definition(stride, padding, dilation, taps, groups, flipped, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((2, 2 * groups, 6, 5)), rng.standard_normal((2 * groups, 2, *taps))
    mode = "convolution" if flipped else "cross_correlation"
    y = conv2d(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups, mode=mode)
    expected = by_definition(x, w, stride, padding, dilation, groups, flipped)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)


def test_an_integer_stands_for_both_axes_and_the_result_is_float64():
    x, w = np.ones((1, 2, 7, 7), np.float16), np.ones((3, 2, 2, 2), np.float16)
    y = conv2d(x, w, stride=2, padding=1, dilation=2)
    assert y.dtype == np.float64
    assert (y == conv2d(x, w, stride=(2, 2), padding=(1, 1), dilation=(2, 2))).all()


@pytest.mark.parametrize(
    ("activation", "scalar"),
    [
        ("relu", lambda v: max(v, 0.0)),
        ("sigmoid", lambda v: 1 / (1 + math.exp(-v))),
        ("tanh", math.tanh),
        ("gelu", lambda v: v * 0.5 * math.erfc(-v / math.sqrt(2))),
        ("swish", lambda v: v / (1 + math.exp(-v))),
    ],
)
def test_bias_comes_before_the_activation(activation, scalar):
    rng = np.random.default_rng(0)
    x, w, bias = rng.standard_normal((1, 2, 4, 4)), rng.standard_normal((3, 2, 3, 3)), rng.standard_normal(3)
    expected = np.vectorize(scalar)(conv2d(x, w) + bias[None, :, None, None])
    np.testing.assert_allclose(conv2d(x, w, bias=bias, activation=activation), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("x", "w", "options", "problem"),
    [
        ((1, 4, 5, 5), (2, 3, 3, 3), {}, "do not fit"),
        ((1, 4, 5, 5), (3, 2, 3, 3), {"groups": 2}, "do not fit"),
        ((4, 5, 5), (2, 4, 3, 3), {}, "do not fit"),
        ((1, 4, 2, 5), (2, 4, 3, 3), {}, "exceed"),
        ((1, 4, 5, 5), (2, 4, 3, 3), {"dilation": 3}, "exceed"),
        ((1, 4, 5, 5), (2, 4, 3, 3), {"mode": "fourier"}, "'fourier'"),
        ((1, 4, 5, 5), (2, 4, 3, 3), {"activation": "step"}, "'step'"),
    ],
)
def test_what_has_no_result_is_refused(x, w, options, problem):
    with pytest.raises(ArgumentError, match=problem):
        conv2d(np.zeros(x), np.zeros(w), **options)


def test_a_relative_error_is_a_ratio_of_norms():
    assert relative_error([3, 4], [3, 4]) == 0
    assert relative_error([0, 0], [0, 0]) == 0
    assert relative_error([6, 8], [3, 4]) == 1
    assert relative_error([1, 0], [0, 0]) == math.inf
    assert relative_error([math.nan, 0], [1, 0]) == math.inf
