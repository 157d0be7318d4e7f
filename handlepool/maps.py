"""Maps: the branches of one function over many arguments, which can start together where they are a graph function's."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from handlepool.calls import MISSED
from handlepool.slots import Slot, own

if TYPE_CHECKING:
    from handlepool.forks import Fork

T = TypeVar("T")


def over(fork: "Fork", function: Callable[..., T], iterables: tuple[Iterable[Any], ...], out: Iterable[Any] | None) -> list[T]:
    """See `Fork.map`."""
    given = out is not None
    sources = (*iterables, out) if out is not None else iterables
    calls: Iterable[Any] = zip(*sources, strict=False)
    pairs: Iterable[tuple[tuple[Any, ...], Any]] = ((call[:-1], call[-1]) if given else (call, None) for call in calls)
    graph = hasattr(function.func if type(function) is partial else function, "__handlepool_hit__")
    results: list[T] = []
    if graph and all(isinstance(source, (list, tuple, range)) for source in sources):
        # No code of the caller's runs between branches.
        known = list(pairs)
        if len(known) > 2:
            fork._used = None
            results.append(_run(fork, function, *known.pop(0), given))
            if fork._used is not None and fork._leased:
                return results + _run_together(fork, function, known, given)
        pairs = known
    return results + [_run(fork, function, call, y, given) for call, y in pairs]


def _run(fork: "Fork", function: Callable[..., T], call: tuple[Any, ...], out: Any, given: bool) -> T:
    return fork.run(function, *call, out=out) if given else fork.run(function, *call)


def _run_together(fork: "Fork", function: Callable[..., T], calls: list[tuple[tuple[Any, ...], Any]], given: bool) -> list[T]:
    """Run branches that launch what the one before launched by a shortcut, as far as it does for them.

    All outputs are allocated before the edge that starts the branches (guarantee 8), so one edge for each state will do.
    """
    pool, leased, attempt = fork._pool, fork._leased, fork._used
    keep = (fork._kept if fork._region is None else fork._region.kept).append
    fresh: list[Any] = [None if given else attempt.allocate() for _ in calls]
    fixed = function.args if type(function) is partial else ()
    fork._start(fork._next + len(calls))

    def begin(operands: tuple[Any, ...], _: Any) -> Slot:
        # Only states that are leased by now: another one would not have been started.
        keep(operands)
        index = fork._next
        if index >= len(leased):
            index = 0
        fork._next = index + 1
        slot = leased[index]
        if pool.checked and slot.owner is None:
            own(pool.sound(slot))
        return slot

    results: list[T] = []
    for (call, y), made in zip(calls, fresh, strict=True):
        result: T = attempt(begin, fixed + call if fixed else call, y, made)
        if result is MISSED:  # another geometry, say
            result = _run(fork, function, call, y, given)
        results.append(result)
    return results
