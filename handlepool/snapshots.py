"""Snapshots of what a pool holds and has done."""


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
        """Each counter's difference to an earlier snapshot."""
        return Stats({name: value - earlier.get(name, 0) for name, value in self.items()})
