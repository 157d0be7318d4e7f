"""Keep memory of branches to the outermost join (guarantee 8).

CuPy returns a freed block to the arena of the stream that was current at its allocation, and reuses the block at once. This reuse
is right as long as a single stream uses the block. A second stream may still use the block when it is freed. So a region keeps
everything that a branch reads or allocates until the caller's stream waits for the branch. A branch allocates from the
*outermost* caller's arena. From that arena a block is reused only after the join, because the region keeps the block until
then.
"""

import os
from typing import Any, cast

from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Stream
from handlepool.pool.context import thread, unchecked
from handlepool.pool.deferred import abandon
from handlepool.pool.slot import Slot


class Region:
    """The state that the branches of one outermost fork share.

    Parameters
    ----------
    driver : Driver
        The driver whose allocator the region replaces inside branches.
    stream : Stream
        The outermost caller's stream. Arrays that branches make belong to its arena.
    device : int
        The device's ordinal.
    outer : Region, optional
        For a task's region, the region of the branch or task that submitted the task. The outer region takes over the memory that
        this region releases, because the submitting branch may read the task's arrays after the task was joined.
    kept : list, optional
        The list to keep objects in. It may hold objects already.

    Attributes
    ----------
    keep : callable
        Keeps an object until the join.
    allocated : list
        The blocks that branches allocated, in order.
    ended : bool
        Whether the outermost caller's stream waits for the branches.
    """

    __slots__ = ("_inner", "_outer", "allocated", "allocator", "device", "driver", "ended", "keep", "kept", "stream")

    def __init__(
        self, driver: Driver, stream: Stream, device: int, outer: "Region | None" = None, kept: list[object] | None = None
    ) -> None:
        self._outer = outer
        # The first branch that needs the allocator makes it.
        self.allocator: Any = None
        self.kept: list[object] = [] if kept is None else kept
        # This maps the identity of each inner fork's list of slots to the list, until the inner fork is joined.
        self._inner: dict[int, list[Slot]] = {}
        # This tells whether the outermost caller has passed the join.
        self.ended = False
        self.driver = driver
        self.device = device
        self.stream = stream
        # The append is atomic, because another thread may keep objects in a task's region.
        self.keep = self.kept.append
        # These are the blocks that its branches allocated, in order.
        self.allocated: list[Any] = []

    def prepare(self) -> Any:
        """Return the allocator of branches, and make it first if needed."""
        allocator = self.allocator
        if allocator is None:
            keep, allocated = self.keep, self.allocated

            def keep_block(block: object) -> None:
                keep(block)
                allocated.append(block)

            allocator = self.allocator = self.driver.region_allocator(self.stream, keep_block, _allocator_of)
        return allocator

    def enter(self, leased: list[Slot]) -> None:
        """Register the slots of an inner fork until its join."""
        self._inner[id(leased)] = leased

    def leave(self, leased: list[Slot]) -> None:
        """Forget an inner fork that was joined, or whose join was deferred.

        An inner fork that is still registered when `release` is called, and still has slots, counts as never joined.
        """
        self._inner.pop(id(leased), None)

    @property
    def over(self) -> bool:
        """Whether the streams outside the region wait for all its work."""
        return self.ended and (self._outer is None or self._outer.over)

    def release(self) -> None:
        """Release everything after the outermost caller's join.

        At this point the outermost caller's stream waits for every branch, except the branches of an inner fork that was never
        joined, for example after an interrupt. If there is such a fork, all memory of the region is abandoned.
        """
        self.ended = True
        if any(self._inner.values()):
            self.abandon()
        self._inner.clear()
        if self._outer is not None:
            self._outer.keep(self.kept[:])
        self.kept.clear()
        self.allocated.clear()

    def abandon(self) -> None:
        """Keep everything forever after a failed join.

        Branches may still read the kept memory, and no stream waits for them.
        """
        kept = self.kept[:]
        abandon(kept)
        # Delete only the copied part, because another thread may have kept more meanwhile.
        del self.kept[: len(kept)]
        # The next branch makes a new allocator. A branch that is still running keeps the former allocator.
        self.allocator = None


branch_regions: dict[int, Region] = {}
"""The regions of side streams that run Python, by stream pointer.

An entry lasts to the join, or to the end of a task. The key is a pointer, because a stream may have several objects, and
another library may own them.
"""


def _allocator_of(pointer: int) -> Any:
    """Return the allocator for the branch on a stream, or None."""
    region = branch_regions.get(pointer)
    return None if region is None or region.ended else region.prepare()


def inherited(driver: Driver, device: int, pointer: int) -> "Region | None":
    """Return the region whose join waits for a stream, or None.

    New work in a branch or a task of this thread belongs to that region. The result is None outside of any region, and for
    another device or another driver. The result is also None for a stream that the branch chose itself. No join waits for such a
    stream, so work on it gets a region of its own.
    """
    # `thread.region` has the type of a protocol, and `Region` is the only class that implements it: see `BranchRegion`.
    region = cast("Region | None", thread.region)
    if region is None:
        return None
    if pointer != region.stream.ptr:
        region = branch_regions.get(pointer)
    if region is None or region.ended or region.device != device or unchecked(region.driver) is not unchecked(driver):
        return None
    return region


# A forked child uses nothing that it inherited (guarantee 13).
os.register_at_fork(after_in_child=branch_regions.clear)
