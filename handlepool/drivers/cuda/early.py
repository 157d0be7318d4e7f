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
"""Code of a kernel of one thread that does nothing.

The driver takes the code unchanged. CuPy would load NVRTC to compile it, which takes 17 to 28 milliseconds.
"""
_kernels: dict[int, Any] = {}
"""By device, the kernel of one thread that does nothing."""


def immortal(function: object) -> Any:
    """Keep a CuPy function and its module as long as the process.

    Captured graphs launch the function. At the end of the process CuPy's destructor would unload the module. If it cannot unload
    the module, in a forked child or after the context was lost, it writes to standard error.
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

    A kernel that is launched plainly between the two has that effect. A recording of this thread's needs no such kernel: its
    graph gets plain edges when it is complete (`Rewiring.make_plain`).
    """
    if not (_thread.recording and runtime.streamIsCapturing(pointer)):
        launch(pointer)


def recording(begins: bool) -> None:
    """Note whether this thread is recording from now on."""
    _thread.recording = begins
