"""Host arrays whose work has not run yet, given to NumPy, Pillow, SciPy, matplotlib and Python: nobody sees an old value."""

import array as arrays_of_python
import contextlib
import copy
import io
import json
import math
import pickle
import random
import statistics
import struct
import sys
import warnings

import numpy as np
import pytest
from harness.insides import streams_of
from harness.numpy_calls import OTHERWISE, Plain, called, forms_of, functions, plain, same

from handlepool.drivers.host.array import HostArray
from handlepool.errors import ArrayTypeError

FUNCTIONS = dict(functions())


class Late(Plain):
    """Arrays that old values were put in; what writes the right ones is held by a latch until somebody waits for queued work."""

    def __init__(self, driver):
        self._driver = driver
        self._latches = []
        self._reach = streams_of(driver).scheduler.reach
        self.waits = 0

    def make(self, values):
        driver, pointer = self._driver, self._driver.current_stream().ptr
        made = driver.asarray(np.ones_like(values))
        self._latches.append(driver.latch(pointer))
        driver.enqueue(pointer, lambda to: np.copyto(to, values), writes=(made,), label="late")
        return made

    def release(self):
        for latch in self._latches:
            latch.release()

    def reach(self, *args):
        self.waits += 1
        self.release()
        self._reach(*args)


