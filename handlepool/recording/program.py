"""Define programs: work that is recorded once and replayed with one launch.

A program has a CUDA graph of the recorded work. A replay launches this graph.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import RLock
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from handlepool.drivers.captures import RecordedGraph
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM, Stream
from handlepool.graphs.tuning import Tuning
from handlepool.order.plain_calls import orders_itself
from handlepool.order.reached import pieces_of
from handlepool.order.uses import Memory
from handlepool.pool.context import active, on_device, recordings, thread
from handlepool.pool.deferred import abandon, defer
from handlepool.pool.process_end import process_end
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.recording import program_call, timing
from handlepool.recording.first_call import Take, dispose
from handlepool.recording.owner import Owned, capturing
from handlepool.recording.prepared import Prepared, prepared_call
from handlepool.recording.schedule import Arrangement
from handlepool.recording.update import Inputs
from handlepool.regions.memory import branch_regions

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

T = TypeVar("T")


class Program(Owned):
    """Recorded work, made by `record`.

    A program owns its outputs, scratch, plans and every allocation that was made during the recording. These resources live until
    `close`, which the end of a ``with`` statement over the program also calls. No other code uses them. The inputs of a program
    are the arrays that `record` was given. They belong to the caller. The program keeps the inputs alive, and `update` and calls
    overwrite them.

    All replays write the same memory, so no two replays of a program run concurrently. If a replay uses another stream than the
    replay before, it waits for all work that the former stream has by then, including readers of the outputs. Consecutive replays
    on the same stream need no wait. If the former stream was the stream of a branch or a task, the per-thread default stream, a
    bare pointer or another library's stream, it may be gone or have another user by then. So after a replay on such a stream, the
    next replay waits only for that replay. Readers of the outputs on such a stream must be ordered before the next replay by the
    caller.

    The thread that last used `update`, `replay` or `outputs` is the owner of the program, until it calls `hand_over` or ends. In
    any other thread these methods raise an `OwnershipError`, because two threads would mix their values. Any thread may call the
    program itself, as in ``program(x)``, at any time. A call overwrites inputs and outputs, so it makes the calling thread the
    owner. From then on the former owner gets an error, and cannot mistake the values of the call for its own. Different threads
    may replay different programs at the same time.

    Attributes
    ----------
    device : int
        Ordinal of the program's device.
    nodes : int
        Number of kernels, copies and similar operations in the graph. In `explain`, nodes are calls instead: a call may add no
        kernel, one or several.
    tunings : tuple of Tuning
        An entry for each plan that ``record(..., plans=True)`` measured, beginning with the plan that took the most time. Each
        entry can be printed.
    """

    nodes: int
    _streams: ClassVar[dict[int, Stream]] = {}
    """The stream of each program's last use, by the program's number.

    Python's garbage collector may find a program and its stream in one reference cycle, and destroy both at once. But the end of
    the program is deferred, and needs the stream later. So this dictionary keeps the stream until the program is closed.
    """
    _numbers: ClassVar[Iterator[int]] = count()

    update = program_call.update
    __call__ = program_call.call
    explain = timing.explain
    tune = timing.tune
    draw = timing.draw

    def __init__(
        self,
        name: str,
        recording: "Recording",
        inputs: Inputs,
        outputs: object,
        home: StreamReference,
        memory: Memory,
        tunings: tuple[Tuning, ...] = (),
        *,
        lent: bool = False,
        again: Callable[..., Any] | None = None,
    ) -> None:
        pool = recording.pool
        self._status = pool.status
        driver = self._driver = pool.driver
        graph = recording.graph
        assert graph is not None
        self.device = recording.device
        self.nodes = graph.nodes
        self.tunings = tunings
        self._name = name
        self._number = next(self._numbers)
        self._inputs = inputs
        self._outputs = outputs
        self._memory = memory
        self._prepared: Prepared | None = None
        # A function that records the program's call again, with other plans: see `handlepool.recording.replanning`.
        self._again = again
        self._retaking = False
        # Whether the program serves calls of a recorded function. If so, each use records the event at once, and a use on another
        # stream waits only for the last use, not for later work of its stream.
        self._lent = lent
        # Whether a use has begun whose event is not recorded yet. If an interrupt prevents the record, the next use on another
        # stream records the event first (guarantee 8).
        self._unmarked = False
        # The lock allows one use at a time, because CUDA forbids two concurrent launches of a graph, and a close destroys objects
        # that launches read. The lock is reentrant: the garbage collector may run a finalizer inside a use, and a finalizer that
        # uses the program must not wait for its own thread. `_busy` tells it of the outer use, and its use is refused.
        self._lock = RLock()
        self._busy = None
        self._current_device = pool.current_device
        self._current_stream: Callable[..., Stream] = driver.current_stream
        self._is_capturing = driver.is_capturing
        self._launch_on = graph.launch
        with driver.relaxed():
            self._event = recording.make_event()
        graph.upload(home.pointer)
        process_end.add(self._end_at_exit)
        # The stream of the last use, if the stream's Python object owns the stream. Then the event is recorded only when the next
        # use is on another stream. A stream that its object does not own may be gone by then. A side stream may be leased to
        # another caller by then, who may capture it. For such streams `_last` is None, and the event is recorded after each use.
        self._last: Stream | None = None
        self._used_by(home)
        if self._last is None or lent:
            try:
                driver.record_event(self._event, home.pointer)
            except BaseException:
                # The caller gets no program, so no `close` follows that would release the stream.
                self._streams.pop(self._number, None)
                raise
        self._recording = recording

    @property
    def outputs(self) -> Any:
        """The value that the function returned while it was recorded.

        Each replay writes the arrays in this value, in the order of the replay's stream.

        If a branch of a fork reads this property, that counts as a read of the outputs, so the branch waits for branches that
        replay the program. In the fork's body, outside of branches, reading the property waits for no branch. There, pass the
        outputs to a branch, or to `Fork.wait`.

        If the program belongs to another thread, reading the property raises an `OwnershipError`.
        """
        if self._recording is None:
            self._refuse()
        if self._user is not thread.token:
            self._use("read", self._claim)
        if active and thread.region is not None:
            program_call.after_branches(self, pieces_of(self._driver, self._outputs), (), None)
        return self._outputs

    @property
    def idle(self) -> bool:
        """Whether no thread uses the program, and its last use has finished.

        The answer is only right for a program that records its event after each use.
        """
        lock = self._lock
        if self._busy is not None or self._unmarked or not lock.acquire(blocking=False):
            return False
        # Another thread's `close` destroys the event, and first detaches the recording under the lock. A closed program counts
        # as idle, so the next call finds that it was closed.
        try:
            with self._driver.relaxed():
                return self._recording is None or self._driver.event_done(self._event)
        finally:
            lock.release()

    def __repr__(self) -> str:
        what = f"{self.nodes} kernels and copies, {self.nbytes:,} bytes"
        state = ", closed" if self._recording is None else f" of device {self.device}: {what}"
        return f"<Program {self._name}{state}>"

    # Use

    @orders_itself
    def replay(self, stream: object = None) -> None:
        """Enqueue the recorded work on a stream, with one launch.

        The call does not wait for the GPU.

        Parameters
        ----------
        stream : stream, optional
            As in `HandlePool.get_handle`. The default is the current stream. Later work of this stream may read the outputs.

        Raises
        ------
        DeviceMismatchError
            If the current device or the stream's device is not the program's device.
        CaptureError
            If the stream, or the stream of the last replay, is being captured.
        OwnershipError
            If the program belongs to another thread (see `hand_over`), or if a finalizer makes the call during another use of the
            program.
        PoolClosedError, ForkedProcessError, PoisonedContextError
            If the program or its pool was closed, in a forked child process, or if the CUDA context has failed.
        """
        if self._status.unusable:
            self._status.check()
        if active:
            program_call.after_branches(self, self._memory.reads, self._memory.writes, stream)
        lock = self._lock
        try:
            if self._busy is not None:
                self._check_turn("replayed")
            try:
                # Calling `acquire` and `release` costs half as much as a `with` statement. `acquire` stands inside the outer
                # `try`, so even if an interrupt comes right after `acquire` has returned, the `finally` releases the lock.
                lock.acquire()
                try:
                    if self._user is not thread.token:
                        self._claim()
                    self._busy = "replayed"
                    current = self._current_stream() if stream is None else stream
                    if (
                        # A closed program has no last stream, so its use takes the other branch, where `_follow` refuses it.
                        current is self._last
                        and ((self._bound and stream is None) or self._current_device() == self.device)
                        and not recordings
                        and not self._lent
                    ):
                        pointer = self._pointer
                        if pointer and self._is_capturing(pointer):
                            raise capturing(pointer)
                        self._launch()
                    else:
                        self._follow(stream)
                        self._enqueue(self._launch)
                finally:
                    self._busy = None
            finally:
                try:
                    lock.release()
                except RuntimeError:
                    # If an interrupt came while this thread waited for the lock, the lock is not held, and `release` raises.
                    pass
        except Exception as error:
            self._explain(error)
            raise

    def _turn(
        self, run: Callable[..., T], arrays: Sequence[Any], stream: object, begin: object = None, checked: bool = False
    ) -> T:
        """Make a prepared call on a stream; return its value.

        The call is ``run(arrays, pointer, launch, begin)``. The caller has already checked the arrays. ``checked`` says that the
        caller has also just checked that the stream is not being captured.
        """
        lock = self._lock
        try:
            if self._busy is not None:
                self._check_turn("called")
            try:
                # As in `replay`, calling `acquire` and `release` is quicker than a `with` statement.
                lock.acquire()
                try:
                    self._busy = "called"
                    # A closed program has no last stream, so its use enters this branch, and `_follow` refuses it.
                    if stream is not self._last or recordings or not (self._bound or self._current_device() == self.device):
                        self._follow(stream)
                    # This thread becomes the owner, for the reason given in `_take_over`.
                    self._user = thread.token
                    pointer = self._pointer
                    if not checked and pointer and self._is_capturing(pointer):
                        raise capturing(pointer)
                    if self._last is not None and not self._lent:
                        return run(arrays, pointer, self._launch, begin)
                    # The rest does the same as `_enqueue`, and saves the time of calling it.
                    self._unmarked = True
                    try:
                        return run(arrays, pointer, self._launch, begin)
                    finally:
                        self._mark()
                finally:
                    self._busy = None
            finally:
                try:
                    lock.release()
                except RuntimeError:
                    # If an interrupt came while this thread waited for the lock, the lock is not held, and `release` raises.
                    pass
        except Exception as error:
            self._explain(error)
            raise

    def _take_over(self) -> None:
        """Make this thread the owner, even if another thread is the owner.

        The caller is about to overwrite the inputs and outputs on the current stream. If another thread stayed the owner, it
        could replay with the new inputs or read the new outputs, and mistake them for its own values.
        """
        # A prepared call does not read the notes on overwritten inputs, and the use that follows may change these notes. So the
        # prepared call is dropped.
        self._prepared = None
        self._user = thread.token
        self._follow(None)

    def _prepare(self) -> None:
        """Prepare later calls that pass one array for each input.

        A prepared call does not note that it overwrites the inputs. This is not needed, because all inputs have been overwritten
        by now.
        """
        # On a machine with a single device, the matcher need not compare the device of each array.
        device = self.device if self._driver.device_count() > 1 else None
        self._prepared = prepared_call(self._driver, self._inputs.flat(self._driver), self._outputs, device)

    def _enqueue(self, step: Callable[..., T], *args: object) -> T:
        """Call ``step``, which enqueues a use of the program; return its value.

        The step gives its work to the stream that `_follow` chose. The event is recorded after the work if this is needed.
        """
        if self._pointer and self._is_capturing(self._pointer):
            raise capturing(self._pointer)
        if self._last is not None and not self._lent:
            return step(*args)
        self._unmarked = True
        try:
            return step(*args)
        # Even if the step failed or was interrupted, the event is recorded, because the step may have enqueued work.
        finally:
            self._mark()

    def _mark(self) -> None:
        """Record the program's event, which marks the end of a use."""
        try:
            self._driver.record_event_next(self._event, self._pointer)
        # Without the event, a later use cannot wait for this use on the device. So the host waits for the stream here.
        except BaseException:
            with self._driver.relaxed():
                self._driver.synchronize_stream(self._pointer)
            self._unmarked = False
            raise
        self._unmarked = False

    def _run_on(self, graph: RecordedGraph, arrangement: Arrangement) -> None:
        """Let replays launch another graph of the recording."""
        recording, launch = self._recording, partial(graph.launch, self._pointer)
        assert recording is not None
        # An interrupt may come between these statements. So `adopt` makes the recording own both graphs, until `arrange_as` lets
        # it own only the new graph.
        recording.adopt(graph)
        self._launch_on, self._launch = graph.launch, launch
        recording.arrange_as(graph, arrangement)

    @contextmanager
    def _refusing(self) -> Iterator[int]:
        """Refuse other uses of the program; yield the stream's pointer.

        The caller runs user code in the ``with`` block, so the lock is not held there (guarantee 15). Later uses of the program
        wait for the work that was enqueued in the block.
        """

        def begin(pointer: int) -> int:
            # Because `_last` is None, any other use calls `_follow`, which refuses the use. `end` records the event, so that
            # later uses wait for the work in the block.
            self._last, self._retaking = None, True
            return pointer

        def end() -> None:
            self._retaking = False
            if self._recording is not None:
                self._driver.record_event(self._event, self._pointer)

        try:
            yield self._use("tuned", lambda: program_call.replayed(self, begin))
        finally:
            self._use("tuned", end)

    def _become(self, take: Take) -> None:
        """Replace the program's recording by another recording of its call.

        The caller holds the lock. The program then owns the recording in ``take``, and its outputs are new arrays.
        """
        former, recording, inputs, again = self._recording, take.recording, self._inputs, self._again
        graph, home = recording.graph, resolve(self._driver)
        if former is None:
            self._refuse()
        assert graph is not None
        assert take.memory is not None
        held: list[object] = []
        with self._driver.relaxed():
            event = recording.make_event()
            self._driver.synchronize_stream(home.pointer)
        self._detach(held)
        self._recording, self._outputs, self._memory, self._event = recording, take.outputs, take.memory, event
        self._inputs, self._again, self._unmarked = inputs, again, False
        self._launch_on, self.nodes, self._user = graph.launch, graph.nodes, thread.token
        graph.upload(home.pointer)
        self._used_by(home)
        if self._last is None:
            self._driver.record_event(event, home.pointer)
        dispose(former, held)

    # Order

    def _follow(self, stream: object) -> None:
        """Make ``stream`` the stream of the next use.

        If the last use was on another stream, ``stream`` waits for all work that the other stream has by now. If the other stream
        may be gone, ``stream`` waits only for the last use.
        """
        driver, device = self._driver, self._check_use(stream)
        last = self._last
        if last is not None and last is (driver.current_stream(device) if stream is None else stream):
            return
        reference = resolve(driver, stream)
        check_foreign(driver, reference)
        pointer = reference.pointer
        if last is not None and last is reference.stream:
            return
        for each in (pointer, LEGACY_STREAM if last is None or self._lent else last.ptr):
            if each != LEGACY_STREAM and driver.is_capturing(each):
                raise capturing(each)
        if last is not None and not self._lent:
            driver.record_event(self._event, last.ptr)
        elif self._unmarked:
            self._mark()
        driver.wait_event(pointer, self._event)
        # `_used_by` may drop the last reference to the former stream, which destroys the stream by a CUDA call. `relaxed`
        # keeps that call from ending another thread's capture.
        with driver.relaxed():
            self._used_by(reference)
            del last

    def _used_by(self, reference: StreamReference) -> None:
        last = None if reference.pointer == PER_THREAD_STREAM or reference.pointer in branch_regions else reference.stream
        # If ``last`` belongs to the program's device and is the current stream, that device is current. So a use on ``last`` need
        # not ask for the current device.
        bound = getattr(last, "device_id", -1) == self.device
        # Calling a `partial` with the pointer inside is quicker than passing the pointer to each call.
        launch = partial(self._launch_on, reference.pointer)
        if last is None:
            self._streams.pop(self._number, None)
        else:
            self._streams[self._number] = last
        # No call comes between these assignments, so no interrupt can come between them.
        self._last, self._pointer, self._owner = last, reference.pointer, reference.owner
        self._bound, self._launch = bound, launch

    # The end

    def close(self) -> None:
        """Wait for the last replay, then destroy the graph and free memory.

        Scratch is freed as well. A second call of `close` has no effect.

        Outputs that the caller holds stay valid, and their memory is freed with the last reference to them. Do not call `close`
        in a destructor: Python may run the destructor inside another program's launch, and two threads could then wait for each
        other for ever. In a destructor, only drop the reference to the program.

        Raises
        ------
        CaptureError
            If the stream of the last replay is being captured. Close the program after the capture.
        OwnershipError
            If a finalizer makes the call during another use of the program.
        """
        self._end(wait=True)

    def _end(self, *, wait: bool, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
        status = self._status
        # At the end of the process no resource may be destroyed (guarantees 10 and 13). The lock is not acquired then, because a
        # thread that no longer runs may hold it.
        if process_end.ending or _is_finalizing():
            abandon(self)
            return True
        held: list[object] = []
        recording = self._recording
        if status.untouchable:
            self._detach(held)
            abandon(held)
            return True
        try:
            return self._use("closed", self._detach_when_idle, held, wait)
        finally:
            if held and recording is not None:
                try:
                    # The lock is not held here, because destroying an object may run code that closes this program or another.
                    with on_device(self._driver, self.device), self._driver.relaxed():
                        del held[1:]
                    if recording.destroy():
                        held.clear()
                # If ``held`` is not empty here, some resources are not destroyed: because of an error or an interrupt, or because
                # arrays still use memory of the recording.
                finally:
                    if held:
                        # A later call of `settle` destroys the rest.
                        defer(recording.settle)
                        # The list is emptied, because the traceback of an error would keep the list and its objects alive.
                        held.clear()

    def _detach_when_idle(self, held: list[object], wait: bool) -> bool:
        """Move all resources to ``held`` if the last use has ended.

        The last use ends when the GPU has finished its work. With ``wait``, first wait for this. Return
        whether the program has no resources any more.
        """
        recording = self._recording
        if recording is None:
            return True
        with on_device(self._driver, self.device):
            # If an interrupt came when the program had just been made, the recording may already be destroyed, without an event.
            if recording.event is not None and not self._passed(wait=wait):
                return False
            self._detach(held)
            held.append(recording.kept.take())
        return True

    def _passed(self, *, wait: bool) -> bool:
        """Return whether the GPU has finished the last use.

        With ``wait``, wait until it has.
        """
        driver, last = self._driver, self._last
        if last is not None and not self._lent:
            if last.ptr != LEGACY_STREAM and driver.is_capturing(last.ptr):
                if wait:
                    raise capturing(last.ptr)
                return False
            driver.record_event(self._event, last.ptr)
            # `_last` is cleared, so that the next check does not record the event again. A new record would also cover newer
            # work of the stream.
            if not wait:
                self._last = None
        elif self._unmarked:
            self._mark()
        with driver.relaxed():
            if wait:
                driver.synchronize_event(self._event)
            return wait or driver.event_done(self._event)

    def _detach(self, held: list[object]) -> None:
        """Move the program's objects into ``held``, the recording first."""
        stream = self._last, self._owner, self._streams.pop(self._number, None)
        # After this line there is no call, so no interrupt can come before all objects have moved to ``held``. The holder of
        # the list then owns the recording.
        kept = self._inputs, self._outputs, stream, self._launch, self._launch_on, self._prepared, self._again
        held += [self._recording, kept]
        self._recording = self._owner = self._last = self._user = self._prepared = self._again = None
        self._inputs = self._outputs = self._launch = self._launch_on = None  # type: ignore[assignment]

    def _end_at_exit(self, deadline: float) -> None:
        """Drop the plans at the end of the process; destroy nothing else.

        If another thread still uses the program at ``deadline`` (by `time.monotonic`), the program is left as it is.
        """
        recording = self._recording
        if recording is None or self._status.forked or not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
            return
        try:
            held: list[object] = []
            self._detach(held)
            abandon(held)
            recording.release_plans()
        finally:
            self._lock.release()

    def _settle(self) -> bool:
        """Close an unreferenced program if the GPU has finished its last use.

        Return whether the program needs no further call of this method.
        """
        try:
            return self._end(wait=False)
        except Exception:
            # If the recording was already detached, `_end` has deferred its destruction, and nothing is left to do here.
            # Otherwise this method is called again later.
            return self._recording is None

    def __del__(self, _defer: Callable[[Callable[[], bool]], None] = defer) -> None:
        if self._recording is not None:
            _defer(self._settle)

    def __handlepool_arrays__(self) -> Any:
        """Return the outputs, so that `Fork.wait` can wait for them."""
        return self._outputs

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
