"""Check the rules for handles that cuDNN leaves unchecked.

The checks cover the thread, the device and the stream of each use (guarantees 1 to 3). The module also counts the driver's calls,
so that a test can tell how many calls a hit makes. And it can make the k-th call fail.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container
from types import TracebackType

from handlepool.drivers.host.streams import Queue, StreamTable, ThreadState
from handlepool.errors import ContractError


class HostHandle:
    """A handle that executes nothing and remembers its binding.

    It has the attributes of `cudnn.Handle`.

    Attributes
    ----------
    backend_handle : int or None
        None after the handle was destroyed.
    stream : int or None
        The pointer of the stream that the handle is bound to: the same integer object that `HostDriver.bind_handle` got.
    device : int
    """

    def __init__(self, backend_handle: int, device: int, queue: Queue) -> None:
        self.backend_handle: int | None = backend_handle
        self.stream: int | None = queue.pointer
        self.device = device
        self._number = backend_handle
        self.queue = queue
        self.bound = queue.pointer
        self.in_use = threading.Lock()
        self.user = ""

    def __repr__(self) -> str:
        state = "destroyed" if self.backend_handle is None else f"bound to {self.stream:#x}"
        return f"<HostHandle {self._number:#x} of device {self.device}, {state}>"

    def bind(self, queue: Queue, pointer: int) -> None:
        """Remember the stream that the handle is bound to."""
        self.queue = queue
        self.stream = self.bound = pointer


class HandleUse:
    """A context manager around a call with a handle.

    The context manager checks the rules that cuDNN leaves to its callers.
    """

    __slots__ = ("_call", "_checks", "_handle", "_streams")

    def __init__(self, streams: StreamTable, handle: HostHandle, call: str, checks: bool) -> None:
        self._streams = streams
        self._handle = handle
        self._call = call
        self._checks = checks

    def __enter__(self) -> HostHandle:
        handle = self._handle
        if self._checks:
            caller = threading.current_thread().name
            # If the lock is taken, two threads use the handle at once. That is the error, so this thread does not wait for the
            # lock.
            if not handle.in_use.acquire(blocking=False):
                raise ContractError(
                    f"{self._call}: {handle!r} is in a call of thread {handle.user!r} while thread {caller!r} uses it: a handle "
                    "must never be used by two threads at once. Give each thread a handle of its own"
                )
            handle.user = caller
        try:
            self._check()
        except BaseException:
            # Python does not call `__exit__` when `__enter__` raises, so the lock is released here.
            self.__exit__(None, None, None)
            raise
        return handle

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._checks:
            self._handle.in_use.release()

    def _check(self) -> None:
        handle = self._handle
        if handle.backend_handle is None:
            raise ContractError(f"{self._call}: {handle!r} was destroyed; use another handle")
        device = self._streams.thread.device
        if self._checks and handle.device != device:
            raise ContractError(
                f"{self._call}: {handle!r} is used while device {device} is current: make the handle's device current first"
            )

    def bound_queue(self) -> Queue:
        """Return the queue of the stream that the handle is bound to.

        The method raises if the attribute ``stream`` names another stream.
        """
        handle = self._handle
        bound = handle.queue
        # A caller may have set the attribute ``stream``. A handle of cuDNN is not bound by that, so it is an error here.
        if handle.stream != handle.bound:
            raise ContractError(
                f"{self._call}: the attribute ``stream`` of {handle!r} was changed, but the handle stays "
                f"bound to {bound!r}; bind a handle by bind_handle"
            )
        if bound.default:
            # The pointer of a default stream names the stream of the current device, and of the calling thread for the per-thread
            # default stream.
            return self._streams.resolve(bound.pointer)
        # A new stream may have the pointer of a destroyed stream. So the queue tells whether the stream lives, and the pointer
        # does not.
        if not bound.alive:
            raise ContractError(
                f"{self._call}: the stream of {handle!r} was destroyed ({bound!r}); bind the handle again, even if a new "
                "stream has this pointer"
            )
        return bound


class Relaxed:
    """Relax this thread's stream-capture mode while entered.

    One object serves all threads and any depth of nesting.
    """

    __slots__ = ("_thread",)

    def __init__(self, thread: ThreadState) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        # The mode is a counter, so that one thread can nest `with` blocks.
        self._thread.relaxed += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.relaxed -= 1


class CallLog:
    """Count the driver's calls by method name, and inject a failure."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._fault: Callable[[str], None] | None = None

    def note(self, method: str) -> None:
        """Note a call of a method, before it has any effect."""
        self.calls[method] += 1
        if self._fault is not None:
            self._fault(method)

    def fail_by(self, fault: Callable[[str], None]) -> None:
        """Call ``fault`` before every later call of the driver.

        If ``fault`` raises an error, the driver's call raises it.
        """
        self._fault = fault

    def fail_at(self, k: int, method: str | None, error: BaseException | None, spared: Container[str]) -> None:
        """Make the k-th call from now fail, once; see `HostDriver.fail_at`."""
        left = k

        def fault(called: str) -> None:
            nonlocal left
            if called == method or (method is None and called not in spared):
                left -= 1
                if left == 0:
                    # The failure happens once, so the fault removes itself first.
                    self._fault = None
                    raise error or RuntimeError(f"injected failure of {called}, call {k} of {method or 'all'}")

        self._fault = fault if k > 0 else None
