"""Hide an object from the walk over a call's arguments."""

from typing import Any


class Held:
    """Hold an object that the walk does not enter.

    The walk over a call's arguments enters no objects of this package.
    """

    __slots__ = ("value",)

    value: Any

    def __init__(self, value: object) -> None:
        self.value = value
