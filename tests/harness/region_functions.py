"""The functions of random regions: graph functions, plain ones in the ways that people write them, and operations.

Each is there twice, as a region is given it and as NumPy computes it, with what it reads and writes. Every value is rounded once
by each step, and weights have few entries, so that all drivers give the same bits.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np

import handlepool


class BranchError(Exception):
    """What a branch raises."""


@dataclass(frozen=True)
class Function:
    """One function of a region.

    Attributes
    ----------
    roles : str
        Of each array argument: r is read, w is written in place, o is written only, - is neither.
    makes : int
        New arrays that it returns.
    kind : str
        graph, plain, or operation.
    given : callable
        What a region is given: called with the arrays, and ``out`` where there is one.
    numpy : callable
        The same over NumPy's arrays.
    token : str
        Of a function whose first argument is an object: its class. Capital roles in ``hidden`` say what is done with its array.
    whole : bool
        Whether it takes full arrays alone.
    apart : bool
        Whether what it writes may be nothing that it reads.
    odd : bool
        Whether what it makes are views that no graph function takes.
    takes_out : bool
        Whether it may be given ``out`` in the place of what it would allocate.
    raises : bool
        Whether it raises when it has written.
    bound : bool
        Whether ``given`` makes the function from its arguments, which is then called without any.
    """

    name: str
    roles: str
    makes: int
    kind: str
    given: Callable[..., Any]
    numpy: Callable[..., Any]
    token: str = ""
    hidden: str = ""
    whole: bool = False
    apart: bool = False
    odd: bool = False
    takes_out: bool = False
    raises: bool = False
    bound: bool = False


FUNCTIONS: dict[str, Function] = {}


def _add(
    roles: str, makes: int, kind: str, given: Callable[..., Any], numpy: Callable[..., Any] | None = None, **more: Any
) -> None:
    name = more.pop("name", None) or given.__name__
    FUNCTIONS[name] = Function(name, roles, makes, kind, given, numpy or getattr(given, "__wrapped__", given), **more)


# Graph functions


@handlepool.graph(deterministic=True)
def plus(g, x, y):
    return g.add(x, y)


@handlepool.graph(deterministic=True)
def rectified_difference(g, x, y):
    return g.relu(g.sub(x, y))


@handlepool.graph(deterministic=True)
def both(g, x, y):
    return g.add(x, y), g.sub(x, y)


def _both_into(x, y, a, b):
    a[...] = x + y
    b[...] = x - y


def conv(x, w, **options):
    return handlepool.conv2d(x, w, padding=1, deterministic=True, **options)


def _conv_of(x, w, out=None):
    """A convolution of weights of which few are not 0, so that the order of its sums is none."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    y = np.zeros_like(x)
    for k, c, i, j in np.argwhere(w):
        y[:, k] += w[k, c, i, j] * padded[:, c, i : i + x.shape[2], j : j + x.shape[3]]
    return y


def weights() -> np.ndarray:
    """Two entries for each output channel, of which one is a quarter and one a half."""
    w = np.zeros((4, 4, 3, 3), np.float32)
    for k in range(4):
        w[k, k, 1, k % 3] = 0.5
        w[k, (k + 1) % 4, k % 3, 1] = 0.25
    return w


_add("rr", 1, "graph", plus, lambda x, y: x + y, name="plus", takes_out=True)
_add(
    "rr",
    1,
    "graph",
    rectified_difference,
    lambda x, y: np.maximum(x - y, np.float32(0)),
    name="rectified_difference",
    takes_out=True,
)
_add("rr", 2, "graph", both, lambda x, y: (x + y, x - y), name="both")
_add(
    "rroo",
    0,
    "graph",
    lambda x, y, a, b: functools.partial(both, x, y, out=(a, b)),
    lambda x, y, a, b: _both_into(x, y, a, b),
    name="both_out",
    bound=True,
    apart=True,
)
_add("r", 1, "graph", conv, _conv_of, whole=True, takes_out=True)
_add("rr", 1, "graph", lambda x, y: functools.partial(plus, x, y), lambda x, y: x + y, name="plus_partly", bound=True)

# Plain functions that make arrays


def scaled(x):
    return x * 0.5


def shifted(x, y):
    temporary = x - y
    temporary *= 0.5
    return temporary + x


def pair(x, y):
    return x + y, x - y


def view_of_what_is_new(x, y):
    return (x * 0.5 + y)[..., ::-1]


def of_a_list(xs):
    return xs[0] - xs[1]


def of_a_nest(nest):
    x, [held] = nest["x"]
    return x + held.array * 0.5


def keywords(*, x, y):
    return y - x


@dataclass(eq=False)
class Held:
    array: Any


class Owner:
    """Holds arrays one level deep."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x = x
        self.y = y

    def sum(self):
        return self.x + self.y

    def copied(self):
        self.x[...] = self.y * 0.5


def closing_over(x, y):
    return lambda: x - y * 0.5


def by_default(x, y):
    def branch(x=x, *, y=y):
        return x + y

    return branch


def partly(x, y):
    return functools.partial(shifted, x, y=y)


def owned(x, y):
    return Owner(x, y).sum


class Called:
    """An object that is called."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __call__(self, y: Any) -> Any:
        return self.x - y


