"""Serve requests: calls of recorded functions, submitted to an executor.

A client is a thread or a task of asyncio that submits requests. The client's own thread launches them. A launch takes as long as
the hand-over to another thread, and both hold Python's lock. So the executor's threads launch no request. They only wait for
results on the host, for clients that await the results.

Each client has one stream of the executor. So the requests of a client keep their order, and requests of different clients
overlap as far as there are streams.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import count
from sys import modules
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from handlepool.drivers.streams import Stream
from handlepool.pool.device import DeviceSlots
from handlepool.pool.internals import PoolInternals
from handlepool.regions.future import StreamFuture, Task

T = TypeVar("T")


class Requests:
    """The streams and the limits of an executor's requests.

    Parameters
    ----------
    threads : Executor
        Threads that wait for results on the host.
    pending : deque of Task
        Tasks whose end the GPU may not have passed.
    streams : int
        Number of streams of each device.
    most : int or None
        The maximum number of pending tasks. None means no limit.
    to : str or None
        Where results go: "device" or "host". None means the host if an argument is a NumPy array, and the device otherwise.
    """

    def __init__(self, threads: Executor, pending: deque[Task], streams: int, most: int | None, to: str | None) -> None:
        self.to = to
        self._threads, self._pending, self._most = threads, pending, most
        self._count = streams
        self._streams: dict[DeviceSlots, list[Stream]] = {}
        self._turn = count()
        # This maps each client to a number, which chooses its stream. The references are weak, because clients come and go.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def stream(self, pool: PoolInternals, device: DeviceSlots) -> Stream:
        """Return the calling client's stream of the current device."""
        streams = self._streams.get(device)
        if streams is None:
            for other in [known for known in self._streams if known.status.closed]:
                self._streams.pop(other, None)
            with pool.driver.relaxed():
                made = [pool.driver.create_stream() for _ in range(self._count)]
            # `setdefault` keeps a single list if two clients come here at the same time.
            streams = self._streams.setdefault(device, made)
        return streams[self._client() % self._count]

    def _client(self) -> int:
        client = _running_task() or threading.current_thread()
        number = self._numbers.get(client)
        if number is None:
            number = self._numbers[client] = next(self._turn)
        return number

    def make_room(self) -> None:
        """Wait on the host until fewer tasks than the limit are pending."""
        while self._most is not None and len(self._pending) >= self._most:
            try:
                task = self._pending.popleft()
            # Another thread has taken the last task.
            except IndexError:
                return
            try:
                task.synchronize()
            finally:
                # If the work of the task failed, `settle` cannot release its memory. The task is no longer in the list, so its
                # memory is abandoned.
                if not task.settle():
                    task.region.abandon()

    def add(self, task: Task) -> None:
        """Keep a task until the GPU has passed its end."""
        self._pending.append(task)

    def future(self, task: Task, value: Callable[[], T]) -> "HostFuture[T]":
        """Return a future whose result ``value()`` computes after the task."""
        return HostFuture(task, value, self._threads)


def _running_task() -> Any:
    """Return the task of asyncio that runs in this thread, or None."""
    asyncio = modules.get("asyncio")
    # Without a running loop `current_task` raises an error, which would cost a request of a plain thread a microsecond. So this
    # code asks for the loop first.
    if asyncio is None or asyncio._get_running_loop() is None:  # noqa: SLF001 - asyncio exports it for this
        return None
    return asyncio.current_task()


class HostFuture(StreamFuture[T]):
    """A future with its result on the host.

    A thread that asks for the result without a timeout waits for the GPU itself. For callbacks, awaits and timeouts, a thread of
    the executor waits.
    """

    def __init__(self, task: Task, value: Callable[[], T], threads: Executor) -> None:
        super().__init__(task)
        self._value, self._threads = value, threads
        # Under this lock a single thread ends the future, and other threads wait until it has. The lock is reentrant, because
        # callbacks run under it and may ask for the result again. No other code of the user runs under it.
        self._ending = threading.RLock()
        self._awaited = False
        self.set_running_or_notify_cancel()

    def _end(self) -> None:
        """Wait for the GPU, and set the result."""
        with self._ending:
            if Future.done(self):
                return
            task = self._task
            assert task is not None
            try:
                task.synchronize()
                value = self._value()
            except Exception as error:
                task.device.status.diagnose(error)
                self.set_exception(error)
            else:
                self.set_result(value)
            finally:
                del self._value

    def _hand_over(self) -> None:
        """Let a thread of the executor end the future."""
        if not self._awaited and not Future.done(self):
            self._awaited = True
            self._threads.submit(self._end)

    def result(self, timeout: float | None = None) -> T:
        """Return the function's value in arrays on the host; see `StreamFuture.result`."""
        if timeout is None:
            self._end()
        else:
            self._hand_over()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call, or None."""
        if timeout is None:
            self._end()
        else:
            self._hand_over()
        return super().exception(timeout)

    def done(self) -> bool:
        """Return whether the result is on the host."""
        if not super().done() and self._task is not None and self._task.passed:
            self._end()
        return super().done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function when the future is done, as `concurrent.futures.Future` does."""
        self._hand_over()
        super().add_done_callback(fn)

    # `concurrent.futures.wait` reads this attribute to add its waiters. After that, a thread of the executor has to end the
    # future.
    @property
    def _waiters(self) -> list[Any]:
        self._hand_over()
        return self._waiting

    @_waiters.setter
    def _waiters(self, _: list[Any]) -> None:
        self._waiting: list[Any] = []
