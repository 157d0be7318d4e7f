"""Call CUDA's driver and keep Python's lock.

CuPy's functions of the runtime free the lock around each call of CUDA, although such a call returns in microseconds. A thread
that has freed the lock gets it back only after other waiting threads. So a program's call would wait for the lock at each call of
CUDA.

If a stream's queue is full, a call of CUDA blocks until the GPU goes on. The GPU may wait for Python code on the host, and that
code would wait for the lock. So the first copy of a program's call frees the lock: if the queue is full, this copy blocks.
"""

import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_void_p
from typing import Any

from cupy.cuda import runtime


def locked(library: Any, name: str, types: Sequence[Any], again: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of CUDA's driver library that keeps Python's lock.

    Parameters
    ----------
    library : ctypes.PyDLL or None
        CUDA's driver library. If it is None, `locked` returns ``again``.
    name : str
        Name of the function in the library.
    types : sequence
        Types of the arguments.
    again : callable
        CuPy's runtime function with the same arguments. It is called if the function of the library fails. If no
        context was current, it makes the context current and so succeeds. It raises an error for any other failure.
    """
    if library is None:
        return again
    # Indexing a library makes a new function object, so the types and the check set below affect no other caller.
    function = library[name]
    function.argtypes, function.restype = types, c_int

    def check(status: int, _: object, args: tuple[Any, ...]) -> None:
        if status:
            again(*args)

    function.errcheck = check
    made: Callable[..., Any] = function
    return made


class _Flag(threading.local):
    """Hold each thread's output buffer for the capture query.

    The buffer is made once, because making a buffer takes longer than the query that fills it.
    """

    def __init__(self) -> None:
        self.value = c_int()
        self.place = byref(self.value)


def capture_query(library: Any) -> Callable[[int], bool]:
    """Return a function that tells whether a stream is being captured."""
    if library is None:
        return runtime.streamIsCapturing
    query, flag = library["cuStreamIsCapturing"], _Flag()
    query.argtypes, query.restype = (c_void_p, c_void_p), c_int

    def is_capturing(pointer: int) -> bool:
        if query(pointer, flag.place) or flag.value.value:
            # If the query failed or the capture was invalidated, this call of the runtime raises the error.
            return bool(runtime.streamIsCapturing(pointer))
        return False

    return is_capturing
