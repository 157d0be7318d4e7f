"""Explain the errors of CUDA and CuPy under a capture."""

from handlepool._util.causes import causes

_MEANINGS = {
    900: "a call was refused during the capture, such as a wait for the GPU, a read of values, or an allocation outside of CuPy",
    901: "an earlier call, which is refused during a capture, invalidated the capture",
    902: "a stream waited for another capture, and CUDA cannot join two captures",
    903: "the capture was ended on a stream on which it did not begin",
    904: "work was captured on a second stream, and the stream on which the capture began does not wait for that work",
    905: "a captured stream waited for work outside of the capture",
    906: "work was put on the legacy default stream, which cannot be captured",
    907: "the host waited for an event of the capture",
    908: "the capture was ended in another thread than the thread that began it",
}
"""Meanings of stream-capture errors by number.

An error has the same number in CUDA's runtime and in CUDA's driver.
"""


_FROM_HOST = (
    "an array was copied from the host, and every replay would read the host's memory again: pass the array as an argument, or "
    "make the array on the device in an operation"
)
_INSTEAD = {
    "cuBLAS": "use handlepool.matmul or handlepool.linear for cupy.matmul, dot, tensordot and einsum",
    "cuRAND": "draw the numbers with cupy.random before the capture, and let the captured work read their array",
}
"""Advice by library, for calls that CuPy refuses under a capture."""


def failure(error: BaseException | None) -> str | None:
    """See `handlepool.drivers.protocol.Driver.capture_failure`."""
    for each in causes(error):
        meaning = _MEANINGS.get(getattr(each, "status", 0))
        # CuPy itself refuses some calls under a capture, before it calls CUDA. Its error has no status, so its message is
        # searched.
        if meaning is None and isinstance(each, RuntimeError):
            if "H2D transfers" in str(each):
                meaning = _FROM_HOST
            elif "capturing" in str(each):
                meaning = _MEANINGS[900]
            elif isinstance(each, NotImplementedError) and "during stream capture" in str(each):
                meaning = "CuPy called a library whose calls it refuses while a stream is captured"
                meaning += "".join(f": {instead}" for name, instead in _INSTEAD.items() if name in str(each))
        if meaning is not None:
            return f"{meaning} ({each})"
    return None
