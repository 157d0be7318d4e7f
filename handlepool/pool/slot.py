"""Slots: one cuDNN handle and its scratch, bound to one stream. The thing that is pooled."""

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
    """Put this thread's slot where a hit finds it: on the stream object, in a plain threading.local.

    A hit is 6 % faster with that than with a subclass. A thread's entry ends with the thread. Of two pools that are used on one
    stream in turn, the last one's slot is there; a miss puts the other one's back.
    """
    try:
        stream.handlepool.slot = slot
    except AttributeError:
        # Two threads that come here at once leave one of the two places; the other thread's next hit puts its slot back.
        # A close takes the place off the stream at any time.
        here = stream.handlepool = threading.local()
        here.slot = slot


def slot_on_stream(stream: object) -> "Slot | None":
    """Return this thread's slot on a stream object."""
    return getattr(getattr(stream, "handlepool", None), "slot", None)


def clear_stream(stream: object) -> None:
    """Take every thread's slot off a stream object, for a pool that is closed: the default streams' objects live on."""
    vars(stream).pop("handlepool", None)


class GetHandle(Protocol):
    """What `HandlePool.get_handle` is."""

    def __call__(self, stream: object = None) -> Handle:
        """Return this thread's handle for a stream."""


class ClosedHandle:
    """Stand in a slot for the handle that a closed pool took from it: whatever is asked of it raises `PoolClosedError`."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __getattr__(self, name: str) -> NoReturn:
        self._status.check()
        raise AttributeError(name)


UNOWNED = Status(lambda: None)
"""The status of no pool: no slot has it for its owner. (None is the owner of a slot that was released.)"""


def hits(missed: Callable[..., "Slot"]) -> tuple[GetHandle, Callable[..., "Slot"], Callable[[Any, Status, Any], None]]:
    """Make what returns this thread's handle and slot for a stream, and what tells the two whose they are to be.

    Closures: their names are cells, and there is no method to bind, which on an H200's host takes 12 % off a hit. Before
    their first use every call is a miss. `UNOWNED`, without functions of a driver, makes every call a miss again.
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
        except Exception:  # no slot there; or CUDA refuses, as in a forked child or after a lost context
            pass
        return missed(stream).handle

    def find(stream: Any = None) -> Slot:
        try:
            device = current_device()
            slot: Slot = (current_stream(device) if stream is None else stream).handlepool.slot
            if slot.handle.stream is slot.pointer and slot.owner is status and slot.device == device:
                return slot
        except Exception:  # no slot there; or CUDA refuses, as in a forked child or after a lost context
            pass
        return missed(stream)

    def use(stream: object, owner: Status, device: object) -> None:
        nonlocal status, current_device, current_stream
        current_device = None  # until the last line every call is a miss
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
        Its pool's, while the slot belongs to a thread or a fork.
    buffer : object
        The driver's `launch_buffer`, for one launch at a time.
    busy : bool
        Whether a launch is being made with its buffer and scratch.
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
        # A finaliser that the collector runs inside a launch is refused another one: both would use buffer and scratch.
        self.busy = False
        # The first is for the plans that we launch, the second for get_workspace, so that what a caller holds never overlaps a
        # launch (guarantee 5).
        self._launching, self._handed = workspaces or (Workspace(), Workspace())
        self._eager: tuple[Workspace, Workspace] | None = None
        self._capture = 0
        # The handle, once a closed pool has put a `ClosedHandle` in its place.
        self._released_handle: Handle | None = None
        self.pointer = -1
        self.key: Hashable = None
        self.owner: Status | None = None
        self.watch: weakref.ref[Any] | None = None  # to the stream's object; its callback leaves the slot behind
        self.side_stream: Stream | None = None  # held by side slots alone
        self.start_event: Any = None  # a side slot's two events: where a branch starts, where it ends
        self.end_event: Any = None

    @property
    def stream(self) -> Any:
        """The stream object, or the pointer where there is none."""
        if self.side_stream is not None:
            return self.side_stream
        stream = self.watch() if self.watch is not None else None
        return self.pointer if stream is None else stream

    def begin(self, pointer: int) -> None:
        """Belong to a thread or a fork: the handle is bound to ``pointer``, this very object."""
        self.pointer = pointer
        self.owner = self._status

    def end(self) -> None:
        """Belong to nobody; no hit succeeds any more. Calls nothing, so a destructor may call it."""
        self.owner = None

    def __reduce__(self) -> Any:
        """Refuse to be copied: two would own one handle."""
        raise TypeError("a slot owns a handle and scratch and cannot be copied or pickled; ask the pool for the slot of a stream")

    def __repr__(self) -> str:
        return f"<Slot device={self.device} stream={self.pointer:#x} scratch={self.scratch_bytes:,} bytes>"

    @property
    def intact(self) -> bool:
        """Whether the handle still is: nobody has destroyed it."""
        return self.handle.backend_handle is not None

    def replace_handle(self, handle: Handle) -> None:
        """Take a new handle for one that was destroyed."""
        self.handle = handle

    @contextmanager
    def in_launch(self) -> Iterator[Handle]:
        """Give the handle for a call, during which a `close` leaves handle and scratch to this thread.

        A launch does the same by itself, since this costs as much as a launch.
        """
        former = self.busy
        try:
            self.busy = True
            yield self.handle
        finally:
            self.busy = former

    def release_unless_busy(self, closed: Any) -> "Slot | None":
        """Take handle and scratch from the owner, unless a launch uses them.

        Return a new slot with both, or None where a launch is under way. It is for a pool that is closed.

        A launch sets `busy`, and then reads the slot's handle. This puts ``closed`` in the handle's place, and then reads `busy`.
        The interpreter runs one of these four steps at a time. So either this sees the launch and leaves the handle to it, or the
        launch finds ``closed``, which raises before anything is enqueued. A hit that finds ``closed`` misses. The launch and the
        hit pay nothing for that. A handle that `get_handle` returned before is the caller's to watch: no step of this library
        stands between the caller's ``execute`` and cuDNN.

        One thread at a time calls this, and no handle is replaced meanwhile.
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
        """Bytes of scratch that it holds for work outside captures."""
        launching, handed = self._eager or (self._launching, self._handed)
        return launching.block.nbytes + handed.block.nbytes

    def workspace(self, nbytes: int) -> Any:
        """Scratch memory on the slot's stream, the caller's until the next call.

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
            With the bytes free, the bytes in all and what the pool holds.
        """
        if type(nbytes) is not int or nbytes < 0:
            nbytes = at_least(0, "workspace nbytes", nbytes, " bytes")
        self._follow_capture()
        block = self._handed.block
        if block.nbytes < nbytes:
            block = self._grow(self._handed, nbytes)
        return self._driver.scratch_array(block.pointer, nbytes, block)

    def reserve(self, nbytes: int) -> int:
        """Pointer to at least ``nbytes`` of scratch for a plan of ours; 0 for a plan that needs none."""
        if not nbytes:
            return 0
        self._follow_capture()
        block = self._launching.block
        if block.nbytes < nbytes:
            block = self._grow(self._launching, nbytes)
        return block.pointer

    def _grow(self, workspace: Workspace, nbytes: int) -> ScratchBlock:
        block = workspace.grow(self._scratch, nbytes, self.pointer, self._capture)
        if self._status.closed:  # in this order: `close` says so first and takes the scratch then, so that one of us sees it
            self.release_scratch()
            self._status.check()
        return block

    def _follow_capture(self) -> None:
        """Keep what a capture is given apart from what eager work uses (guarantee 9): scratch of its own for each capture."""
        if self.pointer == LEGACY_STREAM:  # cannot be captured, and asking is an error while another stream is
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
        """Whether the slot's stream takes part in a capture that the slot was last seen in, as far as any thread can tell.

        Where nobody can, ``defer`` takes the slot from its owner.
        """
        stream = self.side_stream or (self.watch() if self.watch is not None else None)
        if self.pointer == PER_THREAD_STREAM:  # means another stream in this thread
            return True
        if stream is None:  # a bare pointer may be that of a destroyed stream, which must not be asked
            defer(self)
            return False
        return self._driver.capture_id(self.pointer) == capture

    def successor(self) -> "Slot":
        """Return a new slot with this one's handle and scratch; this one stays what it was, unbound.

        A slot object is bound once in its life, so that whoever still knows it as the last owner's (a dying thread, a weak
        reference's callback) can only ever unbind that owner.
        """
        return self._successor(self.handle)

    def _successor(self, handle: Any) -> "Slot":
        self.forget_capture()
        return type(self)(self._status, self._driver, self._scratch, handle, (self._launching, self._handed))

    def release_scratch(self) -> None:
        """Give the eager scratch back at once; for a slot that nobody uses."""
        self.forget_capture()
        blocks = [self._scratch.exchange(workspace, EMPTY) for workspace in (self._launching, self._handed)]
        do_all([partial(self._scratch.free, block) for block in blocks])

    def forget_capture(self, *, over: bool = True) -> None:
        """Go back to the scratch of eager work; what the capture was given stays the capture's, which may not be over."""
        if self._eager is not None:
            (self._launching, self._handed), self._eager = self._eager, None
        if self._capture:
            self._scratch.leave_capture(self._capture, self, over=over)
            self._capture = 0


def bind_to_thread(slot: Slot) -> None:
    """Make a leased side slot this thread's: a hit of `get_handle` on its stream gives its handle."""
    slot.begin(slot.pointer)
    put_on_stream(slot.side_stream, slot)


def unbind(slot: Slot) -> None:
    """End `bind_to_thread`."""
    slot.end()
    put_on_stream(slot.side_stream, None)
