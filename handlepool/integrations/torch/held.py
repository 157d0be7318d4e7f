"""Hide an object from the walk over a call's arguments."""

from typing import Any


class Held:
    """Hide ``value`` from the walk over a call's arguments.

    Regions and recordings walk over the arguments to find arrays. The walk enters no objects of this package, so it does not
    reach ``value``.
    """

    __slots__ = ("value",)

    value: Any

    def __init__(self, value: object) -> None:
        self.value = value
