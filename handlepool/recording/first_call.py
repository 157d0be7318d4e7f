"""Call a function for real, and compare captures with that call."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

from handlepool._util.arguments import check_ran
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, CaptureError
from handlepool.graphs.plan import Plan
from handlepool.order.stream_order import in_torch, torch_among, torch_in_use
from handlepool.pool.context import run_on
from handlepool.pool.deferred import defer, remember
from handlepool.pool.internals import PoolInternals
from handlepool.pool.stream import StreamReference
from handlepool.recording import tensors
from handlepool.recording.capture import Recording
from handlepool.recording.host_copies import HostCopies
from handlepool.recording.rehearsal import Entries, Launches, Rehearsal, check_same
from handlepool.recording.state import State

T = TypeVar("T")


class FirstCall:
    """Call a function for real, and note its launches.

    Each capture must make the same launches.

    Parameters
    ----------
    pool : PoolInternals
    name : str
        The function's.
    lanes : int or None
        As in `record`.
    home : StreamReference
        The caller's stream.
    counted : bool
        Whether plans are counted with lanes, too.
    """

    def __init__(
        self, pool: PoolInternals, name: str, lanes: int | None, home: StreamReference, *, counted: bool = False
    ) -> None:
        self._pool, self._name, self._lanes, self._home = pool, name, lanes, home
        self._counted = counted or lanes is None
        self._copies = HostCopies(pool, name)
        self._rehearsal = Rehearsal(pool, home.pointer)
        self._launches = Launches(pool)
        self._shapes: list[str] = []
        self._captured = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function on the caller's stream; return its value."""
        pool, home = self._pool, self._home
        stream = home.stream or pool.driver.wrap_stream(home.pointer, home.owner)
        call: Callable[..., Any] = partial(run_on, pool, stream, home.device, None)
        if self._lanes is not None:
            call = partial(_rehearsed, self._rehearsal, pool, home, call)
        if self._counted:
            call = partial(self._launches.around, call)
        with self._copies.noted():
            returned = call(function, args, kwargs)
        self._shapes = _shapes(returned)
        return returned

    def keep(self) -> None:
        """Keep the plans for more captures, until exit."""
        remember(self._end_at_exit)

    def end(self) -> None:
        """Find the arrays that the function has kept."""
        for new in (self._rehearsal.new, self._launches.new):
            new.end()

    def plans(self) -> list[tuple[Plan, int]]:
        """Return the launched plans of the device, each with its launches."""
        return self._launches.plans(self._home.device)

    def capture(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Entries,
        home: StreamReference,
        finish: Callable[[Recording, Any], T],
        *,
        kept: Sequence[Any] | None = None,
        before: State | None = None,
        returned: object = None,
        empty: bool = False,
    ) -> T:
        """Call the function once more, under capture, and finish the recording.

        ``finish(recording, outputs)`` makes the value of this method. Where an error is raised, objects are as they were at the
        beginning, and nothing of the recording is left.

        Parameters
        ----------
        given : Entries
            Of the arguments.
        home : StreamReference
            The caller's stream, which is current.
        kept : sequence, optional
            Values that the graph reads; the function and its arguments where nothing is given.
        before : State, optional
            From before the first call, of the same arguments.
        returned : optional
            The value of the first call, where the caller still holds it.
        empty : bool
            Whether the function may return None.

        Raises
        ------
        CaptureError
            For a difference from the first call, and for a function that cannot be recorded.
        """
        pool, name, lanes, driver = self._pool, self._name, self._lanes, self._pool.driver
        recording = Recording(pool, name, lanes, self._rehearsal.calls)
        state, again = None, Launches(pool)
        try:
            renewed = given.renew()
            if self._captured:
                self._copies.renew()
            else:
                self._copies.upload([*renewed, returned])
            state = State(driver, function, args, kwargs, given.containers, partial(_settle, driver, home.pointer))
            if before is not None:
                state.check_kept(name, before)
            recording.kept.add(*((function, args, kwargs) if kept is None else kept))
            captured: Callable[..., Any] = recording.capture
            if lanes is None:
                captured = partial(again.around, captured)
            with self._copies.repeated(recording.kept.add):
                outputs = captured(function, args, kwargs, partial(state.check, name))
            state.check(name)
            given.check(name)
            if lanes is None:
                check_same(name, self._launches.calls, again.calls)
            if outputs is None and not empty:
                raise nothing(name)
            for one, other in zip_longest(self._shapes, _shapes(outputs), fillvalue="nothing"):
                if one != other:
                    raise CaptureError(
                        f"{name} returned something else when it was called again to be recorded: {one} the first time, and "
                        f"{other} the second. Take decisions, and prepare what is made once, before it is recorded"
                    )
            made = finish(recording, outputs)
            self._captured = True
            return made
        except BaseException:
            outputs, done = None, False
            try:
                # First, so that no attribute keeps an array of the recording's memory, which no replay has written.
                given.restore()
                if state is not None:
                    state.restore()
                done = recording.destroy()
            finally:
                recording.kept.take()
                if not done:
                    defer(recording.settle)
            raise

    def memory(self, recording: Recording, function: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Return the memory that replays read and write.

        The arrays of the first call are let go of.

        Raises
        ------
        CaptureError
            Where the capture reads an array of the first call.
        """
        made = recording.memory(function, args, kwargs, outputs, self._rehearsal.new, self._launches.new)
        for new in (self._rehearsal.new, self._launches.new):
            new.forget()
        return made

    def _end_at_exit(self, deadline: float) -> None:
        """Drop the plans, of which cuDNN's binding complains where they outlive it."""
        self._rehearsal.calls.clear()
        self._launches.calls.clear()
        self._launches.forget()


def name_of_call(function: Any) -> str:
    """Return the name of a function for messages."""
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None)]
    return next((name for name in names if isinstance(name, str)), type(function).__name__)


def nothing(name: str) -> ArgumentError:
    """Return the error for a function that returned None."""
    return ArgumentError(f"{name} returned None, so nobody could have its results: return the arrays that it writes")


def check_returned(name: str, function: Any, returned: Any) -> None:
    """Refuse None, and generators that have yet to run.

    Raises
    ------
    ArgumentError
    """
    if returned is None:
        raise nothing(name)
    check_ran(function, returned)


def _settle(driver: Driver, pointer: int) -> None:
    """Wait for a stream, whose work may still write NumPy's arrays."""
    with driver.relaxed():
        driver.synchronize_stream(pointer)


def _shapes(returned: object) -> list[str]:
    """Return the shapes and types of returned arrays, as text."""
    return [shown(value) for value in leaves(returned) if holds_values(value)]


def _rehearsed(rehearsal: Rehearsal, pool: PoolInternals, home: StreamReference, run: Callable[..., T], *call: Any) -> T:
    """Call a function with its calls noted, on a stream that is current for torch, too."""
    torch = torch_in_use(pool.driver) or torch_among(*call)
    if torch is None:
        return rehearsal.around(run, *call)
    inside, found = in_torch(torch, home.pointer, home.pointer, home.device, *call), []
    tensors.in_order(pool, home.device, home.pointer, lambda: found.append(rehearsal.around(run, *inside)))
    return found[0]
