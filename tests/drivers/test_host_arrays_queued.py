"""What host arrays queue: with a latch on the stream the call returns, and nothing waits; and random programs of it."""

import numpy as np
import pytest
from harness.insides import streams_of
from hypothesis import find, given, settings
from hypothesis import strategies as st

from handlepool.drivers.host.driver import HostDriver
from handlepool.errors import CaptureError, ContractError

rng = np.random.default_rng(7)
M = rng.integers(-4, 5, (3, 4)).astype(np.float32)
N = rng.integers(1, 6, (3, 4)).astype(np.float32)
I = np.array([0, 2, 1])  # noqa: E741 (an index)


def into(function):
    """The call with ``out=``; the result is that array."""

    def call(a):
        out = a.m * 0 if isinstance(a.m, np.ndarray) else np.zeros_like(a.m)
        assert function(a, out) is out
        return out

    return call


def changed(function):
    """A change in place; the result is the array."""

    def call(a):
        function(a.m)
        return a.m

    return call


def into_double(function):
    """The call with ``out=`` of a wider type, which NumPy reckons in."""

    def call(a):
        out = np.zeros_like(function(a.m / 3, None), dtype=np.float64)
        assert function(a.m / 3, out) is out
        return out

    return call


def scattered(method, ufunc):
    """CuPy's method of an array, which NumPy has as a ufunc's; the index names an element twice."""
    index, values = ([0, 0, 1], [1, 1, 2]), [5, -7, 1]
    return changed(lambda m: ufunc.at(m, index, values) if isinstance(m, np.ndarray) else getattr(m, method)(index, values))


def nines(array):
    array[...] = 9


def nines_one_by_one(flat):
    for element in flat:
        element[...] = 9


def increased(array, by):
    array += by