_add("r", 1, "plain", scaled)
_add("rr", 1, "plain", shifted)
_add("rr", 1, "plain", np.add, name="ufunc")
_add("rr", 1, "plain", operator.sub, name="builtin")
_add("rr", 2, "plain", pair)
_add("rr", 1, "plain", view_of_what_is_new, odd=True)
_add("rr", 1, "plain", lambda x, y: functools.partial(of_a_list, [x, y]), lambda x, y: x - y, name="of_a_list", bound=True)
_add(
    "rr",
    1,
    "plain",
    lambda x, y: functools.partial(of_a_nest, {"x": (x, [Held(y)])}),
    lambda x, y: x + y * 0.5,
    name="of_a_nest",
    bound=True,
)
_add("rr", 1, "plain", lambda x, y: functools.partial(keywords, x=x, y=y), lambda x, y: y - x, name="keywords", bound=True)
_add("rr", 1, "plain", closing_over, lambda x, y: x - y * 0.5, bound=True)
_add("rr", 1, "plain", by_default, lambda x, y: x + y, bound=True)
_add("rr", 1, "plain", partly, shifted, bound=True)
_add("rr", 1, "plain", owned, lambda x, y: x + y, bound=True)
_add("rr", 1, "plain", lambda x, y: functools.partial(Called(x), y), lambda x, y: x - y, name="called", bound=True)

# Plain functions that write in place, which nobody declared


def copied_into(y, x):
    y[...] = x * 0.5


def grown(x, y):
    x += y
    return x


def overwritten_in_part(x, y):
    x[...] = y
    return x[:, :1]


def add_out(x, y, out):
    return np.add(x, y, out=out)


def filling(x):
    return functools.partial(x.fill, 3)


def closing_over_a_copy(y, x):
    def branch():
        y[...] = x
        y[...] *= 0.5

    return branch


def owned_copy(y, x):
    return Owner(y, x).copied


def copied_then_raised(y, x):
    y[...] = x * 0.5
    raise BranchError


def _fill(x):
    x[...] = 3


def _add_into(z, x, y):
    np.add(x, y, out=z)


_add("or", 0, "plain", copied_into)
_add("wr", 0, "plain", grown)
_add("or", 0, "plain", overwritten_in_part)
_add("orr", 0, "plain", lambda z, x, y: functools.partial(np.add, x, y, out=z), _add_into, name="ufunc_out", bound=True)
_add("orr", 0, "plain", lambda z, x, y: functools.partial(add_out, x, y, out=z), _add_into, name="add_out", bound=True)
_add("orr", 0, "plain", lambda z, x, y: functools.partial(np.add, x, y, z), _add_into, name="ufunc_given", bound=True)
_add("wr", 0, "plain", operator.iadd, grown, name="iadd")
_add("o", 0, "plain", filling, _fill, bound=True)
_add("or", 0, "plain", closing_over_a_copy, copied_into, bound=True)
_add("or", 0, "plain", owned_copy, copied_into, bound=True)
_add("or", 0, "plain", copied_then_raised, raises=True)

# Operations

operation = getattr(handlepool, "operation", lambda **_: lambda function: function)


@operation(mutates="y")
def accumulated(x, y):
    y += x


@operation(mutates=("y", "z"))
def exchanged(x, y, z):
    y += x
    z -= x


@operation(mutates="total")
def counted(x, total):
    total += x
    return x * 0.5


@operation()
def multiplied(x, *, out):
    return np.multiply(x, 0.5, out=out)


@operation(mutates=lambda parts, place, x: parts[place])
def nth(parts, place, x):
    parts[place] += x


@operation(mutates="y")
def accumulated_then_raised(x, y):
    y += x
    raise BranchError


@operation(mutates="y")
def raised_at_once(x, y):
    raise BranchError


_add("rw", 0, "operation", accumulated)
_add("rww", 0, "operation", exchanged)
_add("rw", 1, "operation", counted)
_add(
    "ro",
    0,
    "operation",
    lambda x, out: functools.partial(multiplied, x, out=out),
    lambda x, out: scaled_into(out, x),
    name="multiplied",
    bound=True,
)
_add(
    "r-w",
    0,
    "operation",
    lambda x, other, y: functools.partial(nth, [other, y], 1, x),
    lambda x, other, y: _accumulate(x, y),
    name="nth",
    bound=True,
)
_add("rw", 0, "operation", accumulated_then_raised, raises=True)
_add("--", 0, "operation", raised_at_once, raises=True)


def scaled_into(out, x):
    out[...] = x * 0.5


def _accumulate(x, y):
    y += x


class Plan:
    """A token: what it holds is deeper than anybody looks."""

    def __init__(self, array: Any) -> None:
        self.box = SimpleNamespace(inner=SimpleNamespace(array=array))

    hidden = property(lambda self: self.box.inner.array)


