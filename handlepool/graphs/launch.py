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
        Gets the operands before the launch, and returns the slot to launch on. Without ``begin``, the launch uses this thread's
        slot on the current stream.
    arrays : tuple of array
    out : array or tuple of array, optional
    key : tuple
        The option key, as given to `GraphFunction.prepare`.
    """
    try:
        attempts = pool.plans.shortcuts[function, key, arrays[0].shape]
    # No shortcut is found if the key is new, if the call has no arrays, or if an option has no hash.
    except (AttributeError, IndexError, KeyError, TypeError):
        return NOT_CACHED
    # `active` is empty if no thread has an open region or recording. Then this hot path makes no further checks.
    if active:
        # `recordings` counts the recordings of all threads, so ask this thread's own state as well.
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
    """Launch a node of this thread's recording, or return `NOT_CACHED`.

    The result is `NOT_CACHED` if the call is no node, or if ``thread.launched`` must get each launched plan.
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
    """Launch an operation by a shortcut, or else by a prepared call.

    The launch belongs to the fork that called the operation, if there is one, or else to the current stream.

    Parameters
    ----------
    name : str
        Name of the operation, for messages.
    pool : HandlePool, optional
        The operation's own argument ``pool``.
    functions : sequence of GraphFunction
        Graph functions that may own the plan. Their shortcuts are tried first. Empty if the arguments do not tell quickly which
        function owns the plan.
    arrays, out, key
        As in `hit`.
    prepare : callable
        Gets the pool and returns the call. It is called only if no shortcut took the arguments.
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

    ``function`` must end in `run_known`, and must run none of the user's Python code before that call.
    """
    setattr(function, LAUNCHES, function)
    return function


class _Prepared:
    """Stand in for a branch, so that `prepared` gets a call.

    A branch would launch the call. This object returns the call instead.
    """

    begin = None

    def __init__(self, pool: PoolInternals) -> None:
        self.pool = pool

    def run(self, call: "GraphCall", kept: object) -> "GraphCall":
        """Return ``call`` instead of launching it."""
        return call


