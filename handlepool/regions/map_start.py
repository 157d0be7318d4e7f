"""Start all branches of a map after one common event.

Each branch launches a single known plan.
"""

from collections.abc import Callable
from typing import Any

from handlepool.order.uses import Operands
from handlepool.pool.context import Begin
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.regions.leases import Leases


class MapStart:
    """The place that launches the first call of a map.

    For this launch, `begin` allocates the outputs of all calls, and then starts all states together.

    Parameters
    ----------
    leases : Leases
        The leases of the fork.
    others : list of tuple
        The arguments of all calls after the first.
    out : array or None
        The output that the caller gave for the first call.
    given : bool
        Whether the caller gave outputs. A call's output is its last argument.
    apart : callable
        Takes the operands of the plan. Returns whether the branches need no order between them.

    Attributes
    ----------
    attempt : callable or None
        Launches the plan of the first call with other arrays. None if the first call found no known plan.
    fresh : list
        For each later call, the new outputs, or None if the caller gave the output.
    begin_next : callable
        Starts the branch of each later call.
    """

    def __init__(
        self, leases: Leases, others: list[tuple[Any, ...]], out: Any, given: bool, apart: Callable[[Operands], bool]
    ) -> None:
        self._leases = leases
        self._others = others
        self._out = out
        self._given = given
        self._apart = apart
        self.attempt: Any = None
        self.fresh: list[Any] = []
        self.begin_next: Begin = leases.begin

    @property
    def pool(self) -> PoolInternals:
        """The pool of the fork."""
        return self._leases.pool

    def begin(self, operands: tuple[Any, ...], launch: Any, addresses: tuple[int, ...], blocks: tuple[object, ...]) -> Slot:
        """Start the first branch, whose operands and plan are known."""
        leases, others = self._leases, self._others
        if self._apart(launch.operands):
            self.begin_next = leases.begin_unordered
        if not self._given:
            self.fresh.extend(launch.allocate(len(others)))
        # If the caller gave None as the first output, the plan allocates outputs. But the caller may still have given an output
        # for a later call.
        elif self._out is None:
            self.fresh.extend([None if call[-1] is not None else launch.allocate(1)[0] for call in others])
        else:
            self.fresh.extend([None] * len(others))
        leases.start_together(len(others) + 1)
        self.attempt = launch
        slot: Slot = self.begin_next(operands, launch, addresses, blocks)
        return slot

    def run(self, call: Any, kept: object) -> Any:
        """Run the first call as a branch without a known plan."""
        return self._leases.run(call, kept)
