"""Scratch memory: blocks of the driver's own, counted and limited per device, given back when their stream has passed.

Guarantee 5. Scratch does not come from CuPy's pool, whose arenas are keyed by a stream pointer that the driver hands out again.
A block that was replaced is *retired*: an event recorded on its stream says when nothing can touch it any more. A block whose
stream is gone has no such event; freeing it waits for the device, which `Driver.free` does.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from handlepool.drivers.base import Driver
from handlepool.errors import OutOfMemoryError

ALIGNMENT = 256  # cudaMalloc's own


@dataclass(frozen=True, slots=True)
class Block:
    """``nbytes`` of device memory at ``pointer``, owned by one workspace at a time."""

    pointer: int
    nbytes: int


EMPTY = Block(0, 0)


class DeviceScratch:
    """All scratch of one device. Its methods are called with that device current.

    Parameters
    ----------
    driver : Driver
        Where the memory comes from.
    device : int
        The ordinal, for messages.
    limit : int or None
        Most bytes that may be allocated at a time; None for no limit of our own.
    reclaim : callable
        ``reclaim()`` gives back what idle slots hold; called, once, before an allocation fails.
    describe : callable
        ``describe()`` says what the pool holds, for the message of an error.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        limit: int | None,
        reclaim: Callable[[], None],
        describe: Callable[[], str],
    ) -> None:
        self.driver = driver
        self.device = device
        self.limit = limit
        self.nbytes = 0
        self.peak = 0
        self._reclaim = reclaim
        self._describe = describe
        self._lock = threading.Lock()  # guards the two counts alone; no call is made under it
        self._retired: deque[tuple[Any, Block]] = deque()
        self.captured: dict[int, list[Block]] = {}  # by capture id: a graph may be replayed at any time, so they stay

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``, a multiple of 256.

        Raises
        ------
        OutOfMemoryError
            When neither the limit nor the device allows it, also after idle scratch and CuPy's free blocks were given back.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        block = self._try(size)
        if block is None:
            self._reclaim()
            with self.driver.relaxed():
                self.driver.release_cached()
            block = self._try(size)
        if block is None:
            with self.driver.relaxed():
                free, total = self.driver.memory_info()
            limit = "no limit" if self.limit is None else f"a limit of {self.limit:,} bytes"
            raise OutOfMemoryError(
                f"{size:,} bytes of scratch on device {self.device}: {free:,} of {total:,} bytes are free, the pool holds "
                f"{self.nbytes:,} bytes of scratch under {limit} ({self._describe()}). Raise scratch_limit, give a "
                f"workspace_limit to the graphs, use fewer streams, or free arrays"
            )
        return block

    def _try(self, size: int) -> Block | None:
        with self._lock:  # the count goes up before the memory is asked for, so that two threads cannot pass one limit
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
        return Block(pointer, size)

    def _uncount(self, size: int) -> None:
        with self._lock:
            self.nbytes -= size

    def retire(self, block: Block, stream: int) -> None:
        """Free a block once ``stream``, which must be alive, has run what it was given so far."""
        if not block.nbytes:
            return
        with self.driver.relaxed():
            event = self.driver.create_event()
            try:
                self.driver.record_event(event, stream)
            except BaseException:
                self.driver.destroy_event(event)
                raise
        self._retired.append((event, block))

    def free(self, block: Block) -> None:
        """Free a block now; the driver waits for work that may still use it."""
        if block.nbytes:
            with self.driver.relaxed():
                self.driver.free(block.pointer)
            self._uncount(block.nbytes)

    def collect(self, *, wait: bool = False) -> None:
        """Free the retired blocks whose streams have passed; with ``wait``, wait for those that have not."""
        for _ in range(len(self._retired)):
            try:
                event, block = self._retired.popleft()
            except IndexError:  # another thread collects too
                return
            try:
                with self.driver.relaxed():
                    if wait:
                        self.driver.synchronize_event(event)
                    elif not self.driver.event_done(event):
                        self._retired.append((event, block))
                        continue
                self.free(block)
            except BaseException:
                self._retired.append((event, block))  # for a later try
                raise
            with self.driver.relaxed():
                self.driver.destroy_event(event)


class Workspace:
    """Grow-only scratch of one slot. Contents are not kept when it grows.

    Attributes
    ----------
    block : Block
        What it has now.
    """

    __slots__ = ("block",)

    def __init__(self) -> None:
        self.block = EMPTY

    def grow(self, scratch: DeviceScratch, nbytes: int, stream: int, capture: int) -> Block:
        """Have at least ``nbytes``; the old block lives until ``stream`` can no longer touch it.

        Under a capture the old block is a part of what was captured so far and stays for as long as that may be replayed.
        """
        old = self.block
        if old.nbytes < nbytes:
            try:
                new = scratch.allocate(nbytes)
            except OutOfMemoryError:
                if capture or not old.nbytes:
                    raise
                # Contents are not kept, so the old block may go first; `allocate` waits for its stream and frees it.
                scratch.retire(old, stream)
                self.block = EMPTY
                self.block = scratch.allocate(nbytes)
                return self.block
            if capture:
                scratch.captured.setdefault(capture, []).append(new)
            elif old.nbytes:
                try:
                    scratch.retire(old, stream)
                except BaseException:
                    scratch.free(new)
                    raise
            self.block = new
        return self.block
