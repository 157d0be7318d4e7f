"""Call a function for real, and then capture a second call.

The first call runs on the caller's stream. The second call is captured, and must make the same launches as the first call.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

from handlepool._util.arguments import TO_RUN, check_ran
from handlepool._util.names import kind_of, shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, CaptureError
from handlepool.graphs.plan import Plan
from handlepool.order.measured import awaited, wait_for_answers
from handlepool.order.stream_order import in_torch, torch_among, torch_in_use
from handlepool.order.uses import Memory
from handlepool.pool.context import on_device, run_on
from handlepool.pool.deferred import defer
from handlepool.pool.internals import PoolInternals
from handlepool.pool.process_end import process_end
from handlepool.pool.stream import StreamReference
from handlepool.recording import tensors
from handlepool.recording.capture import Recording
from handlepool.recording.host_copies import HostCopies
from handlepool.recording.rehearsal import ContainerSnapshot, Launches, LeftoverArrays, Rehearsal, check_same
from handlepool.recording.state import State

T = TypeVar("T")


@dataclass(slots=True)
class Take:
    """A recording of a program's call, with its outputs.

    Attributes
    ----------
    recording : Recording
    outputs : object
        The value that the function returned under capture.
    memory : Memory
        The memory that replays read and write.
    launched : tuple of (Plan, int)
        Each launched plan with its number of launches. Empty if the launches were not counted.
    """

    recording: Recording
    outputs: Any
    memory: Memory | None
    launched: tuple[tuple[Plan, int], ...] = ()

    def end(self) -> None:
        """Destroy the recording, after all its launches have ended."""
        held = [self.outputs]
        self.outputs, self.launched = None, ()
        dispose(self.recording, held)


def dispose(recording: Recording, held: list[Any]) -> None:
    """Destroy a recording whose launches have ended.

    ``held`` are objects that were kept alive for the recording. The list is emptied.
    """
    held.append(recording.kept.take())
    try:
        with on_device(recording.pool.driver, recording.device), recording.pool.driver.relaxed():
            held.clear()
        done = recording.destroy()
    except BaseException:
        defer(recording.settle)
        raise
    # If a caller still holds arrays in the recording's memory, this memory cannot be freed yet, and a later call frees it.
    if not done:
        defer(recording.settle)


class FirstCall:
    """Make a function's real call, and note its launches.

    Each later capture of the function must make the same launches.

    Parameters
    ----------
    pool : PoolInternals
    name : str
        The name of the function.
    lanes : int or None
        As in `record`.
    home : StreamReference
        The caller's stream.
    counted : bool
        Whether to count the launches of plans even if the recording has lanes.
    """

    def __init__(
        self, pool: PoolInternals, name: str, lanes: int | None, home: StreamReference, *, counted: bool = False
    ) -> None:
        self._pool, self._name, self._lanes, self._home = pool, name, lanes, home
        self._copies = HostCopies(pool, name)
        self._rehearsal = None if lanes is None else Rehearsal(pool, home.pointer)
        self._launches = Launches(pool) if counted or lanes is None else None
        self._shapes: list[Any] = []
        self._captured = False
        self._asked = 0

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function on the caller's stream; return its value."""
        pool, home = self._pool, self._home
        stream = home.stream or pool.driver.wrap_stream(home.pointer, home.owner)
        call: Callable[..., Any] = partial(run_on, pool, stream, home.device, None)
        if self._rehearsal is not None:
            call = partial(_rehearsed, self._rehearsal, pool, home, call)
        if self._launches is not None:
            call = partial(self._launches.around, call)
        # The number of measurements of writes that were requested so far. They concern earlier calls, so `capture` waits only for
        # the measurements that this call requests.
        self._asked = awaited.asked
        with self._copies.noted():
            returned = call(function, args, kwargs)
        self._shapes = _shapes(pool.driver, returned)
        return returned

    def keep(self) -> None:
        """Keep the noted plans for further captures, but drop them at exit."""
        process_end.add(self._end_at_exit)

    def end(self) -> None:
        """End the first call; find its arrays that are still alive."""
        for left in self._leftovers():
            left.end()

    def _leftovers(self) -> list[LeftoverArrays]:
        return [watcher.new for watcher in (self._rehearsal, self._launches) if watcher is not None]

    def plans(self) -> list[tuple[Plan, int]]:
        """Return the plans launched on the caller's device, with launch counts."""
        return [] if self._launches is None else self._launches.plans(self._home.device)

    def capture(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: ContainerSnapshot,
        values: Sequence[Any],
        home: StreamReference,
        finish: Callable[[Recording, Any], T],
        *,
        kept: Sequence[Any] | None = None,
        before: State | None = None,
        returned: object = None,
        empty: bool = False,
    ) -> T:
        """Call the function again under capture, and finish the recording.

        The method returns the value of ``finish(recording, outputs)``. If the method raises, it restores the objects that the
        second call changed, and destroys the recording.

        Parameters
        ----------
        given : ContainerSnapshot
            The snapshot of the lists and dictionaries among the arguments.
        values : sequence
            The values that the arguments contain, also inside containers.
        home : StreamReference
            The caller's stream, which is current.
        finish : callable
            Makes the value that this method returns, such as a program.
        kept : sequence, optional
            Values that the program keeps alive, because the graph reads them. The default is the function and its arguments.
        before : State, optional
            The state of the same arguments before the first call.
        returned : optional
            The value of the first call, if the caller still holds it.
        empty : bool
            Whether the function may return None.

        Raises
        ------
        CaptureError
            If the second call differs from the first, or if the function cannot be recorded.
        ContractError
            If an operation wrote more than it declares.
        """
        pool, name, lanes, driver = self._pool, self._name, self._lanes, self._pool.driver
        recording = Recording(pool, name, lanes, () if self._rehearsal is None else self._rehearsal.calls)
        state, launches = None, self._launches
        again = None if launches is None or lanes is not None else Launches(pool)
        try:
            if awaited.asked > self._asked and not self._captured:
                # Operations may run concurrently as nodes only if they write no more than they declare. So the measurements of
                # their writes must be complete before the capture.
                wait_for_answers(self._asked)
            renewed = given.renew()
            if self._captured:
                self._copies.renew()
            else:
                self._copies.upload([*renewed, returned])
            state = State(driver, function, args, kwargs, given.containers, values, partial(_settle, driver, home.pointer))
            if before is not None:
                state.check_kept(name, before)
            recording.kept.add(*((function, args, kwargs) if kept is None else kept))
            captured: Callable[..., Any] = recording.capture
            if again is not None:
                captured = partial(again.around, captured)
            with self._copies.repeated(recording.kept.add):
                outputs = captured(function, args, kwargs, partial(state.check, name))
            given.check(name)
            # With lanes, `recording.capture` has already checked the state and compared the calls.
            if again is not None and launches is not None:
                state.check(name)
                check_same(name, launches.calls, again.calls)
            if outputs is None and not empty:
                raise nothing(name)
            now = _shapes(driver, outputs)
            if now != self._shapes:
                pairs = zip_longest(self._shapes, now, fillvalue="nothing")
                one, other = next(pair for pair in pairs if pair[0] != pair[1])
                raise CaptureError(
                    f"{name} returned something else in its second call, which is recorded: {_text(one)} the first "
                    f"time, and {_text(other)} the second time. Let both calls do the same: move decisions out of the function, "
                    "and if it fills a cache, call it once before the recording"
                )
            made = finish(recording, outputs)
            self._captured = True
            return made
        except BaseException:
            outputs, done = None, False
            try:
                # The arguments and the state are restored before the recording is destroyed. Otherwise they could still refer to
                # an array in the recording's memory, whose values no replay has written.
                given.restore()
                if state is not None:
                    state.restore()
                done = recording.destroy()
            finally:
                recording.kept.take()
                # If the recording could not be destroyed, it is deferred, and a later call destroys it. The caller gets the
                # original error, not the error of `destroy`.
                if not done:
                    defer(recording.settle)
            raise

    def memory(self, recording: Recording, outputs: object) -> Memory:
        """Return the memory that replays use; release the first call's arrays.

        Raises
        ------
        CaptureError
            If the capture reads an array that the first call made.
        """
        leftovers = self._leftovers()
        made = recording.memory(outputs, leftovers)
        for left in leftovers:
            left.forget()
        return made

    def _end_at_exit(self, deadline: float) -> None:
        """Drop the plans at exit, because they must not outlive cuDNN's binding."""
        for watcher in (self._rehearsal, self._launches):
            if watcher is not None:
                watcher.calls.clear()
        if self._launches is not None:
            self._launches.forget()


