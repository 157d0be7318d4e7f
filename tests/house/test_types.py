"""Few parameters of the package are typed as exactly `Any`."""

import ast

from house.any_parameters import counts, is_any, parameters

MOST = 0.08
"""The part of all annotated parameters that may be exactly `Any`."""


def test_few_parameters_are_exactly_any():
    every, untyped = counts()
    assert every.total() > 4000
    assert untyped.total() <= MOST * every.total(), dict(untyped)


def test_a_parameter_that_is_any_is_counted():
    (function,) = ast.parse("def f(a: Any, b: 'Any', c: list[Any], *d: Any, e: int, f=1, **g: object): ...").body
    assert [argument.arg for argument in parameters(function) if is_any(argument.annotation)] == ["a", "b", "d"]
