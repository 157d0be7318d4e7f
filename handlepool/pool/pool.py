"""Define the public class of pools.

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

    The pool makes a handle or workspace on the first request for it.

    Parameters
    ----------
    driver : {"cuda", "host"} or Driver, optional
        By default `handlepool.drivers.choose` decides. The driver is loaded at the first use of the pool.
    scratch_limit : int, optional
        The maximum number of scratch bytes on each device, for all slots together. By default there is no limit.
    idle_limit : int
        The maximum number of idle handles on each device, which the pool keeps for later threads and streams. Handles of side
        slots do not count.
    plan_limit : int
        The maximum number of compiled graphs that the pool keeps for each device.
    check : bool, optional
        Whether to check the following rules, which cuDNN and CuPy leave unchecked. Only the owning thread may use a handle.
        Only a workspace's own stream may use it. Concurrent branches must not use ``cupy.fft`` or ``cupy.random``. An
        operation, or a branch that returns new arrays, may change only the arguments that it declares. For this check the host
        waits for the operation or branch. On the host driver, any two accesses to an array must be ordered if either writes. By
        default, the environment variable ``HANDLEPOOL_CHECK`` decides: unset, ``0``, ``off``, ``no`` and ``false`` mean no
        checks. Without checks, calls cost nothing extra.
    strict : bool
        Whether arrays of the host driver refuse implicit conversion to NumPy, and refuse NumPy arrays as operands beside them.
        CuPy's arrays always refuse both. All strict pools share one driver, and pools that are not strict share another.
    plan_directory : str or path, optional
        Directory that keeps compiled graphs for later processes, which then need not plan them again. The pool makes a missing
        directory for this user alone. A relative path is resolved at once. By default, the environment variable
        ``HANDLEPOOL_PLAN_DIRECTORY`` decides. A file is found by graph, settings, versions and device. A damaged or foreign
        file is ignored. A directory that other users may write to raises ArgumentError.

    Notes
    -----
    A pool lives until `close`, or to the end of a ``with`` statement over the pool. Dropping the last reference does not close
    it. Closing destroys handles, which calls CUDA, and the collector might do so at a bad time.

    The attribute ``internals`` is not public and may change without notice.
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
        # The argument may be the driver of a pool with checks, which is a wrapper. The new pool needs the inner driver.
        driver = getattr(driver, "__dict__", {}).get("checked_driver", driver)
        made = hasattr(type(driver), "current_device")
        if not (driver is None or isinstance(driver, str) or made):
            raise ArgumentError(f"HandlePool(driver={shown(driver)}): pass 'cuda', 'host', a driver object, or None")
        if strict and made:
            raise ArgumentError(
                "HandlePool(strict=True) cannot make an existing driver strict: pass HostDriver(strict=True) as the driver, "
                "without strict="
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
            raise ArgumentError(f"the environment variable {VARIABLE} names an unusable path: {error}") from error

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
            A handle that is bound to the stream. The pool owns the handle, so do not destroy it. Only the calling thread may
            use it, and only for this stream. For another thread or stream, call `get_handle` again, which costs next to
            nothing.

        Raises
        ------
        DeviceMismatchError
            When the stream does not belong to the current device.
        StreamError
            When the object is no stream.
        PoolClosedError, ForkedProcessError, PoisonedContextError, OutOfMemoryError, DriverNotAvailableError
            As their names tell. Each message gives the remedy.
        """
        return self.internals.slot(stream).handle

    def get_workspace(self, nbytes: int, stream: object = None) -> Any:
        """Return scratch memory for work on a stream of the current device.

        Parameters
        ----------
        nbytes : int
            Number of bytes, 0 or more.
        stream : stream, optional
            As in `get_handle`.

        Returns
        -------
        array, shape (nbytes,), uint8
            Memory for the caller's use until the next `get_workspace` of the same thread, device and stream. It is aligned to
            256 bytes. It overlaps neither the workspace of another stream nor the scratch of this library's launches. Contents
            are not kept. A branch that found no free side stream runs on its caller's stream, and gets the workspace of that
            stream.

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
                # A close may have taken the slot and its scratch meanwhile. Then the pool's own error replaces this error.
                pool.status.check()
            raise

    def prewarm(self, *, states: int = 0, workspace: int = 0, stream: object = None) -> None:
        """Make handles and scratch before they are needed.

        The call makes the handle and scratch for this thread, device and stream, and side slots for forks. With side slots, it
        also loads a kernel. The first call of a function in a branch needs this kernel to measure the function's writes, and
        loading it then might wait for the device.

        Parameters
        ----------
        states : int
            Number of side slots to have on the current device. Each has a handle (8 to 10 MiB, made in 1.3 ms) and
            ``workspace`` bytes.
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
        # A branch that runs Python is measured at the first call of its function. The kernel that measures is loaded now.
        if states:
            driver = self.internals.driver
            with on_device(driver, own.device), driver.relaxed():
                driver.prepare_checksums()

    def trim(self, *, captured: bool = False) -> None:
        """Destroy idle handles, idle scratch, and blocks that were replaced.

        Idle handles and scratch belong to no thread, stream or fork. The call also cleans up after dropped objects of all
        pools: forks that were not left, and programs that were not closed. A dropped program is cleaned up only after its last
        replay has ended.

        Parameters
        ----------
        captured : bool
            Whether to free also the scratch of CUDA graphs that the user's code captured. *If such a graph is replayed
            afterwards, it writes into freed memory*, and the pool cannot detect whether it still exists. So pass True only if
            no graph that was captured with this pool's workspaces or graph functions will be replayed again. A capture under
            way keeps its scratch. But for a stream that was passed as a bare pointer, or as another library's object, the pool
            cannot detect a capture, so end such captures first. ``stats()["scratch_bytes_captured"]`` gives the bytes that the
            call would free.

        Raises
        ------
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say.
        """
        self.internals.trim(captured=captured)

    def cache_clear(self) -> None:
        """Forget every compiled graph.

        A graph that a launch or a program still uses lives on until its last use.
        """
        self.internals.plans.clear()

    def close(self) -> None:
        """Destroy all handles that are not in use, and refuse later calls.

        Later calls raise `PoolClosedError`. Scratch is freed with its handle.

        Any thread may call `close` at any time, also in a finalizer and inside a branch. The call waits for no other thread. A
        launch, a build or a branch under way keeps its handle and scratch until it ends. Both are destroyed later, by whichever
        comes first: the next call of that thread, the join of the branch, a miss or `trim` of another pool, or another `close`
        of this pool. The memory of captures stays.

        Only calls of this library are protected in this way. A handle from `get_handle` and a workspace from `get_workspace`
        are destroyed even while a thread uses them. So first let each thread end that executes cuDNN graphs by itself.

        All libraries of the process share the default pool that `default_pool` made. So its `close` destroys only idle handles
        and scratch, and the pool stays usable.
        """
        self.internals.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied: two pools would own the same handles."""
        raise TypeError("a HandlePool owns handles, streams and memory and cannot be copied or pickled; make another pool")

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
            Device ordinal. A device that was not used has only zeros. None counts all devices together.

        Returns
        -------
        Stats
            A dictionary of counters by flat name. `handlepool.pool.stats.MEANINGS` explains the names. Two results of `stats`
            can be subtracted.

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
