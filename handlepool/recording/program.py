"""Programs: what a function gives to streams, recorded once and replayed with one launch (a CUDA graph)."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from handlepool.recording.outputs import Results
from handlepool.recording.owner import OWNERS, Owned
from handlepool.recording.prepared import Prepared, arrays_once, builder
from handlepool.recording.schedule import Arrangement
from handlepool.recording.tensors import in_order
from handlepool.recording.update import Copy, Inputs, copy_all
from handlepool.regions.memory import branch_regions
from handlepool.tensors.layout import Piece, Token

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

T = TypeVar("T")


class Program(Owned):
    """Recorded work, made by `record`.

    It owns what it needs. Its outputs, scratch, plans and every allocation made while it was recorded live as long as it does,
    and are used by nothing else. `close` ends them, as does the end of a ``with`` statement over the program. Its inputs are the
    arrays that `record` was given: the caller's, kept alive, and overwritten by `update` and by calls.

    All replays write the same memory, so no two of one program run concurrently. A replay on another stream than the last starts
    after all that the other stream has been given by then, readers of the outputs included. Consecutive replays on one stream
    cost no such care. Some streams may be gone, or somebody else's, by the next replay: those of a branch or a task, the
    per-thread default stream, a bare pointer, another library's. After one of these, the next replay waits for the last replay
    alone, so order the readers there yourself.

    `update`, `replay` and `outputs` belong to the thread that used one of them last, until it calls `hand_over` or ends. Any
    other thread gets an `OwnershipError`, since it would mix its values with those of the owner. Any thread may call the program,
    at any time. A call overwrites inputs and outputs, so it makes the calling thread the owner: the former owner is refused from
    then on, and does not take the values of the call for its own. Different programs may be replayed by different threads at
    once.

    Attributes
    ----------
    device : int
        Ordinal.
    nodes : int
        Kernels, copies and the like in the graph. A call, which `explain` counts as a node, may give it none, or several.
    tunings : tuple of Tuning
        Of plans that were measured by ``record(..., plans=True)``, in the order of their weight: each can be printed.
    """

    nodes: int
    _recording: "Recording | None" = None
    _streams: ClassVar[dict[int, Stream]] = {}
    """By number, the last streams of all programs. The collector runs the destructors of a whole cycle at once, also that of a
    stream whose program defers its own end: this keeps the stream until the program is closed."""
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
        self._built: Callable[[Any], Any] = list
        # Whether each use records its event at once. Then a use on another stream waits for the last use alone.
        self._lent = lent
        # One use at a time: CUDA takes no two launches of a graph at once, and a close ends what launches read. A finaliser that
        # the collector runs inside a use may take it, too: it finds `_busy`, and is refused: it could only wait for itself.
        self._lock = threading.RLock()
        self._busy: str | None = None  # what the holder of the lock has the program: replayed, updated, tuned, timed or closed
        self._current_device = pool.current_device
        self._current_stream: Callable[..., Stream] = driver.current_stream
        self._is_capturing = driver.is_capturing
        self._launch_on = graph.launch
        with driver.relaxed():
            self._event = recording.make_event()
        graph.upload(home.pointer)
        process_end.add(self._end_at_exit)
        # The last stream that used the memory, where its object is the stream: the event is recorded there when another follows.
        # None for any other stream, which may be gone by then: the event is recorded after each use.
        # So it is for a side stream, which is leased to others, who may have it captured: nobody else records or waits there.
        self._last: Stream | None = None
        self._used_by(home)
        if self._last is None or lent:
            driver.record_event(self._event, home.pointer)
        self._recording = recording

    @property
    def outputs(self) -> Any:
        """What the function returned while it was recorded: each replay writes its arrays, in the order of its stream.

        A branch that asks for them here reads them, and waits for the branches that replay. In the body of a fork nothing waits
        for that: hand them to a branch, or to `Fork.wait`.

        It is an `OwnershipError` where the program belongs to another thread.
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
        """Bytes of device memory that were allocated while recording, scratch included; 0 once it was closed."""
        recording = self._recording
        return 0 if recording is None else recording.nbytes

    @property
    def idle(self) -> bool:
        """Whether no thread uses it, and its last use has passed: of a program whose every use records its event."""
        if self._busy is not None:
            return False
        with self._driver.relaxed():
            return self._driver.event_done(self._event)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._recording is None

    def __repr__(self) -> str:
        what = f"{self.nodes} kernels and copies, {self.nbytes:,} bytes"
        state = ", closed" if self._recording is None else f" of device {self.device}: {what}"
        return f"<Program {self._name}{state}>"

    # Use

    @orders_itself
    def replay(self, stream: object = None) -> None:
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
            Where the program belongs to another thread (see `hand_over`), and in a finaliser inside another use of the program.
        PoolClosedError, ForkedProcessError, PoisonedContextError
            As their names say: after the program or its pool was closed, in a forked child.
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
                # Half of what a `with` statement costs. CPython delivers an interrupt when a call has returned: one that comes
                # with the lock in hand finds the `finally`.
                lock.acquire()
                try:
                    if self._user is not thread.token:
                        self._claim()
                    self._busy = "replayed"
                    current = self._current_stream() if stream is None else stream
                    if (
                        current is self._last  # a closed program has none
                        and ((self._bound and stream is None) or self._current_device() == self.device)
                        and not recordings
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
                except RuntimeError:  # an interrupt came while another thread had it
                    pass
        except Exception as error:
            self._explain(error)
            raise

    @orders_itself
    def update(self, *args: object, **kwargs: object) -> None:
        """Copy new values into the recorded inputs, on the current stream; replays see them from then on.

        The inputs are the arrays that `record` was given, which are overwritten.

        Parameters
        ----------
        *args, **kwargs
            The arguments of `record`, in the same places. Those without an array have the recorded value, or the positional
            ones among them are all left out, and keywords one by one. Arrays are of the driver's kind, and torch's tensors where
            tensors were, of the same shapes, strides and types, on the same device. Tensors are copied in the order of torch's
            current stream, too. Containers are nested alike: lists and tuples of the same lengths (one may stand for the other),
            dictionaries of the same keys. None leaves an argument with arrays, or an entry, as it is. Every value is read before
            the first is overwritten, so inputs can be swapped.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError
            For what differs from what was recorded, by its place, also in an argument without an array; for two values for one
            memory, as for an array that was recorded in two places; for a recorded array itself, where it has another one's
            values since an update or a call: pass None for these. For anything but None in the place of an array of another
            library than torch. Nothing is copied then.
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
        """Update the inputs, replay, and copy the outputs, in one turn: of the uses of other threads none comes in between.

        The recorded inputs, which are the caller's own arrays, hold the new values afterwards. Record with a copy,
        ``x.copy(order="K")``, where ``x`` itself is needed: passing that again is refused, since it has other values by now.

        All of it is enqueued on the current stream, whichever thread's and whichever stream that is, and nothing waits for the
        GPU. What is returned is the caller's, and no later use of the program writes to it. Afterwards `update`, `replay` and
        `outputs` belong to the calling thread, as `hand_over` says.

        Parameters
        ----------
        *args, **kwargs
            As in `update`.
        out : optional
            Arrays to copy the outputs into, and torch's tensors where these are tensors, in the structure of `outputs`: of the
            same shapes and types, in any memory that no two of them share. None, or None in the place of one of them, stands for
            new arrays. An input that was recorded by this name stays as it is.

        Returns
        -------
        array, or list, tuple or dictionary
            Copies of the outputs in the structure of `outputs`, ready in the order of the current stream, tensors in that of
            torch's, too; of one that was returned in several places there is one. Numbers, strings and None are as they were
            recorded. Of classes that are made of lists, tuples and dictionaries, named tuples alone are kept.

        Raises
        ------
        ArgumentError, ArrayTypeError, DeviceMismatchError
            As in `update`; for an ``out`` that differs from the outputs; for outputs that are arrays of other libraries than
            torch, or objects that may hold arrays. Nothing is enqueued then.
        MemoryError
            For want of memory for the copies.
        CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
            As in `replay`; but the program may belong to another thread, whose use this waits for.
        """
        if self._status.unusable:
            self._status.check()
        prepared = self._prepared
        if prepared is not None and out is None and not kwargs and not active and prepared.match(args):
            return self._built(self._turn(prepared.run, args))
        return self._use("called", self._call, args, out, kwargs)

    def _turn(self, run: Callable[..., T], arrays: Sequence[Any], *more: object) -> T:
        """Use the program once on the current stream, by ``run(arrays, pointer, launch, *more)``; that function's value.

        For prepared calls, which have checked the arrays.
        """
        lock = self._lock
        try:
            if self._busy is not None:
                self._check_turn("called")
            try:
                # As in `replay`.
                lock.acquire()
                try:
                    self._busy = "called"
                    if (
                        recordings
                        or self._current_stream() is not self._last  # a closed program has none
                        or not (self._bound or self._current_device() == self.device)
                    ):
                        self._follow(None)
                    self._user = thread.token  # as in `_call`
                    return self._enqueue(run, arrays, self._pointer, self._launch, *more)
                finally:
                    self._busy = None
            finally:
                try:
                    lock.release()
                except RuntimeError:  # an interrupt came while another thread had it
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
        # Or the former owner would replay with the inputs of this call, or read its outputs, and take both for its own.
        self._user = thread.token
        self._follow(None)
        self._inputs.copied(driver, given)
        self._enqueue(self._beside_torch([*given, *results.copies], turn))
        self._inputs.written(driver, results.copies)
        if out is None and not kwargs and len(given) == len(args):
            self._prepare()
        return results.value

    def _prepare(self) -> None:
        """Prepare calls with one array for each input, all of which hold the values of a call by now."""
        driver, inputs, outputs = self._driver, self._inputs.flat(self._driver), dict[int, Any]()
        if inputs and arrays_once(driver, self._outputs, outputs):
            self._built = builder(self._outputs, {each: itemgetter(place) for place, each in enumerate(outputs)})
            self._prepared = Prepared(driver, self.device, inputs, [*outputs.values()])

    def _beside_torch(self, copies: Sequence[Copy], step: Callable[[], object]) -> Callable[[], object]:
        """Return a step on the program's stream that is in order with torch's current one, where it copies tensors."""
        recording = self._recording
        if recording is None or all(copy.tensor is None for copy in copies):
            return step
        return lambda: in_order(recording.pool, self.device, self._pointer, step)

    def _enqueue(self, step: Callable[..., T], *args: object) -> T:
        """Give the stream that `_follow` made the program's something that uses the memory; return the value of the step."""
        if self._pointer and self._is_capturing(self._pointer):
            raise capturing(self._pointer)
        try:
            return step(*args)
        finally:  # also after one that failed, or was interrupted when it had enqueued something
            if self._last is None or self._lent:
                try:
                    self._driver.record_event(self._event, self._pointer)
                except BaseException:  # a later use cannot be ordered after this one, but may come when it has passed
                    with self._driver.relaxed():
                        self._driver.synchronize_stream(self._pointer)
                    raise

    def _replayed(self, act: Callable[[int], T]) -> T:
        if active:
            self._after_branches(self._memory.reads, self._memory.writes, None)
        self._follow(None)
        return self._enqueue(act, self._pointer)

    def _run_on(self, graph: RecordedGraph, arrangement: Arrangement) -> None:
        """Have replays launch another graph of the recording."""
        recording, launch = self._recording, partial(graph.launch, self._pointer)
        assert recording is not None
        # An interrupt may come after each call. The recording owns both graphs until the program launches the new one.
        recording.adopt(graph)
        self._launch_on, self._launch = graph.launch, launch
        recording.arrange_as(graph, arrangement)

    def _use(self, what: str, act: Callable[..., T], *args: object) -> T:
        """Do something while nothing else uses the program; what that returns."""
        try:
            if self._busy is not None:
                self._check_turn(what)
            with self._lock:  # CPython delivers no interrupt between the taking of it and the block
                try:
                    self._busy = what
                    return act(*args)
                finally:
                    self._busy = None
        except Exception as error:
            self._explain(error)
            raise

    def _check_turn(self, what: str) -> None:
        """Wait for another thread's use. Refuse a use inside this thread's own, and one that would be refused after the wait."""
        if what in OWNERS:
            self._check_owner()
        with self._lock:
            if self._busy is not None:
                raise OwnershipError(
                    f"{self._name} is being {self._busy} by this very thread, and this call comes from a finaliser that Python "
                    f"runs meanwhile: do it later"
                )

    def _claim(self) -> None:
        """Make this thread the owner, where no other thread is. The lock is held."""
        if self._recording is None:
            self._refuse()
        self._check_owner()
        self._user = thread.token

    def _explain(self, error: Exception) -> None:
        """Raise what an error means, where that is known."""
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
        """Let a stream wait for the branches of this thread's forks that a use conflicts with (guarantee 17)."""
        recording = self._recording
        if recording is not None:
            pointer = None if stream is None else resolve(self._driver, stream).pointer
            before(recording.pool, reads, writes, keep or (self, self._outputs), pointer)

    def _follow(self, stream: object) -> None:
        """Make another stream the one that uses the memory, after all that the last one was given by now."""
        if self._recording is None:
            self._refuse()
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
        driver.wait_event(pointer, self._event)
        with driver.relaxed():  # the last reference to the former stream may go
            self._used_by(reference)
            del last

    def _used_by(self, reference: StreamReference) -> None:
        last = None if reference.pointer == PER_THREAD_STREAM or reference.pointer in branch_regions else reference.stream
        # A stream of one device is current on no other: that it is current says which device is.
        bound = getattr(last, "device_id", -1) == self.device
        launch = partial(self._launch_on, reference.pointer)  # quicker to call than to be given the pointer each time
        if last is None:
            self._streams.pop(self._number, None)
        else:
            self._streams[self._number] = last
        # No call in between, after which an interrupt could come.
        self._last, self._pointer, self._owner = last, reference.pointer, reference.owner
        self._bound, self._launch = bound, launch

    # The end

    def close(self) -> None:
        """Wait for the last replay, then destroy the graph and free scratch and memory. Idempotent.

        Outputs that somebody holds stay valid; their memory is freed after them. Do not call this in a destructor, which may run
        inside another program's launch: two threads could wait for each other. Let go of the program there instead.

        Raises
        ------
        CaptureError
            When the stream of the last replay is being captured; close the program afterwards.
        OwnershipError
            In a finaliser inside another use of the program.
        """
        self._end(wait=True)

    def _end(self, *, wait: bool, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
        status = self._status
        # Nothing may be destroyed (guarantees 10 and 13), nor the lock be trusted: whoever has it may be gone.
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
                    # After the program's turn: what goes here may close another program, or this one.
                    with on_device(self._driver, self.device), self._driver.relaxed():
                        del held[1:]
                    if recording.destroy():
                        held.clear()
                finally:  # what an interrupt or a failing call leaves, and memory that arrays use
                    if held:
                        defer(recording.settle)
                        held.clear()  # or an error's traceback would keep it

    def _detach_when_idle(self, held: list[object], wait: bool) -> bool:
        """Take all from the program once its last use has passed; whether that is so by now."""
        recording = self._recording
        if recording is None:
            return True
        with on_device(self._driver, self.device):
            # Without an event it was freed: an interrupt came when the program had just been made.
            if recording.event is not None and not self._passed(wait=wait):
                return False
            self._detach(held)
            held.append(recording.kept.take())
        return True

    def _passed(self, *, wait: bool) -> bool:
        """Whether the last use of the memory has, waiting for it if need be."""
        driver, last = self._driver, self._last
        if last is not None and not self._lent:
            if last.ptr != LEGACY_STREAM and driver.is_capturing(last.ptr):
                if wait:
                    raise capturing(last.ptr)
                return False
            driver.record_event(self._event, last.ptr)
            if not wait:  # or the next time it is asked, the event would move on to what the stream was given since
                self._last = None
        with driver.relaxed():
            if wait:
                driver.synchronize_event(self._event)
            return wait or driver.event_done(self._event)

    def _detach(self, held: list[object]) -> None:
        """Put all that the program has into a list, the recording first."""
        stream = self._last, self._owner, self._streams.pop(self._number, None)
        # No call from here on, after which an interrupt could come: the recording is whoever's the list is.
        held += [self._recording, self._inputs, self._outputs, stream, self._launch, self._launch_on, self._prepared, self._built]
        self._recording = self._owner = self._last = self._user = self._prepared = None
        self._inputs = self._outputs = self._launch = self._launch_on = self._built = None  # type: ignore[assignment]

    def _end_at_exit(self, deadline: float) -> None:
        """Drop the plans, after which nobody replays; nothing else is destroyed.

        Not where another thread is inside a use until then (by the monotonic clock): what it launches is left alone.
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
        """Close a program that nobody closed, once its last replay has passed."""
        try:
            return self._end(wait=False)
        except Exception:
            return self._recording is None  # what came after that is the recording's, which is deferred

    def __del__(self, _defer: Callable[[Callable[[], bool]], None] = defer) -> None:
        if self._recording is not None:
            _defer(self._settle)

    def __handlepool_arrays__(self) -> Any:
        """Return the outputs: what `Fork.wait` waits for."""
        return self._outputs

    def __reduce__(self) -> Any:
        """Refuse to be copied, also by `copy.copy`: two would end one graph."""
        raise TypeError(f"the program {self._name} owns a graph and memory and cannot be copied or pickled; record it again")

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def capturing(pointer: int) -> CaptureError:
    """Return the error for a stream that is being captured."""
    if thread.recording is not None:
        return CaptureError("a program cannot be a part of another recording: call the function there that it was recorded from")
    return CaptureError(
        f"stream {pointer:#x} is being captured: a program can be neither used in a capture, nor be ordered after the last use "
        f"there. Use it before the capture, or after"
    )