QUEUED = {
    "a ufunc": lambda a: np.maximum(a.m, 0),
    "an operator": lambda a: (a.m + 2 * a.n) / a.n,
    "a power": lambda a: a.m**2,
    "a power of truth values": lambda a: (a.m > 0) ** 2,
    "a ufunc of two results": lambda a: np.divmod(a.m, a.n)[1],
    "a ufunc with where=": lambda a: np.add(a.m, 1, out=a.n, where=a.m > 0),
    "a ufunc with out=": into(lambda a, out: np.multiply(a.m, a.n, out=out)),
    "accumulate": lambda a: np.add.accumulate(a.m, axis=1),
    "outer": lambda a: np.subtract.outer(a.m, a.i),
    "reduce": lambda a: np.add.reduce(a.m),
    "at": changed(lambda m: np.add.at(m, ([0, 0, 1], [1, 1, 2]), 5)),
    "scatter_add": scattered("scatter_add", np.add),
    "scatter_max": scattered("scatter_max", np.maximum),
    "scatter_min": scattered("scatter_min", np.minimum),
    "sum": lambda a: a.m.sum(),
    "mean": lambda a: a.m.mean(axis=0, keepdims=True),
    "sum with keepdims=1": lambda a: a.m.sum(axis=1, keepdims=1),
    "max of all with keepdims=1": lambda a: np.max(a.m, keepdims=1),
    "reduce with keepdims=1": lambda a: np.add.reduce(a.m, keepdims=1),
    "argmin with keepdims=0": lambda a: np.argmin(a.m, axis=0, keepdims=0),
    "sum into a wider type": into_double(lambda m, out: m.sum(axis=1, out=out)),
    "mean into a wider type": into_double(lambda m, out: np.mean(m, axis=1, out=out)),
    "var into a wider type": into_double(lambda m, out: np.var(m, axis=1, out=out)),
    "nansum into a wider type": into_double(lambda m, out: np.nansum(m, axis=1, out=out)),
    "cumsum into a wider type": into_double(lambda m, out: np.cumsum(m, axis=1, out=out)),
    "accumulate into a wider type": into_double(lambda m, out: np.add.accumulate(m, out=out)),
    "einsum into a wider type": into_double(lambda m, out: np.einsum("ij->i", m, out=out)),
    "round into a wider type": into_double(lambda m, out: np.round(m, 1, out=out)),
    "sum into what it reads": changed(lambda m: np.sum(m.copy(), axis=0, out=m[1])),
    "var": lambda a: a.m.var(axis=1, ddof=1),
    "argmax": lambda a: a.m.argmax(axis=-1),
    "max with out=": into(lambda a, out: np.max(a.m[None], axis=0, out=out)),
    "an element": lambda a: a.m[1, 2],
    "a row": lambda a: a.m[-1],
    "a slice": lambda a: a.m[::-1, 1:3],
    "a new axis": lambda a: a.m[:, None, ..., 0],
    "an index array": lambda a: a.m[a.i],
    "a plain index array": lambda a: a.m[:, I],
    "index arrays": lambda a: a.m[a.i, [1, 2, 3]],
    "take": lambda a: a.m.take(a.i, axis=1),
    "an assignment": changed(lambda m: m.__setitem__(0, m[1])),
    "an assignment of a number": changed(lambda m: m.__setitem__((slice(None), 1), 7)),
    "an assignment of a list": changed(lambda m: m.__setitem__(1, [1, 2, 3, 4])),
    "an assignment by a mask": changed(lambda m: m.__setitem__(m < 0, 0)),
    "an assignment of an overlapping part": changed(lambda m: m.__setitem__(slice(1, None), m[:-1])),
    "fill": changed(lambda m: m.fill(3)),
    "astype": lambda a: a.m.astype(np.int16),
    "copy": lambda a: a.m.T.copy(),
    "reshape": lambda a: a.m.reshape(2, 6),
    "reshape that copies": lambda a: a.m.T.reshape(-1),
    "ravel": lambda a: a.m[:, ::2].ravel(),
    "transpose": lambda a: a.m.transpose(1, 0),
    "a view of another type": lambda a: a.m.view(np.int32),
    "squeeze": lambda a: a.m[:1].squeeze(0),
    "split": lambda a: np.split(a.m, 2, axis=1)[1],
    "broadcast_to": lambda a: np.broadcast_to(a.m, (2, 3, 4)),
    "concatenate": lambda a: np.concatenate([a.m, a.n], axis=1),
    "concatenate with out=": into(lambda a, out: np.concatenate((a.m[:1], a.n[:2]), 0, out)),
    "stack": lambda a: np.stack([a.m, a.n], axis=-1),
    "where": lambda a: np.where(a.m > 0, a.m, -a.n),
    "where of a list": lambda a: np.where(a.m > 0, [1.0, 2.0, 3.0, 4.0], 0.0),
    "clip": lambda a: a.m.clip(-1, 1),
    "round": lambda a: (a.m / 3).round(1),
    "einsum": lambda a: np.einsum("ij,kj->ik", a.m, a.n),
    "einsum without an arrow": lambda a: np.einsum("ij,jk", a.m, a.n.T),
    "einsum with an ellipsis": lambda a: np.einsum("...j,...j->...", a.m, a.n),
    "einsum with an ellipsis that spreads": lambda a: np.einsum("i...,j...->ij...", a.m, a.n[:, :1]),
    "einsum with a trace": lambda a: np.einsum("ii->i", a.m[:, :3]),
    "einsum that is a view": changed(lambda m: nines(np.einsum("ij->ji", m)[1])),
    "einsum that is a diagonal": changed(lambda m: nines(np.einsum("ii->i", m[:, :3]))),
    "matrix_transpose": changed(lambda m: nines(getattr(np.linalg, "matrix_transpose", np.transpose)(m)[0])),
    "flat": changed(lambda m: nines_one_by_one(m.flat) if not isinstance(m, np.ndarray) else m.fill(9)),
    "flat of a transposed array": changed(lambda m: nines_one_by_one(m.T.flat) if not isinstance(m, np.ndarray) else m.fill(9)),
    "flip of no axes": lambda a: np.flip(a.m[1, 2]),
    "einsum by lists": lambda a: np.einsum(a.m, [0, 1], a.n, [2, 1], [0, 2]),
    "einsum with out=": into(lambda a, out: np.einsum("ij,ij->ij", a.m, a.n, out=out)),
    "matmul": lambda a: a.m @ a.n.T,
    "matmul of stacks": lambda a: np.matmul(a.m[None], a.n.T),
    "dot": lambda a: np.dot(a.m, a.n[0]),
    "dot of stacks": lambda a: np.dot(a.m[None], np.stack([a.n.T, a.n.T])),
    "pad": lambda a: np.pad(a.m, ((1, 0), (2, 2)), constant_values=-1),
    "repeat": lambda a: a.m.repeat(2, axis=1),
    "repeat of all": lambda a: np.repeat(a.m, 3),
    "repeat by a list": lambda a: a.m.repeat([1, 0, 2], axis=0),
    "tile": lambda a: np.tile(a.m, (2, 1)),
    "roll": lambda a: np.roll(a.m, 1, axis=0),
    "cumsum": lambda a: a.m.cumsum(axis=1),
    "sort": lambda a: np.sort(a.m, axis=None),
    "a sort in place": changed(lambda m: m.sort(axis=0)),
    "argsort": lambda a: a.m.argsort(axis=1, kind="stable"),
    "+=": changed(lambda m: increased(m, 3)),
    "+= of a part": changed(lambda m: increased(m[1:], m[:-1])),
    "a swap of parts": changed(lambda m: m.__setitem__(slice(0, 2), m[[1, 0]])),
    "zeros_like": lambda a: np.zeros_like(a.m, dtype=np.int8),
    "empty_like": lambda a: np.add(a.m, a.n, out=np.empty_like(a.m)),
    "full_like": lambda a: np.full_like(a.m, 2.5),
    "copyto": changed(lambda m: np.copyto(m, m[0], where=m > 1)),
    "nan_to_num in place": changed(lambda m: np.nan_to_num(m, copy=False)),
    "real": lambda a: a.m.real,
    "imag": lambda a: a.m.imag,
}


