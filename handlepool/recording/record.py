"""`record`: a function is called once for real, and once with all that it gives to streams captured."""

import os
import sys
from collections.abc import Callable, Iterator, MappingView
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from handlepool._util.arguments import as_integer, check_ends, check_ran, flag
from handlepool._util.names import kind_of, shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import LEGACY_STREAM, Driver
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError
from handlepool.graphs.tuning import Tuning, check_gpu, tune_heaviest
from handlepool.order.books import open_order
from handlepool.order.measured import asked, wait_for_answers
from handlepool.order.stream_order import in_torch, torch_among, torch_in_use
from handlepool.pool.context import run_on, thread
from handlepool.pool.default import chosen_pool
from handlepool.pool.deferred import defer, deferred, settle
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.recording import drawing, tensors
from handlepool.recording.capture import Recording
from handlepool.recording.host_copies import HostCopies
from handlepool.recording.program import Program
from handlepool.recording.rehearsal import ContainerSnapshot, Launches, Rehearsal, check_same
from handlepool.recording.state import State
from handlepool.recording.tuning import shown_progress
from handlepool.recording.update import Inputs
from handlepool.regions.states import ParallelStates

T = TypeVar("T")

TUNED = "record(plans=True)"
MOST_SECONDS = 10.0
"""After which no more plans are tried."""


