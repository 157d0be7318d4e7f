"""Define the slot, the pooled object: one handle, its scratch, one stream."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

from handlepool._util.arguments import at_least
from handlepool._util.cleanup import do_all
from handlepool.drivers.executable import Executable
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM, Handle, Stream
from handlepool.errors import OwnershipError
from handlepool.pool.status import Status
from handlepool.pool.workspace import EMPTY, DeviceScratch, ScratchBlock, Workspace


def put_on_stream(stream: Any, slot: "Slot | None") -> None:
    """Put this thread's slot on the stream object.

    A hit finds the slot on the stream object. The object's attribute ``handlepool`` is a plain threading.local, because a
    subclass would make a hit 6 % slower. A thread's entry ends with the thread. If two pools use one stream in turn, the stream
    object has only the slot of the last pool. A call of the other pool then misses, and puts that pool's slot on the stream
    object.
    """
    try:
        stream.handlepool.slot = slot
    except AttributeError:
        # The stream object has no threading.local yet, or a close has removed it. If two threads add one at once, one thread's
        # slot is lost. That thread's next call misses, and puts its slot back.
        here = stream.handlepool = threading.local()
        here.slot = slot


def slot_on_stream(stream: object) -> "Slot | None":
    """Return this thread's slot on a stream object."""
    return getattr(getattr(stream, "handlepool", None), "slot", None)


def clear_stream(stream: object) -> None:
    """Remove the slots of all threads from a stream object.

    A closed pool calls this for the default streams, whose objects live on.
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
"""A status that belongs to no pool and owns no slot.

