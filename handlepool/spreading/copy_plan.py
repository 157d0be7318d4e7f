"""Prepare the copies into a program's inputs and out of its outputs."""

from typing import Any

from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.recording.instances import Instance
from handlepool.recording.outputs import steps_without_gaps
from handlepool.recording.sharing import rebuilt
from handlepool.recording.update import is_foreign
from handlepool.recording.variants import Variant
from handlepool.tensors.layout import one_run


class CopyPlan:
    """The copies of items of one geometry to and from an instance.

    Attributes
    ----------
    variant : Variant
        The variant that the instance belongs to.
    instance : Instance
        The instance that computes the items.
    holds : callable
        Returns whether the function still reaches the values of the recording, see `Guards`.
    inputs, outputs : list of array
        The program's arrays, in order. If the function returned an output in several places, the output is listed once.
    returned
        The value of the function under capture: the outputs in lists, tuples and dictionaries.
    results : list of tuple
        Shape, strides and type of the result for each output.
    sizes : list of int
        Bytes of each input.
    plain : bool
        Whether each output is one run of bytes without gaps.
    spare : list of tuple
        Staging arrays that no item in flight uses: for each item the arrays for its inputs, and the arrays for its results if
        results go to the host.
    """

    __slots__ = ("holds", "inputs", "instance", "outputs", "plain", "results", "returned", "sizes", "spare", "variant")

    def __init__(self, driver: Driver, variant: Variant, instance: Instance) -> None:
        assert variant.guards is not None
        self.variant, self.instance, self.holds = variant, instance, variant.guards.holds
        inputs = self.inputs = instance.inputs
        self.returned = instance.outputs
        self.sizes = [each.nbytes for each in inputs]
        found, kind = [*leaves(self.returned)], driver.array_types[0]
        self.outputs: list[Any] = [*{id(each): each for each in found if type(each) is kind}.values()]
        self.results = [(each.shape, steps_without_gaps(each), each.dtype) for each in self.outputs]
        pairs = zip(self.outputs, self.results, strict=True)
        runs = [one_run(each.shape, each.strides, strides, each.dtype.itemsize) for each, (_, strides, _) in pairs]
        self.plain = any(runs) and all(runs) and not any(is_foreign(each) for each in found if type(each) is not kind)
        self.spare: list[tuple[list[Any], list[Any]]] = []

    def value(self, results: list[Any]) -> Any:
        """Return the function's value, with results in place of outputs."""
        places = {id(output): result for output, result in zip(self.outputs, results, strict=True)}
        return rebuilt(self.returned, lambda output: places.get(id(output), output))
