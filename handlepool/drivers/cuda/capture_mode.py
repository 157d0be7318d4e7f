"""Exchange the capture mode of a thread.

In the mode *relaxed*, calls that would spoil a capture of another thread harm no capture (guarantee 9).
"""

from ctypes import byref, c_int
from typing import Any, NoReturn

from cuda.bindings import driver as cu

from handlepool.drivers.cuda.edges import libcuda
from handlepool.drivers.cuda.status import check
from handlepool.errors import DriverNotAvailableError

RELAXED = int(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def _no_exchange(_: object) -> NoReturn:
    raise DriverNotAvailableError(
        "CUDA's driver library libcuda.so.1 was not found; install the NVIDIA driver, which contains it"
    )


exchange: Any = getattr(libcuda(), "cuThreadExchangeStreamCaptureMode", _no_exchange)
"""Exchange the capture mode without cuda-bindings.

cuda-bindings makes two enumeration objects per call, which takes longer than the call itself. Every allocation makes such calls.
"""


class Relaxed:
    """Set this thread's capture mode to *relaxed* in a ``with`` block."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        # The call writes the former mode into `_mode`. `__exit__` restores the former mode, so that `with` blocks nest.
        self._mode = mode = c_int(RELAXED)
        if status := exchange(byref(mode)):
            check((cu.CUresult(status),))

    def __exit__(self, *_: object) -> None:
        if status := exchange(byref(self._mode)):
            check((cu.CUresult(status),))
