"""Define the types of a driver's streams and handles."""

from typing import Protocol

LEGACY_STREAM = 0
PER_THREAD_STREAM = 2


class Stream(Protocol):
    """Represent the array library's stream object.

    It can have weak references and additional attributes. Objects with the same pointer are equal.
    """

    ptr: int
    device_id: int

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Handle(Protocol):
    """Represent a cuDNN handle object, as `cudnn.Handle`.

    `stream` is the pointer of the bound stream, or None once the handle was destroyed.
    """

    backend_handle: int | None
    stream: int | None
