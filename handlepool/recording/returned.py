"""Sort the arrays that a captured function returned, by their memory.

The memory decides how a call of the program returns an array: as a copy, as the caller's
argument, as a view of that argument, or as the same array each time.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from handlepool._util.names import kind_of
from handlepool.errors import CaptureError
from handlepool.recording import tensors
from handlepool.recording.capture import Recording
from handlepool.recording.keys import elements_of
from handlepool.recording.outputs import is_returned, is_unchanged
from handlepool.recording.state_kinds import is_tensor
from handlepool.recording.update import is_foreign, piece_of
from handlepool.tensors.layout import Piece, Ranges, share

View = tuple[int, int, tuple[int, ...], tuple[int, ...], Any]
"""A view of an argument.

The tuple has the argument's place, the bytes from the argument's pointer to the view's pointer, and the view's shape, strides and
type.
"""


class Returned:
    """Sort a capture's returned arrays by the owner of their memory.

    Parameters
    ----------
    recording : Recording
    name : str
        The function's name.
    inputs : list
        The program's own arrays and tensors.
    reached : Ranges
        The memory of the arrays that the guards compare.
    outputs
        The return value of the function.
    apart : bool
        Whether results that share memory are returned as separate arrays. If False, such results are refused.

    Attributes
    ----------
    own : list
        The returned arrays in the program's memory, each once. A call returns copies of them.
    places : dict
        The argument ``places`` of `builder`. Each of its functions takes an array from a list, which has the copies of ``own``
        followed by the caller's arguments.

    Raises
    ------
    CaptureError
        If a call of the program could not return a value in the same way as the function.
    """

    def __init__(
        self, recording: Recording, name: str, inputs: list[Any], reached: Ranges, outputs: object, *, apart: bool = False
    ) -> None:
        self._recording, self._name, self._reached, self._apart = recording, name, reached, apart
        self._driver = recording.pool.driver
        self._inputs = {id(each): place for place, each in enumerate(inputs)}
        self._elements = elements_of(self._driver, inputs)
        self._pieces = [piece_of(self._driver, each) for each in self._elements]
        self._owned: list[tuple[Piece, Any]] = []
        self._views: dict[int, View] = {}
        self._given: dict[int, int] = {}
        self._own_at: dict[int, int] = {}
        self._containers: set[int] = set()
        self.own: list[Any] = []
        self._add(outputs)
        first = len(self.own)
        self.places: dict[int, Callable[[Sequence[Any]], Any]] = {each: itemgetter(at) for each, at in self._own_at.items()}
        self.places |= {each: itemgetter(first + place) for each, place in self._given.items()}
        self.places |= {each: self._viewed(first, view) for each, view in self._views.items()}

    def _viewed(self, first: int, view: View) -> Callable[[Sequence[Any]], Any]:
        driver, (place, offset, *lie) = self._driver, view

        def part(values: Sequence[Any]) -> Any:
            array = values[first + place]
            return driver.part(array, driver.array_pointer(array) + offset, *lie)

        return part

    def _add(self, value: Any) -> None:
        driver = self._driver
        if is_returned(value):
            if not isinstance(value, tuple):
                if id(value) in self._containers:
                    raise CaptureError(
                        f"{self._name} returned the same {kind_of(value)} in two places, and a program would return two copies. "
                        "Return separate containers"
                    )
                self._containers.add(id(value))
            for each in value.values() if isinstance(value, dict) else value:
                self._add(each)
        elif isinstance(value, driver.array_types) or tensors.takes(driver, value, self._recording.device):
            self._add_array(value)
        elif is_foreign(value) or not is_unchanged(value):
            raise CaptureError(
                f"{self._name} returned a {kind_of(value)}, which a call of a program cannot copy. Return arrays of the "
                f"{driver.name} driver, numbers, strings or None"
            )

    def _add_array(self, value: Any) -> None:
        driver, key = self._driver, id(value)
        if key in self._inputs:
            self._given[key] = self._inputs[key]
            return
        array = elements_of(driver, [value])[0]
        piece = piece_of(driver, array)
        among = [place for place, each in enumerate(self._pieces) if share(each, piece)]
        if among:
            if len(among) > 1 or is_tensor(value):
                raise CaptureError(
                    f"{self._name} returned a view of a tensor, or of an argument that shares memory with another. Return a "
                    "copy of the view"
                )
            offset = driver.array_pointer(array) - driver.array_pointer(self._elements[among[0]])
            self._views[key] = among[0], offset, array.shape, array.strides, array.dtype
            return
        # If the array lies in a guarded array, such as a weight, a call returns this array itself, without a copy.
        if piece[0] < piece[1] and self._reached.meet(piece):
            return
        if is_tensor(value) and value.requires_grad:
            raise CaptureError(
                f"{self._name} returned a tensor that requires a gradient: call {self._name} inside torch.no_grad()"
            )
        if not is_tensor(value) and piece[0] < piece[1] and not self._recording.holds(value):
            raise CaptureError(
                f"{self._name} returned an array that it did not make, and that no attribute, variable or global holds. Return "
                "a copy of that array"
            )
        for other, known in self._owned:
            if known is value:
                return
            if share(other, piece) and not self._apart:
                one, two = [
                    (driver.array_pointer(each), each.shape, each.strides, each.dtype)
                    for each in elements_of(driver, [known, value])
                ]
                if one != two or type(known) is not type(value):
                    raise CaptureError(
                        f"{self._name} returned arrays that share memory, but a program would return separate copies. Return "
                        "arrays that share no memory"
                    )
                self._own_at[key] = self._own_at[id(known)]
                return
        self._owned.append((piece, value))
        self._own_at[key] = len(self.own)
        self.own.append(value)
