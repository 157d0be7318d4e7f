"""Resolve a caller's stream to device, pointer, identity and owner.

This module keeps guarantee 4. The driver may give the pointer of a destroyed stream to a new stream, so a pointer does not
identify a stream. If a stream object lives exactly as long as its stream, the object is the identity. Any other stream is known
by its pointer *and* the driver's id of the stream, which is unique for the life of the process. Reading the id of a capturing
stream would break the capture, so the capture's own id is used instead. Each of the two default streams has a key made of
device and pointer. The legacy stream is one stream for all threads of a device. The per-thread stream is a different stream in
each thread, but keys are only compared within a thread.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from handlepool._util.arguments import as_integer
from handlepool._util.names import shown
from handlepool._util.protocols import has_protocol
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import DeviceMismatchError, StreamError

_DEFAULTS = (LEGACY_STREAM, PER_THREAD_STREAM)


@dataclass(frozen=True, slots=True)
class StreamReference:
    """A stream of the current device, with its identity.

    Attributes
    ----------
    device : int
        Ordinal.
    pointer : int
        The ``cudaStream_t``; 0 and 2 are the default streams.
    key : hashable
        Identity of the stream within one thread.
    stream : object or None
        The array library's stream object, if it lives exactly as long as the stream; else None.
    owner : object
        The caller's stream argument. It has to be kept alive while the stream is needed.
    """

    device: int
    pointer: int
    key: Hashable
    stream: Any
    owner: object


def resolve(driver: Driver, stream: Any = None) -> StreamReference:
    """Resolve a caller's stream argument.

    Parameters
    ----------
    driver : Driver
        The driver that owns the streams.
    stream : None, int or object
        None for the array library's current stream, a ``cudaStream_t`` as an integer (0 or 1: legacy default, 2: per-thread
        default), the array library's own stream object, or any object with ``__cuda_stream__``.

    Raises
    ------
    StreamError
        When the object is not of these kinds, or when its ``__cuda_stream__`` gives a version other than 0.
    DeviceMismatchError
        When the stream does not belong to the current device.
    """
    device = driver.current_device()
    if stream is None:
        stream = driver.current_stream()
    if driver.owns_stream(stream):
        pointer = stream.ptr
        if pointer not in _DEFAULTS:
            _check_device(stream, stream.device_id, device)
            return StreamReference(device, pointer, (device, id(stream)), stream, stream)
    else:
        pointer = _pointer(stream)
    if pointer in _DEFAULTS:
        # The driver has one permanent object for each default stream, and that object is used. The caller's object with the
        # same pointer may end although the stream lives on.
        return StreamReference(device, pointer, (device, pointer), driver.wrap_stream(pointer, stream), stream)
    if capture := driver.capture_id(pointer):
        key: Hashable = (device, pointer, "capture", capture)
    else:
        key = (device, pointer, driver.stream_id(pointer))
    return StreamReference(device, pointer, key, None, stream)


def is_over(key: Any, now: Any) -> bool:
    """Return whether the stream or capture of an earlier key is over.

    ``now`` is the present key of the same bare pointer. A pointer belongs to one stream at a time, so another stream id means
    that the earlier stream is gone. A stream takes part in at most one capture at a time, and in none while its id can be read.
    So another capture id, or a stream id, means that the earlier capture is over. While a stream is capturing, its stream id
    cannot be read. So a present capture id does not show whether the stream of an earlier id is gone.
    """
    return bool(key != now and key[:2] == now[:2] and len(key) >= len(now))


def check_foreign(driver: Driver, reference: StreamReference) -> None:
    """Raise `DeviceMismatchError` for a bare pointer of another device.

    Only a miss checks this.
    """
    if reference.stream is None:
        _check_device(reference.owner, driver.stream_device(reference.pointer), reference.device)


def _check_device(stream: object, found: int, current: int) -> None:
    if found not in (-1, current):
        raise DeviceMismatchError(
            f"stream {shown(stream)} belongs to device {found} and the current device is {current}; make device {found} current, "
            f"as in `with cupy.cuda.Device({found}):`"
        )


def _pointer(stream: Any) -> int:
    protocol = stream.__cuda_stream__ if type(stream) is not int and has_protocol(stream, "__cuda_stream__") else None
    if protocol is None:
        try:
            pointer = as_integer(stream)
        except TypeError:
            raise StreamError(
                f"{shown(stream)} is no stream: {type(stream).__name__} has no __cuda_stream__; pass a stream of CuPy, torch "
                f"(2.10 or later), JAX or cuda.core, a cudaStream_t as an integer, or None for CuPy's current stream"
            ) from None
    else:
        # In some libraries `__cuda_stream__` is a method, in other libraries a property.
        answer = protocol() if callable(protocol) else protocol
        try:
            version, pointer = answer
        except (TypeError, ValueError):
            raise StreamError(
                f"__cuda_stream__ of {shown(stream)} gave {shown(answer)}, not (version, pointer); pass the "
                "stream's cudaStream_t as an integer"
            ) from None
        if version != 0:
            raise StreamError(
                f"__cuda_stream__ of {shown(stream)} speaks version {shown(version)} of the protocol; handlepool knows "
                f"only version 0. Pass the stream's cudaStream_t as an integer"
            )
        try:
            pointer = as_integer(pointer)
        except TypeError:
            raise StreamError(
                f"__cuda_stream__ of {shown(stream)} gave the pointer {shown(pointer)}, which is no integer; pass the "
                "stream's cudaStream_t as an integer"
            ) from None
    if pointer < 0:
        raise StreamError(f"{shown(stream if protocol is None else pointer)} is no cudaStream_t; pass a pointer of 0 or more")
    return LEGACY_STREAM if pointer == 1 else pointer
