"""Track the memory that nodes of a recording use.

The books have the calls that used each piece of memory. `Unwritten` has the blocks that no node has written.

Freed memory is given to a node only if that node already follows all calls that used the memory. So the reuse of memory adds no
edge. If the driver cannot let the recording decide about reuse, all blocks are kept to the end of the recording. If a block was
allocated for a stream that the recorded function made itself, the books do not know its users. So the block is reused only on
that stream, as outside of recordings.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any

from handlepool._util.names import shown
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import CaptureError
from handlepool.order.track import Needs
from handlepool.order.uses import Use, Uses, needs_of
from handlepool.recording.update import memory_of
from handlepool.tensors.layout import Piece, Token, share


class NodeMemory:
    """The memory that nodes use, and the blocks that the recording allocates.

    Parameters
    ----------
    driver : Driver

    Attributes
    ----------
    own : set of (int, int)
        The begin and end of each block.
    of_node : list of (int, int)
        The blocks that were allocated inside the node that is being recorded.
    unwritten : Unwritten
        The blocks that no node has written.
    reuse_queries : list of int
        The start addresses of freed memory whose last users were looked up since the last node began.
    """

    def __init__(self, driver: Driver) -> None:
        self.own: set[tuple[int, int]] = set()
        self.of_node: list[tuple[int, int]] = []
        self.unwritten = Unwritten()
        self.reuse_queries: list[int] = []
        self._driver = driver
        self._uses = Uses()
        # All blocks, if freed memory may not be given out again; otherwise None.
        self._kept: list[object] | None = None
        # Maps the start address of freed memory to its end and its last users.
        self._freed: dict[int, tuple[int, Needs]] = {}

    def keep_blocks(self) -> None:
        """Keep each block from now on, so that none is reused.

        This is needed if the driver cannot let the recording decide which node gets freed memory.
        """
        self._kept = []

    def add(self, block: object, place: str, *, in_node: bool, is_output: bool) -> int:
        """Note a block and the place of its allocation; return its address.

        A node counts as the writer of its outputs and of memory that is allocated inside it. Any other block counts as unwritten.
        """
        if self._kept is not None:
            self._kept.append(block)
        piece = self._driver.block_range(block)
        self.own.add(piece)
        # The memory is in use again, so the cached last users are out of date.
        self._freed.pop(piece[0], None)
        if in_node:
            self.of_node.append(piece)
        if not (in_node or is_output):
            self.unwritten.add(*piece, place)
        elif self.unwritten.starts:
            self.unwritten.forget(*piece)
        return piece[0]

    def entries(self, pieces: Iterable[Any]) -> list[Use]:
        """Return the books' entries for ``pieces``; add missing entries."""
        uses, found = self._uses, []
        for piece in pieces:
            # The quick case is a dense piece whose start address has an entry.
            dense = type(piece) is tuple and piece[2] is None
            use = uses.known.get(piece[0]) if dense else None
            if use is None or use.stop != piece[1]:
                use = uses.dense(piece[0], piece[1] - piece[0]) if dense and use is None else uses.piece(piece)
            found.append(use)
        return found

    def users(self, written: Iterable[Piece | Token]) -> Needs:
        """Return the earlier calls that used memory of the present node.

        ``written`` is memory that this node wrote. Memory that the node itself allocated is left out, because it has no other
        users.
        """
        others = [piece for piece in written if isinstance(piece, Token) or not self._is_new(piece)]
        return needs_of((), [use for piece in others for use in self._uses.overlapping(piece)])

    def last_users(self, start: int, stop: int) -> Needs:
        """Return the last calls in the books that used this freed memory."""
        known = self._freed.get(start)
        if known is not None:
            return known[1]
        needs = needs_of((), self._uses.overlapping((start, stop, None)))
        # The answer is cached, because the allocator may look up the same memory again.
        self._freed[start] = stop, needs
        self.reuse_queries.append(start)
        return needs

    def begin_node(self) -> None:
        """Note that later allocations and look-ups belong to a new node."""
        self.of_node.clear()
        self.reuse_queries.clear()

    def forget_users(self, used: Iterable[Piece | Token]) -> None:
        """Drop cached last users of memory that the present node used.

        These last users were cached before the node's own use of the memory, ``used``, was noted in the books.
        """
        for start in self.reuse_queries:
            if start in self._freed:
                stop = self._freed[start][0]
                if any(not isinstance(piece, Token) and piece[0] < stop and start < piece[1] for piece in used):
                    del self._freed[start]

    def _is_new(self, piece: Piece) -> bool:
        """Return whether a piece was allocated inside the present node."""
        return any(start <= piece[0] and piece[1] <= stop for start, stop in self.of_node)

    def begin_anew(self) -> None:
        """Begin new books after a step that all later calls follow."""
        self._uses.close()
        self._uses = Uses()
        self._freed.clear()

    def close(self) -> None:
        """Close the books, and let go of the kept blocks."""
        self._uses.close()
        if self._kept is not None:
            self._kept.clear()


