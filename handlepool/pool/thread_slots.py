"""The slots that threads own, and those that threads and streams have left behind."""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator

from handlepool.pool.slot import Slot
from handlepool.pool.stream import is_over

MOST_FOREIGN_STREAMS = 64
"""Bare pointers and foreign streams that one thread's slots are kept for; nothing tells of such a stream's end."""


class ThreadSlots:
    """One thread's slots by stream key, changed by that thread alone. Dies with it, and then leaves them behind (guarantee 11).

    Parameters
    ----------
    left : deque of Slot
        Where slots go that nobody has any more. To append is atomic and calls nothing, so it may be done by a destructor.
    """

    def __init__(self, left: deque[Slot]) -> None:
        self.slots: dict[Hashable, Slot] = {}
        self._foreign: OrderedDict[Hashable, None] = OrderedDict()  # keys of bare pointers, the least recently used first
        self._left = left
        self._sweep_at = 16

    def add(self, slot: Slot, *, foreign: bool) -> None:
        """Take a new slot in. Of those for foreign streams the least recently used beyond the limit is left behind.

        So are those for streams and captures that are over, as the new one's key tells.
        """
        if len(self.slots) >= self._sweep_at:  # those whose streams have gone; doubling makes the sweeps rare
            for key, left in list(self.slots.items()):
                if left.owner is None and self.slots.get(key) is left:
                    del self.slots[key]
            self._sweep_at = max(16, 2 * len(self.slots))
        # A finaliser that the collector ran while this slot was made may have made one for the same key: its slot goes. Nothing
        # is called between looking and storing, so no finaliser comes there.
        key = slot.key
        known: Slot | None = self.slots[key] if key in self.slots else None  # noqa: SIM401 - `get` is a call
        self.slots[key] = slot
        if known is not None and known.owner is not None:
            known.end()
            self._left.append(known)
        if not foreign:
            return
        for other in list(self._foreign):  # a finaliser that comes meanwhile may add to it
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
        """Count a foreign stream's key as used."""
        self._foreign.move_to_end(key)

    def __del__(self) -> None:
        for slot in list(getattr(self, "slots", {}).values()):  # it has none where an interrupt came while it was made
            slot.end()
            self._left.append(slot)


class LiveSlots:
    """Every slot that a thread owns. Leaving one behind calls nothing (guarantee 10)."""

    def __init__(self) -> None:
        self._slots: set[Slot] = set()  # each change and each copy is one atomic step
        self._left: deque[Slot] = deque()
        self._local = threading.local()

    def of_this_thread(self) -> ThreadSlots:
        """Return the calling thread's own."""
        mine: ThreadSlots | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = ThreadSlots(self._left)
        return mine

    def add(self, slot: Slot, stream: object) -> None:
        """Let the calling thread own a slot until the thread ends, or until ``stream`` does, where that is not None."""
        if stream is not None:
            slot.watch = weakref.ref(stream, lambda _: self.defer(slot))
        self._slots.add(slot)
        self.of_this_thread().add(slot, foreign=stream is None)

    def defer(self, slot: Slot) -> None:
        """Take a slot from its owner, for `left_behind`."""
        slot.end()
        self._left.append(slot)

    def left_behind(self) -> Iterator[Slot]:
        """Hand out, once each, the slots that were left behind so far."""
        for _ in range(len(self._left)):
            try:
                slot = self._left.popleft()
                self._slots.remove(slot)
            except IndexError:  # another thread takes them too
                return
            except KeyError:  # left twice, since both its thread and its stream have ended
                continue
            yield slot

    def defer_again(self, slot: Slot) -> None:
        """Keep a slot that was handed out and could not be taken in, for a later try."""
        self._slots.add(slot)
        self._left.append(slot)

    def of_other_threads(self) -> int:
        """Count the slots that other threads than the calling one own."""
        return len(self._slots.difference(self.of_this_thread().slots.values()))

    def is_empty(self) -> bool:
        """Whether no thread has a slot."""
        return not self._slots

    def take_all(self) -> Iterator[Slot]:
        """Hand out, once each, all slots that threads own or have left behind, as they are."""
        while True:
            try:
                slot = self._slots.pop()
            except KeyError:
                return
            yield slot
