"""Count the resources and events of a pool in snapshots."""

MEANINGS = {
    "bytes_copied": "what was copied of operands for cuDNN's sake; see `handlepool.Plan.copies`",
    "captures_met": "CUDA-graph captures that a slot's scratch was asked for in",
    "create_microseconds": "host time in cudnnCreate",
    "handles_building": "handles that graphs are built with, one a device at most",
    "handles_captured": "side slots' handles held until the capture they were leased in ends",
    "handles_created": "handles made: live, idle, leased, captured, building and destroyed ones together",
    "handles_destroyed": "handles destroyed, by the pool or by a caller",
    "handles_idle": "handles that nobody has",
    "handles_leased": "side slots' handles that forks and tasks have, or that an interrupt lost",
    "handles_live": "handles that belong to a thread and a stream",
    "handles_peak": "most handles that existed at a time, of each device",
    "handles_rebound": "handles bound to a stream after another one: those reused and those repaired",
    "handles_repaired": "handles made right that their caller had destroyed or bound elsewhere",
    "handles_reused": "idle handles given to a new owner",
    "operands_copied": "operands that launches copied, since cuDNN is not known to compute rightly from where they lay",
    "plan_build_microseconds": "host time in building plans",
    "plan_files_loaded": "plans that the plan directory had, whatever the device",
    "plan_files_missed": "plans that it had not",
    "plan_files_rejected": "files of it that were no plan that could be used",
    "plan_files_unwritten": "plans that it could not take, being full or read-only",
    "plan_files_written": "plans that were written to it",
    "plans_built": "plans built, or made of what the plan directory had",
    "plans_cached": "plans kept now",
    "plans_evicted": "plans that made way for others",
    "scratch_bytes": "scratch allocated now, captured or not",
    "scratch_bytes_captured": "scratch that captures were given, which stays until `trim(captured=True)`",
    "scratch_bytes_peak": "most scratch allocated at a time, of each device",
    "scratch_bytes_recorded": "scratch of recorded programs, which stays until they are closed",
    "slots_lost": "slots that nobody has since an interrupt; handle and scratch stay to the end of the process",
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
        """Return the difference to an earlier snapshot, of a peak its rise."""
        return Stats({name: value - earlier.get(name, 0) for name, value in self.items()})
