"""`record`: a function is called once for real, and once with all that it gives to streams captured."""

from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from handlepool._util import as_integer, leaves, shown
from handlepool.drivers.protocol import LEGACY_STREAM
from handlepool.errors import ArgumentError, CaptureError
from handlepool.pool.context import run_on, thread
from handlepool.pool.default import chosen_pool
from handlepool.pool.deferred import defer, deferred, settle
from handlepool.pool.internals import PoolInternals
from handlepool.pool.pool import HandlePool
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.pool.stream import StreamReference, check_foreign, resolve
from handlepool.recording import drawing
from handlepool.recording.capture import Recording
from handlepool.recording.program import Program
from handlepool.recording.rehearsal import Rehearsal
from handlepool.recording.update import Inputs
from handlepool.regions.states import ParallelStates


def record(
    function: Callable[..., Any], /, *args: Any, pool: HandlePool | None = None, lanes: int | None = None, **kwargs: Any
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
        replay, and overwritten by `Program.update`, also where they are torch's tensors. It cannot write to arrays of other
        libraries; give what ``cupy.from_dlpack`` makes of them where it is to. What closures hold is kept alive as well, of the
        function and of those that are run in branches. What is read elsewhere (globals, attributes) the caller must keep.
    pool : HandlePool, optional
        What is given no pool in the function uses this one. By default it is that of the states for a method of
        `ParallelStates`, else the default pool. To give the function itself a parameter of this name, use `functools.partial`.
    lanes : int, optional
        1 to 32. The outermost calls of graph functions and operations become nodes that are ordered by their data alone, and at
        most so many of them run at once. They are recorded on as many lanes as the data allows, for which memory is taken; only 1
        takes the least. Forks, and whatever else is launched, stand after all before them, and before all after them;
        `Program.explain` says where. Memory goes to calls alone that come after its last users. The cuda driver does not arrange
        recordings yet: there are ``lanes`` lanes from the beginning, with more than one all memory is kept, and operations on
        torch's tensors are other work, in which torch may allocate nothing.
        By default the order of streams and forks is recorded. Where ``HANDLEPOOL_DRAW`` names a folder, each recording with lanes
        is drawn there, as by `Program.draw`.

    Returns
    -------
    Program
        Its ``outputs`` hold the values of the function's arguments from the first replay on.

    Raises
    ------
    CaptureError
        For what cannot be recorded, named; inside a capture, a recording, a branch or a task; where nothing was recorded. With
        ``lanes`` for calls that were others at the second call, and for an operation that wrote and gave no work to the stream.
    ArgumentError
        For ``lanes`` that are no integer from 1 to 32, for a function that returns nothing, a generator or a coroutine, and for
        iterators as arguments, which the first call would use up.
    OutOfMemoryError
        When there is no memory for the graph.
    StateBusyError
        When every side stream of the device is in use.
    """
    if pool is None:
        owner = getattr(function, "__self__", None)
        pool = owner.pool if isinstance(owner, ParallelStates) else None
    if lanes is not None and not 1 <= as_integer(lanes, 0) <= MOST_SIDE_SLOTS:
        raise ArgumentError(f"record(lanes={shown(lanes)}); it must be an integer from 1 to {MOST_SIDE_SLOTS}, or left out")
    chosen = chosen_pool("record", pool)
    chosen.status.check()
    names = [getattr(function, "__qualname__", None), getattr(function, "__name__", None)]
    name = next((name for name in names if isinstance(name, str)), type(function).__name__)
    home = _check(chosen, name, function, args, kwargs)
    picture = None if lanes is None else drawing.asked_for(name)
    driver = chosen.driver
    stream = home.stream or driver.wrap_stream(home.pointer, home.owner)
    inputs = Inputs(driver, args, kwargs)
    rehearsal = Rehearsal(chosen, home.pointer)
    first = run_on if lanes is None else partial(rehearsal.around, run_on)
    returned = first(chosen, stream, home.device, None, function, args, kwargs)
    if returned is None:
        raise _nothing(name)
    if isinstance(returned, (Generator, Coroutine)):
        returned.close()  # or Python warns that nobody awaited it
        raise ArgumentError(
            f"{name} returned a {type(returned).__name__}, of which nothing has run: pass a function that does the work and "
            f"returns arrays"
        )
    del returned
    recording = Recording(chosen, name, None if lanes is None else as_integer(lanes), rehearsal.calls)
    try:
        recording.kept.add(function, args, kwargs)
        outputs = recording.capture(function, args, kwargs)
        if outputs is None:
            raise _nothing(name)
        memory = recording.memory(function, args, kwargs, outputs)
        return _drawn(Program(name, recording, inputs, outputs, home, memory), picture)
    except BaseException:
        outputs, done = None, False
        try:
            done = recording.destroy()
        finally:
            if not done:
                defer(recording.settle)
        raise


def _drawn(program: Program, picture: Path | None) -> Program:
    """Return a program, after it was drawn where the environment asks for that."""
    if picture is not None and program.explain().steps:  # none where all work is plain and the driver gives one lane
        program.draw(picture, measure=False)
    return program


def _check(pool: PoolInternals, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StreamReference:
    """Check what can be checked before anything runs, and return the caller's stream."""
    if not callable(function):
        raise ArgumentError(f"record({shown(function)}): pass a function, and its arguments after it")
    if thread.recording is not None:
        raise CaptureError(f"{name} cannot be recorded inside a recording: call it there, and it becomes a part of that")
    if thread.region is not None:
        raise CaptureError(f"{name} cannot be recorded inside a branch or a task: record it outside, and replay it there")
    for value in leaves(args, kwargs):
        if isinstance(value, Iterator):
            raise ArgumentError(f"{name} was given the iterator {shown(value)}, which its first call would use up; pass a list")
    if deferred:
        settle()
    driver = pool.driver
    home = resolve(driver)
    check_foreign(driver, home)
    if home.pointer != LEGACY_STREAM and driver.capture_id(home.pointer):
        raise CaptureError(f"{name} cannot be recorded while the current stream is being captured: record it before")
    return home


def _nothing(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name} returned None, and a program's outputs are what its function returns: return the arrays that it writes"
    )
