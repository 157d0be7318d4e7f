"""Raise the cause of a failed recording.

The cause is the function's own error, or a `CaptureError` that names the call, the rule and the remedy.
"""

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from handlepool._util.frames import place_of_error
from handlepool.errors import CaptureError, OutOfMemoryError
from handlepool.order.stream_order import torch_in_use
from handlepool.pool.internals import PoolInternals
from handlepool.recording.random_numbers import refusal

ADVICE = (
    "A recorded function must not synchronise, read values on the host (float(y), y.get(), print(y)) or copy from the host: "
    "do so before or after the recorded function. Pass host data as an argument, or make the data on the device in an operation"
)


class Progress(NamedTuple):
    """The calls and the memory of a recording when it failed.

    Attributes
    ----------
    calls, of : int
        ``calls`` is the number of calls that had become nodes. ``of`` is the number of calls that should become nodes, as counted
        in the function's first run.
    lanes : int
        Number of lanes.
    nbytes, on_one_lane : int
        Bytes of device memory that the recording had, and an estimate of the bytes that it would have had with one lane.
    """

    calls: int
    of: int
    lanes: int
    nbytes: int
    on_one_lane: int


def raise_cause(
    name: str,
    pool: PoolInternals,
    error: BaseException | None,
    ending: BaseException | None,
    *,
    device: int,
    valid: bool,
    progress: Callable[[], Progress | None],
) -> NoReturn:
    """Raise the error of a failed recording.

    Parameters
    ----------
    name : str
        The function's name.
    pool : PoolInternals
    error, ending : BaseException or None
        The error of the function's call, and the error of the capture's end. At least one of these errors is not None.
    device : int
    valid : bool
        Whether the capture was still valid after the function's error.
    progress : callable
        Returns the progress of the recording, or None without lanes. It is called only if memory ran out.
    """
    first = error or ending
    assert first is not None
    try:
        # An interrupt goes to the caller unchanged.
        if not isinstance(first, Exception):
            raise first
        pool.status.diagnose(first)
        place = "" if error is None else place_of_error(error)
        if (refused := refusal(error, place)) is not None:
            raise CaptureError(f"{name} cannot be recorded: {refused}") from error
        if _is_out_of_memory(pool, error) and (reached := progress()) is not None:
            took, advice = f"{reached.nbytes:,} bytes on {reached.lanes} lanes", ""
            if reached.lanes > 1:
                took, advice = f"{took} (on 1 lane about {reached.on_one_lane:,} bytes)", "record it with lanes=1; or "
            raise OutOfMemoryError(
                f"the recording of {name} found no memory on device {device} ({error}), at call {reached.calls} of "
                f"{reached.of}, when it used {took}. To make room, {advice}free arrays, close programs, and call "
                f"HandlePool.trim() and CuPy's free_all_blocks()"
            ) from error
        if error is None and isinstance(ending, MemoryError):
            raise OutOfMemoryError(
                f"the graph of {name} found no memory on device {device} ({ending}): free arrays, close programs, "
                f"call HandlePool.trim() and CuPy's free_all_blocks(), and record it again"
            ) from ending
        # Either error may say why the capture is invalid: the driver reports this at the call that invalidated the capture, or
        # when the capture ends.
        causes = [pool.driver.capture_failure(trouble) for trouble in (error, ending) if trouble is not None]
        cause = next(filter(None, causes), None)
        # If the function's error does not come from an invalid capture, it goes to the caller unchanged.
        if error is not None and (cause is None or _is_own_refusal(error) or (valid and causes[0] is None)):
            raise error
        # The cause that the host driver reports already names the place, which is then not repeated.
        where = f" at {place}" if place and place not in str(cause) else ""
        raise CaptureError(f"{name} cannot be recorded: {cause or ending}{where}. {ADVICE}") from first
    finally:
        # Without `del`, the error, its traceback and this frame would form a reference cycle.
        del first, error, ending


def _is_out_of_memory(pool: PoolInternals, error: BaseException | None) -> bool:
    torch = torch_in_use(pool.driver)
    return isinstance(error, MemoryError) or (torch is not None and error is not None and torch.is_out_of_memory(error))


def _is_own_refusal(error: BaseException) -> bool:
    """Return whether an error is a refusal by this package's recording modules.

    Such a refusal names its cause. So the caller does not replace it with a `CaptureError` about the capture.
    """
    trace = error.__traceback__
    # The last frame of a traceback is the frame that raised the error.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    origin = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, CaptureError) and origin.startswith("handlepool.recording.")
