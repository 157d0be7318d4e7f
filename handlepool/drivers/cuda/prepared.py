"""Generate the code of a prepared call's copies for the cuda driver.

The code contains the program's addresses and sizes as numbers. A loop over arrays, with a function call for each copy, would cost
as much as the copies themselves.
"""

from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from itertools import accumulate, count
from typing import Any

import cupy
from cupy.cuda import runtime
from cupy.cuda.memory import OutOfMemoryError

from handlepool.drivers.cuda.edges import libcuda
from handlepool.drivers.cuda.fast_launch import BLOCK, MOST_TOGETHER, reach
from handlepool.drivers.cuda.locked import locked
from handlepool.drivers.prepared import Copies, Run


def _copied(target: int, source: int, nbytes: int, pointer: int) -> None:
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, pointer)


_move = locked(libcuda(), "cuMemcpyAsync", (c_uint64, c_uint64, c_size_t, c_void_p), _copied)

_TEXT = """\
def run(arrays, pointer, launch, begin=None):
    {arrays}
    mode = c_int({relaxed})
    if status := exchange(byref(mode)):
        check(status)
    try:
        {allocate}
    except OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    finally:
        if status := exchange(byref(mode)):
            check(status)
    if begin is not None:
        begin()
    {copies}
    return ({made})
"""


def prepared(
    copies: Copies,
    copy: Callable[[Any, Any], None],
    exchange: Callable[[Any], int],
    relaxed: int,
    check: Callable[[int], object],
) -> Run:
    """Return a function that enqueues a program's call; see `Driver.prepared`.

    Parameters
    ----------
    copies : Copies
    copy : callable
        Copies its second argument, an array with gaps, into its first argument.
    exchange : callable
        Exchanges the thread's capture mode, and returns a status.
    relaxed : int
        The capture mode in which an allocation harms no capture.
    check : callable
        Raises an error for a status other than 0.
    """
    bring, take = copies.runs()
    space: dict[str, Any] = {
        "c_int": c_int,
        "byref": byref,
        "exchange": exchange,
        "check": check,
        "OutOfMemoryError": OutOfMemoryError,
    }
    space |= {"copy": copy, "move": _move, "first": runtime.memcpyAsync, "ndarray": cupy.ndarray, "alloc": cupy.cuda.alloc}
    space |= {f"i{place}": each for place, each in enumerate(copies.inputs)}
    space |= {f"o{place}": each for place, each in enumerate(copies.outputs)}
    space |= {f"t{place}": each.dtype for place, each in enumerate(copies.outputs)}

    moves = count()

    def step(target: str, source: str, array: Any, run: bool, own: str) -> str:
        if not array.size:
            return "pass"
        if not run:
            return f"copy({target}, {source})"
        addresses = [str(array.data.ptr) if name == own else f"{name}.data.ptr" for name in (target, source)]
        given = f"{', '.join(addresses)}, {array.nbytes}"
        # The first copy frees Python's lock, and the later copies keep it. See `handlepool.drivers.cuda.locked`.
        return f"move({given}, pointer)" if next(moves) else f"first({given}, {runtime.memcpyDefault}, pointer)"

    # The stream keeps this order: the inputs are copied before the launch, and the outputs after the launch.
    steps = [step(f"i{at}", f"x{at}", each, bring[at], f"i{at}") for at, each in enumerate(copies.inputs)]
    steps.append("launch()")
    steps += [step(f"y{at}", f"o{at}", each, take[at], f"o{at}") for at, each in enumerate(copies.outputs)]
    steps += [step(f"x{at}", f"i{at}", copies.inputs[at], bring[at], f"i{at}") for at in copies.back]
    text = _TEXT.format(
        arrays=", ".join(f"x{at}" for at in range(len(copies.inputs))) + ", = arrays" if copies.inputs else "pass",
        relaxed=relaxed,
        allocate=_allocation(copies),
        copies="\n    ".join(steps),
        made="".join(f"y{at}, " for at in range(len(copies.outputs))),
    )
    exec(compile(text, "<a prepared call>", "exec"), space)
    # The function refers to its namespace. If the namespace also held the function, only the garbage collector could end this
    # cycle, and with it the program.
    made: Run = space.pop("run")
    return made


def _allocation(copies: Copies) -> str:
    """Return the code that allocates the results. Small results share a block."""
    reaches = [reach(each.shape, steps, each.dtype.itemsize) for each, steps in zip(copies.outputs, copies.steps, strict=True)]
    offsets = [*accumulate((-(-each // BLOCK) * BLOCK for each in reaches), initial=0)]
    together = len(reaches) > 1 and offsets[-1] <= MOST_TOGETHER
    made = [f"block = alloc({offsets[-1]})"] if together else []
    for at, (each, steps) in enumerate(zip(copies.outputs, copies.steps, strict=True)):
        memory = f"block + {offsets[at]}" if together else f"alloc({reaches[at]})"
        shape, strides = (tuple(map(int, lie)) for lie in (each.shape, steps))
        # If CuPy's constructor is given memory, it does not compute the size from the strides.
        made.append(f"y{at} = ndarray({shape}, t{at}, {memory}, {strides})")
    return "; ".join(made) or "pass"
