"""Keep freed memory of a recording for later arrays of similar size."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

MOST_TRIED = 4
"""The maximum number of tried blocks of one size, from each end."""
MOST_SIZES = 8
"""The maximum number of sufficient sizes that are tried."""
MOST_TIMES = 2
"""Largest ratio of a reused block's size to the requested size."""

B = TypeVar("B")


Log = list[tuple[int, int]]


class SizeClass(list[B]):
    """Hold freed blocks of one size.

    Destructors append blocks in any thread. Both steps of an append are atomic.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def append(self, block: B) -> None:
        """Take a block that was freed."""
        self._log.append((id(block), 0))
        super().append(block)


class FreedBlocks(Generic[B]):
    """Blocks of one device, by their sizes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._of: dict[int, SizeClass[B]] = {}
        # Each entry is a block's identity with the requested bytes when it was given out, or with 0 when it was freed.
        self._log: Log = []

    def of_size(self, size: int) -> SizeClass[B]:
        """Return the list to which freed blocks of a size are appended."""
        home = self._of.get(size)
        if home is None:
            home = self._of[size] = SizeClass(self._log)
            insort(self._sizes, size)
        return home

    def note_given(self, block: B, size: int) -> None:
        """Return the bytes needed if any array could reuse any freed block.

        The log is replayed in the order in which blocks were given out and freed.
        """
        self._log.append((id(block), size))

    def in_order(self) -> int:
        """Return the bytes needed if any array could reuse any freed block."""
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
        """Return a block and its list, for an array of some size.

        The block is the smallest that is large enough. Among blocks of the same size, only those blocks freed last and first are
        tried.
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
        """Take every block."""
        for home in self._of.values():
            while home:
                yield home.pop()
