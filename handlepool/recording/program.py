"""Programs: what a function gives to streams, recorded once and replayed with one launch (a CUDA graph)."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from handlepool.errors import CaptureError, HandlePoolError, PoolClosedError
from handlepool.pool import exits
from handlepool.pool.context import recordings
from handlepool.pool.deferred import keep_for_good, parked
from handlepool.pool.status import diagnose
from handlepool.pool.stream import StreamReference
from handlepool.recording.last_use import LastUse, capturing
from handlepool.recording.turns import Turns
from handlepool.recording.update import Inputs, copy_all

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording


class Program(LastUse):
    """Recorded work, made by `record`.

    It owns what it needs: its inputs, its outputs, scratch, plans and every allocation made while it was recorded live as long as
    it does, and are used by nothing else. `close` gives them back, as does the end of a ``with`` statement over it.

    Replays write the same memory, so no two of one program run side by side: a replay on another stream than the last starts
    after all that the other stream has been given by then, readers of the outputs included (of a branch or a task, a per-thread
    default stream, a bare pointer or another library's stream, after the last replay there). Consecutive replays on one stream
    cost no such care, but on those. Different programs may be replayed by different threads at once.

    Attributes
    ----------
    device : int
        Ordinal.
    nodes : int
        Number of operations in the graph.
    """

    _recording: "Recording | None" = None

    def __init__(self, name: str, recording: "Recording", inputs: Inputs, outputs: Any, home: StreamReference) -> None:
        pool = self._pool = recording.pool
        driver = pool.driver
        graph = recording.graph
        assert graph is not None
        self.nodes = graph.nodes
        self._inputs = inputs
        self._outputs = outputs
        self._turns = Turns(name)
        self._current_device = pool.current_device
        self._current_stream: Callable[..., Any] = driver.current_stream
        with driver.relaxed():
            recording.event = driver.create_event()
        graph.upload(home.pointer)
        exits.remember(self)
        super().__init__(driver, recording.device, name, graph.launch, recording.event, home)
        self._recording = recording

    @property
    def outputs(self) -> Any:
        """What the function returned while it was recorded: each replay writes its arrays, in the order of its stream."""
        if self._recording is None:
            self._refuse()
        return self._outputs

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that were allocated while recording, scratch included; 0 once it was closed."""
        recording = self._recording
        return 0 if recording is None else recording.nbytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._recording is None

    def __repr__(self) -> str:
        state = ", closed" if self._recording is None else f" of device {self.device}: {self.nodes} nodes, {self.nbytes:,} bytes"
        return f"<Program {self._name}{state}>"

    # Use

    def replay(self, stream: Any = None) -> None:
        """Enqueue the recorded work on a stream, with one launch. Does not wait for the GPU.

        Parameters
        ----------
        stream : stream, optional
            As in `HandlePool.get_handle`; the current stream where none is given. Outputs are ready in its order.

        Raises
        ------
        DeviceMismatchError
            When the current device or the stream's is another than the program's.
        CaptureError
            When the stream, or that of the last replay where it is another, is being captured.
        OwnershipError
            While `update` is under way in another thread, or in a finaliser inside another use of the program.
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say: after the program or its pool was closed, in a forked child.
        """
        if self._pool.unusable:
            self._pool._check_usable()
        current = self._current_stream() if stream is None else stream
        turns = self._turns
        bias = turns.bias
        if bias is not None and bias.thread == get_ident() and not bias.launching and not recordings:
            try:
                bias.launching = True
                # While the bias is this one, no other thread changes what follows. A closed program has no last stream.
                if (
                    turns.bias is bias
                    and current is self._last
                    and ((self._bound and stream is None) or self._current_device() == self.device)
                ):
                    pointer = self._pointer
                    if pointer and self._is_capturing(pointer):
                        raise capturing(pointer)
                    self._launch()
                    return
            except Exception as error:
                self._explain(error)
                raise
            finally:
                bias.launching = False
        self._use("replayed", self._replay, stream)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Copy new values into the recorded inputs, on the current stream; replays see them from then on.

        Parameters
        ----------
        *args, **kwargs
            What was given to `record` in the same places, positional arguments without an array left out: arrays of the driver's
            of the same shapes, strides and types on the same device, in lists and tuples of the same lengths (a list may stand
            for a tuple, and a tuple for a list) and in dictionaries of the same keys, nested alike. None leaves an argument, or
            an entry, as it is. Every value is read before the first is overwritten, so that inputs can be swapped.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError
            For what differs from what was recorded, by its place; for different values for the same memory, as for an array that
            was recorded in two places; for anything but None in the place of an array of another library. Nothing is copied then.
        CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
            As in `replay`.
        """
        self._pool._check_usable()
        self._use("updated", self._update, args, kwargs)

    def _replay(self, stream: Any) -> None:
        if self._recording is None:
            self._refuse()
        self._follow(stream)
        self._enqueue([self._launch])

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._recording is None:
            self._refuse()
        copies = self._inputs.match(self._driver, self._name, self.device, args, kwargs)
        self._follow(None)
        self._enqueue([partial(copy_all, self._driver, copies)])

    def _enqueue(self, steps: Sequence[Callable[[], object]]) -> None:
        """Give the stream that `_follow` made the program's something that uses the memory."""
        if self._pointer and self._is_capturing(self._pointer):
            raise capturing(self._pointer)
        try:
            for step in steps:
                step()
        finally:  # also after a step that failed, or was interrupted when it had enqueued something
            if self._last is None:
                try:
                    self._record_event(self._event, self._pointer)
                except BaseException:  # a later use cannot be ordered after this one, but may come when it has passed
                    with self._driver.relaxed():
                        self._driver.synchronize_stream(self._pointer)
                    raise

    def _use(self, what: str, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._turns.take(what, act, *args)
        except Exception as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise what an error means, where that is known."""
        diagnose(self._pool, error)
        if not isinstance(error, HandlePoolError) and (cause := self._driver.capture_failure(error)):
            raise CaptureError(f"{self._name} cannot be used on a stream that is being captured: {cause}") from error

    def _refuse(self) -> None:
        raise PoolClosedError(f"the program {self._name} was closed; record it again")

    # The end

    def close(self) -> None:
        """Wait for the last replay, then give back the graph, scratch and memory. Idempotent.

        Outputs that somebody holds stay valid; their memory goes back after them. In a destructor, let go of the program instead:
        it may run inside another program's launch, for which the thread waits that has this one.

        Raises
        ------
        CaptureError
            When the stream of the last replay is being captured; close the program afterwards.
        OwnershipError
            In a finaliser inside another use of the program.
        """
        self._end(wait=True)

    def _end(self, *, wait: bool, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
        pool = self._pool
        # Nothing can be given back (guarantee 13), nor the lock be trusted: whoever has it may be gone.
        if exits.under_way or _is_finalizing():
            keep_for_good(self)
            return True
        if pool._forked or pool._poison is not None:
            keep_for_good(self._let_go(park=False))
            return True
        held: list[Any] = []
        recording = self._recording
        try:
            if not self._use("closed", self._take_out, held, wait):
                return False
            # After the program's turn: what goes here may close another program, or this one.
            if held and recording is not None:
                with pool.on_device(self.device), self._driver.relaxed():
                    held.clear()
                    if recording.free():
                        with suppress(ValueError):  # another thread has it in hand
                            parked.remove(recording)
        finally:
            held.clear()  # or an error's traceback would keep it
        return True

    def _take_out(self, held: list[Any], wait: bool) -> bool:
        """Take all from the program once its last use has passed, and leave the recording parked; whether that is so by now."""
        recording = self._recording
        if recording is None:
            return True
        with self._pool.on_device(self.device):
            if recording.event is None:  # an interrupt came when it had just been made: it was freed
                held.append(self._let_go(park=False))
            elif self._passed(wait=wait):
                held.append(self._let_go(park=True))
                held.append(recording.kept.take())
            else:
                return False
        return True

    def _let_go(self, *, park: bool) -> tuple[Any, ...]:
        recording = self._recording
        held = recording, self._inputs, self._outputs, self._forget_stream(), self._owner, self._launch, self._launch_on
        self._recording = self._owner = None
        self._inputs = self._outputs = self._launch = self._launch_on = None  # type: ignore[assignment]
        if park and recording is not None:
            parked.append(recording)  # what an interrupt or a failing call leaves, whoever finds it there gives back
        return held

    def _end_at_exit(self, deadline: float) -> bool:
        """Drop the plans, after which nobody replays; nothing else is given back. False where another thread is inside."""
        recording = self._recording
        if recording is None or self._pool._forked:
            return True
        return self._turns.end(deadline, partial(self._drop_plans, recording))

    def _drop_plans(self, recording: "Recording") -> None:
        keep_for_good(self._let_go(park=False))
        recording.drop_plans()

    def _settle(self) -> bool:
        """Close a program that nobody closed, once its last replay has passed."""
        try:
            return self._end(wait=False)
        except Exception:
            return self._recording is None  # what came after that is the recording's, which is parked

    def __del__(self, _park: Callable[[Any], None] = parked.append) -> None:
        if self._recording is not None:
            _park(self)

    def __reduce__(self) -> Any:
        """Refuse to be copied, also by `copy.copy`: two would end one graph."""
        raise TypeError(f"the program {self._name} owns a graph and memory and cannot be copied or pickled; record it again")

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
