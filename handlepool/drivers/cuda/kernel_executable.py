"""Launch our own kernels on the cuda driver like built graphs."""

from array import array as buffer
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from handlepool.drivers.cuda import fast_launch, kernels
from handlepool.drivers.cuda.early import immortal
from handlepool.drivers.cuda.executable import new_buffer
from handlepool.drivers.executable import AliasPair
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.operands import check_operands
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.tensors.layout import Layout

_functions: dict[tuple[int, str, tuple[tuple[str, str], ...], str], Any] = {}
"""Compiled kernels, as CuPy functions, by device, entry, macros and code.

Each function lives as long as the process, because its destructor would call CUDA (guarantee 10) and captured graphs launch it.
If two threads make the same function at once, the dictionary keeps the first function, and the second lives on unused.
"""


def _function(device: int, launch: kernels.Launch) -> Any:
    key = (device, launch.entry, launch.macros, launch.code)
    function = _functions.get(key)
    if function is None:
        options = ("--std=c++17", *(f"-D{name}={value}" for name, value in launch.macros))
        module = cupy.RawModule(code=kernels.source(launch.code), options=options)
        # The function is compiled and loaded here, because the first launch may be inside a capture.
        function = _functions.setdefault(key, immortal(module.get_function(launch.entry).kernel))
    return function


class KernelExecutable:
    """Hold and launch a compiled kernel of this package.

    See `handlepool.drivers.executable.Executable`. The driver makes this object inside `Driver.relaxed`.
    """

    workspace_size = 0
    candidates = 1
    untried = False

    def __init__(self, driver: Driver, kernel: Kernel, operands: Sequence[Layout], name: str, titles: Sequence[str]) -> None:
        launch = kernels.plan(kernel, operands)
        self._driver = driver
        self._device = driver.current_device()
        self.name, self.titles = name, titles
        self.engine = f"handlepool_{launch.entry}"
        self._raw = self._entry(launch)

    def _entry(self, launch: kernels.Launch) -> Callable[[int, int, int, int, int], None]:
        """Return a function with the signature of a graph's raw entry.

        ``location`` is the address of a `new_buffer`, which has room for as many addresses as any variant takes. CUDA copies the
        values at the arguments' addresses before the launch returns.
        """
        pointer, (across, down), threads = _function(self._device, launch).ptr, launch.grid, launch.threads
        geometry = launch.geometry
        where, _ = geometry.buffer_info()
        launch_kernel = cupy.cuda.driver.launchKernel

        # The default argument keeps the geometry alive, because the launch reads it by address.
        def raw(location: int, count: int, workspace: int, stream: int, index: int, _: object = geometry) -> None:
            arguments = buffer("Q", (location, where))
            launch_kernel(pointer, across, down, 1, threads, 1, 1, 0, stream, arguments.buffer_info()[0], 0)

        return raw

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """See `handlepool.drivers.executable.Executable.launch`."""
        check_operands(self._driver, self.name, self._device, operands, self.titles.__getitem__)
        addresses = new_buffer()
        for place, array in enumerate(operands):
            addresses[place] = array.data.ptr
        if check is not None:
            check(addresses)
        assert handle.stream is not None
        self._raw(addresses.buffer_info()[0], len(operands), 0, handle.stream, 0)

    def shortcut(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        alias_pairs: Sequence[AliasPair] | None,
        single: bool,
        names: dict[str, Any],
    ) -> Callable[..., Any]:
        """See `handlepool.drivers.executable.Executable.shortcut`."""
        # With a single device there is no other device to compare with.
        device = self._device if self._driver.device_count() > 1 else None
        names = names | {"raw": self._raw, "index": 0}
        return fast_launch.shortcut(inputs, outputs, alias_pairs, single, 0, device, names, "stream")

    def save(self) -> None:
        """Return None, because CuPy itself keeps the compiled code on disk."""
