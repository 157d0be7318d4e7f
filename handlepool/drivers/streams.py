"""Define the types of a driver's streams and handles."""

from typing import Protocol

LEGACY_STREAM = 0
PER_THREAD_STREAM = 2


class Stream(Protocol):
    """Represent the array library's stream object.

    A stream object allows weak references and additional attributes. Two stream objects with the same pointer are equal.
    """

    ptr: int
    device_id: int

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Handle(Protocol):
    """Represent a cuDNN handle object, such as a `cudnn.Handle`.

    `stream` is the pointer of the bound stream, or None after the handle was destroyed.
    """

    backend_handle: int | None
    stream: int | None
