"""Save and restore the memory outside a program that its replays write.

Before a program is replayed only for timing, this memory is saved. Afterwards it is restored, because the caller asked for no
replay.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from handlepool._util.names import kind_of
from handlepool.errors import ArgumentError
from handlepool.order.reached import piece_of
from handlepool.recording import tensors
from handlepool.recording.update import Inputs, is_foreign
from handlepool.tensors.inference import dense_strides
from handlepool.tensors.layout import Piece, Ranges, Token, share

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording


class Outside:
    """Save and restore arrays outside the program that a replay may change.

    If all work of the program is nodes, whose writes are known, these are the arrays that the nodes write. Plain work may write
    any array that the function was given. So if there is plain work, all given arrays are saved.

    The object is used with the program's device current. Its copies run on the current stream.

    Parameters
    ----------
    recording : Recording
        A recording with lanes.
    name : str
        Name of the program.
    inputs : Inputs

    Raises
    ------
    ArgumentError
        If a replay may write an array that cannot be copied, or memory that is in no known array. The message names the array or
        the call.
    """

    def __init__(self, recording: "Recording", name: str, inputs: Inputs) -> None:
        self._driver = recording.pool.driver
        self._device = recording.device
        self._name = name
        self._arrays: list[Any] = []
        self._saved: list[Any] = []
        self._restored = False
        lanes = recording.lanes
        assert lanes is not None
        # A step without a lane is plain work, whose writes are unknown.
        unseen = any(step.lane is None for step in lanes.steps)
        own = Ranges(recording.own)
        calls = [(written, f"{step.name} at {step.place}") for step, (_, written) in zip(lanes.steps, lanes.used, strict=True)]
        calls.append(([*recording.writes], name))
        written: dict[Piece, str] = {}
        for pieces, call in calls:
            for piece in pieces:
                if isinstance(piece, Token):
                    raise self._refused(f"{call} changes an object that is no array and cannot be copied")
                if piece[1] > piece[0] and not own.have(piece):
                    written.setdefault(piece, call)
        known: list[Piece] = []
        for place, value in self._given(recording, inputs):
            memory = piece_of(self._driver, value)
            if memory is None:
                if unseen and is_foreign(value):
                    raise self._not_copied(place, value)
                continue
            # An empty array, or an array over memory that is already noted, needs no copy.
            if memory[1] <= memory[0] or memory in known:
                continue
            writes = any(share(memory, piece) for piece in written)
            if writes or unseen:
                array = self._array(place, value, writes)
                if array is not None:
                    self._arrays.append(array)
                    known.append(memory)
        # Only memory that an argument or a kept array covers can be saved. If a call writes other memory, the timing is refused.
        for piece, call in written.items():
            if not any(_has(memory, piece) for memory in known):
                raise self._refused(f"{call} writes memory that no argument of the function covers completely")

    def save(self) -> None:
        """Enqueue copies of all arrays."""
        driver = self._driver
        for array in self._arrays:
            strides = [step * array.dtype.itemsize for step in dense_strides(array.shape)]
            saved = driver.empty(array.shape, strides, array.dtype)
            driver.copy(saved, array)
            self._saved.append(saved)

    def restore(self) -> None:
        """Enqueue copies that restore the saved arrays, at the first call only."""
        if not self._restored:
            # If `save` failed halfway, only the first arrays were saved, and only these are restored.
            for array, saved in zip(self._arrays, self._saved, strict=False):
                self._driver.copy(array, saved)
            self._restored = True

    def _given(self, recording: "Recording", inputs: Inputs) -> Iterator[tuple[str, Any]]:
        yield from inputs.arrays()
        for value in recording.kept.values():
            yield f"an array that {self._name} keeps", value

    def _array(self, place: str, value: Any, writes: bool) -> Any:
        if isinstance(value, self._driver.array_types):
            found: Any = value
            return found if getattr(found.flags, "writeable", True) else None
        if tensors.takes(self._driver, value, self._device):
            return tensors.elements(self._driver, f"{self._name}: {place}", value)
        if writes or (is_foreign(value) and not isinstance(value, np.ndarray)):
            raise self._not_copied(place, value)
        return None

    def _not_copied(self, place: str, value: object) -> ArgumentError:
        return self._refused(f"{place}, a {kind_of(value)}, may be written, and the {self._driver.name} driver cannot copy it")

    def _refused(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"{self._name} cannot be replayed for timing, because the changes of a replay could not be undone: {why}. "
            "Record it with different numbers of lanes instead, and time replays of these programs yourself"
        )


def _has(memory: Piece, piece: Piece) -> bool:
    """Return whether ``memory`` is known to cover ``piece``.

    Memory with gaps is only known to cover an equal piece.
    """
    return memory == piece or (memory[2] is None and memory[0] <= piece[0] and piece[1] <= memory[1])
