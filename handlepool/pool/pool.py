"""The pool, as users see it; what the library needs of it beside that is in `handlepool.pool.internals`."""

import functools
import os
from types import TracebackType
from typing import Any

from handlepool._util.arguments import at_least, flag
from handlepool._util.names import shown
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.errors import ArgumentError
from handlepool.pool.internals import PoolInternals
from handlepool.pool.plan_directory import VARIABLE, PlanDirectory
from handlepool.pool.stats import Stats

CHECK_VARIABLE = "HANDLEPOOL_CHECK"
_OFF = ("", "0", "off", "no", "false")


class HandlePool:
    """cuDNN handles and workspaces for each (thread, device, stream), made when first asked for.

    Parameters
    ----------
    driver : {"cuda", "host"} or Driver, optional
        As `handlepool.drivers.choose` decides where none is given. Loaded at the first use, not here.
    scratch_limit : int, optional
        Most bytes of scratch on each device, all slots together.
    idle_limit : int
        Most handles of one device that are kept, beside the side slots', for threads and streams to come.
    plan_limit : int
        Most compiled graphs of one device that are kept.
    check : bool, optional
        Whether to check what cuDNN and CuPy leave unchecked: that a handle is used by the thread that owns it, a workspace on its
        own stream, and ``cupy.fft`` and ``cupy.random`` not in concurrent branches; that operations, and branches that return
        new arrays, change none of their arguments but what is declared, for which the host waits for them; on the host driver
        also that any two accesses to an array, one of which writes, are ordered. Where it is not given, the environment variable
        ``HANDLEPOOL_CHECK`` decides: unset, ``0``, ``off``, ``no`` and ``false`` are off. Calls cost more with checks, and
        nothing more without.
    strict : bool
        Whether arrays of the host driver refuse what CuPy's refuse: to become NumPy's by themselves, and NumPy's as operands
        beside them. Such pools share a driver of their own. CuPy's arrays are strict without it.
    plan_directory : str or path, optional
        Where compiled graphs are kept for the processes to come, which then plan nothing. Made for this user alone where there is
        none; a relative path is from where the process is now. Where it is not given, the environment variable
        ``HANDLEPOOL_PLAN_DIRECTORY`` decides. Its files are looked for by graph, settings, versions and device; one that is
        damaged, or of something else, is passed over. It is an ArgumentError where others may write to it.

    Notes
    -----
    A pool lives until `close`, or to the end of a ``with`` statement over it. Losing the last reference to it closes nothing:
    destroying handles calls CUDA, which must not happen whenever the collector likes.

    The attribute ``internals`` is the library's own and not public: it may change without notice.
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
        driver = getattr(driver, "__dict__", {}).get("checked_driver", driver)  # of a pool that checks
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

    def get_handle(self, stream: Any = None) -> Handle:
        """Return this thread's cuDNN handle for a stream of the current device.

        Parameters
        ----------
        stream : stream, optional
            None for CuPy's current stream; a CuPy stream, any object with ``__cuda_stream__`` (torch from 2.10 on, JAX,
            cuda.core), or a ``cudaStream_t`` as an integer. CuPy does not see torch's current stream: pass
            ``torch.cuda.current_stream()``.

        Returns
        -------
        cudnn.Handle
            Bound to the stream. It belongs to the calling thread and stays the pool's. Do not destroy it, and do not keep it for
            another thread or stream: ask again, which costs next to nothing.

        Raises
        ------
        DeviceMismatchError
            When the stream is one of another device than the current one.
        StreamError
            When it is no stream.
        PoolClosedError, ForkedProcessError, PoisonedContextError, OutOfMemoryError, DriverNotAvailableError
            As their names say; each message names the remedy.
        """
        return self.internals.slot(stream).handle

    def get_workspace(self, nbytes: int, stream: Any = None) -> Any:
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
            The caller's until the next `get_workspace` of the same thread, device and stream; 256-byte aligned, never shared
            with another stream, nor with the scratch of our own launches. Contents are not kept. A branch for which no side
            stream is left runs on its caller's stream, and asks for the caller's.

        Raises
        ------
        ArgumentError
            For a size that is negative or no integer.
        OutOfMemoryError
            When neither the scratch limit nor the device allows it.
        """
        pool = self.internals
        slot = pool.slot(stream)
        try:
            return slot.workspace(nbytes)
        except Exception as error:
            pool.status.diagnose(error)
            if pool.status.closed:
                # Whatever went wrong, a close took the slot and its scratch meanwhile.
                pool.status.check()
            raise

    def prewarm(self, *, states: int = 0, workspace: int = 0, stream: Any = None) -> None:
        """Make what first calls would make: this key's handle and scratch, and side slots for forks.

        Parameters
        ----------
        states : int
            Side slots to have on the current device, each with a handle (8 to 10 MiB, 1.3 ms) and ``workspace`` bytes.
        workspace : int
            Bytes of scratch for the launches of each.
        stream : stream, optional
            As in `get_handle`.

        Raises
        ------
        ArgumentError
            For a count or a size that is negative or no integer.
        OutOfMemoryError
            When the memory for it is not there.
        """
        states = at_least(0, "prewarm: states", states)
        workspace = at_least(0, "prewarm: workspace", workspace, " bytes")
        own = self.internals.slot(stream)
        own.reserve(workspace)
        self.internals.device(own.device).sides.prewarm(states, workspace)

    def trim(self, *, captured: bool = False) -> None:
        """Destroy what is idle: handles and scratch that no thread, stream or fork has, and blocks that were replaced.

        It also ends what was dropped, of whatever pool: forks that nobody left, and programs that nobody closed and whose last
        replay has passed.

        Parameters
        ----------
        captured : bool
            Whether to free the scratch of CUDA graphs, too, that somebody else than handlepool captured. *A graph that is
            replayed afterwards writes into freed memory*, and nothing tells whether one still lives. So do this only when every
            graph that was captured with this pool's workspaces or graph functions is gone, or will not be replayed again.
            Captures that are not over are left alone. But on a bare pointer or another library's stream object nobody can ask
            for that: end such captures before. ``stats()["scratch_bytes_captured"]`` says what would be freed.

        Raises
        ------
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say.
        """
        self.internals.trim(captured=captured)

    def cache_clear(self) -> None:
        """Forget every compiled graph; those in use live on with their users."""
        self.internals.plans.clear()

    def close(self) -> None:
        """Destroy all handles that are not in use, and refuse later calls.

        Later calls raise `PoolClosedError`. Scratch is freed with its handle.

        Any thread may call it, at any time, also in a finaliser and inside a branch. It waits for no other thread. A launch, a
        build or a branch that is under way goes on with its handle and scratch. These are destroyed by the next call of its
        thread, by the join, by a miss or a `trim` of another pool, or by another `close` of this one. What captures were given
        stays.

        That covers the calls of this library. A handle that a thread got by `get_handle`, and a workspace, are destroyed although
        the thread has them: let threads end first that execute cuDNN graphs by themselves.

        The default pool that was made when first asked for is everybody's. It destroys what is idle, and stays usable.
        """
        self.internals.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied: two would own the same handles."""
        raise TypeError("a HandlePool owns handles, streams and memory and cannot be copied or pickled; make another one")

    def __enter__(self) -> "HandlePool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def driver(self) -> Driver:
        """The driver, loaded on first use."""
        return self.internals.driver

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.internals.status.closed

    def stats(self, device: int | None = None) -> Stats:
        """Count what the pool holds and has done.

        Parameters
        ----------
        device : int, optional
            Ordinal; zeros where the device was not used. All devices together where none is given.

        Returns
        -------
        Stats
            A dictionary of counters by flat name, which `handlepool.pool.stats.MEANINGS` explains. Two can be subtracted.

        Raises
        ------
        ArgumentError
            For what is no ordinal.
        """
        return self.internals.stats(None if device is None else at_least(0, "stats: device", device))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "internals"]

    def __repr__(self) -> str:
        return repr(self.internals)
