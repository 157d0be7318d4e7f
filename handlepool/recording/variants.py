"""Keep the programs of a recorded function, by key and variant.

Calls with the same key may still need different programs, if the function reaches other weights or plain values than before. A
variant has the programs of one key that were recorded with the same weights and plain values.
"""

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from handlepool._util.reachable import leaves
from handlepool.errors import CaptureError, HandlePoolError, StateBusyError
from handlepool.order.places import before
from handlepool.order.reached import pieces_of
from handlepool.order.stream_order import integration
from handlepool.order.uses import Memory
from handlepool.pool.internals import PoolInternals
from handlepool.pool.stream import StreamReference
from handlepool.recording.capture import Recording
from handlepool.recording.first_call import FirstCall
from handlepool.recording.guards import Guards, TooMany
from handlepool.recording.hits import Hit, hit
from handlepool.recording.instances import Instance, lease, own_inputs, submitted, written_places
from handlepool.recording.keys import Call, rebuilt_call
from handlepool.recording.prepared import bounds
from handlepool.recording.program import Program
from handlepool.recording.record import check_recordable, check_values
from handlepool.recording.rehearsal import ContainerSnapshot
from handlepool.recording.returned import Returned
from handlepool.recording.state import State
from handlepool.recording.state_kinds import is_tensor
from handlepool.recording.tensors import in_order
from handlepool.recording.tuning import LanesTuning
from handlepool.recording.update import Inputs
from handlepool.tensors.layout import Piece, Ranges, Token

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Options:
    """Options of a recorded function.

    Attributes
    ----------
    function : callable
        The function that is recorded.
    name : str
        The function's name in messages.
    lanes : int or None
        As in `record`.
    instances, programs : int
        Maximum number of instances of a variant, and maximum number of keys.
    reused : bool
        Whether calls return the programs' own outputs.
    strict : bool
        Whether an error is raised if the function cannot be recorded.
    in_place : frozenset of int and str
        Positions and names of arguments whose arrays a program reads in place, without a copy.
    guarded : callable
        The function whose values are guarded. It differs from ``function`` only if ``function`` just calls ``guarded``.
    fixed : sequence of array
        Further arrays that the program reads in place. No guard checks them.
    private : bool
        Whether the arguments are copies that no caller reads afterwards, and the caller takes the results before the next call.
        If so, no argument is copied back, and no thread reserves outputs.
    """

    __slots__ = (
        "fixed",
        "function",
        "guarded",
        "in_place",
        "instances",
        "lanes",
        "name",
        "private",
        "programs",
        "reused",
        "strict",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        lanes: int | None,
        instances: int,
        programs: int,
        reused: bool,
        strict: bool,
        in_place: frozenset[int | str],
        guarded: Callable[..., Any] | None = None,
        fixed: Sequence[Any] = (),
        private: bool = False,
    ) -> None:
        self.function, self.name, self.lanes, self.instances, self.programs = function, name, lanes, instances, programs
        self.reused, self.strict, self.in_place = reused, strict, in_place
        self.guarded, self.fixed, self.private = function if guarded is None else guarded, fixed, private


