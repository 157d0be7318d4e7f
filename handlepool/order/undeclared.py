"""Find the undeclared writes of a call.

The version counters of torch's tensors show such writes. With ``check=True``, a comparison of the arguments before and after
the call also shows them. Both checks cover the arrays that the call was given, except arrays that share memory with its known
writes.
"""

from collections.abc import Iterable
from sys import modules
from typing import Any

import numpy as np

from handlepool._util.names import name_of
from handlepool.errors import ContractError
from handlepool.order.argument_names import ADVICE, Call, name_of_array
from handlepool.order.places import before
from handlepool.order.plain_calls import PlainCall
from handlepool.order.reached import Reached, is_tensor, piece_of
from handlepool.order.since import beside, calls_so_far, written_since
from handlepool.order.stream_order import integration
from handlepool.order.track import Needs
from handlepool.pool.context import BranchRegion, thread
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token, share

Writes = Iterable[Piece | Token]


class Watch:
    """A call's arrays before the call, to find undeclared writes.

    A watch keeps the versions of torch tensors and, with ``check=True``, copies of arrays. `ended` compares the arrays with both.

    Parameters
    ----------
    pool : PoolInternals
        The pool of the call.
    call : tuple
        The function and its arguments.
    writes : iterable of Piece or Token
        Memory that the call is known to write.
    reached : Reached or None
        The values that the call reaches. None if all accesses of the call are known, so that nothing is watched.
    """

    __slots__ = ("_call", "_copies", "_pool", "_versions")

    def __init__(self, pool: PoolInternals, call: Call, writes: Writes, reached: Reached | None) -> None:
        given = _given(reached) if reached is not None and (pool.checked or "torch" in modules) else ()
        self._pool, self._call = pool, call
        self._versions = versions_before(given, pool, writes)
        self._copies = copies_before(given, pool, writes) if pool.checked else []

    def ended(self, compare: bool = True, since: Needs | None = None) -> None:
        """Raise ContractError for an undeclared write.

        Parameters
        ----------
        compare : bool
            Whether to compare the arguments with their copies. Writes of calls inside the watched call are no error.
        since : dict, optional
            For each stream of the region, the last call before the watched call. Later calls ran inside the watched call, and
            the books know their writes.
        """
        if self._versions:
            count_as_written(self._pool, moved(self._versions), self._call)
        if compare:
            check_unchanged(self._pool, self._copies, self._call, since)


def run_watched(pool: PoolInternals, region: BranchRegion, memory: PlainCall, call: Call) -> Any:
    """Call a plain function in its branch, and check its writes.

    If the function returns new arrays alone, a write to any other array is an error.
    """
    function, args, kwargs = call
    watch = Watch(pool, call, memory.writes, memory.reached)
    # Calls inside the function write down their own writes. Only a write that the books do not know is undeclared.
    since = calls_so_far(pool) if pool.checked else None
    known = len(region.allocated)
    result = function(*args, **kwargs)
    watch.ended(memory.is_new(region.allocated[known:], result), since)
    return result


def versions_before(given: Iterable[Any], pool: PoolInternals, writes: Writes) -> list[tuple[Any, int]]:
    """Return a call's torch tensors without known writes, with their versions.

    Torch counts the versions of a tensor and its views together. So a tensor that shares its storage with written memory is
    left out.

    Parameters
    ----------
    given : iterable of array
        The arrays that the call was given, as far as they are known.
    pool : PoolInternals
        The pool of the call.
    writes : iterable of Piece or Token
        Memory that the call is known to write.
    """
    tensors = [value for value in given if is_tensor(value) and piece_of(pool.driver, value) is not None]
    if not tensors:
        return []
    torch, memory = integration(), _memory(writes)
    written = {torch.storage(tensor) for tensor in tensors if _meets(pool, tensor, memory)}
    found = [(tensor, torch.version(tensor)) for tensor in tensors]
    return [(tensor, version) for tensor, version in found if version is not None and torch.storage(tensor) not in written]


