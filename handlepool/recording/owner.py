"""Let one thread use a program at a time.

A program has an owner thread. The owner alone may update, replay and read the program.
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
"""The uses of a program that only its owner thread may make."""


class Owned:
    """A program with an owner thread and one use at once."""

    _name: str
    _status: Status
    _driver: Driver
    _lock: RLock
    device: int
    _retaking: bool
    """Whether other uses are refused.

    The program's function is being called then, outside of the lock.
    """
    _busy: str | None
    """The use by the thread that holds the lock, as ``replayed``."""
    _recording: "Recording | None" = None
    _user: ThreadToken | None = None
    """The thread that owns `update`, `replay` and `outputs`.

    It is set while the thread holds the lock.
    """

    def hand_over(self) -> None:
        """Give the program up, so that another thread may own it.

        The next thread that uses `update`, `replay` or `outputs` owns these methods. Make sure that it uses them only after
        `hand_over` has returned. The program orders the work on the GPU, as for any two replays. Without an owner, or with an
        owner that has ended, nothing happens.

        Raises
        ------
        OwnershipError
            In another thread than the owner, and in a finalizer inside another use of the program.
        """
        self._use("handed over", self._leave)

    def _leave(self) -> None:
        self._check_owner()
        self._user = None

    def _check_owner(self) -> None:
        user = self._user
        # A thread that has ended cannot use the program, so another thread may take the program over.
        if user is not None and user is not thread.token and not user.over:
            raise OwnershipError(
                f"{self._name} belongs to {user!r}, and this is {thread.token!r}: only the thread that used the program "
                "last may call update, replay and outputs. Call hand_over() in that thread first, or call the program, "
                "as in y = program(x), from any thread"
            )

    def _use(self, what: str, act: Callable[..., T], *args: object) -> T:
        """Run a function while no other call uses the program.

        Return the function's value.
        """
        try:
            if self._busy is not None:
                self._check_turn(what)
            # CPython delivers no interrupt between taking the lock and entering the block.
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

        Refuse a use inside this thread's own use, and a use that would be refused after the wait.
        """
        if what in OWNERS:
            self._check_owner()
        with self._lock:
            if self._busy is not None:
                raise OwnershipError(
                    f"{self._name} is being {self._busy} by this thread, and this call comes from a finalizer that Python "
                    "runs in between: call it later"
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
        """Refuse a use on a stream, or return the current device."""
        if self._recording is None:
            self._refuse()
        if self._retaking:
            raise OwnershipError(
                f"{self._name} was used while its plans are tuned, which calls its function; use it after tune(plans=True)"
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
        """Raise a clearer error for an error, if one is known."""
        if process_end.ending and isinstance(error, PoolClosedError):
            process_end.linger()
        self._status.diagnose(error)
        if not isinstance(error, HandlePoolError) and (cause := self._driver.capture_failure(error)):
            raise CaptureError(f"{self._name} cannot be used on a stream that is being captured: {cause}") from error

    def _refuse(self) -> NoReturn:
        if process_end.ending:
            raise PoolClosedError(f"{self._name} came to its end with the interpreter, which is being taken down")
        raise PoolClosedError(f"the program {self._name} was closed; record it again")

    def __reduce__(self) -> Any:
        """Refuse to be pickled, or copied by `copy.copy`.

        Two copies would destroy the same graph.
        """
        raise TypeError(f"the program {self._name} owns a graph and memory and cannot be copied or pickled; record it again")


def capturing(pointer: int) -> CaptureError:
    """Return the error for a stream that is being captured."""
    if thread.recording is not None:
        return CaptureError("a program cannot be part of another recording: call its original function there")
    return CaptureError(
        f"stream {pointer:#x} is being captured, and a program can neither run on a captured stream nor wait for it. "
        "Use the program before the capture, or after"
    )
