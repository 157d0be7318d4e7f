"""Copy an item into a program's inputs, and outputs into results."""

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
    """An instance for one geometry of items, with copies for each item.

    Attributes
    ----------
    variant : Variant
        The key's programs, whose guards an item asks.
    instance : Instance
    holds : callable
        Returns whether the values that the function reaches are as they were.
    inputs, outputs : list of array
        The program's arrays, in order. An output that the function returned in several places is listed once.
    returned
        The nested structure in which the function returned the outputs.
    results : list of tuple
        Shape, strides and type of each result.
    sizes : list of int
        Bytes of each input.
    plain : bool
        Whether each output is one run of bytes without gaps.
    spare : list of tuple
        Staging arrays that no item in flight uses. If results go to the host, the arrays from which they are copied are
        included.
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
        """Return results in the places of the outputs."""
        places = {id(output): result for output, result in zip(self.outputs, results, strict=True)}
        return rebuilt(self.returned, lambda output: places.get(id(output), output))
