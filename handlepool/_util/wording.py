"""How messages show what a caller passed: shortened, and never an array's values."""

import reprlib
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from handlepool._util.protocols import has

ARRAY_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
MOST_SHOWN = 100
"""Characters of a value."""

_SCALARS = (str, bytes, int, float, complex, Enum, np.bool_, np.number)
_PLAIN = (*_SCALARS, type(None), type, range, np.dtype, FunctionType, BuiltinFunctionType)


def kind_of(value: object) -> str:
    """The name of a type, or of a value's type, with its module's."""
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def holds_values(value: object) -> bool:
    """Whether a value is an array, of whatever library; a NumPy scalar is none."""
    if isinstance(value, (type, np.generic)):
        return False
    return any(has(value, protocol) for protocol in (*ARRAY_PROTOCOLS, "__array__"))


def shown(value: object) -> str:
    """A value for a message: an array by its kind, shape and type, what may show one by its kind, all else as it shows itself."""
    return _shortened.repr(value)


class _Shortened(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        if holds_values(x):
            return _described(x)
        for container in (tuple, list, dict, set, frozenset):
            if isinstance(x, container):
                text: str = getattr(self, f"repr_{container.__name__}")(x, level)
                return text
        kind: Any = type(x)
        if not (isinstance(x, _PLAIN) or kind.__repr__ is object.__repr__ or kind.__name__ == "dtype"):  # torch's
            return f"<{kind_of(x)} object>"
        text = repr(x)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


_shortened = _Shortened()


def _described(array: Any) -> str:
    try:
        geometry = f" of shape {tuple(map(int, array.shape))}, {array.dtype}"
    except Exception:  # its library calls them otherwise, or does not tell
        geometry = ""
    return f"<{kind_of(array)}{geometry}>"
