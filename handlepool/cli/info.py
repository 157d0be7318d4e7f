"""Run ``handlepool info``.

The command shows installed software, detected hardware, and the driver that a pool would choose by default. Each probe is a
function that returns fields. If a probe fails, the command shows the reason instead of the fields, and runs the other probes.
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

from handlepool.cli.terminal import Progress, complain, tell

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
_NEEDED = ("numpy", "nvidia-cudnn-frontend")
_LIBRARIES = {"cublasLt": "libcublasLt.so", "nvrtc": "libnvrtc.so"}
# These are values of `CUdevice_attribute`.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


def collect(progress: Callable[[str], None] = lambda step: None) -> dict[str, Any]:
    """Run every probe.

    Parameters
    ----------
    progress : callable
        Called with the name of each probe before the probe runs.

    Returns
    -------
    dict
        The fields of each probe, by its name, in types that JSON has. A probe that failed has ``{"problem": <why>}`` as its
        fields.
    """
    found = {}
    for name, (probe, _) in _PROBES.items():
        progress(name.replace("_", " "))
        # Users run this command where something is broken. So a failed probe does not keep the other probes from running.
        found[name] = _guarded(probe)
    return found


def render(found: dict[str, Any]) -> str:
    """Return the output of `collect` as aligned text."""
    lines: list[tuple[str, str]] = []
    for name, fields in found.items():
        title, problem = name.replace("_", " "), _problem_of(fields)
        value = _PROBES[name][1](fields) if problem is None else f"unavailable: {problem}"
        if isinstance(value, dict):
            longest = max(map(len, value), default=0)
            value = [f"{key:<{longest}}  {item}" for key, item in value.items()]
        texts = value if isinstance(value, list) else [value]
        lines += zip([title, *[""] * (len(texts) - 1)], texts or ["none"], strict=True)
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {value}" for title, value in lines)


def main(*, as_json: bool) -> int:
    """Print the output of all probes; always return exit status 0."""
    progress = Progress("handlepool info")
    found = collect(progress)
    progress.clear()
    tell(json.dumps(found, indent=2) if as_json else render(found))
    return 0


def describe(ordinal: int) -> int:
    """Print a device's properties, for planning on another machine.

    The exit status is 1 if the properties are unknown.
    """
    from handlepool.errors import HandlePoolError
    from handlepool.tensors.device_properties import DeviceProperties

    try:
        tell(DeviceProperties.of(ordinal).text)
    except HandlePoolError as error:
        complain("info", error)
        return 1
    return 0


def python() -> dict[str, Any]:
    """Return version, implementation and path of the interpreter."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "gil": enabled(),
    }


def system() -> dict[str, Any]:
    """Return name, release, machine and C library of the system."""
    libc, version = platform.libc_ver()
    return {
        "name": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": f"{libc} {version}".strip(),
    }


def packages() -> dict[str, str | None]:
    """Return package versions from metadata; None for missing packages.

    The probe imports no package. The version of handlepool comes from its code, and is known even if handlepool is not
    installed.
    """
    from handlepool import __version__

    found: dict[str, str | None] = {"handlepool": __version__}
    for name in _PACKAGES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def integrations() -> dict[str, dict[str, Any]]:
    """Tell whether the frontend's own functions use the pool's handles.

    The fields also say whether handlepool knows the frontend's version, and which assumption an unknown version breaks.
    """
    from handlepool.integrations import cudnn

    verdict = cudnn.judge()
    return {
        "cudnn": {
            "installed": cudnn.is_installed(),
            "frontend": verdict.version,
            "known": verdict.known,
            "known_versions": list(cudnn.KNOWN_VERSIONS),
            "broken": verdict.broken,
        }
    }


def cudnn_backend() -> dict[str, Any]:
    """Return the version and file of the frontend's libcudnn."""
    number = int(importlib.import_module("cudnn").backend_version())
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"version": version, "file": next(iter(_mapped("libcudnn.so")), None)}


def libraries() -> dict[str, Any]:
    """Return the path of each CUDA library; None for missing libraries.

    The function searches the loaded libraries first, then NVIDIA's wheels, then the folders of the search path.
    """
    return {name: _guarded(partial(_locate, prefix)) for name, prefix in _LIBRARIES.items()}


def cuda_driver() -> dict[str, Any]:
    """Return the newest CUDA version that the NVIDIA driver supports."""
    library, version = _libcuda(), ctypes.c_int()
    _check(library, library.cuDriverGetVersion(ctypes.byref(version)))
    return {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}


def devices() -> list[dict[str, Any]]:
    """Return the visible devices, read from libcuda itself.

    The list is therefore complete even if CuPy is not installed.
    """
    library, count = _libcuda(), ctypes.c_int()
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
    return [_device(library, ordinal) for ordinal in range(count.value)]


