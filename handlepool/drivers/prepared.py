"""Define the copies of a prepared call of a program.

A call copies the caller's arrays into the program's inputs, replays the program, and copies the program's outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from handlepool.tensors.layout import one_run

Run = Callable[..., Sequence[Any]]
"""Enqueue a call: ``run(arrays, pointer, launch, begin=None)``.

``arrays`` are the caller's arrays, and ``pointer`` is the pointer of the stream. If a copy is not a single run of bytes, this
stream must be the current stream. ``launch()`` launches the program's graph. ``begin()`` is called after the allocations and
before the first copy. The function returns new arrays in memory of the current stream.
"""


class Copies(NamedTuple):
    """Hold the arrays that a prepared call copies.

    Attributes
    ----------
    inputs : sequence of array
        The program's own input arrays. A call copies the caller's arrays, which have the same layouts, into them.
    outputs : sequence of array
        The program's own output arrays, without duplicates. A call returns copies of them.
    steps : sequence of tuple
        For each output, the strides in bytes of its copy.
    back : sequence of int
        Indices of the inputs that a call copies back into the caller's arrays after the launch.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    steps: Sequence[tuple[int, ...]]
    back: Sequence[int] = ()

    def runs(self) -> tuple[list[bool], list[bool]]:
        """Return whether each copy is a single run of bytes.

        The first list is for the inputs, and the second for the outputs.
        """
        lies = [(each, each.strides) for each in self.inputs], zip(self.outputs, self.steps, strict=True)
        bring, take = ([one_run(each.shape, each.strides, steps, each.dtype.itemsize) for each, steps in some] for some in lies)
        return bring, take


def prepared(driver: Any, copies: Copies) -> Run:
    """Return a function that enqueues a program's call, on any driver."""
    bring, take = copies.runs()

    def copy(target: Any, source: Any, run: bool, pointer: int) -> None:
        if run:
            driver.copy_run(target, source, pointer)
        elif target.size:
            driver.copy(target, source)

    def run(
        arrays: Sequence[Any], pointer: int, launch: Callable[[], object], begin: Callable[[], object] | None = None
    ) -> Sequence[Any]:
        # All allocations come first, so that a failed allocation leaves the program's arrays unchanged.
        with driver.relaxed():
            made = [driver.empty(each.shape, steps, each.dtype) for each, steps in zip(copies.outputs, copies.steps, strict=True)]
        if begin is not None:
            begin()
        # The stream keeps this order: the inputs are copied before the launch, and the outputs after the launch.
        for target, array, whole in zip(copies.inputs, arrays, bring, strict=True):
            copy(target, array, whole, pointer)
        launch()
        for result, output, whole in zip(made, copies.outputs, take, strict=True):
            copy(result, output, whole, pointer)
        for place in copies.back:
            copy(arrays[place], copies.inputs[place], bring[place], pointer)
        return made

    return run
