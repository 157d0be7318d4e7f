"""Capture the work of a function as a graph; own its resources.

A recording owns everything that the graph needs, for as long as the graph may run. While a recording is under way,
``thread.recording`` holds it: launches report their plans to it, and slots report the place of their scratch. Arrays come from
memory of the recording's own. So no later allocation reuses memory of a temporary array while a replay may still use it
(guarantee 9).
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
        the program anyway. A kept temporary array would also stop the recording from giving its memory to the next allocation.
    """

    def __init__(self, holds: Callable[[object], bool]) -> None:
        self._holds = holds
        self._values: dict[int, object] = {}

    def add(self, *values: object) -> None:
        """Keep the values that are reachable from some values.

        The walk goes through containers, closures, defaults, partial and bound functions. An object of any other type is kept as
        a whole, with all its present contents.
        """
        for value in leaves(*values, calls=True):
            if value is not None and not self._holds(value):
                self._values[id(value)] = value

    def values(self) -> list[object]:
        """Return the values that are kept."""
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
        Set where calls are nodes and the driver can order them by choice.
    arrangement : Arrangement or None
        The arrangement of these nodes in the graph that is launched.
    times : list of float or None
        Microseconds of each step, once they were measured.
    scratch : set of DeviceScratch
        The places where slots were given scratch under this capture.
    event : event
        The event of the program that was made of this recording. None before there is a program, and after the destruction.
    launches_nothing : bool
        Whether a call had a result without elements. Such a call launches nothing, so the graph may be empty.
    kept : KeptValues
        The values that the graph reads.
    held : list
        Arrays whose memory other libraries would otherwise reuse. Released when the call of the function ends.
    lanes : Lanes or None
        Set where calls are nodes that are ordered by their data.
    reads, writes : set of Piece or Token
        The memory that its graph functions and operations are known to read and write.
    """

    def __init__(self, pool: PoolInternals, name: str, lanes: int | None = None, rehearsed: Sequence[CallSignature] = ()) -> None:
        self.pool = pool
        self.device = pool.driver.current_device()
        self._leased: list[Slot] = []
        # The slots of forks that were joined during the capture.
        self._taken: list[tuple[SideSlots, Slot]] = []
        # The streams whose pointers no other owner may get while the graph exists.
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
        # Graphs that are about to be launched in the place of `graph`.
        self._adopted: list[RecordedGraph] = []
        self._name = name
        self._rehearsed = rehearsed
        self._memory = pool.driver.recording_memory()
        # Maps the address of an allocation to the line that made it.
        self._allocated_at: dict[int, str] = {}
        # The source of torch's tensors, where torch is in use.
        self._tensors: Any = None
        self.kept = KeptValues(self._memory.holds)
        self.held: list[Any] = []
        self._capture = 0

    def keep(self, plan: object) -> None:
        """Keep a launched plan, because it must outlive the graph.

        The plan cache may drop the plan earlier.
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
        """Raise for work on a stream that the recording does not include.

        Such work would run now and at no replay. ``fork`` is the fork that makes a branch.
        """
        # The work of another driver is no part of this recording.
        if unchecked(driver) is not unchecked(self.pool.driver):
            return
        if pointer == LEGACY_STREAM or driver.capture_id(pointer) != self._capture:
            raise CaptureError(
                f"{what} ran on stream {pointer:#x}, which is not part of the recording of {self._name}, so a replay "
                "would skip it. Use the current stream there, and open forks inside the recorded function"
            )
        if self.lanes is not None:
            self.lanes.in_order(what, pointer, fork)

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Note a fork that has fewer states than it wanted."""
        if self.lanes is not None:
            self.lanes.note_short_fork(fork, states, wanted)

    def memory(self, outputs: object, before: Sequence[LeftoverArrays]) -> Memory:
        """Return the memory that a replay reads and writes.

        If all returned arrays are the recording's own, the function wrote these arrays and the memory that it is known to write.
        Otherwise it may also have written each array that is kept for it, as in a branch. ``before`` are the arrays that the
        first call made.

        Raises
        ------
        CaptureError
            Where the function reads an array that its first call made.
        """
        driver = self.pool.driver
        given = self._pieces(self.kept.values())
        # Operations count by the memory that they declare, because the recording does not see their launches.
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
        """Return the memory of the arrays among some values that have elements."""
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

        The event is destroyed with the recording. Called inside `Driver.relaxed`.
        """
        self.event = self.pool.driver.create_event()
        return self.event

    def measured(self, measure: Callable[[], list[float]]) -> list[float]:
        """Measure the steps, and return their times."""
        self.times = measure()
        return self.times

    def adopt(self, graph: RecordedGraph) -> None:
        """Own another graph too, which the program is about to launch."""
        self._adopted.append(graph)

    def arrange_as(self, graph: RecordedGraph, arrangement: Arrangement) -> None:
        """Make an adopted graph the graph that is launched.

        The recording no longer owns the graph that was launched before, unless that graph is ``captured``.
        """
        self.graph, self.arrangement = graph, arrangement
        self._adopted.clear()

    def owns(self, graph: RecordedGraph) -> bool:
        """Return whether a graph is destroyed with the recording."""
        return graph in (self.graph, self.captured, *self._adopted)

    def holds(self, value: object) -> bool:
        """Return whether a value is an array in the recording's own memory."""
        return self._memory.holds(value)

    @property
    def known_reads(self) -> set[Piece | Token]:
        """The memory that its graph functions and operations read."""
        return self.reads if self.lanes is None else self.reads.union(*self.lanes.read, *[reads for reads, _ in self.lanes.used])

    @property
    def known_writes(self) -> set[Piece | Token]:
        """The memory that its graph functions and operations write."""
        return self.writes if self.lanes is None else self.writes.union(*[writes for _, writes in self.lanes.used])

    @property
    def unseen(self) -> bool:
        """Whether the recording has work whose writes are not known."""
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
        """The step of each memory allocation in the graph, or None.

        An entry is None where the step is not known.
        """
        captured, schedule = self.captured, self.schedule
        nodes = () if captured is None else captured.allocations()
        return [None for _ in nodes] if schedule is None else schedule.steps_of(nodes)

    @property
    def own(self) -> list[tuple[int, int]]:
        """The ranges of its own memory that calls may have written.

        Each range is the address of the begin and of the end.

        Used for a recording with lanes.
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
        The slot takes part in no fork meanwhile. No capture is left open in any case.

        Raises
        ------
        CaptureError
            For work that cannot be captured.
        Exception
            The function's own error otherwise.
        """
        sides = self.pool.device(self.device).sides
        slot = sides.lease()
        if slot is None:
            raise StateBusyError(
                f"every side stream of device {self.device} is in use, and a recording needs one{_held_by(self)}: record "
                "outside of forks, use executors with fewer workers, and record functions with many lanes one after the "
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
                f"{self._name} gave no work to the current stream or to streams forked from it, so there is nothing to replay"
            )
        return value

    def take(self, sides: SideSlots, slot: Slot) -> bool:
        """Take over a joined fork's side slot; return whether it is taken.

        The slot is taken if torch is in use. Torch keeps memory for each stream, so no other owner may use the slot's stream.
        """
        if self._tensors is not None:
            self._taken.append((sides, slot))
        return self._tensors is not None

    def _end_leases(self) -> None:
        """Release the leased slots.

        An interrupt loses one slot at most. The thread that destroys the recording releases the rest.
        """
        leased, sides = self._leased, self.pool.device(self.device).sides
        if self.lanes is not None:
            # The lanes go first, because the pool recognises a lost slot by the absence of any holder.
            self.lanes.forget()
        while leased:
            if leased[0].owner is not None:
                unbind(leased[0])
            # Torch keeps memory for each stream. So the slot gets a new stream, and the old stream stays with the recording.
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
            # The end of the capture may have failed before the driver closed it.
            abort_capture(driver, slot.pointer)
        try:
            if error is not None or ending is not None:
                raise_cause(self._name, self.pool, error, ending, device=self.device, valid=valid, progress=self._progress)
        finally:
            # Without this, the error, its traceback and this frame would form a reference cycle.
            del error, ending
        return value

    def _capture_valid(self, pointer: int) -> bool:
        """Return whether a capture is open and valid.

        The answer is False where the driver cannot tell.
        """
        try:
            return self.pool.driver.dependencies(pointer) is not None
        except Exception:
            return False

    def _check_host_copies(self, captured: RecordedGraph) -> None:
        """Refuse copies from the host.

        A replay would read that host memory again, with the values that it has by then.
        """
        for address in captured.host_copies():
            place = self._allocated_at.get(address)
            where = f"an array that was allocated at {place}" if place else f"device memory at {address:#x}"
            raise CaptureError(
                f"{self._name} cannot be recorded: it copies from the host into {where}, and every replay would read that "
                f"host memory again. {REMEDIES}"
            )

    def _allocated(self, block: object) -> None:
        if self.lanes is None:
            self._allocated_at[self.pool.driver.block_range(block)[0]] = place_of_call()
        else:
            address, place = self.lanes.allocated(block)
            self._allocated_at[address] = place

    def _arrange(self) -> None:
        """Make the captured graph ready for launch.

        Its nodes run on the requested number of lanes.
        """
        lanes, captured = self.lanes, self.captured
        assert captured is not None
        if lanes is not None and lanes.exact:
            self.schedule = Schedule(captured, lanes.steps, lanes.ends, lanes.leased.got)
            self.arrangement = self.schedule.on(lanes.limit, estimated(lanes.used))
        try:
            self.graph = captured.arranged(*(self.arrangement.edges if self.arrangement else ()))
        except CaptureError:
            # The driver cannot copy the graph, so the captured edges stay.
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
            # The state is checked first, since a change of state is often the cause of other work.
            check_state()
            check_same(self._name, self._rehearsed, [each for each in lanes.calls if each.what is not OF_CONSTANT])
            lanes.join(self._name, value)
            # These signatures and the calls of the lanes also hold plans. They are dropped here, so that `release_plans` drops
            # the last reference to each plan.
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

        # Arrays come from the memory of the recording, so that no other owner reuses it between replays.
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
        """Return the recording's calls and memory so far, where calls are nodes."""
        lanes = self.lanes
        if lanes is None:
            return None
        # Each lane has scratch of its own, and one lane would reuse the memory of earlier calls.
        scratch, got, nbytes = self.scratch_bytes, lanes.leased.got, self.nbytes
        on_one_lane = self._memory.in_order + scratch // max(got, 1) + nbytes - self._memory.nbytes - scratch
        return Progress(len(lanes.calls), len(self._rehearsed), got, nbytes, on_one_lane)

    def destroy(self) -> bool:
        """Destroy the graph and free its memory; return whether all is done.

        Memory that an array still uses is left for a later call. No launch of the graph may be under way. One thread at a time
        has a recording: the thread of its program, or the thread that found the recording deferred.
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
        # The attributes are cleared first, so that a second call does not destroy a graph twice.
        self.graph = self.captured = self.schedule = None
        self._adopted = []
        do_all([graph.destroy for graph in dict.fromkeys(graphs) if graph is not None])

    def _destroy_event(self) -> None:
        scratch = self.pool.device(self.device).scratch
        event, self.event = self.event, None
        if event is not None:
            scratch.destroy_event(event)

    def settle(self) -> bool:
        """Run `destroy`, and leave a failure for a later try."""
        try:
            return self.destroy()
        except Exception:
            return False


def _held_by(recording: Recording) -> str:
    """Say how many side slots other recordings under way hold."""
    found = [each.lanes for each in [*recordings] if isinstance(each, Recording) and each.shares_with(recording)]
    counts = [0 if lanes is None else lanes.leased.got for lanes in found]
    if not counts:
        return ""
    recorded = "another recording has" if len(counts) == 1 else f"{len(counts)} other recordings have"
    return f", and {recorded} {sum(counts)} as lanes"
