"""Tensors that nodes of other lanes read: held until their own lane comes after all of these (guarantee 8).

Torch's allocator gives a freed block to whoever allocates next for the stream that the block was allocated for. A lane's nodes
come one after the other, so that is right as long as nobody else reads the block.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

from handlepool.order.track import Needs, Track

MOST_TRIED = 8
"""Of the storages of one stream, at one node."""


class Storages(Protocol):
    """Where tensors come from while a function is recorded."""

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a storage was allocated for; None for memory from elsewhere."""


class HeldTensors:
    """Storages of tensors, by the stream that each was allocated for.

    Parameters
    ----------
    memory : Storages
    is_own : callable
        Whether a block of the recording's own memory begins at an address. Such a block is not held: only nodes that may have it
        get it.
    """

    def __init__(self, memory: Storages, is_own: Callable[[int], bool]) -> None:
        self._memory = memory
        self._is_own = is_own
        self._by_stream: dict[int, dict[int, tuple[object, Needs]]] = {}
        # Held to the end: memory that is released might come back as the recording's own.
        self._foreign: dict[int, object] = {}

    def read(self, pointer: int, track: Track, call: int, storages: Iterable[tuple[int, Any]]) -> None:
        """Note the storages that the last call on a lane's stream is given."""
        for start, storage in storages:
            if start in self._foreign or self._is_own(start):
                continue
            stream = self._memory.stream_of(start)
            if stream is None:
                self._foreign[start] = storage
            elif stream != pointer:
                _, readers = self._by_stream.setdefault(stream, {}).setdefault(start, (storage, {}))
                readers[track] = call

    def follow(self, pointer: int, known: Needs) -> None:
        """Release storages of a stream whose next call follows all their readers, a few at a time."""
        held = self._by_stream.get(pointer)
        if held:
            for start in [*islice(held, MOST_TRIED)]:
                entry = held.pop(start)
                if any(known.get(track, 0) < call for track, call in entry[1].items()):
                    # Behind the other storages, to be tried after them.
                    held[start] = entry

    def clear(self) -> None:
        """Release all but foreign memory: the next call follows everything recorded so far."""
        self._by_stream.clear()

    def close(self) -> None:
        """Release foreign memory too, since the recording has ended."""
        self.clear()
        self._foreign.clear()
