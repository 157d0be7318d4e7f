"""Launch calls of graph functions, and check their arrays."""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from inspect import signature
from typing import Any, TypeVar, cast

from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.operands import TENSOR_ALIGNMENT, check_operands, operand_name
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, HandlePoolError, SignatureError
from handlepool.graphs.plan import Plan
from handlepool.order.call import Call
from handlepool.order.places import begin_for, lanes_for, run
from handlepool.order.uses import Operands
from handlepool.pool.context import LAUNCHES, NOT_CACHED, Begin, active, recordings, thread
from handlepool.pool.default import chosen_pool, current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.pool.plan_cache import Entry, Shortcut
from handlepool.pool.pool import HandlePool
from handlepool.pool.slot import Slot
from handlepool.tensors.layout import Layout, Piece

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("handlepool")


def hit(
    function: Hashable, pool: PoolInternals, begin: Begin | None, arrays: tuple[Any, ...], out: object, key: tuple[Any, ...]
) -> Any:
    """Launch the cached plan for these arrays, or return `NOT_CACHED`.

    Parameters
    ----------
    function : GraphFunction
    pool : PoolInternals
    begin : callable, optional
        Gets the operands before the launch, and returns the slot to launch on. Without it, the launch uses this thread's slot on
        the current stream.
    arrays : tuple of array
    out : array or tuple of array, optional
    key : tuple
        The option key, as given to `GraphFunction.prepare`.
    """
    try:
        attempts = pool.plans.shortcuts[function, key, arrays[0].shape]
    # The key is new, there are no arrays, or a value has no hash.
    except (AttributeError, IndexError, KeyError, TypeError):
        return NOT_CACHED
    # A plain launch skips all the checks for regions and recordings: this path is hot.
    if active:
        # Another thread may be recording, so ask this thread's own state.
        if recordings and (thread.recording or thread.rehearsal or thread.launched):
            return NOT_CACHED if begin is not None else _hit_node(pool, attempts, arrays, out)
        if begin is None:
            begin = begin_for(pool)
    for attempt in attempts:
        result = attempt(begin, arrays, out)
        if result is not NOT_CACHED:
            return result
    return NOT_CACHED


def _hit_node(pool: PoolInternals, attempts: Sequence[Shortcut], arrays: tuple[Any, ...], out: object) -> Any:
    """Launch as a node of this thread's recording, or return `NOT_CACHED`.

    The result is `NOT_CACHED` if the call is no node, or if the thread counts plans.
    """
    driver = pool.driver
    lanes = lanes_for(pool, driver.current_stream(pool.current_device()).ptr)
    if lanes is None or thread.launched is not None:
        return NOT_CACHED
    if out is None:
        lanes.expect(lambda: pieces_of_arrays(driver, arrays))
    try:
        for attempt in attempts:
            result = lanes.hit(attempt, arrays, out)
            if result is not NOT_CACHED:
                return result
        return NOT_CACHED
    finally:
        if out is None:
            lanes.expect(None)


def run_known(
    name: str,
    pool: HandlePool | None,
    functions: Sequence[Hashable],
    arrays: tuple[Any, ...],
    out: object,
    key: tuple[Any, ...],
    prepare: "Callable[[PoolInternals], GraphCall]",
) -> Any:
    """Launch the plan for an operation's arguments, where the operation is called.

    Parameters
    ----------
    name : str
        Name of the operation, for messages.
    pool : HandlePool, optional
        The operation's own argument ``pool``.
    functions : sequence of GraphFunction
        Functions that may own the plan, for a `hit`. Empty if the arguments do not tell quickly which function does.
    arrays, out, key
        As in `hit`.
    prepare : callable
        Returns the call, if there was no hit.
    """
    branch, begin = None, None
    branches = thread.branches
    if not branches:
        chosen = current_pool() if pool is None else chosen_pool(name, pool)
    # A fork called the operation, so the launch belongs to the fork's branch.
    else:
        branch = branches.pop()
        chosen = branch.pool if pool is None else chosen_pool(name, pool)
        begin = branch.begin
        if begin is None:
            return branch.run(prepare(chosen), (arrays, out))
    shortcuts = chosen.plans.shortcuts
    # Repeat the look-up of `hit` here, because a call of `hit` would take as long as the look-up.
    for function in functions:
        try:
            attempts = shortcuts[function, key, arrays[0].shape]
        except (AttributeError, IndexError, KeyError, TypeError):
            continue
        if active and (begin is None or recordings):
            result = hit(function, chosen, begin, arrays, out, key)
            if result is not NOT_CACHED:
                return result
            continue
        for attempt in attempts:
            result = attempt(begin, arrays, out)
            if result is not NOT_CACHED:
                return result
    call = prepare(chosen)
    return launch_new(chosen, call) if branch is None else branch.run(call, (arrays, out))


