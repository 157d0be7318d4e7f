"""Ask the open books for concurrent users and later writers of memory.

After a call, the search for undeclared writes uses these functions.
"""

from collections.abc import Sequence

from handlepool.order.places import open_order
from handlepool.order.track import Needs, Track, last
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token


def beside(pool: PoolInternals, writes: Sequence[Piece | Token]) -> bool:
    """Return whether a concurrent branch used the memory ``writes``.

    ``writes`` is the memory that a call on the current stream was found to write. A branch is concurrent if the current stream
    does not wait for the branch.
    """
    device = pool.current_device()
    order = open_order(pool.driver, device)
    if order is None:
        return False
    pointer = pool.driver.current_stream(device).ptr
    # The books may not know the current stream, because the user may choose any stream. An unknown stream waits for no branch.
    track = order.tracks.get(pointer) or Track(pointer)
    with order:
        return not order.waits_for_all(track, writes)


def calls_so_far(pool: PoolInternals) -> Needs | None:
    """Return the last call of each stream in this thread's region.

    The region is on the current device. Outside of any region the result is None.
    """
    order = open_order(pool.driver, pool.current_device())
    return None if order is None else {track: track.count for track in order.tracks.values()}


def written_since(pool: PoolInternals, memory: Piece, since: Needs) -> bool:
    """Return whether a call after ``since`` wrote ``memory``.

    ``since`` is an earlier result of `calls_so_far`.
    """
    order = open_order(pool.driver, pool.current_device())
    if order is None:
        return False
    with order:
        # The stream of the writing branch may have been joined. Then `last` returns the joining call on the caller's stream,
        # which ``since`` knows.
        needs = [last(*each) for each in order.conflicts((memory,), ()).items()]
        return any(call > since.get(track, 0) for track, call in needs)
