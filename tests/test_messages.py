"""No message shows an array's values, whatever argument of whatever public function the array is."""

import functools
import inspect
import logging
import os
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from harness.arrays import MARK, Tensor
from harness.planning import h200

import handlepool
from handlepool import ArraySpec, GraphFunction, HandlePool, ParallelStateExecutor, ParallelStates, drivers, ops
from handlepool.drivers.host.driver import HostDriver
from handlepool.testing import reference


@functools.cache
def arrays():
    """By name, what shows values when it is printed."""
    full = np.full((2, 3), -MARK - 0.789, np.float32)
    found = {
        "array": full,
        "array of one": full[:1, 0],
        "integer": np.array(-MARK),
        "integers": np.full(4, -MARK),
        "image": np.full((1, 4, 6, 6), MARK + 0.789, np.float64),
        "tensor": Tensor(),
    }
    wrapped = {
        "list of": lambda array: [array],
        "tuple of": lambda array: (array, array),
        "dictionary of": lambda array: {"x": array},
        "dictionary by": lambda array: {array: array},
        "partial of": lambda array: functools.partial(print, array),
        "attribute of": lambda array: SimpleNamespace(x=array, __name__="x"),
    }
    for name in ("array", "tensor"):
        for around, wrap in wrapped.items():
            if (name, around) != ("array", "dictionary by"):
                found[f"{around} {name}"] = wrap(found[name])
    return found


def conv(g, x, w, b=None, *, padding=1):
    y = g.conv_fprop(x, w, padding=[padding] * 2, stride=[1, 1], dilation=[1, 1], name="conv")
    return y if b is None else g.bias(y, b)


def shown(*_, **__):
    return None


@pytest.fixture
def default(make_pool, make_default):
    pool = make_pool(devices=1, check_order=False)
    make_default(pool)
    with pool.driver.create_stream():
        yield pool


def case(function, *args, **kwargs):
    return function, args, kwargs


SETTINGS = {
    "name": "name",
    "io_dtype": "float32",
    "intermediate_dtype": "float32",
    "compute_dtype": "float32",
    "workspace_limit": None,
    "allow_tf32": True,
    "deterministic": False,
    "heuristics": "A",
}
COMMON = {"out": None, "workspace_limit": None, "allow_tf32": True, "deterministic": False, "pool": None}
GEOMETRY = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}
TRANSPOSED = GEOMETRY | COMMON | {"output_padding": 0, "activation": None}
CONVOLUTION = GEOMETRY | COMMON | {"mode": "cross_correlation", "bias": None, "add": None, "activation": None}


