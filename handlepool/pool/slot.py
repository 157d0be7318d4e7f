"""Define the slot, the pooled object: one handle, its scratch, one stream."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

from handlepool._util.arguments import at_least
from handlepool._util.cleanup import do_all
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM, Handle, Stream
from handlepool.pool.status import Status
from handlepool.pool.workspace import EMPTY, DeviceScratch, ScratchBlock, Workspace


def put_on_stream(stream: Any, slot: "Slot | None") -> None:
    """Put this thread's slot on the stream object.

    A hit finds the slot there. The place is a plain threading.local: a hit is 6 % faster with it than with a subclass. A
    thread's entry ends with the thread. If two pools use one stream in turn, the slot of the last pool is there, and a miss
    puts the other pool's slot back.
    """
    try:
        stream.handlepool.slot = slot
    except AttributeError:
        # Two threads that come here at once leave a single place. The other thread's next hit puts its slot back. A
        # close takes the place off the stream at any time.
        here = stream.handlepool = threading.local()
        here.slot = slot


def slot_on_stream(stream: object) -> "Slot | None":
    """Return this thread's slot on a stream object."""
    return getattr(getattr(stream, "handlepool", None), "slot", None)


def clear_stream(stream: object) -> None:
    """Take every thread's slot off a stream object, for a closed pool.

    The objects of the default streams live on, so their slots must go.
    """
    vars(stream).pop("handlepool", None)


class GetHandle(Protocol):
    """The type of `HandlePool.get_handle`."""

    def __call__(self, stream: object = None) -> Handle:
        """Return this thread's handle for a stream."""


class ClosedHandle:
    """Stand in for a handle of a closed pool.

    The pool took the handle from its slot. Each use of this object raises `PoolClosedError`.
    """

    def __init__(self, status: Status) -> None:
        self._status = status

    def __getattr__(self, name: str) -> NoReturn:
        self._status.check()
        raise AttributeError(name)


UNOWNED = Status(lambda: None)
"""The status of no pool.

No slot has it as its owner. (The owner of a released slot is None.)
"""


def hits(missed: Callable[..., "Slot"]) -> tuple[GetHandle, Callable[..., "Slot"], Callable[[Any, Status, Any], None]]:
    """Make the hit functions of a pool, and their binder.

    The first returns this thread's handle for a stream, the second its slot. The third sets the pool that both belong to.

    The functions are closures. Their names are cells, and there is no method to bind, which takes 12 % off a hit on an H200's
    host. Before the binding every call is a miss. `UNOWNED`, without functions of a driver, makes every call a miss again.
    """
    status: Status | None = None
    current_device: Any = None
    current_stream: Any = None

    def get_handle(stream: object = None) -> Handle:
        try:
            device = current_device()
            slot: Slot = (current_stream(device) if stream is None else stream).handlepool.slot  # type: ignore[union-attr]
            handle = slot.handle
            if handle.stream is slot.pointer and slot.owner is status and slot.device == device:
                return handle
        # The stream may have no slot. Or CUDA refuses, as in a forked child or after a lost context.
        except Exception:
            pass
        return missed(stream).handle

    def find(stream: Any = None) -> Slot:
        try:
            device = current_device()
            slot: Slot = (current_stream(device) if stream is None else stream).handlepool.slot
            if slot.handle.stream is slot.pointer and slot.owner is status and slot.device == device:
                return slot
        # The reasons are the same as in `get_handle`.
        except Exception:
            pass
        return missed(stream)

    def use(stream: object, owner: Status, device: object) -> None:
        nonlocal status, current_device, current_stream
        # Until the last line every call is a miss, so no call sees half of the change.
        current_device = None
        current_stream, status = stream, owner
        current_device = device

    return get_handle, find, use


