"""Lanes: the calls of a sequential function, recorded as nodes that wait for what their data asks for alone (guarantee 17).

A lane is a leased side slot whose stream takes part in the capture. A node goes on one lane, which is first put behind exactly
the nodes that it follows by its data, and behind the lane's last: what other libraries keep by stream, and the slot's scratch,
is used by one node at a time. The books are a region's, with a track for each lane.

Outside of nodes the main stream is behind all leaves. So whatever is launched there unseen stands after all before it; that it
was is seen at the next node, which starts new books behind it.

There are as many lanes as the data allows: `handlepool.recording.schedule` brings them down to the number that was asked for.

Memory that was freed while recording is given to a node alone that comes after all who used it: no edge is added for that. Where
the driver cannot do so, all is kept to the end of the recording. What was allocated for a stream of the function's own is for
that stream alone, as outside of recordings: the books do not know who used it when.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from handlepool._util.cleanup import do_all
from handlepool._util.frames import place_of_call
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import RecordingMemory
from handlepool.errors import CaptureError
from handlepool.order.books import in_the_middle
from handlepool.order.plain_calls import piece_of
from handlepool.order.track import NOTHING, Needs, Track
from handlepool.order.uses import Use, Uses, needs_of, write_down
from handlepool.pool.context import thread
from handlepool.pool.internals import PoolInternals
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.slot import Slot, bind_to_thread
from handlepool.recording.explain import Step
from handlepool.recording.held import Held
from handlepool.recording.other_work import PLAIN, OtherWork
from handlepool.recording.rehearsal import Made
from handlepool.recording.unwritten import Unwritten
from handlepool.tensors.layout import Piece, Token, share

T = TypeVar("T")
Pieces = Sequence[Piece | Token]

LEFT_FREE = 4
"""Side slots that a recording does not lease for more lanes than were asked for."""
MOST_NODES = 20_000
"""Of one recording."""


class _Node:
    """A call as the books know it.

    Attributes
    ----------
    track, call : Track, int
        Its lane's, and its place there.
    known : dict
        By track, the last call that it comes after, itself included.
    ends : tuple
        The nodes of the capture that whatever follows it waits for.
    step : int
        Its place among all steps.
    steps : tuple of int
        The steps that whatever follows it waits for.
    """

    __slots__ = ("call", "ends", "known", "step", "steps", "track")

    def __init__(self, track: Track, step: int) -> None:
        self.track = track
        self.call = track.count
        self.known: Needs = NOTHING
        self.ends: tuple[Any, ...] = ()
        self.step = step
        self.steps: tuple[int, ...] = (step,)


class _Lane:
    """A slot that nodes are recorded on, with what it was given since the last work that was no node.

    Attributes
    ----------
    ends : tuple
        The nodes of the capture that its stream was behind when it was last looked at.
    shown : bool
        Whether code of the user's has had its stream, and may use that again.
    """

    def __init__(self, slot: Slot, number: int, ends: tuple[Any, ...], *, shown: bool = False) -> None:
        self.slot = slot
        self.pointer = slot.pointer
        self.number = number
        self.ends = ends
        self.shown = shown
        self.begin()

    def begin(self) -> None:
        """Start anew, behind all that was before."""
        self.track = Track(self.pointer)
        self.nodes: list[_Node] = []


_Open = tuple[Made, _Lane, _Node, Pieces, Pieces, list[Use], list[Use]]
"""A node that is being recorded: what it reads, what it writes, and the entries of the books for both."""


class Lanes:
    """The nodes of one recording, and the lanes that it has. Made and used with its device current, by its thread.

    Parameters
    ----------
    pool : PoolInternals
    device : int
    limit : int
        How many of the nodes will run at once. For one, all are recorded one after the other, and else on as many lanes as there
        may be.
    leased : list of Slot
        Gets those that are leased.
    keep : callable
        Called with each plan that is launched as a node.

    Attributes
    ----------
    steps : list of Step
    calls : list of Made
        Those that became nodes.
    ends : list of tuple of node
        For each step, what whatever follows it waits for; nothing for other work that is told of as several steps, but for the
        last of these.
    read : list of pieces
        What plans read that were launched as nodes.
    used : list of (pieces, pieces)
        For each step, the memory that it is known to read and write.
    own : set of (int, int)
        Where blocks of memory begin and end that were allocated.
    wanted, got : int
        Lanes.
    exact : bool
        Whether the driver can put a stream behind nodes by choice.
    refused : str
        What a call was refused for, also where the function caught that: without the call a program would be another one.
    """

    def __init__(self, pool: PoolInternals, device: int, limit: int, leased: list[Slot], keep: Callable[[object], None]) -> None:
        self.limit = limit
        self.steps: list[Step] = []
        self.ends: list[tuple[Any, ...]] = []
        self.read: list[Pieces] = []
        self.used: list[tuple[Pieces, Pieces]] = []
        self.own: set[tuple[int, int]] = set()
        self.calls: list[Made] = []
        self.wanted = self.got = 0
        self.exact = True
        self.refused = ""
        self._width = 1 if limit == 1 else MOST_SIDE_SLOTS
        self._pool = pool
        self._keep = keep
        self._driver = pool.driver
        self._ask = pool.driver.dependencies
        self._device = device
        self._sides = pool.device(device).sides
        self._leased = leased
        self._lanes: list[_Lane] = []
        self._pointers: set[object] = set()  # of the main stream and the lanes
        self._of: dict[Track, _Lane] = {}
        self._uses = Uses()
        self._leaves: dict[_Node, None] = {}  # an ordered set
        self._base: tuple[Any, ...] = ()  # what every node comes after
        self._base_step: tuple[int, ...] = ()
        self._put: tuple[Any, ...] = ()  # what the main stream was left behind
        self._behind: tuple[Any, ...] = ()  # and what the last node was put behind
        self._new: list[tuple[int, int]] = []  # memory that was allocated inside the node
        self._blocks: list[object] = []  # memory that is kept
        self._keeps = False
        self._free: dict[int, tuple[int, Needs]] = {}  # of freed memory, by where it begins, its end, and its last users
        self._called: list[tuple[Pieces, Pieces]] = []  # what calls inside the node read and write
        self._asked: list[int] = []  # of these, those that were looked up since the last node began
        self._unwritten = Unwritten()
        self._expected: Callable[[], Pieces] | None = None  # gives what the next node reads
        self._expected_known: Needs | None = None
        self._others = OtherWork()
        self._last_place = "the beginning"
        self._nodes = 0
        self._inside = self._busy = False
        self._why = ""  # the node that is recorded is ordered as if it were none
        self._current: _Lane | None = None
        self._tensors: Any = None
        self._held: Held | None = None

    def begin(self, slot: Slot, memory: RecordingMemory, tensors: Any = None) -> Callable[[], None]:
        """Record from now on what is given to a capturing slot, which is the main stream's; what is returned ends the watch.

        ``tensors`` is where torch's come from meanwhile, if it is in use.
        """
        self._memory, self._tensors = memory, tensors
        if tensors is not None and self.limit > 1:
            self._held = Held(tensors)
        self._main = slot
        self._pointers.add(slot.pointer)
        base = self._driver.dependencies(slot.pointer)
        self.exact = base is not None
        self._base = self._put = base or ()
        self._keeps = self.exact and not memory.recycle(self.may_have, self._pointers.__contains__)
        watches = [self._driver.watch_shared(self._shared, check=False), self._driver.watch_plain(self._plain)]
        return partial(do_all, [*watches, partial(memory.recycle, None)])

    def takes(self, pool: object, pointer: int) -> bool:
        """Whether a call of a pool on a stream becomes a node: the outermost, on the main stream."""
        return not self._inside and pool is self._pool and pointer == self._main.pointer

    def other(self, what: str, why: str = PLAIN) -> None:
        """Be told of work that is no node."""
        if not self._inside:
            self._others.add(what, why)

    def in_order(self, what: str, pointer: int, fork: object) -> None:
        """Be told of work on a stream that is recorded in the order of streams and forks; see `OtherWork`."""
        if not self._inside:
            self._others.in_order(what, pointer == self._main.pointer, fork)

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Be told of a fork that has fewer states than it wanted."""
        self._others.lack(fork, states, wanted)

    def allocated(self, block: object) -> None:
        """Be told of memory that was allocated."""
        if self._keeps:
            self._blocks.append(block)
        piece = self._driver.block_range(block)
        self.own.add(piece)
        self._free.pop(piece[0], None)
        if self._inside:
            self._new.append(piece)
            self._unwritten.forget(*piece)  # the node writes it, as far as is known
        elif self._expected is not None:
            self._unwritten.forget(*piece)  # an output of the node to come: nobody has it where that does not begin
        else:
            place = place_of_call()
            self._others.allocated(place)
            self._unwritten.add(*piece, place)

    def accessed(self, reads: Pieces, writes: Pieces) -> None:
        """Be told what a call reads and writes that is no node, or is inside one."""
        if self._inside:
            self._called.append((reads, writes))

    def made(self, arrays: object) -> None:
        """Be told of new arrays that a node has made."""

    def expect(self, reads: Callable[[], Pieces] | None) -> None:
        """Be told what gives the memory that the next node reads, before its outputs are allocated, and nothing afterwards."""
        self._expected, self._expected_known = reads, None

    def may_have(self, start: int, stop: int) -> bool:
        """Whether what is allocated now may be in memory that was freed: all who used that come before whoever writes there.

        Outside of nodes that is a guess, and the books order who comes there as anywhere.
        """
        if self._width == 1:  # all run one after the other
            return True
        if self._busy:  # a finaliser allocates that found its thread in the middle of the books
            return False
        self._busy = True
        try:
            return self._is_free(start, stop)
        finally:
            self._busy = False

    def _is_free(self, start: int, stop: int) -> bool:
        if start in self._free:
            needs = self._free[start][1]
        else:
            needs = needs_of((), self._uses.meeting((start, stop, None)))
            self._free[start] = stop, needs
            self._asked.append(start)
        if not needs:
            return True
        if self._inside:
            known = self._lane_of_node().nodes[-1].known
        elif self._expected is None:
            return False
        else:
            if self._expected_known is None:
                self._expected_known = self._known_after(self._expected())
            known = self._expected_known
        return all(known.get(track, 0) >= call for track, call in needs.items())

    def _known_after(self, reads: Pieces) -> Needs:
        """Return what a node that reads something comes after."""
        known: Needs = {}
        for track, call in needs_of(map(self._uses.piece, reads), ()).items():
            for each, last in self._of[track].nodes[call - 1].known.items():
                if known.get(each, 0) < last:
                    known[each] = last
        return known

    def _forget_asked(self, used: Iterable[Piece | Token]) -> None:
        """Forget the last users of freed memory that the node used itself, which looked it up before that was written down."""
        for start in self._asked:
            if start in self._free:
                stop = self._free[start][0]
                if any(not isinstance(piece, Token) and piece[0] < stop and start < piece[1] for piece in used):
                    del self._free[start]

    def _lane_of_node(self) -> _Lane:
        assert self._current is not None
        return self._current

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
    ) -> T:
        """Record a call as a node; its value.

        Parameters
        ----------
        name : str
        reads, writes : sequence of Piece or Token
            What it reads, and what it overwrites.
        keep : object
            Whose memory that is.
        call : callable
            Given the slot to launch on.
        new : callable, optional
            Returns, of the value, what it wrote besides. What the call allocated is known.
        what : tuple
            See `Made`.

        Raises
        ------
        CaptureError
            For more nodes than a recording may have, and for a call whose work the capture did not get, or in no known order.
        OwnershipError
            In a finaliser that found its thread in the middle of the books.
        """
        opened = self._begin(Made.of(name, writes, what), reads, writes, keep)
        opened[1].shown = True
        try:
            result = call(opened[1].slot)
            written = [] if new is None else [*new(result)]
        except BaseException:
            self._fail(opened)
            raise
        self._finish(opened, written, result)
        return result

    def hit(self, attempt: Callable[..., Any], arrays: tuple[Any, ...], out: Any) -> Any:
        """Record what a shortcut launches as a node: it asks for the slot once it knows its operands; what it returns."""
        opened: _Open | None = None

        def begin(operands: object, launch: Any, addresses: Sequence[int], *_: object) -> Slot:
            nonlocal opened
            plan, known = launch.plan, launch.operands
            pieces, inputs = known.pieces(addresses), known.inputs
            reads = pieces[:inputs]
            opened = self._begin(Made.at_once(launch), reads, pieces[inputs:], operands)
            self._keep(plan)
            self.read.append(reads)
            return opened[1].slot

        try:
            result = attempt(begin, arrays, out)
        except BaseException:
            if opened is not None:
                self._fail(opened)
            raise
        if opened is not None:
            self._finish(opened, (), result, alone=True)
        return result

    def _begin(self, made: Made, reads: Pieces, writes: Pieces, keep: object) -> _Open:
        """Begin a node: choose its lane, behind what it follows, and let the calls to come be inside of it."""
        if self._busy:
            raise in_the_middle()
        if self._nodes >= MOST_NODES:
            raise self._refuse(f"{made.name} would be node {self._nodes + 1:,} of a recording, which may have {MOST_NODES:,}")
        self._busy = True
        try:
            if self.exact:
                if (found := self._dependencies(self._main.pointer)) != self._put:
                    self._see_others(found, made.place)
                if self._unwritten:
                    self._check_written(made, reads, writes, keep)
            self._others.clear()
            if self._called or self._new or self._asked:
                for each in (self._called, self._new, self._asked):
                    each.clear()
            met, changed = self._uses.pieces(reads), self._uses.pieces(writes)
            lane, node = self._start(needs_of(met, changed), made, (reads, writes))
            if self._held is not None:
                self._hold(lane, node, keep)
            self._expected, self._inside, self._current, self._why = None, True, lane, ""
            self.calls.append(made)  # now: one that could not be begun is missed at the end, also where the function caught that
            return made, lane, node, reads, writes, met, changed
        finally:
            self._busy = False

    def _check_written(self, made: Made, reads: Pieces, writes: Pieces, keep: object) -> None:
        try:
            self._unwritten.check(made.name, made.place, reads, writes, keep)
        except CaptureError as error:
            self.refused = str(error)
            raise
        self._unwritten.wrote(writes)

    def _fail(self, opened: _Open) -> None:
        """End a node that raised an error."""
        _, lane, node, reads, writes, met, changed = opened
        try:
            self._why = "it raised an error"
            if self._called:
                self._take_in_called(node, {*reads}, {*writes}, met, changed)
            self._end(lane, node, opened[0].place)
        except Exception:  # the capture was invalidated, and the first error says by what
            self._inside = False

    def _finish(self, opened: _Open, written: Sequence[Piece | Token], result: object, *, alone: bool = False) -> None:
        """End a node, and write down what it used.

        ``written`` is what it wrote besides what it was begun with; with ``alone`` it launched a plan and ran no other code.
        """
        made_by, lane, node, reads, writes, met, changed = opened
        place = made_by.place
        self._busy = True
        try:
            made = [(start, stop, None) for start, stop in self._new if stop > start] if self._new else []
            users = self._users_of(node, written) if written else []
            if made or written:
                changed += self._uses.pieces([*made, *written])
                self.used[node.step] = reads, (*writes, *made, *written)
            if self._called:
                self._take_in_called(node, {*reads}, {*writes}, met, changed)
            write_down(lane.track, node.call, met, changed)
            if self._asked:
                self._forget_asked((*reads, *writes, *made, *written))
            got = self._end(lane, node, place, users, alone=alone)
            if not got:  # what it allocated is still as it was
                for start, stop, _ in made:
                    self._unwritten.add(start, stop, place)
        finally:
            self._busy = False
        if self.refused:
            raise CaptureError(self.refused)
        if not got:
            self._check_nothing(made_by.name, place, reads, writes, result)

    def _take_in_called(
        self, node: _Node, reads: set[Piece | Token], writes: set[Piece | Token], met: list[Use], changed: list[Use]
    ) -> None:
        """Have a node use what calls inside it do, also where it does not say so itself; refused where it came after less."""
        read = [piece for inner, _ in self._called for piece in inner if piece not in reads and piece not in writes]
        written = [piece for _, inner in self._called for piece in inner if piece not in writes]
        inner = self._uses.pieces(read), self._uses.pieces(written)
        for track, call in needs_of(*inner).items():
            if node.known.get(track, 0) < call:
                step, other = self.steps[node.step], self.steps[self._of[track].nodes[call - 1].step]
                self.refused = (
                    f"{step.name} at {step.place} calls what uses memory that {other.name} at {other.place} uses, too, and does "
                    f"not say so itself, so that nothing orders the two: declare it, as with @handlepool.operation(mutates=..., "
                    f"reads=...)"
                )
        met += inner[0]
        changed += inner[1]

    def _users_of(self, node: _Node, written: Iterable[Piece | Token]) -> list[_Node]:
        """Return who used memory before that a call gave back and did not allocate, but for those that the call comes after.

        The books forget them for the call, which was not ordered for that: whoever follows it has to follow them, too.
        """
        others = [piece for piece in written if isinstance(piece, Token) or not self._is_new(piece)]
        needs = needs_of((), [use for piece in others for use in self._uses.meeting(piece)])
        return [self._of[track].nodes[call - 1] for track, call in needs.items() if node.known.get(track, 0) < call]

    def _is_new(self, piece: Piece) -> bool:
        return any(start <= piece[0] and piece[1] <= stop for start, stop in self._new)

    def join(self, name: str, outputs: object) -> None:
        """Let the main stream come after all lanes, as a capture's end asks for; ``outputs`` are the function's.

        Raises
        ------
        CaptureError
            For an output that nothing writes.
        """
        if not self.exact:
            return
        driver, pointer = self._driver, self._main.pointer
        self._see_others(self._dependencies(pointer), "the end")
        for array in leaves(outputs):
            piece = piece_of(driver, array)
            if piece is not None:
                self._unwritten.check_returned(name, array, piece)
        for lane in self._lanes:
            if lane.slot is self._main:
                continue
            driver.set_dependencies(lane.pointer, self._put)  # adds nothing to what the main stream is behind
            driver.record_event(lane.slot.end_event, lane.pointer)
            driver.wait_event(pointer, lane.slot.end_event)

    def forget(self) -> None:
        """Let go of what was kept for the recording."""
        self._uses.close()
        for each in (self._lanes, self._of, self._leaves, self._blocks, self.ends):
            each.clear()
        if self._held is not None:
            self._held.close()
        self._tensors = self._held = None
        self._base = self._put = self._behind = ()
        self._current = None
        for name in ("_main", "_memory", "_keep"):
            self.__dict__.pop(name, None)

    # One node

    def _start(self, needs: Needs, made: Made, used: tuple[Pieces, Pieces]) -> tuple[_Lane, _Node]:
        """Choose a lane, and put it behind what its next node follows."""
        of = self._of
        direct = [of[track].nodes[call - 1] for track, call in needs.items()]
        if len(direct) == 1 and direct[0].call == direct[0].track.count:  # the last of its lane
            lane = of[direct[0].track]
        else:
            lane = self._choose(direct)
            if lane.nodes and lane.nodes[-1] not in direct:
                direct.append(lane.nodes[-1])
            if len(direct) > 1:
                direct = _direct(direct)
        track, leaves = lane.track, self._leaves
        for each in direct:
            if each.known is not track.known:
                track.learn(each.known)
            leaves.pop(each, None)  # of what the node comes after, these alone can be leaves
        track.count = call = track.count + 1
        node = _Node(track, len(self.steps))
        node.known = track.known = {**track.known, track: call}
        self._behind = after = _ends(direct) or self._base
        # User code that has had a lane may have given it something since. No node follows that, and `Schedule` refuses it.
        if self.exact and (lane.shown or after != lane.ends):
            self._driver.set_dependencies(lane.pointer, after)
        self.steps.append(Step(made.name, made.place, lane.number, _steps(direct) or self._base_step))
        self._tell_step(used)
        lane.nodes.append(node)
        self._nodes += 1
        return lane, node

    def _hold(self, lane: _Lane, node: _Node, given: object) -> None:
        """Hold the tensors that a node is given; but not those in our own memory, which goes to those alone who may have it."""
        pointer, begins = lane.pointer, self._memory.begins
        found = [(start, each) for start, each in self._tensors.storages(given) if not begins(start)]
        assert self._held is not None
        self._held.follow(pointer, node.known)
        self._held.read(pointer, lane.track, node.call, found)

    def _choose(self, producers: Sequence[_Node]) -> _Lane:
        """Return a lane for a node: that of a producer, one that is free for it, a new one, or the one idle for longest."""
        last: _Node | None = None
        for each in producers:
            if self._of[each.track].nodes[-1] is each and (last is None or each.step > last.step):
                last = each
        if last is not None:
            return self._of[last.track]
        for lane in self._lanes:
            track = lane.track
            if not track.count:
                return lane
            for each in producers:
                if each.known.get(track, 0) >= track.count:
                    return lane
        return self._new_lane() or min(self._lanes, key=_last_step)

    def _new_lane(self) -> _Lane | None:
        """Lease one lane more; the main stream where there is none at all, and None where others have to do."""
        lanes = self._lanes
        if len(lanes) >= (self._width if self.exact else 1):
            return None
        sides = self._sides
        # What was asked for is taken wherever there is one; beyond that others get some: forks in here, and other recordings.
        free = self.exact and self.wanted <= len(lanes) and (len(lanes) < self.limit or sides.spare > LEFT_FREE)
        slot = sides.lease() if free else None
        self.wanted = max(self.wanted, len(lanes) + 1)
        if slot is None:
            if lanes:
                return None
            slot = self._main
        else:
            self._leased.append(slot)
            bind_to_thread(self._pool.sound(slot))
            self._driver.record_event(slot.start_event, self._main.pointer)
            self._driver.wait_event(slot.pointer, slot.start_event)
        lane = _Lane(slot, len(lanes), self._put, shown=slot is self._main)
        lanes.append(lane)
        self.got = len(lanes)
        self._of[lane.track] = lane
        self._pointers.add(slot.pointer)
        return lane

    def _end(self, lane: _Lane, node: _Node, place: str, users: Sequence[_Node] = (), *, alone: bool = False) -> bool:
        """Take a node in that was captured, and put the main stream behind all leaves again; whether anything was captured.

        Whatever follows the node follows its ``users``, too.
        """
        self._inside = False
        self._last_place = place
        for each in users:
            lane.track.learn(each.known)
        known = node.known = lane.track.known
        if users or self._why:  # it comes after more than it was begun behind
            self._leaves = {leaf: None for leaf in self._leaves if known.get(leaf.track, 0) < leaf.call}
        self._leaves[node] = None
        if not self.exact:
            return True  # nobody can tell
        node.ends = lane.ends = self._dependencies(lane.pointer)
        if not (alone or lane.slot is self._main) and not _same(found := self._dependencies(self._main.pointer), self._put):
            if not _same(node.ends, self._behind):
                self.refused = (
                    f"{self.steps[node.step].name} at {place} gave work both to the current stream and to the one that is "
                    f"recorded, which were one when it was called for real, and have no order here: let it launch on the stream "
                    f"that is current inside it"
                )
            node.ends = tuple(dict.fromkeys(node.ends + found))  # which is after all before it
            self._why = self._why or "it gave work to the stream that is recorded, and not to its own lane alone"
        captured = not _same(node.ends, self._behind)
        if users:
            node.ends = tuple(dict.fromkeys([*node.ends, *_ends(users)]))
            node.steps = tuple(sorted({node.step, *(each.step for each in users)}))
        self.ends[node.step] = node.ends
        self._put = _ends(self._leaves) or self._base
        self._driver.set_dependencies(self._main.pointer, self._put)
        if self._why:
            self.steps[node.step] = self.steps[node.step]._replace(why=self._why)
            self._start_anew(tuple(leaf.step for leaf in self._leaves))
        return bool(self._why) or captured

    def _check_nothing(self, name: str, place: str, reads: Pieces, writes: Pieces, result: object) -> None:
        """Refuse a call that gave the capture nothing and wrote something all the same: that ran now, and at no replay."""
        known = [memory for memory in (*reads, *writes) if not isinstance(memory, Token)]
        wrote = any(not isinstance(memory, Token) for memory in writes)
        for value in leaves(result):
            if not wrote and not isinstance(value, self._driver.array_types[0]):
                memory = piece_of(self._driver, value)
                wrote = memory is not None and memory[0] < memory[1] and not any(share(memory, each) for each in known)
        if wrote:
            raise self._refuse(
                f"{name} at {place} gave no work to the stream that is recorded, so that replays would go without what it wrote. "
                f"It belongs before the recording, or after; or its library has to launch on the current stream"
            )

    def _refuse(self, why: str) -> CaptureError:
        self.refused = why
        return CaptureError(why)

    # What is no node

    def _dependencies(self, pointer: int) -> tuple[Any, ...]:
        return self._ask(pointer) or ()

    def _see_others(self, found: tuple[Any, ...], place: str) -> None:
        """Start new books where the main stream, which is behind these nodes, was given something since the last node."""
        if _same(found, self._put):
            return
        self._put = found
        self._unwritten.clear()  # nobody knows what it wrote
        after = tuple(sorted(leaf.step for leaf in self._leaves)) or self._base_step
        for name, why, where in self._others.steps(self._last_place, place):
            self.steps.append(Step(name, where, None, after, why))
            self._tell_step()
            after = (len(self.steps) - 1,)
        self.ends[-1] = found
        self._start_anew(after)

    def _tell_step(self, used: tuple[Pieces, Pieces] = ((), ())) -> None:
        self.ends.append(())
        self.used.append(used)

    def _start_anew(self, steps: tuple[int, ...]) -> None:
        """Have all that follows come after what the main stream is behind now."""
        self._base, self._base_step = self._put, steps
        self._uses.close()
        self._uses = Uses()
        self._leaves, self._of = {}, {}
        self._free.clear()
        if self._held is not None:
            self._held.clear()
        for lane in self._lanes:
            lane.begin()
            self._of[lane.track] = lane

    def _shared(self, name: str) -> None:
        """Be told that something is used which the array library keeps for all streams: nothing may run beside it."""
        lane = self._current
        if thread.recording is None or thread.recording.lanes is not self:
            return
        if not self._inside or lane is None:
            self.other(name)
        elif not self._why:
            self._why = f"it uses {name}, which streams share"
            if self.exact:
                behind = dict.fromkeys((*self._dependencies(lane.pointer), *self._put))
                self._driver.set_dependencies(lane.pointer, tuple(behind))
                for leaf in self._leaves:
                    lane.track.learn(leaf.known)
                lane.nodes[-1].known = lane.track.known
                step = self.steps[-1]
                self.steps[-1] = step._replace(after=tuple(sorted({*step.after, *(leaf.step for leaf in self._leaves)})))

    def _plain(self, name: str) -> None:
        """Be told of work by the driver, which may be another thread's, or a branch's."""
        if thread.region is None and thread.recording is not None and thread.recording.lanes is self:
            self.other(name)


def _direct(producers: Sequence[_Node]) -> list[_Node]:
    """Return those that no other one of them comes after: what it comes after is waited for with that."""
    direct = []
    for each in producers:
        track, call = each.track, each.call
        for other in producers:
            if other is not each and other.known.get(track, 0) >= call:
                break
        else:
            direct.append(each)
    return direct


def _ends(nodes: Collection[_Node]) -> tuple[Any, ...]:
    """Return what whoever follows some nodes waits for."""
    ends = [each.ends for each in nodes]
    return ends[0] if len(ends) == 1 else tuple(dict.fromkeys(chain.from_iterable(ends)))


def _steps(nodes: Sequence[_Node]) -> tuple[int, ...]:
    """Return the steps that whoever follows some nodes waits for."""
    return nodes[0].steps if len(nodes) == 1 else tuple(sorted([step for each in nodes for step in each.steps]))


def _last_step(lane: _Lane) -> int:
    return lane.nodes[-1].step


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return some == others or (len(some) == len(others) and {*some} == {*others})  # none is twice in one of them
