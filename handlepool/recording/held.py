"""Tensors that nodes of other lanes read: held until their own lane comes after all of these (guarantee 8).

Torch's allocator gives a freed block to whoever allocates next for the stream that the block was allocated for. A lane's nodes
come one after the other, so that is right as long as nobody else reads the block.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, Protocol

from handlepool.order.track import Needs, Track

MOST_TRIED = 8
"""Of the storages of one stream, at one node."""


class Storages(Protocol):
    """Where tensors come from while a function is recorded."""

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a storage was allocated for; None for memory from elsewhere."""


class Held:
    """Storages of tensors, by the stream that each was allocated for.

    Parameters
    ----------
    memory : Storages
    """

    def __init__(self, memory: Storages) -> None:
        self._memory = memory
        self._of: dict[int, dict[int, tuple[object, Needs]]] = {}
        self._foreign: dict[int, object] = {}  # to the end: memory that is let go of might come back as the recording's own

    def read(self, pointer: int, track: Track, call: int, storages: Iterable[tuple[int, Any]]) -> None:
        """Be told what the last call on a lane's stream is given."""
        for start, storage in storages:
            if start in self._foreign:
                continue
            stream = self._memory.stream_of(start)
            if stream is None:
                self._foreign[start] = storage
            elif stream != pointer:
                _, readers = self._of.setdefault(stream, {}).setdefault(start, (storage, {}))
                readers[track] = call

    def follow(self, pointer: int, known: Needs) -> None:
        """Let go of what was allocated for a stream whose next call comes after all readers; of a few at a time."""
        held = self._of.get(pointer)
        if held:
            for start in [*islice(held, MOST_TRIED)]:
                entry = held.pop(start)
                if any(known.get(track, 0) < call for track, call in entry[1].items()):
                    held[start] = entry  # behind the others, to be asked after them

    def clear(self) -> None:
        """Let go of all: whatever comes next comes after all that was recorded."""
        self._of.clear()

    def close(self) -> None:
        """Let go of the memory from elsewhere, too: the recording has ended."""
        self.clear()
        self._foreign.clear()
