"""The definition of a graph function, apart from its calls.

The definition is the function, its parameters, and the arguments of its decorator.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

import numpy as np

from handlepool._util.arguments import as_integer, at_least, flag
from handlepool._util.names import shown
from handlepool._util.protocols import holds_values
from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors.layout import ArraySpec, as_dtype

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

GRAPH_SETTINGS = ("name", "io_dtype", "intermediate_dtype", "compute_dtype")
COMPILE_SETTINGS = ("workspace_limit", "allow_tf32", "deterministic", "heuristics")
HEURISTICS = ("A", "B", "FALLBACK", "OPENSOURCE")

Settings = tuple[tuple[str, Any], ...]
"""Pairs of a setting's name and value, sorted by name.

A setting that is missing has its default.
"""


class Given(TypedDict, total=False):
    """Settings as keywords, for type checkers; `graph` describes them."""

    name: str | None
    io_dtype: "DTypeLike"
    intermediate_dtype: "DTypeLike"
    compute_dtype: "DTypeLike"
    workspace_limit: SupportsIndex | None
    allow_tf32: bool | None
    deterministic: bool | None
    heuristics: str | Sequence[Any] | None


def normalise(settings: Mapping[str, Any]) -> Settings:
    """Check settings, and return them sorted and hashable.

    The result leaves out settings that are None.

    Raises
    ------
    ArgumentError
        For an unknown name, or for a value with which every build would fail.
    ArrayTypeError
        For a type that cuDNN does not have.
    """
    unknown = settings.keys() - {*GRAPH_SETTINGS, *COMPILE_SETTINGS}
    if unknown:
        known = ", ".join((*GRAPH_SETTINGS, *COMPILE_SETTINGS))
        raise ArgumentError(f"no setting is named {', '.join(sorted(unknown))}; the settings are {known}")
    # Sorting gives equal settings equal keys, in any order.
    return tuple((name, _CHECKS[name](name, value)) for name, value in sorted(settings.items()) if value is not None)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name}={shown(value)}; it must be a text with at least one character")
    return value


def _dtype(name: str, value: object) -> np.dtype[Any]:
    try:
        return as_dtype(value)
    except ArrayTypeError as error:
        raise ArrayTypeError(f"{name}={shown(value)}: {error}") from error


def _modes(name: str, value: Any) -> tuple[str, ...]:
    try:
        modes = (value,) if isinstance(value, str) else tuple(getattr(mode, "name", mode) for mode in value)
    except TypeError:
        modes = ()
    if not modes or not all(isinstance(mode, str) and mode in HEURISTICS for mode in modes):
        raise ArgumentError(
            f"{name}={shown(value)}; it must be one or more of {', '.join(HEURISTICS)}, in the order in which cuDNN tries them"
        )
    return modes


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "io_dtype": _dtype,
    "intermediate_dtype": _dtype,
    "compute_dtype": _dtype,
    "workspace_limit": partial(at_least, 0, unit=" bytes"),
    "allow_tf32": flag,
    "deterministic": flag,
    "heuristics": _modes,
}


References = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of ``f(g, *tensors, **options)`` after the graph.

    Attributes
    ----------
    required, optional : tuple of str
        Positional parameters, in order. The required parameters have no default, and the optional parameters have a default.
    variadic : str or None
        The name of ``*tensors``.
    keywords, needed : frozenset of str
        Keyword-only parameters, and the subset without a default.
    open : bool
        Whether the function takes any option.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    variadic: str | None
    keywords: frozenset[str]
    needed: frozenset[str]
    open: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature":
        """Read a function's signature.

        Raises
        ------
        ArgumentError
            For an object that cannot be called with a graph.
        """
        if not callable(function):
            raise ArgumentError(f"{shown(function)} is no function; decorate a function that takes a graph and graph tensors")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        # `inspect.signature` fails for some functions written in C.
        except (TypeError, ValueError):
            # Assume that a function without a signature takes any number of arrays, and any options.
            return cls((), (), "tensor", frozenset(), frozenset(), True)
        kinds = inspect.Parameter
        positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        variadic = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        if not positional and variadic is None:
            raise ArgumentError(f"{shown(function)} takes no graph; its first parameter must be the graph, as in f(g, x, w)")
        if positional and positional[0].name == "self":
            raise ArgumentError(
                f"{shown(function)} takes self, but a graph function is no method and takes the graph first, as in f(g, "
                "x, w). Define it outside of the class, or under @staticmethod"
            )
        tensors, named = positional[1:], [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        return cls(
            tuple(p.name for p in tensors if p.default is p.empty),
            tuple(p.name for p in tensors if p.default is not p.empty),
            variadic,
            frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        )

    def check_options(self, name: str, options: Collection[str]) -> None:
        """Raise for unknown options, and for missing options."""
        takes = [*self.optional, *sorted(self.keywords)]
        unknown = [option for option in options if option not in (*self.required, *takes)]
        if unknown and not self.open:
            chosen = ". Inside a branch it uses the pool of the branch, and elsewhere the pool that set_default_pool sets"
            raise ArgumentError(
                f"{name} has no option {', '.join(sorted(unknown))}; it has {', '.join(takes) or 'none'}"
                f"{chosen if 'pool' in unknown else ''}"
            )
        missing = self.needed - set(options)
        if missing:
            raise ArgumentError(f"{name} needs the option {', '.join(sorted(missing))}; pass it by keyword")

    def tensors(self, name: str, count: int, options: Collection[str]) -> list[str]:
        """Return the parameters of ``count`` positional arrays, in order.

        The list is shorter than ``count`` if the parameters run out.
        """
        names = [p for p in (*self.required, *self.optional) if p not in options]
        missing = [p for p in names[count:] if p in self.required]
        if missing:
            raise ArgumentError(
                f"{name} takes {', '.join(names)}, and was called with {count} arrays; pass {', '.join(missing)} as well"
            )
        if self.variadic is not None:
            names += [f"{self.variadic}{i}" for i in range(count - len(names))]
        return names[:count]

    def referred(self, name: str, references: Sequence[Any], options: Collection[str]) -> list[str]:
        """Return the tensor parameters of a call that names arrays by references.

        They are the required parameters, and the optional parameters named by a reference.
        """
        if self.variadic is not None:
            raise ArgumentError(
                f"{name} takes *{self.variadic}, and references do not tell how many tensors these are: give {name} a parameter "
                f"for each tensor, or pass its arrays in order"
            )
        named = [reference for reference in references if isinstance(reference, str)]
        return [p for p in (*self.required, *self.optional) if p not in options and (p in self.required or p in named)]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A graph function's definition.

    Attributes
    ----------
    name : str
        Name of the function, for messages.
    function : callable
        The function that builds the graph.
    signature : Signature
        The parameters of the function.
    settings : tuple
        The settings of the decorator.
    inputs, outputs : tuple of reference or None
        As in `graph`.
    check : callable or None
        ``check(layouts, outs, **options)`` is called before a build, to raise clearer errors than the graph could.
    copies : bool
        Whether operands may be copied; see `GraphFunction`.
    """

    name: str
    function: Callable[..., Any]
    signature: Signature
    inputs: References | None = None
    outputs: References | None = None
    settings: Settings = ()
    check: Callable[..., None] | None = None
    copies: bool = True

    def check_static(self, options: Mapping[str, Any], by_reference: bool) -> None:
        """Raise for options that a plan's key cannot hold, such as arrays."""
        name, signature = self.name, self.signature
        for option, value in options.items():
            if holds_values(value) or isinstance(value, ArraySpec):
                order = [*signature.required, *signature.optional, *([f"*{signature.variadic}"] if signature.variadic else [])]
                if self.inputs is not None:
                    order = [entry if isinstance(entry, str) else shown(entry) for entry in self.inputs]
                if option in signature.keywords or not (order or by_reference):
                    raise ArgumentError(
                        f"{name} was given {option}={shown(value)}: an option is a part of the plan's key, and cannot be an "
                        f"array; pass a number, a text or a tuple"
                    )
                if by_reference:
                    raise ArgumentError(
                        f"{name}.run was given {option}= by keyword; put the array into the dictionary, with its reference as key"
                    )
                which = f"pass {option} as parameter {order.index(option) + 1} of" if option in order else "pass the arrays"
                raise ArgumentError(
                    f"{name} was given {option}= by keyword, but arrays are positional; {which} {', '.join(order)}"
                )
            # Raise a clear error here. Otherwise the plan cache would raise a TypeError.
            try:
                hash(value)
            except TypeError:
                raise ArgumentError(
                    f"{name} was given {option}={shown(value)}, which cannot be hashed; options are a part of the plan's key, so "
                    f"pass a tuple instead of a list"
                ) from None


def as_references(what: str, references: object) -> References | None:
    """Convert ``inputs=`` or ``outputs=`` to a tuple.

    A single reference counts as a list of one reference.
    """
    if references is None:
        return None
    entries = tuple(map(_plain, references)) if isinstance(references, (list, tuple)) else (_plain(references),)
    if not entries:
        raise ArgumentError(f"{what}= is empty; name the {what}, or leave {what}= out")
    # A graph tensor may define ``==``, so compare such references by identity.
    if len({id(entry) if not isinstance(entry, (str, int)) else entry for entry in entries}) < len(entries):
        raise ArgumentError(f"{what}={shown(list(entries))} names a tensor twice; name each tensor once")
    return entries


def _plain(reference: object) -> Any:
    try:
        # An integer, of Python or another library, is a uid.
        return reference if holds_values(reference) else as_integer(reference)
    except TypeError:
        return reference
