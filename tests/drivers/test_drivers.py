"""Which driver is chosen, and what is said where it cannot run."""

import os
import subprocess
import sys
import textwrap

import pytest
from harness.insides import cudnn_binding, loaded_drivers

from handlepool import ArgumentError, DriverNotAvailableError, HandlePool, drivers
from handlepool.drivers.host.driver import HostDriver

EXTRAS = r"install handlepool\[cu12\] or handlepool\[cu13\]"
WAY_OUT = r"On a machine without a GPU, set HANDLEPOOL_DRIVER=host or pass driver='host'"


@pytest.fixture(autouse=True)
def _no_driver_is_loaded(monkeypatch):
    monkeypatch.setattr(loaded_drivers(), "by_name", {})
    monkeypatch.delenv("HANDLEPOOL_DRIVER", raising=False)


# The choice


@pytest.mark.parametrize(
    ("name", "variable", "chosen"),
    [
        ("host", "cuda", ("host", "asked for by name")),
        (None, "host", ("host", "set by HANDLEPOOL_DRIVER")),
        (None, None, ("cuda", "the default; HANDLEPOOL_DRIVER is not set")),
        (None, "", ("cuda", "the default; HANDLEPOOL_DRIVER is not set")),
    ],
)
def test_a_name_wins_over_the_environment_and_cuda_is_the_default(monkeypatch, name, variable, chosen):
    if variable is not None:
        monkeypatch.setenv("HANDLEPOOL_DRIVER", variable)
    assert drivers.choose(name) == chosen


def test_a_name_that_no_driver_has_is_refused_and_blamed_on_where_it_is_from(monkeypatch):
    with pytest.raises(
        ArgumentError, match=r"no driver is named 'gpu' \(asked for by name\); use one of the drivers cuda and host"
    ):
        drivers.load("gpu")
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "cpu")
    with pytest.raises(ArgumentError, match=r"no driver is named 'cpu' \(set by HANDLEPOOL_DRIVER\)"):
        HandlePool().get_handle()


def test_a_pool_reads_the_environment_at_its_first_use(monkeypatch):
    with HandlePool() as pool:
        monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
        assert pool.driver.name == "host"
        monkeypatch.setenv("HANDLEPOOL_DRIVER", "cuda")
        assert pool.driver.name == "host"


def test_a_process_has_one_driver_of_a_name_and_a_driver_object_may_be_given():
    with HandlePool(driver="host") as first, HandlePool(driver="host") as second:
        assert first.driver is second.driver
        assert first.get_handle() is not second.get_handle()
    driver = HostDriver()
    with HandlePool(driver=driver) as pool:
        assert pool.driver is driver


# The cuda driver where it cannot run


