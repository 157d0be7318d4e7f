"""Decorate functions that are recorded by their calls."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

from handlepool._util.arguments import as_integer, at_least, flag
from handlepool._util.names import shown
from handlepool.errors import ArgumentError
from handlepool.pool.side_streams import MOST_SIDE_SLOTS
from handlepool.recording.first_call import name_of_call
from handlepool.recording.recorded import RecordedFunction
from handlepool.recording.variants import Options

P = ParamSpec("P")
R = TypeVar("R")


def _places(function: Any, names: Any) -> frozenset[int | str]:
    """Return the positions and names of the parameters in ``names``.

    The program reads the arguments for these parameters in place.
    """
    given, names = names, (names,) if isinstance(names, str) else tuple(names)
    try:
        known = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        known = []
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ArgumentError(
                f"recorded: in_place={shown(given)}; in_place must be names of parameters, and {name_of_call(function)} has "
                f"({', '.join(known)})"
            )
    return frozenset([*names, *[known.index(name) for name in names]])


@overload
def recorded(
    function: Callable[P, R],
    /,
    *,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
) -> RecordedFunction[P, R]: ...


@overload
def recorded(
    *,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
) -> Callable[[Callable[P, R]], RecordedFunction[P, R]]: ...


def recorded(
    function: Any = None,
    /,
    *args: object,
    lanes: int | None = 8,
    instances: int = 4,
    programs: int = 16,
    outputs: str = "new",
    in_place: str | Iterable[str] = (),
    strict: bool = False,
    **others: object,
) -> Any:
    """Return a function that records a program for each geometry.

    The result is called like ``function``, with any arguments, from any thread. The first call with arrays of a geometry runs the
    function for real and records it, see `record`. Later calls copy their arguments into the program, launch it, and return
    copies of its outputs. `recorded` can also be used as a decorator, with and without options, for functions, methods and
    callable objects.

    Parameters
    ----------
    function : callable
        The function must give the same work each time. If it cannot be recorded, it runs eagerly, and a single warning is given.
    *args, **others
        Not allowed, because arguments of the function belong into a call of the result.
    lanes : int or None
        As in `record`.
    instances : int
        Maximum number of programs for one key. At most this number of calls on different streams overlap.
    programs : int
        Maximum number of keys. If a new key exceeds this number, the programs of the least recently used key are closed.
    outputs : {"new", "reused"}
        With "new", a call returns new arrays. With "reused", it returns the program's own arrays, which are valid until this
        thread calls the function again on the same stream.
    in_place : str or iterable of str
        Names of parameters whose arrays the program reads in place, without a copy. If a call passes another array for such a
        parameter, it has another key.
    strict : bool
        Whether a call raises an error if the function cannot be recorded.

    Returns
    -------
    RecordedFunction

    Raises
    ------
    ArgumentError
        If ``function`` is not callable, or is a generator function or a coroutine function. If arguments of the function are
        given. If an option has an invalid value.
    """
    if args or others:
        raise ArgumentError(
            "recorded takes a function and options, and was also given arguments of the function: pass the arguments to the "
            "result of recorded(function), or use record(function, *args)"
        )
    if lanes is not None and not 1 <= as_integer(lanes, 0) <= MOST_SIDE_SLOTS:
        raise ArgumentError(f"recorded(lanes={shown(lanes)}); lanes must be an integer from 1 to {MOST_SIDE_SLOTS}, or None")
    if outputs not in ("new", "reused"):
        raise ArgumentError(f"recorded(outputs={shown(outputs)}); outputs must be 'new' or 'reused'")
    counts = at_least(1, "recorded: instances", instances), at_least(1, "recorded: programs", programs)
    strictly = flag("recorded: strict", strict)

    def made(function: Any) -> Any:
        if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
            raise ArgumentError(f"recorded({shown(function)}): the argument is not callable; pass a function")
        inner = getattr(function, "__func__", function)
        for test, what in (
            (inspect.isgeneratorfunction, "a generator function"),
            (inspect.iscoroutinefunction, "a coroutine function"),
            (inspect.isasyncgenfunction, "an asynchronous generator function"),
        ):
            if test(inner) or test(getattr(type(inner), "__call__", None)):  # noqa: B004 - about the method
                raise ArgumentError(
                    f"recorded: {name_of_call(inner)} is {what}: pass a function that does the work and returns arrays"
                )
        places = _places(function, in_place)
        options = Options(function, name_of_call(function), lanes, *counts, outputs == "reused", strictly, places)
        return RecordedFunction(options)

    return made if function is None else made(function)
