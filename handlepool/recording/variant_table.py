"""Keep the variants of a recorded function, and count calls by key."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from handlepool.recording.hits import Hit
from handlepool.recording.keys import Call
from handlepool.recording.variants import Variant

MOST_TRIED = 4
"""The maximum number of hits (see `handlepool.recording.hits`) that a call tries.

If no hit takes the arguments, the call goes the long way.
"""
MANY_VALUES = 8
"""The number of values of an argument that causes a warning.

The function was recorded anew for each value. The same number holds for a variable that the function reads.
"""
MOST_SEEN = 1024
"""The maximum number of keys whose calls are counted.

The key whose last call is oldest is forgotten first.
"""


@dataclass(frozen=True, slots=True)
class RecordedStats:
    """Counts of a recorded function.

    Attributes
    ----------
    keys : int
        Number of keys that have programs now.
    programs : int
        Number of programs that exist now: all instances of all keys.
    nbytes : int
        Bytes of device memory of these programs, for arrays and scratch.
    recorded : int
        Number of programs that were recorded so far.
    eager : int
        Number of calls that ran eagerly so far.
    closed : int
        Number of keys whose programs were closed, because other keys were used more recently or because an array was rebound.
    """

    keys: int
    programs: int
    nbytes: int
    recorded: int
    eager: int
    closed: int


class VariantTable:
    """The variants of a recorded function, with their hits.

    A hit is a generated function that serves known calls, see `handlepool.recording.hits`. Iteration over the table gives the
    variants in the order of their recording. It uses a copy, because another thread may change the table meanwhile.

    Attributes
    ----------
    by_key : dict
        The variants of each key, the latest first. Calls read this dictionary without the lock.
    hits : dict
        The hits that calls try, by the shape of the first argument. Calls read this dictionary without the lock, and keep a
        reference to it.
    closed : int
        Number of variants that were dropped.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple[Any, ...], list[Variant]] = {}
        self.hits: dict[Any, tuple[Hit, ...]] = {}
        self.closed = 0
        # Maps each variant to its hit, or to None if calls have no hit of this variant to try.
        self._order: dict[Variant, Hit | None] = {}
        self._seen: dict[Any, int] = {}
        # The lock guards changes of these dictionaries, which calls read without the lock. No code of the user runs under it.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Variant]:
        return iter([*self._order])

    def __contains__(self, variant: Variant) -> bool:
        return variant in self._order

    def insert(self, variant: Variant, most: int) -> list[Variant]:
        """Insert a new variant; return the variants to drop for it.

        A variant is returned if its pool has ended. If there are no such variants, and the table has more than ``most`` variants,
        the least recently used variant is returned. The caller drops the returned variants.
        """
        with self._lock:
            self.by_key.setdefault(variant.key, []).insert(0, variant)
            self._order[variant] = None
            dead = [each for each in self._order if each.pool.status.closed or each.pool.status.forked]
            if len(self._order) > most and not dead:
                dead.append(min(self._order, key=attrgetter("last")))
        return [each for each in dead if each is not variant]

    def keep_hit(self, variant: Variant, args: tuple[Any, ...]) -> None:
        """Let later calls try the variant's hit, if it has a hit."""
        hit, shape = variant.hit(args), getattr(args[0], "shape", None) if args else None
        if hit is None or hit in self.hits.get(shape, ()):
            return
        with self._lock:
            # If another thread has dropped the variant meanwhile, its hit must not be kept.
            if variant in self._order:
                known = [each for each in self.hits.get(shape, ()) if each is not self._order[variant]]
                self.hits[shape] = (hit, *known[: MOST_TRIED - 1])
                self._order[variant] = hit

    def drop(self, variant: Variant) -> None:
        """Forget a variant, and count the drop.

        Each program of the variant is destroyed once the device has finished the program's last call.
        """
        with self._lock:
            if variant not in self._order:
                return
            hit = self._order.pop(variant)
            self.closed += 1
            known = [each for each in self.by_key.get(variant.key, ()) if each is not variant]
            if known:
                self.by_key[variant.key] = known
            else:
                self.by_key.pop(variant.key, None)
            if hit is not None:
                # The tuple of a shape is replaced in one step, because calls read the dictionary without the lock.
                for shape, hits in [*self.hits.items()]:
                    if left := tuple([each for each in hits if each is not hit]):
                        self.hits[shape] = left
                    else:
                        del self.hits[shape]

    def see(self, what: object) -> int:
        """Count a call of ``what``, such as a key; return the count.

        Only the last `MOST_SEEN` keys are remembered.
        """
        with self._lock:
            seen = self._seen[what] = self._seen.pop(what, 0) + 1
            if len(self._seen) > MOST_SEEN:
                del self._seen[next(iter(self._seen))]
        return seen

    def many_values(self, call: Call) -> list[str]:
        """Return the names of plain arguments that had many values.

        The call is counted for each of its plain arguments. An argument had many values when `MANY_VALUES` keys differ only in
        the argument's value.
        """
        names = []
        for place, part in enumerate(call.key):
            value = part[1] if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) else part
            if isinstance(value, tuple) and len(value) == 2 and value[0] in (int, float, complex, str, bytes, bool):
                rest = place, (*call.key[:place], *call.key[place + 1 :])
                if self.see(rest) == MANY_VALUES:
                    names.append(part[0] if value is not part else f"argument {place - 1}")
        return names

    def stats(self, recorded: int, eager: int) -> RecordedStats:
        """Return all counts; ``recorded`` and ``eager`` are the caller's counts."""
        programs = [each.program for variant in self for each in variant.instances]
        keys = sum(bool(variant.instances) for variant in self)
        return RecordedStats(keys, len(programs), sum(each.nbytes for each in programs), recorded, eager, self.closed)

    def clear(self) -> None:
        """Drop all variants, and forget the counts of calls."""
        for variant in self:
            self.drop(variant)
        self._seen.clear()
