"""The first launches of a region, as long as each of them wrote memory of its own: then nothing has to be looked up.

Most regions stay so. What a launch reads is then the output of one that is known, byte for byte, or lies outside of all that was
written, from its first byte to its last. What it writes was allocated for it, or lies outside of all that was used.
"""

from collections.abc import Iterator, Sequence

from handlepool.regions.accesses import Operands
from handlepool.regions.track import NOTHING, Needs, Track

Launch = tuple[Sequence[int], Operands, Track, int]
"""The addresses of its operands, what it reads and writes of these, its stream, and which call of that it is."""


class Recent:
    """Launches of which none wrote what another one used, other than to be read."""

    __slots__ = ("_launches", "_outputs", "_used_from", "_used_to", "_written_from", "_written_to")

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._outputs: dict[int, tuple[int, Track, int]] = {}  # by address: bytes, and the call that wrote them
        self._used_from = self._written_from = 1 << 63
        self._used_to = self._written_to = -1

    def __iter__(self) -> Iterator[Launch]:
        """Give the launches in the order in which they were given to streams."""
        return iter(self._launches)

    def meet(self, addresses: Sequence[int], operands: Operands) -> Needs | None:
        """Return what a launch waits for; None for one that has to be looked up, and so all of these."""
        if not operands.dense:
            return None
        longest, written_from, written_to = operands.longest, self._written_from, self._written_to
        needs = NOTHING
        inputs = addresses[: operands.inputs]
        for start in inputs:
            if written_from < start + longest and start < written_to:
                output = self._outputs.get(start)
                if output is None or output[0] != operands.read[inputs.index(start)]:
                    return None
                _, track, call = output
                if needs is NOTHING:
                    needs = {track: call}
                elif needs.get(track, 0) < call:
                    needs[track] = call
        used_from, used_to = min(addresses), max(addresses) + longest
        if operands.written:
            for start in addresses[operands.inputs :]:
                if self._used_from < start + longest and start < self._used_to:
                    return None
        if used_from < self._used_from:
            self._used_from = used_from
        if used_to > self._used_to:
            self._used_to = used_to
        return needs

    def note(self, addresses: Sequence[int], operands: Operands, track: Track) -> None:
        """Write down a launch that was met, as the next call of a stream."""
        call = track.count = track.count + 1
        self._launches.append((addresses, operands, track, call))
        for start, reach in zip(addresses[operands.inputs :], operands.outputs):  # noqa: B905 (it doubles what this takes)
            self._outputs[start] = reach, track, call
            if start < self._written_from:
                self._written_from = start
            if start + reach > self._written_to:
                self._written_to = start + reach
