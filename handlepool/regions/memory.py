"""Parallel regions: what outlives the branches of a fork, to the join of the outermost one (guarantee 8).

CuPy gives a freed block back to the arena of the stream that was current when it was allocated, and lets it be used again at
once: that is right for one stream and wrong for two. So everything that a branch reads or allocates is kept until the caller's
stream waits for the branch, and what it allocates comes from the *outermost* caller's arena, where a later use is ordered after
the join.
"""

import os
from typing import Any, cast

from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Stream
from handlepool.pool.context import thread, unchecked
from handlepool.pool.deferred import abandon
from handlepool.pool.slot import Slot


class Region:
    """What the branches of one outermost fork share.

    Parameters
    ----------
    driver : Driver
        Whose allocator it replaces inside branches.
    stream : Stream
        The outermost caller's stream; arrays that branches make belong to its arena.
    device : int
        The ordinal.
    outer : Region, optional
        Of the branch or task that a task was submitted from. It takes over what is let go of, since what a task made may be
        read there after the task was joined.
    kept : list, optional
        What is kept already.
    """

    __slots__ = ("_inner", "_outer", "allocated", "allocator", "device", "driver", "ended", "keep", "kept", "stream")

    def __init__(
        self, driver: Driver, stream: Stream, device: int, outer: "Region | None" = None, kept: list[object] | None = None
    ) -> None:
        self._outer = outer
        self.allocator: Any = None  # made when the first branch needs it
        self.kept: list[object] = [] if kept is None else kept
        self._inner: dict[int, list[Slot]] = {}  # by identity, what forks inside branches lease, until they are joined
        self.ended = False  # whether the outermost caller has gone on
        self.driver = driver
        self.device = device
        self.stream = stream
        self.keep = self.kept.append  # atomic: a task's region may be kept to by another thread
        self.allocated: list[Any] = []  # what its branches allocated, in that order

    def prepare(self) -> Any:
        """Make the allocator of branches, where there is none yet; the allocator."""
        allocator = self.allocator
        if allocator is None:
            keep, allocated = self.keep, self.allocated

            def keep_block(block: object) -> None:
                keep(block)
                allocated.append(block)

            allocator = self.allocator = self.driver.region_allocator(self.stream, keep_block, _allocator_of)
        return allocator

    def enter(self, leased: list[Slot]) -> None:
        """Know what an inner fork leases, to its join."""
        self._inner[id(leased)] = leased

    def leave(self, leased: list[Slot]) -> None:
        """Forget an inner fork that was joined, or will be by whoever finds it deferred. One whose join failed stays known."""
        self._inner.pop(id(leased), None)

    @property
    def over(self) -> bool:
        """Whether all that ran in it is waited for by whatever is outside of regions."""
        return self.ended and (self._outer is None or self._outer.over)

    def release(self) -> None:
        """Let go of everything; the outermost caller's stream waits for every branch by now.

        But not for those of an inner fork that was never joined, as where an interrupt came just then.
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
        """Let go of nothing, ever: a join failed, so branches may read what is kept, and nobody waits for them."""
        kept = self.kept[:]
        abandon(kept)
        del self.kept[: len(kept)]  # another thread may have kept more meanwhile
        self.allocator = None  # a branch that is running allocates with the former one, and keeps to the former list


branch_regions: dict[int, Region] = {}
"""By pointer, the side streams on which branches and tasks run Python, and the region of each, to the join or the task's end. By
pointer, since one stream may have several objects, and they need not be ours."""


def _allocator_of(pointer: int) -> Any:
    """Return the allocator of the region that a stream's branch is in."""
    region = branch_regions.get(pointer)
    return None if region is None or region.ended else region.prepare()


def inherited(driver: Driver, device: int, pointer: int) -> "Region | None":
    """Return the region whose join waits for a stream, for what starts after that in a branch or task of this thread.

    None outside of any, and for another device, another driver, or a stream that the branch chose itself: no join waits for that,
    so what runs over it is a region of its own.
    """
    region = cast("Region | None", thread.region)  # of no other class: see `BranchRegion`
    if region is None:
        return None
    if pointer != region.stream.ptr:
        region = branch_regions.get(pointer)
    if region is None or region.ended or region.device != device or unchecked(region.driver) is not unchecked(driver):
        return None
    return region


os.register_at_fork(after_in_child=branch_regions.clear)  # nothing inherited is used in a forked child (guarantee 13)
