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
    sources = iterables if out is None else (*iterables, out)
    given = out is not None
    calls: Iterable[tuple[Any, ...]] = zip(*sources, strict=False)
    results: list[T] = []
    graph = hasattr(function.func if type(function) is partial else function, "__handlepool_hit__")
    if graph and all(isinstance(source, (list, tuple, range)) for source in sources):
        # No code of the caller's runs between branches.
        known = calls = list(calls)
        if len(known) > 2:
            fork._used = None
            results.append(_run(fork, function, known.pop(0), given))
            if fork._used is not None and fork._leased:
                return results + _run_together(fork, function, known, given)
    return results + [_run(fork, function, call, given) for call in calls]


def _run(fork: "Fork", function: Callable[..., T], call: tuple[Any, ...], given: bool) -> T:
    return fork.run(function, *call[:-1], out=call[-1]) if given else fork.run(function, *call)


def _run_together(fork: "Fork", function: Callable[..., T], calls: list[tuple[Any, ...]], given: bool) -> list[T]:
    """Run branches that launch what the one before launched by a shortcut, as far as it does for them.

    All outputs are allocated before the edge that starts the branches (guarantee 8), so one edge for each state will do.
    """
    pool, keep, attempt = fork._pool, fork._region.keep, fork._used
    fresh = None if given else [attempt.allocate() for _ in calls]
    fixed = function.args if type(function) is partial else ()
    fork._start(1 + len(calls))

    def begin(operands: tuple[Any, ...], _: Any) -> Slot:
        keep(operands)
        slot = fork._state()
        assert slot is not None  # there is the first one's
        if pool.checked and slot.owner is None:
            own(pool.sound(slot))
        return slot

    results: list[T] = []
    for number, call in enumerate(calls):
        arrays, out = (call[:-1], call[-1]) if given else (call, None)
        result: T = attempt(begin, fixed + arrays, out, None if fresh is None else fresh[number])
        if result is MISSED:  # another geometry, say
            result = _run(fork, function, call, given)
        results.append(result)
    return results
