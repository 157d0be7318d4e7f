"""Allocate scratch memory: counted and limited per device.

This module keeps guarantee 5. Scratch does not come from CuPy's pool, because CuPy keys its arenas by stream pointers, and the
driver reuses these pointers. When a larger block replaces a block, the old block is *deferred*: an event that is recorded on
the block's stream tells when no work uses the old block any more. If the stream is gone, no event can be recorded, and
`Driver.free` waits for the device.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from handlepool._util.cleanup import do_all, take_each
from handlepool.drivers.executable import ALIGNMENT
from handlepool.drivers.protocol import Driver
from handlepool.errors import OutOfMemoryError
from handlepool.pool.context import thread


class CapturedSlot(Protocol):
    """The part of a slot that `DeviceScratch` uses."""

    def still_in(self, capture: int, defer: Callable[[Any], None]) -> bool:
        """Return whether the slot's stream takes part in a capture.

        If that is unknown, ``defer`` takes the slot from its owner.
        """


_log = logging.getLogger("handlepool")


@dataclass(frozen=True, slots=True)
class ScratchBlock:
    """A block of device memory, owned by one workspace at a time.

    It has ``nbytes`` bytes at ``pointer``.
    """

    pointer: int
    nbytes: int


EMPTY = ScratchBlock(0, 0)


class DeviceScratch:
    """All scratch of one device.

    The caller makes that device current before each method call.

    Parameters
    ----------
    driver : Driver
        The source of the memory.
    device : int
        The ordinal, for messages.
    limit : int or None
        The maximum number of bytes that may be allocated at the same time; None for no limit.
    release_idle : callable
        ``release_idle()`` frees the scratch of idle slots. It is called once if an allocation fails, before the second try.
    describe : callable
        ``describe()`` returns the pool's holdings, for the message of an error.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        limit: int | None,
        release_idle: Callable[[], None],
        describe: Callable[[], str],
    ) -> None:
        self.driver = driver
        self.device = device
        self.limit = limit
        self.nbytes = 0
        self.peak = 0
        self._release_idle = release_idle
        self._describe = describe
        # The lock guards only the two counts. No driver is called under it.
        self._lock = threading.RLock()
        # Each entry has a block, and the event to wait for before the block is freed. The event None means that an earlier try
        # to free the block failed.
        self.deferred_blocks: deque[tuple[Any, ScratchBlock]] = deque()
        # These are the blocks of users' captures, by capture id. They stay, because the graph may be replayed at any time.
        self.captured: dict[int, list[ScratchBlock]] = {}
        # These are the blocks of programs, by capture id. A program frees its blocks when it is closed.
        self.recorded: dict[int, list[ScratchBlock]] = {}
        self.captures_met = 0
        # For each capture id, these are the slots that have noticed the capture and not its end.
        self._capturing: dict[int, set[CapturedSlot]] = {}

    def allocate(self, nbytes: int) -> ScratchBlock:
        """Return a block of at least ``nbytes`` bytes.

        The size of the block is a multiple of 256 bytes.

        Raises
        ------
        OutOfMemoryError
            When the limit or the device does not allow it, even after idle scratch and CuPy's free blocks were freed.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        block = self._try(size)
        if block is None:
            self._release_idle()
            with self.driver.relaxed():
                self.driver.release_cached()
            block = self._try(size)
        if block is None:
            with self.driver.relaxed():
                free, total = self.driver.memory_info()
            limit = "no limit" if self.limit is None else f"a limit of {self.limit:,} bytes"
            raise OutOfMemoryError(
                f"{size:,} bytes of scratch on device {self.device} were refused: {free:,} of {total:,} bytes are free, and "
                f"the pool holds {self.nbytes:,} bytes of scratch under {limit} ({self._describe()}). Raise scratch_limit, give "
                f"a workspace_limit to the graphs, use fewer streams, or free arrays{self.driver.memory_advice}"
            )
        return block

    def _try(self, size: int) -> ScratchBlock | None:
        # The bytes are counted before they are allocated, so that two threads together cannot exceed the limit.
        with self._lock:
            if self.limit is not None and self.nbytes + size > self.limit:
                return None
            self.nbytes += size
        try:
            with self.driver.relaxed():
                pointer = self.driver.allocate(size)
        except MemoryError:
            self._uncount(size)
            return None
        except BaseException:
            self._uncount(size)
            raise
        with self._lock:
            self.peak = max(self.peak, self.nbytes)
        _log.debug("device %d: %d bytes of scratch allocated, %d in all", self.device, size, self.nbytes)
        return ScratchBlock(pointer, size)

    def _uncount(self, size: int) -> None:
        with self._lock:
            self.nbytes -= size

    def defer_free(self, block: ScratchBlock, stream: int) -> None:
        """Free a block once ``stream`` has finished its work so far.

        The stream must be alive.
        """
        if not block.nbytes:
            return
        with self.driver.relaxed():
            event = self.driver.create_event()
            try:
                self.driver.record_event(event, stream)
            except BaseException:
                self.destroy_event(event)
                raise
        self.deferred_blocks.append((event, block))

    def exchange(self, workspace: "Workspace", new: ScratchBlock) -> ScratchBlock:
        """Replace a workspace's block, and return the former block.

        The exchange is atomic, so a `close` at the same time cannot take the same block.
        """
        with self._lock:
            old, workspace.block = workspace.block, new
        return old

    def destroy_event(self, event: object) -> None:
        """Destroy an event; if that fails, `free_passed` tries again."""
        try:
            with self.driver.relaxed():
                self.driver.destroy_event(event)
        # As in `free`, an interrupt is not caught.
        except Exception:
            self.deferred_blocks.append((event, EMPTY))
            raise

    def free(self, block: ScratchBlock) -> None:
        """Free a block now; if that fails, `free_passed` tries again.

        The driver waits for work that may still use the block.
        """
        if not block.nbytes:
            return
        try:
            with self.driver.relaxed():
                self.driver.free(block.pointer)
        # An interrupt is not caught. It may come after the block was freed, and a second try would free the block twice. So an
        # interrupt may lose the block.
        except Exception:
            self.deferred_blocks.append((None, block))
            raise
        self._uncount(block.nbytes)
        _log.debug("device %d: %d bytes of scratch freed, %d in all", self.device, block.nbytes, self.nbytes)

    # Captures

    @property
    def captured_nbytes(self) -> int:
        """Return the bytes of blocks that belong to users' captures."""
        return sum(block.nbytes for blocks in list(self.captured.values()) for block in list(blocks))

    def enter_capture(self, capture: int, slot: CapturedSlot) -> None:
        """Note that a slot's stream takes part in a capture."""
        if thread.recording is not None:
            thread.recording.scratch.add(self)
        with self._lock:
            if capture not in self._capturing:
                self.captures_met += 1
            self._capturing.setdefault(capture, set()).add(slot)

    def leave_capture(self, capture: int, slot: CapturedSlot, *, over: bool) -> None:
        """Note that a slot has left a capture.

        Without ``over``, the capture may still be under way. Then `free_captured` asks this slot again.
        """
        if not over and capture in self.captured:
            return
        with self._lock:
            slots = self._capturing.get(capture)
            if slots is not None:
                slots.discard(slot)
                if not slots:
                    del self._capturing[capture]

    @property
    def recorded_nbytes(self) -> int:
        """Return the bytes of blocks that belong to programs."""
        return sum(block.nbytes for blocks in list(self.recorded.values()) for block in list(blocks))

    def keep_recorded(self, capture: int) -> None:
        """Move a capture's blocks to the program that is being recorded.

        Call this while the capture is under way.
        """
        blocks = self.captured.pop(capture, None)
        if blocks is not None:
            self.recorded[capture] = blocks

    def free_recorded(self, capture: int) -> None:
        """Free the blocks of a program whose graph is gone."""
        do_all(partial(self.free, block) for block in take_each(self.recorded.get(capture, [])))
        self.recorded.pop(capture, None)

    def free_captured(self, defer: Callable[[Any], None]) -> None:
        """Free the blocks of captures that are over.

        See `HandlePool.trim` for the risk, and `Slot.still_in` for ``defer``.
        """
        for capture in list(self.captured):
            with self._lock:
                slots = list(self._capturing.get(capture, ()))
            # Every slot is asked, even after a first answer of True. For a slot that cannot tell, the call has an effect: it
            # takes the slot from its owner.
            under_way = [slot.still_in(capture, defer) for slot in slots]
            if any(under_way):
                continue
            with self._lock:
                self._capturing.pop(capture, None)
            do_all([partial(self.free, block) for block in self.captured.pop(capture, [])])

    def free_passed(self, *, wait: bool = False) -> None:
        """Free the deferred blocks whose events have passed.

        With ``wait``, wait for the other events and free their blocks too.
        """
        for _ in range(len(self.deferred_blocks)):
            try:
                event, block = self.deferred_blocks.popleft()
            # Another thread has taken the last block.
            except IndexError:
                return
            if event is None:
                self.free(block)
            # This entry is an event whose destruction failed. The event may have been recorded in a capture, so the host must
            # not wait for it.
            elif not block.nbytes:
                self.destroy_event(event)
            else:
                try:
                    with self.driver.relaxed():
                        passed = wait or self.driver.event_done(event)
                        if wait:
                            self.driver.synchronize_event(event)
                except BaseException:
                    # The block stays in the queue, and a later call tries again.
                    self.deferred_blocks.append((event, block))
                    raise
                if not passed:
                    self.deferred_blocks.append((event, block))
                    continue
                do_all([partial(self.free, block), partial(self.destroy_event, event)])


