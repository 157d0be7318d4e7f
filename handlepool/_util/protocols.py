"""Look for the protocols of other libraries' arrays, and unwrap our callables."""

from typing import Any

import numpy as np


class Wrapper:
    """A callable of this package that stands for a function.

    A search for arrays or state looks into the wrapped function.
    """

    __wrapped__: Any

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the value of a call that cannot run in a task.

        The call is made now, and the value is the list's only entry. The list is empty where a task can make the call.
        """
        return []

    def _request(self, pool: Any, requests: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call as a request, and return its future.

        None where the call has to be a task. ``task()`` makes the request's task.
        """


def has_protocol(value: object, name: str) -> bool:
    """Return whether an object, or its type, has an attribute.

    Unlike `hasattr`, it ignores ``__getattr__`` of instances, so that proxies that answer to any name do not match.
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
    # A class has the protocol's name as an attribute, and is no array.
    if isinstance(value, (type, np.generic)):
        return False
    return any(has_protocol(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))
