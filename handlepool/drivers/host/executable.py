"""Launch a graph on the host as a list of steps.

Each step of the evaluator's plan is one operation of the handle's stream. Work of another stream can run between two steps, as
between two kernels. So if two streams share a workspace, results become wrong here as on a GPU (guarantee 5).
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from handlepool.drivers.executable import ALIGNMENT, OperandCopy, SavedPlan, scratch_of
from handlepool.drivers.host.array import Raw, address_of, raw_view
from handlepool.drivers.host.contract import HandleUse
from handlepool.drivers.host.memory import Block, Memory, accesses, plain_reads, tell_plain
from handlepool.drivers.host.streams import StreamTable
from handlepool.errors import ArgumentError, ContractError
from handlepool.tensors.inference import dense_strides

if TYPE_CHECKING:
    from handlepool.drivers.host.evaluator import Evaluation


class HostExecutable:
    """A planned graph of one device; see `handlepool.drivers.executable.Executable`."""

    candidates = 1
    untried = False

    def __init__(
        self,
        plan: "Evaluation",
        geometry: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        copies: Sequence[OperandCopy],
        device: int,
        streams: StreamTable,
        memory: Memory,
        note: Callable[[str], None],
        check_operands: Callable[[str, int, Sequence[Any], Callable[[int], str], Collection[int]], None],
        checks: bool,
        name: str,
        titles: Sequence[str],
    ) -> None:
        self.name, self.titles = name, titles
        self._copies = copies
        self._copied = [copy.operand for copy in copies]
        # The scratch of the operand copies follows the plan's workspace, at an aligned offset.
        self._copies_at = -(-plan.workspace_size // ALIGNMENT) * ALIGNMENT
        self.workspace_size: int = self._copies_at + scratch_of(copies) if copies else plan.workspace_size
        self.engine: str = plan.engine
        self.device = device
        self._steps = tuple(plan.steps)
        # For each operand, the shape and the strides, in elements, that the graph declares. An array of a launch may have other
        # strides.
        self._geometry = geometry
        self._streams = streams
        self._memory = memory
        self._note = note
        self._check_operands = check_operands
        self._checks = checks

    def __repr__(self) -> str:
        return f"<HostExecutable {self.engine} of device {self.device}, {len(self._steps)} steps>"

    def launch(
        self,
        handle: Any,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Queue the steps on the handle's stream.

        See `handlepool.drivers.executable.Executable.launch`.
        """
        # The checks come before `_note` counts the launch, so that a refused launch does not count.
        self._check_operands(self.name, self.device, operands, self.titles.__getitem__, self._copied)
        if check is not None:
            check([address_of(array) for array in operands])
        self._note("launch")
        use = HandleUse(self._streams, handle, "launch", self._checks)
        with use:
            if self._checks and handle.device != self.device:
                raise ContractError(f"{self!r} was launched with {handle!r}; use a handle of the executable's device")
            # Several steps may write the same operand, so the set holds each index once.
            written = {index for step in self._steps for index in step.writes}
            for index in written:
                if not operands[index].flags.writeable:
                    raise ArgumentError(
                        f"{self.name}: {self.titles[index]} is read-only and cannot be written; pass another array"
                    )
            queue = use.bound_queue()
            checked = self._streams.scheduler.order is not None
            if (watched := self._streams.thread.host_data) is not None:
                tell_plain(watched[1], [operands[index] for index in dict.fromkeys(self._reads())], self.name)
            views = [raw_view(array) for array in operands]
            plain = next((self.titles[index] for index in written if views[index][1] is None), None)
            if plain is not None:
                # ``plain`` is an output in memory that no driver owns. A reader of that memory cannot wait for a replay, so a
                # capture refuses the launch.
                self._streams.captures.refuse_plain(queue, f"a write of {self.name} to {plain}")
            block, space = self._workspace(workspace)
            copied = {copy.operand: self._scratch(space, copy, views[copy.operand][0].dtype) for copy in self._copies}
            memory = [copied.get(index, view) for index, (view, _) in enumerate(views)]
            arrays = [_declared(array, *geometry) for array, geometry in zip(memory, self._geometry, strict=True)]

            def give(run: Callable[[], object], reads: Sequence[int], writes: Sequence[int], name: str) -> None:
                # Every step counts as a write to the whole workspace, so the race checker finds two streams that share a
                # workspace.
                touched = accesses([(space, block), *(views[index] for index in writes)], writes=True)
                touched += accesses([views[index] for index in reads], writes=False)
                # If the launch is captured, each replay reads the values that NumPy's arrays have by then. So the host may change
                # them, and the race checker does not watch them.
                if checked and queue.capture is None:
                    touched += plain_reads(operands[index] for index in reads)
                self._streams.give(queue, run, touched, name)

            def copy_all(output: bool) -> None:
                for copy in self._copies:
                    if copy.output is output:
                        scratch = copied[copy.operand]
                        ours = _strided(scratch[copy.first // scratch.itemsize :], copy.shape, copy.steps or None)
                        theirs = _strided(views[copy.operand][0], copy.shape, copy.strides)
                        place = (copy.operand,)
                        if output:
                            give(partial(np.copyto, theirs, ours), (), place, "copy of an output")
                            continue
                        # The graph reads the padding around the copied elements as zeros. The workspace holds old data, so it is
                        # cleared first.
                        if copy.zeros:
                            give(partial(scratch.fill, 0), (), (), "zeros around a copy")
                        give(partial(np.copyto, ours, theirs), place, (), "copy of an operand")

            copy_all(False)
            for step in self._steps:
                reads, writes = ([index for index in indices if index not in copied] for indices in (step.reads, step.writes))
                give(partial(step.run, arrays, space), reads, writes, step.name)
            copy_all(True)
        self.untried = False
        # Code that reads NumPy's memory cannot wait for a stream, so this call returns after the work.
        if plain is not None:
            self._streams.wait_on_host(queue.tail, f"{self.name}, which writes NumPy's memory")

    def _reads(self) -> list[int]:
        return [index for step in self._steps for index in step.reads]

    def shortcut(self, *_: object) -> None:
        """Return None, because the host driver has no faster launch than `launch`."""

    def save(self) -> SavedPlan:
        """Return the plan's geometry.

        Planning takes no time on the host, so a saved plan need only tell whether it belongs to a graph.
        """
        return SavedPlan(self.engine, self.workspace_size, self.candidates, repr(self._geometry).encode())

    def _scratch(self, space: Raw, copy: OperandCopy, dtype: np.dtype[Any]) -> Raw:
        start = self._copies_at + copy.offset
        return space[start : start + copy.nbytes].view(dtype)

    def _workspace(self, pointer: int) -> tuple[Block | None, Raw]:
        needed = self.workspace_size
        if not needed:
            return None, np.empty(0, np.uint8)
        if not pointer:
            raise ContractError(f"launch of {self!r} with a null workspace; pass scratch of {needed} bytes")
        if pointer % ALIGNMENT:
            raise ContractError(
                f"launch of {self!r} with a workspace at {pointer:#x}, which is not aligned to {ALIGNMENT} bytes; pass "
                "an aligned address"
            )
        block, offset = self._memory.current.find(pointer, needed, f"workspace of {self!r}")
        return block, block.memory[offset : offset + needed]


def _declared(array: Raw, shape: tuple[int, ...], strides: tuple[int, ...]) -> Raw:
    """Return the array's memory with the shape and strides of the graph.

    A GPU also uses the shape and strides that the graph declares, and not the array's own.
    """
    if array.size < math.prod(shape):
        raise ContractError(
            f"a launch got an array of shape {array.shape}, and the graph declares this operand as {shape}; pass "
            "an array with at least as many elements"
        )
    return _strided(array, shape, [step * array.itemsize for step in strides])


def _strided(array: Raw, shape: Sequence[int], strides: Sequence[int] | None) -> Raw:
    """Return the array's memory with another shape and strides.

    The view begins at the array's first element. If ``strides`` is None, the view is dense.
    """
    if strides is None:
        strides = [step * array.itemsize for step in dense_strides(shape)]
    return as_strided(array, shape, strides)
