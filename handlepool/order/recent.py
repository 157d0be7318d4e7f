"""Order a region's first launches without entries of the books.

This works as long as each launch wrote memory of its own. Most regions stay in this state. Then each input of a launch is
exactly the output of a known launch, or lies in a block that no known launch wrote to. Each output was allocated for the
launch, or lies in a block that no known launch used. Blocks come from the array library's pool. Two live blocks share no byte,
and a block stays alive as long as `Recent` knows it.
"""

from collections.abc import Iterator, Sequence

from handlepool.order.track import NOTHING, Needs, Track
from handlepool.order.uses import Operands

Launch = tuple[Sequence[int], Operands, Track, int]
"""A launch's addresses, its operands, its stream and its call number."""


class Recent:
    """Launches that each wrote memory of their own.

    If another launch used such memory, that launch read the memory after the write.

    Parameters
    ----------
    block_type : type
        The driver's type of block. For a launch that uses memory of any other kind, `look_up` returns None.
    """

    __slots__ = ("_block_type", "_launches", "_outputs", "_written")

    def __init__(self, block_type: type) -> None:
        self._block_type = block_type
        self._launches: list[Launch] = []
        # This maps the address of each output to the track and the call that wrote the output, and to its size in bytes.
        self._outputs: dict[int, tuple[Track, int, int]] = {}
        # This maps each block that launches used to whether a launch wrote to it.
        self._written: dict[object, bool] = {}

    def __iter__(self) -> Iterator[Launch]:
        """Yield the launches in the order in which streams received them."""
        return iter(self._launches)

    def look_up(self, addresses: Sequence[int], operands: Operands, blocks: Sequence[object]) -> Needs | None:
        """Return the calls that a launch waits for, or None.

        None means that only entries of `Uses` can give the answer. Then the books make entries for all launches noted here.
        """
        needs, written, index = NOTHING, self._written, 0
        # Count the index by hand, because a `zip` takes as long as two look-ups.
        for reach in operands.read:
            block = blocks[index]
            if block not in written:
                # Two different blocks of the array library's pool share no byte. Any other memory may overlap a block.
                if type(block) is not self._block_type:
                    return None
                written[block] = False
            elif written[block]:
                output = self._outputs.get(addresses[index])
                # If this condition holds, the launch reads a part of an output, or other memory in an output's block. Only the
                # entries of `Uses` can tell the two cases apart.
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
        """Note a launch for which `look_up` returned needs."""
        self._launches.append((addresses, operands, track, call))
        if operands.simple:
            self._outputs[addresses[-1]] = track, call, operands.outputs[0]
            self._written[blocks[-1]] = True
        else:
            inputs = operands.inputs
            for start, reach, block in zip(addresses[inputs:], operands.outputs, blocks[inputs:], strict=True):
                self._outputs[start] = track, call, reach
                self._written[block] = True
