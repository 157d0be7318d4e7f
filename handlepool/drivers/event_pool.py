"""Reuse the events of one device.

The events order streams that no fork orders, and mark the ends of tasks.
"""

from typing import Any

from handlepool.drivers.protocol import Driver


class Events:
    """Pool the events of one device.

    An event may be recorded again as soon as no thread will wait for its old record.

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
        """Return an event; called with its device current."""
        try:
            return self.free.pop()
        except IndexError:
            with self.driver.relaxed():
                return self.driver.create_event()

    def release(self, event: object) -> None:
        """Take an event back."""
        self.free.append(event)
        self._note_released()

    def release_all(self, events: list[Any]) -> None:
        """Take several events back."""
        self.free.extend(events)
        self._note_released()

    def _note_released(self) -> None:
        # The release appends before this check, and `destroy` closes before it drains. So either thread destroys the event.
        if self._closed:
            self.destroy()

    def order(self, first: int, then: int) -> None:
        """Let one stream wait for the current work of another stream.

        Both are pointers of streams of this device, which is current.
        """
        event = self.acquire()
        try:
            self.driver.record_event(event, first)
            self.driver.wait_event(then, event)
        finally:
            # A wait keeps the record that it was given, so the event can be recorded again at once.
            self.release(event)

    def destroy(self) -> bool:
        """Destroy the free events, and destroy each later event on release.

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