def prepared(function: Callable[..., Any], pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "GraphCall":
    """Return the call that the operation ``function`` would launch."""
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
    """Launch ``call`` on ``call.stream``, or else on the current stream."""
    return call.submit(pool.slot(call.stream))


def shortcut(pool: PoolInternals, arrays: tuple[Any, ...], outs: tuple[Any, ...], entry: Entry[Plan]) -> Shortcut | None:
    """Make the function that launches ``entry.plan`` at later hits.

    The function launches if its arguments have the geometry of ``arrays`` and ``outs``. Otherwise the function returns
    `NOT_CACHED`.
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
    """Return a shortcut in plain Python, for an executable that makes none.

    The shortcut behaves as `Executable.shortcut` describes.
    """
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
        # `zip` raises if the call has another number of arrays than the plan.
        except ValueError:
            return NOT_CACHED
        if vectors and any(pointer(arrays[place]) % TENSOR_ALIGNMENT for place in vectors):
            # This plan takes only aligned vectors. A call with misaligned vectors has another plan, which copies them.
            return NOT_CACHED
        made = outs or fresh or new_outputs(pool, plan.outputs, empty)
        operands = arrays + made
        # This path does not look the plan up in the cache, so mark the plan as recently used.
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

    ``given`` says that the caller gave the outputs, which may overlap with other operands. ``told`` says that the thread's
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
        # A plan from the plan directory may fail at its first launch, and is then built anew. Any other error goes to the caller.
        if not plan.executable.untried or isinstance(error, HandlePoolError):
            raise
        _log.warning("%s: a plan of the plan directory failed at its first launch, and is built anew: %s", plan.name, error)
    if pool.plan_files is not None:
        pool.plan_files.reject(plan.key)
    launch(pool, plan.built_anew(), slot, operands, given)


def pieces_of_operands(driver: Driver, plan: Plan, operands: Sequence[Any]) -> list[Piece]:
    """Return the memory of each operand of a plan, inputs first."""
    layouts = plan.inputs + plan.outputs
    return [layout.piece(driver.array_pointer(array)) for layout, array in zip(layouts, operands, strict=True)]


def pieces_of_arrays(driver: Driver, arrays: Sequence[Any]) -> list[Piece]:
    """Return the memory of each array."""
    return [Layout.of(array).piece(driver.array_pointer(array)) for array in arrays]


def new_outputs(pool: PoolInternals, layouts: Sequence[Layout], empty: Callable[..., Any]) -> tuple[Any, ...]:
    """Allocate an output for each layout, on the current stream."""
    try:
        return tuple([empty(layout.shape, layout.strides, layout.dtype) for layout in layouts])
    except Exception as error:
        pool.status.diagnose(error)
        raise


class GraphCall(Call):
    """A call of a graph function, ready to launch on a slot.

    Its plan is built, and its outputs are allocated.

    Attributes
    ----------
    plan : Plan
        The plan to launch. Calls that `then` added are launched after it.
    operands : tuple of array
        Inputs and outputs of all launches.
    result : array or tuple of array
        Return value of `launch`.
    stream : int or None
        Pointer of the stream to launch on. None means the current stream of the driver's array library.
    callers : sequence of int
        Pointers of other streams that use the arrays; see `handlepool.graphs.arrays.ConvertedArguments`.
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
        """Put the call in order and launch it; return the outputs.

        Outside of regions and recordings, the call is launched at once. Inside a region, the books order the call. Inside a
        recording, the call becomes a node.
        """
        return run(self._pool, self, slot) if self.plan.launches else self.launch(slot)

    def launch(self, slot: Slot) -> Any:
        """Enqueue the call on the slot's stream; return the outputs.

        The stream already waits for all work that the call depends on. If no output has elements, nothing is launched.
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
        """Whether the outputs are new arrays, not arrays that the caller gave."""
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
        """Add a call that is launched after this call.

        The added call writes this call's result in place.
        """
        self._more += (call,)
        self._pieces = None
        self.operands += call.operands


def by_keyword(function: F) -> F:
    """Hide ``*extra`` in the shown signature of a function.

    The function takes ``*extra`` only so that `misplaced` can refuse surplus positional arguments.
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
        f"{function.__name__} takes {taken} by position, and was given {shown(extra[0])} as a further argument: {meant} is a "
        f"keyword, as in {function.__name__}({taken}, {meant}=...). The keywords are {', '.join(keywords)}"
    )


def check_arrays(
    name: str, driver: Driver, device: int, arrays: tuple[Any, ...], outs: tuple[Any, ...], vectors: bool = True
) -> None:
    """Check the arguments of a call.

    A hit needs no check, because its arguments have the geometry of arguments that were checked before. A `Layout` needs no
    check, because it comes from `plan_for`, which has checked it. With ``vectors=True``, vectors may begin at any element,
    because the plan copies misaligned vectors. With ``vectors=False``, vectors must be aligned.
    """
    if not arrays:
        raise ArgumentError(f"{name} was called without arrays; pass its arrays")
    if type(arrays[0]) is not Layout:
        called = partial(operand_name, inputs=len(arrays), outs=len(outs))
        copied = [place for place, array in enumerate(arrays) if len(array.shape) == 1] if vectors else ()
        check_operands(driver, name, device, arrays + outs, called, copied)


def misaligned_vectors(driver: Driver, arrays: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the indices of vectors in ``arrays`` that are not aligned.

    An aligned vector begins at a multiple of `TENSOR_ALIGNMENT` bytes. A call with misaligned vectors has a plan of its
    own, which copies these vectors.
    """
    return tuple(
        [
            place
            for place, array in enumerate(arrays)
            if len(array.shape) == 1 and type(array) is not Layout and driver.array_pointer(array) % TENSOR_ALIGNMENT
        ]
    )
