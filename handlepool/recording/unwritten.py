"""Memory that was allocated while recording and that nothing has written yet: who reads it reads what was there before."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from handlepool._util.names import shown
from handlepool._util.reachable import leaves
from handlepool.errors import CaptureError
from handlepool.tensors.layout import Piece, Token


class Unwritten:
    """Blocks, by where they begin."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add(self, start: int, stop: int, place: str) -> None:
        """Take note of a block, and of where it was allocated."""
        if start == stop:  # nobody reads there, and several may begin at one place
            return
        self.forget(start, stop)
        insort(self._starts, start)
        self._blocks[start] = stop, place

    def forget(self, start: int, stop: int) -> None:
        """Know nothing any more of memory that was given out again, maybe as a part of a block, or as several in one."""
        if not self._starts:
            return
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, stop)
        for each in self._starts[first:last]:
            del self._blocks[each]
        del self._starts[first:last]
        if first:
            before = self._starts[first - 1]
            end, place = self._blocks[before]
            self._blocks[before] = min(end, start), place

    def wrote(self, writes: Iterable[Piece | Token]) -> None:
        """Take note of writes: a block that was written to in part counts as written."""
        for piece in writes:
            start = self._block_of(piece)
            if start is not None:
                del self._blocks[start], self._starts[bisect_right(self._starts, start) - 1]

    def clear(self) -> None:
        """Know nothing any more."""
        self._starts.clear()
        self._blocks.clear()

    def check(
        self, name: str, place: str, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token], arguments: object
    ) -> None:
        """Refuse a call that reads what nothing has written, and does not write it itself.

        Raises
        ------
        CaptureError
            Naming the call and the array.
        """
        if not self._blocks:
            return
        written = {self._block_of(piece) for piece in writes}
        for piece in reads:
            start = self._block_of(piece)
            if start is not None and start not in written:
                array = next((leaf for leaf in leaves(arguments) if _begins(leaf) == piece[0]), None)  # type: ignore[index]
                raise CaptureError(
                    f"{name} at {place} reads {'an array' if array is None else shown(array)} that was allocated at "
                    f"{self._blocks[start][1]} while recording, and that nothing has written: a replay reads what "
                    f"was left there. If the call writes it, say so with mutates="
                )

    def check_returned(self, name: str, array: object, piece: Piece) -> None:
        """Refuse an array that a function returns and that no replay would write.

        Raises
        ------
        CaptureError
            Naming the array.
        """
        start = self._block_of(piece)
        if start is not None and piece[0] < piece[1]:
            raise CaptureError(
                f"{name} returned {shown(array)}, which was allocated at {self._blocks[start][1]} while recording, and which "
                f"nothing that was recorded writes: replays would leave it as it is. Work for it belongs on the stream that is "
                f"current there"
            )

    def _block_of(self, piece: Piece | Token) -> int | None:
        """Return where the block begins that a piece of memory is in; None for another's, and for what was written."""
        if isinstance(piece, Token) or not self._starts:
            return None
        at = bisect_right(self._starts, piece[0]) - 1
        if at < 0 or self._blocks[self._starts[at]][0] <= piece[0]:
            return None
        return self._starts[at]


def _begins(value: object) -> int | None:
    pointer = getattr(getattr(value, "data", None), "ptr", None)
    return pointer if isinstance(pointer, int) else None
