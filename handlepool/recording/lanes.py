"""Record the calls of a sequential function as nodes (guarantee 17).

A node is a recorded call of a graph function or an operation. In the program, a node waits only for the nodes that made its data
or used its memory. A lane is a leased side slot whose stream takes part in the capture. Each node is recorded on one lane. The
lane's stream first waits for the nodes that the call follows by its data, and for the lane's last node. So the nodes of a lane
run one after the other, and never use the slot's scratch, or data that a library keeps for the stream, at once. The books, which
note the use of memory, are the same as for a region, with a track for each lane.

Untracked work is work that is no node. It changes the dependencies of the main stream, by which the next node detects the work.
All later nodes follow untracked work, so new books begin after it. There are as many lanes as the data allows. Afterwards
`handlepool.recording.schedule` reduces them to the number that was asked for.

CUDA nodes are the kernels and copies in the captured graph. A node adds none, one or several CUDA nodes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from handlepool._util.frames import place_of_call
from handlepool._util.reachable import leaves
from handlepool.drivers.captures import RecordingMemory
from handlepool.errors import CaptureError
from handlepool.order.books import in_the_middle
from handlepool.order.track import NOTHING, Needs
from handlepool.order.uses import Use, needs_of, write_down
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.recording.explain import Step
from handlepool.recording.held import HeldTensors
from handlepool.recording.lane import Lane, LeasedLanes, MainStream, Node, OpenNode, direct, ends_of, known_to, steps_of
from handlepool.recording.memory import NodeMemory, writes_outside
from handlepool.recording.other_work import PLAIN
from handlepool.recording.rehearsal import CallSignature, sizes_of
from handlepool.recording.update import memory_of
from handlepool.tensors.layout import Piece, Token

T = TypeVar("T")
Pieces = Sequence[Piece | Token]

GAVE_TO_MAIN = "the call gave work to the main stream of the recording, and not only to its own lane"
MOST_NODES = 20_000
"""The maximum number of nodes in one recording."""


class Lanes:
    """The nodes and lanes of one recording.

    Only the thread that records makes and uses this object, with the recording's device current.

    Parameters
    ----------
    pool : PoolInternals
    device : int
    limit : int
        Maximum number of nodes that will run at once. With 1, all nodes are recorded on one lane.
    leased : list of Slot
        The list to which each leased slot is added.
    keep : callable
        Called with each launched plan, which it keeps alive.

    Attributes
    ----------
    steps : list of Step
        The nodes and the untracked work, in the order of the recording.
    calls : list of CallSignature
        The calls that became nodes.
    ends : list of tuple of node
        For each step, the CUDA nodes that a later step waits for. If untracked work makes several steps, only the last of these
        steps has an entry with CUDA nodes.
    read : list of pieces
        The memory that the plans of nodes read.
    used : list of (pieces, pieces)
        For each step, the memory that it is known to read and write.
    memory : NodeMemory
        The books of memory, and the blocks that were allocated.
    leased : LeasedLanes
        The lanes.
    main : MainStream
        The captured stream.
    exact : bool
        Whether the driver can choose the CUDA nodes that a stream waits for.
    refused : str
        The reason why a call was refused, or "". If there is a reason, the recording fails even if the function caught the error,
        because the program would lack the call.
    """

    def __init__(self, pool: PoolInternals, device: int, limit: int, leased: list[Slot], keep: Callable[[object], None]) -> None:
        self.limit = limit
        self.steps: list[Step] = []
        self.ends: list[tuple[Any, ...]] = []
        self.read: list[Pieces] = []
        self.used: list[tuple[Pieces, Pieces]] = []
        self.calls: list[CallSignature] = []
        self.memory = NodeMemory(pool.driver)
        self.leased = LeasedLanes(pool, device, limit, leased)
        self.main = MainStream(pool.driver)
        self.exact = True
        self.refused = ""
        self._pool = pool
        self._keep = keep
        self._driver = pool.driver
        self._ask = pool.driver.dependencies
        # The CUDA nodes that the lane's stream was made to wait for before the last node.
        self._node_deps: tuple[Any, ...] = ()
        # The memory that calls inside the present node read and write.
        self._nested_accesses: list[tuple[Pieces, Pieces]] = []
        # These three values describe the next node while its outputs are allocated: a function that returns the memory that the
        # node reads, the place of the call, and the calls that the node follows.
        self._expected: Callable[[], Pieces] | None = None
        self._expected_place = ""
        self._expected_known: Needs | None = None
        self._nodes = 0
        # `_inside` says that a node is being recorded, and `_busy` that the books are being changed.
        self._inside = self._busy = False
        # The reason why all later steps must follow the node that is being recorded, or "".
        self._serial_reason = ""
        self._current: Lane | None = None
        self._tensors: Any = None
        self._held: HeldTensors | None = None

    def begin(self, slot: Slot, memory: RecordingMemory, tensors: Any = None) -> Callable[[], None]:
        """Begin to record nodes; return a function that ends this.

        ``slot`` captures, and its stream is the main stream. ``memory`` is the recording's own memory. ``tensors`` is the source
        of torch's tensors, if torch is in use.
        """
        self._tensors = tensors
        # With one lane, no tensors are held: all nodes use one stream, on which torch reuses memory in order.
        if tensors is not None and self.limit > 1:
            self._held = HeldTensors(tensors, memory.begins)
        self.exact = self.main.begin(slot)
        self.leased.begin(slot, exact=self.exact)
        if self.exact and not memory.set_reuse_policy(self.may_have, self.leased.pointers.__contains__):
            self.memory.keep_blocks()
        ends = ExitStack()
        ends.callback(memory.set_reuse_policy, None)
        ends.callback(self._driver.watch_untracked_work(self._note_plain))
        ends.callback(self._driver.watch_shared_state(self._note_shared, check=False))
        return ends.close

    def takes(self, pool: object, pointer: int) -> bool:
        """Return whether a call on a stream becomes a node.

        A call of the recording's pool on the main stream becomes a node, unless it is inside another node.
        """
        return not self._inside and pool is self._pool and pointer == self.main.pointer

    def note_untracked(self, what: str, why: str = PLAIN) -> None:
        """Note untracked work, with the reason why it is no node."""
        if not self._inside:
            self.main.other_work().add(what, why)

    def in_order(self, what: str, pointer: int, fork: object) -> None:
        """Note work that is recorded in the order of streams and forks.

        Work inside a node belongs to the node, and is not noted. See `OtherWork.in_order` for the parameters.
        """
        if not self._inside:
            self.main.other_work().in_order(what, pointer == self.main.pointer, fork)

    def note_short_fork(self, fork: object, states: int, wanted: int) -> None:
        """Note that a fork asked for ``wanted`` states and got ``states``."""
        self.main.note_short_fork(fork, states, wanted)

    def allocated(self, block: object) -> tuple[int, str]:
        """Note an allocated block; return its address and its place.

        The place is the file and line that allocated the block.
        """
        output = not self._inside and self._expected is not None
        place = self._expected_place if output else place_of_call()
        if not (output or self._inside):
            self.main.other_work().allocated(place)
        return self.memory.add(block, place, in_node=self._inside, is_output=output), place

    def accessed(self, reads: Pieces, writes: Pieces) -> None:
        """Note the memory that a call inside a node accesses.

        If the call is not inside a node, it is ignored.
        """
        if self._inside:
            self._nested_accesses.append((reads, writes))

    def made(self, arrays: object) -> None:
        """Ignore the new arrays of a node, which only `Rehearsal` notes."""

    def expect(self, reads: Callable[[], Pieces] | None) -> None:
        """Note ``reads``, which returns the memory that the next node reads.

        The caller sets ``reads`` before it allocates the node's outputs, and sets None afterwards.
        """
        self._expected, self._expected_known = reads, None
        if reads is not None:
            self._expected_place = place_of_call()

    def may_have(self, start: int, stop: int) -> bool:
        """Return whether freed memory may be given to a new array now.

        The memory may be given out if the node that will write to it already follows all calls that used the memory. This node is
        the present node, or between nodes the expected next node. If another node writes there, the books order it after these
        calls.
        """
        # With one lane, each node follows all earlier nodes.
        if self.limit == 1:
            return True
        # While the books are being changed, only a finalizer that interrupts the change can ask. The books cannot be read then.
        if self._busy:
            return False
        self._busy = True
        try:
            needs = self.memory.last_users(start, stop)
            if not needs:
                return True
            known = self._known_to_writer()
            return not [track for track, call in needs.items() if known.get(track, 0) < call]
        finally:
            self._busy = False

    def _known_to_writer(self) -> Needs:
        """Return the calls that the writer of newly allocated memory follows.

        Inside a node, the writer is that node. Between nodes, the writer is the expected next node.
        """
        if self._inside and self._current is not None:
            return self._current.nodes[-1].known
        if self._expected is None:
            return NOTHING
        if self._expected_known is None:
            self._expected_known = known_to(self.leased.nodes(needs_of(self.memory.entries(self._expected()), ())))
        return self._expected_known

    def run(
        self,
        name: str,
        reads: Pieces,
        writes: Pieces,
        keep: object,
        call: Callable[[Slot], T],
        new: Callable[[T], Iterable[Piece | Token]] | None = None,
        *,
        what: tuple[object, ...] = (),
        assumed_writes: Pieces = (),
    ) -> T:
        """Record a call as a node, and return its value.

        Parameters
        ----------
        name : str
        reads, writes : sequence of Piece or Token
            The memory that the call reads, and the memory that it overwrites.
        keep : object
            The arrays that own the memory.
        call : callable
            Does the work. It takes the slot on which the work is to be launched.
        new : callable, optional
            Takes the call's value, and returns the memory that the call wrote beyond ``writes`` and its own allocations.
        what : tuple
            See `CallSignature`.
        assumed_writes : sequence of Piece
            Other memory that the call may overwrite.

        Raises
        ------
        CaptureError
            If the recording already has `MOST_NODES` nodes. If the call's work was not captured, or was captured without a known
            order.
        OwnershipError
            If a finalizer makes the call while its thread is changing the books.
        """
        signature = CallSignature(name, sizes_of(writes), place_of_call(), what)
        opened = self._begin(signature, reads, (*writes, *assumed_writes), keep)
        try:
            result = call(opened[1].show())
            written = [] if new is None else [*new(result)]
        except BaseException:
            self._fail(opened)
            raise
        self._finish(opened, written, result)
        return result

    def hit(self, attempt: Callable[..., Any], arrays: tuple[Any, ...], out: Any) -> Any:
        """Record the launch of a shortcut as a node; return its value.

        ``attempt`` is the shortcut. When it has found that the arrays have the plan's geometry, it calls its argument
        ``begin``, which begins the node and returns the slot.
        """
        opened: OpenNode | None = None

        def begin(operands: object, launch: Any, addresses: Sequence[int], *_: object) -> Slot:
            nonlocal opened
            plan, known = launch.plan, launch.operands
            pieces, inputs = known.pieces(addresses), known.inputs
            reads = pieces[:inputs]
            place = place_of_call() if self._expected is None else self._expected_place
            opened = self._begin(CallSignature(plan.name, known.sizes, place, (plan,)), reads, pieces[inputs:], operands)
            self._keep(plan)
            self.read.append(reads)
            return opened[1].slot

        try:
            result = attempt(begin, arrays, out)
        except BaseException:
            # If the attempt failed before it called ``begin``, there is no node to end.
            if opened is not None:
                self._fail(opened)
            raise
        if opened is not None:
            self._finish(opened, (), result, alone=True)
        return result

    def join(self, name: str, outputs: object) -> None:
        """Let the main stream wait for all lanes, before the capture ends.

        ``outputs`` is the value that the function returned.

        Raises
        ------
        CaptureError
            If no recorded call writes an array in ``outputs``.
        """
        if not self.exact:
            return
        found = self.main.new_work()
        if found is not None:
            self._see_others(found, "the end")
        unwritten = self.memory.unwritten
        for array in leaves(outputs) if unwritten.starts else ():
            piece = memory_of(self._driver, array)
            if piece is not None:
                unwritten.check_returned(name, array, piece)
        self.main.join(self.leased.all)

    def forget(self) -> None:
        """Let go of the slots, the books and the CUDA nodes."""
        self.memory.close()
        self.leased.forget()
        self.main.forget()
        self.ends.clear()
        if self._held is not None:
            self._held.close()
        self._tensors = self._held = None
        self._node_deps = ()
        self._current = None
        self.__dict__.pop("_keep", None)

    # One node

    def _begin(self, made: CallSignature, reads: Pieces, writes: Pieces, keep: object) -> OpenNode:
        """Begin a node: choose its lane, and let that lane wait.

        The lane waits for the nodes that the new node follows. Until the node ends, all other calls are inside it.
        """
        # If a finalizer makes this call while its thread is changing the books, the call is refused.
        if self._busy:
            raise in_the_middle()
        if self._nodes >= MOST_NODES:
            self.refused = (
                f"{made.name} would be node {self._nodes + 1:,} of a recording, which may have at most {MOST_NODES:,} nodes. "
                "Record the parts of the function one by one"
            )
            raise CaptureError(self.refused)
        self._busy = True
        try:
            if self.exact:
                found = self.main.new_work()
                if found is not None:
                    self._see_others(found, made.place)
                if self.memory.unwritten.starts:
                    self._check_written(made, reads, writes, keep)
            if self._nested_accesses:
                self._nested_accesses.clear()
            if self.memory.of_node or self.memory.reuse_queries:
                self.memory.begin_node()
            met, changed = self.memory.entries(reads), self.memory.entries(writes)
            lane, node = self._start(needs_of(met, changed), made)
            self.used.append((reads, writes))
            if self._held is not None:
                self._held.follow(lane.pointer, node.known)
                self._held.read(lane.pointer, lane.track, node.call, self._tensors.storages(keep))
            self._expected, self._inside, self._current, self._serial_reason = None, True, lane, ""
            # The call is noted only when its node has begun. If a node cannot begin, the comparison with the first run misses the
            # call, and refuses the recording even if the function caught the error.
            self.calls.append(made)
            return made, lane, node, reads, writes, met, changed
        finally:
            self._busy = False

    def _start(self, needs: Needs, made: CallSignature) -> tuple[Lane, Node]:
        """Choose a node's lane, and let the lane wait for ``needs``."""
        leased = self.leased
        after = leased.nodes(needs)
        # If the new node follows a single node, and that node is the last of its lane, the new node goes on the same lane.
        if len(after) == 1 and after[0].call == after[0].track.count:
            lane = leased.of[after[0].track]
        else:
            lane = leased.choose(after, self.main.deps)
            if lane.nodes and lane.nodes[-1] not in after:
                after.append(lane.nodes[-1])
            if len(after) > 1:
                after = direct(after)
        for each in after:
            # Of all nodes that the new node follows, only the nodes that it follows directly can still be leaves.
            self.main.leaves.pop(each, None)
        node = lane.add(after, len(self.steps))
        if len(after) == 1:
            deps, steps = after[0].ends, after[0].steps
        else:
            deps, steps = ends_of(after), steps_of(after)
        self._node_deps = deps = deps or self.main.floor
        # If user code got the lane's stream, it may have given the stream work since the last node. So the dependencies are set
        # again. No node follows such work, and `Schedule` refuses it.
        if self.exact and (lane.shown or deps != lane.ends):
            self._driver.set_dependencies(lane.pointer, deps)
        self.steps.append(Step(made.name, made.place, lane.number, steps or self.main.floor_steps))
        self.ends.append(())
        self._nodes += 1
        return lane, node

    def _check_written(self, made: CallSignature, reads: Pieces, writes: Pieces, keep: object) -> None:
        try:
            self.memory.unwritten.check(made.name, made.place, reads, writes, keep)
        except CaptureError as error:
            self.refused = str(error)
            raise
        self.memory.unwritten.wrote(writes)

    def _fail(self, opened: OpenNode) -> None:
        """End a node that raised an error."""
        _, lane, node, reads, writes, met, changed = opened
        try:
            self._serial_reason = "the call raised an error"
            if self._nested_accesses:
                self._use_nested(node, {*reads}, {*writes}, met, changed)
            self._end(lane, node, opened[0].place)
        except Exception:
            # The capture is invalid, so the node cannot be ended. The error that the node raised names the reason.
            self._inside = False

    def _finish(self, opened: OpenNode, written: Sequence[Piece | Token], result: object, *, alone: bool = False) -> None:
        """End a node, and note the memory that it used.

        ``written`` is memory that the node wrote beyond its declared writes. ``alone`` says that the node only made one launch,
        and ran no user code.
        """
        signature, lane, node, reads, writes, met, changed = opened
        memory, self._busy = self.memory, True
        try:
            made = [(start, stop, None) for start, stop in memory.of_node if stop > start] if memory.of_node else []
            # The users are looked up before `write_down`, because it removes them from the books.
            users = self._users_of(node, written) if written else []
            if made or written:
                changed += self.memory.entries([*made, *written])
                self.used[node.step] = reads, (*writes, *made, *written)
            if self._nested_accesses:
                self._use_nested(node, {*reads}, {*writes}, met, changed)
            write_down(lane.track, node.call, met, changed)
            if memory.reuse_queries:
                memory.forget_users((*reads, *writes, *made, *written))
            captured = self._end(lane, node, signature.place, users, alone=alone)
            # If the node gave the capture no work, no replay writes the memory that it allocated.
            for start, stop, _ in () if captured else made:
                memory.unwritten.add(start, stop, signature.place)
        finally:
            self._busy = False
        if self.refused:
            raise CaptureError(self.refused)
        if not captured:
            self._check_nothing(signature, reads, writes, result)

    def _use_nested(
        self, node: Node, reads: set[Piece | Token], writes: set[Piece | Token], met: list[Use], changed: list[Use]
    ) -> None:
        """Let the memory of calls inside a node count as the node's.

        If this memory was used by another node that the node does not follow, the recording is refused.
        """
        read = [piece for inner, _ in self._nested_accesses for piece in inner if piece not in reads and piece not in writes]
        written = [piece for _, inner in self._nested_accesses for piece in inner if piece not in writes]
        inner = self.memory.entries(read), self.memory.entries(written)
        for track, call in needs_of(*inner).items():
            if node.known.get(track, 0) < call:
                step, other = self.steps[node.step], self.steps[self.leased.nodes({track: call})[0].step]
                self.refused = (
                    f"{step.name} at {step.place} calls a function that uses memory of {other.name} at {other.place} without "
                    f"declaring the memory, so the order of the two calls is unknown. Declare the memory in {step.name}, by "
                    f"@handlepool.operation(mutates=..., reads=...)"
                )
        met += inner[0]
        changed += inner[1]

    def _users_of(self, node: Node, written: Iterable[Piece | Token]) -> list[Node]:
        """Return earlier nodes that followers of this node must also follow.

        These nodes used memory that this node wrote without declaring or allocating it, and this node does not follow them. From
        now on the books have only this node as the user of the memory.
        """
        needs = self.memory.users(written)
        return self.leased.nodes({track: call for track, call in needs.items() if node.known.get(track, 0) < call})

    def _end(self, lane: Lane, node: Node, place: str, users: Sequence[Node] = (), *, alone: bool = False) -> bool:
        """End a node; return whether the capture got any work from it.

        The main stream then waits for all leaves. A later call that follows the node also follows the nodes ``users``.
        """
        self._inside = False
        # With ``users`` or a serial reason, the node follows more nodes now than when it began.
        follows_more = bool(users or self._serial_reason)
        if follows_more:
            lane.follow(users)
        # If the driver cannot choose dependencies, it cannot tell either whether the capture got work. So work is assumed.
        if not self.exact:
            self.main.end_node(node, place, None, follows_more=follows_more)
            return True
        ends = self._ask(lane.pointer) or ()
        # A single launch gives the main stream no work, so the driver need not be asked for the main stream's dependencies.
        work = None if alone or lane.slot is self.main.slot else self.main.new_work()
        if work is not None:
            self._serial_reason = self._serial_reason or GAVE_TO_MAIN
        more = work or ()
        captured = ends != self._node_deps and {*ends} != {*self._node_deps}
        if captured and more:
            self.refused = (
                f"{self.steps[node.step].name} at {place} gave work both to the current stream and to the stream that "
                f"is recorded, and the order of this work is unknown. Inside the call, get the current stream "
                f"again and launch all work on it, because a call does not run on the stream that was current before"
            )
        self.ends[node.step] = ends = lane.end(ends, more, users)
        self.main.end_node(node, place, ends, follows_more=follows_more)
        if self._serial_reason:
            self.steps[node.step] = self.steps[node.step]._replace(why=self._serial_reason)
            self._start_anew(tuple(leaf.step for leaf in self.main.leaves), self.main.deps)
            return True
        return captured

    def _check_nothing(self, made: CallSignature, reads: Pieces, writes: Pieces, result: object) -> None:
        """Refuse a call that wrote memory but gave the capture no work.

        The call has written the memory now, and no replay would write it.
        """
        if writes_outside(self._driver, reads, writes, result):
            self.refused = (
                f"{made.name} at {made.place} gave no work to the stream that is recorded, so a replay would skip its "
                f"writes. Call {made.name} before or after the recording, or let its library launch on the current stream"
            )
            raise CaptureError(self.refused)

    # Untracked work

    def _see_others(self, found: tuple[Any, ...], place: str) -> None:
        """Note untracked work as steps, and begin new books after it.

        ``found`` are the CUDA nodes that the main stream waits for now. ``place`` is the place of the next node.
        """
        # Untracked work may have written any block, so no block counts as unwritten any more.
        self.memory.unwritten.clear()
        after = tuple(sorted(leaf.step for leaf in self.main.leaves)) or self.main.floor_steps
        for name, why, where in self.main.other_work().steps(self.main.last_place, place):
            self.steps.append(Step(name, where, None, after, why))
            self.ends.append(())
            self.used.append(((), ()))
            after = (len(self.steps) - 1,)
        self.ends[-1] = found
        self._start_anew(after, found)

    def _start_anew(self, steps: tuple[int, ...], deps: tuple[Any, ...]) -> None:
        """Let all later nodes follow ``steps``, whose last CUDA nodes are ``deps``."""
        self.main.begin_anew(steps, deps)
        self.memory.begin_anew()
        if self._held is not None:
            self._held.clear()
        self.leased.begin_anew()

    def _note_shared(self, name: str) -> None:
        """Note the use of ``name``, a state that streams share.

        All other steps must run before or after the use.
        """
        lane = self._current
        if thread.recording is None or thread.recording.lanes is not self:
            return
        if not self._inside or lane is None:
            self.note_untracked(name)
        elif not self._serial_reason:
            self._serial_reason = f"the call uses {name}, a state that all streams share"
            # The node follows all leaves from now on, so the rest of its work runs after everything recorded so far.
            if self.exact:
                behind = dict.fromkeys((*(self._ask(lane.pointer) or ()), *self.main.deps))
                self._driver.set_dependencies(lane.pointer, tuple(behind))
                lane.follow(self.main.leaves)
                step = self.steps[-1]
                self.steps[-1] = step._replace(after=tuple(sorted({*step.after, *(leaf.step for leaf in self.main.leaves)})))

    def _note_plain(self, name: str) -> None:
        """Note untracked work that the driver detected.

        Work of another thread is no part of the recording. Work of a branch belongs to its fork, which `in_order` notes.
        """
        if thread.region is None and thread.recording is not None and thread.recording.lanes is self:
            self.note_untracked(name)
