"""Events of one device for reuse: between streams whose order is none of a fork's, and at the ends of tasks."""

from typing import Any

from handlepool.drivers.protocol import Driver


class Events:
    """Events of one device. One may be recorded anew as soon as nobody will wait for its old record any more.

    Attributes
    ----------
    free : list of event
        What `acquire` takes first.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.free: list[Any] = []  # appends and pops are atomic
        self._closed = False

    def acquire(self) -> Any:
        """Return an event; called with its device current."""
        try:
            return self.free.pop()
        except IndexError:
            with self._driver.relaxed():
                return self._driver.create_event()

    def release(self, event: object) -> None:
        """Take an event back."""
        self.free.append(event)
        self.note_released()

    def note_released(self) -> None:
        """Be told that events were put among the free ones."""
        if self._closed:  # in this order, so that one of the two threads sees it
            self.destroy()

    def order(self, first: int, then: int) -> None:
        """Let a stream wait for what another one was given by now; pointers of streams of the device, which is current."""
        event = self.acquire()
        try:
            self._driver.record_event(event, first)
            self._driver.wait_event(then, event)
        finally:
            self.release(event)  # a wait holds on to the record that it was given

    def destroy(self) -> bool:
        """Destroy the free events, and from now on whatever is released. Whether that could be done."""
        self._closed = True
        while self.free:
            try:
                event = self.free.pop()
            except IndexError:
                break
            try:
                with self._driver.relaxed():
                    self._driver.destroy_event(event)
            except Exception:
                self.free.append(event)  # for a later try
                return False
        return True
