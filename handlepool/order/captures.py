"""Compare the captures of two streams."""

from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import CaptureError


def captures_of(driver: Driver, *pointers: int) -> tuple[int, ...]:
    """Return the identifier of each stream's capture.

    The identifier of a stream that is not being captured is 0.
    """
    # While a blocking stream is being captured, CUDA refuses any question about the legacy stream. So the legacy stream counts
    # as not captured.
    return tuple([driver.capture_id(each) if each != LEGACY_STREAM else 0 for each in pointers])


def another_capture(what: str, pointer: int, outer: int, captures: tuple[int, ...], fix: str) -> CaptureError:
    """Return the error for work and a fork in different captures.

    Parameters
    ----------
    what : str
        The name of the work.
    pointer, outer : int
        The stream of the work, and the stream of the open fork.
    captures : tuple of int
        The identifiers of the captures of ``pointer`` and ``outer``; 0 for a stream that is not being captured.
    fix : str
        The last sentence of the message.
    """
    inner, around = captures
    return CaptureError(
        f"{what} on stream {pointer:#x} {'is' if inner else 'is not'} part of a capture, and an open fork of this thread on "
        f"stream {outer:#x} {'is part of another' if inner and around else 'is' if around else 'is not'}, so neither may wait "
        f"for the other. {fix}"
    )