def cases(pool):
    """By name, a call of each public function with good arguments, all of them given."""
    asarray = pool.driver.asarray
    x, w, b = (asarray(np.ones(shape, np.float32)) for shape in ((1, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1)))
    square = asarray(np.ones((4, 4), np.float32))
    v, q = asarray(np.ones(4, np.float32)), asarray(np.ones((1, 2, 6, 8), np.float16))
    plain = handlepool.graph(conv)
    y = plain(x, w)
    plan = plain.plan_for(x, w)
    states = ParallelStates(2, pool=pool)
    executor = ParallelStateExecutor(1, pool=pool)
    program = handlepool.record(plain, x, w, pool=pool)
    tuned = handlepool.record(lambda x, w: [plain(x, w), plain(x, w)], x, w, pool=pool, lanes=2)

    def in_fork(method):
        def call(*args, **kwargs):
            with states.fork() as fork:
                getattr(fork, method)(*args, **kwargs)

        return call

    def decorated(*args, **kwargs):
        return handlepool.graph(*args, **kwargs)(x, w)

    def declared(*args, **kwargs):
        return handlepool.operation(*args, **kwargs)(x)

    def submitted(*args, **kwargs):
        return executor.submit(*args, **kwargs).result()

    def with_pool(**kwargs):
        with HandlePool(**kwargs) as made:
            made.get_handle()

    def with_executor(*args, **kwargs):
        with ParallelStateExecutor(*args, **kwargs) as made:
            made.submit(int, 3).result()

    def spread(*args, **kwargs):
        with handlepool.spread(*args, **kwargs) as results:
            list(results)

    def entered(*args, **kwargs):
        with handlepool.Fork(*args, **kwargs) as fork:
            fork.run(int, 3)

    network = handlepool.recorded(lambda *args, **kwargs: plain(*args, **kwargs))

    found = {
        "get_handle": case(handlepool.get_handle, stream=None),
        "get_workspace": case(handlepool.get_workspace, nbytes=8, stream=None),
        "prewarm": case(handlepool.prewarm, states=1, workspace=8, stream=None),
        "stats": case(handlepool.stats, device=0),
        "trim": case(handlepool.trim, captured=False),
        "close": case(handlepool.close),
        "default_pool": case(handlepool.default_pool),
        "set_default_pool": case(handlepool.set_default_pool, pool),
        "with_cudnn_state": case(handlepool.with_cudnn_state, 0, shown, x, y=3),
        "graph": case(decorated, conv, inputs=["x", "w"], outputs=["conv::Y"], **SETTINGS),
        "operation": case(declared, shown, mutates=(), reads=lambda *_: 3),
        "record": case(handlepool.record, plain, x, w, pool=pool, padding=1),
        "recorded": case(handlepool.recorded, shown, lanes=2, instances=2, programs=3, outputs="new", in_place=(), strict=False),
        "RecordedFunction": None,
        "RecordedFunction, called": case(network, x, w, padding=1, out=None),
        "RecordedFunction.clear": case(network.clear),
        "RecordedFunction.explain": case(network.explain),
        "RecordedFunction.prewarm": case(network.prewarm, (x, w), tune=False),
        "RecordedFunction.program": case(network.program, x, w, padding=1),
        "RecordedFunction.stats": case(network.stats),
        "RecordedFunction.submit": case(lambda *args, **kwargs: network.submit(*args, **kwargs).result(), x, w, padding=1),
        "RecordedFunction.tune": case(network.tune, (1, 2), goal="clock", seconds=0.01),
        "RecordedStats": None,
        "conv2d": case(handlepool.conv2d, x, w, **CONVOLUTION),
        "conv2d, out": case(handlepool.conv2d, x, w, None, padding=1, out=y),
        "conv2d_input_grad": case(handlepool.conv2d_input_grad, y, w, x.shape, **GEOMETRY, **COMMON),
        "conv2d_weight_grad": case(handlepool.conv2d_weight_grad, x, y, w.shape, **GEOMETRY, **COMMON),
        "add": case(handlepool.add, x, x, activation="relu", out=None, pool=None),
        "concat": case(handlepool.concat, [x, x], 1, out=None, pool=None),
        "max_pool2d": case(handlepool.max_pool2d, x, 2, stride=1, padding=1, ceil_mode=True, out=None, pool=None),
        "avg_pool2d": case(
            handlepool.avg_pool2d, x, 2, stride=1, padding=1, ceil_mode=True, count_include_pad=True, out=None, pool=None
        ),
        "mean2d": case(handlepool.mean2d, x, keepdims=True, out=None, pool=None),
        "layer_norm": case(handlepool.layer_norm, x, axis=1, weight=v, bias=v, eps=1e-5, out=None, pool=None),
        "rms_norm": case(handlepool.rms_norm, x, axis=1, weight=v, eps=1e-6, out=None, pool=None),
        "group_norm": case(handlepool.group_norm, x, 2, weight=v, bias=v, eps=1e-5, out=None, pool=None),
        "instance_norm": case(handlepool.instance_norm, x, weight=v, bias=v, eps=1e-5, out=None, pool=None),
        "batch_norm": case(handlepool.batch_norm, x, v, v, weight=v, bias=v, eps=1e-5, activation="relu", out=None, pool=None),
        "softmax": case(handlepool.softmax, x, axis=1, out=None, pool=None),
        "squeeze_excite": case(
            handlepool.squeeze_excite, x, v[None], v[:1], v[:, None], v, activation="relu", gate="sigmoid", out=None, pool=None
        ),
        "pad": case(handlepool.pad, x, (1, 1), mode="constant", value=1, out=None, pool=None),
        "channel_shuffle": case(handlepool.channel_shuffle, x, 2, out=None, pool=None),
        "to_channels_last": case(handlepool.to_channels_last, x, out=None, pool=None),
        "to_contiguous": case(handlepool.to_contiguous, x, out=None, pool=None),
        "interpolate2d": case(
            handlepool.interpolate2d, x, size=3, scale_factor=None, mode="bilinear", align_corners=True, out=None, pool=None
        ),
        "conv_transpose2d": case(handlepool.conv_transpose2d, x, w, **TRANSPOSED, bias=v),
        "conv_transpose1d": case(handlepool.conv_transpose1d, x[0], w[0], **TRANSPOSED, bias=v),
        "conv1d": case(handlepool.conv1d, x[0], w[0], **GEOMETRY, **COMMON, bias=v, activation=None),
        "scaled_dot_product_attention": case(
            handlepool.scaled_dot_product_attention,
            q,
            q,
            q,
            attn_mask=q[0, 0, :, :6],
            is_causal=False,
            scale=1,
            out=None,
            pool=None,
        ),
        "multiply": case(handlepool.multiply, x, x, 2.0, out=None, pool=None),
        "elementwise": case(handlepool.elementwise, conv),
        "ElementwiseFunction": case(
            handlepool.elementwise(lambda x, y, n, k=1: x * y * n * k), x, x, 2.0, k=2, out=None, pool=None
        ),
        "asarray": case(handlepool.asarray, np.ones(3, np.float32), pool=None),
        "asnumpy": case(handlepool.asnumpy, x, pool=None),
        "matmul": case(handlepool.matmul, square, square, bias=square[0], activation=None, **COMMON),
        "linear": case(handlepool.linear, square, square, bias=square[0], activation="relu", **COMMON),
        "ops.conv2d_plan": case(ops.conv2d_plan, x, w, **CONVOLUTION),
        **{f"ops.{kind}": case(getattr(ops, kind), x, out=None, pool=None) for kind in ops.ACTIVATIONS},
        "ArraySpec": case(ArraySpec, (1, 4, 6, 6), "float32", layout="NCHW"),
        "DeviceProperties": case(handlepool.DeviceProperties, h200().text),
        "Fork": case(entered, pool, 2, None),
        "Fork.run": case(in_fork("run"), plain, x, w, b, padding=1),
        "Fork.run, conv2d": case(in_fork("run"), handlepool.conv2d, x, w, None, **CONVOLUTION),
        "Fork.run, conv2d_input_grad": case(
            in_fork("run"), handlepool.conv2d_input_grad, y, w, x.shape, None, **GEOMETRY, **COMMON
        ),
        "Fork.run, relu": case(in_fork("run"), ops.relu, x, None, pool=None),
        "Fork.run, max_pool2d": case(in_fork("run"), handlepool.max_pool2d, x, 2, None, stride=1, padding=1, out=None, pool=None),
        "Fork.run, concat": case(in_fork("run"), handlepool.concat, [x, x], 1, None, out=None, pool=None),
        "Fork.run, function": case(in_fork("run"), shown, x, y=3),
        "Fork.wait": case(in_fork("wait"), x, [x]),
        "Fork.map": case(in_fork("map"), plain, [x, x], [w, w], out=None),
        "GraphFunction": case(GraphFunction, conv, inputs=None, outputs=None, check=None, copies=True, **SETTINGS),
        "GraphFunction, called": case(plain, x, w, b, padding=1, out=y),
        "GraphFunction, called with fewer": case(plain, x, w, b=b),
        "GraphFunction.cache_clear": case(plain.cache_clear),
        "GraphFunction.compile": case(plain.compile, x, w, out=None, padding=1),
        "GraphFunction.options": case(plain.options, **SETTINGS),
        "GraphFunction.plan": None,  # what calls and forks stand on
        "GraphFunction.plan_for": case(plain.plan_for, x, w, out=None, padding=1),
        "GraphFunction.prepare": None,
        "GraphFunction.run": case(plain.run, {"x": x, "w": w}, padding=1),
        "GraphFunction.run, entries": case(lambda a, c: plain.run({"x": a, c: w}), x, "w"),
        "tune": case(handlepool.tune, plain, x, w, states=states, candidates=3, padding=1),
        "GraphFunction.tune": case(plain.tune, x, w, states=states, out=None, padding=1),
        "HandlePool": case(with_pool, driver="host", scratch_limit=None, idle_limit=3, plan_limit=3, check=True),
        "HandlePool.cache_clear": case(pool.cache_clear),
        "HandlePool.close": case(HandlePool(driver="host").close),
        "HandlePool.get_handle": case(pool.get_handle, stream=None),
        "HandlePool.get_workspace": case(pool.get_workspace, nbytes=8, stream=None),
        "HandlePool.prewarm": case(pool.prewarm, states=1, workspace=8, stream=None),
        "HandlePool.stats": case(pool.stats, device=0),
        "HandlePool.trim": case(pool.trim, captured=False),
        "ParallelStateExecutor": case(with_executor, 1, pool=pool, thread_name_prefix="x", initializer=None, initargs=()),
        "ParallelStateExecutor.map": case(executor.map, plain, [x, x], [w, w]),
        "ParallelStateExecutor.shutdown": case(ParallelStateExecutor(1, pool=pool).shutdown, wait=True, cancel_futures=False),
        "ParallelStateExecutor.submit": case(submitted, plain, x, w, padding=1),
        "ParallelStates": case(ParallelStates, 2, pool=pool),
        "ParallelStates.fork": case(lambda **kwargs: states.fork(**kwargs).__enter__().__exit__(None, None, None), stream=None),
        "ParallelStates.map": case(states.map, plain, [x, x], [w, w], out=[y, None]),
        "ParallelStates.with_state": case(states.with_state, 0, lambda state, n: state.workspace(n), 8),
        "Plan.build": case(plan.build, 0),
        "Plan.select": case(plan.select, 0),
        "Program": None,
        "Program.close": None,
        "Program.explain": case(tuned.explain, measure=True),
        "Program.draw": case(tuned.draw, os.path.join(tempfile.gettempdir(), "nowhere", "x.png"), dark=False, measure=False),
        "Program.hand_over": None,
        "Program.replay": case(program.replay, stream=None),
        "Program.tune": case(tuned.tune, (1, 2), goal="clock", seconds=0.01),
        "Program.update": case(program.update, x, w),
        "Program.update, by name": case(program.update, x=x),
        "StreamFuture": None,
        "StreamFuture.result": case(executor.submit(int, 3).result, timeout=3),
        "StreamFuture.synchronize": case(executor.submit(int, 3).synchronize, timeout=3),
        "spread": case(
            spread,
            lambda x, w: plain(x, w, padding=1),
            [x, x],
            shared=(w,),
            devices=[0],
            lanes=2,
            in_flight=1,
            to="host",
            errors="raise",
            on_done=None,
            progress=False,
        ),
        "drivers.available": case(drivers.available, "host"),
        "drivers.choose": case(drivers.choose, "host"),
        "drivers.load": case(drivers.load, "host"),
        "drivers.host.HostDriver": case(
            HostDriver, devices=1, scheduler="threads", seed=0, memory=1000, checks=True, check_order=False
        ),
        "reference.conv2d": case(
            reference.conv2d,
            np.ones(x.shape),
            np.ones(w.shape),
            **GEOMETRY,
            mode="convolution",
            bias=None,
            add=None,
            activation=None,
        ),
        "reference.matmul": case(reference.matmul, np.ones((3, 4)), np.ones((4, 2)), bias=None, activation=None),
        "reference.relative_error": case(reference.relative_error, np.ones(3), np.ones(3)),
    }
    return {name: each for name, each in found.items() if each}, found, executor.shutdown