@pytest.fixture
def late(make_driver, monkeypatch):
    """Makes such arrays, on a stream of their own that is current."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            driver = make_driver(scheduler="adversarial", seed=1, devices=1, **options)
            stack.enter_context(driver.create_stream())
            made = Late(driver)
            monkeypatch.setattr(streams_of(driver).scheduler, "reach", made.reach)
            stack.callback(driver.synchronize_stream, driver.current_stream().ptr)
            stack.callback(made.release)
            return made

        yield make


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder is the test's own: functions as `numpy.save` take a string for a file's name, and write there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_functions_write_to_files_lies_in_the_tests_folder(folder):
    for function in (np.save, np.savez, np.ndarray.tofile):
        forms_of(function)
    assert list(folder.iterdir())


def test_there_are_enough_functions():
    """At least 200 that take arrays, and no exception that is none."""
    assert sum(bool(forms_of(function, 1)) for function in FUNCTIONS.values()) > 450
    assert set(OTHERWISE) <= set(FUNCTIONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_every_function_of_numpy_sees_the_last_values(late, part):
    wrong = []
    arrays = late()
    for name in list(FUNCTIONS)[part::8]:
        for form in forms_of(FUNCTIONS[name]):
            expected = called(FUNCTIONS[name], form, Plain())
            arrays.__dict__ = {key: value for key, value in arrays.__dict__.items() if key.startswith("_")} | {"waits": 0}
            try:
                found = called(FUNCTIONS[name], form, arrays)
            except Exception as error:
                if name not in OTHERWISE:
                    wrong.append(f"{name}: {error!r}")
                continue
            if not same(list(found), list(expected)):
                arrays.release()
                if name not in OTHERWISE or not same(found[0], called(FUNCTIONS[name], form, arrays)[0]):
                    wrong.append(f"{name}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


def leaves(value):
    if isinstance(value, (list, tuple)):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value] if isinstance(value, (np.ndarray, HostArray)) else []


@pytest.mark.filterwarnings("ignore")
def test_a_write_to_what_is_a_view_with_numpy_reaches_the_array_or_is_refused(make_driver):
    """No function gives a copy where NumPy gives a view, and takes a write to it in silence."""
    wrong, written = [], 0
    driver = make_driver(devices=1)
    for name, function in FUNCTIONS.items():
        for form in forms_of(function):
            given = form(Plain())
            views = [leaf for leaf in leaves(function(*given)) if any(np.may_share_memory(leaf, a) for a in leaves(given))]
            if not views or name in OTHERWISE:
                continue
            arrays = Plain()
            arrays.make = driver.asarray
            given, ours = form(Plain()), form(arrays)
            for theirs, view in zip(leaves(function(*given)), leaves(function(*ours)), strict=False):
                with contextlib.suppress(ValueError):
                    view[...] = 3
                    theirs[...] = 3
                    written += 1
            if not all(same(a, plain(b)) for a, b in zip(leaves(given), leaves(ours), strict=True)):
                wrong.append(f"{name}: {ours}, not {given}")
    assert not wrong, "\n".join(wrong)
    assert written > 50


@pytest.mark.filterwarnings("ignore")
def test_every_method_that_numpys_arrays_have_too_sees_the_last_values(late):
    wrong = []
    names = [name for name in dir(HostArray) if hasattr(np.ndarray, name) and not hasattr(object, name)]
    arrays = late()
    for name in names:
        method = getattr(np.ndarray, name)
        if not callable(method) or name in ("__array__", "__array_function__", "__array_ufunc__", "__dlpack__", "dump", "tofile"):
            continue
        for form in forms_of(method):
            arrays.__dict__ = {key: value for key, value in arrays.__dict__.items() if key.startswith("_")} | {"waits": 0}
            expected = called(method, form, Plain())
            if not isinstance(form(Plain())[0], np.ndarray):
                continue
            try:
                found = called(lambda first, *rest, name=name: getattr(type(first), name)(first, *rest), form, arrays)
            except Exception as error:
                found = repr(error)
            if name not in ("__iter__", "__reduce__", "dumps") and not same(list(found), list(expected)):
                wrong.append(f"{name}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


PYTHON = {
    "bytes": bytes,
    "list": lambda y: [float(entry) for entry in y],
    "tuple": lambda y: tuple(map(float, y)),
    "sorted": lambda y: [float(entry) for entry in sorted(y)],
    "reversed": lambda y: [float(entry) for entry in reversed(y)],
    "min and max": lambda y: (float(min(y)), float(max(y))),
    "sum": lambda y: float(sum(y)),
    "zip": lambda y: [(float(a), float(b)) for a, b in zip(y, y, strict=True)],
    "enumerate": lambda y: [(n, float(a)) for n, a in enumerate(y)],
    "f-string": lambda y: f"{y[0]:.2f} {y}".replace("HostArray", "array"),
    "str": str,
    "format": lambda y: f"{y[1]:6.3f}|{y[0]}",
    "repr": lambda y: repr(y).replace("HostArray", "array"),
    "json": lambda y: json.dumps(y.tolist()),
    "struct": lambda y: struct.pack("4d", *y),
    "array": lambda y: arrays_of_python.array("d", y).tobytes(),
    "fsum": math.fsum,
    "statistics": lambda y: statistics.median(map(float, y)),
    "in": lambda y: (0.5 in y, 0.75 in y, 1.0 in y),
    "complex": lambda y: complex(y[0]),
    "bool": lambda y: bool(y[0] > 0.4),
    "index": lambda y: [10, 20, 30][np.add(y, 0.5)[1:2].astype(int)[0]],
    "copy": lambda y: copy.copy(y),
    "deepcopy": lambda y: copy.deepcopy([y])[0],
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "dumps": lambda y: pickle.loads(y.dumps()),
    "choice": lambda y: float(random.Random(2).choice(y)),
    "np.array of arrays": lambda y: np.array([y, y]),
    "np.array of elements": lambda y: np.array([y[0], y[1]]),
    "assignment into a plain array": lambda y: np.copyto(z := np.zeros(4), y) or z,
    "a plain array's item": lambda y: (z := np.zeros(4)).__setitem__(slice(0, 2), y[:2]) or z,
    "a plain array's sum": lambda y: np.ones(4).__iadd__(y),
    "a plain array's index": lambda y: np.arange(9.0)[(y * 8).astype(int)],
    "dlpack": np.from_dlpack,
    "nditer": lambda y: [float(entry) for entry in np.nditer(y)],
    "ndenumerate": lambda y: [float(entry) for _, entry in np.ndenumerate(y)],
    "flat": lambda y: [float(entry) for entry in y.flat],
    "memory order": lambda y: np.lib.stride_tricks.as_strided(y, (2,), (16,)),
    "vectorize": lambda y: np.vectorize(lambda entry: entry + 1)(y),
    "a view's element": lambda y: y.reshape(2, 2)[1, 0].item(),
    "a printed element": lambda y: print(y[3], file=(out := io.StringIO())) or out.getvalue(),
    "tofile": lambda y: y.tobytes(),
}


@pytest.mark.parametrize("name", PYTHON)
def test_whatever_python_makes_of_an_array_has_the_last_values(late, name):
    arrays = late()
    use = PYTHON[name]
    assert same(plain(use(arrays.v[...] if name != "deepcopy" else arrays.v)), plain(use(Plain().v)))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="a class in Python has a buffer from 3.12 on")
def test_a_buffer_has_the_last_values_and_is_not_written(late):
    y = late().v
    assert np.array_equal(np.frombuffer(memoryview(y)), Plain().v)
    assert memoryview(y).readonly
    assert not np.asarray(y).flags.writeable


def test_no_name_leads_to_the_memory_without_a_wait(late):
    """What an array has by its public names is a number, a type, or waits: nothing gives a buffer, or NumPy's array as it is."""
    arrays = late()
    y = arrays.m
    assert not hasattr(y, "__dict__")
    for name in [name for name in dir(y) if not name.startswith("_") or name.startswith("__array_")]:
        assert name not in ("__array_interface__", "__array_struct__", "ctypes", "base", "__cuda_array_interface__")
        found = getattr(y, name)
        assert not isinstance(found, (np.ndarray, memoryview, bytes)), name
    assert not arrays.waits
    for take in (memoryview, bytearray, io.BytesIO, np.ctypeslib.as_ctypes, lambda y: struct.unpack_from("d", y)):
        with contextlib.suppress(TypeError, AttributeError):
            take(y)
            assert arrays.waits