class Workspace:
    """The scratch of a slot for one purpose.

    A workspace only grows. When it grows, it loses its contents.

    Attributes
    ----------
    block : ScratchBlock
        The present block.
    """

    __slots__ = ("block",)

    def __init__(self) -> None:
        self.block = EMPTY

    def grow(self, scratch: DeviceScratch, nbytes: int, stream: int, capture: int) -> ScratchBlock:
        """Grow to at least ``nbytes``, and return the block.

        The old block lives until the work of ``stream`` so far has ended. Under a capture, the work captured so far uses the
        old block. The block then stays as long as this work may be replayed.
        """
        try:
            new = scratch.allocate(nbytes)
        except OutOfMemoryError:
            if capture or not self.block.nbytes:
                raise
            # Contents are not kept, so the old block can be given up before the new block is allocated. `allocate` waits for
            # the old block's stream and frees the old block.
            self._replace(scratch, EMPTY, stream)
            new = scratch.allocate(nbytes)
        if capture:
            scratch.captured.setdefault(capture, []).append(new)
            self.block = new
        else:
            self._replace(scratch, new, stream)
        return self.block

    def _replace(self, scratch: DeviceScratch, new: ScratchBlock, stream: int) -> None:
        """Replace the present block, and free it after its last use.

        This method reads the present block itself, because a finalizer may have grown the workspace since the caller read it.
        """
        old = scratch.exchange(self, new)
        try:
            scratch.defer_free(old, stream)
        except BaseException:
            scratch.free(scratch.exchange(self, old))
            raise
