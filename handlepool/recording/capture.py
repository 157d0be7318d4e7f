"""Capture the work of a function as a graph; own its resources.

A recording owns everything that the graph needs, for as long as the graph may run. While a thread records,
``thread.recording`` is the recording: launches report their plans to the recording, and slots report the `DeviceScratch` that
holds their scratch. The function's arrays come from memory of the recording's own. So no later allocation reuses the memory of a
temporary array while a replay may still use that memory (guarantee 9).
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from handlepool._util.cleanup import do_all
from handlepool._util.frames import place_of_call
from handlepool._util.reachable import leaves
from handlepool.drivers.captures import RecordedGraph
from handlepool.drivers.protocol import Driver, abort_capture
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import CaptureError, StateBusyError
from handlepool.order.stream_order import in_torch, torch_among, torch_in_use
from handlepool.order.uses import Memory
from handlepool.pool.context import on_device, recordings, run_on, unchecked
from handlepool.pool.deferred import abandon
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import SideSlots
from handlepool.pool.slot import Slot, bind_to_thread, unbind
from handlepool.pool.workspace import DeviceScratch
from handlepool.recording.failure import Progress, raise_cause
from handlepool.recording.host_copies import REMEDIES
from handlepool.recording.lanes import Lanes
from handlepool.recording.rehearsal import OF_CONSTANT, CallSignature, LeftoverArrays, check_same
from handlepool.recording.schedule import Arrangement, Schedule, estimated
from handlepool.recording.update import memory_of
from handlepool.tensors.layout import Piece, Token, piece


class KeptValues:
    """Values that live as long as a program.

    A branch that runs eagerly keeps its arguments, and the values in its function's closure, only until the join, where a stream
    waits for the branch. A graph reads these values again at each replay, so they must live as long as the program.

    Parameters
    ----------
    holds : callable
        Returns whether a value is in the recording's own memory. Such a value is not kept, because that memory lives as long as
        the program anyway. If a temporary array were kept, the recording could not give the array's memory to a later
        allocation.
    """

    def __init__(self, holds: Callable[[object], bool]) -> None:
        self._holds = holds
        self._values: dict[int, object] = {}

    def add(self, *values: object) -> None:
        """Keep the values that are reachable from ``values``.

        The search goes through containers, closures, defaults, partial and bound functions. An object of any other type is kept
        as a whole, with all its present contents.
        """
        for value in leaves(*values, calls=True):
            if value is not None and not self._holds(value):
                self._values[id(value)] = value

    def values(self) -> list[object]:
        """Return the kept values."""
        return [*self._values.values()]

    def take(self) -> dict[int, object]:
        """Remove all values and return them.

        The caller drops them at a place where finalizers of user objects may run.
        """
        values, self._values = self._values, {}
        return values


T = TypeVar("T")


class Recording:
    """The work of one function, from capture until destruction of the graph.

    A recording is made and used with its device current.

    Attributes
    ----------
    graph : RecordedGraph
        The graph that is launched. Set when `capture` has returned.
    captured : RecordedGraph
        The graph that was captured. ``graph`` may be a copy of it with other edges.
    schedule : Schedule or None
        The steps of the captured graph. None if the recording has no lanes, or if the driver cannot choose dependencies.
    arrangement : Arrangement or None
        The lanes and edges of the steps in the graph that is launched. None if ``schedule`` is None.
    times : list of float or None
        Microseconds of each step. None before the steps were measured.
    scratch : set of DeviceScratch
        The scratch of each device on which a slot got scratch under this capture.
    event : event
        The event of the program that was made of this recording. None before the program is made, and after `destroy`.
    launches_nothing : bool
        Whether a call had a result without elements. Such a call launches nothing, so the graph may be empty.
    kept : KeptValues
        The values that the graph reads.
    held : list
        Arrays whose memory other libraries would otherwise reuse. They are released when the call of the function ends.
    lanes : Lanes or None
        The lanes, which order nodes by their data. None if the recording has no lanes.
    reads, writes : set of Piece or Token
        The memory that the function's graph functions and operations are known to read and write.
    """

    def __init__(self, pool: PoolInternals, name: str, lanes: int | None = None, rehearsed: Sequence[CallSignature] = ()) -> None:
        self.pool = pool
        self.device = pool.driver.current_device()
        self._leased: list[Slot] = []
        # The slots of forks that were joined during the capture.
        self._taken: list[tuple[SideSlots, Slot]] = []
        # The streams that no other owner may get while the graph exists.
        self._streams: list[tuple[SideSlots, Any]] = []
        self._plans: dict[int, object] = {}
        self.lanes = None if lanes is None else Lanes(pool, self.device, lanes, self._leased, self.keep)
        self.graph: RecordedGraph | None = None
        self.schedule: Schedule | None = None
        self.arrangement: Arrangement | None = None
        self.captured: RecordedGraph | None = None
        self.times: list[float] | None = None
        self.scratch: set[DeviceScratch] = set()
        self.reads: set[Piece | Token] = set()
        self.writes: set[Piece | Token] = set()
        self.event: Any = None
        self.launches_nothing = False
        # Graphs that the program is about to launch instead of `graph`.
        self._adopted: list[RecordedGraph] = []
        self._name = name
        self._rehearsed = rehearsed
        self._memory = pool.driver.recording_memory()
        # Maps the address of an allocation to the line that made it.
        self._allocated_at: dict[int, str] = {}
        # The source of torch's tensors. None if torch is not in use.
        self._tensors: Any = None
        self.kept = KeptValues(self._memory.holds)
        self.held: list[Any] = []
        self._capture = 0

    def keep(self, plan: object) -> None:
        """Keep a launched plan, because the plan must outlive the graph.

        The plan cache may drop the plan before the graph is destroyed.
        """
        self._plans[id(plan)] = plan

    def note_empty_call(self) -> None:
        """Note a call whose result has no elements, and which launches nothing."""
        self.launches_nothing = True

    def engines(self) -> list[str]:
        """Return the engines of the launched plans, in order of first launch."""
        found = [getattr(getattr(plan, "executable", None), "engine", None) for plan in self._plans.values()]
        return [engine for engine in found if engine is not None]

    def accessed(self, reads: Sequence[Piece | Token], writes: Sequence[Piece | Token]) -> None:
        """Note the memory that a recorded call, and so each replay, accesses."""
        self.reads.update(reads)
        self.writes.update(writes)
        if self.lanes is not None:
            self.lanes.accessed(reads, writes)

    def check(self, what: str, pointer: int, driver: Driver, fork: object = None) -> None:
        """Refuse work on a stream that is no part of the recording.

        Such work would run now, and would not run at a replay. ``fork`` is the fork whose branch the work is, if any.
        """
        # The work of another driver is no part of this recording.
        if unchecked(driver) is not unchecked(self.pool.driver):
            return
        if pointer == LEGACY_STREAM or driver.capture_id(pointer) != self._capture:
            raise CaptureError(
                f"{what} ran on stream {pointer:#x}, which is not part of the recording of {self._name}, so a replay "
                "would skip that work. In the recorded function, use only the current stream and forks that the function opens"
            )
        if self.lanes is not None:
            self.lanes.in_order(what, pointer, fork)

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Note that a fork asked for ``wanted`` states and got ``states``."""
        if self.lanes is not None:
            self.lanes.note_short_fork(fork, states, wanted)

    def memory(self, outputs: object, before: Sequence[LeftoverArrays]) -> Memory:
        """Return the memory that a replay reads and writes.

        A replay writes the returned arrays, and the memory that graph functions and operations are known to write. If a returned
        array is not in the recording's own memory, each array in ``kept`` also counts as written. ``before`` are the arrays that
        the first call made.

        Raises
        ------
        CaptureError
            If the function reads an array that its first call made.
        """
        driver = self.pool.driver
        given = self._pieces(self.kept.values())
        # The recording does not see the launches of an operation. So it uses the memory that the operation declares.
        used = () if self.lanes is None else self.lanes.used
        reads, writes = self.reads.union(*[each for each, _ in used]), self.writes.union(*[each for _, each in used])
        known = self.reads if self.lanes is None else self.reads.union(*self.lanes.read)
        for new in before:
            # The declared reads of operations on lanes do not count here, because an operation may declare memory that it does
            # not read.
            new.check(self._name, known, writes)
        arrays = [value for value in leaves(outputs) if memory_of(driver, value) is not None]
        own = all(map(self._memory.holds, arrays))
        return Memory([*reads, *given], [*writes, *self._pieces(arrays), *(() if own else given)])

    def _pieces(self, values: Sequence[object]) -> list[Piece]:
        """Return the memory of each array in ``values`` that has elements."""
        driver, native, found = self.pool.driver, self.pool.driver.array_types[0], []
        for value in values:
            if type(value) is native:
                array: Any = value
                memory: Piece | None = piece(driver.array_pointer(array), array.shape, array.strides, array.dtype.itemsize)
            else:
                memory = memory_of(driver, value)
            if memory is not None and memory[1] > memory[0]:
                found.append(memory)
        return found

    def make_event(self) -> Any:
        """Create the program's event and return it.

        `destroy` destroys the event. The caller must be inside `Driver.relaxed`.
        """
        self.event = self.pool.driver.create_event()
        return self.event

    def measured(self, measure: Callable[[], list[float]]) -> list[float]:
        """Call ``measure``; keep and return its times of the steps."""
        self.times = measure()
        return self.times

    def adopt(self, graph: RecordedGraph) -> None:
        """Take over a graph that the program is about to launch.

        From now on `destroy` also destroys this graph.
        """
        self._adopted.append(graph)

    def arrange_as(self, graph: RecordedGraph, arrangement: Arrangement) -> None:
        """Make an adopted graph the graph that is launched.

        The recording no longer owns the previous ``graph``, unless that graph is ``captured``.
        """
        self.graph, self.arrangement = graph, arrangement
        self._adopted.clear()

    def owns(self, graph: RecordedGraph) -> bool:
        """Return whether `destroy` destroys this graph."""
        return graph in (self.graph, self.captured, *self._adopted)

    def holds(self, value: object) -> bool:
        """Return whether a value is an array in the recording's own memory."""
        return self._memory.holds(value)

    @property
    def known_reads(self) -> set[Piece | Token]:
        """The memory that the function's graph functions and operations read."""
        return self.reads if self.lanes is None else self.reads.union(*self.lanes.read, *[reads for reads, _ in self.lanes.used])

    @property
    def known_writes(self) -> set[Piece | Token]:
        """The memory that the function's graph functions and operations write."""
        return self.writes if self.lanes is None else self.writes.union(*[writes for _, writes in self.lanes.used])

    @property
    def unseen(self) -> bool:
        """Whether some recorded work may write memory that is not known."""
        return self.lanes is None or any(step.lane is None for step in self.lanes.steps)

    def shares_with(self, other: "Recording") -> bool:
        """Return whether two recordings lease side slots of one device and pool."""
        return self.pool is other.pool and self.device == other.device

    def release_plans(self) -> None:
        """Release the plans, once the graph is not launched any more."""
        self._plans.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for arrays and scratch."""
        return self._memory.nbytes + self.scratch_bytes + (0 if self._tensors is None else self._tensors.nbytes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory for scratch alone."""
        return sum(block.nbytes for place in self.scratch for block in place.recorded.get(self._capture, ()))

    @property
    def allocations(self) -> list[int | None]:
        """The step that made each memory allocation in the graph.

        An entry is None if the step is not known.
        """
        captured, schedule = self.captured, self.schedule
        nodes = () if captured is None else captured.allocations()
        return [None for _ in nodes] if schedule is None else schedule.steps_of(nodes)

    @property
    def own(self) -> list[tuple[int, int]]:
        """The ranges of the recording's own memory that calls may have written.

        A range is a pair of addresses: its begin and its end. Without lanes, the list lacks the driver's arrays, because only
        lanes note these ranges.
        """
        found = [] if self.lanes is None else [*self.lanes.memory.own]
        blocks = [block for place in self.scratch for block in place.recorded.get(self._capture, ())]
        found += [(block.pointer, block.pointer + block.nbytes) for block in blocks]
        return found if self._tensors is None else found + self._tensors.ranges

    def capture(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check_state: Callable[[], object] = bool,
    ) -> T:
        """Call a function under capture, and return its value.

        With lanes, the method calls ``check_state`` before it compares the recorded calls with the calls of the first run.

        The captured stream belongs to a side slot, because the caller's stream may be the null stream, which CUDA cannot capture.
        During the capture no fork gets this slot. If the method raises, it has ended the capture.

        Raises
        ------
        CaptureError
            If the function gives work that cannot be captured.
        Exception
            The function's own error, if the function raises for another reason.
        """
        sides = self.pool.device(self.device).sides
        slot = sides.lease()
        if slot is None:
            raise StateBusyError(
                f"every side stream of device {self.device} is in use, and a recording needs a free side stream{_held_by(self)}: "
                "record outside of forks, use executors with fewer workers, and record functions with many lanes one after the "
                "other"
            )
        self._leased.append(slot)
        try:
            bind_to_thread(self.pool.repaired(slot))
            value = self._captured(slot, partial(self._in_lanes, slot, function, args, kwargs, check_state))
        finally:
            self._end_leases()
        assert self.graph is not None
        if not self.graph.nodes and not self.launches_nothing:
            raise CaptureError(
                f"{self._name} gave no work to the current stream or to streams forked from it, so there is nothing to "
                "replay. In the function, launch the work on the current stream"
            )
        return value

    def take(self, sides: SideSlots, slot: Slot) -> bool:
        """Take over a joined fork's side slot; return whether this was needed.

        The recording needs the slot only if torch is in use. Torch keeps memory for each stream. So no other owner may use the
        slot's stream while the graph exists.
        """
        if self._tensors is not None:
            self._taken.append((sides, slot))
        return self._tensors is not None

    def _end_leases(self) -> None:
        """Release the leased slots.

        If a KeyboardInterrupt stops this method, at most one slot is lost. `destroy` releases the other slots.
        """
        leased, sides = self._leased, self.pool.device(self.device).sides
        if self.lanes is not None:
            # The lanes let go of their slots first. If an interrupt loses a slot later, the pool detects the loss because no lane
            # refers to the slot any more.
            self.lanes.forget()
        while leased:
            if leased[0].owner is not None:
                unbind(leased[0])
            # Torch keeps memory for the slot's stream. So the recording keeps this stream, and the slot gets a new stream.
            if self._tensors is not None:
                self._streams.append((sides, sides.replace_stream(leased[0])))
            sides.release(leased.pop(0), captured=True)
        while self._taken:
            owner, slot = self._taken[0]
            self._streams.append((owner, owner.replace_stream(slot)))
            owner.release(self._taken.pop(0)[1], captured=True)
        sides.release_captured()

    def _captured(self, slot: Slot, call: Callable[[], T]) -> T:
        driver = self.pool.driver
        value: Any = None
        error: BaseException | None = None
        ending: BaseException | None = None
        valid = False
        try:
            driver.begin_capture(slot.pointer)
            self._capture = driver.capture_id(slot.pointer)
            value = call()
        except BaseException as trouble:
            error = trouble
        try:
            valid = error is not None and self._capture_valid(slot.pointer)
            for scratch in self.scratch:
                scratch.keep_recorded(self._capture)
            with driver.relaxed():
                self.graph = self.captured = driver.end_capture(slot.pointer)
                if error is None:
                    self._check_host_copies(self.captured)
                    self._arrange()
        except BaseException as trouble:
            ending = trouble
            # `end_capture` may have failed before it ended the capture, which would then stay open.
            abort_capture(driver, slot.pointer)
        try:
            if error is not None or ending is not None:
                raise_cause(self._name, self.pool, error, ending, device=self.device, valid=valid, progress=self._progress)
        finally:
            # Without `del`, the error, its traceback and this frame would form a reference cycle.
            del error, ending
        return value

    def _capture_valid(self, pointer: int) -> bool:
        """Return whether the stream's capture is open and valid.

        The answer is False if the driver cannot tell.
        """
        try:
            return self.pool.driver.dependencies(pointer) is not None
        except Exception:
            return False

    def _check_host_copies(self, captured: RecordedGraph) -> None:
        """Refuse a graph that copies from host memory.

        A replay would read the host memory again, with the values of that time.
        """
        for address in captured.host_copies():
            place = self._allocated_at.get(address)
            where = f"an array that was allocated at {place}" if place else f"device memory at {address:#x}"
            raise CaptureError(
                f"{self._name} cannot be recorded: the function copies host memory into {where}, and every replay would read "
                f"the host memory again. {REMEDIES}"
            )

    def _allocated(self, block: object) -> None:
        if self.lanes is None:
            self._allocated_at[self.pool.driver.block_range(block)[0]] = place_of_call()
        else:
            address, place = self.lanes.allocated(block)
            self._allocated_at[address] = place

    def _arrange(self) -> None:
        """Arrange the captured graph on the requested lanes, and instantiate it."""
        lanes, captured = self.lanes, self.captured
        assert captured is not None
        if lanes is not None and lanes.exact:
            self.schedule = Schedule(captured, lanes.steps, lanes.ends, lanes.leased.got)
            self.arrangement = self.schedule.on(lanes.limit, estimated(lanes.used))
        try:
            self.graph = captured.arranged(*(self.arrangement.edges if self.arrangement else ()))
        except CaptureError:
            # The driver cannot copy the graph in order to change its edges. So the program launches the graph with the edges of
            # the capture.
            self.arrangement = None if self.schedule is None else self.schedule.recorded
        assert self.graph is not None
        self.graph.instantiate()

    def _in_lanes(
        self,
        slot: Slot,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check_state: Callable[[], object],
    ) -> T:
        lanes = self.lanes
        torch = None
        if "torch" in sys.modules:
            torch = torch_in_use(self.pool.driver) or torch_among(function, args, kwargs)
        if torch is not None:
            self._tensors = torch.recording_pool(self.device)
            function, args, kwargs = in_torch(torch, slot.pointer, slot.pointer, self.device, function, args, kwargs)
        if lanes is None:
            return self._call(slot, function, args, kwargs)
        end = lanes.begin(slot, self._memory, self._tensors)
        try:
            value = self._call(slot, function, args, kwargs)
            if lanes.refused:
                raise CaptureError(lanes.refused)
            # The state is checked before the calls. If the function changed its state, its calls often differ for this reason,
            # and the message about the state names the cause.
            check_state()
            check_same(self._name, self._rehearsed, [each for each in lanes.calls if each.what is not OF_CONSTANT])
            lanes.join(self._name, value)
            # The signatures of the rehearsal and of the lanes refer to plans. Both are dropped here, so that `release_plans`
            # drops the last reference to each plan.
            self._rehearsed = ()
            lanes.calls.clear()
            return value
        finally:
            end()

    def _call(self, slot: Slot, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        driver, tensors = self.pool.driver, self._tensors

        def call() -> T:
            if tensors is not None:
                tensors.begin()
            value = run_on(self.pool, slot.side_stream, self.device, None, function, args, kwargs)
            if tensors is not None:
                with driver.relaxed():
                    tensors.check()
            return value

        # The function's arrays are allocated in the recording's memory. So no other owner reuses their memory between replays.
        allocator = driver.swap_allocator(self._memory.allocator)
        self._memory.on_allocate(self._allocated)
        try:
            return recordings.around(self, "recording", self, call)
        finally:
            driver.swap_allocator(allocator)
            self._memory.on_allocate(None)
            self.held.clear()
            if tensors is not None:
                with driver.relaxed():
                    tensors.end()

    def _progress(self) -> Progress | None:
        """Return the calls and memory so far, or None without lanes."""
        lanes = self.lanes
        if lanes is None:
            return None
        # One lane would need the scratch of a single lane. It would need less memory for arrays, because each call could reuse
        # memory that earlier calls freed.
        scratch, got, nbytes = self.scratch_bytes, lanes.leased.got, self.nbytes
        on_one_lane = self._memory.in_order + scratch // max(got, 1) + nbytes - self._memory.nbytes - scratch
        return Progress(len(lanes.calls), len(self._rehearsed), got, nbytes, on_one_lane)

    def destroy(self) -> bool:
        """Destroy the graph and free its memory; return whether all is done.

        If an array still uses some of the memory, a later call of this method frees that memory. The caller makes sure
        that no launch of the graph is under way, and that no other thread uses the recording: the caller is the program, or a
        thread that settles deferred recordings.
        """
        pool = self.pool
        if pool.status.untouchable:
            abandon(self)
            return True
        with on_device(pool.driver, self.device), pool.driver.relaxed():
            leases = [self._end_leases] if self._leased or self._taken else []
            steps = [partial(scratch.free_recorded, self._capture) for scratch in self.scratch]
            try:
                do_all([*leases, self._destroy_graph, self._destroy_event, *steps, self.release_plans])
                while self._streams:
                    owner, stream = self._streams.pop()
                    owner.reuse(stream)
                if self._tensors is not None:
                    self._tensors.close()
            finally:
                done = self._memory.release()
            return done

    def _destroy_graph(self) -> None:
        graphs = self.graph, self.captured, *self._adopted
        # The attributes are cleared first, so that a second call of `destroy` does not destroy a graph twice.
        self.graph = self.captured = self.schedule = None
        self._adopted = []
        do_all([graph.destroy for graph in dict.fromkeys(graphs) if graph is not None])

    def _destroy_event(self) -> None:
        scratch = self.pool.device(self.device).scratch
        event, self.event = self.event, None
        if event is not None:
            scratch.destroy_event(event)

    def settle(self) -> bool:
        """Run `destroy`; return False if it fails."""
        try:
            return self.destroy()
        except Exception:
            return False


def _held_by(recording: Recording) -> str:
    """Say how many lanes the other unfinished recordings have, for a message."""
    found = [each.lanes for each in [*recordings] if isinstance(each, Recording) and each.shares_with(recording)]
    counts = [0 if lanes is None else lanes.leased.got for lanes in found]
    if not counts:
        return ""
    recorded = "another recording has" if len(counts) == 1 else f"{len(counts)} other recordings have"
    return f"; {recorded} leased {sum(counts)} side streams as lanes"
