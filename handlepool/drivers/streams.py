"""Type the streams and handles of a driver."""

from typing import Protocol

LEGACY_STREAM = 0
PER_THREAD_STREAM = 2


class Stream(Protocol):
    """The array library's stream object: weakly referenceable, with free attributes, equal by pointer."""

    ptr: int
    device_id: int

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Handle(Protocol):
    """A cuDNN handle object, as `cudnn.Handle`: `stream` is the pointer it is bound to, None once it was destroyed."""

    backend_handle: int | None
    stream: int | None
