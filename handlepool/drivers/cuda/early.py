"""Kernels that begin before what is before them on their stream has ended, and what keeps them from it.

cuDNN launches some of its kernels so that they begin early, and wait inside before they read (programmatic dependent launch).
Those of cuDNN 9.19 that add a residual read that before they wait: behind a long queue, convolutions gave wrong values on one
stream.
"""

import ctypes
import threading
from typing import Any

import cupy
from cupy.cuda import runtime


class _Thread(threading.local):
    recording = False


_thread = _Thread()
_NOTHING = b"""
.version 6.4
.target sm_50
.address_size 64
.visible .entry handlepool_nothing()
{
    ret;
}
"""
"""A kernel of one thread that does nothing. The driver takes it as it is: CuPy would load NVRTC for it, 17 to 28 milliseconds."""
_kernels: dict[int, Any] = {}
"""By device, the kernel of one thread that does nothing."""


def immortal(function: object) -> Any:
    """Keep a function of CuPy's for ever, and its module with it; graphs that were captured launch it.

    At the end of the process CuPy's destructor would unload the module. It writes to standard error where it cannot: in a forked
    child, or after the context was lost.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    return function


def kernel() -> int:
    """Return the ``CUfunction`` of the current device's kernel that does nothing."""
    device = runtime.getDevice()
    if device not in _kernels:
        module = cupy.cuda.Module()
        module.load(_NOTHING)
        _kernels[device] = immortal(module.get_function("handlepool_nothing"))
    return int(_kernels[device].ptr)


def launch(pointer: int) -> None:
    """Launch that kernel on a stream."""
    cupy.cuda.driver.launchKernel(kernel(), 1, 1, 1, 1, 1, 1, 0, pointer, 0, 0)


def barrier(pointer: int) -> None:
    """Let what comes next on a stream begin when all before it has ended, by a kernel that is launched plainly between the two.

    There is none in a recording of this thread's: its graph is given plain edges when it is whole (`Rewiring.make_plain`).
    """
    if not (_thread.recording and runtime.streamIsCapturing(pointer)):
        launch(pointer)


def recording(begins: bool) -> None:
    """Be told that this thread begins a recording, or ends one."""
    _thread.recording = begins
