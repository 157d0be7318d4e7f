"""Track a region's streams: their calls, and the calls they wait for.

A wait takes one event on the stream of the earlier call. If another branch is about to continue on that stream, the event is
recorded first, because further calls may depend on the earlier call alone. If not, the first call that waits records the event,
and then waits for all work that the stream has received by then. Each stream knows which calls of other streams it already
waits for, also through third streams. No stream waits for such a call again.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from handlepool.drivers.event_pool import Events
from handlepool.pool.slot import Slot

MOST_MARKS = 64
"""The maximum number of events that are kept for one stream.

To wait for a call before all kept events, a stream waits for the oldest kept event.
"""

Needs = dict["Track", int]
"""For each stream, the number of the last call to wait for."""

NOTHING: Needs = {}
"""The shared empty value of `Needs`, which is never written to."""


class Track:
    """A stream of a region, with its calls and their needs.

    Attributes
    ----------
    pointer : int
        The stream.
    home : Track or None
        The track of the caller's stream, for a stream that a fork leased. None for any other stream. While a branch runs, the
        caller's stream receives no new work.
    slot, fork : Slot, object
        The slot of a side stream, and the key of the fork that leased the slot.
    stream : object
        The stream object of a caller's stream. It is kept after the join, because recording an event on a destroyed stream
        fails.
    count : int
        Number of calls that the stream received.
    known : dict
        For each other track, the last call that this stream waits for. The dictionary is never changed in place, because marks
        keep it.
    seen : dict
        The value of ``home.known`` when a branch last started on this stream.
    marked : int
        Number of the last call after which an event was recorded.
    marks : list of (int, event, dict)
        The calls after which events were recorded, in ascending order. Each entry has the call's number, the event, and the
        value of ``known`` at that time.
    into : (Track, int) or None
        The track that this track was joined to, and the joining call.
    """

    __slots__ = ("count", "fork", "home", "into", "known", "marked", "marks", "pointer", "seen", "slot", "stream")

    def __init__(self, pointer: int, home: "Track | None" = None, fork: object = None, slot: Slot | None = None) -> None:
        self.pointer = pointer
        self.home = home
        self.fork = fork
        self.slot = slot
        self.stream: object = None
        self.count = 0
        self.known = self.seen = NOTHING
        self.marked = -1
        self.marks: list[tuple[int, Any, Needs]] = []
        self.into: tuple[Track, int] | None = None

    def next_call(self) -> int:
        """Count a further call of this stream, and return its number."""
        self.count = call = self.count + 1
        return call

    def mark(self, event: Any) -> None:
        """Add the mark of an event that was just recorded.

        The event covers all calls of the stream so far.
        """
        self.marks.append((self.count, event, self.known))
        # An interrupt may come between the two statements. So `marked` changes second, and never names a call without a mark.
        self.marked = self.count

    def follow_home(self) -> None:
        """Learn all calls that ``home`` waits for.

        When a branch started on this stream, this stream waited for ``home``. So it also comes after the calls that ``home``
        waits for.
        """
        home = self.home
        if home is not None and home.known is not self.seen:
            self.learn(home.known)
            self.seen = home.known

    def absorb(self, tracks: "Iterable[Track]", stream: object = None) -> None:
        """Note that this stream waits for all calls of joined tracks.

        ``stream`` is this track's stream object. It is kept, because recording an event on a destroyed stream fails.
        """
        call = self.next_call()
        for track in tracks:
            track.into = (self, call)
            self.learn(track.known)
        if stream is not None:
            self.stream = stream

    def passed(self, call: int) -> tuple[int, Any, Needs]:
        """Return the earliest mark at or after a call.

        A mark is an event on the track's stream, with the number of the last call before it.
        """
        return self.marks[bisect_left(self.marks, (call,))]

    def learn(self, more: Needs) -> None:
        """Add ``more`` to the calls that this stream waits for.

        ``more`` is the value of ``known`` of another track, which this stream waits for.
        """
        if not self.known:
            self.known = more
        elif more:
            # Marks keep this dictionary. A change in place would add waits to the mark of an event that was recorded before
            # these waits.
            known = dict(self.known)
            for track, call in more.items():
                if known.get(track, 0) < call:
                    known[track] = call
            self.known = known

    def waits_for(self, other: "Track", call: int) -> bool:
        """Return whether this stream comes after another stream's call.

        The other stream may be this stream, a caller's stream at any level, or a stream that this stream waits for.
        """
        if other is self or self.known.get(other, 0) >= call:
            return True
        home = self.home
        # A branch starts after its caller's stream. In nested forks that stream started after the caller's stream of the outer
        # fork, and so on. So this stream comes after every ``home`` in the chain.
        while home is not None:
            if home is other:
                return True
            home = home.home
        return False


def record_mark(events: Events, track: Track) -> None:
    """Record an event for all work that a stream has received.

    Calls on other streams can then wait for just this work. ``events`` is the pool of events of the stream's device.
    """
    marks = track.marks
    try:
        # If the stream has the maximum of marks, the event of the oldest mark is recorded again. Streams that wait for its
        # earlier record are not affected, because a wait refers to the record at the time of the wait.
        event = events.free.pop() if len(marks) < MOST_MARKS else marks.pop(0)[1]
    except IndexError:
        event = events.acquire()
    try:
        events.driver.record_event(event, track.pointer)
    except BaseException:
        events.release(event)
        raise
    track.mark(event)


def follow(events: Events, track: Track, needs: Needs) -> None:
    """Let a stream wait for the calls in ``needs``.

    A call for which the stream waits already takes no further wait.
    """
    for needed, given in needs.items():
        # The needed stream may have been joined, which released its events. Then `last` returns the joining call on the
        # caller's stream instead.
        other, call = last(needed, given)
        if not track.waits_for(other, call):
            if other.marked < call:
                record_mark(events, other)
            reached, event, known = other.passed(call)
            events.driver.wait_event(track.pointer, event)
            track.learn({**known, other: reached})


def end_tracks(events: Events, tracks: Iterable[Track], *, closed: bool = False) -> None:
    """Drop tracks' references to other tracks, and release their events.

    With ``closed``, the references to home tracks are dropped as well, because the books are closed.
    """
    for track in tracks:
        if track.marks:
            events.release_all([event for _, event, _ in track.marks])
            track.marks.clear()
        track.known = track.seen = NOTHING
        track.slot = track.fork = track.stream = None
        if closed:
            track.home = None


def last(track: Track, call: int) -> tuple[Track, int]:
    """Return the call to wait for instead of ``call`` after a join.

    If ``track`` was joined, the result is the joining call on the caller's stream. If not, the result is ``call`` itself.
    """
    while track.into is not None:
        track, call = track.into
    return track, call


NO_TRACK = Track(0)
"""The placeholder for the caller's track in a fork without branches."""