class Arrays:
    def __init__(self, make=np.array):
        self.m, self.n, self.i = make(M), make(N), make(I)


@pytest.mark.parametrize("name", QUEUED)
def test_with_a_latch_on_the_stream_the_call_returns_and_nothing_waits(make_driver, monkeypatch, name):
    driver = make_driver(scheduler="adversarial", seed=2, devices=1)
    expected = QUEUED[name](Arrays())
    with driver.create_stream() as stream:
        latch = driver.latch(stream.ptr)
        with monkeypatch.context() as patch:
            patch.setattr(streams_of(driver).scheduler, "reach", lambda *_: pytest.fail("it waits"))
            found = QUEUED[name](Arrays(driver.asarray))
        latch.release()
        values = found.get()
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    assert np.array_equal(values, expected, equal_nan=True)


@pytest.mark.parametrize("make", [np.empty_like, np.zeros_like, np.copy, lambda y: y.copy("K"), lambda y: y.astype("f2")])
def test_what_is_made_of_a_channels_last_array_is_so_as_cupys_is(make_driver, make):
    y = make_driver(devices=1).asarray(np.zeros((2, 3, 4, 5), np.float32)).transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    found = make(y)
    assert found.strides == tuple(step * found.itemsize // 4 for step in y.strides)
    for lost in (y.copy(), y + 1, np.maximum(y, 0)):
        assert lost.flags.c_contiguous


@pytest.mark.parametrize("name", QUEUED)
def test_what_is_queued_can_be_captured_and_replayed(make_driver, name):
    driver = make_driver(scheduler="adversarial", seed=3, devices=1)
    expected = QUEUED[name](Arrays())
    with driver.create_stream() as stream:
        arrays = Arrays(driver.asarray)
        driver.synchronize_stream(stream.ptr)
        stream.begin_capture("relaxed")
        with driver.relaxed():  # as our own recordings do, so that arrays may be allocated
            found = QUEUED[name](arrays)
        stream.end_capture().launch(stream)
        assert np.array_equal(found.get(), expected, equal_nan=True)


WAITS = {
    "float": lambda y: float(y[0, 0]),
    "item": lambda y: y.item(0),
    "asarray": lambda y: np.asarray(y),
    "get": lambda y: y.get(),
    "tolist": lambda y: y.tolist(),
    "if": lambda y: 1 if y[0, 0] > 0 else 2,
    "a mask": lambda y: y[y > 0],
    "unique": lambda y: np.unique(y),
    "median": lambda y: np.median(y),
    "linalg": lambda y: np.linalg.norm(y),
    "fft": lambda y: np.fft.fft(y),
    "random": lambda y: np.random.default_rng(1).normal(y),
    "repeats": lambda y: np.tile(y, y[0].astype(int)),
    "repeats of each": lambda y: y.repeat(y[0].astype(int), axis=1),
    "pickle": lambda y: y.__reduce__(),
    "deepcopy": lambda y: y.__deepcopy__({}),
    "array_repr": lambda y: np.array_repr(y),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_capture_is_an_error_that_names_the_line(make_driver, name):
    driver = make_driver(devices=1)
    with driver.create_stream() as stream:
        y = driver.asarray(M)
        stream.begin_capture()
        with driver.relaxed(), pytest.raises(CaptureError, match="captured work has not run") as raised:
            WAITS[name](y)
        with pytest.raises(CaptureError):  # it would have harmed the capture, too
            stream.end_capture()
    assert f"{__file__}:{WAITS[name].__code__.co_firstlineno}" in str(raised.value)


def test_repr_waits_but_in_a_capture_shows_shape_and_type_and_harms_nothing(make_driver):
    driver = make_driver(scheduler="adversarial", seed=1, devices=1)
    with driver.create_stream() as stream:
        y = driver.asarray(M) + 1
        assert repr(y) == repr(M + 1).replace("array", "HostArray")
        assert f"{y[0, 0]}" == str(M[0, 0] + 1)
        stream.begin_capture()
        with driver.relaxed():
            z = y + 1
        for shown in (repr(z), str(z), f"{z}", repr([z])):
            assert "HostArray of shape (3, 4), float32" in shown
        stream.end_capture().launch(stream)
        assert np.array_equal(z.get(), M + 2)


def test_repr_takes_no_error_from_who_waits_for_it(make_driver):
    driver = make_driver(devices=1)
    with driver.create_stream() as stream:
        y = driver.asarray(M)
        driver.enqueue(stream.ptr, lambda _: 1 / 0, writes=(y,), label="a mistake")
        repr(y)
        with pytest.raises(ZeroDivisionError):
            y.get()


# Random programs

UNARY = [
    np.negative,
    np.abs,
    np.square,
    lambda a: a.T.copy().T,
    lambda a: a[::-1],
    lambda a: a[:, ::-1],
    lambda a: np.roll(a, 1, 0),
]
UNARY += [lambda a: np.cumsum(a, 0), lambda a: np.sort(a, 1), lambda a: a.reshape(-1).reshape(a.shape), lambda a: a.clip(-50, 50)]
UNARY += [
    lambda a: np.pad(a, 1)[1:-1, 1:-1],
    lambda a: a.astype(np.int64).astype(a.dtype),
    lambda a: a - a.sum(0),
    lambda a: a + a.max(),
]
UNARY += [lambda a: np.broadcast_to(a[:1], a.shape), lambda a: a[[2, 0, 1]], lambda a: np.where(a > 0, a, -1)]
BINARY = [np.add, np.subtract, np.maximum, lambda a, b: np.where(a > b, a, b), lambda a, b: np.concatenate([a, b])[1:4]]
BINARY += [lambda a, b: np.einsum("ij,ij->ij", a, b), lambda a, b: np.einsum("...j,...j->...", a, b)[:, None] + a]
BINARY += [lambda a, b: (a @ b.T) @ b, lambda a, b: np.stack([a, b])[1], lambda a, b: np.hstack([a, b])[:, 2:6]]


def add_in_place(a, b):
    a += b


def write_part(a, b):
    a[1:, ::2] = b[:-1, 1::2]


def write_mask(a, b):
    a[b > 0] = 1


def write_out(a, b):
    np.subtract(a, b, out=a)


def sum_out(a, b):
    np.sum(b, axis=0, out=a[1])


IN_PLACE = [add_in_place, write_part, write_mask, write_out, sum_out, lambda a, b: np.copyto(a, b, where=a < b)]
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 7), st.integers(0, 7), st.booleans()), min_size=2, max_size=14
)