def record(
    function: Callable[..., Any],
    /,
    *args: Any,
    pool: HandlePool | None = None,
    lanes: int | None = None,
    plans: bool = False,
    **kwargs: Any,
) -> Program:
    """Record what a function gives to streams, to be replayed with one launch.

    ``function(*args, **kwargs)`` is called twice. The first call is for real, on the current stream, so that plans are built and
    kernels loaded; *work in place happens then, too*. The second is under stream capture, and nothing runs. Forks become parallel
    branches of the recorded graph.

    Parameters
    ----------
    function : callable
        Gives work to the current stream and to what is forked from it: `ParallelStates.map`, a body with forks, graph functions,
        CuPy code. It must give the same work each time. It must not wait for the GPU or read values on the host, nor copy from
        the host: the copy would read that memory again at each replay.
    *args, **kwargs
        For the function. Arrays among them, also in lists, tuples and dictionaries, are the inputs: kept alive, read by each
        replay, and overwritten by `Program.update` and by calls of the program, also where they are torch's tensors: after
        ``program(x2)`` the ``x`` that was given here holds ``x2``. Where you need ``x`` itself, give ``x.copy(order="K")``, which
        keeps the layout; ``x.copy()`` alone makes it contiguous. Arrays of other libraries cannot be written to; where they are
        to be, give what ``cupy.from_dlpack`` makes of them. What closures hold is kept alive as well, of the function and of
        those that are run in branches. What is read elsewhere (globals, attributes) the caller must keep.
    pool : HandlePool, optional
        What is given no pool in the function uses this one. By default it is that of the states for a method of
        `ParallelStates`, else the default pool. To give the function itself a parameter of this name, use `functools.partial`.
    lanes : int, optional
        1 to 32. The outermost calls of graph functions and operations become nodes that are ordered by their data alone, and at
        most so many of them run at once. Give 8 or 16: `Program.tune` finds the best number, also above that. They are recorded
        on as many lanes as the data allows, up to 31, each a leased side slot meanwhile, and `Program.nbytes` is for these, not
        for the number that is given here; only 1 takes the least, and cannot be tuned. Forks, and whatever else is launched,
        stand after all before them, and before all after them; `Program.explain` says where. Memory
        goes to calls alone that come after its last users.
        By default the order of streams and forks is recorded. Where ``HANDLEPOOL_DRAW`` names a folder, each recording with lanes
        is drawn there, as by `Program.draw`.
    plans : bool
        Between the two calls, time other plans of the graph functions that take most of the time, as `tune` does with all that a
        function uses: each alone, over random arrays. A plan stays unless another one is quicker by 3 %; whatever calls graph
        functions with such arrays gets the quicker one from then on. It waits for the GPU; after 10 seconds no more are tried.
        `Program.tunings` says what was. On a terminal progress is shown meanwhile.

    Returns
    -------
    Program
        Its ``outputs`` hold the values of the function's arguments from the first replay on.

    Raises
    ------
    CaptureError
        For what cannot be recorded, named; inside a capture, a recording, a branch or a task; where nothing was recorded; inside
        ``torch.cuda.use_mem_pool``, where torch keeps to that pool; and where torch uses the GPU and is older than 2.8. For graph
        functions that were others at the second call, and results of other shapes or types. With ``lanes`` also for operations
        that were others, in the body of a fork, and for an operation that wrote and gave no work to the stream. For state: an
        attribute, a container, a closure, a global or a random generator that the second call changes, by its name. Write state
        in place, in one array. For a copy from the host, except an array of the driver's ``asarray`` with equal bytes in both
        calls, which is a constant. The function's objects are left as its first call left them.
    DriverNotAvailableError
        With ``plans`` on the host driver.
    ArgumentError
        For ``lanes`` that are no integer from 1 to 32, for ``plans`` that are neither True nor False, for a function that returns
        nothing, a generator or a coroutine, for iterators as arguments, which the first call would use up, and for a list, tuple
        or dictionary that contains itself.
    ArrayTypeError
        For an array of objects that holds arrays.
    OutOfMemoryError
        When there is no memory for the graph.
    StateBusyError
        When every side stream of the device is in use.
    """
    if pool is None:
        owner = getattr(function, "__self__", None)
        pool = owner.pool if isinstance(owner, ParallelStates) else None
    width = lanes if lanes is None or type(lanes) is int else as_integer(lanes, 0)
    if width is not None and not 1 <= width <= MOST_SIDE_SLOTS:
        raise ArgumentError(f"record(lanes={shown(lanes)}); it must be an integer from 1 to {MOST_SIDE_SLOTS}, or left out")
    measured = plans is True or (plans is not False and flag("record: plans", plans))
    chosen = chosen_pool("record", pool)
    if chosen.status.unusable:
        chosen.status.check()
    if measured:
        check_gpu(chosen.driver, TUNED)
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None), type(function).__name__]
    name = [name for name in names if isinstance(name, str)][0]  # noqa: RUF015 - without a generator
    home = _check(chosen, name, width, function)
    # The arguments are walked once, which `leaves` ends although a container may contain itself.
    values = [*leaves(args, kwargs)]
    _check_values(name, values, args, kwargs)
    picture = drawing.asked_for(name) if width is not None and os.environ.get(drawing.VARIABLE) else None
    driver = chosen.driver
    stream = home.stream or driver.wrap_stream(home.pointer, home.owner)
    inputs, given = Inputs(driver, args, kwargs), ContainerSnapshot(args, kwargs)
    reached = partial(State, driver, function, args, kwargs, given.containers, values)
    before, copies = reached(), HostCopies(chosen, name)
    rehearsal = None if width is None else Rehearsal(chosen, home.pointer)
    launches = Launches(chosen) if measured or width is None else None
    first: Callable[..., Any] = partial(run_on, chosen, stream, home.device, None)
    if rehearsal is not None:
        first = partial(_rehearsed, rehearsal, chosen, home, first)
    if launches is not None:
        first = partial(launches.around, first)
    answers = asked()
    with copies.noted():
        returned = first(function, args, kwargs)
    if returned is None:
        raise _nothing(name)
    if type(returned) not in driver.array_types:
        check_ran(function, returned)
    wait_for_answers(answers)
    given.check(name)
    before.check(name)
    shapes = _shapes(driver, returned)
    del returned
    leftovers = [watcher.new for watcher in (rehearsal, launches) if watcher is not None]
    for left in leftovers:
        left.end()
    tunings = _tuned(chosen, name, launches, home) if measured and launches is not None else ()
    recording = Recording(chosen, name, width, () if rehearsal is None else rehearsal.calls)
    state = None
    try:
        copies.upload(given.renew())
        state = reached(partial(_settle, driver, home.pointer))
        state.check_kept(name, before)
        del before
        recording.kept.add(function, args, kwargs)
        capture: Callable[..., Any] = recording.capture
        again = None if launches is None or width is not None else Launches(chosen)
        if again is not None:
            capture = partial(again.around, capture)
        with copies.repeated(recording.kept.add):
            outputs = capture(function, args, kwargs, partial(state.check, name))
        given.check(name)
        # With lanes the capture has checked the state, and compared the calls.
        if again is not None and launches is not None:
            state.check(name)
            check_same(name, launches.calls, again.calls)
        if outputs is None:
            raise _nothing(name)
        now = _shapes(driver, outputs)
        if now != shapes:
            one, other = next(pair for pair in zip_longest(shapes, now, fillvalue="nothing") if pair[0] != pair[1])
            raise CaptureError(
                f"{name} returned something else when it was called again to be recorded: {_text(one)} the first time, and "
                f"{_text(other)} the second. Take decisions, and prepare what is made once, before it is recorded"
            )
        memory = recording.memory(outputs, leftovers)
        return _drawn(Program(name, recording, inputs, outputs, home, memory, tunings), picture)
    except BaseException:
        outputs, done = None, False
        try:
            # First, so that no attribute keeps an array of the recording's memory, which no replay has written.
            given.restore()
            if state is not None:
                state.restore()
            done = recording.destroy()
        finally:
            recording.kept.take()
            if not done:
                defer(recording.settle)
        raise


