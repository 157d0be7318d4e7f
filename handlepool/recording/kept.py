"""What a program keeps alive because its graph reads it: all that can be reached from the calls that were recorded."""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from handlepool.regions.memory import content


class Kept:
    """Values to live as long as a program.

    A branch's arguments, and what its function's closure holds, are kept to the join alone where it runs eagerly: a stream waits
    for it there. A graph reads them at each replay.

    Parameters
    ----------
    holds : callable
        Whether a value is in the recording's own memory. That lives as long anyway, and what is not needed any more must not be
        kept: the recording gives its memory to what is allocated next.
    """

    def __init__(self, holds: Callable[[object], bool]) -> None:
        self._holds = holds
        self._values: dict[int, object] = {}

    def add(self, *values: object) -> None:
        """Keep what can be reached from values through containers, closures, defaults, partial and bound functions.

        Objects of other types are kept as a whole, with all that they have by then.
        """
        left, seen = list(values), {}
        while left:
            value: Any = left.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, (list, tuple, set, frozenset)):
                left.extend(value)
            elif isinstance(value, dict):
                left.extend(value.values())
            elif type(value) is partial:
                left += (value.func, value.args, value.keywords)
            elif isinstance(value, MethodType):
                left += (value.__self__, value.__func__)
            elif isinstance(value, FunctionType):
                left += (value.__defaults__, value.__kwdefaults__, *map(content, value.__closure__ or ()))
            elif not self._holds(value):
                self._values[id(value)] = value

    def take(self) -> dict[int, object]:
        """Take everything out, to be let go of where that may run code of the user's."""
        values, self._values = self._values, {}
        return values