def moved(versions: list[tuple[Any, int]]) -> list[Any]:
    """Return the tensors whose versions changed."""
    return [tensor for tensor, version in versions if integration().version(tensor) != version]


def count_as_written(pool: PoolInternals, tensors: Iterable[Any], call: Call) -> None:
    """Write down the undeclared writes of a call that has ended.

    Raises
    ------
    ContractError
        If a concurrent branch also uses a written tensor. While a function is recorded with lanes, for every written tensor.
    """
    late = None
    tensors = [*tensors]
    if tensors and (thread.rehearsal is not None or (thread.recording is not None and thread.recording.lanes is not None)):
        raise ContractError(
            f"{name_of(call[0])} wrote {name_of_array(tensors[0], call)} without declaring it: declare the function's "
            f"writes, {ADVICE}"
        )
    for tensor in tensors:
        memory = piece_of(pool.driver, tensor)
        if memory is not None:
            if late is None and beside(pool, (memory,)):
                late = tensor
            # The write has happened, so later calls must wait for it although it was not declared.
            before(pool, (), (memory,), tensor)
    if late is not None:
        raise ContractError(
            f"{name_of(call[0])} wrote {name_of_array(late, call)} without declaring it, and a concurrent branch also "
            f"uses that array. Declare the function's writes, {ADVICE}"
        )


def copies_before(given: Iterable[Any], pool: PoolInternals, writes: Writes) -> list[tuple[Any, bytes]]:
    """Copy the arrays that a call is not known to write.

    The result has each array with its bytes. A copy waits for the stream, so during a capture the result is empty.
    """
    # A capture forbids the host to wait for the stream.
    if thread.recording is not None:
        return []
    memory = _memory(writes)
    arrays = {id(value): value for value in given if not _meets(pool, value, memory)}
    copies = [(array, _bytes_of(pool, array)) for array in arrays.values()]
    return [(array, copy) for array, copy in copies if copy is not None]


def check_unchanged(pool: PoolInternals, copies: list[tuple[Any, bytes]], call: Call, since: Needs | None) -> None:
    """Compare the arrays of `copies_before` with their copies.

    This function runs after the call. It leaves out arrays that calls after ``since`` wrote.

    Raises
    ------
    ContractError
        For a changed array, with the names of the function and the argument.
    """
    for array, copy in copies:
        if _bytes_of(pool, array) not in (copy, None) and not _told(pool, array, since):
            raise ContractError(
                f"{name_of(call[0])} wrote {name_of_array(array, call)} without declaring it: declare the function's "
                f"writes, {ADVICE}"
            )


def _told(pool: PoolInternals, array: Any, since: Needs | None) -> bool:
    """Return whether the books have a write to ``array`` after ``since``.

    Such a write was made by a graph function, an operation or a branch that ran inside the watched call.
    """
    memory = piece_of(pool.driver, array)
    return since is not None and memory is not None and written_since(pool, memory, since)


def _given(reached: Reached) -> list[Any]:
    """Return the values to check for undeclared writes.

    NumPy arrays in attributes are left out, because they are often counters, which the host writes without any stream.
    """
    direct = reached.direct
    return reached.values[:direct] + [value for value in reached.values[direct:] if type(value) is not np.ndarray]


def _memory(writes: Writes) -> list[Piece]:
    return [memory for memory in writes if not isinstance(memory, Token)]


def _meets(pool: PoolInternals, array: Any, memory: list[Piece]) -> bool:
    """Return whether an array shares bytes with ``memory``.

    An array of unknown memory counts as sharing, because its contents cannot be compared.
    """
    mine = piece_of(pool.driver, array)
    return mine is None or any(share(mine, each) for each in memory)


def _bytes_of(pool: PoolInternals, array: Any) -> bytes | None:
    values: np.ndarray[Any, Any] | None = (
        integration().read_unordered(array) if is_tensor(array) else pool.driver.read_unordered(array)
    )
    return None if values is None else values.tobytes()
