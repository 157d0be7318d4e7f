"""State of the process that each test begins with anew: the default pool, and work that was left behind."""

import contextlib
import os

from handlepool.pool import context, deferred, process_end
from handlepool.pool import default as defaults

leave = os._exit
"""End a process at once, as a child of `os.fork` has to: without clean-up, and without the tests of its parent."""


def set_default(pool):
    """Make a pool the default one, and return the former one; with None, there is none yet."""
    former, defaults._default = defaults._default, pool
    return former


@contextlib.contextmanager
def as_default(pool):
    """Make a pool the default one meanwhile; with None, there is none yet. Gives the pool."""
    former = set_default(pool)
    try:
        yield pool
    finally:
        set_default(former)


def forget_deferred():
    """Forget work that was left behind, as by an interrupt.

    Work that waits for a lost slot is tried at each settling and never done, so it costs all later tests time.
    """
    deferred.deferred.clear()
    # An interrupt as a branch begins or a recording ends leaves these entries.
    context.branch_pools.clear()
    context.recordings.clear()
    context.active.clear()
    process_end.process_end.ending.clear()
