"""The default pool of a test."""

import contextlib

from handlepool.pool import default as defaults


@contextlib.contextmanager
def as_default(pool):
    """Make a pool the default one meanwhile; with None, there is none yet. Gives the pool."""
    former, defaults._default = defaults._default, pool
    try:
        yield pool
    finally:
        defaults._default = former
