"""Lease the programs of one key to calls, as forks lease slots.

An instance is a program with its own input and output arrays, into and from which calls copy. A call leases an instance while it
enqueues its work, under the program's lock. No user code runs under that lock. Each use of the program ends with a record of the
program's event, and the next use on another stream waits for that event. So calls overlap on the device if they use different
streams and different instances. If there are too few instances, calls wait for each other on the device, with the same results.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from handlepool.drivers.protocol import Driver
from handlepool.order.stream_order import integration
from handlepool.pool.context import ThreadToken, thread
from handlepool.recording.capture import Recording
from handlepool.recording.keys import elements_of
from handlepool.recording.outputs import Results
from handlepool.recording.prepared import builder, copies_of
from handlepool.recording.program import Program
from handlepool.recording.returned import Returned
from handlepool.recording.sharing import ALIGNED, groups
from handlepool.recording.state_kinds import is_tensor
from handlepool.recording.tuning import LanesTuning
from handlepool.recording.update import Copy, copy_all, piece_of
from handlepool.tensors.layout import Token, share

submitted = count()
"""The numbers of calls, in order of submission."""
RECENT = 64
"""The number of calls after which an instance's stream counts as unused."""


class Instance:
    """A program of a key, with its own input and output arrays.

    Parameters
    ----------
    program : Program
        The program, which was made with ``lent``.
    inputs : list
        The instance's own arrays and tensors, into which a call copies its arguments.
    outputs
        The value that the function returned under capture.
    returned : Returned
        The arrays in ``outputs``, sorted by their memory.
    written : sequence of int
        Places of the inputs that a call copies back into its arguments, because the function may write to them.
    reused : bool
        Whether calls return the program's own outputs.

    Attributes
    ----------
    stream : Stream
        The stream of the instance's last use. Before the first use, the stream that was current at the capture.
    number : int
        The number of the instance's last call, in order of submission.
    away : bool
        Whether no call may lease the instance, because it is being tuned.
    inputs : list
        As the parameter.
    outputs
        As the parameter.
    writes : bool
        Whether a call copies inputs back into its arguments.
    run : callable or None
        Enqueues a prepared call. None if a call cannot be prepared, because tensors and arrays are mixed.
    single : bool
        Whether the value of a call is a single new array.
    direct : bool
        Whether a prepared call may run on a stream that is not current.
    """

    __slots__ = (
        "_build",
        "_driver",
        "_elements",
        "_keeper",
        "_lock",
        "_own",
        "_reused",
        "_written",
        "away",
        "direct",
        "inputs",
        "number",
        "outputs",
        "program",
        "run",
        "single",
        "stream",
        "writes",
    )

    def __init__(
        self,
        driver: Driver,
        program: Program,
        inputs: list[Any],
        outputs: object,
        returned: Returned,
        written: Sequence[int],
        *,
        reused: bool,
    ) -> None:
        self._driver = driver
        self.program = program
        self.stream: Any = driver.current_stream()
        self.number = next(submitted)
        self.away = False
        self.writes = bool(written)
        # The thread and the stream for which the outputs hold a result. It is only used if outputs are reused.
        self._keeper: tuple[ThreadToken, Any] | None = None
        # The lock makes `claim` atomic, so that only one of two threads succeeds. No call of the program is made under this lock.
        self._lock = threading.RLock()
        self.inputs, self.outputs = inputs, outputs
        self._own, self._written, self._reused = returned.own, written, reused
        self._build = builder(outputs, returned.places)
        self._elements = elements_of(driver, inputs)
        self.single = not reused and len(returned.own) == 1 and outputs is returned.own[0]
        self.run: Callable[..., Any] | None = None
        self.direct = False
        arrays, taken = [*inputs, *returned.own], [] if reused else returned.own
        if inputs and driver.name == "cuda" and all(map(is_tensor, arrays)):
            self.run = integration().prepared(inputs, taken, written, driver.relaxed)
        elif not any(map(is_tensor, arrays)):
            copies = copies_of(inputs, taken, written)
            self.run, self.direct = driver.prepared(copies), all([*map(all, copies.runs())])

    def claimable(self, stream: object) -> bool:
        """Return whether this thread and stream may use the outputs.

        The outputs are not free while they hold the result of another live thread, or of another stream of this thread.
        """
        # The attribute is read only once, because another thread may replace it between two reads.
        keeper = self._keeper
        return keeper is None or keeper[0].over or (keeper[0] is thread.token and keeper[1] == stream)

    def claim(self, stream: object) -> bool:
        """Reserve the outputs for this thread and a stream, if free.

        Return whether the outputs are reserved now.
        """
        with self._lock:
            if not self.claimable(stream):
                return False
            self._keeper = thread.token, stream
            return True

    def close(self) -> None:
        """Close the program after its last work; let go of the stream."""
        try:
            self.program.close()
        finally:
            self.stream = None

    def replay(self, stream: object) -> None:
        """Launch the program on a stream, without any copies.

        The caller copies to the inputs before this call, and from the outputs after it.
        """
        self.number, self.stream = next(submitted), stream
        self.program._turn(_launched, (), stream)  # noqa: SLF001 - as in `call`

    def move(self, stream: object) -> None:
        """Prefer this instance for calls on ``stream`` from now on."""
        self.number, self.stream = next(submitted), stream

    def tune(self, lanes: Iterable[int], goal: str, seconds: float) -> LanesTuning:
        """Choose the best number of lanes, as `Program.tune` does.

        No call can lease the instance while it is being tuned.
        """
        self.away = True
        try:
            return self.program.tune(lanes, goal=goal, seconds=seconds)
        finally:
            self.away = False

    def call(self, arrays: list[Any], stream: object, out: object) -> Any:
        """Enqueue a call on the current stream, and return its value."""
        self.number, self.stream = next(submitted), stream
        program = self.program
        if self.run is not None and out is None:
            return self.built(program._turn(self.run, arrays, stream), arrays)  # noqa: SLF001 - a prepared call of another module
        taken = self._own if out is None else self.outputs
        if self._reused and out is None:
            taken = []
        results = Results(self._driver, repr(program), program.device, taken, out)
        made = program._turn(partial(self._run, results), arrays, stream)  # noqa: SLF001 - as above
        return made if out is not None else self.built(made, arrays)

    def built(self, made: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Return a call's value, built of new arrays and the call's arguments."""
        return self._build([*(self._own if self._reused else made), *arrays])

    def _run(self, results: Results, arrays: list[Any], pointer: int, launch: Callable[[], object], begin: None) -> Any:
        driver = self._driver
        elements = elements_of(driver, arrays)
        # The arguments are copied to the inputs before the launch. Inputs that the function may write are copied back to the
        # arguments after the launch.
        bring = [Copy("", target, source, 1) for target, source in zip(self._elements, elements, strict=True)]
        back = [
            Copy("", elements[place], self._elements[place], 1, arrays[place] if is_tensor(arrays[place]) else None)
            for place in self._written
        ]
        copy_all(driver, bring)
        launch()
        # The results are copied last, because ``out`` may be one of the arguments, which must then hold the result.
        copy_all(driver, back)
        copy_all(driver, results.copies)
        return results.value


def lease(
    instances: Sequence[Instance], stream: object, reused: bool, grow: Callable[[], Instance | None] | None = None
) -> Instance | None:
    """Return an instance for a call on a stream.

    Return None if every instance is being tuned, or keeps its outputs for another thread or stream.

    Parameters
    ----------
    reused : bool
        Whether calls return the programs' own outputs. Then the instance's outputs are reserved for this thread and stream.
    grow : callable, optional
        Captures a further instance. A further instance is preferred to an instance that the device still uses.
    """
    free = []
    for instance in instances:
        if not instance.away and (not reused or instance.claimable(stream)):
            # An instance whose last use was on the same stream comes first, because the call need not wait for an event.
            if instance.stream is stream and (not reused or instance.claim(stream)):
                return instance
            free.append(instance)
    free.sort(key=attrgetter("number"))
    # An idle instance of another stream needs no wait either. But if calls on that stream continue, the next of them would have
    # to take the instance of a third stream, and so on. So if a further instance can be captured, an idle instance is taken only
    # if its stream counts as unused.
    old = max([each.number for each in instances]) - RECENT
    for instance in free:
        if (grow is None or instance.number < old) and instance.program.idle and (not reused or instance.claim(stream)):
            return instance
    if grow is not None:
        new = grow()
        free = [new] if new is not None else sorted(free, key=lambda each: not each.program.idle)
    # ``free`` is now the new instance, or the free instances, best first. The call may have to wait on the device for the last
    # use of the instance.
    for instance in free:
        if not reused or instance.claim(stream):
            return instance
    return None


def _launched(arrays: object, pointer: int, launch: Callable[[], object], begin: object) -> None:
    launch()


def own_inputs(driver: Driver, arrays: list[Any]) -> list[Any]:
    """Return new arrays with the layouts of ``arrays``.

    If two of ``arrays`` share memory, so do their new arrays. The values of the new arrays are arbitrary.
    """
    made: list[Any] = [None] * len(arrays)
    first: dict[int, int] = {}
    for place, array in enumerate(arrays):
        first.setdefault(id(array), place)
        # Torch makes the new tensors here. The new arrays are made below, in groups that share memory.
        if is_tensor(array):
            made[place] = integration().empty_lying_as(array)
    places = [place for place, each in enumerate(made) if each is None]
    plain: list[Any] = [arrays[place] for place in places]
    pieces = [piece_of(driver, each) for each in plain]
    together = groups(driver, plain) if len(plain) > 1 else []
    alone = {*range(len(plain))}.difference(*together)
    for group in [*together, *[[each] for each in sorted(alone)]]:
        begin, end = min(pieces[each][0] for each in group), max(pieces[each][1] for each in group)
        # The new memory gets the same offset from an aligned address as the caller's memory. So each new array has the alignment
        # of the caller's array.
        shift = begin % ALIGNED
        with driver.relaxed():
            block = driver.empty((shift + end - begin,), (1,), np.dtype(np.uint8))
        by = driver.array_pointer(block) + shift - begin
        for each in group:
            array = plain[each]
            address = driver.array_pointer(array) + by
            made[places[each]] = driver.part(block, address, array.shape, array.strides, array.dtype)
    # If the same array is given twice, the function gets the same new array twice, because it may compare arguments by identity.
    return [made[first[id(array)]] for array in arrays]


def written_places(recording: Recording, arrays: list[Any], changed: Sequence[bool | None]) -> list[int]:
    """Return the places of the inputs that the recorded work may write.

    If the writes of some work are not known, every input counts as written, except tensors that did not change in the first
    call. ``changed`` says for each input whether torch counted a write in the first call, or is None if torch cannot tell.
    """
    driver, writes = recording.pool.driver, [each for each in recording.known_writes if not isinstance(each, Token)]
    pieces = [piece_of(driver, each) for each in elements_of(driver, arrays)]
    found = []
    for place, piece in enumerate(pieces):
        # Work with unknown writes may write any input, except a tensor that torch reports as unchanged.
        unseen = recording.unseen and changed[place] is not False
        if piece[0] < piece[1] and (unseen or changed[place] or any(share(piece, each) for each in writes)):
            found.append(place)
    return found
