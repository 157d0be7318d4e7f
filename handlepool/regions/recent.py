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

    __slots__ = ("_launches", "_outputs", "_read_from", "_read_to", "_written_from", "_written_to")

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._outputs: dict[int, tuple[Track, int, int]] = {}  # by address, the call that wrote it, and how many bytes
        self._read_from = self._written_from = 1 << 63  # the first byte of what was read, and the last; the same of the outputs
        self._read_to = self._written_to = -1

    def __iter__(self) -> Iterator[Launch]:
        """Give the launches in the order in which they were given to streams."""
        return iter(self._launches)

    def meet(self, addresses: Sequence[int], operands: Operands) -> Needs | None:
        """Return what a launch waits for; None for one that has to be looked up, and so all of these."""
        if not operands.dense:
            return None
        needs = NOTHING
        longest, inputs = operands.longest, operands.inputs
        first, last = outputs_from, outputs_to = self._written_from, self._written_to
        earliest, latest = low, high = self._read_from, self._read_to
        for start in addresses:  # inputs first, counted by hand: two slices take as long as a look-up
            end = start + longest
            if inputs:
                inputs -= 1
                if first < end and start < last:
                    output = self._outputs.get(start)
                    if output is None:
                        return None
                    track, call, reach = output
                    if reach != operands.read[addresses.index(start)]:
                        return None
                    if not needs:
                        needs = {track: call}
                    elif needs.get(track, 0) < call:
                        needs[track] = call
                if start < low:
                    low = start
                if end > high:
                    high = end
                continue
            if operands.written and ((first < end and start < last) or (earliest < end and start < latest)):
                return None
            if start < outputs_from:
                outputs_from = start
            if end > outputs_to:
                outputs_to = end
        self._read_from, self._read_to, self._written_from, self._written_to = low, high, outputs_from, outputs_to
        return needs

    def note(self, addresses: Sequence[int], operands: Operands, track: Track) -> None:
        """Write down a launch that was met, as the next call of a stream."""
        call = track.count = track.count + 1
        self._launches.append((addresses, operands, track, call))
        if operands.single:
            self._outputs[addresses[-1]] = track, call, operands.outputs[0]
        else:
            for start, reach in zip(addresses[operands.inputs :], operands.outputs, strict=True):
                self._outputs[start] = track, call, reach
