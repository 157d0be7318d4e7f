"""Detect protocols of other libraries' arrays, and mark callables that wrap functions."""

from typing import Any

import numpy as np


class Wrapper:
    """A callable of this package that wraps a function.

    A search for arrays or state continues in the wrapped function.
    """

    __wrapped__: Any

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Make a call that cannot run in a task.

        If the call can run in a task, return an empty list. Otherwise make the call now, and return a list with its value.
        """
        return []

    def _request(self, pool: Any, requests: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call as a request, and return its future.

        None where the call has to be a task. ``task()`` makes the request's task.
        """


def has_protocol(value: object, name: str) -> bool:
    """Return whether an object, or its type, has an attribute.

    Unlike `hasattr`, the function does not call ``__getattr__``. So a proxy that answers to any name does not match.
    """
    if hasattr(type(value), name):
        return True
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and name in own


ARRAY_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")


def holds_values(value: object) -> bool:
    """Return whether a value is an array of any library.

    A NumPy scalar is not an array.
    """
    # A class of arrays has the protocol's attributes, but is itself no array.
    if isinstance(value, (type, np.generic)):
        return False
    return any(has_protocol(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))
