"""Calls of graph functions: what is launched, and the checks of its arrays."""

from typing import Any

from handlepool.drivers.base import Driver, check_operands
from handlepool.errors import ArgumentError
from handlepool.layouts import Layout
from handlepool.plans import Plan
from handlepool.pool import HandlePool
from handlepool.slots import Slot


class GraphCall:
    """A call of a graph function with its outputs allocated, to be launched on a slot."""

    __slots__ = ("_pool", "operands", "plan", "result")

    def __init__(self, pool: HandlePool, plan: Plan, operands: tuple[Any, ...], result: Any) -> None:
        self._pool = pool
        self.plan = plan
        self.operands = operands
        self.result = result

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, and return the outputs."""
        handle = slot.handle
        if handle.stream is not slot.pointer:
            handle = self._pool.sound(slot).handle
        executable = self.plan.executable
        executable.launch(handle, self.operands, slot.reserve(executable.workspace_size), slot.buffer)
        return self.result


def check_apart(name: str, driver: Driver, plan: Plan, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
    """Raise where an output lies over an input or another output: elements are written before all that need the input have read
    it. Where each element depends on those at its place alone, an output may be an input, exactly."""
    pointer = driver.array_pointer
    try:
        taken = [(begin := pointer(array), begin + layout.reach) for array, layout in zip(arrays, plan.inputs, strict=True)]
        for out, layout in zip(outs, plan.outputs, strict=True):
            start = pointer(out)
            end = start + layout.reach
            for index, (begin, stop) in enumerate(taken):
                if start < stop and begin < end:
                    _refuse_overlap(name, plan, index, layout if begin == start else None)
            taken.append((start, end))
    except AttributeError:  # no array of the driver's
        check_arrays(name, driver, driver.current_device(), arrays + outs)
        raise


def _refuse_overlap(name: str, plan: Plan, index: int, same: Layout | None) -> None:
    if index >= len(plan.inputs):
        raise ArgumentError(f"out= of {name} shares memory with another output; pass an array of its own for each")
    if not plan.in_place or same != plan.inputs[index]:
        raise ArgumentError(f"out= of {name} shares memory with argument {index}; pass an array of its own")


def check_hashable(name: str, options: dict[str, Any]) -> None:
    """Raise for an option that cannot be a part of a key."""
    for option, value in options.items():
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"{name} was given {option}={value!r}, which cannot be hashed; options are a part of the plan's key, so pass a "
                f"tuple for a list"
            ) from None


def check_arrays(name: str, driver: Driver, device: int, arrays: tuple[Any, ...]) -> None:
    """The one place where arguments are looked at; a hit has seen their like before. A `Layout` was looked at by `plan_for`."""
    if not arrays:
        raise ArgumentError(f"{name} was called without arrays")
    if type(arrays[0]) is not Layout:
        check_operands(driver, name, device, arrays)
