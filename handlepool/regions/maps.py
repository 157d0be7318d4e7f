"""Maps: the branches of one function over many arguments, which can start together where they are a graph function's."""

from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from handlepool.pool.context import NO_LAUNCHER, NOT_CACHED, launchers
from handlepool.pool.slot import Slot, own

if TYPE_CHECKING:
    from handlepool.regions.fork import Fork

T = TypeVar("T")


def over(fork: "Fork", function: Callable[..., T], iterables: tuple[Iterable[Any], ...], out: Iterable[Any] | None) -> list[T]:
    """See `Fork.map`."""
    given = out is not None
    sources = (*iterables, out) if out is not None else iterables
    calls: Iterable[tuple[Any, ...]] = zip(*sources, strict=False)
    # No code of the caller's runs between branches over these.
    if all(isinstance(source, (list, tuple, range)) for source in sources):
        calls = list(calls)
        results = _run_together(fork, function, calls, given) if len(calls) > 1 else None
        if results is not None:
            return results
    return [_run(fork, function, call, given) for call in calls]


def _run(fork: "Fork", function: Callable[..., T], call: tuple[Any, ...], given: bool) -> T:
    return fork.run(function, *call[:-1], out=call[-1]) if given else fork.run(function, *call)


def _run_together(fork: "Fork", function: Callable[..., T], calls: list[tuple[Any, ...]], given: bool) -> list[T] | None:
    """Run branches that each launch one known plan, and no Python; None where the first one does not.

    All outputs are allocated before the edge that starts the branches (guarantee 8), so one edge for each state will do.
    """
    pool = fork._pool
    bare, fixed, keywords = (function.func, function.args, function.keywords) if type(function) is partial else (function, (), {})
    kind = type(bare)
    hit, _ = launchers.get(bare if kind is FunctionType else kind, NO_LAUNCHER)
    if hit is None or (keywords and any(hasattr(value, "shape") for value in keywords.values())):
        return None  # a shortcut does not add the arrays of a partial's keywords
    if fork._thread != get_ident() or pool.unusable or fork._inherited:
        fork._refuse()
    if pool.current_device() != fork._ordinal or fork._driver.current_stream(fork._ordinal) is not fork._stream:
        return None
    leased = fork._leased
    keep = (fork._kept if fork._region is None else fork._region.kept).append
    attempt: Any = None  # what the first branch launches by
    fresh: list[Any] = []

    def start(operands: tuple[Any, ...], launch: Any) -> Slot:
        nonlocal attempt
        attempt = launch
        if not given:
            fresh.extend(launch.allocate(len(others)))
        elif first[-1] is None:  # or it launches for nobody without an output
            fresh.extend([None if call[-1] is not None else launch.allocate(1)[0] for call in others])
        else:
            fresh.extend([None] * len(others))
        fork._start(fork._next + len(calls))
        return begin(operands, launch)

    def begin(operands: tuple[Any, ...], _: Any) -> Slot:
        keep(operands)
        if not leased:  # every side slot is out
            return pool.slot(fork._stream)
        index = fork._next
        if index >= len(leased):  # only states that have been started
            index = 0
        fork._next = index + 1
        slot = leased[index]
        if pool.checked and slot.owner is None:
            own(pool.sound(slot))
        return slot

    first, *others = calls
    arrays, options = (first[:-1], {**keywords, "out": first[-1]}) if given else (first, keywords)
    results = [hit(bare, pool, start, fixed + arrays, options)]
    if results[0] is NOT_CACHED:
        return None
    for call, made in zip(others, fresh, strict=True):
        arrays, out = (call[:-1], call[-1]) if given else (call, None)
        result = attempt(begin, fixed + arrays, out, made)
        if result is NOT_CACHED:  # another geometry, say
            result = _run(fork, function, call, given)
        results.append(result)
    return results
