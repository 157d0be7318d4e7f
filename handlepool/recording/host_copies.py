"""Turn host data into constants, or refuse it (guarantee 19).

The host data are the values that a recorded function brings to the device.

A graph holds a copy from the host as an address of the host's. A replay would read that memory again, with the values that it
has by then. So the arrays that the driver's `asarray` makes in the first call are made once more, before the second call. In the
second call, `asarray` gives a copy of the constant, on the device, where the values are equal. The function may write into its
copy.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from handlepool._util.frames import place_of_call
from handlepool._util.names import shown
from handlepool._util.reachable import leaves
from handlepool.errors import CaptureError
from handlepool.order.places import lanes_for
from handlepool.pool.context import run_on
from handlepool.pool.internals import PoolInternals
from handlepool.recording.rehearsal import OF_CONSTANT
from handlepool.recording.update import piece_of

REMEDIES = "Pass the array as an argument, or make it on the device in an operation"


class HostCopies:
    """The values that both calls of a function bring to the device.

    Used by one thread.

    Parameters
    ----------
    pool : PoolInternals
    name : str
        The name of the function.
    """

    def __init__(self, pool: PoolInternals, name: str) -> None:
        self._pool = pool
        self._driver = pool.driver
        self._name = name
        self._values: list[np.ndarray[Any, Any]] = []
        self._made: list[Callable[[], Any]] = []
        self._constants: dict[int, Any] = {}
        self._left: list[int] = []
        self._read: list[np.ndarray[Any, Any]] = []
        self._next_read = 0
        self._refused = ""
        self._keep: Callable[..., object] = bool

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the values in the first call."""
        end = self._driver.watch_host_data(self._note, lambda values, *_: self._read.append(values))
        try:
            yield
        finally:
            end()

    def upload(self, removed: Sequence[Any] = ()) -> None:
        """Make the constants on the current stream.

        An array that the function has kept, and will not make again, gets no constant. ``removed`` are values that the function
        kept in its arguments, and does not find there at its second call.
        """
        again = {*map(id, leaves(removed))} if removed else set()
        if [made for made in self._made if made() is not None]:
            # Some arrays may be in cycles that no object reaches, such as the cycle of a local function that calls itself.
            gc.collect()
        for number, made in enumerate(self._made):
            array = made()
            if array is None or id(array) in again:
                self._constants[number] = self._driver.asarray(self._values[number])
        self._left = [*self._constants]

    def renew(self) -> None:
        """Make the constants of the last repetition again.

        They are for another repetition, and are made on the current stream.
        """
        used = [number for number in self._constants if number not in self._left]
        self._constants = {number: self._driver.asarray(self._values[number]) for number in used}
        self._left, self._next_read = used, 0

    @contextmanager
    def repeated(self, keep: Callable[..., object]) -> Iterator[None]:
        """Give the constants to the second call, and keep each used constant.

        Raises
        ------
        CaptureError
            For values that differ from the first call's, also where the function caught the error.
        """
        self._keep = keep
        end = self._driver.watch_host_data(self._repeat, self._read_again)
        try:
            yield
        finally:
            end()
        if self._refused:
            raise CaptureError(self._refused)

    def _note(self, values: np.ndarray[Any, Any], copy: Callable[[], Any]) -> Any:
        array = copy()
        # The copy keeps the values, since the function may change the host array.
        self._values.append(np.array(values, order="K"))
        # The weak reference tells later whether the function has kept the array.
        self._made.append(ref(array))
        return array

    def _repeat(self, values: np.ndarray[Any, Any], copy: Callable[[], Any]) -> Any:
        number = next((each for each in self._left if _alike(self._values[each], values)), None)
        if number is None:
            raise self._refuse(
                f"the array that asarray makes at {place_of_call()}, {shown(values)}, has other values than in the first call"
            )
        self._left.remove(number)
        constant = self._constants[number]
        self._keep(constant)
        return self._as_node(partial(self._copied, constant), constant)

    def _copied(self, constant: Any) -> Any:
        array = self._driver.empty(constant.shape, constant.strides, constant.dtype)
        self._driver.copy(array, constant)
        return array

    def _as_node(self, make: Callable[[], Any], constant: Any) -> Any:
        """Make a copy of a constant.

        With lanes the copy is a node, so that other nodes do not wait for it.
        """
        driver, device = self._driver, self._pool.current_device()
        lanes = lanes_for(self._pool, driver.current_stream(device).ptr)
        if lanes is None:
            return make()

        def call(slot: Any) -> Any:
            return make() if slot is None else run_on(self._pool, slot.side_stream, device, None, make, (), {})

        return lanes.run("asarray", (piece_of(driver, constant),), (), (constant,), call, what=OF_CONSTANT)

    def _read_again(self, values: np.ndarray[Any, Any], label: str, copies: bool) -> None:
        """Check host memory that recorded work reads.

        Each replay reads that memory where it is.
        """
        number = self._next_read
        self._next_read += 1
        if copies:
            raise self._refuse(f"{label} at {place_of_call()} copies NumPy's {shown(values)} to the device")
        known = self._read[number] if number < len(self._read) else None
        if known is None or not (_lies_there(known, values) or _alike(known, values)):
            raise self._refuse(
                f"{label} at {place_of_call()} reads NumPy's {shown(values)}, with other values than in the first call"
            )

    def _refuse(self, fault: str) -> CaptureError:
        # The first refusal stays, since the function may have caught its error.
        self._refused = self._refused or f"{self._name} cannot be recorded: {fault}. {REMEDIES}"
        return CaptureError(self._refused)


def _lies_there(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    places = [(each.__array_interface__["data"][0], each.shape, each.strides, each.dtype) for each in (one, other)]
    return places[0] == places[1]


def _alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    # The bytes are compared, so that NaN equals NaN and zeros of other signs differ.
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
