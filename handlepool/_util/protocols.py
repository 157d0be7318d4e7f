"""Detect protocols of other libraries' arrays, and mark callables that wrap functions."""

from typing import Any

import numpy as np


class Wrapper:
    """A callable of this package that wraps a function.

    If a search for arrays or state meets a `Wrapper`, the search goes on in the wrapped function.
    """

    __wrapped__: Any

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Make the call now if it cannot run in a task.

        Return a list with the call's value. If the call can run in a task, do not make it, and return an empty list.
        """
        return []

    def _request(self, pool: Any, requests: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enqueue a call for an executor, and return its future.

        Such a call is a request. If the call has to be a task, return None. ``task()`` makes the request's task.
        """


def has_protocol(value: object, name: str) -> bool:
    """Return whether an object, or its type, has an attribute.

    `hasattr` would call ``__getattr__``, and a proxy object may answer to any name. This function does not call ``__getattr__``,
    so such a proxy does not match.
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
    # A class of arrays has the protocols' attributes, but the class itself is no array.
    if isinstance(value, (type, np.generic)):
        return False
    return any(has_protocol(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))
