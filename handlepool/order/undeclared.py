"""What a call writes that nobody said it does: found by torch's versions, and, with ``check=True``, by comparing its arguments.

Both look at the arrays that a call was given and that share no memory with what it is known to write.
"""

from collections.abc import Iterable
from sys import modules
from typing import Any

import numpy as np

from handlepool._util.names import name_of
from handlepool.errors import ContractError
from handlepool.order.argument_names import ADVICE, Call, name_of_array
from handlepool.order.books import beside, calls_so_far, written_since
from handlepool.order.places import before
from handlepool.order.plain_calls import PlainCall
from handlepool.order.reached import Reached, is_tensor, piece_of
from handlepool.order.stream_order import integration
from handlepool.order.track import Needs
from handlepool.pool.context import BranchRegion, thread
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token, share

Writes = Iterable[Piece | Token]


class Watch:
    """Finds what a call writes that it is not known to.

    Parameters
    ----------
    pool : PoolInternals
    call : tuple
    writes : iterable of Piece or Token
        What it is known to write.
    reached : Reached or None
        What it reaches; None for a call that is known.
    """

    __slots__ = ("_call", "_copies", "_pool", "_versions")

    def __init__(self, pool: PoolInternals, call: Call, writes: Writes, reached: Reached | None) -> None:
        given = _given(reached) if reached is not None and (pool.checked or "torch" in modules) else ()
        self._pool, self._call = pool, call
        self._versions = versions_before(given, pool, writes)
        self._copies = copies_before(given, pool, writes) if pool.checked else []

    def ended(self, compare: bool = True, since: Needs | None = None) -> None:
        """Raise ContractError for what was found.

        Parameters
        ----------
        compare : bool
            Whether arguments may not have changed, but as follows.
        since : dict, optional
            By stream of the region, the last call before this one. What later calls wrote, the books know.
        """
        if self._versions:
            count_as_written(self._pool, moved(self._versions), self._call)
        if compare:
            check_unchanged(self._pool, self._copies, self._call, since)


def run_watched(pool: PoolInternals, region: BranchRegion, memory: PlainCall, call: Call) -> Any:
    """Call a plain function in its branch, and see that it writes nothing else, where it returns new arrays alone."""
    function, args, kwargs = call
    watch = Watch(pool, call, memory.writes, memory.reached)
    since = calls_so_far(pool) if pool.checked else None
    known = len(region.allocated)
    result = function(*args, **kwargs)
    watch.ended(memory.is_new(region.allocated[known:], result), since)
    return result


def versions_before(given: Iterable[Any], pool: PoolInternals, writes: Writes) -> list[tuple[Any, int]]:
    """Return the torch tensors that a call was given and is not known to write, each with its version.

    Torch counts a tensor and its views together. So nothing is known of one that shares its storage with what is written.

    Parameters
    ----------
    given : iterable of array
        What the call was given, as far as it is known.
    pool : PoolInternals
    writes : iterable of Piece or Token
        What it is known to write.
    """
    tensors = [value for value in given if is_tensor(value) and piece_of(pool.driver, value) is not None]
    if not tensors:
        return []
    torch, memory = integration(), _memory(writes)
    written = {torch.storage(tensor) for tensor in tensors if _meets(pool, tensor, memory)}
    found = [(tensor, torch.version(tensor)) for tensor in tensors]
    return [(tensor, version) for tensor, version in found if version is not None and torch.storage(tensor) not in written]


def moved(versions: list[tuple[Any, int]]) -> list[Any]:
    """Return the tensors that were written since."""
    return [tensor for tensor, version in versions if integration().version(tensor) != version]


def count_as_written(pool: PoolInternals, tensors: Iterable[Any], call: Call) -> None:
    """Write down that a call which has ended wrote tensors, though it did not say so.

    Raises
    ------
    ContractError
        Where a branch was given one of them before and nothing orders the two; while a function is recorded with lanes, always.
    """
    late = None
    tensors = [*tensors]
    if tensors and (thread.rehearsal is not None or (thread.recording is not None and thread.recording.lanes is not None)):
        raise ContractError(
            f"{name_of(call[0])} wrote {name_of_array(tensors[0], call)}, which it did not declare: say what it writes, {ADVICE}"
        )
    for tensor in tensors:
        memory = piece_of(pool.driver, tensor)
        if memory is not None:
            if late is None and beside(pool, (memory,)):
                late = tensor
            before(pool, (), (memory,), tensor)
    if late is not None:
        raise ContractError(
            f"{name_of(call[0])} wrote {name_of_array(late, call)}, which it did not declare and which a branch that nothing "
            f"orders before it was given, too: say what it writes, {ADVICE}"
        )


def copies_before(given: Iterable[Any], pool: PoolInternals, writes: Writes) -> list[tuple[Any, bytes]]:
    """Return the arrays that a call was given and is not known to write, each with a copy of its bytes.

    It waits for the stream. So there are none while something is captured.
    """
    if thread.recording is not None:
        return []
    memory = _memory(writes)
    arrays = {id(value): value for value in given if not _meets(pool, value, memory)}
    copies = [(array, _bytes_of(pool, array)) for array in arrays.values()]
    return [(array, copy) for array, copy in copies if copy is not None]


def check_unchanged(pool: PoolInternals, copies: list[tuple[Any, bytes]], call: Call, since: Needs | None) -> None:
    """Compare the arrays of `copies_before` with their copies, after the call, but for those that calls ``since`` wrote.

    Raises
    ------
    ContractError
        Naming the function and the argument that has changed.
    """
    for array, copy in copies:
        if _bytes_of(pool, array) not in (copy, None) and not _told(pool, array, since):
            raise ContractError(
                f"{name_of(call[0])} wrote {name_of_array(array, call)}, which it did not declare: say what it writes, {ADVICE}"
            )


def _told(pool: PoolInternals, array: Any, since: Needs | None) -> bool:
    """Whether the books know who wrote an array: a graph function, an operation or a branch that the call made itself."""
    memory = piece_of(pool.driver, array)
    return since is not None and memory is not None and written_since(pool, memory, since)


def _given(reached: Reached) -> list[Any]:
    """Return what a call reaches, but for NumPy's arrays in attributes: the host writes them at once, as counters."""
    direct = reached.direct
    return reached.values[:direct] + [value for value in reached.values[direct:] if type(value) is not np.ndarray]


def _memory(writes: Writes) -> list[Piece]:
    return [memory for memory in writes if not isinstance(memory, Token)]


def _meets(pool: PoolInternals, array: Any, memory: list[Piece]) -> bool:
    """Whether an array shares memory with what is written; one without memory has nothing to look at, and does."""
    mine = piece_of(pool.driver, array)
    return mine is None or any(share(mine, each) for each in memory)


def _bytes_of(pool: PoolInternals, array: Any) -> bytes | None:
    values: np.ndarray[Any, Any] | None = (
        integration().read_unordered(array) if is_tensor(array) else pool.driver.read_unordered(array)
    )
    return None if values is None else values.tobytes()
