"""State of the process that each test begins with anew: the default pool, and work that was left behind."""

import contextlib

from handlepool.pool import context, deferred
from handlepool.pool import default as defaults


@contextlib.contextmanager
def as_default(pool):
    """Make a pool the default one meanwhile; with None, there is none yet. Gives the pool."""
    former, defaults._default = defaults._default, pool
    try:
        yield pool
    finally:
        defaults._default = former


def forget_deferred():
    """Forget work that was left behind, as by an interrupt.

    Work that waits for a lost slot is tried at each settling and never done, so it costs all later tests time.
    """
    deferred.deferred.clear()
    # An interrupt as a branch begins or a recording ends leaves these entries.
    context.elsewhere.clear()
    context.recordings.clear()
    deferred.ending.clear()
