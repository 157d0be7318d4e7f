"""Define snapshots of a pool's counters."""

MEANINGS = {
    "bytes_copied": "bytes of operands copied for cuDNN; see `handlepool.Plan.copies`",
    "captures_met": "CUDA-graph captures during which a slot was asked for scratch",
    "create_microseconds": "host time in cudnnCreate",
    "handles_building": "handles that only build graphs, at most one on each device",
    "handles_captured": "handles of side slots that are held until the capture in which they were leased ends",
    "handles_created": "all handles made so far, including the destroyed handles",
    "handles_destroyed": "handles destroyed, by the pool or by a caller",
    "handles_idle": "handles without an owner, kept for the next miss",
    "handles_leased": "handles of side slots that forks and tasks have leased, or that an interrupt lost",
    "handles_live": "handles that belong to a thread and a stream",
    "handles_peak": "the highest number of handles at one time on a device, added up over all devices",
    "handles_rebound": "handles bound to another stream: reused and repaired handles",
    "handles_repaired": "handles repaired after their caller had destroyed them or bound them elsewhere",
    "handles_reused": "idle handles given to a new owner",
    "operands_copied": "operands that launches copied, because cuDNN is not known to compute rightly with their form",
    "plan_build_microseconds": "host time in building plans",
    "plan_files_loaded": "plans found in the plan directory, for any device",
    "plan_files_missed": "plans missing in the plan directory",
    "plan_files_rejected": "files in the plan directory that were no usable plan",
    "plan_files_unwritten": "plans not written, because the plan directory is full or read-only",
    "plan_files_written": "plans written to the plan directory",
    "plans_built": "plans built, or loaded from the plan directory",
    "plans_cached": "plans kept now",
    "plans_evicted": "plans dropped to make room",
    "scratch_bytes": "bytes of scratch allocated now, including the scratch of captures",
    "scratch_bytes_captured": "bytes of scratch given to captures, which stay until `trim(captured=True)`",
    "scratch_bytes_peak": "the highest bytes of scratch at one time on a device, added up over all devices",
    "scratch_bytes_recorded": "bytes of scratch of recorded programs, which stay until the programs are closed",
    "slots_lost": "slots lost by an interrupt, whose handle and scratch stay until the process ends",
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
        """Return the change of each counter since an earlier snapshot.

        The change of a peak is its rise.
        """
        return Stats({name: value - earlier.get(name, 0) for name, value in self.items()})