def run(steps, arrays, switch):
    """The program, on arrays of whatever kind; ``switch(number)`` makes a stream current, after all that was given before."""
    for stream, number, first, second, keep in steps:
        switch(stream)
        functions = UNARY + BINARY + IN_PLACE
        function = functions[number % len(functions)]
        a, b = arrays[first % len(arrays)], arrays[second % len(arrays)]
        a = a % 97 if keep else a
        if function in UNARY:
            arrays.append(function(a))
        elif function in BINARY:
            arrays.append(function(a, b))
        else:
            a = a + 0
            function(a, b)
            arrays.append(a)
    return arrays


@pytest.mark.parametrize("dtype", ["float64", "int32"])
@given(steps=STEPS, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_random_programs_give_numpys_values_shapes_and_types(dtype, steps, seed):
    with np.errstate(all="ignore"):
        expected = run(steps, [M.astype(dtype), N.astype(dtype)], lambda _: None)
    for ours, theirs in zip(on_three_streams(dtype, steps, seed), expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.array_equal(ours, theirs, equal_nan=True)


def test_control_a_random_program_without_its_events_is_caught():
    def is_caught(steps):
        try:
            on_three_streams(np.float32, steps, 0, ordered=False)
        except ContractError as error:
            return "not ordered" in str(error)
        return False

    assert find(STEPS, is_caught)


def on_three_streams(dtype, steps, seed, ordered=True):
    """What a program gives whose steps run on three streams, each after the one before where they are ordered."""
    driver = HostDriver(scheduler="adversarial", seed=seed, devices=1, check_order=True)
    streams = [driver.create_stream() for _ in range(3)]
    last = [streams[0]]

    def switch(number):
        stream = streams[number]
        event = driver.create_event()
        driver.record_event(event, last[0].ptr)
        if ordered:
            driver.wait_event(stream.ptr, event)
        last[0] = stream
        stream.use()

    with streams[0]:
        found = run(steps, [driver.asarray(M.astype(dtype)), driver.asarray(N.astype(dtype))], switch)
        values = [ours.get() for ours in found]
    assert not driver.order.found
    return values


def test_a_plain_iterator_shows_what_was_written_since(make_driver):
    y = make_driver(scheduler="adversarial", seed=1, devices=1).asarray(M)
    for array in (y, y.T):
        elements = array.flat
        next(elements)
        array[0, 1] = 77
        assert float(next(elements)) == 77


AT_THE_CALL = {
    "an index": lambda y, index, ones: y[index],
    "take": lambda y, index, ones: np.take(y, index),
    "take, the method": lambda y, index, ones: y.take(index, mode="clip"),
    "repeat": lambda y, index, ones: y[:3].repeat(index),
    "an assignment": lambda y, index, ones: y.__setitem__(index, ones),
    "at": lambda y, index, ones: np.add.at(y, index, ones),
    "at of several": lambda y, index, ones: np.add.at(y[:, None], (index, np.array([0])), ones),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", AT_THE_CALL)
def test_plain_indices_are_taken_at_the_call(make_driver, name, check):
    values = np.arange(9.0)
    plain = values.copy()
    expected = AT_THE_CALL[name](plain, np.array([0, 4, 4]), np.ones(1))
    for seed in range(3):
        driver = make_driver(scheduler="adversarial", seed=seed, devices=1, check_order=check)
        with driver.create_stream():
            y, index = driver.asarray(values), np.array([0, 4, 4])
            found = AT_THE_CALL[name](y, index, driver.asarray(np.ones(1)))
            index[:] = 8
            assert np.array_equal(y.get(), plain)
            assert found is None or np.array_equal(found.get(), expected)


def test_control_a_plain_operand_that_is_overwritten_is_an_error(make_driver):
    driver = make_driver(scheduler="adversarial", seed=1, devices=1, check_order=True)
    with driver.create_stream():
        values = np.ones(9)
        y = driver.asarray(np.arange(9.0)) + values
        values[:] = 8
        with pytest.raises(ContractError):
            y.get()


def test_an_assignment_of_no_elements_to_no_elements_is_taken():
    x = HostDriver().asarray(np.ones((1, 4, 2, 4), np.float32))
    x[:, 4:][...] = x[:, 4:] * 2
    assert (x.get() == 1).all()
