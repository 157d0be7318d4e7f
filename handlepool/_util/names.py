"""Name types, functions and values in messages."""

import reprlib
from enum import Enum
from types import (
    BuiltinFunctionType,
    FunctionType,
)
from typing import Any

import numpy as np

from handlepool._util.protocols import holds_values

MOST_SHOWN = 100
"""The maximum number of characters of a value in a message."""

_SCALARS = (str, bytes, int, float, complex, Enum, np.bool_, np.number)
_PLAIN = (*_SCALARS, type(None), type, range, np.dtype, FunctionType, BuiltinFunctionType)


def kind_of(value: object) -> str:
    """Return the name of a type, or of a value's type.

    If the type is not built in, the name begins with the name of its module.
    """
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def name_of(function: object) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__qualname__", None) or f"a {kind_of(function)}")


def shown(value: object) -> str:
    """Return the text of a value for a message.

    An array is shown by its class, shape and type, and an object that may contain arrays by its class alone. Any other value is
    shown by its repr.
    """
    return _shortened.repr(value)


class _Shortened(reprlib.Repr):
    def repr1(self, x: object, level: int) -> str:
        if holds_values(x):
            return _described(x)
        for container in (tuple, list, dict, set, frozenset):
            if isinstance(x, container):
                text: str = getattr(self, f"repr_{container.__name__}")(x, level)
                return text
        # The `repr` of an unknown object may run any code, and may read arrays on the device. So only the type of such an
        # object is shown.
        kind: Any = type(x)
        # Torch's data types are recognized by their name, because this module must not import torch.
        harmless = kind.__repr__ is object.__repr__ or kind.__name__ == "dtype" or hasattr(kind, "__cuda_stream__")
        if not (harmless or isinstance(x, _PLAIN)):
            return f"<{kind_of(x)} object>"
        text = repr(x)
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


_shortened = _Shortened()


def _described(array: Any) -> str:
    try:
        geometry = f" of shape {tuple(map(int, array.shape))}, {array.dtype}"
    # The array may have no such attributes, or raise any error when they are read.
    except Exception:
        geometry = ""
    return f"<{kind_of(array)}{geometry}>"
