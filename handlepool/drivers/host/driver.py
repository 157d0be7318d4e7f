"""The driver without a GPU: NumPy arrays on simulated devices.

`HostDriver` builds on these modules:

- `scheduler`: the order in which operations run.
- `streams`, `captures` and `graphs`: streams, events and programs.
- `memory`, `array` and `copies`: scratch, arenas, arrays and their copies.
- `contract`: handles, checks, counts and faults.
- `executable` over `evaluator`: graphs.
- `testing`: controls for tests, which are no part of the protocol.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from handlepool._util.causes import causes
from handlepool._util.names import shown
from handlepool.drivers.executable import OperandCopy, SavedPlan
from handlepool.drivers.host import schedulers
from handlepool.drivers.host.array import Array, HostArray, address_of, check_type, owner_of, view_of
from handlepool.drivers.host.array_functions import RULES
from handlepool.drivers.host.array_work import ArrayWork
from handlepool.drivers.host.captures import HostGraph
from handlepool.drivers.host.contract import HandleUse, HostHandle, Relaxed
from handlepool.drivers.host.copies import CopyWork, check_run
from handlepool.drivers.host.executable import HostExecutable
from handlepool.drivers.host.graphs import RecordedGraph, RecordingMemory
from handlepool.drivers.host.limit import ADVICE, limit
from handlepool.drivers.host.memory import Memory, Owner, RegionAllocator
from handlepool.drivers.host.streams import Device, Event, Latch, Stream, StreamTable
from handlepool.drivers.host.sums import HostSums
from handlepool.drivers.host.testing import Controls
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.operands import check_operands, operand_name
from handlepool.drivers.prepared import Copies, Run, prepared
from handlepool.drivers.protocol import BeforeUntracked, Bring, ReadHost
from handlepool.drivers.streams import LEGACY_STREAM, PER_THREAD_STREAM
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError, ContractError, GraphNotSupportedError
from handlepool.tensors import frontend
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import HOST, Layout, Piece, View, bytes_at, piece, span

__all__ = ["Event", "HostDriver", "HostExecutable", "HostHandle", "Latch", "Stream"]


class HostDriver(Controls):
    """A `handlepool.drivers.protocol.Driver` on the CPU.

    Parameters
    ----------
    devices : int
        Number of simulated devices, each with its own memory and streams.
    scheduler : {"threads", "adversarial"}
        "threads" overlaps streams for real. "adversarial" has no threads. It runs queued work in an order that the seed picks,
        and mostly as late as a thread waits for the work. So a missing wait gives wrong results in every run.
    seed : int
        Seed of the adversarial scheduler.
    memory : int, optional
        Bytes of each device. By default the size in ``HANDLEPOOL_HOST_MEMORY`` (``4G``), else half of the machine's free memory.
    checks : bool
        Whether to check the use of handles, which cuDNN leaves unchecked.
    check_order : bool
        Whether to check that conflicting accesses to device memory are ordered, by streams, events or waits of the host; see
        `handlepool.drivers.host.race_checker`. For tests: the check costs several times as much as the work. A pool with
        ``check=True`` turns it on for its driver.
    strict : bool
        Whether arrays refuse the uses that CuPy's arrays refuse: an implicit conversion to NumPy, and an operation with a NumPy
        array.

    Notes
    -----
    The legacy default stream (pointer 0) alone is synchronous with the host. As with non-blocking streams on a GPU, no implicit
    order exists between the legacy default stream and any other stream.

    If queued work fails, the next call that waits for a stream or an event raises the failure.

    The finalizer of a stream spoils no capture. `Captures.forbid` describes the calls that spoil a capture.
    """

    name = "host"
    memory_advice = f"; {ADVICE}"
    # Each handle gets the next number as its backend handle.
    _numbers = itertools.count(0x1000)
    array_types: tuple[type, ...] = (HostArray, np.ndarray)
    block_type: type = Owner

    def __init__(
        self,
        *,
        devices: int = 2,
        scheduler: str = "threads",
        seed: int = 0,
        memory: int | None = None,
        checks: bool = True,
        check_order: bool = False,
        strict: bool = False,
    ) -> None:
        if memory is None:
            memory, _ = limit()
        if devices < 1 or memory < 0:
            raise ArgumentError(
                f"devices={shown(devices)} and memory={shown(memory)}; a host driver needs 1 device or more, and 0 bytes or more"
            )
        runner = schedulers.make(scheduler, seed)
        if runner is None:
            raise ArgumentError(f"scheduler={shown(scheduler)}; it must be 'threads' or 'adversarial'")
        if check_order:
            runner.watch()
        streams = StreamTable(devices, runner)
        super().__init__(streams, Memory(streams, memory), checks)
        self._work = self._memory.work = ArrayWork(streams, self._memory, strict, RULES)
        self._copies = CopyWork(streams, self._work)
        if strict:
            self.array_types = (HostArray,)
        self._name = f"{devices} devices, {scheduler}" + (f", seed {seed}" if scheduler == "adversarial" else "")
        self._relaxed = Relaxed(self._thread)
        self._forbid = self._streams.captures.forbid

    def __repr__(self) -> str:
        return f"<HostDriver: {self._name}>"

    # Hot

    def current_device(self) -> int:
        self._note("current_device")
        return self._thread.device

    def current_stream(self, device: int = -1) -> Stream:
        """Return this thread's current stream of a device.

        The default is the current device. As long as the stream stays current, the call returns the same object.
        """
        self._note("current_stream")
        thread = self._thread
        return thread.current[thread.device if device == -1 else device]

    def record_event(self, event: Event, pointer: int) -> None:
        self._note("record_event")
        self._streams.record(event, self._streams.resolve(pointer))

    record_event_next = record_event

    def wait_event(self, pointer: int, event: Event) -> None:
        self._note("wait_event")
        self._streams.wait(self._streams.resolve(pointer), event)

    def is_capturing(self, pointer: int) -> bool:
        self._note("is_capturing")
        return self._streams.resolve(pointer).capture is not None

    # Devices and streams

    def device_count(self) -> int:
        self._note("device_count")
        return self._streams.devices

    def device(self, ordinal: int) -> Device:
        self._note("device")
        return Device(self._streams, ordinal)

    def set_device(self, ordinal: int) -> None:
        self._note("set_device")
        self._streams.set_device(ordinal)

    def create_stream(self) -> Stream:
        """Return a new stream of the current device.

        The new stream gets the address of the stream that was destroyed last.
        """
        self._note("create_stream")
        self._forbid("create_stream")
        return self._streams.create()

    def wrap_stream(self, pointer: int, owner: object) -> Stream:
        """Wrap a foreign pointer in a stream object.

        As with CuPy's ``from_external``, the call does not check the pointer.
        """
        self._note("wrap_stream")
        default = {LEGACY_STREAM: self._streams.legacy, PER_THREAD_STREAM: self._streams.per_thread}.get(pointer)
        return default or Stream(self._streams, None, pointer, -1, owner)

    def push_stream(self, stream: Any) -> None:
        self._note("push_stream")
        stream.__enter__()

    def pop_stream(self, stream: Any, previous: Any) -> None:
        self._note("pop_stream")
        stream.__exit__(None, None, None)
        # `__exit__` restores the stream that was last entered. If the caller made `previous` current by `use`, `previous` must be
        # made current again.
        previous.use()

    def owns_stream(self, stream: object) -> bool:
        """Return whether the object owns its stream, or is a default stream.

        A default stream's object must belong to this driver.
        """
        self._note("owns_stream")
        return isinstance(stream, Stream) and stream.is_owned_by(self._streams)

    def stream_id(self, pointer: int) -> int:
        """Return the stream's id, which no other stream ever has.

        If the stream is capturing, the call invalidates the capture and raises.
        """
        self._note("stream_id")
        queue = self._streams.resolve(pointer)
        self._streams.captures.refuse(queue, "stream_id")
        return queue.id

    def capture_id(self, pointer: int) -> int:
        """Return the id of a stream's capture, or 0.

        An invalidated capture still has its id.
        """
        self._note("capture_id")
        capture = self._streams.resolve(pointer).capture
        return 0 if capture is None else capture.id

    def stream_device(self, pointer: int) -> int:
        self._note("stream_device")
        queue = self._streams.resolve(pointer)
        # A default stream's pointer names a queue of every device.
        if queue.default:
            raise ContractError(
                f"stream_device({pointer}): every device has this default stream, so its pointer names no device; call "
                "current_device"
            )
        return queue.device

    def synchronize_stream(self, pointer: int) -> None:
        self._note("synchronize_stream")
        self._forbid("synchronize_stream")
        self._streams.synchronize(self._streams.resolve(pointer))

    # Events

    def create_event(self, *, timing: bool = False) -> Event:
        self._note("create_event")
        self._forbid("create_event")
        event = Event(self._thread.device, timing)
        self._events_alive.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; queued waits keep the operation that they wait for."""
        self._note("destroy_event")
        self._streams.check_event(event)
        self._forbid("destroy_event")
        event.destroyed = True
        self._events_alive.discard(event)

    def event_done(self, event: Event, failures: bool = False) -> bool:
        """Return whether the event's work has run.

        An event that was never recorded counts as done.
        """
        self._note("event_done")
        self._forbid("event_done")
        operation = self._streams.operation_of(event, "event_done")
        done = self._streams.is_done(operation)
        if done and failures:
            # The operation is done, so this wait returns at once. It raises failures of queued work, and `is_done` does not.
            self._streams.wait_on_host(operation, repr(event))
        return done

    def synchronize_event(self, event: Event) -> None:
        self._note("synchronize_event")
        self._forbid("synchronize_event")
        self._streams.wait_on_host(self._streams.operation_of(event, "synchronize_event"), repr(event))

    def elapsed(self, start: Event, end: Event) -> float:
        self._note("elapsed")
        return self._streams.elapsed(start, end)

    # Handles

    def create_handle(self) -> HostHandle:
        self._note("create_handle")
        self._forbid("create_handle")
        handle = HostHandle(next(self._numbers), self._thread.device, self._streams.resolve(0))
        self._handles_alive.add(handle)
        return handle

    def bind_handle(self, handle: Any, pointer: int) -> None:
        self._note("bind_handle")
        with HandleUse(self._streams, handle, "bind_handle", self.checks):
            queue = self._streams.resolve(pointer)
            if queue.device != handle.device:
                raise ContractError(
                    f"bind_handle: {handle!r} cannot be bound to {queue!r}, which is of another device; use a handle of the "
                    "stream's device"
                )
            handle.bind(queue, pointer)

    def destroy_handle(self, handle: Any) -> None:
        self._note("destroy_handle")
        if handle.backend_handle is not None:
            self._forbid("destroy_handle")
            with HandleUse(self._streams, handle, "destroy_handle", self.checks):
                # Later uses of the handle see None and raise.
                handle.backend_handle = handle.stream = None
                self._handles_alive.discard(handle)

    # When something is wrong

    def context_lost(self, error: BaseException | None, ask: bool = True) -> BaseException | None:
        """Return the error that `lose_context` set, or None.

        Without ``ask``, return the error only if it is ``error`` or among the causes of ``error``. With ``ask``, return the
        error in any case. If the context is not lost, return None.
        """
        lost = self.lost
        return lost if ask or (lost is not None and any(each is lost for each in causes(error))) else None

    def before_untracked_access(self, before: BeforeUntracked) -> None:
        self._work.before = before

    def watch_host_data(self, bring: Bring, read: ReadHost) -> Callable[[], None]:
        thread = self._thread
        before, thread.host_data = thread.host_data, (bring, read)
        return partial(setattr, thread, "host_data", before)

    def watch_untracked_work(self, report: Callable[[str], None]) -> Callable[[], None]:
        self._streams.watchers.append(report)
        return partial(self._streams.watchers.remove, report)

    def watch_shared_state(self, report: Callable[[str], None], *, check: bool = True) -> Callable[[], None]:
        """Check the order of accesses on all streams from now on.

        Streams share memory and no other state of NumPy, so ``report`` is never called.
        """
        if not check:
            return lambda: None
        self._streams.scheduler.watch()
        # The first call of the returned function empties the list, so that a second call has no effect.
        ends = [self._streams.scheduler.unwatch]
        return lambda: ends.pop()() if ends else None

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Allocate scratch on the current device, aligned to 256 bytes."""
        self._note("allocate")
        self._forbid("allocate")
        return self._memory.current.allocate(nbytes)

    def free(self, pointer: int) -> None:
        """Free scratch memory when the queued work that uses it has run."""
        self._note("free")
        self._forbid("free")
        self._memory.current.free(pointer)

    def memory_info(self) -> tuple[int, int]:
        self._note("memory_info")
        memory = self._memory.current
        return memory.total - memory.used, memory.total

    def release_cached(self) -> None:
        """Free the arenas' unused blocks on the current device.

        The call waits for queued work that uses these blocks.
        """
        self._note("release_cached")
        self._forbid("release_cached")
        self._memory.current.release_cached()

    def scratch_array(self, pointer: int, nbytes: int, owner: object) -> HostArray:
        """Return a uint8 array over scratch memory that keeps ``owner`` alive."""
        self._note("scratch_array")
        return self._memory.scratch_array(pointer, nbytes, owner)

    def end_scratch(self, array: HostArray, why: str) -> None:
        """Refuse later uses of a scratch array and its views."""
        lease = owner_of(array)
        if lease is not None:
            lease.ended = why

    def region_allocator(self, stream: Any, keep: Callable[[object], None], of: Callable[[int], Any]) -> RegionAllocator:
        """Return an allocator for the branches of a region.

        ``stream`` is the stream that the region was forked from. The stream belongs to the current device.
        """
        self._note("region_allocator")
        return RegionAllocator(self._streams, stream, keep, of)

    def block_range(self, block: Owner) -> tuple[int, int]:
        return block.block.address, block.block.address + block.block.nbytes

    def swap_allocator(self, allocator: object) -> Any:
        self._note("swap_allocator")
        previous = self._thread.allocator
        self._thread.allocator = allocator
        return previous

    # Captures

    def relaxed(self) -> Relaxed:
        self._note("relaxed")
        return self._relaxed

    def begin_capture(self, pointer: int) -> None:
        self._note("begin_capture")
        self._streams.captures.begin(self._streams.resolve(pointer), "thread_local")

    def end_capture(self, pointer: int) -> RecordedGraph:
        self._note("end_capture")
        nodes = self._streams.captures.end(self._streams.resolve(pointer))
        return RecordedGraph(HostGraph(self._streams, nodes), self._streams, self._note)

    def dependencies(self, pointer: int) -> tuple[Any, ...]:
        self._note("dependencies")
        return self._streams.captures.dependencies(self._streams.resolve(pointer))

    def set_dependencies(self, pointer: int, nodes: Sequence[Any]) -> None:
        self._note("set_dependencies")
        self._streams.captures.set_dependencies(self._streams.resolve(pointer), nodes)

    def capture_failure(self, error: BaseException) -> str | None:
        return next((str(cause) for cause in causes(error) if isinstance(cause, CaptureError)), None)

    def recording_memory(self) -> RecordingMemory:
        self._note("recording_memory")
        return RecordingMemory(self._streams)

    # Arrays and graphs

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> HostArray:
        """Return an uninitialised array on the current device.

        Strides are in bytes, and none is negative.
        """
        self._note("empty")
        return self._memory.empty(shape, strides, check_type(np.dtype(dtype)))

    def prepared(self, copies: Copies) -> Run:
        self._note("prepared")
        return prepared(self, copies)

    def asarray(self, values: Any) -> HostArray:
        """Return a copy on the current device, in the same layout.

        The current stream makes the copy. The copy has the values at the time of this call, even if ``values`` changes later.
        """
        self._note("asarray")
        return self._copies.to_device(values)

    def asnumpy(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a copy on the host.

        The copy follows all work on the current stream of the array's device.
        """
        self._note("asnumpy")
        return self._copies.to_host(array)

    def read_unordered(self, array: DeviceArray) -> np.ndarray[Any, Any] | None:
        self._note("read_unordered")
        return self._copies.unordered(array)

    def copy(self, target: Array, source: Array) -> None:
        self._note("copy")
        self._copies.between(target, source)

    def copy_run(self, target: Array, source: Array, pointer: int) -> None:
        self._note("copy_run")
        check_run(target, source, "copy_run")
        self._copies.queue(self._streams.resolve(pointer), target, source, "copy")

    def copy_from_device(self, target: Array, source: Array, pointer: int) -> None:
        self._note("copy_from_device")
        self._copies.queue(self._streams.resolve(pointer), target, source, "copy from another device")

    def copy_from_host(self, target: Array, values: np.ndarray[Any, Any], pointer: int) -> object:
        self._note("copy_from_host")
        return self._copies.from_host(target, values, self._streams.resolve(pointer))

    def copy_to_host(self, array: Array, pointer: int) -> np.ndarray[Any, Any]:
        self._note("copy_to_host")
        return self._copies.onto_host(array, self._streams.resolve(pointer))

    def prepare_checksums(self) -> None:
        self._note("prepare_checksums")

    def checksums(self, arrays: Sequence[Array], pointer: int) -> HostSums:
        self._note("checksums")
        self._forbid("checksums")
        queue = self._streams.resolve(pointer)
        self._streams.captures.refuse(queue, "checksums")
        return self._copies.checksums(queue, arrays)

    def page_locked(self, values: np.ndarray[Any, Any]) -> bool:
        self._note("page_locked")
        return False

    def array_device(self, array: Array) -> int:
        """Return the ordinal of an array's device.

        For an array that this driver did not make, the result is the current device.
        """
        self._note("array_device")
        if isinstance(array, HostArray):
            self._work.check(array, "the call")
        owner = owner_of(array)
        return self._thread.device if owner is None else owner.block.device

    def array_pointer(self, array: Array) -> int:
        self._note("array_pointer")
        return address_of(array)

    def memory_of(self, array: Array) -> Piece:
        self._note("memory_of")
        return piece(address_of(array), array.shape, array.strides, array.dtype.itemsize)

    def array_pointers(self, arrays: Iterable[Any]) -> list[int]:
        return [self.array_pointer(array) for array in arrays]

    def part(
        self, array: HostArray, address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]
    ) -> HostArray:
        self._note("part")
        begin, end = span(address, shape, strides, dtype.itemsize)
        # The NumPy array below does not keep the owner of the memory alive. The `HostArray` that `view_of` makes does.
        memory = bytes_at(begin, end, None)
        raw: Any = np.ndarray(tuple(shape), dtype, memory, address - begin, tuple(strides))
        return view_of(array, raw)

    def array_block(self, array: Array) -> object:
        self._note("array_block")
        return owner_of(array)

    def adopt(self, view: View) -> HostArray:
        """Wrap host memory of another library in an array of no device."""
        self._note("adopt")
        if view.device_id != HOST:
            raise ArrayTypeError(
                "the array is in a GPU's memory, and the host driver takes arrays in host memory; copy the array to the host"
            )
        if not view.ptr and view.size:
            raise ArrayTypeError("the array has elements, but its address is 0; pass an array with memory")
        return HostArray(view.as_numpy(), None, self._work)

    def array_over(self, view: View) -> HostArray:
        """Wrap host memory of another library; see `adopt`."""
        self._note("array_over")
        return self.adopt(view)

    def launch_buffer(self) -> tuple[()]:
        """Return nothing, because a launch of the host driver needs no buffer."""
        return ()

    def new_graph(self, **settings: Any) -> Any:
        """Return an empty `cudnn.pygraph`.

        The host driver reads the graph, and never lets cuDNN build it. See `handlepool.tensors.frontend.new_graph`.
        """
        self._note("new_graph")
        return frontend.new_graph(**settings)

    def plan_environment(self) -> str:
        """Return the driver's name, as JSON.

        A plan of this driver depends on no other condition.
        """
        self._note("plan_environment")
        return json.dumps({"driver": self.name})

    def compile(
        self, graph: Any, operands: Sequence[Any], *, handle: Any = None, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> HostExecutable:
        """Plan a graph for the current device.

        Of the settings for cuDNN, only ``workspace_limit`` has an effect here.
        """
        # Only graphs need `evaluator`, so a program without graphs does not pay for this import.
        from handlepool.drivers.host import evaluator

        self._note("compile")
        self._forbid("compile")
        plan = evaluator.plan(graph, operands, workspace_limit=settings.get("workspace_limit"))
        geometry = tuple((tuple(tensor.dim), tuple(tensor.stride)) for tensor in operands)
        name = settings.get("name", plan.engine)
        titles = settings.get("titles", [operand_name(index) for index in range(len(operands))])
        executable = self._executable(plan, geometry, copies, name, titles)
        saved: SavedPlan | None = settings.get("saved")
        if saved is not None:
            if saved != executable.save():
                raise GraphNotSupportedError(f"the saved bytes are no plan of the graph {name}; plan the graph again")
            executable.untried = True
        return executable

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> HostExecutable:
        # Only kernels need `kernels`, so a program without kernels does not pay for this import.
        from handlepool.drivers.host import kernels

        self._note("kernel")
        self._forbid("kernel")
        geometry = tuple((at.shape, tuple(step // at.dtype.itemsize for step in at.strides)) for at in operands)
        return self._executable(kernels.evaluation(kernel, len(operands) - 1), geometry, (), name, titles)

    def _executable(
        self, plan: Any, geometry: Sequence[Any], copies: Sequence[OperandCopy], name: str, titles: Sequence[str]
    ) -> HostExecutable:
        where = (self._thread.device, self._streams, self._memory)
        check = partial(check_operands, self)
        return HostExecutable(plan, geometry, copies, *where, self._note, check, self.checks, name, titles)
