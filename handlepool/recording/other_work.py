"""What a recorded function gives to streams between two nodes: plain work, and forks, of which each is told of as one step."""

from collections.abc import Iterator
from itertools import groupby

from handlepool._util.frames import place_of_call

PLAIN = "no graph function and no operation: handlepool.operation declares one"
IN_ORDER = "recorded in the order of streams and forks"

Told = tuple[str, str, str]
"""What it is, why it is no node, and where."""


class _Fork:
    """A fork of the function's."""

    def __init__(self, at: int) -> None:
        self.at = at  # its place among other work
        self.branches = 0
        self.places: dict[str, None] = {}  # an ordered set
        self.states: int | None = None  # where it has fewer than it wanted
        self.wanted = 0

    def __str__(self) -> str:
        branches = "its branch" if self.branches == 1 else f"its {self.branches} branches"
        if self.states is None:
            return branches if self.branches == 1 else f"{branches} side by side"
        order = "one after the other" if self.states < 2 else "side by side"
        return f"{branches} {order} on {self.states} of {self.wanted} states: no more side streams of the device were free"


class OtherWork:
    """What was told of since the last node."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self._forks: dict[object, _Fork] = {}  # by what stands for each
        self._allocations: list[str] = []  # where memory was allocated

    def add(self, what: str, why: str = PLAIN) -> None:
        """Take note of work."""
        self._told.append((what, why, place_of_call()))

    def in_order(self, what: str, on_main: bool, fork: object) -> None:
        """Take note of work that is recorded in the order of streams and forks.

        ``on_main`` says whether it is given to the main stream. ``fork`` stands for the one that makes a branch.
        """
        last = next(reversed(self._forks.values()), None)
        if last is not None and (not on_main or (fork is None and last.states == 0)):
            return  # the branch was told of
        if fork is None:
            self.add(what, IN_ORDER)
            return
        if fork not in self._forks:
            self._forks[fork] = _Fork(len(self._told))
            self._told.append((what, IN_ORDER, ""))
        known = self._forks[fork]
        known.branches += 1
        known.places[place_of_call()] = None

    def lack(self, fork: object, states: int, wanted: int) -> None:
        """Take note of a fork that has fewer states than it wanted."""
        known = self._forks.get(fork)
        if known is not None and known.states is None:
            known.states, known.wanted = states, wanted

    def allocated(self, place: str) -> None:
        """Take note of where memory was allocated, which may be where work is that nobody told of."""
        self._allocations.append(place)

    def clear(self) -> None:
        """Begin anew."""
        if self._told:
            self._told.clear()
            self._forks.clear()
        if self._allocations:
            self._allocations.clear()

    def steps(self, last: str, place: str) -> Iterator[Told]:
        """Give what makes a step each; work that nobody told of is somewhere between the ``last`` node and a ``place``."""
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
        for (name, why, _), found in groupby(enumerate(told), lambda each: (*each[1][:2], each[0] in forks and each[0])):
            yield name, why, ", ".join(dict.fromkeys(where for _, (_, _, where) in found))