class Variant:
    """The programs of a key for the same weights and plain values.

    The guards compare the weights and values that the function reaches. The recorded function makes sure that only one thread at
    a time captures. Any thread may lease instances.

    Parameters
    ----------
    options : Options
    pool : PoolInternals
    call : Call
        The first call of the variant.

    Attributes
    ----------
    key : tuple
        The key of the calls.
    eager : str or None
        The reason why the function runs eagerly with such arguments. None if it does not.
    lacking : str or None
        The error message if the recording lacked memory or side streams, or None. Such a recording may be tried again.
    instances : list of Instance
        Instances of the variant. The list only grows.
    guards : Guards or None
        Guards of the weights and values, or None if the function runs eagerly.
    lanes : int or None
        Number of lanes on which further instances are recorded.
    """

    def __init__(self, options: Options, pool: PoolInternals, call: Call) -> None:
        self.key = call.key
        self.pool = pool
        self.eager: str | None = None
        self.lacking: str | None = None
        self.instances: list[Instance] = []
        self.guards: Guards | None = None
        self.lanes = options.lanes
        self._options = options
        self._held = [_reference(each) for each in call.held]
        self._limit = options.instances
        self._first: FirstCall | None = None
        self._memory: Memory | None = None
        self._changed: list[bool | None] = []
        self._reached: list[int] = []
        # The program's own outputs, if calls return them and write to arguments. A call runs eagerly if its argument shares
        # memory with such an output.
        self._lent: list[Piece] = []
        self._related = call.related
        self._written = False
        self._hit: Hit | None = None
        self._number = next(submitted)

    # Whether the variant serves a call

    def takes(self, call: Call) -> bool:
        """Return whether a call passes the objects of the first call.

        Only the objects that the key contains by identity are compared.
        """
        return not self._held or all(one() is other for one, other in zip(self._held, call.held, strict=True))

    def apart(self, call: Call) -> bool:
        """Return whether no argument shares memory with a reached array.

        Reached arrays are arrays that the function uses but does not get as arguments, such as weights. The program works on
        copies of the arguments. If an argument shared memory with a reached array, a write to one of them would be missing in the
        other.
        """
        edges = self._reached
        if not edges:
            return True
        for begin, end in call.edges:
            place = bisect_right(edges, begin)
            # If the number of edges up to the argument's begin is odd, the argument begins inside a reached piece. If the number
            # up to its end differs, a reached piece begins inside the argument.
            if place & 1 or (place < len(edges) and bisect_left(edges, end) != place):
                return False
        return True

    # Calls

    def lease(self, stream: object, *, grow: Callable[[], Instance | None] | None) -> Instance | None:
        """Return an instance for a call, or None to run it eagerly.

        ``grow`` captures a further instance. It is None if no capture is possible now.
        """
        return lease(self.instances, stream, self._keeps, grow if len(self.instances) < self._limit else None)

    def growable(self, stream: object) -> bool:
        """Return whether a further instance may be captured for ``stream``."""
        return len(self.instances) < self._limit and all(each.stream is not stream for each in self.instances)

    def hit(self, args: tuple[Any, ...]) -> Hit | None:
        """Return the generated function for calls like this call, or None.

        See `handlepool.recording.hits`. Return None also if arguments share memory, or are read in place.
        """
        options, guards = self._options, self.guards
        if not self._written and guards is not None:
            self._written = True
            if self.instances[0].run is not None and not self._related and not options.in_place:
                values = self.key[0], self._reached, self.instances, self._limit, guards.holds, self._keeps
                self._hit = hit(self.pool, args, *values)
        return self._hit

    @property
    def _keeps(self) -> bool:
        """Whether an instance reserves its outputs for a thread and a stream."""
        return self._options.reused and not self._options.private

    @property
    def last(self) -> int:
        """The number of the variant's last call, in order of submission."""
        return max([self._number, *[each.number for each in self.instances]])

    def run(self, instance: Instance, call: Call, out: object, *, ordered: bool) -> Any:
        """Enqueue a call on an instance.

        ``ordered`` says whether forks of this thread may have branches that the call must wait for.
        """
        driver = self.pool.driver
        stream = driver.current_stream()
        if ordered and self._memory is not None:
            pieces = pieces_of(driver, call.arrays)
            written = [*pieces_of(driver, out), *(pieces if instance.writes else ())]
            before(self.pool, [*self._memory.reads, *pieces], [*self._memory.writes, *written], (self, call.arrays))
        if call.tensors and driver.name == "cuda":
            return self._beside_torch(instance, call, out, stream)
        return instance.call(call.arrays, stream, out)

    def _beside_torch(self, instance: Instance, call: Call, out: Any, stream: Any) -> Any:
        """Enqueue a call with tensors in the order of torch's current stream."""
        driver, device, found = self.pool.driver, instance.program.device, list[Any]()
        theirs = integration().current_stream(device)
        if theirs != stream.ptr and all(map(is_tensor, call.arrays)):
            # Torch's current stream becomes CuPy's current stream, so that no waits between the two streams are needed.
            other = driver.wrap_stream(theirs, None)
            driver.push_stream(other)
            try:
                return instance.call(call.arrays, other, out)
            finally:
                driver.pop_stream(other, stream)
        in_order(self.pool, device, stream.ptr, lambda: found.append(instance.call(call.arrays, stream, out)))
        return found[0]

    def tune(self, lanes: Iterable[int], goal: str, seconds: float) -> LanesTuning | None:
        """Choose the best number of lanes by measuring the first instance.

        All instances use this number from then on. Return None if there is no instance.
        """
        tuned = None
        for instance in [*self.instances]:
            found = instance.tune(lanes if tuned is None else (tuned.winner.lanes,), goal, seconds)
            tuned = tuned or found
        if tuned is not None:
            self.lanes = tuned.winner.lanes
        return tuned

    # Recording

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        """Call the function for real, and capture the first instance.

        Return the value of the call. If the function cannot be recorded, `eager` has the reason afterwards. If the recording
        lacked memory or side streams, `lacking` has the reason. An error that the function raises goes to the caller.
        """
        options, pool, driver = self._options, self.pool, self.pool.driver
        function, name = options.function, options.name
        try:
            home = check_recordable(pool, name, self.lanes, function)
            values = [*leaves(args, kwargs)]
            check_values(name, values, args, kwargs)
            inputs, own = self._own(args, kwargs, call)
        except HandlePoolError as error:
            self.eager = str(error)
            return function(*args, **kwargs)
        # Torch counts a tensor's writes in its version. So the versions tell which tensors the first call wrote.
        versions = [integration().version(each) if is_tensor(each) else None for each in call.arrays]
        given = ContainerSnapshot(args, kwargs)
        state = State(driver, function, args, kwargs, given.containers, values)
        # The first call is outside of the `try`, because an error of the user's function must reach the caller.
        first = FirstCall(pool, name, self.lanes, home)
        returned = first.run(function, args, kwargs)
        try:
            self._changed = [
                integration().version(each) != version if is_tensor(each) and version is not None else None
                for each, version in zip(call.arrays, versions, strict=True)
            ]
            first.end()
            given.check(name)
            if given.grown:
                raise CaptureError(
                    f"{name} adds entries to a list or dictionary that it was given, which no replay does. Return the new values"
                )
            state.check(name)
            State(driver, function, args, kwargs, given.containers, values).check_kept(name, state)
            self._capture(first, own, call, inputs, home, returned)
            first.keep()
            self._first = first
        except (StateBusyError, MemoryError) as error:
            # The recording may be tried again, because a later call may find more side streams and memory.
            self.lacking = str(error)
        except Exception as error:
            self.eager = str(error) or type(error).__name__
            self.guards = None
            if options.strict:
                raise
        return returned

    def grow(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Instance | None:
        """Capture a further instance, without a real call; None on failure."""
        first, options = self._first, self._options
        if first is None or len(self.instances) >= self._limit:
            return None
        try:
            home = check_recordable(self.pool, options.name, self.lanes, options.function)
            check_values(options.name, [*leaves(args, kwargs)], args, kwargs)
            inputs, own = self._own(args, kwargs, call)
            return self._capture(first, own, call, inputs, home)
        except StateBusyError:
            # The capture may be tried again, because a later call may find more side slots.
            return None
        except Exception:
            # The limit is lowered, so that no further capture is tried. The existing instances stay in use.
            self._limit = len(self.instances)
            self._written = False
            return None

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> tuple[list[Any], Arguments]:
        """Return new inputs for a program, and the arguments with these inputs."""
        kind: Any = self.pool.driver.array_types[0]
        if call.related and call.tensors:
            raise CaptureError(f"{self._options.name} was given tensors that share memory. Pass tensors with separate memory")
        inputs = own_inputs(self.pool.driver, call.arrays)
        is_input = lambda value: type(value) is kind or is_tensor(value)  # noqa: E731
        return inputs, rebuilt_call(args, kwargs, self._options.in_place, is_input, iter(inputs))

    def _capture(
        self,
        first: FirstCall,
        own: Arguments,
        call: Call,
        inputs: list[Any],
        home: StreamReference,
        value: object = None,
    ) -> Instance:
        options, driver = self._options, self.pool.driver
        function, name = options.function, options.name
        args, kwargs = own
        given, values = ContainerSnapshot(args, kwargs), [*leaves(args, kwargs)]

        def finish(recording: Recording, outputs: object) -> Instance:
            if given.grown:
                raise CaptureError(
                    f"{name} adds entries to a list or dictionary that it was given, which no replay does. Return the new values"
                )
            guards = self.guards
            # All instances of a variant share the guards of the first instance.
            if guards is None:
                try:
                    guards = Guards(driver, options.guarded, call.held)
                except TooMany as error:
                    raise CaptureError(f"{name} cannot be recorded: {error}") from error
            arrays = [*guards.arrays, *options.fixed]
            pieces = [piece for piece in pieces_of(driver, arrays) if piece[0] < piece[1]]
            reached = Ranges([each[:2] for each in pieces])
            self._check_reads(recording, inputs, pieces)
            recording.kept.add(arrays)
            memory = first.memory(recording, outputs)
            written = [] if options.private else written_places(recording, inputs, self._changed)
            if written and call.related:
                raise CaptureError(
                    f"{name} may write to an argument that shares memory with another argument. Pass arguments "
                    "without shared memory"
                )
            returned = Returned(recording, name, inputs, reached, outputs, apart=options.private)
            program = Program(name, recording, Inputs(driver, tuple(inputs), {}), outputs, home, memory, lent=not options.private)
            instance = Instance(driver, program, inputs, outputs, returned, written, reused=options.reused)
            known = [each for each in (*memory.reads, *memory.writes) if not isinstance(each, Token)]
            # A call copies a written argument back after the launch. If the argument were the former result, the copy would
            # destroy the new result.
            if written and options.reused:
                self._lent += pieces_of(driver, returned.own)
            mine = Ranges([*recording.own, *[each[:2] for each in pieces_of(driver, inputs)]])
            # The list is changed in place, because the generated function in `_hit` refers to it.
            others = [each for each in known if not mine.have(each)]
            self._reached[:] = bounds([*pieces, *self._lent, *others])
            self._memory = memory
            self.guards = guards
            return instance

        instance = first.capture(function, args, kwargs, given, values, home, finish, kept=[inputs], returned=value, empty=True)
        self.instances.append(instance)
        return instance

    def _check_reads(self, recording: Recording, inputs: list[Any], reached: Sequence[Piece]) -> None:
        """Refuse a capture that reads an array which no guard compares.

        If the user replaced such an array by another, the program would still read the old array.
        """
        # Without lanes, the memory that the calls read is unknown, so it cannot be checked.
        if recording.lanes is None:
            return
        driver = self.pool.driver
        kept = pieces_of(driver, recording.kept.values())
        known = Ranges([*recording.own, *[each[:2] for each in (*reached, *kept, *pieces_of(driver, inputs))]])
        for piece in recording.known_reads:
            if not isinstance(piece, Token) and piece[0] < piece[1] and not known.have(piece):
                raise CaptureError(
                    f"{self._options.name} reads an array that no attribute, variable or global holds, so a replacement of the "
                    "array would go unnoticed. Keep the array in an attribute, or pass it as an argument"
                )


def _reference(value: object) -> Callable[[], Any]:
    """Return a reference to an object.

    The reference is weak if the object's class allows this, so that a key keeps no object alive.
    """
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
