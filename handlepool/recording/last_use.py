"""The stream that used a program's memory last, and what the next one waits for."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from handlepool.drivers.protocol import LEGACY_STREAM, PER_THREAD_STREAM, Driver
from handlepool.errors import CaptureError, DeviceMismatchError
from handlepool.pool.context import thread
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.regions.memory import lent

_streams: dict[int, Any] = {}
"""By number, the last streams of programs. The collector runs the destructors of all that goes at a time, also of a stream that a
program has which parks itself there: this keeps the stream, whatever cycle it is in, until the program is given back."""
_numbers = count()


class LastUse:
    """Base of `Program`, where a replay that follows one on the same stream finds all that it needs without a step in between.

    Its methods are called in the program's turn.

    Parameters
    ----------
    driver : Driver
    device : int
        Ordinal.
    name : str
        Of the program, for messages.
    launch_on : callable
        Launches the graph on a stream by pointer.
    event : event
        Becomes this one's.
    home : StreamReference
        The first stream.
    """

    def __init__(
        self, driver: Driver, device: int, name: str, launch_on: Callable[[int], None], event: Any, home: StreamReference
    ) -> None:
        self._number = next(_numbers)
        self._driver = driver
        self.device = device
        self._name = name
        self._is_capturing = driver.is_capturing
        self._record_event = driver.record_event
        self._launch_on = launch_on
        # The last stream that used the memory, where its object is the stream: the event is recorded there when another follows.
        # None for any other stream, which may be gone by then: the event is recorded after each use.
        # So it is for a side stream, which is lent to others, who may have it captured: nobody else records or waits there.
        self._last: Any = None
        self._event = event
        self._used_by(home)
        if self._last is None:
            driver.record_event(event, home.pointer)

    def _follow(self, stream: Any) -> None:
        """Make another stream the one that uses the memory, after all that the last one was given by now."""
        driver = self._driver
        device = driver.current_device()
        if device != self.device:
            raise DeviceMismatchError(
                f"{self._name} was recorded on device {self.device} and the current device is {device}; make device "
                f"{self.device} current, as in `with cupy.cuda.Device({self.device}):`"
            )
        if thread.recording is not None:
            thread.recording.check(f"a use of {self._name}", resolve(driver, stream).pointer, driver)
        last = self._last
        if last is not None and last is (driver.current_stream(device) if stream is None else stream):
            return
        reference = resolve(driver, stream)
        check_foreign(driver, reference)
        pointer = reference.pointer
        if last is not None and last is reference.stream:
            return
        for each in (pointer, LEGACY_STREAM if last is None else last.ptr):
            if each != LEGACY_STREAM and driver.is_capturing(each):
                raise capturing(each)
        if last is not None:
            driver.record_event(self._event, last.ptr)
        driver.wait_event(pointer, self._event)
        with driver.relaxed():  # the last reference to the former stream may go
            self._used_by(reference)
            del last

    def _used_by(self, reference: StreamReference) -> None:
        last = None if reference.pointer == PER_THREAD_STREAM or reference.pointer in lent else reference.stream
        # A stream of one device is current on no other: that it is current says which device is.
        bound = getattr(last, "device_id", -1) == self.device
        launch = partial(self._launch_on, reference.pointer)  # quicker to call than to be given the pointer each time
        if last is None:
            _streams.pop(self._number, None)
        else:
            _streams[self._number] = last
        # No call in between, after which an interrupt could come.
        self._last, self._pointer, self._owner = last, reference.pointer, reference.owner
        self._bound, self._launch = bound, launch

    def _forget_stream(self) -> Any:
        """Let go of the last stream; what is returned may destroy it as it goes."""
        last, self._last = self._last, None
        return last, _streams.pop(self._number, None)

    def _passed(self, *, wait: bool) -> bool:
        """Whether the last use of the memory has, waiting for it if need be."""
        driver, last = self._driver, self._last
        if last is not None:
            if last.ptr != LEGACY_STREAM and driver.is_capturing(last.ptr):
                if wait:
                    raise capturing(last.ptr)
                return False
            driver.record_event(self._event, last.ptr)
            if not wait:  # or the next time it is asked, the event would move on to what the stream was given since
                self._last = None
        with driver.relaxed():
            if wait:
                driver.synchronize_event(self._event)
            return wait or driver.event_done(self._event)


def capturing(pointer: int) -> CaptureError:
    """The error for a stream that is being captured."""
    return CaptureError(
        f"stream {pointer:#x} is being captured: a program can be neither used in a capture, nor be ordered after the last use "
        f"there. Use it before the capture, or after"
    )
