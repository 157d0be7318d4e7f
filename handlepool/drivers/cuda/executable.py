"""A built cuDNN graph of the cuda driver, and the one place where it is launched."""

import ctypes
from array import array as buffer
from collections.abc import Callable, Sequence
from typing import Any

import cudnn
import cupy
import numpy as np
from cupy.cuda.memory import MemoryPointer, UnownedMemory

from handlepool.drivers.cuda import fast_launch
from handlepool.drivers.protocol import ALIGNMENT, AliasPair, Copy, Driver, Handle, check_operands, scratch_of
from handlepool.errors import ArgumentError, GraphNotSupportedError

MOST_OPERANDS = 64


def new_buffer() -> Any:
    """Return an array for the operands' addresses; see `Driver.launch_buffer`."""
    return buffer("Q", bytes(8 * MOST_OPERANDS))


class CudaExecutable:
    """A built `cudnn.pygraph`, launched through its raw entry where that is there."""

    def __init__(
        self,
        driver: Driver,
        graph: Any,
        operands: Sequence[Any],
        copies: Sequence[Copy] = (),
        *,
        name: str,
        titles: Sequence[str],
        workspace_limit: int | None = None,
        allow_tf32: bool = True,
        deterministic: bool = False,
        heuristics: Sequence[str] = ("A", "FALLBACK"),
        plan_index: int | None = None,
    ) -> None:
        if len(operands) > MOST_OPERANDS:
            raise ArgumentError(f"a graph of {len(operands)} real tensors; at most {MOST_OPERANDS} can be launched")
        notes = []
        if not allow_tf32:
            notes.append(cudnn.numerical_note.TENSOR_CORE)
        if deterministic:
            notes.append(cudnn.numerical_note.NONDETERMINISTIC)
        try:
            graph.validate()
            graph.build_operation_graph()
            if workspace_limit is not None:
                graph.deselect_workspace_greater_than(workspace_limit)
            if notes:
                graph.deselect_numeric_notes(notes)
            graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in heuristics])
            if plan_index is not None:
                graph.select_plan(plan_index)
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError, NotImplementedError) as error:
            raise GraphNotSupportedError(f"cuDNN {cudnn.backend_version()} answered: {error}") from error
        self.graph = graph
        self._driver = driver
        self._device = driver.current_device()
        self.name, self.titles = name, titles
        self._copies = copies
        self._copies_at = -(-int(graph.get_workspace_size()) // ALIGNMENT) * ALIGNMENT
        self.workspace_size = self._copies_at + scratch_of(copies) if copies else int(graph.get_workspace_size())
        self.engine = str(graph.get_plan_name_at_index(graph._plan_index))  # noqa: SLF001 - the frontend tells it nowhere else
        self.candidates = int(graph.get_execution_plan_count())
        self._uids = [int(tensor.get_uid()) for tensor in operands]
        self._raw, self._index = self._raw_entry()

    def _raw_entry(self) -> tuple[Callable[..., None] | None, int]:
        """Find the entry beneath ``pygraph.execute``, a fifth of its cost; None where this frontend has no such thing.

        It takes an array of pointers in ascending order of uid, which the operands' order is made to be.
        """
        try:
            # No public name leads there; a test holds what is used here.
            lowered = self.graph._lowered_graph  # noqa: SLF001
            lowered._prepare_variant_pack_template()  # noqa: SLF001
            order = list(lowered._get_variant_pack_uids_sorted())  # noqa: SLF001
            index = self.graph._plans[self.graph._plan_index].cpp_index  # noqa: SLF001
            raw: Callable[..., None] = lowered._execute_with_raw_ptrs  # noqa: SLF001
        except (AttributeError, IndexError):
            return None, -1
        if order != self._uids or self.graph.selected_engine is not None:
            return None, -1
        return raw, -1 if index is None else index

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        check_operands(self._driver, self.name, self._device, operands, self.titles.__getitem__)
        addresses = buffer("Q", [array.data.ptr for array in operands])
        if check is not None:
            check(addresses)
        if self._copies:
            self._copy(handle, operands, workspace, False)
            for copy in self._copies:
                addresses[copy.operand] = workspace + self._copies_at + copy.offset
        raw = self._raw
        if raw is None:
            self.graph.execute(dict(zip(self._uids, addresses, strict=True)), workspace or None, handle=handle)
        else:
            location, count = addresses.buffer_info()
            raw(location, count, workspace, handle.backend_handle, self._index)
        if self._copies:
            self._copy(handle, operands, workspace, True)

    def _copy(self, handle: Handle, operands: Sequence[Any], workspace: int, output: bool) -> None:
        """Copy inputs into scratch, or outputs out of it, on the handle's stream."""
        driver, pointer = self._driver, handle.stream
        assert pointer is not None
        previous, stream = driver.current_stream(), driver.wrap_stream(pointer, None)
        driver.push_stream(stream)
        try:
            with driver.relaxed():  # CuPy may load its kernel, and the stream may be capturing
                for copy in self._copies:
                    if copy.output is output:
                        array = operands[copy.operand]
                        theirs = self._at(array.data.ptr, copy.shape, copy.strides, array.dtype)
                        start = workspace + self._copies_at + copy.offset + copy.first
                        ours = self._at(start, copy.shape, copy.steps or None, array.dtype)
                        cupy.copyto(theirs, ours) if output else cupy.copyto(ours, theirs)
        finally:
            driver.pop_stream(stream, previous)

    def _at(self, address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: np.dtype[Any]) -> Any:
        memory = UnownedMemory(address, 0, None, self._device)  # the operands and the slot keep it
        return cupy.ndarray(shape, dtype, MemoryPointer(memory, 0), strides)

    def shortcut(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        alias_pairs: Sequence[AliasPair] | None,
        single: bool,
        names: dict[str, Any],
    ) -> Callable[..., Any] | None:
        if self._raw is None or self._copies:
            return None
        device = self._device if self._driver.device_count() > 1 else None
        names = names | {"raw": self._raw, "index": self._index}
        return fast_launch.shortcut(inputs, outputs, alias_pairs, single, self.workspace_size, device, names)


assert ctypes.sizeof(ctypes.c_void_p) == 8  # the raw entry's array holds 64-bit pointers
