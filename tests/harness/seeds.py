"""The seed of a run of the tests, which decides all random numbers of its tests."""

import os
import random
import sys
import zlib

SEED = int(os.environ.setdefault("HANDLEPOOL_SEED", str(random.randrange(1 << 32))))
"""Drawn where the environment names none. The processes of pytest-xdist inherit the variable."""


def begin(test):
    """Let the run's seed and the name of a test decide the random numbers of Python and of torch from now on."""
    random.seed(text := f"{SEED} {test}")
    # A stand-in for torch draws no numbers.
    if set_torchs := getattr(sys.modules.get("torch"), "manual_seed", None):
        set_torchs(zlib.crc32(text.encode()))
