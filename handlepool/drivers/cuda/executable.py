"""Launch a built cuDNN graph of the cuda driver.

This is the only module that launches such a graph.
"""

import ctypes
from array import array as buffer
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda.memory import MemoryPointer, UnownedMemory

from handlepool.drivers.cuda import fast_launch
from handlepool.drivers.cuda.early import barrier
from handlepool.drivers.cuda.planning import MOST_OPERANDS, Planned
from handlepool.drivers.executable import AliasPair, OperandCopy
from handlepool.drivers.operands import check_operands
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle

_BYTE = np.dtype(np.uint8)


def new_buffer() -> Any:
    """Return an array for the operands' addresses; see `Driver.launch_buffer`."""
    return buffer("Q", bytes(8 * MOST_OPERANDS))


class CudaExecutable:
    """Hold and launch a built `cudnn.pygraph`.

    The launch uses the graph's raw entry, `Planned.raw`, if there is one.
    """

    def __init__(
        self,
        driver: Driver,
        planned: Planned,
        copies: Sequence[OperandCopy] = (),
        *,
        name: str,
        titles: Sequence[str],
    ) -> None:
        self.untried = planned.saved is not None
        self.save = planned.save
        self.graph = planned.graph
        self._driver = driver
        self._device = driver.current_device()
        self.name, self.titles = name, titles
        self._copies, self._copies_at = copies, planned.copies_at
        self.workspace_size, self.engine, self.candidates = planned.workspace_size, planned.engine, planned.candidates
        self._uids, self._raw, self._index = planned.uids, planned.raw, planned.index
        self._early = planned.early is not False

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        copied = [copy.operand for copy in self._copies]
        check_operands(self._driver, self.name, self._device, operands, self.titles.__getitem__, copied)
        addresses = buffer("Q", [array.data.ptr for array in operands])
        if check is not None:
            check(addresses)
        if self._copies:
            self._copy(handle, operands, workspace, False)
            for copy in self._copies:
                addresses[copy.operand] = workspace + self._copies_at + copy.offset
        raw = self._raw
        if self._early:
            assert handle.stream is not None
            barrier(handle.stream)
        if raw is None:
            self.graph.execute(dict(zip(self._uids, addresses, strict=True)), workspace or None, handle=handle)
        else:
            location, count = addresses.buffer_info()
            raw(location, count, workspace, handle.backend_handle, self._index)
        self.untried = False
        if self._copies:
            self._copy(handle, operands, workspace, True)

    def _copy(self, handle: Handle, operands: Sequence[Any], workspace: int, output: bool) -> None:
        """Copy inputs into scratch, or outputs out of it.

        The copies run on the handle's stream.
        """
        driver, pointer = self._driver, handle.stream
        assert pointer is not None
        previous, stream = driver.current_stream(), driver.wrap_stream(pointer, None)
        driver.push_stream(stream)
        try:
            # CuPy may load a kernel for the copy here while the stream is capturing. So the copies run in relaxed mode.
            with driver.relaxed():
                for copy in self._copies:
                    if copy.output is output:
                        array = operands[copy.operand]
                        theirs = self._at(array.data.ptr, copy.shape, copy.strides, array.dtype)
                        start = workspace + self._copies_at + copy.offset + copy.first
                        ours = self._at(start, copy.shape, copy.steps or None, array.dtype)
                        if copy.zeros:
                            # cuDNN reads the elements around the operand, so each launch sets the whole copy to zero first.
                            self._at(start - copy.first, (copy.nbytes,), None, _BYTE).data.memset_async(0, copy.nbytes)
                        cupy.copyto(theirs, ours) if output else cupy.copyto(ours, theirs)
        finally:
            driver.pop_stream(stream, previous)

    def _at(self, address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: np.dtype[Any]) -> Any:
        # The array needs no owner, because the operands and the slot keep the memory alive.
        memory = UnownedMemory(address, 0, None, self._device)
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
        return fast_launch.shortcut(inputs, outputs, alias_pairs, single, self.workspace_size, device, names, early=self._early)


# cuDNN's raw entry reads pointers from an array of 64-bit integers.
assert ctypes.sizeof(ctypes.c_void_p) == 8