class Unwritten:
    """The blocks that no node has written.

    A call that reads such a block would read arbitrary values, left over from before the allocation.

    Attributes
    ----------
    starts : list of int
        The start address of each block, ascending.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._blocks: dict[int, tuple[int, str]] = {}

    def add(self, start: int, stop: int, place: str) -> None:
        """Note a block, and the place of its allocation."""
        # An empty block is left out. No call reads it, and a second block may begin at its address.
        if start == stop:
            return
        self.forget(start, stop)
        insort(self.starts, start)
        self._blocks[start] = stop, place

    def forget(self, start: int, stop: int) -> None:
        """Forget this memory, because it belongs to a new array.

        The memory may be a part of a noted block, or span several noted blocks.
        """
        if not self.starts:
            return
        first, last = bisect_left(self.starts, start), bisect_left(self.starts, stop)
        for each in self.starts[first:last]:
            del self._blocks[each]
        del self.starts[first:last]
        # The block before may reach into this memory. Then only the part before this memory stays noted.
        if first:
            before = self.starts[first - 1]
            end, place = self._blocks[before]
            self._blocks[before] = min(end, start), place

    def wrote(self, writes: Iterable[Piece | Token]) -> None:
        """Forget each block that is written, even if only in part."""
        for piece in writes:
            start = self._block_of(piece)
            if start is not None:
                del self._blocks[start], self.starts[bisect_right(self.starts, start) - 1]

    def clear(self) -> None:
        """Forget all blocks."""
        self.starts.clear()
        self._blocks.clear()

    def check(
        self, name: str, place: str, reads: Iterable[Piece | Token], writes: Iterable[Piece | Token], arguments: object
    ) -> None:
        """Refuse a call that reads an unwritten block without writing it.

        Raises
        ------
        CaptureError
            The message names the call and the array.
        """
        if not self._blocks:
            return
        written = {self._block_of(piece) for piece in writes}
        for piece in reads:
            start = self._block_of(piece)
            if start is not None and start not in written:
                array = next((leaf for leaf in leaves(arguments) if _begins(leaf) == piece[0]), None)  # type: ignore[index]
                raise CaptureError(
                    f"{name} at {place} reads {'an array' if array is None else shown(array)}, which was allocated at "
                    f"{self._blocks[start][1]} while recording and never written, so a replay would read leftover values. Write "
                    "the array first; or if the call writes the array, declare the array in mutates="
                )

    def check_returned(self, name: str, array: object, piece: Piece) -> None:
        """Refuse a returned array that no replay would write.

        Raises
        ------
        CaptureError
            The message names the array.
        """
        start = self._block_of(piece)
        if start is not None and piece[0] < piece[1]:
            raise CaptureError(
                f"{name} returned {shown(array)}, which was allocated at {self._blocks[start][1]} while recording, and no "
                "recorded call writes this array, so a replay would not change it. Launch the work that writes the array on the "
                "current stream"
            )

    def _block_of(self, piece: Piece | Token) -> int | None:
        """Return the start of the unwritten block in which a piece begins.

        Return None if the piece begins in no unwritten block.
        """
        if isinstance(piece, Token) or not self.starts:
            return None
        at = bisect_right(self.starts, piece[0]) - 1
        if at < 0 or self._blocks[self.starts[at]][0] <= piece[0]:
            return None
        return self.starts[at]


def writes_outside(driver: Driver, reads: Sequence[Piece | Token], writes: Sequence[Piece | Token], result: object) -> bool:
    """Return whether a call that gave the capture no work wrote memory.

    The call has written memory if it declares writes, or if it returned a new array of another library.
    """
    if any(not isinstance(memory, Token) for memory in writes):
        return True
    # If a returned array is a view of an argument, it is not new, so the memory of all arguments is compared.
    known = [memory for memory in reads if not isinstance(memory, Token)]
    for value in leaves(result):
        if not isinstance(value, driver.array_types[0]):
            memory = memory_of(driver, value)
            if memory is not None and memory[0] < memory[1] and not any(share(memory, each) for each in known):
                return True
    return False


def _begins(value: object) -> int | None:
    pointer = getattr(getattr(value, "data", None), "ptr", None)
    return pointer if isinstance(pointer, int) else None
