"""The settings of a graph function: checked when they are given, and brought into a form that can be a part of a key."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

import numpy as np

from handlepool._util.integers import as_integer, flag
from handlepool._util.wording import shown
from handlepool.errors import ArgumentError, ArrayTypeError
from handlepool.tensors.layout import as_dtype

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

GRAPH_SETTINGS = ("name", "io_dtype", "intermediate_dtype", "compute_dtype")
COMPILE_SETTINGS = ("workspace_limit", "allow_tf32", "deterministic", "heuristics")
HEURISTICS = ("A", "B", "FALLBACK", "OPENSOURCE")

Settings = tuple[tuple[str, Any], ...]
"""Sorted by name; what is not there, or None, has its default."""


class Given(TypedDict, total=False):
    """Settings as keywords, for type checkers; `graph` says what they are."""

    name: str | None
    io_dtype: "DTypeLike"
    intermediate_dtype: "DTypeLike"
    compute_dtype: "DTypeLike"
    workspace_limit: SupportsIndex | None
    allow_tf32: bool | None
    deterministic: bool | None
    heuristics: str | Sequence[Any] | None


def normalise(settings: Mapping[str, Any]) -> Settings:
    """Check settings, and give those that are not None, sorted and hashable.

    Raises
    ------
    ArgumentError
        For an unknown name or a value that no build could succeed with.
    ArrayTypeError
        For a type that cuDNN has not.
    """
    unknown = settings.keys() - {*GRAPH_SETTINGS, *COMPILE_SETTINGS}
    if unknown:
        known = ", ".join((*GRAPH_SETTINGS, *COMPILE_SETTINGS))
        raise ArgumentError(f"no setting is named {', '.join(sorted(unknown))}; the settings are {known}")
    return tuple((name, _CHECKS[name](name, value)) for name, value in sorted(settings.items()) if value is not None)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name}={shown(value)}; it must be a text")
    return value


def _dtype(name: str, value: Any) -> np.dtype[Any]:
    try:
        return as_dtype(value)
    except ArrayTypeError as error:
        raise ArrayTypeError(f"{name}={shown(value)}: {error}") from error


def _limit(name: str, value: Any) -> int:
    try:
        limit = as_integer(value)
    except TypeError:
        limit = -1
    if limit < 0:
        raise ArgumentError(f"{name}={shown(value)}; it must be 0 bytes or more, or None for no limit")
    return limit


def _modes(name: str, value: Any) -> tuple[str, ...]:
    try:
        modes = (value,) if isinstance(value, str) else tuple(getattr(mode, "name", mode) for mode in value)
    except TypeError:
        modes = ()
    if not modes or not all(isinstance(mode, str) and mode in HEURISTICS for mode in modes):
        raise ArgumentError(f"{name}={shown(value)}; it must be one or more of {', '.join(HEURISTICS)}, in the order to ask them")
    return modes


_CHECKS = {
    "name": _text,
    "io_dtype": _dtype,
    "intermediate_dtype": _dtype,
    "compute_dtype": _dtype,
    "workspace_limit": _limit,
    "allow_tf32": flag,
    "deterministic": flag,
    "heuristics": _modes,
}
