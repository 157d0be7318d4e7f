"""Implement `record`: call a function for real, then call it under capture.

The second call runs nothing, and the capture takes all work that the function gives to streams.
"""

import os
from collections.abc import Callable, Iterator, MappingView
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from handlepool._util.arguments import as_integer, check_ends, flag
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool._util.reachable import leaves
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError
from handlepool.graphs.tuning import Tuning, check_gpu, tune_heaviest
from handlepool.order.places import open_order
from handlepool.pool.context import thread
from handlepool.pool.default import chosen_pool
from handlepool.pool.deferred import deferred
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.recording import drawing
from handlepool.recording.capture import Recording
from handlepool.recording.first_call import FirstCall, Take, check_returned, name_of_call
from handlepool.recording.program import Program
from handlepool.recording.rehearsal import ContainerSnapshot
from handlepool.recording.state import State
from handlepool.recording.tuning import shown_progress
from handlepool.recording.update import Inputs
from handlepool.regions.states import ParallelStates

T = TypeVar("T")
TUNED = "record(plans=True)"
MOST_SECONDS = 10.0
"""Time in seconds after which no more plans are tried."""


def record(
    function: Callable[..., Any],
    /,
    *args: object,
    pool: HandlePool | None = None,
    lanes: int | None = None,
    plans: bool = False,
    **kwargs: object,
) -> Program:
    """Record a function's work on streams, to be replayed with one launch.

    ``function(*args, **kwargs)`` is called twice. The first call runs on the current stream, builds the plans and loads the
    kernels. *Work in place also happens in the first call*. The second call is under stream capture, and nothing runs. Forks
    become parallel branches of the recorded graph.

    Parameters
    ----------
    function : callable
        Gives work to the current stream and to streams that are forked from this stream: `ParallelStates.map`, a body with forks,
        graph functions, CuPy code. The function must give the same work each time. It must not wait for the GPU or read values on
        the host. It must not copy from the host, because the copy would read that memory again at each replay.
    *args, **kwargs
        Arguments of the function. Arrays among the arguments, also in lists, tuples and dictionaries, are the inputs. The program
        keeps the inputs alive, and each replay reads the inputs. `Program.update` and calls of the program overwrite the inputs,
        including torch's tensors: after ``program(x2)`` the ``x`` that was given here holds ``x2``. If you need ``x`` itself,
        give ``x.copy(order="K")``, which keeps the layout; ``x.copy()`` alone makes it contiguous. Arrays of libraries other than
        torch cannot be overwritten; for such an input, give the array that ``cupy.from_dlpack`` makes of it. The program also
        keeps alive the objects in closures of the function and of functions that run in branches. The caller must keep alive the
        arrays that the function reads from globals or attributes.
    pool : HandlePool, optional
        Pool for the calls in the function that get no pool of their own. For a method of `ParallelStates`, the default is the
        pool of the states. For any other function it is the default pool. If the function itself has a parameter of this name,
        set it by `functools.partial`.
    lanes : int, optional
        1 to 32. The outermost calls of graph functions and operations become nodes. Data alone orders the nodes, and at most this
        number of nodes runs at once. Give 8 or 16: `Program.tune` finds the best number, also above 16. The nodes are recorded on
        as many lanes as the data allows, up to 31. Each lane leases a side slot during the recording. `Program.nbytes` counts the
        memory of these lanes, whatever number is given here. Only ``lanes=1`` saves memory, and such a program cannot be tuned.
        Forks and any other work run after everything recorded before them and before everything recorded after them;
        `Program.explain` says where. Memory is reused only by calls that come after its last users. Without ``lanes``, the
        program keeps the order of streams and forks. Where ``HANDLEPOOL_DRAW`` names a folder, each recording with lanes is drawn
        there, as by `Program.draw`.
    plans : bool
        Between the two calls, time other plans of the graph functions that take most of the time. Like `tune`, time each plan
        alone, over random arrays. A plan stays unless another plan is quicker by 3 %. Later calls of graph functions with such
        arrays use the quicker plan. The timing waits for the GPU; after 10 seconds no more plans are tried. `Program.tunings`
        holds the results. A terminal shows the progress.

    Returns
    -------
    Program
        Its ``outputs`` hold the function's results once the program has been replayed.

    Raises
    ------
    CaptureError
        For work that cannot be recorded, which the message names. Inside a capture, a recording, a branch or a task. If nothing
        was recorded. Inside ``torch.cuda.use_mem_pool``, because torch keeps to that pool. If torch uses the GPU and is older
        than 2.8. If the second call has other graph functions than the first, or results of other shapes or types. With
        ``lanes``, also if operations differ, in the body of a fork, and if an operation wrote memory and gave the stream no work.
        If the second call changes state: an attribute, a container, a closure, a global or a random generator, which the message
        names. Write state in place, in a single array. For a copy from the host, unless the driver's ``asarray`` makes the array,
        with equal bytes in both calls: such an array is a constant. The function's objects are left as its first call left them.
    DriverNotAvailableError
        With ``plans`` on the host driver.
    ArgumentError
        For ``lanes`` that are no integer from 1 to 32, and for ``plans`` that are neither True nor False. For a function that
        returns nothing, a generator or a coroutine. For iterators as arguments, which the first call would use up. For a list,
        tuple or dictionary that contains itself.
    ArrayTypeError
        For an array of objects that holds arrays.
    OutOfMemoryError
        When there is no memory for the graph.
    StateBusyError
        When every side stream of the device is in use.
    """
    if pool is None:
        # A method of `ParallelStates` uses the pool of its states.
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
    name = name_of_call(function)
    home = check_recordable(chosen, name, width, function)
    # The arguments are walked once. The walk by `leaves` ends even if a container contains itself.
    values = [*leaves(args, kwargs)]
    check_values(name, values, args, kwargs)
    picture = drawing.asked_for(name) if width is not None and os.environ.get(drawing.VARIABLE) else None
    inputs = Inputs(chosen.driver, args, kwargs)
    again = partial(_take, chosen, name, width, function, args, kwargs)
    tunings: tuple[Tuning, ...] = ()

    def tune_plans(first: FirstCall) -> None:
        nonlocal tunings
        tunings = _tuned(chosen, name, first, home)

    def finish(take: Take) -> Program:
        assert take.memory is not None
        # Only programs with several lanes can be tuned.
        own = again if width is not None and width > 1 else None
        made = Program(name, take.recording, inputs, take.outputs, home, take.memory, tunings, again=own)
        return _drawn(made, picture)

    return again(home, finish, values=values, counted=measured, between=tune_plans if measured else None)