@pytest.mark.filterwarnings("ignore")
def test_scipy_sees_the_last_values(late):
    linalg, ndimage, signal, sparse, special, stats, interpolate, optimize = (
        pytest.importorskip(f"scipy.{name}")
        for name in ["linalg", "ndimage", "signal", "sparse", "special", "stats", "interpolate", "optimize"]
    )
    calls = [
        lambda a: linalg.solve(a.s, a.w), lambda a: linalg.inv(a.s), lambda a: linalg.svdvals(a.m), lambda a: linalg.expm(a.s),
        lambda a: linalg.cholesky(a.s), lambda a: linalg.lu_factor(a.s), lambda a: linalg.toeplitz(a.v),
        lambda a: ndimage.gaussian_filter(a.m, 1.0), lambda a: ndimage.convolve(a.m, a.s), lambda a: ndimage.zoom(a.n, 2),
        lambda a: ndimage.label(a.b), lambda a: ndimage.sobel(a.n), lambda a: ndimage.map_coordinates(a.n, a.j),
        lambda a: signal.convolve2d(a.m, a.n), lambda a: signal.fftconvolve(a.m, a.n), lambda a: signal.lfilter(a.w, a.v, a.v),
        lambda a: signal.correlate(a.m, a.s), lambda a: signal.medfilt(a.n), lambda a: signal.find_peaks(a.v),
        lambda a: sparse.csr_matrix(a.m).toarray(), lambda a: sparse.coo_matrix((a.w, (a.i, a.i))).toarray(),
        lambda a: sparse.csr_matrix(Plain().s) @ plain(a.w), lambda a: special.softmax(a.m), lambda a: special.logsumexp(a.m),
        lambda a: special.gammaln(a.n), lambda a: stats.zscore(a.v), lambda a: stats.rankdata(a.n),
        lambda a: interpolate.interp1d(a.v, a.v)(0.6), lambda a: optimize.linear_sum_assignment(a.n),
        lambda a: optimize.nnls(a.s, a.w),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        assert same(plain(call(late(check_order=False))), plain(call(Plain()))), number


def test_pillow_sees_the_last_values(late):
    image = pytest.importorskip("PIL.Image")
    assert same(np.asarray(image.fromarray(late().u.get())), Plain().u)
    with contextlib.suppress(ArrayTypeError, TypeError, AttributeError):
        assert same(np.asarray(image.fromarray(late().u)), Plain().u)


def test_matplotlib_draws_the_last_values(late):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    for arrays in (late(), Plain()):
        canvas = figure.Figure(figsize=(2, 2))
        axes = canvas.subplots(2, 2).ravel()
        axes[0].plot(arrays.v, arrays.v)
        axes[1].imshow(arrays.m)
        axes[2].hist(arrays.v)
        axes[3].scatter(arrays.v, arrays.v, c=arrays.v)
        canvas.savefig(out := io.BytesIO(), format="raw")
        drawn.append(out.getvalue())
    assert drawn[0] == drawn[1]


def test_another_librarys_arrays_are_left_to_it(late):
    """An array that neither NumPy nor this driver made, and that speaks the protocols, decides itself."""

    class Other:
        def __array_ufunc__(self, *_, **__):
            return "a ufunc of its own"

        def __array_function__(self, *_, **__):
            return "a function of its own"

    y = late().m
    assert np.add(y, Other()) == "a ufunc of its own"
    assert np.concatenate([y, Other()]) == "a function of its own"
    with pytest.raises(ArrayTypeError, match="mask"):
        np.add(y, np.ma.masked_array(np.ones((3, 4)), False))


def test_the_functions_warn_of_nothing_of_their_own(late):
    """Shapes and types of results are found on arrays in small, which must not warn where the real ones would not."""
    y = late().m
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.var(y, axis=0, ddof=1)
        np.std(y, ddof=1)
        np.log(y)
        y / 0
        np.divide.outer(y[0], y[0])
    assert not caught
