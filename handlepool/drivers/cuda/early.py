"""Keep kernels from starting before earlier work on their stream has ended.

cuDNN launches some of its kernels by programmatic dependent launch: a kernel begins early, and waits for the previous kernel
before it reads. In cuDNN 9.19 some of these kernels add a residual, and read the residual too early, before that wait. With a
long queue on a single stream, such convolutions gave wrong values.
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
"""PTX code of the kernel that does nothing.

CUDA's driver loads PTX as it is. For code in CUDA C++, CuPy would have to load NVRTC, which takes 17 to 28 milliseconds.
"""
_kernels: dict[int, Any] = {}
"""The loaded kernel that does nothing, by device."""


def immortal(function: object) -> Any:
    """Keep a CuPy function and its module as long as the process.

    Captured graphs launch the function. At the end of the process CuPy's destructor would unload the module. In a forked child,
    or after the context was lost, that destructor would fail and write to standard error.
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
    """Launch the kernel that does nothing on a stream."""
    cupy.cuda.driver.launchKernel(kernel(), 1, 1, 1, 1, 1, 1, 0, pointer, 0, 0)


def barrier(pointer: int) -> None:
    """Let a stream's next work begin after all its earlier work.

    To that end, the function launches a kernel that does nothing, without programmatic dependent launch. While this thread
    records the stream, no such kernel is needed, because `Rewiring.make_plain` gives the finished graph plain edges.
    """
    if not (_thread.recording and runtime.streamIsCapturing(pointer)):
        launch(pointer)


def recording(begins: bool) -> None:
    """Note that a recording of this thread begins, or ends."""
    _thread.recording = begins