def _take(
    pool: PoolInternals,
    name: str,
    width: int | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    home: StreamReference,
    finish: Callable[[Take], T],
    *,
    values: list[Any] | None = None,
    counted: bool = False,
    between: Callable[[FirstCall], object] | None = None,
) -> T:
    """Call a function for real, then under capture.

    Return the value of ``finish``.

    ``between`` is called between the two calls. If ``finish`` raises an error, nothing of the recording is left.
    """
    values = [*leaves(args, kwargs)] if values is None else values
    given = ContainerSnapshot(args, kwargs)
    before = State(pool.driver, function, args, kwargs, given.containers, values)
    first = FirstCall(pool, name, width, home, counted=counted)
    # The value is released at once, so that the arrays that remain are the arrays the function kept.
    check_returned(name, function, first.run(function, args, kwargs))
    given.check(name)
    before.check(name)
    first.end()
    if between is not None:
        between(first)

    def finished(recording: Recording, outputs: object) -> T:
        return finish(Take(recording, outputs, first.memory(recording, outputs), tuple(first.plans())))

    return first.capture(function, args, kwargs, given, values, home, finished, before=before)


def _tuned(pool: PoolInternals, name: str, first: FirstCall, home: StreamReference) -> tuple[Tuning, ...]:
    show = shown_progress(name, MOST_SECONDS)
    # The progress line is cleared also if the tuning fails.
    try:
        return tune_heaviest(pool, TUNED, first.plans(), home.pointer, MOST_SECONDS, show)
    finally:
        show(None)


def _drawn(program: Program, picture: Path | None) -> Program:
    """Draw a program if the environment asks for it; return it."""
    # There are no steps if all work is plain and the driver gives a single lane.
    if picture is not None and program.explain().steps:
        program.draw(picture, measure=False)
    return program


def check_recordable(pool: PoolInternals, name: str, lanes: int | None, function: object) -> StreamReference:
    """Check the function and its surroundings; return the caller's stream.

    The check comes before anything runs.

    Raises
    ------
    ArgumentError, CaptureError
    """
    if not callable(function):
        raise ArgumentError(f"record({shown(function)}): pass a function, and its arguments after it")
    if thread.recording is not None:
        raise CaptureError(
            f"{name} cannot be recorded inside a recording: call it there, and its work becomes part of that recording"
        )
    if thread.region is not None:
        raise CaptureError(f"{name} cannot be recorded inside a branch or a task: record it outside, and replay it there")
    if lanes is not None and open_order(pool.driver, pool.current_device()) is not None:
        raise CaptureError(
            f"{name} cannot be recorded with lanes in the body of a fork: record it before the fork, or without lanes"
        )
    # Steps that finalizers deferred may call CUDA, so they run before the capture.
    if deferred:
        deferred.run()
    driver = pool.driver
    home = resolve(driver)
    check_foreign(driver, home)
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(f"{name} cannot be recorded while the current stream is being captured: record it before")
    return home


def check_values(name: str, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the values among the arguments.

    Raises
    ------
    ArgumentError, ArrayTypeError
    """
    if [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple, dict))]:
        check_ends(f"{name} was given", args, kwargs)
    for value in values:
        if isinstance(value, MappingView):
            raise ArgumentError(f"{name} was given {shown(value)}, a view of a dictionary; pass the dictionary, or a list")
        if isinstance(value, Iterator):
            raise ArgumentError(f"{name} was given the iterator {shown(value)}, which its first call would use up; pass a list")
        if isinstance(value, np.ndarray) and value.dtype.hasobject and any(map(holds_values, value.ravel())):
            raise ArrayTypeError(f"{name} was given an array of objects, {shown(value)}; pass a list of arrays")
