"""Name the arguments of a call in messages."""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from handlepool._util.reachable import attributes, bound_call, content, leaves

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional arguments and its keyword arguments.

If the function is a bound method, its object is not among the arguments.
"""
ADVICE = 'for example with @handlepool.operation(mutates="x")'
UNNAMED = "one of its arrays"


def named_values(call: Call) -> dict[str, Any]:
    """Return the values that a call can reach, by name.

    The values are the call's arguments, the attributes of the method's object, and the variables of the function's closure.
    """
    function, args, kwargs = call
    try:
        named = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # Some callables, such as built-in functions, have no signature. Their arguments are named by position.
        named = {str(index): value for index, value in enumerate(args)} | kwargs
    values = {f"argument {name}": value for name, value in named.items()}
    bound = bound_call(function)
    if isinstance(bound, MethodType):
        owner = bound.__self__
        values |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
        # The object of a class method is the class. The attributes of a class are code, so no array is looked for there.
        if not isinstance(owner, type):
            values |= {"self": attributes(owner)}
        bound = bound.__func__
    # A decorator's wrapper has a closure of its own. So the names come from the closure of the innermost function.
    inner = inspect.unwrap(bound)
    if isinstance(inner, FunctionType):
        cells = zip(inner.__code__.co_freevars, map(content, inner.__closure__ or ()), strict=True)
        values |= {f"{name} of its closure": value for name, value in cells}
    return values


def name_of_array(array: Any, call: Call) -> str:
    """Return the name of ``array`` for messages about ``call``."""
    for name, value in named_values(call).items():
        if any(leaf is array for leaf in leaves(value, calls=True)):
            return name
    return UNNAMED