A hit compares this status with the owner of a slot, and never finds the two equal. None cannot serve for this, because the owner
of a released slot is None.
"""


def hits(missed: Callable[..., "Slot"]) -> tuple[GetHandle, Callable[..., "Slot"], Callable[[Any, Status, Any], None]]:
    """Make the hit functions, which find slots without a lock.

    The first function returns this thread's handle for a stream, and the second returns the slot of that handle. The third
    function binds both to a pool.

    The functions are closures, because a hit by a closure is 12 % faster than by a bound method (measured on the host of an
    H200). Before they are bound to a pool, every call is a miss. Binding them to `UNOWNED`, without functions of a driver,
    makes every call a miss again.
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
        # The stream may have no slot. CUDA may also raise, as in a forked child or after a lost context. In both cases the call
        # is a miss.
        except Exception:
            pass
        return missed(stream).handle

    def find(stream: Any = None) -> Slot:
        try:
            device = current_device()
            slot: Slot = (current_stream(device) if stream is None else stream).handlepool.slot
            if slot.handle.stream is slot.pointer and slot.owner is status and slot.device == device:
                return slot
        # As in `get_handle`, a call that raises here is a miss.
        except Exception:
            pass
        return missed(stream)

    def use(stream: object, owner: Status, device: object) -> None:
        nonlocal status, current_device, current_stream
        # While `current_device` is None, every call is a miss. So no call uses the stream function of one pool with the status
        # of another pool.
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
        # A finalizer that the collector runs inside a launch must not launch on the same slot. Both launches would use the same
        # buffer and scratch.
        self.busy = False
        # The first workspace serves this library's launches, the second `get_workspace`. So memory that a caller holds is never
        # the scratch of a launch (guarantee 5).
        self._launching, self._handed = workspaces or (Workspace(), Workspace())
        self._eager: tuple[Workspace, Workspace] | None = None
        self._capture = 0
        # A closed pool puts a `ClosedHandle` into `handle`, and the former handle here.
        self._released_handle: Handle | None = None
        self.pointer = -1
        self.key: Hashable = None
        self.owner: Status | None = None
        # A weak reference to the stream's object. When that object ends, the callback of the reference leaves the slot behind.
        self.watch: weakref.ref[Any] | None = None
        # Only a side slot owns its stream.
        self.side_stream: Stream | None = None
        # A side slot has two events, for the start and the end of a branch.
        self.start_event: Any = None
        self.end_event: Any = None

    @property
    def stream(self) -> Any:
        """Return the stream object, or the pointer if there is no object."""
        if self.side_stream is not None:
            return self.side_stream
        stream = self.watch() if self.watch is not None else None
        return self.pointer if stream is None else stream

    def begin(self, pointer: int) -> None:
        """Give the slot to a thread or a fork.

        The handle must be bound to the stream already. ``pointer`` and the handle's ``stream`` must be the identical integer
        object, because a hit compares both by ``is``.
        """
        self.pointer = pointer
        self.owner = self._status

    def end(self) -> None:
        """End the ownership, so that no later hit succeeds.

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

    def launch(
        self,
        name: str,
        executable: Executable,
        operands: Sequence[Any],
        check: Callable[[Sequence[int]], None] | None,
        repaired: Callable[["Slot"], "Slot"],
    ) -> None:
        """Enqueue an executable on the slot's stream.

        The executable uses the slot's handle and scratch. ``check`` is as in `Executable.launch`. If a caller has bound the
        handle to another stream, ``repaired`` binds it to the slot's stream again.

        Raises
        ------
        OwnershipError
            In a finalizer that interrupted another launch on this slot.
        """
        # A finalizer runs in the thread that it interrupts, so a lock could not keep the two launches apart.
        if self.busy:
            raise OwnershipError(
                f"{name} was called by a finalizer that Python ran during another launch on stream "
                f"{self.pointer:#x}, and both launches would use the same scratch: call {name} later, outside of finalizers"
            )
        try:
            # This assignment comes before the handle is read: see `release_unless_busy`.
            self.busy = True
            handle = self.handle
            # User code may have bound the handle to another stream.
            if handle.stream is not self.pointer:
                handle = repaired(self).handle
            size = executable.workspace_size
            executable.launch(handle, operands, self.reserve(size) if size else 0, check)
        finally:
            self.busy = False

    @contextmanager
    def in_launch(self) -> Iterator[Handle]:
        """Yield the handle for a call.

        During the call, a `close` leaves handle and scratch to this thread. `launch` sets `busy` in its own code instead,
        because this method would take as long as the launch itself.
        """
        former = self.busy
        try:
            self.busy = True
            yield self.handle
        finally:
            self.busy = former

    def release_unless_busy(self, closed: Any) -> "Slot | None":
        """Take handle and scratch from the owner, unless a launch uses them.

        Return a new slot with both, or None if a launch is under way. Only a closed pool calls this method.

        A launch sets `busy`, and then reads the slot's handle. This method puts ``closed`` in the handle's place, and then
        reads `busy`. The interpreter runs these four steps one at a time. So there are two cases. Either this method sees
        `busy` and leaves the handle to the launch. Or the launch finds ``closed``, which raises before anything is enqueued. A
        hit that finds ``closed`` misses. The launch and the hit pay nothing for this protection. The protection does not cover
        a handle that `get_handle` returned earlier, because no code of this library runs between the caller's ``execute`` and
        cuDNN.

        Only one thread at a time may call this method, and no other code may replace the handle meanwhile.
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
            Number of bytes, 0 or more. Contents are not kept from one call to the next.

        Returns
        -------
        array, shape (nbytes,), uint8
            Memory on the slot's device, aligned to 256 bytes.

        Raises
        ------
        ArgumentError
            For a size that is negative or no integer.
        OutOfMemoryError
            When the scratch limit or the device does not allow it. The message gives the free memory and the pool's holdings.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = at_least(0, "workspace nbytes", nbytes, " bytes")
        self._follow_capture()
        block = self._handed.block
        if block.nbytes < nbytes:
            block = self._grow(self._handed, nbytes)
        return self._driver.scratch_array(block.pointer, nbytes, block)

    def reserve(self, nbytes: int) -> int:
        """Return a pointer to scratch for a launch of this library.

        The scratch has at least ``nbytes`` bytes. The pointer is 0 if ``nbytes`` is 0.
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

        Eager work is work outside of captures. Each capture gets scratch of its own.
        """
        # The legacy stream cannot be captured. While another stream is being captured, asking the legacy stream is an error.
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
        """Return whether the slot's stream still takes part in a capture.

        A slot that was asked for by a bare pointer has no stream object. Its stream may be gone, so ``defer`` gets the slot, and
        the value is False.
        """
        stream = self.side_stream or (self.watch() if self.watch is not None else None)
        # The pointer of the per-thread default stream means a different stream in each thread. So this thread cannot ask for
        # the slot's stream, and the capture counts as under way.
        if self.pointer == PER_THREAD_STREAM:
            return True
        # Without a stream object, the stream may have been destroyed, and a destroyed stream must not be asked.
        if stream is None:
            defer(self)
            return False
        return self._driver.capture_id(self.pointer) == capture

    def successor(self) -> "Slot":
        """Return a new slot with this slot's handle and scratch.

        This slot stays unbound, because a slot object is bound only once in its life. A dying thread, or a weak reference's
        callback, may still know this slot. Either can then end only the ownership of this slot, not the ownership of the
        successor.
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
        """Leave a capture, and use the scratch of eager work again.

        The capture keeps its scratch. ``over=False`` means that the capture may still be under way.
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
    """Undo `bind_to_thread`."""
    slot.end()
    put_on_stream(slot.side_stream, None)
