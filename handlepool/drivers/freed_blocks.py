"""Keep freed blocks of a recording for later arrays of similar size."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

MOST_TRIED = 4
"""The maximum number of blocks that `take` tries per list end.

`take` tries the blocks at both ends of a list. The list has the freed blocks of one size, in the order in which they were freed.
"""
MOST_SIZES = 8
"""The maximum number of block sizes that `take` tries."""
MOST_TIMES = 2
"""The maximum ratio of a reused block's size to the requested size."""

B = TypeVar("B")


Log = list[tuple[int, int]]


class SizeClass(list[B]):
    """Hold freed blocks of one size.

    Destructors append blocks in any thread. An append needs no lock, because each of its two steps is atomic.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def append(self, block: B) -> None:
        """Add a freed block, and log that it was freed."""
        self._log.append((id(block), 0))
        super().append(block)


class FreedBlocks(Generic[B]):
    """Hold the freed blocks of one device, in lists by size."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._of: dict[int, SizeClass[B]] = {}
        # An entry is a block's identity and a number of bytes: the requested bytes if the block was given out, 0 if it was freed.
        self._log: Log = []

    def of_size(self, size: int) -> SizeClass[B]:
        """Return the list to which freed blocks of a size are appended."""
        home = self._of.get(size)
        if home is None:
            home = self._of[size] = SizeClass(self._log)
            insort(self._sizes, size)
        return home

    def note_given(self, block: B, size: int) -> None:
        """Note that a block was given out for ``size`` requested bytes.

        `in_order` reads these notes.
        """
        self._log.append((id(block), size))

    def in_order(self) -> int:
        """Return the bytes needed if each array could reuse any freed block.

        The method repeats the requests and frees of the log in their order, and counts the new blocks.
        """
        again: FreedBlocks[int] = FreedBlocks()
        total = 0
        live: dict[int, int] = {}
        for block, size in self._log:
            if not size:
                own = live.pop(block, None)
                if own is not None:
                    again.of_size(own).append(own)
                continue
            found = again.take(size, lambda _: True)
            total += size if found is None else 0
            live[block] = size if found is None else found[0]
        return total

    def take(self, size: int, may_have: Callable[[B], bool]) -> tuple[B, SizeClass[B]] | None:
        """Take a block for ``size`` bytes; return the block and its list.

        The method tries the smallest sufficient sizes first. Of each size, it tries the blocks that were freed last, then the
        blocks that were freed first. ``may_have`` decides whether a block may be taken. If no block may be taken, return None.
        """
        first = bisect_left(self._sizes, size)
        for found in self._sizes[first : first + MOST_SIZES]:
            if found > MOST_TIMES * size:
                break
            home = self._of[found]
            few = len(home) <= 2 * MOST_TRIED
            for block in home[::-1] if few else (*home[: -MOST_TRIED - 1 : -1], *home[:MOST_TRIED]):
                if may_have(block):
                    try:
                        home.remove(block)
                    except ValueError:
                        # Another thread has taken the block.
                        continue
                    return block, home
        return None

    def take_all(self) -> Iterator[B]:
        """Remove and yield all blocks, one after the other."""
        for home in self._of.values():
            while home:
                yield home.pop()
