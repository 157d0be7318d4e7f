"""Define snapshots of a pool's counters."""

MEANINGS = {
    "bytes_copied": "bytes of operands copied for cuDNN; see `handlepool.Plan.copies`",
    "captures_met": "CUDA-graph captures that a slot's scratch was asked for in",
    "create_microseconds": "host time in cudnnCreate",
    "handles_building": "handles that graphs are built with, one a device at most",
    "handles_captured": "side slots' handles held until the capture they were leased in ends",
    "handles_created": "handles made: live, idle, leased, captured, building and destroyed ones together",
    "handles_destroyed": "handles destroyed, by the pool or by a caller",
    "handles_idle": "handles without an owner, kept for the next miss",
    "handles_leased": "side slots' handles that forks and tasks have, or that an interrupt lost",
    "handles_live": "handles that belong to a thread and a stream",
    "handles_peak": "most handles that existed at a time, of each device",
    "handles_rebound": "handles bound to another stream: reused and repaired handles",
    "handles_repaired": "handles made right that their caller had destroyed or bound elsewhere",
    "handles_reused": "idle handles given to a new owner",
    "operands_copied": "operands that launches copied, because cuDNN is not known to compute rightly over their form",
    "plan_build_microseconds": "host time in building plans",
    "plan_files_loaded": "plans found in the plan directory, for any device",
    "plan_files_missed": "plans missing in the plan directory",
    "plan_files_rejected": "files in the plan directory that were no usable plan",
    "plan_files_unwritten": "plans that the plan directory, full or read-only, could not take",
    "plan_files_written": "plans written to the plan directory",
    "plans_built": "plans built, or loaded from the plan directory",
    "plans_cached": "plans kept now",
    "plans_evicted": "plans dropped to make room",
    "scratch_bytes": "scratch allocated now, captured or not",
    "scratch_bytes_captured": "scratch given to captures, which stays until `trim(captured=True)`",
    "scratch_bytes_peak": "most scratch allocated at a time, of each device",
    "scratch_bytes_recorded": "scratch of recorded programs, which stays until they are closed",
    "slots_lost": "slots lost by an interrupt; handle and scratch stay until the process ends",
}
"""dict: the meaning of each counter, by its name."""


class Stats(dict[str, int]):
    """Counters by flat name; two snapshots of one pool can be subtracted.

    Examples
    --------
    >>> before = pool.stats()                                                                            # doctest: +SKIP
    >>> work()                                                                                           # doctest: +SKIP
    >>> (pool.stats() - before)["handles_created"]                                                       # doctest: +SKIP
    0
    """

    def __sub__(self, earlier: "Stats") -> "Stats":
        """Return the change since an earlier snapshot; of a peak, its rise."""
        return Stats({name: value - earlier.get(name, 0) for name, value in self.items()})
