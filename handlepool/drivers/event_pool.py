"""Reuse the events of one device.

The package records these events to order two streams outside of forks, and to mark the ends of tasks.
"""

from typing import Any

from handlepool.drivers.protocol import Driver


class Events:
    """Pool the events of one device.

    An event is released when no thread will wait for its old record any more. Then another user may record the event again.

    Attributes
    ----------
    driver : Driver
    free : list of event
        Events that `acquire` takes before it creates new events.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        # A list's appends and pops are atomic, so no lock is needed.
        self.free: list[Any] = []
        self._closed = False

    def acquire(self) -> Any:
        """Return an event of the device, which must be current."""
        try:
            return self.free.pop()
        except IndexError:
            with self.driver.relaxed():
                return self.driver.create_event()

    def release(self, event: object) -> None:
        """Take back an event that `acquire` returned, for later users."""
        self.free.append(event)
        self._note_released()

    def release_all(self, events: list[Any]) -> None:
        """Take back several events that `acquire` returned, for later users."""
        self.free.extend(events)
        self._note_released()

    def _note_released(self) -> None:
        # A thread that releases an event appends the event before this check. `destroy` sets `_closed` before it empties the
        # list. So either this call or the other thread's call destroys the event.
        if self._closed:
            self.destroy()

    def order(self, first: int, then: int) -> None:
        """Let stream ``then`` wait for the present work of stream ``first``.

        Both arguments are pointers of streams of this pool's device, which must be current.
        """
        event = self.acquire()
        try:
            self.driver.record_event(event, first)
            self.driver.wait_event(then, event)
        finally:
            # The queued wait is for this record of the event. So the event can be recorded anew at once.
            self.release(event)

    def destroy(self) -> bool:
        """Destroy the free events. From now on, `release` destroys events.

        Returns whether all free events could be destroyed.
        """
        self._closed = True
        while self.free:
            try:
                event = self.free.pop()
            except IndexError:
                break
            try:
                with self.driver.relaxed():
                    self.driver.destroy_event(event)
            except Exception:
                # A later call tries to destroy the event again.
                self.free.append(event)
                return False
        return True
