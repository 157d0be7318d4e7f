"""Capture launches into a graph that is thrown away.

No work runs, and no thread waits for the device.
"""

from collections import defaultdict
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

from handlepool.drivers.cuda.capture import begins_early
from handlepool.drivers.streams import Handle


class IdleStreams:
    """Keep, for each context, the streams that are not capturing.

    To create a stream costs as much as the rest of a throwaway capture, so streams are kept and used again. They live as long as
    the process. Their number is the maximum number of threads that planned at the same time. The class needs no lock, because
    appends and pops of a list are atomic.
    """

    def __init__(self) -> None:
        self._of: defaultdict[int, list[int]] = defaultdict(list)

    def acquire(self) -> int:
        """Return a stream of the current context, for one user."""
        try:
            return self._of[cupy.cuda.driver.ctxGetCurrent()].pop()
        except IndexError:
            return int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))

    def release(self, stream: int) -> None:
        """Keep a stream of the current context for a later capture."""
        self._of[cupy.cuda.driver.ctxGetCurrent()].append(stream)


_streams = IdleStreams()


class ThrowawayCapture:
    """Bind a handle to a capturing stream, and discard its graph.

    When the frontend reads a plan with a handle, it warms the plan up: it captures a launch, and allocates and frees a megabyte,
    which synchronises the device. If the handle's stream is being captured, the frontend skips the warm-up. The throwaway capture
    has the mode *relaxed*, so the thread that reads the plan may still make any call of CUDA.

    Parameters
    ----------
    bind_handle : callable
        `CudaDriver.bind_handle`.
    handle : cudnn.Handle
        The handle. At the end, it is bound to its former stream again.
    ask : bool
        Whether to find out if a kernel of the graph begins early.

    Attributes
    ----------
    stream : int
        The pointer of the capturing stream.
    early : bool or None
        Whether a kernel of the graph begins early; None without ``ask``, and before the end.
    """

    def __init__(self, bind_handle: Callable[[Handle, int], None], handle: Handle, *, ask: bool = False) -> None:
        self._bind_handle, self._handle, self._ask = bind_handle, handle, ask
        self.stream = 0
        self.early: bool | None = None

    def __enter__(self) -> "ThrowawayCapture":
        self._before = self._handle.stream
        self.stream = _streams.acquire()
        try:
            runtime.streamBeginCapture(self.stream, runtime.streamCaptureModeRelaxed)
            self._bind_handle(self._handle, self.stream)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # The same integer object is restored, because a slot compares its pointer with the handle's pointer by identity.
            self._bind_handle(self._handle, self._before or 0)
        finally:
            try:
                graph = runtime.streamEndCapture(self.stream)
            except runtime.CUDARuntimeError:
                # The capture was invalidated or did not begin, so the stream is not kept.
                runtime.streamDestroy(self.stream)
            else:
                _streams.release(self.stream)
                try:
                    if self._ask:
                        self.early = begins_early(int(graph))
                finally:
                    runtime.graphDestroy(graph)