def name_of_call(function: object) -> str:
    """Return the name of ``function`` for messages."""
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None), type(function).__name__]
    return [name for name in names if isinstance(name, str)][0]  # noqa: RUF015 - without a generator


def nothing(name: str) -> ArgumentError:
    """Return the error for a function that returned None."""
    return ArgumentError(f"{name} returned None. Return the arrays that it writes")


def check_returned(name: str, function: object, returned: object) -> None:
    """Refuse a returned None, or a generator that has yet to run.

    Raises
    ------
    ArgumentError
    """
    if returned is None:
        raise nothing(name)
    if type(returned) in TO_RUN:
        check_ran(function, returned)


def _settle(driver: Driver, pointer: int) -> None:
    """Wait for the stream's work, which may still write NumPy arrays."""
    with driver.relaxed():
        driver.synchronize_stream(pointer)


def _shapes(driver: Driver, returned: Any) -> list[Any]:
    """Return the shape and type of each returned array.

    For an array of the driver, the entry is a tuple. For an array of another library, the entry is text.
    """
    native: Any = driver.array_types[0]
    if type(returned) is native:
        return [(native, returned.shape, returned.dtype)]
    return [
        (native, value.shape, value.dtype) if type(value) is native else shown(value)
        for value in leaves(returned)
        if type(value) is native or holds_values(value)
    ]


def _text(shape: Any) -> str:
    """Return an entry of `_shapes` as text, in the form of `shown`."""
    if isinstance(shape, str):
        return shape
    kind, extents, dtype = shape
    return f"<{kind_of(kind)} of shape {tuple(map(int, extents))}, {dtype}>"


def _rehearsed(rehearsal: Rehearsal, pool: PoolInternals, home: StreamReference, run: Callable[..., T], *call: Any) -> T:
    """Call a function while a rehearsal notes its calls.

    During the call, the caller's stream is also torch's current stream, as the captured stream is during the recording.
    """
    torch = (torch_in_use(pool.driver) or torch_among(*call)) if "torch" in sys.modules else None
    if torch is None:
        return rehearsal.around(run, *call)
    inside, found = in_torch(torch, home.pointer, home.pointer, home.device, *call), []
    tensors.in_order(pool, home.device, home.pointer, lambda: found.append(rehearsal.around(run, *inside)))
    return found[0]