def _settle(driver: Driver, pointer: int) -> None:
    """Wait for a stream, whose work may still write NumPy's arrays."""
    with driver.relaxed():
        driver.synchronize_stream(pointer)


def _shapes(driver: Driver, returned: Any) -> list[Any]:
    """Return the shapes and types of the arrays that a function returned: of the driver's as tuples, of others as text."""
    native: Any = driver.array_types[0]
    if type(returned) is native:
        return [(native, returned.shape, returned.dtype)]
    return [
        (native, value.shape, value.dtype) if type(value) is native else shown(value)
        for value in leaves(returned)
        if type(value) is native or holds_values(value)
    ]


def _text(shape: Any) -> str:
    """Return an entry of `_shapes` as `shown` says it of the array."""
    if isinstance(shape, str):
        return shape
    kind, extents, dtype = shape
    return f"<{kind_of(kind)} of shape {tuple(map(int, extents))}, {dtype}>"


def _rehearsed(rehearsal: Rehearsal, pool: PoolInternals, home: StreamReference, run: Callable[..., T], *call: Any) -> T:
    """Call a function with its calls noted, on one stream that is current for torch as well, as it is while recording."""
    torch = (torch_in_use(pool.driver) or torch_among(*call)) if "torch" in sys.modules else None
    if torch is None:
        return rehearsal.around(run, *call)
    inside, found = in_torch(torch, home.pointer, home.pointer, home.device, *call), []
    tensors.in_order(pool, home.device, home.pointer, lambda: found.append(rehearsal.around(run, *inside)))
    return found[0]


def _tuned(pool: PoolInternals, name: str, launches: Launches, home: StreamReference) -> tuple[Tuning, ...]:
    show = shown_progress(name, MOST_SECONDS)
    try:
        return tune_heaviest(pool, TUNED, launches.plans(home.device), home.pointer, MOST_SECONDS, show)
    finally:
        show(None)


def _drawn(program: Program, picture: Path | None) -> Program:
    """Return a program, after it was drawn where the environment asks for that."""
    if picture is not None and program.explain().steps:  # none where all work is plain and the driver gives one lane
        program.draw(picture, measure=False)
    return program


def _check(pool: PoolInternals, name: str, lanes: int | None, function: Any) -> StreamReference:
    """Check the function and its surroundings before anything runs, and return the caller's stream."""
    if not callable(function):
        raise ArgumentError(f"record({shown(function)}): pass a function, and its arguments after it")
    if thread.recording is not None:
        raise CaptureError(f"{name} cannot be recorded inside a recording: call it there, and it becomes a part of that")
    if thread.region is not None:
        raise CaptureError(f"{name} cannot be recorded inside a branch or a task: record it outside, and replay it there")
    if lanes is not None and open_order(pool.driver, pool.current_device()) is not None:
        raise CaptureError(
            f"{name} cannot be recorded with lanes in the body of a fork: record it before the fork, or without lanes"
        )
    if deferred:
        settle()
    driver = pool.driver
    home = resolve(driver)
    check_foreign(driver, home)
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(f"{name} cannot be recorded while the current stream is being captured: record it before")
    return home


def _check_values(name: str, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the values among the arguments."""
    if [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple, dict))]:
        check_ends(f"{name} was given", args, kwargs)
    for value in values:
        if isinstance(value, MappingView):
            raise ArgumentError(f"{name} was given {shown(value)}, a view of a dictionary; pass the dictionary, or a list")
        if isinstance(value, Iterator):
            raise ArgumentError(f"{name} was given the iterator {shown(value)}, which its first call would use up; pass a list")
        if isinstance(value, np.ndarray) and value.dtype.hasobject and any(map(holds_values, value.ravel())):
            raise ArrayTypeError(f"{name} was given an array of objects, {shown(value)}; pass a list of arrays")


def _nothing(name: str) -> ArgumentError:
    return ArgumentError(f"{name} returned None. Return the arrays that it writes")
