"""Streams of a region, as its books know them: what each was given, and which calls of the others it waits for."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from handlepool.pool.slot import Slot

Needs = dict["Track", int]
"""By stream, the last call on it that is to be waited for."""

NOTHING: Needs = {}
"""Everybody's until there is something to note, so it is never written to."""


class Track:
    """A stream of a region: what it was given, and what it waits for.

    Attributes
    ----------
    pointer : int
        The stream.
    home : Track or None
        Of the caller that its fork is of, which gives it nothing new while a branch runs.
    slot, fork : Slot, object
        Of a side stream, and what stands for the fork that has it.
    stream : object
        Kept once no fork has it: nobody may record on a stream that was destroyed.
    count : int
        How many calls it was given.
    known : dict
        By other track, up to which call this stream waits for it. Replaced, never changed, so that a mark can have it.
    seen : dict
        What ``home`` knew when a branch last started here.
    marked : int
        The last call that an event stands behind.
    marks : list of (int, event, dict)
        Such calls, ascending, the event, and what was known there.
    into : (Track, int) or None
        Once it was joined: where, and by which call.
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
        """Count one more call of this stream; its number."""
        self.count = call = self.count + 1
        return call

    def mark(self, event: Any) -> None:
        """Let an event, which was recorded just now, stand for all calls of this stream."""
        self.marks.append((self.count, event, self.known))
        # After that: an interrupt may come between the two.
        self.marked = self.count

    def follow_home(self) -> None:
        """Know all that ``home`` knows, which this stream came after when its branch started."""
        home = self.home
        if home is not None and home.known is not self.seen:
            self.learn(home.known)
            self.seen = home.known

    def absorb(self, tracks: "Iterable[Track]", stream: object = None) -> None:
        """Come after all calls of joined tracks. ``stream`` is kept: recording on a destroyed stream fails."""
        call = self.next_call()
        for track in tracks:
            track.into = (self, call)
            self.learn(track.known)
        if stream is not None:
            self.stream = stream

    def passed(self, call: int) -> tuple[int, Any, Needs]:
        """Return the first mark behind a call."""
        return self.marks[bisect_left(self.marks, (call,))]

    def learn(self, more: Needs) -> None:
        """Know what another track knows that this one waits for now."""
        if not self.known:
            self.known = more
        elif more:
            known = dict(self.known)
            for track, call in more.items():
                if known.get(track, 0) < call:
                    known[track] = call
            self.known = known

    def waits_for(self, other: "Track", call: int) -> bool:
        """Whether this stream comes after a call on another one.

        It may be the same, or the caller's, or the caller's caller's, or one that it waits for.
        """
        if other is self or self.known.get(other, 0) >= call:
            return True
        home = self.home
        while home is not None:
            if home is other:
                return True
            home = home.home
        return False


def end_tracks(tracks: Iterable[Track], give_back: Callable[[list[Any]], None], *, closed: bool = False) -> None:
    """Drop the references of tracks to other tracks, to their homes too where the books are closed, and give events back."""
    for track in tracks:
        if track.marks:
            give_back([event for _, event, _ in track.marks])
            track.marks.clear()
        track.known = track.seen = NOTHING
        track.slot = track.fork = track.stream = None
        if closed:
            track.home = None


def last(track: Track, call: int) -> tuple[Track, int]:
    """Return what is to be waited for in the place of a call, where its stream was joined since."""
    while track.into is not None:
        track, call = track.into
    return track, call


NO_TRACK = Track(0)
"""Stands for the caller's track of a fork that has no branches."""
