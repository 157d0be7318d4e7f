"""The host driver's calls with events."""

from collections.abc import Callable

from handlepool.drivers.host.queues import Event, StreamTable
from handlepool.drivers.host.race_checker import Order
from handlepool.drivers.host.streams import ThreadState
from handlepool.errors import ContractError


class Events:
    """The part of `HostDriver` that orders streams by events."""

    order: Order | None
    _events_alive: set[Event]
    _forbid: Callable[[str], None]
    _note: Callable[[str], None]
    _streams: StreamTable
    _thread: ThreadState

    def record_event(self, event: Event, pointer: int) -> None:
        """Let the event stand for all that the stream was given so far; it may be recorded again."""
        self._note("record_event")
        self._streams.record(event, self._streams.resolve(pointer))

    def wait_event(self, pointer: int, event: Event) -> None:
        """Let what the stream is given from now on run after what the event stands for now."""
        self._note("wait_event")
        self._streams.wait(self._streams.resolve(pointer), event)

    def create_event(self, *, timing: bool = False) -> Event:
        """A new event of the current device."""
        self._note("create_event")
        self._forbid("create_event")
        event = Event(self._thread.device, timing)
        self._events_alive.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; waits that were queued hold what they wait for."""
        self._note("destroy_event")
        self._streams.check_event(event)
        self._forbid("destroy_event")
        event.destroyed = True
        self._events_alive.discard(event)

    def event_done(self, event: Event) -> bool:
        """Whether what the event stands for has run; true of an event that was never recorded."""
        self._note("event_done")
        self._forbid("event_done")
        operation = self._streams.operation_of(event, "event_done")
        self._streams.scheduler.nudge()  # who polls must see progress
        if self.order is not None and operation.done:
            self.order.waited(operation)
        return operation.done

    def synchronize_event(self, event: Event) -> None:
        """Wait until what the event stands for has run."""
        self._note("synchronize_event")
        self._forbid("synchronize_event")
        self._streams.wait_on_host(self._streams.operation_of(event, "synchronize_event"), repr(event))

    def elapsed(self, start: Event, end: Event) -> float:
        """Milliseconds between two timing events that have passed."""
        self._note("elapsed")
        times = []
        for event in (start, end):
            operation = self._streams.operation_of(event, "elapsed")
            if not event.timing or event.moment is None or not operation.done:
                raise ContractError(f"elapsed: {event!r} is no timing event that was recorded and has passed")
            times.append(operation.time)
        return (times[1] - times[0]) * 1e3
