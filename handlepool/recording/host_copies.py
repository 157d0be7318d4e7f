"""Turn host data into constants, or refuse it (guarantee 19).

Host data are values that a recorded function copies to the device. A graph would contain such a copy with the address of the
host memory. A replay would then read whatever values this memory has at that time. Therefore the values that the driver's
`asarray` copies in the first call are copied once more before the second call, into constants. In the second call, `asarray`
compares its values with the constant. If they are equal, it returns a copy of the constant, made on the device, into which the
function may write. If they differ, it raises.
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
    """The values that both calls of a function copy to the device.

    An object is used by one thread.

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
        """Note the values that are copied in the first call."""
        end = self._driver.watch_host_data(self._note, lambda values, *_: self._read.append(values))
        try:
            yield
        finally:
            end()

    def upload(self, removed: Sequence[Any] = ()) -> None:
        """Make the constants on the current stream.

        An array that the function has kept gets no constant, because the second call will not make it again. ``removed`` are
        values that the first call stored in its arguments. They are removed before the second call, so the function will make
        them again.
        """
        again = {*map(id, leaves(removed))} if removed else set()
        if [made for made in self._made if made() is not None]:
            # Arrays in unreachable cycles do not count as kept. An example is the cycle of a local function that calls itself.
            gc.collect()
        for number, made in enumerate(self._made):
            array = made()
            if array is None or id(array) in again:
                self._constants[number] = self._driver.asarray(self._values[number])
        self._left = [*self._constants]

    def renew(self) -> None:
        """Make the constants of the last repetition again, for another one.

        They are made on the current stream.
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
            If a value differs from that of the first call, even if the function caught the error.
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
        # This weak reference later shows whether the function has kept the array.
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

        With lanes, the copy is a node of its own, so that unrelated nodes do not wait for it.
        """
        driver, device = self._driver, self._pool.current_device()
        lanes = lanes_for(self._pool, driver.current_stream(device).ptr)
        if lanes is None:
            return make()

        def call(slot: Any) -> Any:
            return make() if slot is None else run_on(self._pool, slot.side_stream, device, None, make, (), {})

        return lanes.run("asarray", (piece_of(driver, constant),), (), (constant,), call, what=OF_CONSTANT)

    def _read_again(self, values: np.ndarray[Any, Any], label: str, copies: bool) -> None:
        """Check host memory that recorded work reads in place."""
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
        # The first refusal is kept, because the function may catch the error.
        self._refused = self._refused or f"{self._name} cannot be recorded: {fault}. {REMEDIES}"
        return CaptureError(self._refused)


def _lies_there(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    places = [(each.__array_interface__["data"][0], each.shape, each.strides, each.dtype) for each in (one, other)]
    return places[0] == places[1]


def _alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    # The bytes are compared, so that NaN equals NaN and zeros of other signs differ.
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
