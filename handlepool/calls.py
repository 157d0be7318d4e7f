"""Calls of graph functions: what is launched, and the checks of its arrays."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from handlepool.condition import diagnose
from handlepool.drivers.base import Driver, check_operands
from handlepool.errors import ArgumentError
from handlepool.layouts import Layout
from handlepool.plans import Plan
from handlepool.pool import HandlePool
from handlepool.regions import thread
from handlepool.slots import Slot


class AnyCall(Protocol):
    """What a fork launches."""

    @property
    def plan(self) -> Plan:
        """What is launched; of a sequence, the first."""

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arrays, inputs and outputs."""

    @property
    def result(self) -> Any:
        """What `launch` will return."""

    @property
    def stream(self) -> int | None:
        """The stream to run on, where it is not the array library's current one."""

    @property
    def callers(self) -> Sequence[int]:
        """Streams to be in order with; see `handlepool.arrays`."""

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, in order with the callers, and return the outputs."""

    def enqueue(self, slot: Slot) -> Any:
        """Enqueue on a side slot's stream, for which a fork sees to the order."""

    def then(self, make: "Callable[[Any], AnyCall]") -> "AnyCall":
        """This call and one over its result, as one."""


class GraphCall:
    """A call of a graph function with its outputs allocated, to be launched on a slot."""

    __slots__ = ("_pool", "operands", "plan", "result")

    stream: int | None = None
    callers: Sequence[int] = ()

    def __init__(self, pool: HandlePool, plan: Plan, operands: tuple[Any, ...], result: Any) -> None:
        self._pool = pool
        self.plan = plan
        self.operands = operands
        self.result = result

    def launch(self, slot: Slot) -> Any:
        """Enqueue on the slot's stream, and return the outputs."""
        try:
            handle = slot.handle
            if handle.stream is not slot.pointer:
                handle = self._pool.sound(slot).handle
            executable = self.plan.executable
            if thread.recording is not None:
                thread.recording.keep(self.plan)
            executable.launch(handle, self.operands, slot.reserve(executable.workspace_size), slot.buffer)
        except Exception as error:
            diagnose(self._pool, error)
            raise
        return self.result

    enqueue = launch  # in a fork, which sees to the order

    def then(self, make: Callable[[Any], AnyCall]) -> "CallSequence":
        """This call and one over its result, as one."""
        return CallSequence(self, make(self.result))


class CallSequence:
    """Two calls on one stream, the second over the first one's output, in the form of a `GraphCall`."""

    __slots__ = ("_calls", "operands", "plan", "result")

    stream: int | None = None
    callers: Sequence[int] = ()

    def __init__(self, first: AnyCall, second: AnyCall) -> None:
        self._calls = (first, second)
        self.operands = first.operands + second.operands
        self.result = second.result
        self.plan = first.plan

    def launch(self, slot: Slot) -> Any:
        """Enqueue both."""
        for call in self._calls:
            call.launch(slot)
        return self.result

    enqueue = launch

    def then(self, make: Callable[[Any], AnyCall]) -> "CallSequence":
        """These and one over their result, as one."""
        return CallSequence(self, make(self.result))


def check_apart(name: str, driver: Driver, plan: Plan, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
    """Raise where an output lies over an input or another output: elements are written before all that need the input have read
    it. Where each element depends on those at its place alone, an output may be an input, exactly."""
    pointer = driver.array_pointer
    try:
        for place, out in enumerate(outs):
            layout = plan.outputs[place]
            start = pointer(out)
            end = start + layout.reach
            for index, array in enumerate(arrays):
                begin = pointer(array)
                if begin < end and start < begin + plan.inputs[index].reach:
                    _refuse_overlap(name, plan, index, layout if begin == start else None)
            for other in range(place):
                begin = pointer(outs[other])
                if begin < end and start < begin + plan.outputs[other].reach:
                    raise ArgumentError(f"out= of {name} shares memory with another output; pass an array of its own for each")
    except AttributeError:  # no array of the driver's
        check_arrays(name, driver, driver.current_device(), arrays + outs)
        raise


def _refuse_overlap(name: str, plan: Plan, index: int, same: Layout | None) -> None:
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
