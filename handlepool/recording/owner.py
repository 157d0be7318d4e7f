"""Define the owner thread, which may update, replay and read a program."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import RLock
from typing import TypeVar

from handlepool.errors import OwnershipError
from handlepool.pool.context import ThreadToken, thread

T = TypeVar("T")

OWNERS = ("replayed", "updated", "read", "handed over")
"""The uses of a program that only its owner thread may make."""


class Owned(ABC):
    """A program with an owner thread."""

    _name: str
    _lock: RLock
    _user: ThreadToken | None = None
    """The thread that owns `update`, `replay` and `outputs`.

    It is set while the thread holds the lock.
    """

    def hand_over(self) -> None:
        """Give the program up, so that another thread may own it.

        The next thread that uses `update`, `replay` or `outputs` owns these methods. Make sure that it uses them only after
        `hand_over` has returned. The program orders the work on the GPU, as for any two replays. Without an owner, or with an
        owner that has ended, nothing happens.

        Raises
        ------
        OwnershipError
            In another thread than the owner, and in a finalizer inside another use of the program.
        """
        self._use("handed over", self._leave)

    def _leave(self) -> None:
        self._check_owner()
        self._user = None

    def _check_owner(self) -> None:
        user = self._user
        # A thread that has ended cannot use the program, so another thread may take the program over.
        if user is not None and user is not thread.token and not user.over:
            raise OwnershipError(
                f"{self._name} belongs to {user!r}, and this is {thread.token!r}: only the thread that used the program "
                "last may call update, replay and outputs. Call hand_over() in that thread first, or call the program, "
                "as in y = program(x), from any thread"
            )

    @abstractmethod
    def _use(self, what: str, act: Callable[[], T]) -> T:
        """Run a function while no other call uses the program.

        Return the function's value.
        """
