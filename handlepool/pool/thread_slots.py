"""Hold the slots that threads own, and the slots left behind."""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator

from handlepool.pool.slot import Slot
from handlepool.pool.stream import is_over

MOST_FOREIGN_STREAMS = 64
"""The maximum number of slots that a thread keeps for foreign streams.

A foreign stream is a stream that a caller passed as a bare pointer or as another library's object. The pool does not notice the
end of such a stream.
"""


class ThreadSlots:
    """One thread's slots by stream key.

    Only this thread changes the slots. The object dies with the thread, and its destructor leaves the slots behind (guarantee
    11).

    Parameters
    ----------
    left : deque of Slot
        Receives the slots that are left behind. An append is atomic and calls nothing, so a destructor may append.
    """

    def __init__(self, left: deque[Slot]) -> None:
        self.slots: dict[Hashable, Slot] = {}
        # These are the keys of foreign streams, the least recently used first.
        self._foreign: OrderedDict[Hashable, None] = OrderedDict()
        self._left = left
        self._sweep_at = 16

    def add(self, slot: Slot, *, foreign: bool) -> None:
        """Add a new slot; leave old slots of foreign streams behind.

        Beyond the limit, the least recently used slot of a foreign stream is left behind. The new slot's key may show that an
        earlier stream or capture of the same pointer is over. Then the slot of that earlier stream or capture is left behind
        too.
        """
        # The sweep removes slots whose streams have gone. Doubling the threshold makes the sweeps rare.
        if len(self.slots) >= self._sweep_at:
            for key, left in list(self.slots.items()):
                if left.owner is None and self.slots.get(key) is left:
                    del self.slots[key]
            self._sweep_at = max(16, 2 * len(self.slots))
        # While this slot was being made, the collector may have run a finalizer that made a slot for the same key. The
        # finalizer's slot is left behind. The next two lines make no call, so no finalizer can run between them.
        key = slot.key
        known: Slot | None = self.slots[key] if key in self.slots else None  # noqa: SIM401 - `get` is a call
        self.slots[key] = slot
        if known is not None and known.owner is not None:
            known.end()
            self._left.append(known)
        if not foreign:
            return
        # The loop runs over a copy of the keys, because a finalizer may add a key meanwhile.
        for other in list(self._foreign):
            if is_over(other, key):
                self._forget(other)
        self._foreign[key] = None
        while len(self._foreign) > MOST_FOREIGN_STREAMS:
            oldest, _ = self._foreign.popitem(last=False)
            self._forget(oldest)

    def _forget(self, key: Hashable) -> None:
        self._foreign.pop(key, None)
        slot = self.slots.pop(key, None)
        if slot is not None:
            slot.end()
            self._left.append(slot)

    def touch(self, key: Hashable) -> None:
        """Mark a foreign stream's key as used."""
        self._foreign.move_to_end(key)

    def __del__(self) -> None:
        # After an interrupt inside the constructor, the object may lack the attribute.
        for slot in list(getattr(self, "slots", {}).values()):
            slot.end()
            self._left.append(slot)


class LiveSlots:
    """All slots that threads own, and the slots that were left behind.

    To leave a slot behind takes no call to CUDA (guarantee 10).
    """

    def __init__(self) -> None:
        # Each change and each copy is one atomic step, so no lock is needed.
        self._slots: set[Slot] = set()
        self._left: deque[Slot] = deque()
        self._local = threading.local()

    def of_this_thread(self) -> ThreadSlots:
        """Return the calling thread's `ThreadSlots`."""
        mine: ThreadSlots | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = ThreadSlots(self._left)
        return mine

    def add(self, slot: Slot, stream: object) -> None:
        """Let the calling thread own a slot.

        The ownership ends with the thread, and also with ``stream`` if that is not None.
        """
        if stream is not None:
            slot.watch = weakref.ref(stream, lambda _: self.defer(slot))
        self._slots.add(slot)
        self.of_this_thread().add(slot, foreign=stream is None)

    def defer(self, slot: Slot) -> None:
        """Take a slot from its owner; `left_behind` yields the slot later."""
        slot.end()
        self._left.append(slot)

    def left_behind(self) -> Iterator[Slot]:
        """Yield each slot that was left behind so far, once."""
        for _ in range(len(self._left)):
            try:
                slot = self._left.popleft()
                self._slots.remove(slot)
            # Another thread has taken the last slot.
            except IndexError:
                return
            # The slot is in the deque twice, because both its thread and its stream have ended. The first entry was already
            # yielded.
            except KeyError:
                continue
            yield slot

    def defer_again(self, slot: Slot) -> None:
        """Leave a slot behind again, because it could not be taken in."""
        self._slots.add(slot)
        self._left.append(slot)

    def of_other_threads(self) -> int:
        """Count the slots that threads other than the calling thread own."""
        return len(self._slots.difference(self.of_this_thread().slots.values()))

    def is_empty(self) -> bool:
        """Return whether no thread has a slot."""
        return not self._slots

    def take_all(self) -> Iterator[Slot]:
        """Yield all slots that threads own or have left behind, once each."""
        while True:
            try:
                slot = self._slots.pop()
            except KeyError:
                return
            yield slot