class Slot:
    """One handle and its scratch, bound to one stream.

    Attributes
    ----------
    handle : cudnn.Handle
        Bound to the slot's stream.
    device : int
        Ordinal of the device of handle, stream and scratch.
    pointer : int
        The stream's ``cudaStream_t``.
    owner : Status or None
        The status of the slot's pool while a thread or a fork owns the slot, else None.
    buffer : object
        The driver's `launch_buffer`, for one launch at a time.
    busy : bool
        Whether a launch uses the slot's buffer and scratch now.
    """

    __slots__ = (
        "__weakref__",
        "_capture",
        "_driver",
        "_eager",
        "_handed",
        "_launching",
        "_released_handle",
        "_scratch",
        "_status",
        "buffer",
        "busy",
        "device",
        "end_event",
        "handle",
        "key",
        "owner",
        "pointer",
        "side_stream",
        "start_event",
        "watch",
    )

    def __init__(
        self,
        status: Status,
        driver: Driver,
        scratch: DeviceScratch,
        handle: Handle,
        workspaces: tuple[Workspace, Workspace] | None = None,
    ) -> None:
        self._status = status
        self.handle = handle
        self.device = scratch.device
        self._driver = driver
        self._scratch = scratch
        self.buffer = driver.launch_buffer()
        # A finalizer that the collector runs inside a launch may not launch on the same slot, because both launches would use
        # buffer and scratch.
        self.busy = False
        # The first workspace is for our own plans, the second for get_workspace. So the scratch that a caller holds never
        # overlaps a launch (guarantee 5).
        self._launching, self._handed = workspaces or (Workspace(), Workspace())
        self._eager: tuple[Workspace, Workspace] | None = None
        self._capture = 0
        # The handle, once a closed pool has put a `ClosedHandle` in its place.
        self._released_handle: Handle | None = None
        self.pointer = -1
        self.key: Hashable = None
        self.owner: Status | None = None
        # A weak reference to the stream's object. Its callback leaves the slot behind.
        self.watch: weakref.ref[Any] | None = None
        # Only side slots hold a stream.
        self.side_stream: Stream | None = None
        # A side slot's two events: the start and the end of a branch.
        self.start_event: Any = None
        self.end_event: Any = None

    @property
    def stream(self) -> Any:
        """Return the stream object, or the pointer without an object."""
        if self.side_stream is not None:
            return self.side_stream
        stream = self.watch() if self.watch is not None else None
        return self.pointer if stream is None else stream

    def begin(self, pointer: int) -> None:
        """Give the slot to a thread or a fork.

        The handle is bound to ``pointer``, this very object.
        """
        self.pointer = pointer
        self.owner = self._status

    def end(self) -> None:
        """End the ownership, so that no hit succeeds any more.

        The method calls nothing, so a destructor may call it.
        """
        self.owner = None

    def __reduce__(self) -> Any:
        """Refuse to be copied: two slots would own one handle."""
        raise TypeError("a slot owns a handle and scratch and cannot be copied or pickled; ask the pool for the slot of a stream")

    def __repr__(self) -> str:
        return f"<Slot device={self.device} stream={self.pointer:#x} scratch={self.scratch_bytes:,} bytes>"

    @property
    def intact(self) -> bool:
        """Return whether the handle still exists: no caller has destroyed it."""
        return self.handle.backend_handle is not None

    def replace_handle(self, handle: Handle) -> None:
        """Take a new handle in place of a destroyed handle."""
        self.handle = handle

    @contextmanager
    def in_launch(self) -> Iterator[Handle]:
        """Yield the handle for a call.

        During the call, a `close` leaves handle and scratch to this thread. A launch does the same by itself, since this method
        costs as much as a launch.
        """
        former = self.busy
        try:
            self.busy = True
            yield self.handle
        finally:
            self.busy = former

    def release_unless_busy(self, closed: Any) -> "Slot | None":
        """Take handle and scratch from the owner, unless a launch uses them.

        Return a new slot with both, or None where a launch is under way. The method is for a closed pool.

        A launch sets `busy`, and then reads the slot's handle. This method puts ``closed`` in the handle's place, and then
        reads `busy`. The interpreter runs these four steps singly. So either this method sees the launch and leaves the handle
        to it, or the launch finds ``closed``, which raises before anything is enqueued. A hit that finds ``closed`` misses. The
        launch and the hit pay nothing for that. A handle that `get_handle` returned before is the caller's responsibility,
        because no step of this library runs between the caller's ``execute`` and cuDNN.

        One thread at a time calls this method, and no other call replaces the handle meanwhile.
        """
        handle: Any = self.handle
        if handle is not closed:
            self._released_handle = handle
            self.handle = closed
        if self.busy:
            return None
        self.end()
        return self._successor(self._released_handle)

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of scratch that the slot holds outside of captures."""
        launching, handed = self._eager or (self._launching, self._handed)
        return launching.block.nbytes + handed.block.nbytes

    def workspace(self, nbytes: int) -> Any:
        """Return scratch memory on the slot's stream, valid until the next call.

        Parameters
        ----------
        nbytes : int
            0 is legal. Contents are not kept from one call to the next.

        Returns
        -------
        array, shape (nbytes,), uint8
            On the slot's device; aligned to 256 bytes.

        Raises
        ------
        ArgumentError
            For a size that is negative or no integer.
        OutOfMemoryError
            With the bytes free, the bytes in all and the holdings of the pool.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = at_least(0, "workspace nbytes", nbytes, " bytes")
        self._follow_capture()
        block = self._handed.block
        if block.nbytes < nbytes:
            block = self._grow(self._handed, nbytes)
        return self._driver.scratch_array(block.pointer, nbytes, block)

    def reserve(self, nbytes: int) -> int:
        """Return a pointer to scratch for a plan of ours.

        The scratch has at least ``nbytes``. A plan that needs no scratch gets 0.
        """
        if not nbytes:
            return 0
        self._follow_capture()
        block = self._launching.block
        if block.nbytes < nbytes:
            block = self._grow(self._launching, nbytes)
        return block.pointer

    def _grow(self, workspace: Workspace, nbytes: int) -> ScratchBlock:
        block = workspace.grow(self._scratch, nbytes, self.pointer, self._capture)
        # `close()` sets `closed` before it takes the scratch, so either `close()` or this thread frees the block.
        if self._status.closed:
            self.release_scratch()
            self._status.check()
        return block

    def _follow_capture(self) -> None:
        """Keep captures and eager work on separate scratch (guarantee 9).

        Each capture gets scratch of its own.
        """
        # The legacy stream cannot be captured, and asking it is an error while another stream is being captured.
        if self.pointer == LEGACY_STREAM:
            return
        capture = self._driver.capture_id(self.pointer)
        if capture == self._capture:
            return
        if not capture:
            self.forget_capture()
            return
        if self._capture:
            self.forget_capture()
        self._eager = (self._launching, self._handed)
        self._launching, self._handed = Workspace(), Workspace()
        self._capture = capture
        self._scratch.enter_capture(capture, self)

    def still_in(self, capture: int, defer: "Callable[[Slot], None]") -> bool:
        """Return whether the slot's stream still takes part in its last capture.

        Where no thread can tell, ``defer`` takes the slot from its owner.
        """
        stream = self.side_stream or (self.watch() if self.watch is not None else None)
        # The per-thread default stream means another stream in this thread.
        if self.pointer == PER_THREAD_STREAM:
            return True
        # A bare pointer may be that of a destroyed stream, and asking a destroyed stream is not allowed.
        if stream is None:
            defer(self)
            return False
        return self._driver.capture_id(self.pointer) == capture

    def successor(self) -> "Slot":
        """Return a new slot with this slot's handle and scratch.

        This slot stays unbound. A slot object is bound once in its life. So a dying thread, or a weak reference's callback,
        that still knows the slot as its last owner's can only ever unbind that owner.
        """
        return self._successor(self.handle)

    def _successor(self, handle: Any) -> "Slot":
        self.forget_capture()
        return type(self)(self._status, self._driver, self._scratch, handle, (self._launching, self._handed))

    def release_scratch(self) -> None:
        """Free the eager scratch of an unused slot at once."""
        self.forget_capture()
        blocks = [self._scratch.exchange(workspace, EMPTY) for workspace in (self._launching, self._handed)]
        do_all([partial(self._scratch.free, block) for block in blocks])

    def forget_capture(self, *, over: bool = True) -> None:
        """Return to the scratch of eager work.

        The memory of the capture stays the capture's. With ``over=False`` the capture may still be under way.
        """
        if self._eager is not None:
            (self._launching, self._handed), self._eager = self._eager, None
        if self._capture:
            self._scratch.leave_capture(self._capture, self, over=over)
            self._capture = 0


def bind_to_thread(slot: Slot) -> None:
    """Bind a leased side slot to this thread.

    A hit of `get_handle` on its stream then returns its handle.
    """
    slot.begin(slot.pointer)
    put_on_stream(slot.side_stream, slot)


def unbind(slot: Slot) -> None:
    """End `bind_to_thread`."""
    slot.end()
    put_on_stream(slot.side_stream, None)
