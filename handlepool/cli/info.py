"""Run ``python -m handlepool info``.

The command shows installed software, detected hardware and the driver that would be chosen. No function here raises: every
probe is a function of its own, and the text of its failure replaces its value.
"""

import ctypes
import glob
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_PACKAGES = (
    "handlepool",
    "numpy",
    "nvidia-cudnn-frontend",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy",
    "cuda-bindings",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "torch",
)
_LIBRARIES = {"cublasLt": "libcublasLt.so", "nvrtc": "libnvrtc.so"}
# These are values of `CUdevice_attribute`.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


def collect() -> dict[str, Any]:
    """Run every probe.

    Returns
    -------
    dict
        Strings, lists and dicts that JSON can hold. A probe that failed has ``"unavailable: <why>"`` as its value.
    """
    probes: dict[str, Callable[[], Any]] = {
        "driver": chosen_driver,
        "python": python,
        "gil": gil,
        "platform": platform.platform,
        "packages": packages,
        "integrations": integrations,
        "cudnn": cudnn_backend,
        "libraries": libraries,
        "cuda_driver": cuda_driver,
        "devices": devices,
        "host_memory": host_memory,
    }
    # The command helps where something is broken. So a probe that fails leaves the others their answers.
    return {name: _guarded(probe) for name, probe in probes.items()}


def render(found: dict[str, Any]) -> str:
    """Return the output of `collect` as aligned text."""
    lines: list[tuple[str, str]] = []
    for name, value in found.items():
        title = name.replace("_", " ")
        if isinstance(value, dict):
            longest = max(map(len, value), default=0)
            texts = [f"{key:<{longest}}  {item}" for key, item in value.items()]
            lines += zip([title, *[""] * (len(texts) - 1)], texts, strict=True)
        elif isinstance(value, list) and value:
            lines += zip([title, *[""] * (len(value) - 1)], map(_entry, value), strict=True)
        else:
            lines.append((title, str(value or "none")))
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {value}" for title, value in lines)


def main(*, as_json: bool) -> int:
    """Print the output of all probes; always return exit status 0."""
    found = collect()
    print(json.dumps(found, indent=2, default=str) if as_json else render(found))
    return 0


def describe(ordinal: int) -> int:
    """Print a device's properties, for plans made elsewhere.

    The exit status is 1 if the properties are unknown.
    """
    from handlepool.errors import HandlePoolError
    from handlepool.tensors.device_properties import DeviceProperties

    try:
        print(DeviceProperties.of(ordinal).text)
    except HandlePoolError as error:
        print(f"handlepool info: {error}", file=sys.stderr)
        return 1
    return 0


def python() -> str:
    """Return version and implementation of the interpreter."""
    return f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"


def gil() -> str:
    """Tell whether this process now has the global interpreter lock."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return "enabled" if enabled() else "disabled"


def packages() -> dict[str, str]:
    """Return package versions from the packages' metadata.

    No package is imported for its version. The version of handlepool is known even without an installation.
    """
    from handlepool import __version__

    found = {"handlepool": __version__}
    for name in _PACKAGES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in ("numpy", "nvidia-cudnn-frontend"):
                found[name] = "not installed"
    if not any(name.startswith("cupy") for name in found):
        found["cupy"] = "not installed; the cuda driver needs the extra cu12 or cu13"
    return found


def integrations() -> dict[str, str]:
    """Tell whether other libraries' code uses the pool's handles.

    The text also says whether the installed versions support it.
    """
    from handlepool.integrations import cudnn

    verdict = cudnn.judge()
    if verdict.known:
        case = f"for nvidia-cudnn-frontend {' and '.join(f'{version}.*' for version in cudnn.KNOWN_VERSIONS)}"
    else:
        passed = "passed the self-test" if verdict.broken is None else f"failed the self-test: {verdict.broken}"
        case = f"nvidia-cudnn-frontend {verdict.version} is not known, and {passed}"
    return {"cudnn": f"{'' if cudnn.is_installed() else 'not '}installed; {case}"}


def cudnn_backend() -> dict[str, str]:
    """Return the version and file of the frontend's libcudnn."""
    number = int(importlib.import_module("cudnn").backend_version())
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"version": version, "file": next(iter(_mapped("libcudnn.so")), "unknown")}


