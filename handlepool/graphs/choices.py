"""Let an operation's other forms be measured and chosen.

An operation may run as one plan, or as a plan followed by further launches. These forms of the operation compute the same.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from handlepool.graphs.launch import GraphCall
from handlepool.tensors.layout import Layout


class Site(Protocol):
    """An operation with one geometry of its arrays, which has several forms.

    Attributes
    ----------
    form : object
        The form in use.
    inputs, outs : tuple of Layout
        Layouts of the operation's arrays, and of ``out=`` if the caller gave it.
    """

    form: Hashable
    inputs: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def forms(self) -> Sequence[Hashable]:
        """Return all forms, also forms that `prepare` may refuse."""

    def title(self, form: Any) -> str:
        """Return a form as text."""

    def prepare(self, form: Any, arrays: tuple[Any, ...], out: Any) -> GraphCall:
        """Return the call in a form.

        Raises `GraphNotSupportedError` for a form that is not known to be right, or that cuDNN has no plan for.
        """

    def choose(self, form: Any) -> None:
        """Take a form for all later calls."""