@pytest.mark.parametrize(
    ("module", "package"), [("cupy", "CuPy"), ("cudnn", "nvidia-cudnn-frontend"), ("cuda.bindings", "cuda-bindings")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, module, package):
    for name in ("cupy", "cudnn", "cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, _found(name))
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"the cuda driver \(the default; .*\) cannot run here: {package} is not installed; {EXTRAS}\. {WAY_OUT}"
    with pytest.raises(DriverNotAvailableError, match=message) as info:
        drivers.load()
    assert isinstance(info.value, RuntimeError)


def test_a_missing_parent_package_is_a_missing_package(monkeypatch):
    for name in ("cupy", "cudnn"):
        monkeypatch.setitem(sys.modules, name, _found(name))
    monkeypatch.delitem(sys.modules, "cuda.bindings", raising=False)
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert drivers.available("cuda") == "cuda-bindings is not installed; install handlepool[cu12] or handlepool[cu13]"


def _found(name):
    module = type(sys)(name)
    module.__spec__ = object()
    module.__path__ = []
    return module


def test_a_pool_goes_on_asking_after_a_driver_that_could_not_be_loaded(monkeypatch):
    with HandlePool() as pool:
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, "cupy", None)
            for _ in range(2):
                with pytest.raises(DriverNotAvailableError):
                    pool.get_handle()
        monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
        pool.driver.use_handle(pool.get_handle(), int)
    assert repr(pool) == "<HandlePool host, closed>"


@pytest.fixture
def with_stubs(tmp_path):
    """Runs a program in which CuPy, cuda-bindings and the frontend are stubs: ``with_stubs(program, runtime=..., cudnn=...)``."""
    anything = "from unittest.mock import MagicMock\n\ndef __getattr__(name):\n    return MagicMock()\n"

    def run(program, *, runtime, cudnn):
        files = {
            "cupy/__init__.py": "from cupy import cuda\n" + anything,
            "cupy/cuda/__init__.py": "from cupy.cuda import memory, runtime\n" + anything,
            "cupy/cuda/memory.py": anything,
            "cupy/cuda/runtime.py": "class CUDARuntimeError(RuntimeError): pass\n\n" + runtime + anything,
            "cuda/__init__.py": "",
            "cuda/bindings/__init__.py": "",
            "cuda/bindings/driver.py": anything,
            "cudnn/__init__.py": cudnn + anything,
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "HANDLEPOOL_DRIVER"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", textwrap.dedent(program)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


ASK = """
    import handlepool
    try:
        handlepool.get_handle()
    except handlepool.DriverNotAvailableError as error:
        print(error)
"""
LIBRARY = "def backend_version():\n    return 91900\n\n"
NO_LIBRARY = "def backend_version():\n    raise RuntimeError('Unable to find symbol cudnnGetVersion')\n\n"
ONE_GPU = "def getDeviceCount():\n    return 1\n\n"
NO_GPU = "def getDeviceCount():\n    return 0\n\n"
NO_DRIVER = "def getDeviceCount():\n    raise CUDARuntimeError('cudaErrorInsufficientDriver')\n\n"


@pytest.mark.parametrize(
    ("runtime", "cudnn", "problem"),
    [
        (NO_GPU, LIBRARY, "no NVIDIA GPU is visible"),
        (NO_DRIVER, LIBRARY, "CUDA found no usable NVIDIA GPU (cudaErrorInsufficientDriver)"),
        (
            ONE_GPU,
            NO_LIBRARY,
            "libcudnn was not found (Unable to find symbol cudnnGetVersion); install handlepool[cu12] or handlepool[cu13]",
        ),
    ],
    ids=["no GPU", "no driver", "no libcudnn"],
)
def test_what_the_machine_lacks_is_said(with_stubs, runtime, cudnn, problem):
    done = with_stubs(ASK, runtime=runtime, cudnn=cudnn)
    assert done.stdout == (
        f"the cuda driver (the default; HANDLEPOOL_DRIVER is not set) cannot run here: {problem}. "
        "On a machine without a GPU, set HANDLEPOOL_DRIVER=host or pass driver='host'\n"
    ), done.stderr


def test_with_all_there_the_cuda_driver_is_taken(with_stubs):
    done = with_stubs("import handlepool; print(handlepool.default_pool().driver.name)", runtime=ONE_GPU, cudnn=LIBRARY)
    assert done.stdout == "cuda\n", done.stderr


FORKED = """
import os, handlepool
states = handlepool.ParallelStates(2)
{parent}
if not (child := os.fork()):
    replace = lambda: handlepool.set_default_pool(handlepool.HandlePool())
    for ask in (lambda: states.map(int, [1]), replace, handlepool.get_handle):
        try:
            ask()
            print("done")
        except handlepool.HandlePoolError as error:
            print(f"{{type(error).__name__}}: {{error}}")
    os.sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
SPAWN = "start the child with multiprocessing.get_context('spawn')"


def test_g13_where_the_parent_has_loaded_the_cuda_driver_its_child_is_told_to_be_spawned(with_stubs):
    parent = "handlepool.default_pool().driver"
    first, *then = with_stubs(FORKED.format(parent=parent), runtime=ONE_GPU, cudnn=LIBRARY).stdout.splitlines()
    assert first == (
        "ForkedProcessError: this pool's driver was loaded before os.fork, and CUDA does not survive a fork: "
        f"{SPAWN}, or fork before anything uses CUDA"
    )
    assert then[0] == "done"
    assert then[1].startswith("ForkedProcessError: the parent of this process had used CUDA")
    assert SPAWN in then[1]


def test_g13_where_another_library_has_used_cuda_before_the_fork_the_child_is_told_what_that_may_be(with_stubs):
    first, *_ = with_stubs(FORKED.format(parent=""), runtime=NO_DRIVER, cudnn=LIBRARY).stdout.splitlines()
    assert first == (
        "DriverNotAvailableError: the cuda driver (the default; HANDLEPOOL_DRIVER is not set) cannot run in this forked process: "
        "CUDA found no usable NVIDIA GPU (cudaErrorInsufficientDriver). If any library of the parent process has used CUDA, "
        + SPAWN
    )


@pytest.mark.cupy
def test_the_cuda_driver_asked_for_without_a_visible_gpu_says_so():
    pytest.importorskip("cupy")
    pytest.importorskip("cuda.bindings")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HANDLEPOOL_DRIVER": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASK)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith(
        "the cuda driver (set by HANDLEPOOL_DRIVER) cannot run here: CUDA found no usable NVIDIA GPU"
    ), done.stderr
    assert done.stdout.endswith("set HANDLEPOOL_DRIVER=host or pass driver='host'\n")


@pytest.mark.cupy
def test_handles_are_the_frontends_own_also_where_others_have_the_pools(monkeypatch, unused):
    pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    import cudnn

    from handlepool.drivers.cuda.driver import CudaDriver
    from handlepool.integrations.cudnn import PooledHandle, pooled_handles

    told = []
    monkeypatch.setattr(cudnn_binding(), "create_handle", lambda: 77)
    monkeypatch.setattr(cudnn_binding(), "get_stream", lambda handle: 0)
    monkeypatch.setattr(cudnn_binding(), "_raw_set_stream", lambda *call: told.append(call))
    monkeypatch.setattr(cudnn_binding(), "_raw_destroy_handle", lambda *call: told.append(call))
    driver = object.__new__(CudaDriver)
    with pooled_handles():
        assert type(cudnn.create_handle()) is PooledHandle
        handle = driver.create_handle()
        assert type(handle) is cudnn.Handle
        driver.bind_handle(handle, 88)
        driver.destroy_handle(handle)
    assert told == [(77, 88), (77,)]
