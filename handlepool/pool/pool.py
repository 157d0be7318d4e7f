"""Offer the pool to users.

The library's own part of a pool is in `handlepool.pool.internals`.
"""

import functools
import os
from types import TracebackType
from typing import Any

from handlepool._util.arguments import at_least, flag
from handlepool._util.names import shown
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.errors import ArgumentError
from handlepool.pool.context import on_device
from handlepool.pool.internals import PoolInternals
from handlepool.pool.plan_directory import VARIABLE, PlanDirectory
from handlepool.pool.stats import Stats

CHECK_VARIABLE = "HANDLEPOOL_CHECK"
_OFF = ("", "0", "off", "no", "false")


class HandlePool:
    """A pool of cuDNN handles and workspaces per thread, device and stream.

    The pool makes each of them on the first request.

    Parameters
    ----------
    driver : {"cuda", "host"} or Driver, optional
        Without a value `handlepool.drivers.choose` decides. The driver is loaded at the first use, not here.
    scratch_limit : int, optional
        Most bytes of scratch on each device, all slots together.
    idle_limit : int
        Most handles of one device that the pool keeps for later threads and streams. Handles of side slots do not count.
    plan_limit : int
        Most compiled graphs of one device that the pool keeps.
    check : bool, optional
        Whether to check rules that cuDNN and CuPy leave unchecked. Only the owning thread may use a handle. A workspace is for
        its own stream. Concurrent branches must not use ``cupy.fft`` or ``cupy.random``. Operations, and branches that return
        new arrays, change only the arguments that they declare; the host waits for them to check this. On the host driver, any
        two accesses to an array must be ordered if either writes. Without a value, the environment variable
        ``HANDLEPOOL_CHECK`` decides: unset, ``0``, ``off``, ``no`` and ``false`` are off. Calls cost more with checks, and no
        more without.
    strict : bool
        Whether arrays of the host driver refuse the same uses as CuPy's arrays: implicit conversion to NumPy, and NumPy arrays
        as operands beside them. Such pools share a driver of their own. CuPy's arrays are strict without it.
    plan_directory : str or path, optional
        Directory that keeps compiled graphs for later processes, which then plan nothing. The pool makes a missing directory
        for this user alone. A relative path starts at the working directory of now. Without a value, the environment variable
        ``HANDLEPOOL_PLAN_DIRECTORY`` decides. The pool looks for files by graph, settings, versions and device, and passes over
        a damaged or foreign file. An ArgumentError is raised where other users may write to the directory.

    Notes
    -----
    A pool lives until `close`, or to the end of a ``with`` statement over it. Losing the last reference to it closes nothing,
    because destroying handles calls CUDA. That must not happen at a time the collector chooses.

    The attribute ``internals`` is the library's own and not public. It may change without notice.
    """

    def __init__(
        self,
        *,
        driver: str | Driver | None = None,
        scratch_limit: int | None = None,
        idle_limit: int = 32,
        plan_limit: int = 512,
        check: bool | None = None,
        strict: bool = False,
        plan_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        # A pool with checks wraps its driver, and the new pool needs the inner driver.
        driver = getattr(driver, "__dict__", {}).get("checked_driver", driver)
        made = hasattr(type(driver), "current_device")
        if not (driver is None or isinstance(driver, str) or made):
            raise ArgumentError(f"HandlePool(driver={shown(driver)}): pass 'cuda', 'host', a driver object, or None")
        if strict and made:
            raise ArgumentError(
                "HandlePool(strict=True) was given a driver that is made already: HostDriver(strict=True) makes a strict one"
            )
        self.internals = PoolInternals(
            driver,
            None if scratch_limit is None else at_least(0, "scratch_limit", scratch_limit, " bytes"),
            at_least(0, "idle_limit", idle_limit, " handles"),
            at_least(1, "plan_limit", plan_limit, " plan"),
            os.environ.get(CHECK_VARIABLE, "").lower() not in _OFF if check is None else flag("check", check),
            flag("strict", strict),
            self._plan_files(plan_directory),
        )
        self.get_handle = functools.update_wrapper(self.internals.get_handle, self.get_handle)  # type: ignore[method-assign]

    @staticmethod
    def _plan_files(path: str | os.PathLike[str] | None) -> PlanDirectory | None:
        if path is not None:
            return PlanDirectory(path)
        path = os.environ.get(VARIABLE)
        try:
            return PlanDirectory(path) if path else None
        except ArgumentError as error:
            raise ArgumentError(f"the environment variable {VARIABLE} names it: {error}") from error

    def get_handle(self, stream: object = None) -> Handle:
        """Return this thread's cuDNN handle for a stream of the current device.

        Parameters
        ----------
        stream : stream, int or None
            None for CuPy's current stream; a CuPy stream, any object with ``__cuda_stream__`` (torch from 2.10 on, JAX,
            cuda.core), or a ``cudaStream_t`` as an integer. CuPy does not see torch's current stream: pass
            ``torch.cuda.current_stream()``.

        Returns
        -------
        cudnn.Handle
            Bound to the stream. The calling thread may use it, and the pool owns it. Do not destroy it, and do not keep it for
            another thread or stream. Ask again, which costs next to nothing.

        Raises
        ------
        DeviceMismatchError
            When the stream belongs to another device than the current device.
        StreamError
            When the object is no stream.
        PoolClosedError, ForkedProcessError, PoisonedContextError, OutOfMemoryError, DriverNotAvailableError
            As their names say; each message names the remedy.
        """
        return self.internals.slot(stream).handle

    def get_workspace(self, nbytes: int, stream: object = None) -> Any:
        """Return scratch memory for work on a stream of the current device.

        Parameters
        ----------
        nbytes : int
            0 is legal.
        stream : stream, optional
            As in `get_handle`.

        Returns
        -------
        array, shape (nbytes,), uint8
            The caller's until the next `get_workspace` of the same thread, device and stream. It is 256-byte aligned. Another
            stream never shares it, nor does the scratch of our own launches. Contents are not kept. A branch without a free
            side stream runs on its caller's stream, and gets the scratch of its caller.

        Raises
        ------
        ArgumentError
            For a size that is negative or no integer.
        OutOfMemoryError
            When the scratch limit or the device does not allow it.
        """
        pool = self.internals
        slot = pool.slot(stream)
        try:
            return slot.workspace(nbytes)
        except Exception as error:
            pool.status.diagnose(error)
            if pool.status.closed:
                # A close took the slot and its scratch meanwhile. So the pool's own error replaces any other error.
                pool.status.check()
            raise

    def prewarm(self, *, states: int = 0, workspace: int = 0, stream: object = None) -> None:
        """Make the handles and scratch of first calls in advance.

        The call makes this key's handle and scratch, and side slots for forks. With side slots it also loads the kernel that
        measures a function's writes at its first call, since loading a kernel may wait for the device.

        Parameters
        ----------
        states : int
            Side slots to have on the current device, each with a handle (8 to 10 MiB, 1.3 ms) and ``workspace`` bytes.
        workspace : int
            Bytes of scratch for the launches of each side slot.
        stream : stream, optional
            As in `get_handle`.

        Raises
        ------
        ArgumentError
            For a count or a size that is negative or no integer.
        OutOfMemoryError
            When the device has too little memory.
        """
        states = at_least(0, "prewarm: states", states)
        workspace = at_least(0, "prewarm: workspace", workspace, " bytes")
        own = self.internals.slot(stream)
        own.reserve(workspace)
        self.internals.device(own.device).sides.prewarm(states, workspace)
        # Branches that run Python are measured at their first calls.
        if states:
            driver = self.internals.driver
            with on_device(driver, own.device), driver.relaxed():
                driver.prepare_checksums()

    def trim(self, *, captured: bool = False) -> None:
        """Destroy idle handles, idle scratch, and blocks that were replaced.

        Idle handles and scratch belong to no thread, stream or fork. The call also ends dropped objects of any pool: forks that
        were not left, and programs that were not closed and whose last replay has passed.

        Parameters
        ----------
        captured : bool
            Whether to free also the scratch of CUDA graphs that code outside of handlepool captured. *A graph that is replayed
            afterwards writes into freed memory*, and the pool cannot detect whether such a graph still lives. So do this only
            when every graph that was captured with this pool's workspaces or graph functions is gone, or will not be replayed
            again. Captures under way are left alone. But the pool cannot ask a bare pointer or another library's stream object
            for its capture, so end such captures first. ``stats()["scratch_bytes_captured"]`` says how many bytes the call
            would free.

        Raises
        ------
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say.
        """
        self.internals.trim(captured=captured)

    def cache_clear(self) -> None:
        """Forget every compiled graph; graphs in use live on with their users."""
        self.internals.plans.clear()

    def close(self) -> None:
        """Destroy all handles that are not in use, and refuse later calls.

        Later calls raise `PoolClosedError`. Scratch is freed with its handle.

        Any thread may call it at any time, also in a finalizer and inside a branch. It waits for no other thread. A launch, a
        build or a branch that is under way goes on with its handle and scratch. These are destroyed by the next call of its
        thread, by the join, by a miss or a `trim` of another pool, or by another `close` of this pool. The memory of captures
        stays.

        This covers the calls of this library. A handle that a thread got by `get_handle`, and a workspace, are destroyed
        although the thread has them. So let threads that execute cuDNN graphs by themselves end first.

        All libraries of the process share the default pool that `default_pool` made. Its `close` destroys idle handles and
        scratch, and the pool stays usable.
        """
        self.internals.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied: two pools would own the same handles."""
        raise TypeError("a HandlePool owns handles, streams and memory and cannot be copied or pickled; make another one")

    def __enter__(self) -> "HandlePool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def driver(self) -> Driver:
        """Return the driver; load it on the first use."""
        return self.internals.driver

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self.internals.status.closed

    def stats(self, device: int | None = None) -> Stats:
        """Count the pool's resources and events so far.

        Parameters
        ----------
        device : int, optional
            Ordinal; zeros where the device was not used. None counts all devices together.

        Returns
        -------
        Stats
            A dictionary of counters by flat name, which `handlepool.pool.stats.MEANINGS` explains. Two can be subtracted.

        Raises
        ------
        ArgumentError
            For an object that is no ordinal.
        """
        return self.internals.stats(None if device is None else at_least(0, "stats: device", device))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "internals"]

    def __repr__(self) -> str:
        return repr(self.internals)
