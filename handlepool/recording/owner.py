"""Track the owner of a program, the thread that last used it.

Only the owner may update and replay the program, and read its outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import RLock
from typing import TypeVar

from handlepool.errors import OwnershipError
from handlepool.pool.context import ThreadToken, thread

T = TypeVar("T")

OWNERS = ("replayed", "updated", "read", "handed over")
"""The uses that only the owner may make, as messages name them."""


class Owned(ABC):
    """The part of a program that tracks its owner thread."""

    _name: str
    _lock: RLock
    _user: ThreadToken | None = None
    """The owner: the thread that may use `update`, `replay` and `outputs`.

    The attribute is only set while the setting thread holds the lock. It is None while the program has no owner.
    """

    def hand_over(self) -> None:
        """Give the program up, so that another thread may own it.

        The next thread that uses `update`, `replay` or `outputs` becomes the owner. Make sure that this thread uses them only
        after `hand_over` has returned. The GPU work of both threads is ordered, as for any two replays. If the program has no
        owner, or its owner thread has ended, `hand_over` does nothing.

        Raises
        ------
        OwnershipError
            If the calling thread is not the owner, or if a finalizer makes the call during another use of the program.
        """
        self._use("handed over", self._leave)

    def _leave(self) -> None:
        self._check_owner()
        self._user = None

    def _check_owner(self) -> None:
        user = self._user
        # If the owner thread has ended, any thread may use the program and become its owner.
        if user is not None and user is not thread.token and not user.over:
            raise OwnershipError(
                f"{self._name} belongs to {user!r}, and this is {thread.token!r}: only the thread that used the program "
                "last may use update, replay and outputs. Call hand_over() in that thread first, or call the program, "
                "as in y = program(x), which any thread may do"
            )

    @abstractmethod
    def _use(self, what: str, act: Callable[[], T]) -> T:
        """Run a function while no other call uses the program.

        Return the function's value.
        """
