"""Ordinary code in branches, maps, tasks and recordings, as users of CuPy write it; on a GPU and without one, unchanged.

Each shape is a function of a `Place`, which has the library of arrays as ``xp``, and gives arrays. Values are small integers, so
that results are the same to the last bit whatever computed them.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

import handlepool
from handlepool import ParallelStateExecutor, ParallelStates
from handlepool.testing import reference

SHAPES = {}
IN_ORDER = set()
"""Shapes whose order is that of one stream: there is no wait to leave out, so a control reads on another stream."""


def shape(function):
    SHAPES[function.__name__] = function
    return function


def in_order(function):
    IN_ORDER.add(function.__name__)
    return shape(function)


class Place:
    """Where shapes run: a pool, its streams, and arrays."""

    def __init__(self, pool, xp, asarray):
        rng = np.random.default_rng(5)
        self.pool = pool
        self.xp = xp
        self.xs = [asarray(rng.integers(-4, 5, (1, 4, 6, 6)).astype(np.float32)) for _ in range(8)]
        self.w = asarray(rng.integers(-2, 3, (4, 4, 3, 3)).astype(np.float32))
        self.b = asarray(rng.integers(-3, 4, (1, 4, 1, 1)).astype(np.float32))

    def conv(self, x, **options):
        return handlepool.conv2d(x, self.w, padding=1, pool=self.pool, **options)

    def states(self, count):
        return ParallelStates(count, pool=self.pool)

    @contextmanager
    def executor(self, count=3):
        with ParallelStateExecutor(count, pool=self.pool) as executor:
            yield executor

    def replayed(self, function, *args):
        program = handlepool.record(function, *args, pool=self.pool)
        program.replay()
        return program.outputs


class Plain(Place):
    """The same one after the other, in NumPy."""

    def __init__(self):
        super().__init__(None, np, np.asarray)

    def conv(self, x, *, bias=None, activation=None, out=None):
        y = reference.conv2d(x, self.w, padding=1).astype(np.float32)
        y = y if bias is None else y + bias.reshape(1, -1, 1, 1)
        y = np.maximum(y, 0) if activation == "relu" else y
        if out is None:
            return y
        out[...] = y
        return out

    @contextmanager
    def fork(self):
        yield SimpleNamespace(run=lambda f, *args, **kwargs: f(*args, **kwargs), map=self.map)

    def map(self, function, *iterables):
        return list(map(function, *iterables))

    def with_state(self, index, function, *args):
        return function(SimpleNamespace(), *args)

    def states(self, count):
        return self

    @contextmanager
    def executor(self, count=3):
        def submit(function, *args):
            value = function(*args)
            return SimpleNamespace(result=lambda: value)

        yield SimpleNamespace(submit=submit, map=lambda f, *its: map(f, *its))

    def replayed(self, function, *args):
        return function(*args)


# Maps


@shape
def maximum_of_each(p):
    return p.states(4).map(lambda x: p.xp.maximum(p.conv(x), 0), p.xs)


@shape
def doubled_before(p):
    return p.states(4).map(lambda x: p.conv(x * 2), p.xs)


@shape
def sums(p):
    return p.states(3).map(lambda x: p.conv(x).sum(axis=(2, 3)), p.xs)


@shape
def total(p):
    return p.xp.stack(p.states(4).map(lambda x: p.conv(x).sum(), p.xs)).sum()


@shape
def two_lists(p):
    return p.states(4).map(lambda x, y: p.conv(x) + y, p.xs, p.xs[::-1])


@shape
def normalised(p):
    def body(x):
        y = p.conv(x)
        return (y - y.min()) * 4

    return p.states(4).map(body, p.xs)


@shape
def concatenated_after(p):
    return p.xp.concatenate(p.states(4).map(p.conv, p.xs), axis=1)


@shape
def stacked_then_summed(p):
    return p.xp.stack(p.states(2).map(p.conv, p.xs)).sum(axis=0)


@shape
def mapped_twice(p):
    states = p.states(4)
    return states.map(p.conv, states.map(p.conv, p.xs))


@shape
def masked(p):
    return p.states(4).map(lambda x: p.xp.where(p.conv(x) > 0, x, -x), p.xs)


@shape
def transposed(p):
    return p.states(4).map(lambda x: p.conv(x).transpose(0, 2, 3, 1).reshape(-1, 4), p.xs)


@shape
def flipped(p):
    return p.states(4).map(lambda x: p.conv(x[..., ::-1].copy())[..., ::-1] + 1, p.xs)


@shape
def halves(p):
    return p.states(4).map(lambda x: p.conv(x)[:, :2] - p.conv(x)[:, 2:], p.xs)


@shape
def of_integers(p):
    return p.states(4).map(lambda x: p.conv(x).astype(np.int32) // 2, p.xs)


# Forks


@shape
def two_branches(p):
    with p.states(2).fork() as fork:
        a = fork.run(p.conv, p.xs[0])
        b = fork.run(p.conv, p.xs[1])
    return a + b


@shape
def made_by_the_caller(p):
    x = p.xs[0] * 3 + p.xs[1]
    with p.states(2).fork() as fork:
        a = fork.run(p.conv, x)
        b = fork.run(lambda: p.xp.abs(x))
    return a - b


@shape
def work_of_the_caller_in_between(p):
    with p.states(2).fork() as fork:
        a = fork.run(p.conv, p.xs[0])
        y = p.xs[1] * 2
        b = fork.run(p.conv, y)
    return a, b, y


@shape
def a_chain_in_one_branch(p):
    with p.states(2).fork() as fork:
        return fork.run(lambda x: p.conv(p.conv(x) * 0.5) + 1, p.xs[0])


@in_order
def a_chain_over_one_state(p):
    with p.states(1).fork() as fork:
        return fork.run(lambda a: a * 2, fork.run(p.conv, p.xs[0]))


@in_order
def a_long_chain_over_one_state(p):
    with p.states(1).fork() as fork:
        y = p.xs[0]
        for _ in range(4):
            y = fork.run(lambda a: p.xp.maximum(a - 1, 0), y)
    return y


@shape
def into_parts_of_one_array(p):
    out = p.xp.zeros_like(p.xp.concatenate(p.xs[:4], axis=0))
    with p.states(4).fork() as fork:
        for i in range(4):
            fork.run(lambda i=i: out[i : i + 1].__setitem__(..., p.conv(p.xs[i])))
    return out


@shape
def given_outputs(p):
    outs = [p.xp.zeros_like(x) for x in p.xs[:4]]
    with p.states(2).fork() as fork:
        for x, out in zip(p.xs, outs, strict=False):
            fork.run(p.conv, x, out=out)
    return outs


@shape
def in_place_on_its_own(p):
    def body(x):
        y = p.conv(x)
        y += x
        y *= 2
        y[:, 0] = 7
        return y

    with p.states(3).fork() as fork:
        return [fork.run(body, x) for x in p.xs]


@shape
def with_bias_and_relu(p):
    bias = p.b.reshape(4)
    with p.states(2).fork() as fork:
        return [fork.run(lambda x: p.conv(x, bias=bias, activation="relu"), x) for x in p.xs[:4]]


@shape
def a_tree(p):
    with p.states(4).fork() as fork:
        parts = [fork.run(p.conv, x) for x in p.xs]
    while len(parts) > 1:
        with p.states(4).fork() as fork:
            parts = [fork.run(lambda a, b: a + b, *pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@shape
def nested(p):
    def inner(x):
        with p.states(2).fork() as fork:
            a, b = fork.run(p.conv, x), fork.run(lambda: x * 2)
        return a + b

    with p.states(2).fork() as fork:
        return [fork.run(inner, x) for x in p.xs[:4]]


@shape
def a_map_in_a_branch(p):
    with p.states(2).fork() as fork:
        return fork.run(lambda: sum(p.states(2).map(p.conv, p.xs[:4])))


@shape
def closures(p):
    scale = p.xs[7].max()
    with p.states(3).fork() as fork:
        return [fork.run(lambda x=x: p.conv(x) * scale) for x in p.xs[:3]]


@shape
def temporaries_that_go(p):
    def body(x):
        for _ in range(3):
            x = p.conv(x * 0 + 1)
        return x

    with p.states(4).fork() as fork:
        return [fork.run(body, x) for x in p.xs[:4]]


@shape
def reduced_after(p):
    with p.states(4).fork() as fork:
        ys = [fork.run(p.conv, x) for x in p.xs]
    return [y.max() for y in ys], [y.argmax(axis=1) for y in ys]


@shape
def forks_in_turn(p):
    y = p.xs[0]
    for x in p.xs[1:4]:
        with p.states(2).fork() as fork:
            a, b = fork.run(p.conv, x), fork.run(lambda y=y: y * 2)
        y = a + b
    return y


@shape
def padded_and_cut(p):
    with p.states(2).fork() as fork:
        return [fork.run(lambda x: p.xp.pad(p.conv(x), ((0, 0), (0, 0), (1, 1), (1, 1)))[..., 1:, 1:], x) for x in p.xs[:4]]


@shape
def products(p):
    def body(x):
        rows = p.conv(x).reshape(4, 36)
        return (rows[:, None] * rows[None]).sum(axis=-1)

    return p.states(4).map(body, p.xs)


@shape
def einsums(p):
    return p.states(4).map(lambda x: p.xp.einsum("nchw->hc", p.conv(x)), p.xs)


@shape
def indexed_by_an_array(p):
    order = p.xs[0][0, :, 0, 0].argsort()
    return p.states(2).map(lambda x: p.conv(x)[:, order], p.xs[:4])


@shape
def clipped(p):
    return p.states(4).map(lambda x: p.xp.clip(p.conv(x), -3, 3), p.xs)


# States by index


@shape
def with_state(p):
    return p.states(2).with_state(1, lambda state, x: p.conv(x) + 1, p.xs[0])


@shape
def with_states_in_turn(p):
    states = p.states(2)
    y = states.with_state(0, lambda state: p.conv(p.xs[0]))
    return states.with_state(1, lambda state: y * 2 + 1)


# Tasks


@shape
def a_task(p):
    with p.executor() as executor:
        return executor.submit(lambda x: p.xp.maximum(p.conv(x), 0), p.xs[0]).result()


@shape
def tasks(p):
    with p.executor() as executor:
        futures = [executor.submit(p.conv, x) for x in p.xs]
        return [future.result() + 1 for future in futures]


@shape
def tasks_over_what_the_caller_made(p):
    x = p.xs[0] + p.xs[1]
    with p.executor() as executor:
        return [executor.submit(lambda k=k: p.conv(x) * k).result() for k in range(3)]


@shape
def a_map_of_tasks(p):
    with p.executor() as executor:
        return list(executor.map(lambda x: p.conv(x) - x, p.xs))


@shape
def a_task_over_a_tasks_result(p):
    with p.executor() as executor:
        y = executor.submit(p.conv, p.xs[0]).result()
        return executor.submit(lambda: p.conv(y)).result()


@shape
def a_fork_in_a_task(p):
    with p.executor() as executor:
        return executor.submit(lambda: p.states(2).map(p.conv, p.xs[:3])).result()


@shape
def summed_tasks(p):
    with p.executor() as executor:
        return sum(future.result() for future in [executor.submit(p.conv, x) for x in p.xs])


# Recordings


@in_order
def a_recorded_map(p):
    return p.replayed(p.states(2).map, lambda x: p.xp.maximum(p.conv(x), 0), p.xs[:4])


@in_order
def a_recorded_function(p):
    return p.replayed(lambda x: p.conv(x * 2) + 1, p.xs[0])


@in_order
def a_recorded_fork(p):
    def body(x, y):
        with p.states(2).fork() as fork:
            a, b = fork.run(p.conv, x), fork.run(lambda: y * 3)
        return a + b

    return p.replayed(body, p.xs[0], p.xs[1])


@in_order
def a_recording_then_work(p):
    y = p.replayed(p.conv, p.xs[0])
    return y * 2 - p.xs[1]


@in_order
def a_recorded_chain_with_temporaries(p):
    def body(x):
        y = p.conv(x) * 0.5
        z = p.xp.concatenate([y, x], axis=1).sum(axis=1, keepdims=True)
        return y + z

    return p.replayed(body, p.xs[0])


@in_order
def a_recorded_copy_into(p):
    out = p.xp.zeros_like(p.xs[0])

    def body(x):
        out[...] = p.xp.abs(p.conv(x))
        return out

    return p.replayed(body, p.xs[0])


def flat(result):
    """The arrays of a result, in order."""
    return [y for part in result for y in flat(part)] if isinstance(result, (list, tuple)) else [result]
