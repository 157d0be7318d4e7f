"""Let one thread at a time use a program; track its owner.

The owner is the thread that last used the program. Only the owner may update and replay the program, and read its outputs.
"""

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from handlepool.drivers.protocol import Driver
from handlepool.errors import CaptureError, DeviceMismatchError, HandlePoolError, OwnershipError, PoolClosedError
from handlepool.pool.context import ThreadToken, thread
from handlepool.pool.process_end import process_end
from handlepool.pool.status import Status
from handlepool.pool.stream import resolve

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

T = TypeVar("T")

OWNERS = ("replayed", "updated", "read", "handed over")
"""The uses that only the owner may make, as messages name them."""


class Owned:
    """The base of `Program`, which admits uses and tracks the owner.

    A use is for example a replay, an update or a call. Only one thread at a time uses a program.
    """

    _name: str
    _status: Status
    _driver: Driver
    _lock: RLock
    device: int
    _retaking: bool
    """Whether `tune(plans=True)` is calling the program's function.

    The lock is not held meanwhile, so other uses are refused.
    """
    _busy: str | None
    """The word for the present use, such as "replayed", or None.

    The thread that holds the lock sets the word.
    """
    _recording: "Recording | None" = None
    _user: ThreadToken | None = None
    """The owner: the thread that may use `update`, `replay` and `outputs`.

    The attribute is only set while the setting thread holds the lock. It is None while the program has no owner.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for arrays and scratch; 0 after `close`."""
        recording = self._recording
        return 0 if recording is None else recording.nbytes

    @property
    def closed(self) -> bool:
        """Whether the program was closed."""
        return self._recording is None

    def hand_over(self) -> None:
        """Give the program up, so that another thread may own it.

        The next thread that uses `update`, `replay` or `outputs` becomes the owner. Make sure that this thread uses them only
        after `hand_over` has returned. The GPU work of both threads is ordered, as for any two replays. If the program has no
        owner, or its owner thread has ended, `hand_over` does nothing.

        Raises
        ------
        OwnershipError
            If the calling thread is not the owner, or if a finalizer makes the call during another use of the program.
        """
        self._use("handed over", self._leave)

    def _leave(self) -> None:
        self._check_owner()
        self._user = None

    def _check_owner(self) -> None:
        user = self._user
        # If the owner thread has ended, any thread may use the program and become its owner.
        if user is not None and user is not thread.token and not user.over:
            raise OwnershipError(
                f"{self._name} belongs to {user!r}, and this is {thread.token!r}: only the thread that used the program "
                "last may use update, replay and outputs. Call hand_over() in that thread first, or call the program, "
                "as in y = program(x), which any thread may do"
            )

    def _use(self, what: str, act: Callable[..., T], *args: object) -> T:
        """Run a function while no other call uses the program.

        Return the function's value.
        """
        try:
            if self._busy is not None:
                self._check_turn(what)
            # CPython delivers no interrupt between acquiring the lock in this statement and entering the block.
            with self._lock:
                try:
                    self._busy = what
                    return act(*args)
                finally:
                    self._busy = None
        except Exception as error:
            self._explain(error)
            raise

    def _check_turn(self, what: str) -> None:
        """Wait for another thread's use of the program.

        If this thread itself is using the program, refuse the new use. If only the owner may make the new use, and this thread is
        not the owner, refuse the use before the wait.
        """
        if what in OWNERS:
            self._check_owner()
        with self._lock:
            if self._busy is not None:
                raise OwnershipError(
                    f"{self._name} is being {self._busy} by this thread, and this call comes from a finalizer that Python "
                    "runs in between: use the program outside of finalizers"
                )

    def _claim(self) -> None:
        """Make this thread the owner, unless another thread is the owner.

        The caller holds the lock.
        """
        if self._recording is None:
            self._refuse()
        self._check_owner()
        self._user = thread.token

    def _check_use(self, stream: object) -> int:
        """Refuse an invalid use on a stream; return the current device."""
        if self._recording is None:
            self._refuse()
        if self._retaking:
            raise OwnershipError(
                f"{self._name} was used while tune(plans=True) is tuning its plans; use the program after that call has returned"
            )
        driver = self._driver
        device = driver.current_device()
        if device != self.device:
            raise DeviceMismatchError(
                f"{self._name} was recorded on device {self.device} and the current device is {device}; make device "
                f"{self.device} current, as in `with cupy.cuda.Device({self.device}):`"
            )
        if thread.recording is not None:
            thread.recording.check(f"a use of {self._name}", resolve(driver, stream).pointer, driver)
        return device

    def _explain(self, error: Exception) -> None:
        """Raise a `CaptureError` if ``error`` comes from an invalid capture.

        The method also tells the pool of an error that shows that the CUDA context has failed.
        """
        if process_end.ending and isinstance(error, PoolClosedError):
            process_end.linger()
        self._status.diagnose(error)
        if not isinstance(error, HandlePoolError) and (cause := self._driver.capture_failure(error)):
            raise CaptureError(f"{self._name} cannot be used on a stream that is being captured: {cause}") from error

    def _refuse(self) -> NoReturn:
        if process_end.ending:
            raise PoolClosedError(f"the program {self._name} cannot be used any more, because the interpreter is shutting down")
        raise PoolClosedError(f"the program {self._name} was closed; record it again")

    def __reduce__(self) -> Any:
        """Refuse `pickle` and `copy.copy`.

        If there were two copies of a program, both would destroy the same graph.
        """
        raise TypeError(f"the program {self._name} owns a graph and memory and cannot be copied or pickled; record it again")


def capturing(pointer: int) -> CaptureError:
    """Return the error for a stream that is being captured."""
    if thread.recording is not None:
        return CaptureError(
            "a program cannot be used inside another recording: in the recorded function, call the program's original function"
        )
    return CaptureError(
        f"stream {pointer:#x} is being captured, and a program can neither run on a captured stream nor wait for it. "
        "Use the program before or after the capture"
    )
