"""Turn host data into constants, or refuse the recording (guarantee 19).

Host data are values in host memory that a recorded function copies to the device. If the graph contained such a copy, each replay
would read the host memory again, with the values of that time. A constant avoids this: a device array that the program keeps. The
function is called twice. In the first call, this module notes the values that the driver's `asarray` copies. Before the second
call, which is recorded, it makes a constant of each noted value. In the second call, `asarray` finds the constant with equal
values and returns a copy of it, into which the function may write. If no constant has equal values, `asarray` raises.
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

    Only one thread uses an object of this class.

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
        """Note the values that the first call copies to the device."""
        end = self._driver.watch_host_data(self._note, lambda values, *_: self._read.append(values))
        try:
            yield
        finally:
            end()

    def upload(self, removed: Sequence[Any] = ()) -> None:
        """Make the constants for the second call, on the current stream.

        If the function has kept an array since the first call, the array gets no constant, because the second call will not make
        it again. ``removed`` are values that the first call stored in its arguments, and that the caller has removed from them.
        Arrays among ``removed`` get constants, because the second call will make them again.
        """
        again = {*map(id, leaves(removed))} if removed else set()
        if [made for made in self._made if made() is not None]:
            # Arrays in unreachable reference cycles do not count as kept, so they are collected first. For example, a local
            # function that calls itself is in such a cycle.
            gc.collect()
        for number, made in enumerate(self._made):
            array = made()
            if array is None or id(array) in again:
                self._constants[number] = self._driver.asarray(self._values[number])
        self._left = [*self._constants]

    def renew(self) -> None:
        """Make new constants for a further capture, on the current stream.

        Only the constants that the last capture used are made again.
        """
        used = [number for number in self._constants if number not in self._left]
        self._constants = {number: self._driver.asarray(self._values[number]) for number in used}
        self._left, self._next_read = used, 0

    @contextmanager
    def repeated(self, keep: Callable[..., object]) -> Iterator[None]:
        """Give the constants to the second call; ``keep`` each used constant.

        Raises
        ------
        CaptureError
            If the second call copies other values than the first call. The error is raised even if the function caught it.
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
        # The values are copied, because the function may change the host array later.
        self._values.append(np.array(values, order="K"))
        # The reference is weak, so that `upload` can tell whether the function has kept the array.
        self._made.append(ref(array))
        return array

    def _repeat(self, values: np.ndarray[Any, Any], copy: Callable[[], Any]) -> Any:
        number = next((each for each in self._left if _alike(self._values[each], values)), None)
        if number is None:
            raise self._refuse(
                f"in the second call, the array that asarray makes at {place_of_call()}, {shown(values)}, has other values than "
                f"in the first call"
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
        """Call ``make``, which copies a constant, and return the copy.

        With lanes, the copy is a node of its own. So only nodes that use the copy wait for it.
        """
        driver, device = self._driver, self._pool.current_device()
        lanes = lanes_for(self._pool, driver.current_stream(device).ptr)
        if lanes is None:
            return make()

        def call(slot: Any) -> Any:
            return make() if slot is None else run_on(self._pool, slot.side_stream, device, None, make, (), {})

        return lanes.run("asarray", (piece_of(driver, constant),), (), (constant,), call, what=OF_CONSTANT)

    def _read_again(self, values: np.ndarray[Any, Any], label: str, copies: bool) -> None:
        """Refuse host data that recorded work copies, or whose values changed.

        The driver calls this method when work reads host memory. ``label`` is the name of the work, and ``copies`` says whether
        CuPy does the work by a copy from the host.
        """
        number = self._next_read
        self._next_read += 1
        if copies:
            raise self._refuse(f"{label} at {place_of_call()} would copy NumPy's {shown(values)} from the host at each replay")
        known = self._read[number] if number < len(self._read) else None
        if known is None or not (_lies_there(known, values) or _alike(known, values)):
            raise self._refuse(
                f"in the second call, {label} at {place_of_call()} reads NumPy's {shown(values)}, with other values than in the "
                f"first call"
            )

    def _refuse(self, fault: str) -> CaptureError:
        # The first refusal is kept, so that `repeated` can raise it even if the function catches the error.
        self._refused = self._refused or f"{self._name} cannot be recorded: {fault}. {REMEDIES}"
        return CaptureError(self._refused)


def _lies_there(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    places = [(each.__array_interface__["data"][0], each.shape, each.strides, each.dtype) for each in (one, other)]
    return places[0] == places[1]


def _alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    # The bytes are compared, so that NaN equals NaN, and 0.0 differs from -0.0.
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
