"""Collect the other work of a recorded function: work between two nodes.

Other work is plain work (calls that are no nodes) and forks. Each fork becomes one step of the recording.
"""

from collections.abc import Iterator
from itertools import groupby

from handlepool._util.frames import place_of_call

PLAIN = "the work is no graph function and no operation: declare an operation by handlepool.operation"
IN_ORDER = "recorded in the order of streams and forks"

Told = tuple[str, str, str]
"""A step of other work, as (name, reason, place).

The reason says why the work is no node.
"""


class _Fork:
    """A fork that the recorded function opened."""

    def __init__(self, at: int) -> None:
        # Index of the fork's entry in the list of other work.
        self.at = at
        self.branches = 0
        # The dictionary serves as an ordered set, so the places of the branches stay in the order of their calls.
        self.places: dict[str, None] = {}
        # The number of states is None, unless the fork got fewer states than it wanted.
        self.states: int | None = None
        self.wanted = 0

    def __str__(self) -> str:
        branches = "its branch" if self.branches == 1 else f"its {self.branches} branches"
        if self.states is None:
            return branches if self.branches == 1 else f"{branches} side by side"
        order = "one after the other" if self.states < 2 else "side by side"
        return f"{branches} {order} on {self.states} of {self.wanted} states: no more side streams of the device were free"


class OtherWork:
    """Collect the other work since the last node."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        # The key is the object that `in_order` got for a fork.
        self._forks: dict[object, _Fork] = {}
        # The places in the function that allocated memory since the last node.
        self._allocations: list[str] = []

    def add(self, what: str, why: str = PLAIN) -> None:
        """Add a step of other work, with the place of its call."""
        self._told.append((what, why, place_of_call()))

    def in_order(self, what: str, on_main: bool, fork: object) -> None:
        """Note work that is recorded in the order of streams and forks.

        ``on_main`` says whether the work was given to the main stream. If the work is the start of a branch, ``fork`` is an
        object that identifies the branch's fork; otherwise ``fork`` is None.
        """
        last = next(reversed(self._forks.values()), None)
        if last is not None and (not on_main or (fork is None and last.states == 0)):
            # The work is inside a branch of the last fork, and the entry of that fork stands for it.
            return
        if fork is None:
            self.add(what, IN_ORDER)
            return
        if fork not in self._forks:
            # A fork gets one entry, at its first branch. Each further branch only raises the count of branches.
            self._forks[fork] = _Fork(len(self._told))
            self._told.append((what, IN_ORDER, ""))
        known = self._forks[fork]
        known.branches += 1
        known.places[place_of_call()] = None

    def note_short_fork(self, fork: object, states: int, wanted: int) -> None:
        """Note that a fork asked for ``wanted`` states and got ``states``."""
        known = self._forks.get(fork)
        if known is not None and known.states is None:
            known.states, known.wanted = states, wanted

    def allocated(self, place: str) -> None:
        """Note the place of an allocation.

        If the recording finds work that no caller reported, `steps` names this place, because the work may be near it.
        """
        self._allocations.append(place)

    def steps(self, last: str, place: str) -> Iterator[Told]:
        """Yield the name, reason and place of each step of other work.

        ``last`` is the place of the last node, and ``place`` the place of the next node. If no caller reported the work, the
        step's place is a text such as "between a.py:3 and a.py:9".
        """
        if not self._told:
            where = f"between {last} and {place}"
            if known := [each for each in dict.fromkeys(self._allocations) if each not in (place, last)]:
                where += f", maybe where memory was allocated: {', '.join(known)}"
            yield "other work", PLAIN, where
            return
        told, forks = [*self._told], {fork.at for fork in self._forks.values()}
        for fork in self._forks.values():
            name, why, _ = told[fork.at]
            told[fork.at] = name, f"{why}, {fork}", ", ".join(fork.places)
        # Neighbouring entries with the same name and reason become one step. But a fork is never joined with its neighbours.
        for (name, why, _), found in groupby(enumerate(told), lambda each: (*each[1][:2], each[0] in forks and each[0])):
            yield name, why, ", ".join(dict.fromkeys(where for _, (_, _, where) in found))