class Weights:
    """What it holds is found by a function of the call's arguments."""

    def __init__(self, array: Any) -> None:
        self.box = SimpleNamespace(inner=SimpleNamespace(array=array))

    hidden = property(lambda self: self.box.inner.array)


class Cell:
    """A layer with a state."""

    def __init__(self, array: Any) -> None:
        self.state = array

    hidden = property(lambda self: self.state)

    @operation(mutates="self.state")
    def step(self, x):
        self.state *= 0.5
        self.state += x
        return self.state + x

    def look(self, x):
        return self.state - x


@operation(mutates="plan")
def transformed(plan, x):
    plan.hidden[...] = x * 0.5 - plan.hidden
    return plan.hidden + x


@operation(mutates="plan")
def fed(plan, x):
    plan.hidden[...] -= x


@operation(reads="plan")
def looked_up(plan, x):
    return plan.hidden - x


@operation(mutates=lambda weights, x: weights.hidden)
def trained(weights, x):
    weights.hidden[...] -= x * 0.5


@operation(reads=lambda weights, x: [weights.hidden])
def weighed(weights, x):
    return weights.hidden + x


_add("r", 1, "operation", transformed, token="Plan", hidden="w")
_add("r", 0, "operation", fed, token="Plan", hidden="w")
_add("r", 1, "operation", looked_up, token="Plan", hidden="r")
_add("r", 0, "operation", trained, token="Weights", hidden="w")
_add("r", 1, "operation", weighed, token="Weights", hidden="r")
_add(
    "r",
    1,
    "operation",
    lambda cell, x: functools.partial(cell.step, x),
    lambda cell, x: _step(cell, x),
    name="step",
    token="Cell",
    hidden="w",
    bound=True,
)
_add(
    "r",
    1,
    "plain",
    lambda cell, x: functools.partial(cell.look, x),
    lambda cell, x: cell.state - x,
    name="look",
    token="Cell",
    hidden="r",
    bound=True,
)

TOKENS = {kind.__name__: kind for kind in (Plan, Weights, Cell)}


def _step(cell, x):
    cell.state *= 0.5
    cell.state += x
    return cell.state + x


# What nobody has met before


def fresh(function: Any, name: str) -> Any:
    """Return a plain function with code that is nobody else's, as of a function that is called for the first time."""
    if isinstance(function, functools.partial):
        return functools.partial(fresh(function.func, name), *function.args, **function.keywords)
    if not isinstance(function, FunctionType):
        return function
    code: CodeType = function.__code__.replace(co_name=name)
    made = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# What is recorded


def recorded_chain(x, y):
    return plus(rectified_difference(x, y), y)


def recorded_plain(x, y):
    temporary = x - y
    return temporary * 0.5 + x


def recorded_in_place(x, y):
    plus(x, y, out=x)
    return rectified_difference(y, x)


def recorded_operation(x, y):
    accumulated(y, x)
    return x * 0.5


def recorded_fork(states, x, y):
    with states.fork() as fork:
        a = fork.run(plus, x, y)
        b = fork.run(scaled, a)
    return rectified_difference(a, b)


def recorded_web(states, x, y):
    with states.fork() as fork:
        a, b = fork.run(plus, x, y), fork.run(rectified_difference, x, y)
        c = fork.run(shifted, b, a)
        fork.run(copied_into, b, c)
        d = fork.run(lambda: rectified_difference(c, plus(b, a)))
        fork.run(accumulated, d, a)
        e = plus(a, b)
        f = fork.run(scaled, fork.run(plus, e, d))
    return plus(e, f)


def _recorded_web_of(x, y):
    a, b = x + y, np.maximum(x - y, np.float32(0))
    c = shifted(b, a)
    b = c * 0.5
    d = np.maximum(c - (b + a), np.float32(0))
    a += d
    e = a + b
    return e + (e + d) * 0.5


def _recorded_fork_of(x, y):
    a = x + y
    return np.maximum(a - a * 0.5, np.float32(0))


def _recorded_in_place_of(x, y):
    x += y
    return np.maximum(y - x, np.float32(0))


def _recorded_operation_of(x, y):
    x += y
    return x * 0.5


RECORDED: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "recorded_chain": ("rr", recorded_chain, lambda x, y: np.maximum(x - y, np.float32(0)) + y),
    "recorded_plain": ("rr", recorded_plain, recorded_plain),
    "recorded_in_place": ("wr", recorded_in_place, _recorded_in_place_of),
    "recorded_operation": ("wr", recorded_operation, _recorded_operation_of),
    "recorded_fork": ("rr", recorded_fork, _recorded_fork_of),
    "recorded_web": ("rr", recorded_web, _recorded_web_of),
}
"""By name: the roles of the inputs, the function, and the same in NumPy. Each returns one new array.

Functions with a fork take states first.
"""
FORKED = ("recorded_fork", "recorded_web")
