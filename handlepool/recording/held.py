"""Hold the tensors that nodes of other lanes read (guarantee 8).

Torch's allocator gives a freed block to the next allocation for the stream that the block was allocated for. The nodes of a lane
run in order, so that is right as long as the block is used on its own lane alone. If nodes of other lanes read the block, its
tensor is held until its own lane follows all of these nodes.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

from handlepool.order.track import Needs, Track

MOST_TRIED = 8
"""The maximum number of storages that one node tries to release."""


class Storages(Protocol):
    """The source of tensors while a function is recorded."""

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a storage was allocated for.

        The answer is None for memory from elsewhere.
        """


class HeldTensors:
    """Storages of tensors, by the stream that each was allocated for.

    Parameters
    ----------
    memory : Storages
        Tells the stream that a storage was allocated for.
    is_own : callable
        Returns whether a block of the recording's own memory begins at an address. Such a block is not held, because the
        recording gives freed memory only to nodes that follow its users.
    """

    def __init__(self, memory: Storages, is_own: Callable[[int], bool]) -> None:
        self._memory = memory
        self._is_own = is_own
        self._by_stream: dict[int, dict[int, tuple[object, Needs]]] = {}
        # Storages whose memory is from elsewhere. They are held to the end, because the recording might get their memory as its
        # own once they are released.
        self._foreign: dict[int, object] = {}

    def read(self, pointer: int, track: Track, call: int, storages: Iterable[tuple[int, Any]]) -> None:
        """Note the storages that the last call of a lane was given."""
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
        """Release storages of a stream if its next call follows their readers.

        Each call tries only a few storages.
        """
        held = self._by_stream.get(pointer)
        if held:
            # A stream may have many held storages, and each node would pay for a look at all of them.
            for start in [*islice(held, MOST_TRIED)]:
                entry = held.pop(start)
                if any(known.get(track, 0) < call for track, call in entry[1].items()):
                    # The storage goes to the end of the dictionary, so that later nodes try the other storages first.
                    held[start] = entry

    def clear(self) -> None:
        """Release all storages except foreign memory.

        The next call follows everything recorded so far.
        """
        self._by_stream.clear()

    def close(self) -> None:
        """Release foreign memory too, since the recording has ended."""
        self.clear()
        self._foreign.clear()
