"""Save and restore the memory outside a program that its replays write.

Replays that the caller did not ask for, such as replays for timing, must leave this memory as it was.
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
    """Hold the arrays outside the program that a replay may change.

    The program's device is current, and its stream is used.

    If all work is calls whose writes are known, these are the arrays that the calls write. Plain code may write every array that
    the function was given. With plain code, all given arrays therefore count.

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
        Naming an array that is written and cannot be copied, or the call that writes something else.
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
            # Empty arrays and arrays that are already noted need no copy.
            if memory[1] <= memory[0] or memory in known:
                continue
            writes = any(share(memory, piece) for piece in written)
            if writes or unseen:
                array = self._array(place, value, writes)
                if array is not None:
                    self._arrays.append(array)
                    known.append(memory)
        # Memory that is no argument and no held array cannot be saved, so its call is refused.
        for piece, call in written.items():
            if not any(_has(memory, piece) for memory in known):
                raise self._refused(f"{call} writes memory that the function was not given, or was given in part")

    def save(self) -> None:
        """Enqueue copies of all arrays."""
        driver = self._driver
        for array in self._arrays:
            strides = [step * array.dtype.itemsize for step in dense_strides(array.shape)]
            saved = driver.empty(array.shape, strides, array.dtype)
            driver.copy(saved, array)
            self._saved.append(saved)

    def restore(self) -> None:
        """Enqueue copies that restore the saved arrays, the first time only."""
        if not self._restored:
            # The lengths differ if `save` failed halfway.
            for array, saved in zip(self._arrays, self._saved, strict=False):
                self._driver.copy(array, saved)
            self._restored = True

    def _given(self, recording: "Recording", inputs: Inputs) -> Iterator[tuple[str, Any]]:
        yield from inputs.arrays()
        for value in recording.kept.values():
            yield f"an array that {self._name} holds", value

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
            "Record it with a number of lanes of your choice, and time your own replays"
        )


def _has(memory: Piece, piece: Piece) -> bool:
    """Return whether a piece of memory is known to cover another piece.

    A piece with gaps covers only an equal piece.
    """
    return memory == piece or (memory[2] is None and memory[0] <= piece[0] and piece[1] <= memory[1])
