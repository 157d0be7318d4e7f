"""Implement `record`: call a function for real, then call it under capture.

In the second call, the GPU runs nothing. The capture notes all work that the function gives to streams.
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
"""The seconds after which no further plan is tried."""


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
    kernels. *So work in place happens once before the first replay*. The second call is under stream capture, and the GPU runs
    nothing. Forks become parallel branches of the recorded graph.

    Parameters
    ----------
    function : callable
        Gives work to the current stream and to streams that are forked from this stream: `ParallelStates.map`, a body with forks,
        graph functions, CuPy code. The function must give the same work each time. It must not wait for the GPU or read values on
        the host. It must not copy from host memory, because each replay would read the host memory again.
    *args, **kwargs
        Arguments of the function. Arrays among the arguments, also in lists, tuples and dictionaries, are the inputs. The program
        keeps the inputs alive, and each replay reads the inputs. `Program.update` and calls of the program overwrite the inputs,
        including torch's tensors: after ``program(x2)`` the ``x`` that was given here holds the values of ``x2``. To keep the
        values of ``x``, give ``x.copy(order="K")``, which keeps the layout; ``x.copy()`` would make it contiguous. Arrays of
        libraries other than torch cannot be overwritten: convert them by ``cupy.from_dlpack`` first. The program also keeps alive
        the objects in closures of the function and of functions that run in branches. The caller must keep alive the arrays that
        the function reads from globals or attributes.
    pool : HandlePool, optional
        Pool for all calls in the function that are not given another pool. If ``function`` is a method of `ParallelStates`, the
        default is the pool of these states. For any other function it is the default pool. If the function itself has a parameter
        ``pool``, set that parameter by `functools.partial`.
    lanes : int, optional
        The maximum number of nodes that run at once, 1 to 32. The outermost calls of graph functions and operations become nodes.
        A node waits only for nodes whose data or memory it uses. Give 8 or 16; `Program.tune` later finds the best number, also
        above 16. The nodes are recorded on as many lanes as the data allows, up to 31. Each lane leases a side slot during the
        recording. `Program.nbytes` counts the memory of all these lanes, even if ``lanes`` is smaller. Only ``lanes=1`` saves
        memory, but such a program cannot be tuned. Forks and any other work run after everything recorded before them and before
        everything recorded after them; `Program.explain` names such work. Memory is reused only by calls that come after its last
        users. Without ``lanes``, the program keeps the order of streams and forks. If ``HANDLEPOOL_DRAW`` names a folder, a
        picture of each recording with lanes is written there, as by `Program.draw`.
    plans : bool
        Between the two calls, choose better plans for the graph functions that take most of the time. Each plan is timed alone,
        over random arrays, as in `tune`. The present plan stays unless another plan is quicker by 3 %. Later calls of the graph
        functions with arrays of the same geometry use the quicker plan. The timing waits for the GPU. After 10 seconds no further
        plan is tried. `Program.tunings` holds the results. On a terminal, the progress is shown.

    Returns
    -------
    Program
        The program. Its ``outputs`` hold the function's results once the program has been replayed.

    Raises
    ------
    CaptureError
        If the function gives work that cannot be recorded, which the message names, or no work. If `record` is called inside a
        capture, a recording, a branch or a task. If it is called inside ``torch.cuda.use_mem_pool``, because torch then takes all
        memory from that pool. If torch uses the GPU and is older than 2.8. If the second call makes other calls of graph
        functions than the first, or returns results of other shapes or types. With ``lanes``, also if the calls of operations
        differ, if `record` is called in the body of a fork, or if an operation writes memory but gives the stream no work. If the
        second call changes state, which the message names: an attribute, a container, a closure, a global or a random generator.
        Write state in place, in a single array. If the function copies from the host. It may do so only by the driver's
        ``asarray`` with equal bytes in both calls: such an array is a constant. After the error, the function's objects are as
        the first call left them.
    DriverNotAvailableError
        With ``plans`` on the host driver.
    ArgumentError
        If ``lanes`` is no integer from 1 to 32, or ``plans`` is neither True nor False. If the function returns None, a generator
        or a coroutine. If an argument is an iterator, because the first call would use it up. If a list, tuple or dictionary
        contains itself.
    ArrayTypeError
        If an argument is an array of objects that holds arrays.
    OutOfMemoryError
        If there is not enough memory for the graph.
    StateBusyError
        If every side stream of the device is in use.
    """
    if pool is None:
        # A method of `ParallelStates` uses the pool of its states.
        owner = getattr(function, "__self__", None)
        pool = owner.pool if isinstance(owner, ParallelStates) else None
    width = lanes if lanes is None or type(lanes) is int else as_integer(lanes, 0)
    if width is not None and not 1 <= width <= MOST_SIDE_SLOTS:
        raise ArgumentError(
            f"record(lanes={shown(lanes)}); the number of lanes must be an integer from 1 to {MOST_SIDE_SLOTS}, or left out"
        )
    measured = plans is True or (plans is not False and flag("record: plans", plans))
    chosen = chosen_pool("record", pool)
    if chosen.status.unusable:
        chosen.status.check()
    if measured:
        check_gpu(chosen.driver, TUNED)
    name = name_of_call(function)
    home = check_recordable(chosen, name, width, function)
    # The values inside the arguments are collected once for all checks. `leaves` ends even if a container contains itself.
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

    ``between`` is called between the two calls. ``finish`` takes the recording and makes the value that is returned. If
    ``finish`` raises an error, the recording is destroyed.
    """
    values = [*leaves(args, kwargs)] if values is None else values
    given = ContainerSnapshot(args, kwargs)
    before = State(pool.driver, function, args, kwargs, given.containers, values)
    first = FirstCall(pool, name, width, home, counted=counted)
    # The returned value is not kept here. So if an array of the first call is still alive, the function has kept it.
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
    # The progress line on the terminal is cleared even if the tuning fails.
    try:
        return tune_heaviest(pool, TUNED, first.plans(), home.pointer, MOST_SECONDS, show)
    finally:
        show(None)


def _drawn(program: Program, picture: Path | None) -> Program:
    """Draw a program to ``picture`` unless that is None; return the program."""
    # If all work is plain and the driver cannot choose dependencies, the program has no steps to draw.
    if picture is not None and program.explain().steps:
        program.draw(picture, measure=False)
    return program


def check_recordable(pool: PoolInternals, name: str, lanes: int | None, function: object) -> StreamReference:
    """Check that recording is possible here; return the caller's stream.

    The check comes before the function's first call.

    Raises
    ------
    ArgumentError, CaptureError
    """
    if not callable(function):
        raise ArgumentError(f"record({shown(function)}): the argument is not callable; pass a function, and then its arguments")
    if thread.recording is not None:
        raise CaptureError(
            f"{name} cannot be recorded inside another recording: call {name} itself there, so that its work becomes part of the "
            "other recording"
        )
    if thread.region is not None:
        raise CaptureError(
            f"{name} cannot be recorded inside a branch or a task: record it before, and replay the program in the branch or task"
        )
    if lanes is not None and open_order(pool.driver, pool.current_device()) is not None:
        raise CaptureError(
            f"{name} cannot be recorded with lanes in the body of a fork: record it before the fork, or record it without lanes"
        )
    # Deferred steps may make CUDA calls that a capture does not allow, so they run before the capture.
    if deferred:
        deferred.run()
    driver = pool.driver
    home = resolve(driver)
    check_foreign(driver, home)
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(
            f"{name} cannot be recorded while the current stream is being captured: record it before that capture begins"
        )
    return home


def check_values(name: str, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments whose values a second call could not read again.

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
            raise ArgumentError(
                f"{name} was given the iterator {shown(value)}, which the first call of the function would use up; pass a list"
            )
        if isinstance(value, np.ndarray) and value.dtype.hasobject and any(map(holds_values, value.ravel())):
            raise ArrayTypeError(
                f"{name} was given {shown(value)}, an array of objects that holds arrays; pass a list of these arrays"
            )
