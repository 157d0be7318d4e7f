"""Look for the protocols by which other libraries show their arrays, and by which ours shows the function inside a callable."""

from typing import Any

import numpy as np


class Wrapper:
    """A callable of this package that stands for a function: whoever looks for arrays or state looks into the function."""

    __wrapped__: Any

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the value of a call that is made now, since it cannot be made in a task; nothing where that can be."""
        return []


def has_protocol(value: object, name: str) -> bool:
    """Whether an object has an attribute, its type's or its own; one that is made for any name asked, as by a proxy, is none."""
    if hasattr(type(value), name):
        return True
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and name in own


ARRAY_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")


def holds_values(value: object) -> bool:
    """Whether a value is an array, of whatever library; a NumPy scalar is none."""
    if isinstance(value, (type, np.generic)):
        return False
    return any(has_protocol(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))
