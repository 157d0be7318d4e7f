"""Define the copies of a prepared call.

The copies go into a program's inputs and out of its outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from handlepool.tensors.layout import one_run

Run = Callable[..., Sequence[Any]]
"""Enqueue a call: ``run(arrays, pointer, launch, begin=None)``.

The pointer is of the stream. It is the current stream where a copy is no single run of bytes. ``begin`` is called after the
allocations and before the first copy. The value are new arrays, of the current stream's memory."""


class Copies(NamedTuple):
    """The arrays that a prepared call copies.

    Attributes
    ----------
    inputs : sequence of array
        The program's own input arrays, which a call writes. The caller's arrays have the same layouts.
    outputs : sequence of array
        The program's own output arrays, each once. A call returns copies.
    steps : sequence of tuple
        Strides in bytes of each copy.
    back : sequence of int
        Places of inputs that are copied back into the caller's arrays.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    steps: Sequence[tuple[int, ...]]
    back: Sequence[int] = ()

    def runs(self) -> tuple[list[bool], list[bool]]:
        """Tell which inputs and outputs are copied as a run of bytes."""
        lies = [(each, each.strides) for each in self.inputs], zip(self.outputs, self.steps, strict=True)
        bring, take = ([one_run(each.shape, each.strides, steps, each.dtype.itemsize) for each, steps in some] for some in lies)
        return bring, take


def prepared(driver: Any, copies: Copies) -> Run:
    """Return a function that enqueues a call, for any driver."""
    bring, take = copies.runs()

    def copy(target: Any, source: Any, run: bool, pointer: int) -> None:
        if run:
            driver.copy_run(target, source, pointer)
        elif target.size:
            driver.copy(target, source)

    def run(
        arrays: Sequence[Any], pointer: int, launch: Callable[[], object], begin: Callable[[], object] | None = None
    ) -> Sequence[Any]:
        # All allocations come first, so that a failure leaves the program unchanged.
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
