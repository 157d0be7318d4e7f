"""cuDNN's own planning where there is no GPU: where it lies, and a driver that plans with it.

A process preloads a libcuda of ours without a GPU behind it, an nvrtc that compiles nothing and a cuBLAS that refuses everything
(``tests/planning/*.c``), and one version of cuDNN; see `preload`. The host driver of `PlanningDriver` computes what that cuDNN
has planned.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from handlepool import GraphNotSupportedError
from handlepool.drivers.host.driver import HostDriver
from handlepool.tensors.device_properties import DeviceProperties

TESTS = Path(__file__).parents[1]
STUBS = ("libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12")
PINNED = ("9.19", "9.28")
"""The versions of cuDNN that are planned with: a GPU host's, and the newest."""
VARIABLE = "HANDLEPOOL_TEST_CUDNN"
LIBRARY = "nvidia/cudnn/lib/libcudnn.so.9"


def compile_stubs(folder):
    """Compile the libraries that stand in for those that cuDNN loads."""
    for name in STUBS:
        source = TESTS / "planning" / f"{name.partition('.')[0]}.c"
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True)


def installed():
    """Return the versions of cuDNN that there are, as "9.19", each with its folder.

    They are where ``HANDLEPOOL_TEST_CUDNN`` says, folders that ``pip install --target`` made, else in this environment.
    """
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    folders = folders or [Path(folder) for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    found = {}
    for folder in folders:
        for package in folder.glob("nvidia_cudnn_cu12-*.dist-info"):
            if (folder / LIBRARY).exists():
                found[re.match(r"\d+\.\d+", package.name.partition("-")[2])[0]] = folder
    return found


def preload(stubs, folder):
    """Load what cuDNN looks for by name, and it, from a folder of ``pip install --target``; the frontend finds it loaded then."""
    os.environ["CUDNN_NVRTC_RUNTIME_LINKING"] = "1"  # 9.28 has an nvrtc inside of it otherwise
    for library in [*(Path(stubs) / name for name in STUBS), Path(folder) / LIBRARY]:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def h200(**more):
    """Return an H200 as cuDNN 9.19 described it, with what later versions ask for beside that."""
    found = json.loads((TESTS / "data" / "h200_device_properties.json").read_text())
    return DeviceProperties(json.dumps({**found, "memoryBusWidth": 6144, **more}))


def call(stubs, folder, function, *arguments, timeout=120):
    """Have a process that plans with a cuDNN call a function, "module.name", with what JSON can hold; return what it returned."""
    module, _, name = function.rpartition(".")
    code = (
        "import json, sys; from importlib import import_module; from harness.planning import preload\n"
        "stubs, folder, module, name, arguments = json.loads(sys.argv[1])\n"
        "preload(stubs, folder)\n"
        "print(json.dumps(getattr(import_module(module), name)(*arguments)))"
    )
    given = json.dumps([str(stubs), str(folder), module, name, arguments])
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{function} ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class PlanningDriver(HostDriver):
    """A host driver that runs no graph which cuDNN has no plan for on a described device.

    ``planned`` has for each graph that was compiled its name, what cuDNN answered, and what the host driver did: an executable,
    or the error. With ``computes`` false cuDNN is asked alone, and calls go as far as to a launch: ``launched`` has the graphs'.
    """

    def __init__(self, device, computes=True, **options):
        super().__init__(**options)
        from handlepool.drivers.cuda.planning import DescribedDevice

        self.described = DescribedDevice(device)
        self.computes = computes
        self.planned = []
        self.launched = []

    def new_graph(self, **settings):
        self._note("new_graph")
        return self.described.new_graph(**settings)

    def compile(self, graph, operands, *, handle=None, copies=(), **settings):
        if not self.computes:
            return Unlaunched(self.described.compile(graph, operands, copies=copies, **settings), self.launched)
        executable = _attempt(super().compile, graph, operands, copies, settings)
        planned = _attempt(self.described.compile, graph, operands, copies, settings)
        self.planned.append((settings["name"], planned, executable))
        for made in (planned, executable):
            if isinstance(made, Exception):
                raise made
        executable.engine, executable.candidates = planned.engine, planned.candidates
        return executable

    def kernel(self, kernel, operands, **names):
        executable = super().kernel(kernel, operands, **names)
        return executable if self.computes else Unlaunched(executable, [])


class Unlaunched:
    """An executable whose launches are listed, and nothing else."""

    def __init__(self, executable, launched):
        self._executable = executable
        self._launched = launched

    def __getattr__(self, name):
        return getattr(self._executable, name)

    def launch(self, *_):
        self._launched.append(self._executable)


def _attempt(compile, graph, operands, copies, settings):
    try:
        return compile(graph, operands, copies=copies, **settings)
    except GraphNotSupportedError as error:
        return error
