"""Memory of a recording that was freed: for the next array of about its size that may have it."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

MOST_TRIED = 4
"""Of the blocks of one size, from each end."""
MOST_SIZES = 8
"""Of the sizes that would do."""
MOST_TIMES = 2
"""How many times as large as it has to be a block may be."""

B = TypeVar("B")


class FreedBlocks(Generic[B]):
    """Blocks of one device, by their sizes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._of: dict[int, list[B]] = {}

    def home(self, size: int) -> list[B]:
        """Return the list that blocks of a size are appended to when they are freed, by whatever thread: that is atomic."""
        home = self._of.get(size)
        if home is None:
            home = self._of[size] = []
            insort(self._sizes, size)
        return home

    def take(self, size: int, may_have: Callable[[B], bool]) -> tuple[B, list[B]] | None:
        """Return a block, and its list: the smallest that is large enough; of one size those freed last, and first, are tried."""
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
                    except ValueError:  # another thread has taken it
                        continue
                    return block, home
        return None

    def take_all(self) -> Iterator[B]:
        """Take every block."""
        for home in self._of.values():
            while home:
                yield home.pop()