def is_protocol(value):
    """Whether it is for annotations alone."""
    return getattr(value, "_is_protocol", False)


def public():
    """What is public: functions, classes and their methods."""
    names = {name: getattr(handlepool, name) for name in handlepool.__all__}
    names |= {f"ops.{name}": getattr(ops, name) for name in ops.__all__ if name not in handlepool.__all__}
    for name, value in list(names.items()):
        if isinstance(value, type) and (issubclass(value, Exception) or is_protocol(value)):
            del names[name]
        elif isinstance(value, type):
            methods = inspect.getmembers(value, inspect.isfunction)
            names |= {
                f"{name}.{method}": f for method, f in methods if method[0] != "_" and f.__module__.startswith("handlepool")
            }
    return {name for name, value in names.items() if callable(value)}


def test_every_public_function_is_among_the_cases(default):
    _, found, shutdown = cases(default)
    shutdown()
    assert public() - found.keys() == set()


def texts(error, seen=()):
    """What a traceback would show of an error and of those it came from."""
    if error is None or error in seen:
        return
    yield f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    yield from texts(error.__cause__, (*seen, error))
    if not error.__suppress_context__:
        yield from texts(error.__context__, (*seen, error))


@pytest.mark.parametrize("kind", arrays())
def test_no_message_shows_an_arrays_values(default, caplog, kind):
    caplog.set_level(logging.DEBUG)
    good, _, shutdown = cases(default)
    value, wrong, raised = arrays()[kind], [], 0
    for name, (function, args, kwargs) in good.items():
        calls = [((*args[:k], value, *args[k + 1 :]), kwargs) for k in range(len(args))]
        calls += [(args, kwargs | {key: value}) for key in kwargs]
        for where, (given, named) in zip([*range(len(args)), *kwargs], calls, strict=True):
            try:
                function(*given, **named)
            except Exception as error:
                raised += 1
                wrong += [f"{name}, {where}: {text}" for text in texts(error) if str(MARK) in text]
    shutdown()
    assert not wrong, "\n".join(wrong)
    assert str(MARK) not in caplog.text
    assert raised > 100


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x, a: g.conv_fprop(x, a, padding=[1, 1], stride=[1, 1], dilation=[1, 1]),
        lambda g, x, a: g.conv_fprop(x, x, padding=a, stride=[1, 1], dilation=[1, 1]),
        lambda g, x, a: a,
        lambda g, x, a: (g.relu(x), a),
        lambda g, x, a: {"outputs": [a]},
        lambda g, x, a: {"inputs": [a], "outputs": [g.relu(x)]},
        lambda g, x, a: {"outputs": [g.relu(x)], (a,): 3} if isinstance(a, Tensor) else {"outputs": [a, a]},
    ],
)
@pytest.mark.parametrize("kind", ["array", "integer", "integers", "tensor", "list of array", "tuple of tensor"])
def test_no_message_about_a_graph_shows_an_arrays_values(default, build, kind):
    x, value = np.ones((1, 4, 6, 6), np.float32), arrays()[kind]
    graph, error = handlepool.graph(lambda g, x: build(g, x, value)), None
    try:
        graph(x)
    except Exception as trouble:
        error = trouble
    assert error is not None
    assert [text for text in texts(error) if str(MARK) in text] == []
