"""Make elementwise kernels from Python functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, reduce, update_wrapper
from typing import Any, cast

import numpy as np

from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.drivers.expression import Elementwise, bits_of
from handlepool.errors import ArgumentError, TraceError
from handlepool.graphs.annotations import ArrayT
from handlepool.graphs.expression import VOCABULARY, Traced, as_number, trace
from handlepool.graphs.kernels import Described, KernelFunction, check_strides, dense
from handlepool.graphs.launch import launches
from handlepool.ops.activations import check_activation
from handlepool.pool.context import LAUNCHES, BranchPlace, thread
from handlepool.pool.pool import HandlePool
from handlepool.tensors.inference import axis_order
from handlepool.tensors.layout import Layout

NUMBERS = (int, float, complex, np.generic)
"""Types of numbers, as opposed to arrays."""
_RESERVED = ("out", "pool")


class Arguments:
    """Hold a call's numbers and options, for a plan's key.

    Attributes
    ----------
    numbers : tuple of int or None
        For each positional argument, the bits of a number, or None for an array.
    options : dict
        The keyword arguments.
    """

    __slots__ = ("_hash", "_key", "numbers", "options")

    def __init__(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.numbers = tuple([_bits(name, place, arg) if isinstance(arg, NUMBERS) else None for place, arg in enumerate(args)])
        self.options = options
        # The options are sorted, so that the order of the keywords does not matter.
        self._key = self.numbers, tuple([(option, _exact(value)) for option, value in sorted(options.items())])
        try:
            # The hash is computed once, because every look-up of a plan needs it.
            self._hash = hash(self._key)
        except TypeError:
            raise _unhashable(name, options) from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Arguments and other._key == self._key


def _bits(name: str, place: int, number: object) -> int:
    return bits_of(as_number(f"{name}: argument {place}", number))


def _exact(value: object) -> Any:
    """Return a key that distinguishes equal values, such as 0.0 and -0.0."""
    if isinstance(value, (float, np.floating)):
        return type(value), float(value).hex()
    return (type(value), tuple(map(_exact, value))) if isinstance(value, tuple) else (type(value), value)


def _unhashable(name: str, options: dict[str, Any]) -> ArgumentError:
    for option, value in options.items():
        if holds_values(value):
            return ArgumentError(
                f"{name} was given {option}={shown(value)} by keyword, but keywords are constants of the kernel; pass arrays by "
                f"position"
            )
    return ArgumentError(
        f"{name} was given {', '.join((f'{option}={shown(value)}' for option, value in options.items()))}, of which a "
        "value cannot be hashed; keywords are constants of the kernel, so pass a tuple instead of a list"
    )


_ARRAYS = [Arguments("", (None,) * count, {}) for count in range(9)]
"""The arguments of calls with arrays alone, by the number of arrays."""


class ElementwiseFunction:
    """A Python function over elements that runs as a kernel over arrays.

    `elementwise` makes such objects.

    Parameters
    ----------
    function : callable
    name : str, optional
        The name for messages; by default the function's own name.
    module : str, optional
        The module in which ``name`` leads to this object; by default the function's own module.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, module: str | None = None) -> None:
        if not callable(function):
            raise ArgumentError(
                f"{shown(function)} is no function; decorate a function of arrays, such as def scaled(x, y): return x * y"
            )
        update_wrapper(self, function)
        self.__name__ = name or str(getattr(function, "__name__", "elementwise"))
        self.__qualname__ = str(getattr(function, "__qualname__", self.__name__))
        if module is not None:
            self.__module__, self.__qualname__ = module, self.__name__
        # A partial object has the docstring of the class `partial`, which does not describe the function.
        if isinstance(function, partial):
            self.__doc__ = f"Apply {self.__name__} to each element."
        taken = [name for name in _RESERVED if name in inspect.signature(function).parameters]
        if taken:
            raise ArgumentError(
                f"{self.__name__} has the parameter {taken[0]}, which every call has already; rename the parameter"
            )
        self._kernel = KernelFunction(partial(describe, function, self.__name__), self.__name__, _as_option)
        self._function = function

    def __call__(self, *args: object, out: object = None, pool: HandlePool | None = None, **options: object) -> Any:
        """Launch the kernel on the current stream.

        With traced arguments, the call becomes a part of the elementwise function that is being traced.
        """
        plain = not options
        for arg in args:
            # A traced argument means that another elementwise function is being traced, and this call becomes a part of it.
            if type(arg) is Traced:
                return self._inline(args, out, options)
            if isinstance(arg, NUMBERS):
                plain = False
        # All calls with the same number of arrays and nothing else share an `Arguments` object, so its hash is known already.
        if plain and len(args) < len(_ARRAYS):
            return self._kernel.call(args, out, pool, (_ARRAYS[len(args)],))
        if any(type(value) is Traced for value in options.values()):
            return self._inline(args, out, options)
        arrays = tuple([arg for arg in args if not isinstance(arg, NUMBERS)])
        return self._kernel.call(arrays, out, pool, (Arguments(self.__name__, args, options),))

    def _inline(self, args: tuple[Any, ...], out: object, options: dict[str, Any]) -> Any:
        if out is not None:
            raise TraceError(
                f"{self.__name__} was given out= inside of an elementwise function; use the return value instead of out="
            )
        return self._function(*args, **options)

    def __repr__(self) -> str:
        return f"<ElementwiseFunction {self.__name__}>"

    def __reduce__(self) -> Any:
        """Pickle by name, as Python does with functions."""
        name = str(getattr(self, "__qualname__", self.__name__))
        try:
            found: Any = reduce(getattr, name.split("."), sys.modules.get(self.__module__))
        except AttributeError:
            found = None
        # Pickling by name works only if the name leads to this object.
        if found is self:
            return name
        raise ArgumentError(
            f"elementwise function {self.__name__} cannot be pickled: another process looks it up by name, but "
            f"{self.__module__}.{name} is not this function. Define the function at the top level of a module, under its own name"
        )

    # Without this method, a copy would use `__reduce__`, which raises if the name does not lead to this object.
    def __copy__(self) -> ElementwiseFunction:
        return self

    def __deepcopy__(self, memo: object) -> ElementwiseFunction:
        return self