def device_name(ordinal: int = 0) -> str:
    """Return the name of a device, or the reason for its absence."""
    name = _guarded(lambda: devices()[ordinal]["name"])
    return name if isinstance(name, str) else f"unavailable: {name['problem']}"


def host_memory() -> dict[str, Any]:
    """Return the memory size of the host driver's simulated device.

    The fields are the size in bytes, and the reason for this size.
    """
    from handlepool.drivers.host.limit import limit

    nbytes, reason = limit()
    return {"bytes": nbytes, "reason": reason}


def chosen_driver() -> dict[str, Any]:
    """Return the driver of a pool made without ``driver=``.

    The fields include the reason, and the problem of a driver that cannot run here.
    """
    from handlepool import drivers

    name, reason = drivers.choose()
    missing = drivers.available(name)
    return {"name": name, "reason": reason, "available": missing is None, "missing": missing}


def _driver_text(fields: dict[str, Any]) -> str:
    return f"{fields['name']} ({fields['reason']})" + ("" if fields["available"] else f", not available: {fields['missing']}")


def _python_text(fields: dict[str, Any]) -> str:
    lock = "" if fields["gil"] else ", without the global interpreter lock"
    return f"{fields['version']} ({fields['implementation']}, {fields['executable']}){lock}"


def _packages_text(fields: dict[str, Any]) -> dict[str, str]:
    found = {name: version for name, version in fields.items() if version is not None}
    found |= {name: "not installed" for name in _NEEDED if name not in found}
    if not any(name.startswith("cupy") for name in found):
        found["cupy"] = "not installed; the cuda driver needs the extra cu12 or cu13"
    return found


def _integrations_text(fields: dict[str, Any]) -> dict[str, str]:
    found = fields["cudnn"]
    if found["known"]:
        case = f"handlepool knows nvidia-cudnn-frontend {' and '.join(f'{version}.*' for version in found['known_versions'])}"
    else:
        passed = "passed the self-test" if found["broken"] is None else f"failed the self-test: {found['broken']}"
        case = f"nvidia-cudnn-frontend {found['frontend']} is not known, and {passed}"
    return {"cudnn": f"{'' if found['installed'] else 'not '}installed; {case}"}


def _libraries_text(fields: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"unavailable: {problem}" if (problem := _problem_of(place)) is not None else place or "not found"
        for name, place in fields.items()
    }


def _devices_text(fields: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['ordinal']}: {each['name']}, {each['memory_bytes'] / 2**30:.1f} GiB, "
        f"compute capability {each['compute_capability']}"
        for each in fields
    ]


_PROBES: dict[str, tuple[Callable[[], Any], Callable[[Any], str | list[str] | dict[str, str]]]] = {
    "driver": (chosen_driver, _driver_text),
    "python": (python, _python_text),
    "system": (system, lambda found: " ".join(filter(None, found.values()))),
    "packages": (packages, _packages_text),
    "integrations": (integrations, _integrations_text),
    "cudnn": (cudnn_backend, lambda found: {"version": found["version"], "file": found["file"] or "unknown"}),
    "libraries": (libraries, _libraries_text),
    "cuda_driver": (cuda_driver, lambda found: f"CUDA {found['cuda']}"),
    "devices": (devices, _devices_text),
    "host_memory": (
        host_memory,
        lambda found: f"{found['bytes'] / 2**30:.1f} GiB, simulated ({found['reason']})",
    ),
}
"""Each probe, with the function that renders its fields as text."""


def _problem_of(fields: object) -> str | None:
    return fields.get("problem") if isinstance(fields, dict) else None


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe()
    except Exception as error:
        return {"problem": " ".join(str(error).split()) or type(error).__name__}


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


def _locate(prefix: str) -> str | None:
    for found in (_mapped(prefix), _in_wheels(prefix), _on_search_path(prefix)):
        path = next(iter(found), None)
        if path is not None:
            return path
    return None


def _mapped(prefix: str) -> Iterable[str]:
    """Return loaded files of this process whose names begin with a prefix."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith(prefix))


def _in_wheels(prefix: str) -> Iterable[str]:
    """Return files in NVIDIA's wheels whose names begin with a prefix.

    The folders are nvidia/<package>/lib, and nvidia/cu13/lib since CUDA 13.
    """
    for entry in sys.path:
        # An empty entry stands for the current folder. The entry is escaped, because it may contain characters that `glob`
        # would expand.
        yield from sorted(glob.glob(os.path.join(glob.escape(entry or "."), "nvidia", "*", "lib", f"{prefix}*")))


def _on_search_path(prefix: str) -> Iterable[str]:
    """Return files in the loader's and the toolkit's folders.

    Only files whose names begin with ``prefix`` are returned.
    """
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    roots = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    folders += [os.path.join(root, "lib64") for root in [*roots, "/usr/local/cuda", "/usr"]]
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    for folder in filter(None, folders):
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), f"{prefix}*")))