def libraries() -> dict[str, str]:
    """Return the place of each CUDA library.

    The search order is: loaded libraries, wheels, the search path.
    """
    return {name: _guarded(partial(_locate, prefix)) for name, prefix in _LIBRARIES.items()}


def cuda_driver() -> str:
    """Return the newest CUDA version that the NVIDIA driver supports."""
    library, version = _libcuda(), ctypes.c_int()
    _check(library, library.cuDriverGetVersion(ctypes.byref(version)))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def devices() -> list[dict[str, Any]]:
    """Return the visible devices, read from libcuda itself.

    The list is therefore complete even without CuPy.
    """
    library, count = _libcuda(), ctypes.c_int()
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
    return [_device(library, ordinal) for ordinal in range(count.value)]


def device_name(ordinal: int = 0) -> str:
    """Return the name of a device, or the reason for its absence."""
    return str(_guarded(lambda: devices()[ordinal]["name"]))


def host_memory() -> str:
    """Return the memory of a simulated device, and the reason."""
    from handlepool.drivers.host.limit import limit

    nbytes, reason = limit()
    return f"{nbytes / 2**30:.1f} GiB, simulated ({reason})"


def chosen_driver() -> str:
    """Return the driver of a pool made without ``driver=``.

    The text includes the reason, and whether the driver can run here.
    """
    from handlepool import drivers

    name, reason = drivers.choose()
    missing = drivers.available(name)
    return f"{name} ({reason})" + ("" if missing is None else f", not available: {missing}")


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe()
    except Exception as error:
        return f"unavailable: {' '.join(str(error).split()) or type(error).__name__}"


def _entry(item: object) -> str:
    if not isinstance(item, dict):
        return str(item)
    gibibytes = item["memory_bytes"] / 2**30
    return f"{item['ordinal']}: {item['name']}, {gibibytes:.1f} GiB, compute capability {item['compute_capability']}"


def _libcuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    _check(library, library.cuInit(0))
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(text.value.decode() if text.value else f"CUDA driver error {status}")


def _device(library: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
    _check(library, library.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(library, library.cuDeviceGetName(name, len(name), device))
    _check(library, library.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    capability = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        _check(library, library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        capability.append(str(value.value))
    return {
        "ordinal": ordinal,
        "name": name.value.decode(errors="replace"),
        "memory_bytes": memory.value,
        "compute_capability": ".".join(capability),
    }


def _locate(prefix: str) -> str:
    for found in (_mapped(prefix), _in_wheels(prefix), _on_search_path(prefix)):
        path = next(iter(found), None)
        if path is not None:
            return path
    return "not found"


def _mapped(prefix: str) -> Iterable[str]:
    """Return files of that name that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith(prefix))


def _in_wheels(prefix: str) -> Iterable[str]:
    """Return files of that name in NVIDIA's wheels.

    The folders are nvidia/<package>/lib, and nvidia/cu13/lib since CUDA 13.
    """
    for entry in sys.path:
        # An empty entry stands for the current folder. A path may contain characters that `glob` would expand.
        yield from sorted(glob.glob(os.path.join(glob.escape(entry or "."), "nvidia", "*", "lib", f"{prefix}*")))


def _on_search_path(prefix: str) -> Iterable[str]:
    """Return files of that name in the loader's and toolkit's folders."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    roots = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    folders += [os.path.join(root, "lib64") for root in [*roots, "/usr/local/cuda", "/usr"]]
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    for folder in filter(None, folders):
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), f"{prefix}*")))
