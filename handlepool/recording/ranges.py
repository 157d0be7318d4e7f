"""Memory, as where its parts begin and end."""

from bisect import bisect_right
from collections.abc import Iterable

from handlepool.tensors.layout import Piece


class Ranges:
    """Memory, as where its parts begin and end."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def have(self, piece: Piece) -> bool:
        """Whether a piece of memory is in one of them."""
        place = bisect_right(self._starts, piece[0]) - 1
        return place >= 0 and piece[1] <= self._stops[place]
