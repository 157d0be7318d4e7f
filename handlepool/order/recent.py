"""The first launches of a region, as long as each of them wrote memory of its own: then nothing has to be looked up.

Most regions stay so. What a launch reads is then the output of one that is known, byte for byte, or lies in a block that none of
them wrote to. What it writes was allocated for it, or lies in a block that none of them used. Blocks are what the array library's
pool gave out: two that live at once share no byte, and these live as long as they are known here.
"""

from collections.abc import Iterator, Sequence

from handlepool.order.accesses import Operands
from handlepool.order.track import NOTHING, Needs, Track

Launch = tuple[Sequence[int], Operands, Track, int]
"""The addresses of its operands, what it reads and writes of these, its stream, and which call of that it is."""


class Recent:
    """Launches of which none wrote what another one used, other than to be read.

    Parameters
    ----------
    block_type : type
        The driver's; memory of any other kind is looked up.
    """

    __slots__ = ("_block_type", "_launches", "_outputs", "_written")

    def __init__(self, block_type: type) -> None:
        self._block_type = block_type
        self._launches: list[Launch] = []
        self._outputs: dict[int, tuple[Track, int, int]] = {}  # by address, the call that wrote it, and how many bytes
        self._written: dict[object, bool] = {}  # of the blocks that launches used, whether one was written to

    def __iter__(self) -> Iterator[Launch]:
        """Give the launches in the order in which they were given to streams."""
        return iter(self._launches)

    def look_up(self, addresses: Sequence[int], operands: Operands, blocks: Sequence[object]) -> Needs | None:
        """Return what a launch waits for; None for one that has to be looked up, and so all of these."""
        needs, written, index = NOTHING, self._written, 0
        for reach in operands.read:  # counted by hand: a `zip` takes as long as two look-ups
            block = blocks[index]
            if block not in written:
                if type(block) is not self._block_type:
                    return None
                written[block] = False
            elif written[block]:
                output = self._outputs.get(addresses[index])
                if output is None or output[2] != reach:
                    return None
                track, call, _ = output
                if not needs:
                    needs = {track: call}
                elif needs.get(track, 0) < call:
                    needs[track] = call
            index += 1
        block = blocks[-1]
        if type(block) is not self._block_type or (operands.written and block in written):
            return None
        if operands.simple:
            return needs
        for block in blocks[index:-1]:
            if type(block) is not self._block_type or (operands.written and block in written):
                return None
        return needs if operands.dense else None

    def note(self, addresses: Sequence[int], operands: Operands, blocks: Sequence[object], track: Track, call: int) -> None:
        """Write down a launch that was looked up, as a call of a stream."""
        self._launches.append((addresses, operands, track, call))
        if operands.simple:
            self._outputs[addresses[-1]] = track, call, operands.outputs[0]
            self._written[blocks[-1]] = True
        else:
            inputs = operands.inputs
            for start, reach, block in zip(addresses[inputs:], operands.outputs, blocks[inputs:], strict=True):
                self._outputs[start] = track, call, reach
                self._written[block] = True
