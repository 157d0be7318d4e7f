"""Hide an object from the walk over a call's arguments."""

from typing import Any


class Held:
    """Hold an object where the walk over arguments cannot find it.

    The walk over a call's arguments enters no objects of this package.
    """

    __slots__ = ("value",)

    value: Any

    def __init__(self, value: object) -> None:
        self.value = value
