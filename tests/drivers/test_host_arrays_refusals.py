"""What host arrays refuse, in plain words: as CuPy's do where the driver is strict, and wherever a result could not be right."""

import array
import copy
import json
import pathlib
import pickle
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import handlepool
from handlepool.drivers.host.array import HostArray
from handlepool.errors import ArrayTypeError, CaptureError, ContractError, DeviceMismatchError

M = np.arange(12, dtype=np.float32).reshape(3, 4)
IMAGE = np.ones((1, 4, 6, 6), np.float32)
WEIGHT = np.ones((4, 4, 3, 3), np.float32)
ROOT = pathlib.Path(__file__).parents[2]


def foreign(values, protocol):
    """An array in the host's memory, of a library that nobody knows."""
    found = getattr(values, protocol)
    names = {protocol: (lambda _, *args, **options: found(*args, **options)) if callable(found) else found}
    return type("Foreign", (), {**names, "__dlpack_device__": lambda _: (1, 0)})()


@pytest.fixture
def strict(make_driver):
    return make_driver(strict=True, devices=1)


# As CuPy's

ASARRAY = r"pool\.driver\.asarray"

REFUSED = {
    "asarray": (lambda y: np.asarray(y), r"\.get\(\)"),
    "array": (lambda y: np.array([y, y]), r"\.get\(\)"),
    "a list of arrays": (lambda y: np.mean([y, y]), r"\.get\(\)"),
    "allclose": (lambda y: np.testing.assert_allclose(y, M), r"\.get\(\)|pool\.driver\.asarray"),
    "a plain array's assignment": (lambda y: np.empty((3, 4)).__setitem__(0, y[0]), r"\.get\(\)"),
    "an operand": (lambda y: y + M, ASARRAY),
    "an operand on the left": (lambda y: M * y, ASARRAY),
    "an operand without axes": (lambda y: y * np.array(2.0), ASARRAY),
    "a list as an operand": (lambda y: np.add(y, [1, 2, 3, 4]), ASARRAY),
    "in place": (lambda y: y.__iadd__(M), ASARRAY),
    "into a plain array": (lambda y: np.add(y, y, out=np.empty((3, 4), np.float32)), ASARRAY),
    "a plain array in place": (lambda y: M.copy().__iadd__(y), ASARRAY),
    "an assignment": (lambda y: y.__setitem__(slice(None), M), rf"^an assignment was given .*{ASARRAY}"),
    "concatenate": (lambda y: np.concatenate([y, M]), ASARRAY),
    "where": (lambda y: np.where(y > 0, y, M), ASARRAY),
    "einsum": (lambda y: np.einsum("ij,ij", y, M), ASARRAY),
    "matmul": (lambda y: y @ M.T, ASARRAY),
    "copyto": (lambda y: np.copyto(y, M), ASARRAY),
    "an array of Python's": (lambda y: y + array.array("f", [1, 2, 3, 4]), ASARRAY),
    "a range": (lambda y: y + range(4), rf"^add was given a range .*{ASARRAY}"),
    "what is an array by a protocol": (
        lambda y: y + foreign(M, "__array__"),
        rf"^add was given a .*Foreign together .*{ASARRAY}",
    ),
    "what is one by its interface": (lambda y: np.add(foreign(M, "__array_interface__"), y), ASARRAY),
    "a comparison with what is one": (lambda y: y == foreign(M[0, 0], "__array__"), ASARRAY),
    "where of a list": (lambda y: np.where(y > 0, y, [1, 2, 3, 4]), ASARRAY),
    "where of a tuple": (lambda y: np.where(y > 0, y, (1, 2, 3, 4)), ASARRAY),
    "concatenate of a list": (lambda y: np.concatenate([y, [[1, 2, 3, 4]]]), rf"^concatenate was given a list .*{ASARRAY}"),
    "stack of a range": (lambda y: np.stack([y[0], range(4)]), ASARRAY),
    "clip of a list": (lambda y: y.clip([0, 1, 2, 3]), ASARRAY),
    "einsum of a list": (lambda y: np.einsum("ij,j", y, [1, 2, 3, 4]), ASARRAY),
    "dot of a list": (lambda y: y.dot([1, 2, 3, 4]), ASARRAY),
    "copyto of a list": (lambda y: np.copyto(y, [1, 2, 3, 4]), ASARRAY),
    "an assignment of a list": (lambda y: y.__setitem__(0, [1, 2, 3, 4]), ASARRAY),
    "sums with where= of a list": (lambda y: y.sum(axis=0, where=[True, False, True, True]), ASARRAY),
    "an index of a list": (lambda y: [1, 2, 3][y.astype(int)[0, 1]], r"int\(y\)"),
    "range": (lambda y: range(y.astype(int)[0, 1]), r"int\(y\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_strict_driver_refuses_what_cupy_refuses_with_its_advice(strict, name):
    call, advice = REFUSED[name]
    with strict.create_stream(), pytest.raises(TypeError, match=advice):
        call(strict.asarray(M))


def test_a_strict_driver_takes_what_cupy_takes(strict):
    with strict.create_stream():
        y = strict.asarray(M)
        assert float(y[1, 2]) == 6
        assert int(y.argmax()) == 11
        assert bool((y >= np.float32(0)).all())
        assert (y == np.array(3.0)).sum().item() == 1
        assert np.array_equal((y + 1.5).get(), M + 1.5)
        assert np.array_equal(y[np.array([2, 0])].get(), M[[2, 0]])
        assert np.array_equal(np.asarray(M, like=y).get(), M)
        assert np.array_equal(np.pad(y, [[1, 1], [0, 2]]).get(), np.pad(M, [[1, 1], [0, 2]]))
        assert np.array_equal(np.concatenate([y, y], axis=1).get(), np.concatenate([M, M], axis=1))
        assert np.array_equal(np.take(y, [2, 0], axis=0).get(), M[[2, 0]])
        assert np.array_equal(np.where(y > 3, y, 0).get(), np.where(M > 3, M, 0))
        z = y.copy()
        z[[2, 0]] = [1, 2, 3, 4]
        assert np.array_equal(z.get(), [[1, 2, 3, 4], M[1], [1, 2, 3, 4]])
        assert y.tolist() == M.tolist()
        assert bytes(y) == M.tobytes()
        y.set(M + 1)
        assert np.array_equal(y.get(), M + 1)
        assert np.array_equal(np.linalg.norm(y, axis=0).get(), np.linalg.norm(M + 1, axis=0))


def test_a_strict_driver_refuses_plain_arrays_in_graph_functions(strict, make_pool):
    pool = make_pool(driver=strict)
    x, w = strict.asarray(IMAGE), strict.asarray(WEIGHT)
    assert handlepool.conv2d(x, w, padding=1, pool=pool).get().sum() == 4096
    for args, options in (((IMAGE, w), {}), ((x, WEIGHT), {}), ((IMAGE, WEIGHT), {}), ((x, w), {"out": IMAGE.copy()})):
        with pytest.raises(ArrayTypeError, match=r"is a numpy.ndarray in host memory.*pool\.driver\.asarray"):
            handlepool.conv2d(*args, padding=1, pool=pool, **options)
    with pytest.raises(ArrayTypeError, match=ASARRAY):
        handlepool.ops.relu(IMAGE, pool=pool)
    for protocol in ("__array_interface__", "__dlpack__"):
        image = foreign(IMAGE, protocol)
        for args, options in (((image, w), {}), ((x, image), {}), ((x, w), {"out": image})):
            with pytest.raises(ArrayTypeError, match=r"Foreign in host memory.*pool\.driver\.asarray"):
                handlepool.conv2d(*args, padding=1, pool=pool, **options)
        assert handlepool.conv2d(image, WEIGHT, padding=1, pool=make_pool()).get().sum() == 4096  # a control
    program = handlepool.record(handlepool.conv2d, x, w, pool=pool)
    with pytest.raises(ArrayTypeError, match=rf"argument 0 is a numpy.ndarray.*convert it by {ASARRAY}$"):
        program.update(IMAGE, w)


def test_float_while_recording_is_an_error_that_names_the_line(strict, make_pool):
    pool = make_pool(driver=strict)
    x, w = strict.asarray(IMAGE), strict.asarray(WEIGHT)

    def step(x):
        return x if float(handlepool.conv2d(x, w, padding=1, pool=pool).sum()) > 0 else -x

    with pytest.raises(CaptureError, match=rf"float\(\) at {re.escape(__file__)}:\d+"):
        handlepool.record(step, x, pool=pool)


def test_the_page_has_every_public_name_that_only_one_of_the_two_classes_has():
    cupys = set(json.loads((ROOT / "tests/data/cupy_names.json").read_text())["names"])
    ours = {name for name in dir(HostArray) if not name.startswith("_")}
    page = (ROOT / "docs/host-arrays.md").read_text()
    (line,) = re.findall(r"^Names of CuPy's that host arrays do not have: (.*)\.$", page, re.M)
    assert set(re.findall(r"`(\w+)`", line)) == cupys - ours
    assert not ours - cupys


@pytest.mark.cupy
def test_the_names_are_those_of_the_cupy_that_is_installed():
    cupy = pytest.importorskip("cupy")
    found = json.loads((ROOT / "tests/data/cupy_names.json").read_text())
    if cupy.__version__ == found["cupy"]:
        assert found["names"] == sorted(name for name in dir(cupy.ndarray) if not name.startswith("_"))


# Whoever's they are


def test_arrays_of_a_closed_pool_go_on(make_pool):
    pool = make_pool()
    driver = pool.driver
    with driver.create_stream():
        y = handlepool.conv2d(driver.asarray(IMAGE), driver.asarray(WEIGHT), padding=1, pool=pool)
        pool.close()
        assert float((y + 1).sum()) == 4096 + 144


def test_arrays_of_another_driver_are_refused(make_driver, make_pool):
    one, other = make_driver(), make_driver()
    x, y = one.asarray(M), other.asarray(M)
    for call in (lambda: x + y, lambda: np.concatenate([x, y]), lambda: x.__setitem__(0, y[0]), lambda: one.asnumpy(y)):
        with pytest.raises(ArrayTypeError, match=r"another host driver.*pool\.driver\.asarray\(y.get\(\)\)"):
            call()
    with pytest.raises(ArrayTypeError, match="another host driver"):
        handlepool.conv2d(one.asarray(IMAGE), other.asarray(WEIGHT), pool=make_pool(driver=one))
    assert np.array_equal(one.asarray(y + 1).get(), M + 1)


def test_work_with_arrays_of_another_device_is_refused(make_driver):
    driver = make_driver(devices=2)
    with driver.device(1):
        y = driver.asarray(M)
    for call in (lambda: y + 1, lambda: np.median(y), lambda: y.__setitem__(0, 1), lambda: y.copy(), lambda: copy.deepcopy(y)):
        with pytest.raises(DeviceMismatchError, match="an array of device 1 is used while device 0 is current"):
            call()
    assert "HostArray(" in repr(y)


@pytest.mark.parametrize("checks", [False, True])
def test_values_of_arrays_of_another_device_are_read_as_cupy_reads_them(make_driver, checks):
    driver = make_driver(devices=2, checks=checks)
    with driver.device(1):
        y = driver.asarray(M)
    reads = (y.get, lambda: driver.asnumpy(y), lambda: np.asarray(y), y.tolist, lambda: pickle.loads(pickle.dumps(y)))
    assert all(np.array_equal(read(), M) for read in reads)
    assert (driver.current_device(), y.item(5), y.tobytes(), f"{y[0]:}") == (0, M.item(5), M.tobytes(), str(M[0]))


@pytest.mark.parametrize("name", ["get", "asnumpy"])
def test_a_read_waits_for_the_current_stream_of_the_arrays_device(make_driver, name):
    driver = make_driver(devices=2)
    with driver.device(1):
        stream = driver.create_stream().use()
        y = driver.asarray(np.zeros(3))
        latch = driver.latch(stream.ptr)
        y += 1
    found = []

    def release():
        found.append(y._raw.sum())
        latch.release()

    thread = threading.Thread(target=release)
    thread.start()
    assert (y.get() if name == "get" else driver.asnumpy(y)).sum() == 3
    thread.join()
    assert found != [3]


def test_a_read_from_another_device_ends_a_capture_in_words(make_driver):
    driver = make_driver(devices=2)
    with driver.device(1):
        y = driver.asarray(M)
    stream = driver.create_stream()
    with stream:
        stream.begin_capture()
        for read in (y.get, lambda: driver.asnumpy(y)):
            with pytest.raises(CaptureError, match="a wait for the values of a host array"):
                read()
        with pytest.raises(CaptureError):
            stream.end_capture()
    assert np.array_equal(y.get(), M)


def test_a_forked_child_is_told():
    script = """
        import os, pickle, warnings
        import numpy as np
        from handlepool.drivers.host.driver import HostDriver
        from handlepool.errors import ForkedProcessError

        warnings.simplefilter("ignore")
        driver = HostDriver()
        with driver.create_stream():
            y = driver.asarray(np.ones(3))
            y.get()
            if child := os.fork():
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert y.tolist() == [1, 1, 1]
                print("right")
            else:
                for use in (lambda: y + 1, y.get, lambda: np.asarray(y), lambda: pickle.dumps(y), lambda: y.__setitem__(0, 2)):
                    try:
                        use()
                    except ForkedProcessError as error:
                        assert "before os.fork" in str(error) and "spawn" in str(error)
                    else:
                        os._exit(1)
                os._exit(0 if repr(y) == "<HostArray of shape (3,), float64>" else 2)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert run.stdout == "right\n", run.stderr


# Types


@pytest.mark.parametrize("dtype", [object, "U3", "S2", "M8[s]", "m8[s]", [("a", "f4")], "V4"], ids=str)
def test_types_that_are_no_numbers_are_refused(make_driver, dtype):
    driver = make_driver()
    y = driver.asarray(M)
    for call in (
        lambda: driver.asarray(np.zeros(3, dtype)),
        lambda: driver.empty((3,), (np.dtype(dtype).itemsize,), np.dtype(dtype)),
        lambda: y.astype(dtype),
        lambda: y.view(dtype),
        lambda: np.empty_like(y, dtype=dtype),
    ):
        with pytest.raises(ArrayTypeError, match="pass an array of numbers"):
            call()


def test_values_that_are_no_numbers_are_refused_by_the_call(make_driver):
    y = make_driver().asarray(M)
    for call in (lambda: y.fill("a"), lambda: y.__setitem__(0, "abc"), lambda: y + "a", lambda: y.__setitem__(0, [object()] * 4)):
        with pytest.raises((TypeError, ValueError)):
            call()
    with pytest.raises(ArrayTypeError, match="object"):
        np.frompyfunc(lambda value: [value], 1, 1)(y)
    with pytest.raises(OverflowError):
        y.astype(np.uint8)[0] = 300


# What cannot be


REFUSED_NOW = {
    "an index out of bounds": (lambda y: y[5], IndexError),
    "a plain index out of bounds": (lambda y: y[[0, 9]], IndexError),
    "too many indices": (lambda y: y[0, 0, 0], IndexError),
    "an axis": (lambda y: y.sum(axis=2), ValueError),
    "a shape": (lambda y: y.reshape(5, 5), ValueError),
    "shapes": (lambda y: y + y[:2], ValueError),
    "a product": (lambda y: y @ y, ValueError),
    "einsum's extents": (lambda y: np.einsum("ij,ji", y, y), ValueError),
    "einsum's letters": (lambda y: np.einsum("ijk->i", y), ValueError),
    "an assignment": (lambda y: y.__setitem__(0, [1, 2]), ValueError),
    "out= of another shape": (lambda y: np.sum(y, axis=0, out=y), ValueError),
    "out= of another type": (lambda y: np.add(y, 1j, out=y), TypeError),
    "a reduction into integers": (lambda y: np.mean(y, out=y.astype(int)[0, 0]), TypeError),
    "a sum of fractions into integers": (lambda y: np.cumsum(y, axis=0, out=y.astype(int)), TypeError),
    "a broadcast array": (lambda y: np.broadcast_to(y, (2, 3, 4)).fill(0), ValueError),
    "a truth value": (lambda y: bool(y), ValueError),
    "a number": (lambda y: float(y), TypeError),
    "a length": (lambda y: len(y[0, 0]), TypeError),
    "a hash": (lambda y: {y}, TypeError),
    "a type": (lambda y: setattr(y, "dtype", np.int32), AttributeError),
    "strides": (lambda y: setattr(y, "strides", (4, 4)), AttributeError),
    "a shape that is a copy": (lambda y: setattr(y.T, "shape", (12,)), AttributeError),
    "another name": (lambda y: setattr(y, "values", 3), AttributeError),
    "a write to what is a copy": (lambda y: np.asarray(y).__setitem__(0, 1), ValueError),
    "nditer that writes": (lambda y: np.nditer(y, op_flags=[["readwrite"]]), ValueError),
    "a write to a view of a copy": (lambda y: np.trim_zeros(y[0]).__setitem__(0, 1), ValueError),
    "a write to a diagonal": (lambda y: np.diag(y).__setitem__(0, 1), ValueError),
    "a buffer to write to": (lambda y: memoryview(y).__setitem__((0, 0), 1.0), TypeError),
    "an imaginary part": (lambda y: setattr(y, "imag", 3), TypeError),
    "set": (lambda y: y.set(np.ones(3)), ArrayTypeError),
}


if sys.version_info < (3, 12):  # from then on NumPy asks for the buffer first, which is a copy
    REFUSED_NOW["asarray without a copy"] = (lambda y: np.asarray(y, copy=False), ValueError)
    REFUSED_NOW["a write to a copy of another type"] = (lambda y: np.asarray(y, dtype=float).__setitem__(0, 1), ValueError)


@pytest.mark.parametrize("name", REFUSED_NOW)
def test_what_cannot_be_is_refused_by_the_call_itself(make_driver, name):
    """The array is as it was, and nothing that failed is left to a later call."""
    call, kind = REFUSED_NOW[name]
    driver = make_driver(scheduler="adversarial", seed=1, devices=1)
    with driver.create_stream():
        y = driver.asarray(M)
        with pytest.raises(kind):
            call(y)
        assert np.array_equal(y.get(), M)


def test_a_copy_that_was_asked_for_can_be_written(make_driver):
    y = make_driver().asarray(M)
    for made in (y.get(), np.array(y), np.array(y, dtype=float), np.array([y])):
        made[...] = 5
    assert np.array_equal(y.get(), M)


def test_scipy_does_not_write_to_a_copy_in_silence(make_driver):
    ndimage = pytest.importorskip("scipy.ndimage")
    y = make_driver().asarray(M)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        ndimage.gaussian_filter(y, 1, output=y)
    assert np.array_equal(y.get(), M)


def test_a_shape_can_be_set_as_cupys_can(make_driver):
    y = make_driver().asarray(M)
    y.shape = (2, 6)
    y[1] = 0
    assert np.array_equal(y.get(), np.concatenate([M.ravel()[:6], np.zeros(6)]).reshape(2, 6))


# Copies, and accesses that nothing orders


def test_copies_are_apart_and_an_unpickled_array_is_numpys(make_driver):
    driver = make_driver(scheduler="adversarial", seed=4, devices=1)
    with driver.create_stream():
        y = driver.asarray(M)[:, ::2]
        copies = [copy.copy(y), copy.deepcopy(y), copy.deepcopy({"y": [y]})["y"][0], y.copy()]
        unpickled = pickle.loads(pickle.dumps(y))
        y += 1
        assert type(unpickled) is np.ndarray
        for made in (*copies, unpickled):
            assert np.array_equal(np.asarray(made), M[:, ::2])
        assert np.array_equal(y.get(), M[:, ::2] + 1)


def test_a_result_that_is_numpys_own_is_told_apart(make_driver):
    """A plain array that is written stays itself, and a host array that is written is what comes back."""
    y = make_driver().asarray(M)
    plain = M.copy()
    before = plain
    plain += y
    assert plain is before
    assert np.array_equal(plain, M * 2)
    assert np.add(y, y, out=y) is y
    assert np.round(y, 0, y) is y


def test_control_a_read_beside_a_branch_that_writes_is_an_error_that_names_both(make_driver):
    driver = make_driver(devices=1)
    with driver.create_stream() as stream:
        y = driver.asarray(M)
        driver.synchronize_stream(stream.ptr)
    with driver.create_stream():
        y += 1
    with driver.create_stream(), pytest.raises(ContractError, match=r"not ordered: 'get\(\)'.*'add'.*neither waits"):
        y.get()
