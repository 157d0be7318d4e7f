"""Describe the forms of an operation, for a tuning to choose from.

A form of an operation is a way to launch it: as one plan, or as a plan followed by further launches. All forms compute the same
result.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from handlepool.graphs.launch import GraphCall
from handlepool.tensors.layout import Layout


class Site(Protocol):
    """An operation with several forms, over arrays of one geometry.

    Attributes
    ----------
    form : object
        The form in which calls launch the operation now.
    inputs, outs : tuple of Layout
        Layouts of the operation's arrays, and of ``out=`` if the caller gave it.
    """

    form: Hashable
    inputs: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def forms(self) -> Sequence[Hashable]:
        """Return all forms, even forms that `prepare` may refuse."""

    def title(self, form: Any) -> str:
        """Return a text that describes ``form``, for reports."""

    def prepare(self, form: Any, arrays: tuple[Any, ...], out: Any) -> GraphCall:
        """Return the call that launches the operation in ``form``.

        Raises `GraphNotSupportedError` if ``form`` is not known to give right results, or if cuDNN has no plan for it.
        """

    def choose(self, form: Any) -> None:
        """Make all later calls launch the operation in ``form``."""