def launches(function: F) -> F:
    """Mark an operation that a fork may call directly.

    The function must end in `run_known`, and run no Python code of the user before.
    """
    setattr(function, LAUNCHES, function)
    return function


class _Prepared:
    """A stand-in for a fork that prepares a call without launching it."""

    begin = None

    def __init__(self, pool: PoolInternals) -> None:
        self.pool = pool

    def run(self, call: "GraphCall", kept: object) -> "GraphCall":
        """Return the call."""
        return call


def prepared(function: Callable[..., Any], pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "GraphCall":
    """Return the call that an operation would launch."""
    branches = thread.branches
    outer = len(branches)
    try:
        # The operation takes the stand-in for its branch, and hands the call to it.
        branches.append(_Prepared(pool))
        call: GraphCall = function(*args, **kwargs)
    finally:
        # An operation that raised may have left its branch on the list.
        del branches[outer:]
    return call


def launch_new(pool: PoolInternals, call: "GraphCall") -> Any:
    """Launch a call on the current stream, or on its own stream."""
    return call.submit(pool.slot(call.stream))


def shortcut(pool: PoolInternals, arrays: tuple[Any, ...], outs: tuple[Any, ...], entry: Entry[Plan]) -> Shortcut | None:
    """Make a function that launches a plan for arrays like these.

    `hit` finds the function.
    """
    plan, driver = entry.plan, pool.driver
    inputs, outputs = [Layout.of(array) for array in arrays], [Layout.of(out) for out in outs] or list(plan.outputs)
    names = {
        "NOT_CACHED": NOT_CACHED,
        "current_device": pool.current_device,
        "current_stream": driver.current_stream,
        "find": pool.slot,
        "repaired": pool.repaired,
        "entry": entry,
        "cache": pool.plans,
        "tick": pool.plans.tick,
        "status": pool.status,
        "diagnose": pool.status.diagnose,
    }
    made = plan.executable.shortcut(inputs, outputs, plan.alias_pairs if outs else None, plan.single, names)
    launch: Any = made or _shortcut(pool, entry, inputs + outputs if outs else inputs, bool(outs))
    launch.operands = Operands(inputs + outputs, len(inputs), not outs)
    launch.plan = plan
    return cast("Shortcut", launch)


def _shortcut(pool: PoolInternals, entry: Entry[Plan], layouts: list[Layout], given: bool) -> Shortcut:
    """Return the launch that `Executable.shortcut` describes, for any driver."""
    plan, natives, empty = entry.plan, pool.driver.array_types, pool.driver.empty
    copied = [copy.operand for copy in plan.copies]
    vectors = [place for place, layout in enumerate(plan.inputs) if layout.ndim == 1 and place not in copied]
    geometry = [(layout.shape, layout.strides, layout.dtype) for layout in layouts]
    pointer, block, plans = pool.driver.array_pointer, pool.driver.array_block, pool.plans

    def at_once(begin: Begin | None, arrays: tuple[Any, ...], out: Any, fresh: Any = None) -> Any:
        if (out is not None) is not given or pool.current_device() != plan.device:
            return NOT_CACHED
        if given and not plan.single and not isinstance(out, (tuple, list)):
            return NOT_CACHED
        outs = () if not given else (out,) if plan.single else tuple(out)
        try:
            for array, known in zip(arrays + outs, geometry, strict=True):
                if type(array) not in natives or (array.shape, array.strides, array.dtype) != known:
                    return NOT_CACHED
        # The call has another number of arrays.
        except ValueError:
            return NOT_CACHED
        if vectors and any(pointer(arrays[place]) % TENSOR_ALIGNMENT for place in vectors):
            # Another plan copies such vectors.
            return NOT_CACHED
        made = outs or fresh or new_outputs(pool, plan.outputs, empty)
        operands = arrays + made
        # Mark the plan as used, as a look-up in the cache would.
        if plans.recent is not entry:
            plans.use(entry)
        if begin is None:
            slot = pool.slot()
        else:
            slot = begin(operands, at_once, tuple(map(pointer, operands)), tuple(map(block, operands)))
        launch(pool, plan, slot, operands, given, told=begin is not None)
        return out if given else made[0] if plan.single else made

    at_once.allocate = lambda count: [new_outputs(pool, plan.outputs, empty) for _ in range(count)]  # type: ignore[attr-defined]
    return at_once


def launch(pool: PoolInternals, plan: Plan, slot: Slot, operands: tuple[Any, ...], given: bool, *, told: bool = False) -> None:
    """Enqueue a plan on a slot's stream.

    ``given`` says that the caller gave the outputs, which may overlap with other operands. ``told`` says that a current
    recording already knows of the launch.
    """
    try:
        executable = plan.executable
        if thread.recording is not None and not told:
            thread.recording.check(f"a launch of {plan.name}", slot.pointer, pool.driver)
            thread.recording.keep(plan)
            inputs = len(plan.inputs)
            pieces = pieces_of_operands(pool.driver, plan, operands)
            thread.recording.accessed(pieces[:inputs], pieces[inputs:])
        slot.launch(plan.name, executable, operands, plan.check_aliases if given else None, pool.repaired)
        if recordings and thread.launched is not None:
            thread.launched(pool, plan, () if given else operands[len(plan.inputs) :])
        if plan.copies:
            pool.plans.count_copies(plan)
        return
    except Exception as error:
        pool.status.diagnose(error)
        # Only a plan from the plan directory at its first launch is built anew.
        if not plan.executable.untried or isinstance(error, HandlePoolError):
            raise
        _log.warning("%s: a plan of the plan directory failed at its first launch, and is built anew: %s", plan.name, error)
    if pool.plan_files is not None:
        pool.plan_files.reject(plan.key)
    launch(pool, plan.built_anew(), slot, operands, given)


def pieces_of_operands(driver: Driver, plan: Plan, operands: Sequence[Any]) -> list[Piece]:
    """Return the memory of a plan's arrays, the inputs first."""
    layouts = plan.inputs + plan.outputs
    return [layout.piece(driver.array_pointer(array)) for layout, array in zip(layouts, operands, strict=True)]


def pieces_of_arrays(driver: Driver, arrays: Sequence[Any]) -> list[Piece]:
    """Return the memory of arrays."""
    return [Layout.of(array).piece(driver.array_pointer(array)) for array in arrays]


def new_outputs(pool: PoolInternals, layouts: Sequence[Layout], empty: Callable[..., Any]) -> tuple[Any, ...]:
    """Allocate outputs on the current stream."""
    try:
        return tuple([empty(layout.shape, layout.strides, layout.dtype) for layout in layouts])
    except Exception as error:
        pool.status.diagnose(error)
        raise


class GraphCall(Call):
    """A call of a graph function with allocated outputs.

    The call is launched on a slot.

    Attributes
    ----------
    plan : Plan
        The plan to launch. It comes first if `then` added calls.
    operands : tuple of array
        Inputs and outputs of all launches.
    result : array or tuple of array
        Return value of `launch`.
    stream : int or None
        Pointer of the stream to run on, if it is not the array library's current stream.
    callers : sequence of int
        Pointers of the streams that the call is ordered with. See `handlepool.graphs.arrays`.
    """

    __slots__ = ("_given", "_more", "_own", "_pieces", "_pool", "operands", "plan", "result")

    stream: int | None = None
    callers: Sequence[int] = ()

    def __init__(self, pool: PoolInternals, plan: Plan, operands: tuple[Any, ...], result: object, given: bool) -> None:
        self._pool = pool
        self._given = given
        self._more: tuple[GraphCall, ...] = ()
        self._pieces: tuple[list[Piece], list[Piece]] | None = None
        self.plan = plan
        self.operands = self._own = operands
        self.result = result

    def submit(self, slot: Slot) -> Any:
        """Launch in order with the callers and with branches; return the outputs.

        The launch happens at the place of the call.
        """
        return run(self._pool, self, slot) if self.plan.launches else self.launch(slot)

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, which is in order; return the outputs.

        A result without elements launches nothing.
        """
        if not self.plan.launches:
            if thread.recording is not None:
                thread.recording.note_empty_call()
            return self.result
        launch(self._pool, self.plan, slot, self._own, self._given)
        for call in self._more:
            call.launch(slot)
        return self.result

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the plan."""
        return self.plan.name

    @property
    def reads(self) -> list[Piece]:  # type: ignore[override]
        """Memory of the inputs of all launches."""
        return self.pieces()[0]

    @property
    def writes(self) -> list[Piece]:  # type: ignore[override]
        """Memory of the outputs of all launches."""
        return self.pieces()[1]

    @property
    def keep(self) -> object:  # type: ignore[override]
        """Operands that the call keeps alive."""
        return self.operands

    @property
    def what(self) -> tuple[object, ...]:
        """Plans of all launches."""
        return (self.plan, *[call.plan for call in self._more])

    @property
    def launched(self) -> list[tuple[Plan, tuple[Any, ...]]]:
        """Plans of all launches, each with its operands."""
        return [(self.plan, self._own), *[each for call in self._more for each in call.launched]]

    @property
    def allocated(self) -> bool:
        """Whether the outputs are new."""
        return not self._given

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """Return the memory read and the memory written by the launches."""
        pieces = self._pieces
        if pieces is None:
            inputs = len(self.plan.inputs)
            found = pieces_of_operands(self._pool.driver, self.plan, self._own)
            reads, writes = found[:inputs], found[inputs:]
            for call in self._more:
                reads += call.reads
                writes += call.writes
            pieces = self._pieces = reads, writes
        return pieces

    def then(self, call: "GraphCall") -> None:
        """Add a call that writes this call's result in place."""
        self._more += (call,)
        self._pieces = None
        self.operands += call.operands


def by_keyword(function: F) -> F:
    """Hide ``*extra`` in the shown signature of a function.

    The function takes ``*extra`` only so that `misplaced` can refuse it.
    """
    shown_as = signature(function)
    parameters = [p for p in shown_as.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    function.__signature__ = shown_as.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def misplaced(function: Callable[..., Any], extra: Sequence[Any]) -> SignatureError:
    """Return the error for a surplus positional argument of a `by_keyword` function."""
    parameters = signature(function).parameters.values()
    taken = ", ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    meant = next(name for name in (("bias", "out") if holds_values(extra[0]) else keywords) if name in keywords)
    return SignatureError(
        f"{function.__name__} takes {taken} by position, and was given {shown(extra[0])} after that: {meant} is a keyword, as in "
        f"{function.__name__}({taken}, {meant}=...). The keywords are {', '.join(keywords)}"
    )


def check_arrays(
    name: str, driver: Driver, device: int, arrays: tuple[Any, ...], outs: tuple[Any, ...], vectors: bool = True
) -> None:
    """Check the arguments of a call.

    A hit needs no check, because it takes only arguments that equal checked arguments in geometry. `plan_for` has checked a
    `Layout` before. Vectors may begin at any element, because a plan copies a vector that it cannot take in place. With
    ``vectors=False``, a vector must be aligned.
    """
    if not arrays:
        raise ArgumentError(f"{name} was called without arrays; pass its arrays")
    if type(arrays[0]) is not Layout:
        called = partial(operand_name, inputs=len(arrays), outs=len(outs))
        copied = [place for place, array in enumerate(arrays) if len(array.shape) == 1] if vectors else ()
        check_operands(driver, name, device, arrays + outs, called, copied)


def misaligned_vectors(driver: Driver, arrays: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the places of vectors that are not aligned for a launch.

    Such a call has a plan of its own, which copies these vectors.
    """
    return tuple(
        [
            place
            for place, array in enumerate(arrays)
            if len(array.shape) == 1 and type(array) is not Layout and driver.array_pointer(array) % TENSOR_ALIGNMENT
        ]
    )