def _as_branch(function: ElementwiseFunction, branch: BranchPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch a call of ``function`` as ``branch`` of a fork."""
    branches = thread.branches
    outer = len(branches)
    try:
        branches.append(branch)
        return function(*args, **kwargs)
    finally:
        # The launch takes ``branch`` off the list. If the call fails before its launch, remove the branch here.
        del branches[outer:]


setattr(ElementwiseFunction, LAUNCHES, _as_branch)


def elementwise(function: Callable[..., Any]) -> ElementwiseFunction:
    """Make one kernel of a Python function over elements.

    For each geometry of its arrays, the function is called once with traced values. The operations of that call become a
    kernel. Every call launches this kernel over arrays that broadcast.

    Parameters
    ----------
    function : callable
        Returns one value that it computes from its arguments. It may use Python's arithmetic and comparisons, and ``&``, ``|``
        and ``~`` of truth values. It may also use ``x.astype``, ``x.clip``, the functions of `handlepool.math`, and functions
        of NumPy and torch with the same names. If it calls other elementwise functions, these become a part of its kernel.
        Globals and closures are read only during tracing, and not by later calls.

    Returns
    -------
    ElementwiseFunction
        Called as ``f(*args, out=None, pool=None, **options)``. Arrays and numbers are positional, with at most 63 arrays. A
        number is a parameter of the kernel: a new value needs a new plan, but no compilation. If a number changes with every
        call, pass an array without axes instead. Keywords are constants: each value is compiled separately, and the function
        may use it in an ``if``. ``out`` is the array for the result. It may be an input with the result's layout, and must
        overlap no other input.

    Raises
    ------
    ArgumentError
        For an object that cannot be called, and for a parameter named ``out`` or ``pool``.

    Notes
    -----
    Arrays are float16, bfloat16, float32, int8, uint8, int16, uint16, int32 or bool. They may have any rank and any strides
    that are not negative. Their addresses must be multiples of 16 bytes. Inside the kernel, all numbers are float32. So
    integers beyond 2**24 are rounded, and integers do not wrap around. Only the result is rounded to the type of its array.

    An operation's result has the floating type of its operands. Python's numbers do not count, nor do integers if another
    operand is floating. The result of float16 with bfloat16 is float32, and so is the result of integers or booleans alone.
    Comparisons give bool. ``x.astype`` rounds to another type, so ``return y.astype("float16")`` gives a float16 result. A new
    array for the result has the layout of the first input with the result's shape, contiguous or channels-last, without gaps.

    NaN and infinities are as in torch: ``maximum``, ``minimum``, ``clip`` and ``relu`` pass NaN on, and ``x / 0`` is infinite.
    On a GPU, numbers smaller than 1.2e-38 may be treated as zero.

    A call raises `TraceError` if the function does something that no elementwise kernel can do, such as ``if x > 0``,
    ``x.sum()`` or a call of an unknown function. It raises `ArgumentError` for shapes that do not broadcast, other types, and
    an ``out`` of the wrong shape or type.

    Examples
    --------
    >>> @handlepool.elementwise                                                                          # doctest: +SKIP
    ... def gate(x, s):
    ...     return x * handlepool.math.hardsigmoid(s)
    >>> y = gate(x, s)  # s of shape (N, C, 1, 1)                                                        # doctest: +SKIP
    """
    return ElementwiseFunction(function)


def _as_option(arguments: Arguments) -> dict[str, Any]:
    return {"arguments": arguments}


def describe(function: Callable[..., Any], name: str, layouts: tuple[Layout, ...], *, arguments: Arguments) -> Described:
    """Return the kernel of a function over elements, and its result's layout."""
    for place, layout in enumerate(layouts):
        check_strides(f"argument {place} of {name}", layout)
    left = iter(layouts)
    given = [next(left) if bits is None else None for bits in arguments.numbers]
    expression, output = trace(name, function, given, arguments.options)
    # The result has the layout of the first array of the result's shape. So the results of a channels-last network are
    # channels-last.
    full = next((layout for layout in layouts if layout.shape == output.shape), None)
    order = None if full is None else axis_order(full.shape, full.strides)
    numbers = tuple([bits for bits in arguments.numbers if bits is not None])
    return Elementwise(expression, numbers), dense(output.shape, output.dtype, order)


@launches
def multiply(x: ArrayT, *others: object, out: object = None, pool: HandlePool | None = None) -> ArrayT:
    """Multiply arrays and numbers that broadcast, on the current stream.

    Parameters
    ----------
    x, *others : array or number
        At most 63 arrays, of the types of `handlepool.elementwise`. A gate of shape (N, C, 1, 1) scales images (N, C, H, W).
    out : array, optional
        Array for the result. It may be an input with the result's shape and layout.
    pool : HandlePool, optional
        By default the branch's own pool inside a branch, else the default pool.

    Returns
    -------
    array
        ``out``, or a new array of the kind of the first array. The product is computed in float32, from left to right, and
        rounded once. `handlepool.elementwise` explains the type of the result.

    Raises
    ------
    ArgumentError
        For shapes that do not broadcast, for unsupported types and strides, and for an ``out`` that does not fit.
    """
    return cast("ArrayT", _product(x, *others, out=out, pool=pool))


def summed(x: Any, *others: object, activation: str | None = None) -> Any:
    """Add traced values, and apply an activation to the sum."""
    check_activation("add", activation)
    for other in others:
        x = x + other
    return x if activation is None else VOCABULARY["silu" if activation == "swish" else activation](x)


def _multiplied(x: Any, *others: object) -> Any:
    for other in others:
        x = x * other
    return x


_product = ElementwiseFunction(_multiplied, name="multiply")
