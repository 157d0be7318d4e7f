"""Hold the tensors that nodes of other lanes read (guarantee 8).

Torch allocates each block for a stream. When the block is freed, torch gives it to the next allocation for the same stream. The
nodes of a lane run one after the other, so this reuse is safe if only nodes of that lane use the block. If nodes of other lanes
read the block, its tensor is held until the block's lane follows all of these nodes.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

from handlepool.order.track import Needs, Track

MOST_TRIED = 8
"""The maximum number of storages that one node tries to release."""


class Storages(Protocol):
    """The source of torch's tensors while a function is recorded."""

    def stream_of(self, pointer: int) -> int | None:
        """Return the stream that a storage was allocated for.

        Return None if the source did not allocate the memory at ``pointer``.
        """


class HeldTensors:
    """Hold storages of tensors, by the stream that each was allocated for.

    Parameters
    ----------
    memory : Storages
        Tells the stream that a storage was allocated for.
    is_own : callable
        Returns whether a block of the recording's own memory begins at an address. Such a block is not held here, because the
        recording gives its freed memory only to nodes that follow all users of that memory.
    """

    def __init__(self, memory: Storages, is_own: Callable[[int], bool]) -> None:
        self._memory = memory
        self._is_own = is_own
        self._by_stream: dict[int, dict[int, tuple[object, Needs]]] = {}
        # Storages that ``memory`` did not allocate. They are held until the recording ends. If they were released earlier, the
        # recording might get the same memory as its own.
        self._foreign: dict[int, object] = {}

    def read(self, pointer: int, track: Track, call: int, storages: Iterable[tuple[int, Any]]) -> None:
        """Hold storages of other lanes that a lane's last call uses.

        ``pointer`` is the lane's stream, and ``call`` the number of the call on ``track``. Each storage comes with its address.
        """
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

        ``known`` are the calls that the next call on the stream ``pointer`` follows. At most `MOST_TRIED` storages are tried.
        """
        held = self._by_stream.get(pointer)
        if held:
            # A stream may have many held storages, and to try all of them at each node would cost too much time.
            for start in [*islice(held, MOST_TRIED)]:
                entry = held.pop(start)
                if any(known.get(track, 0) < call for track, call in entry[1].items()):
                    # The storage goes to the end of the dictionary, so that later nodes try the other storages first.
                    held[start] = entry

    def clear(self) -> None:
        """Release all storages, except storages with foreign memory.

        The caller makes sure that the next call follows everything recorded so far.
        """
        self._by_stream.clear()

    def close(self) -> None:
        """Release all storages, because the recording has ended."""
        self.clear()
        self._foreign.clear()
