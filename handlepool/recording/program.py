"""Define programs: work that is recorded once and replayed with one launch.

A program is a CUDA graph.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import itemgetter
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from handlepool.drivers.captures import RecordedGraph
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM, Stream
from handlepool.errors import CaptureError, DeviceMismatchError, HandlePoolError, OwnershipError, PoolClosedError
from handlepool.graphs.tuning import Tuning
from handlepool.order.accesses import Memory
from handlepool.order.places import before
from handlepool.order.plain_calls import orders_itself
from handlepool.order.reached import pieces_of
from handlepool.pool.context import active, on_device, recordings, thread
from handlepool.pool.deferred import abandon, defer
from handlepool.pool.process_end import process_end
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.recording import timing
from handlepool.recording.matching import matcher
from handlepool.recording.outputs import Results
from handlepool.recording.owner import OWNERS, Owned
from handlepool.recording.prepared import arrays_once, bounds, builder, copies_of
from handlepool.recording.replanning import Take, dispose
from handlepool.recording.schedule import Arrangement
from handlepool.recording.tensors import in_order
from handlepool.recording.update import Copy, Inputs, copy_all, piece_of
from handlepool.regions.memory import branch_regions
from handlepool.tensors.layout import Piece, Token

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

T = TypeVar("T")


class Program(Owned):
    """Recorded work, made by `record`.

    A program owns its outputs, scratch, plans and every allocation made during the recording. These live as long as the program,
    and no other code uses them. `close` ends them, as does the end of a ``with`` statement over the program. Its inputs are the
    arrays that `record` was given. They belong to the caller; the program keeps them alive, and `update` and calls overwrite
    them.

    All replays write the same memory, so no two replays of a program run concurrently. If a replay uses another stream than the
    replay before it, it waits for all work that the former stream has by then, including readers of the outputs. Consecutive
    replays on the same stream need no wait. The former stream may be gone, or have another user, if it was the stream of a branch
    or a task, the per-thread default stream, a bare pointer or another library's stream. After a replay on such a stream, the
    next replay waits for that replay alone. Readers of the outputs there you must order before the next replay yourself.

    `update`, `replay` and `outputs` belong to the thread that used any of them last, until this thread calls `hand_over` or ends.
    In any other thread they raise an `OwnershipError`, because that thread would mix its values with the owner's values. Any
    thread may call the program itself, as in ``program(x)``, at any time. A call overwrites inputs and outputs, so it makes the
    calling thread the owner. From then on the former owner gets an error, and cannot mistake the values of the call for its own.
    Different threads may replay different programs at the same time.

    Attributes
    ----------
    device : int
        Ordinal of the program's device.
    nodes : int
        Number of kernels, copies and the like in the graph. `explain` counts calls as nodes instead: a call may add no kernel,
        one or several.
    tunings : tuple of Tuning
        Measurements of plans by ``record(..., plans=True)``, with the plan that took the most time first. Each can be printed.
    """

    nodes: int
    _recording: "Recording | None" = None
    _streams: ClassVar[dict[int, Stream]] = {}
    """The last streams of all programs, by the program's number.

    Python's collector may find a program and its stream in one cycle, and destroy both at once. The program's end is deferred,
    and still needs the stream. So this dictionary keeps the stream until the program is closed.
    """
    _numbers: ClassVar[Iterator[int]] = count()

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
        # The functions of a prepared call: the first checks the call's arrays, the second enqueues the call, the third builds the
        # call's value from the new arrays.
        self._prepared: tuple[Callable[..., bool], Callable[..., Any], Callable[[Any], Any]] | None = None
        # Records the same call again: see `replanning`.
        self._again = again
        # Whether the program's function is being called outside of the lock, so that other uses are refused.
        self._retaking = False
        # With `_lent`, the program serves calls of a recorded function. Each use then records the event at once, and a use on
        # another stream waits for the last use alone.
        self._lent = lent
        # `_unmarked` tells that a use began whose event is not recorded yet. An interrupt may leave it so, and the next use on
        # another stream records the event first (guarantee 8).
        self._unmarked = False
        # The lock admits a single use at a time: CUDA takes no two launches of a graph at once, and a close ends objects that
        # launches read. The lock is reentrant, because the collector may run a finalizer inside a use. The finalizer finds
        # `_busy` and is refused, because it could only wait for its own thread.
        self._lock = threading.RLock()
        # `_busy` names the use by the thread that holds the lock: replayed, updated, tuned, timed or closed.
        self._busy: str | None = None
        self._current_device = pool.current_device
        self._current_stream: Callable[..., Stream] = driver.current_stream
        self._is_capturing = driver.is_capturing
        self._launch_on = graph.launch
        with driver.relaxed():
            self._event = recording.make_event()
        graph.upload(home.pointer)
        process_end.add(self._end_at_exit)
        # `_last` is the stream of the last use, if the stream's Python object owns the stream. The event is then recorded on it
        # only when another stream follows. Any other stream may be gone by then, so `_last` is None and the event is recorded
        # after each use. For a side stream `_last` is None too: the pool leases it to other callers, which may capture it, so the
        # program must not record an event there later.
        self._last: Stream | None = None
        self._used_by(home)
        if self._last is None or lent:
            try:
                driver.record_event(self._event, home.pointer)
            except BaseException:
                # No `close` follows that would release the stream.
                self._streams.pop(self._number, None)
                raise
        self._recording = recording

    @property
    def outputs(self) -> Any:
        """The value that the function returned while it was recorded.

        Each replay writes its arrays, in the order of its stream.

        In a branch of a fork, the access counts as a read of the outputs, so the branch waits for branches that replay the
        program. In the fork's body, outside of branches, the access waits for no branch: give the outputs to a branch, or to
        `Fork.wait`.

        An access raises `OwnershipError` if the program belongs to another thread.
        """
        if self._recording is None:
            self._refuse()
        if self._user is not thread.token:
            self._use("read", self._claim)
        if active and thread.region is not None:
            self._after_branches(pieces_of(self._driver, self._outputs), (), None)
        return self._outputs

    @property
    def nbytes(self) -> int:
        """Bytes of device memory allocated while recording, scratch included; 0 after `close`."""
        recording = self._recording
        return 0 if recording is None else recording.nbytes

    @property
    def idle(self) -> bool:
        """Whether no thread uses the program, and its last use has finished.

        The answer is valid only for a program that records its event after every use.
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

    @property
    def closed(self) -> bool:
        """Whether the program was closed."""
        return self._recording is None

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
            As in `HandlePool.get_handle`; by default the current stream. Outputs are ready in the stream's order.

        Raises
        ------
        DeviceMismatchError
            If the current device or the stream's device is not the program's device.
        CaptureError
            If the stream, or the stream of the last replay, is being captured.
        OwnershipError
            If the program belongs to another thread (see `hand_over`), and in a finalizer inside another use of the program.
        PoolClosedError, ForkedProcessError, PoisonedContextError
            After the program or its pool was closed, in a forked child, and after the context failed.
        """
        if self._status.unusable:
            self._status.check()
        if active:
            self._after_branches(self._memory.reads, self._memory.writes, stream)
        lock = self._lock
        try:
            if self._busy is not None:
                self._check_turn("replayed")
            try:
                # Plain calls of the lock cost half as much as a `with` statement. CPython delivers an interrupt when a call has
                # returned, so an interrupt with the lock in hand finds the `finally`.
                lock.acquire()
                try:
                    if self._user is not thread.token:
                        self._claim()
                    self._busy = "replayed"
                    current = self._current_stream() if stream is None else stream
                    if (
                        # A closed program has no last stream, so it takes the slow way, which refuses it.
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
                    # The lock is not held if an interrupt came while this thread waited for another thread's use.
                    pass
        except Exception as error:
            self._explain(error)
            raise

    @orders_itself
    def update(self, *args: object, **kwargs: object) -> None:
        """Copy new values into the recorded inputs, on the current stream.

        Later replays see the new values.

        The inputs are the arrays that `record` was given, and the update overwrites them.

        Parameters
        ----------
        *args, **kwargs
            The arguments of `record`, in the same places. Arguments without an array must have the recorded value. You may leave
            out all positional arguments without an array, and each keyword argument without an array. Arrays are of the driver's
            kind, and tensors of torch replace recorded tensors. Shapes, strides, types and device are as recorded. Tensors are
            also copied in the order of torch's current stream. Containers are nested as recorded: lists and tuples of the same
            lengths (a list may replace a tuple and the reverse), dictionaries of the same keys. None in the place of an argument
            with arrays, or of an entry, leaves the recorded values as they are. Every value is read before the first is
            overwritten, so inputs can be swapped.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError
            For a value that differs from the recording, also in an argument without an array; the message names its place. For
            two values for the same memory, as for an array that was recorded in two places. For a recorded array itself, if an
            update or a call has overwritten it: pass None instead. For a value other than None in the place of an array of a
            library other than torch. After an error nothing was copied.
        CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
            As in `replay`.
        """
        self._status.check()
        self._use("updated", self._update, args, kwargs)

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._claim()
        copies = self._inputs.match(self._driver, self._name, self.device, args, kwargs)
        if active:
            sources, targets = ([getattr(copy, name) for copy in copies] for name in ("source", "target"))
            self._after_branches(pieces_of(self._driver, sources), pieces_of(self._driver, targets), None, copies)
        self._follow(None)
        self._inputs.copied(self._driver, copies)
        self._enqueue(self._beside_torch(copies, partial(copy_all, self._driver, copies)))

    @orders_itself
    def __call__(self, *args: object, out: object = None, **kwargs: object) -> Any:
        """Update the inputs, replay, and copy the outputs, in one turn.

        No use by another thread comes in between.

        The recorded inputs, which are the caller's own arrays, hold the new values afterwards. Record with a copy,
        ``x.copy(order="K")``, if you need ``x`` itself. Passing the original ``x`` again is an error, because the program has
        overwritten it.

        Any thread may call. All work is enqueued on its current stream, and the call does not wait for the GPU. The returned
        arrays belong to the caller, and no later use of the program writes to them. Afterwards `update`, `replay` and `outputs`
        belong to the calling thread; see `hand_over`.

        Parameters
        ----------
        *args, **kwargs
            As in `update`.
        out : optional
            Arrays to copy the outputs into, in the structure of `outputs`, and torch's tensors for outputs that are tensors.
            Shapes and types are the same, and no two arrays share memory. None, also in the place of an array, asks for a new
            array. A recorded argument that is itself named ``out`` cannot be given here, and keeps its values.

        Returns
        -------
        array, or list, tuple or dictionary
            Copies of the outputs in the structure of `outputs`, ready in the order of the current stream. Tensors are also ready
            in the order of torch's current stream. An output in several places gets a single copy. Numbers, strings and None are
            as they were recorded. Subclasses of lists, tuples and dictionaries become the plain class, except named tuples.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError
            As in `update`; for an ``out`` that differs from the outputs; for outputs that are arrays of libraries other than
            torch, or objects that may hold arrays. After an error nothing was enqueued.
        MemoryError
            If there is no memory for the copies.
        CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
            As in `replay`, except that the program may belong to another thread. If that thread is using the program, the call
            waits.
        """
        if self._status.unusable:
            self._status.check()
        prepared = self._prepared
        if prepared is not None and out is None and not kwargs and not active:
            match, run, built = prepared
            if match(args):
                return built(self._turn(run, args, self._current_stream()))
        return self._use("called", self._call, args, out, kwargs)

    def _turn(
        self, run: Callable[..., T], arrays: Sequence[Any], stream: object, begin: object = None, checked: bool = False
    ) -> T:
        """Use the program once on a stream; return the value.

        The use is ``run(arrays, pointer, launch, begin)``. It is for prepared calls, which have checked the arrays. ``checked``
        says that the caller has just found the stream not to be captured.
        """
        lock = self._lock
        try:
            if self._busy is not None:
                self._check_turn("called")
            try:
                # As in `replay`, plain calls of the lock are quicker than a `with` statement.
                lock.acquire()
                try:
                    self._busy = "called"
                    # A closed program has no last stream, so it comes here, and `_follow` refuses it.
                    if stream is not self._last or recordings or not (self._bound or self._current_device() == self.device):
                        self._follow(stream)
                    # The owner is set for the same reason as in `_call`.
                    self._user = thread.token
                    pointer = self._pointer
                    if not checked and pointer and self._is_capturing(pointer):
                        raise capturing(pointer)
                    if self._last is not None and not self._lent:
                        return run(arrays, pointer, self._launch, begin)
                    # The rest repeats `_enqueue`, to spare the cost of calling it.
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
                    # The lock is not held if an interrupt came while this thread waited for another thread's use.
                    pass
        except Exception as error:
            self._explain(error)
            raise

    def _call(self, args: tuple[Any, ...], out: object, kwargs: dict[str, Any]) -> Any:
        if self._recording is None:
            self._refuse()
        driver = self._driver
        given = self._inputs.match(driver, self._name, self.device, args, kwargs)
        results = Results(driver, self._name, self.device, self._outputs, out)
        # A prepared call neither reads nor changes the notes on overwritten inputs. This call may change these notes, so the
        # former prepared call is dropped. `_prepare` may make a new prepared call.
        self._prepared = None

        def turn() -> None:
            copy_all(driver, given)
            self._launch()
            copy_all(driver, results.copies)

        if active:
            read = pieces_of(driver, [copy.source for copy in given])
            changed = [*pieces_of(driver, [copy.target for copy in given]), *results.pieces]
            keep = self, given, results
            self._after_branches([*self._memory.reads, *read], [*self._memory.writes, *changed], None, keep)
        # This thread becomes the owner. Otherwise the former owner could replay with the inputs of this call, or read its
        # outputs, and take both for its own values.
        self._user = thread.token
        self._follow(None)
        self._inputs.copied(driver, given)
        self._enqueue(self._beside_torch([*given, *results.copies], turn))
        self._inputs.written(driver, results.copies)
        if out is None and not kwargs and len(given) == len(args):
            self._prepare()
        return results.value

    def _prepare(self) -> None:
        """Prepare later calls that give one array for each input.

        By now, a call has overwritten every input.
        """
        driver, inputs, outputs = self._driver, self._inputs.flat(self._driver), dict[int, Any]()
        if inputs and arrays_once(driver, self._outputs, outputs):
            built = builder(self._outputs, {each: itemgetter(place) for place, each in enumerate(outputs)})
            # On a machine with a single device the check of the device is skipped.
            device = self.device if driver.device_count() > 1 else None
            match = matcher(driver, inputs, device, bounds([piece_of(driver, each) for each in inputs]))
            self._prepared = match, driver.prepared(copies_of(inputs, [*outputs.values()])), built

    def _beside_torch(self, copies: Sequence[Copy], step: Callable[[], object]) -> Callable[[], object]:
        """Order a step that copies tensors with torch's current stream.

        Return the step for the program's stream. A step without tensors stays as it is.
        """
        recording = self._recording
        if recording is None or all(copy.tensor is None for copy in copies):
            return step
        return lambda: in_order(recording.pool, self.device, self._pointer, step)

    def _enqueue(self, step: Callable[..., T], *args: object) -> T:
        """Run a step on the stream that `_follow` chose; return its value.

        The step uses the program's memory.
        """
        if self._pointer and self._is_capturing(self._pointer):
            raise capturing(self._pointer)
        if self._last is not None and not self._lent:
            return step(*args)
        self._unmarked = True
        try:
            return step(*args)
        # The event is recorded also after a step that failed or was interrupted, because the step may have enqueued work.
        finally:
            self._mark()

    def _mark(self) -> None:
        """Record the event after a use."""
        try:
            self._driver.record_event_next(self._event, self._pointer)
        # A later use cannot be ordered after this use without the event, so wait for the stream here.
        except BaseException:
            with self._driver.relaxed():
                self._driver.synchronize_stream(self._pointer)
            self._unmarked = False
            raise
        self._unmarked = False

    def _replayed(self, act: Callable[[int], T]) -> T:
        if active:
            self._after_branches(self._memory.reads, self._memory.writes, None)
        self._follow(None)
        return self._enqueue(act, self._pointer)

    def _run_on(self, graph: RecordedGraph, arrangement: Arrangement) -> None:
        """Let replays launch another graph of the recording."""
        recording, launch = self._recording, partial(graph.launch, self._pointer)
        assert recording is not None
        # An interrupt may come after each call. The recording owns both graphs until the program launches the new graph.
        recording.adopt(graph)
        self._launch_on, self._launch = graph.launch, launch
        recording.arrange_as(graph, arrangement)

    @contextmanager
    def _refusing(self) -> Iterator[int]:
        """Refuse other uses of the program; yield the stream's pointer.

        User code runs meanwhile, so the lock is not held (guarantee 15). Work that was enqueued here comes before later uses.
        """

        def begin(pointer: int) -> int:
            # Without a last stream, any other use goes through `_follow`, which refuses the use. `end` records the event for
            # later uses.
            self._last, self._retaking = None, True
            return pointer

        def end() -> None:
            self._retaking = False
            if self._recording is not None:
                self._driver.record_event(self._event, self._pointer)

        try:
            yield self._use("tuned", lambda: self._replayed(begin))
        finally:
            self._use("tuned", end)

    def _become(self, take: Take) -> None:
        """Replay another recording of the same call from now on.

        The caller holds the lock. The program becomes the owner of the recording in ``take``, whose outputs are new arrays.
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

    def _use(self, what: str, act: Callable[..., T], *args: object) -> T:
        """Run a function while no other call uses the program.

        Return the function's value.
        """
        try:
            if self._busy is not None:
                self._check_turn(what)
            # CPython delivers no interrupt between taking the lock and entering the block.
            with self._lock:
                try:
                    self._busy = what
                    return act(*args)
                finally:
                    self._busy = None
        except Exception as error:
            self._explain(error)
            raise

    def _check_turn(self, what: str) -> None:
        """Wait for another thread's use of the program.

        Refuse a use inside this thread's own use, and a use that would be refused after the wait.
        """
        if what in OWNERS:
            self._check_owner()
        with self._lock:
            if self._busy is not None:
                raise OwnershipError(
                    f"{self._name} is being {self._busy} by this thread, and this call comes from a finalizer that Python "
                    "runs in between: call it later"
                )

    def _claim(self) -> None:
        """Make this thread the owner, unless another thread is the owner.

        The caller holds the lock.
        """
        if self._recording is None:
            self._refuse()
        self._check_owner()
        self._user = thread.token

    def _explain(self, error: Exception) -> None:
        """Raise a clearer error for an error, if one is known."""
        if process_end.ending and isinstance(error, PoolClosedError):
            process_end.linger()
        self._status.diagnose(error)
        if not isinstance(error, HandlePoolError) and (cause := self._driver.capture_failure(error)):
            raise CaptureError(f"{self._name} cannot be used on a stream that is being captured: {cause}") from error

    def _refuse(self) -> NoReturn:
        if process_end.ending:
            raise PoolClosedError(f"{self._name} came to its end with the interpreter, which is being taken down")
        raise PoolClosedError(f"the program {self._name} was closed; record it again")

    # Order

    def _after_branches(
        self, reads: Sequence[Piece | Token], writes: Sequence[Piece | Token], stream: object, keep: object = None
    ) -> None:
        """Let a stream wait for branches that conflict with a use.

        The branches belong to forks of this thread. They conflict if they access the memory that this use of the program reads or
        writes (guarantee 17).
        """
        recording = self._recording
        if recording is not None:
            pointer = None if stream is None else resolve(self._driver, stream).pointer
            before(recording.pool, reads, writes, keep or (self, self._outputs), pointer)

    def _follow(self, stream: object) -> None:
        """Make a stream the one that uses the program's memory next.

        If the last use was on another stream, the stream waits for all work that the other stream has by now. If the other stream
        may be gone, it waits for the last use alone.
        """
        if self._recording is None:
            self._refuse()
        if self._retaking:
            raise OwnershipError(
                f"{self._name} was used while its plans are tuned, which calls its function; use it after tune(plans=True)"
            )
        driver = self._driver
        device = driver.current_device()
        if device != self.device:
            raise DeviceMismatchError(
                f"{self._name} was recorded on device {self.device} and the current device is {device}; make device "
                f"{self.device} current, as in `with cupy.cuda.Device({self.device}):`"
            )
        if thread.recording is not None:
            thread.recording.check(f"a use of {self._name}", resolve(driver, stream).pointer, driver)
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
        # The last reference to the former stream may end here, which destroys the stream.
        with driver.relaxed():
            self._used_by(reference)
            del last

    def _used_by(self, reference: StreamReference) -> None:
        last = None if reference.pointer == PER_THREAD_STREAM or reference.pointer in branch_regions else reference.stream
        # A stream is current only on its own device, so a current stream proves the current device.
        bound = getattr(last, "device_id", -1) == self.device
        # A partial is quicker to call than a function that gets the pointer each time.
        launch = partial(self._launch_on, reference.pointer)
        if last is None:
            self._streams.pop(self._number, None)
        else:
            self._streams[self._number] = last
        # The assignments make no call in between, so an interrupt cannot separate them.
        self._last, self._pointer, self._owner = last, reference.pointer, reference.owner
        self._bound, self._launch = bound, launch

    # The end

    def close(self) -> None:
        """Wait for the last replay, then destroy the graph and free memory.

        Scratch is freed as well. `close` is idempotent.

        Outputs that the caller holds stay valid; their memory is freed when they are. Do not call `close` in a destructor, which
        may run inside another program's launch: two threads could wait for each other. Drop the reference to the program there
        instead.

        Raises
        ------
        CaptureError
            If the stream of the last replay is being captured. Close the program after the capture.
        OwnershipError
            In a finalizer inside another use of the program.
        """
        self._end(wait=True)

    def _end(self, *, wait: bool, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
        status = self._status
        # At the end of the process no resource may be destroyed (guarantees 10 and 13). The lock cannot be trusted, because its
        # holder may be gone.
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
                    # The destruction comes after the lock is released, because it may close another program, or this program.
                    with on_device(self._driver, self.device), self._driver.relaxed():
                        del held[1:]
                    if recording.destroy():
                        held.clear()
                # An interrupt or a failing call may leave resources, and arrays may still use memory.
                finally:
                    if held:
                        # The recording retries the destruction later.
                        defer(recording.settle)
                        # An error's traceback would keep the list's objects alive.
                        held.clear()

    def _detach_when_idle(self, held: list[object], wait: bool) -> bool:
        """Detach all resources from the program after its last use.

        Return whether the last use has passed by now.
        """
        recording = self._recording
        if recording is None:
            return True
        with on_device(self._driver, self.device):
            # A recording without an event was freed: an interrupt came when the program had just been made.
            if recording.event is not None and not self._passed(wait=wait):
                return False
            self._detach(held)
            held.append(recording.kept.take())
        return True

    def _passed(self, *, wait: bool) -> bool:
        """Return whether the last use of the memory has passed.

        With ``wait``, wait for it.
        """
        driver, last = self._driver, self._last
        if last is not None and not self._lent:
            if last.ptr != LEGACY_STREAM and driver.is_capturing(last.ptr):
                if wait:
                    raise capturing(last.ptr)
                return False
            driver.record_event(self._event, last.ptr)
            # The next check must not record the event again, because the event would then cover newer work of the stream.
            if not wait:
                self._last = None
        elif self._unmarked:
            self._mark()
        with driver.relaxed():
            if wait:
                driver.synchronize_event(self._event)
            return wait or driver.event_done(self._event)

    def _detach(self, held: list[object]) -> None:
        """Move all objects of the program into a list, the recording first."""
        stream = self._last, self._owner, self._streams.pop(self._number, None)
        # Only assignments follow, and an interrupt comes only after a call. So from here on the holder of the list owns the
        # recording.
        kept = self._inputs, self._outputs, stream, self._launch, self._launch_on, self._prepared, self._again
        held += [self._recording, kept]
        self._recording = self._owner = self._last = self._user = self._prepared = self._again = None
        self._inputs = self._outputs = self._launch = self._launch_on = None  # type: ignore[assignment]

    def _end_at_exit(self, deadline: float) -> None:
        """Drop the plans at the end of the process; destroy nothing else.

        No replay follows. If another thread still uses the program at the deadline (of the monotonic clock), the program is left
        as it is.
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
        """Close an unreferenced program after its last replay has passed."""
        try:
            return self._end(wait=False)
        except Exception:
            # If the recording was already detached, its own deferred step retries the destruction. Otherwise this step is
            # retried.
            return self._recording is None

    def __del__(self, _defer: Callable[[Callable[[], bool]], None] = defer) -> None:
        if self._recording is not None:
            _defer(self._settle)

    def __handlepool_arrays__(self) -> Any:
        """Return the outputs, for which `Fork.wait` waits."""
        return self._outputs

    def __reduce__(self) -> Any:
        """Refuse to be pickled, or copied by `copy.copy`.

        Two copies would destroy the same graph.
        """
        raise TypeError(f"the program {self._name} owns a graph and memory and cannot be copied or pickled; record it again")

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def capturing(pointer: int) -> CaptureError:
    """Return the error for a stream that is being captured."""
    if thread.recording is not None:
        return CaptureError("a program cannot be part of another recording: call its original function there")
    return CaptureError(
        f"stream {pointer:#x} is being captured, and a program can neither run on a captured stream nor wait for it. "
        "Use the program before the capture, or after"
    )
