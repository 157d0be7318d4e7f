"""Compute checksums as one operation of a host stream."""

from collections.abc import Callable
from typing import Any

import numpy as np

from handlepool.drivers.checksum import of_host
from handlepool.drivers.host.scheduler import QueuedOperation


class HostSums:
    """Checksums of arrays, which queued work computes.

    See `handlepool.drivers.checksum.Sums`.

    Parameters
    ----------
    wait : callable
        Waits on the host for an operation.
    """

    def __init__(self, wait: Callable[[QueuedOperation], None]) -> None:
        self._wait = wait
        self._values: list[int] | None = None
        self._operation: QueuedOperation | None = None

    def compute(self, *arrays: np.ndarray[Any, Any]) -> None:
        """Compute the checksums; the queued operation calls this method."""
        self._values = [of_host(array) for array in arrays]

    def queued(self, operation: QueuedOperation) -> None:
        """Remember the operation that computes the checksums."""
        self._operation = operation

    def ready(self) -> bool:
        """Return whether the checksums are computed; see the protocol.

        The call runs no queued work. For the race checker, it does not count as a wait of the host.
        """
        return self._operation is not None and self._operation.done

    def wait(self) -> None:
        """Wait on the host until the checksums are computed; see the protocol."""
        if self._operation is not None:
            self._wait(self._operation)

    def values(self) -> list[int] | None:
        """Return the checksums, or None if not computed; see the protocol."""
        return self._values
