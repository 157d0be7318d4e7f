"""Slots: one cuDNN handle and its scratch, bound to one stream. The thing that is pooled."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from handlepool.drivers.base import LEGACY_STREAM, Driver, Handle, Stream
from handlepool.errors import ArgumentError
from handlepool.workspace import EMPTY, DeviceScratch, Workspace

# The attribute `_handlepool` of a stream object holds each thread's slot for it; a thread's entry ends with the thread. It is a
# plain threading.local, with which a hit is 6 % faster than with a subclass.


def place(stream: Any, slot: "Slot | None") -> None:
    """Put this thread's slot where a hit finds it: on the stream object."""
    try:
        stream._handlepool.slot = slot
    except AttributeError:
        # Two threads that come here at once leave one of the two places; the other thread's next hit puts its slot back.
        stream._handlepool = threading.local()
        stream._handlepool.slot = slot


def placed(stream: Any) -> "Slot | None":
    """This thread's slot on a stream object."""
    return getattr(getattr(stream, "_handlepool", None), "slot", None)


def hits(pool: Any) -> tuple[Callable[..., Handle], Callable[[Driver], None]]:
    """Make the pool's `get_handle`, and what hands it the driver.

    A closure: its names are cells, and there is no method to bind, which on an H200's host takes 12 % off a hit.
    """

    # Until there is a driver: the first call loads it, which calls `use`.
    current_device: Callable[[], int] = lambda: pool.driver.current_device()  # noqa: E731
    current_stream: Callable[[int], Any] = lambda device: pool.driver.current_stream(device)  # noqa: E731

    @functools.wraps(pool.get_handle)
    def get_handle(stream: Any = None) -> Handle:
        try:
            device = current_device()
            slot = (current_stream(device) if stream is None else stream)._handlepool.slot
            handle: Handle = slot.handle
            if handle.stream is slot.pointer and slot.device == device and slot.owner is pool:
                return handle
        except AttributeError:
            pass
        return pool.slot(stream).handle

    def use(driver: Driver) -> None:
        nonlocal current_device, current_stream
        current_device, current_stream = driver.current_device, driver.current_stream

    return get_handle, use


class StreamWatch(weakref.ref[Any]):
    """A weak reference to a slot's stream object that knows the slot, for the callback when the stream has gone."""

    __slots__ = ("slot",)
    slot: "Slot"


class Slot:
    """One handle and its scratch, bound to one stream; in `ParallelStates.with_state`, the state.

    Attributes
    ----------
    handle : cudnn.Handle
        Bound to the slot's stream.
    device : int
        Ordinal of the device of handle, stream and scratch.
    pointer : int
        The stream's ``cudaStream_t``.
    """

    __slots__ = (
        "__weakref__",
        "_capture",
        "_driver",
        "_eager",
        "_handed",
        "_launching",
        "_scratch",
        "buffer",
        "device",
        "end_event",
        "handle",
        "key",
        "owner",
        "pointer",
        "pool",
        "side_stream",
        "start_event",
        "watch",
    )

    def __init__(self, pool: Any, driver: Driver, scratch: DeviceScratch, handle: Handle) -> None:
        self.pool = pool
        self.handle = handle
        self.device = scratch.device
        self._driver = driver
        self._scratch = scratch
        self.buffer = driver.launch_buffer()
        self._launching = Workspace()  # for the plans that we launch
        self._handed = Workspace()  # for get_workspace, so that what a caller holds never overlaps a launch (guarantee 5)
        self._eager: tuple[Workspace, Workspace] | None = None
        self._capture = 0
        self.pointer = -1
        self.key: Any = None
        self.owner: Any = None  # the pool, while the slot belongs to a thread or a fork
        self.watch: StreamWatch | None = None
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
        self.owner = self.pool

    def end(self) -> None:
        """Belong to nobody; no hit succeeds any more. Calls nothing, so a destructor may call it."""
        self.owner = None

    def __repr__(self) -> str:
        return f"<Slot device={self.device} stream={self.pointer:#x} scratch={self.scratch_bytes:,} bytes>"

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
            For a negative size.
        OutOfMemoryError
            With the bytes free, the bytes in all and what the pool holds.
        """
        if nbytes < 0:
            raise ArgumentError(f"a workspace of {nbytes} bytes; the size must be 0 or more")
        self._follow_capture()
        block = self._handed.block
        if block.nbytes < nbytes:
            block = self._handed.grow(self._scratch, nbytes, self.pointer, self._capture)
        return self._driver.scratch_array(block.pointer, nbytes, block)

    def reserve(self, nbytes: int) -> int:
        """Pointer to at least ``nbytes`` of scratch for a plan of ours; 0 for a plan that needs none."""
        if not nbytes:
            return 0
        self._follow_capture()
        block = self._launching.block
        if block.nbytes < nbytes:
            block = self._launching.grow(self._scratch, nbytes, self.pointer, self._capture)
        return block.pointer

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
        if not self._capture:
            self._eager = (self._launching, self._handed)
        self._launching, self._handed = Workspace(), Workspace()
        self._capture = capture

    def successor(self) -> "Slot":
        """A new slot with this one's handle and scratch; this one stays what it was, unbound.

        A slot object is bound once in its life, so that whoever still knows it as the last owner's (a dying thread, a weak
        reference's callback) can only ever unbind that owner.
        """
        self.forget_capture()
        heir = Slot(self.pool, self._driver, self._scratch, self.handle)
        heir._launching, heir._handed = self._launching, self._handed
        return heir

    def release_scratch(self) -> None:
        """Give the eager scratch back at once; for a slot that nobody uses."""
        self.forget_capture()
        for workspace in (self._launching, self._handed):
            self._scratch.free(workspace.block)
            workspace.block = EMPTY

    def forget_capture(self) -> None:
        """Go back to the scratch of eager work; what the capture was given stays the capture's."""
        if self._eager is not None:
            (self._launching, self._handed), self._eager = self._eager, None
        self._capture = 0
