"""Explain the errors of CUDA and CuPy under a capture."""

from handlepool._util.causes import causes

_MEANINGS = {
    900: "a call that a stream cannot take while it is recorded: to wait for the GPU, to read values, to allocate past CuPy",
    901: "an earlier call that a stream cannot take while it is recorded",
    902: "a wait that would join it to another capture",
    903: "a capture that was begun elsewhere",
    904: "work on a stream that nothing waits for afterwards",
    905: "a wait for work outside of the recording",
    906: "work on the legacy default stream, which cannot be recorded",
    907: "a wait on the host for an event of the recording",
    908: "a capture that was begun in another thread",
}
"""Meanings of stream-capture errors by number.

The numbers are the same in the runtime and in the driver.
"""


_FROM_HOST = (
    "a copy from the host, whose memory every replay would read again: pass the array as an argument, or make it on the device "
    "in an operation"
)
_INSTEAD = {
    "cuBLAS": "use handlepool.matmul or handlepool.linear for cupy.matmul, dot, tensordot and einsum",
    "cuRAND": "draw cupy.random's numbers before it, and copy them in",
}
"""Advice by library, for calls that CuPy refuses under a capture."""


def failure(error: BaseException | None) -> str | None:
    """See `handlepool.drivers.protocol.Driver.capture_failure`."""
    for each in causes(error):
        meaning = _MEANINGS.get(getattr(each, "status", 0))
        # CuPy checks for a capture itself before it calls CUDA, so such an error has a message and no status.
        if meaning is None and isinstance(each, RuntimeError):
            if "H2D transfers" in str(each):
                meaning = _FROM_HOST
            elif "capturing" in str(each):
                meaning = _MEANINGS[900]
            elif isinstance(each, NotImplementedError) and "during stream capture" in str(each):
                meaning = "a library's call that CuPy refuses while a stream is captured"
                meaning += "".join(f": {instead}" for name, instead in _INSTEAD.items() if name in str(each))
        if meaning is not None:
            return f"{meaning} ({each})"
    return None
