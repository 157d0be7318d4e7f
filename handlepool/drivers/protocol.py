"""Declare the operations that handlepool needs from a GPU.

Two drivers implement the protocol `Driver`: `cuda` (CuPy and nvidia-cudnn-frontend) and `host` (NumPy, no GPU). A driver does not
depend on the pool. These conventions hold for both drivers:

- *Device* is the ordinal of a device. "The current device" is the calling thread's. The caller makes the right device current
  first, because a driver does not switch devices on its own.
- *Pointer* is the integer value of a stream's ``cudaStream_t``. 0 is the legacy default stream and 2 the per-thread default
  stream, of the current device.
- *Event* is opaque to the callers. An event is created for ordering, or, with ``timing=True``, for `elapsed`.
- Calls that may harm another thread's CUDA-graph capture are made inside ``with driver.relaxed():``, which exchanges this
  thread's capture mode for *relaxed*. Such calls create or destroy handles, streams and events, allocate or free, ask whether
  an event has passed, or compile. The driver does not enter `relaxed` on its own. So the call shows that its caller has thought
  of captures, and the host driver can refuse a call outside of `relaxed`.
- A method waits for the device only if its name says so (`synchronize_event`, `synchronize_stream`). The exception is `free`,
  which may wait for the device.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from handlepool.drivers.captures import RecordedGraph, RecordingMemory
from handlepool.drivers.checksum import Sums
from handlepool.drivers.executable import Executable, OperandCopy
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.prepared import Copies, Run
from handlepool.drivers.streams import Handle, Stream
from handlepool.tensors.layout import Layout, Piece, View

Bring = Callable[[np.ndarray[Any, Any], Callable[[], Any]], Any]
ReadHost = Callable[[np.ndarray[Any, Any], str, bool], None]
BeforeUntracked = Callable[[int, Sequence[Piece], Sequence[Piece]], None]
"""Receive a stream's pointer, and the memory that its next work accesses.

The work reads the first sequence of pieces, and writes the second.
"""


class Driver(Protocol):
    """The operations of a GPU and its libraries that this package uses."""

    name: str
    array_types: tuple[type, ...]
    """Array types that the driver accepts unchanged.

    The driver makes arrays of the first type.
    """
    block_type: type
    """Type of the memory blocks of the array library's pool.

    Two live blocks share no byte.
    """
    memory_advice: str
    """Advice at the end of an out-of-memory message.

    The text names the setting for the amount of memory. If there is no such setting, the text is empty.
    """

    # These methods are on hot paths. They are called by position only, so that a driver can store C functions
    # of the array library under these names.
    def current_device(self) -> int:
        """Return the ordinal of this thread's current device."""

    def current_stream(self, device: int = -1, /) -> Stream:
        """Return this thread's current stream on the current device."""

    def record_event(self, event: Any, pointer: int, /) -> None:
        """Record the stream's work so far in the event."""

    def record_event_next(self, event: Any, pointer: int, /) -> None:
        """Record an event right after this thread enqueued work on the stream.

        If the stream's queue was full, the call that enqueued this work has waited for room. So this method does not wait, and
        may keep Python's lock. Then this thread need not wait to get the lock back.
        """

    def wait_event(self, pointer: int, event: Any, /) -> None:
        """Let the stream's later work wait for the event."""

    def set_device(self, ordinal: int, /) -> None:
        """Make a device current for this thread."""

    def is_capturing(self, pointer: int, /) -> bool:
        """Return whether a stream takes part in a capture.

        The stream must not be the legacy default stream.
        """

    # Devices and streams
    def device_count(self) -> int:
        """Return the number of visible devices."""

    def device(self, ordinal: int) -> AbstractContextManager[Any]:
        """Make a device current, and restore the former device on leaving."""

    def create_stream(self) -> Stream:
        """Return a new non-blocking stream of the current device.

        The stream is destroyed when the last reference to the returned object ends.
        """

    def wrap_stream(self, pointer: int, owner: object) -> Stream:
        """Wrap the pointer of a stream of the current device.

        The returned object keeps ``owner`` alive. For the pointer of a default stream, the driver returns the same permanent
        object each time.
        """

    def push_stream(self, stream: Stream) -> None:
        """Make a stream of the current device current for this thread.

        Inner ``with`` statements return to this stream when they exit.
        """

    def pop_stream(self, stream: Stream, previous: Stream) -> None:
        """Undo `push_stream`, and make ``previous`` current again.

        ``previous`` is the stream that was current before `push_stream`.
        """

    def owns_stream(self, stream: object) -> bool:
        """Return whether a stream object of the array library owns its stream.

        The object of a default stream also counts as an owner.
        """

    def stream_id(self, pointer: int) -> int:
        """Return the driver's id of a stream, which is never reused.

        The stream must not be capturing.
        """

    def capture_id(self, pointer: int) -> int:
        """Return the id of a stream's capture, or 0 without a capture."""

    def stream_device(self, pointer: int) -> int:
        """Return the ordinal of a stream's device.

        The stream must not be a default stream.
        """

    def synchronize_stream(self, pointer: int) -> None:
        """Wait on the host until the stream has run all its work."""

    # Events
    def create_event(self, *, timing: bool = False) -> Any:
        """Return a new event on the current device."""

    def destroy_event(self, event: Any) -> None:
        """Destroy an event. The work that the event marks goes on."""

    def event_done(self, event: Any, failures: bool = False) -> bool:
        """Return whether the work that an event marks has run.

        The event may belong to any device. If ``failures`` is true, the method raises the errors that `synchronize_event` would
        raise.
        """

    def synchronize_event(self, event: Any) -> None:
        """Wait on the host for an event of any device."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two timing events that have both passed."""

    # Handles
    def create_handle(self) -> Handle:
        """Return a new cuDNN handle on the current device.

        The handle is bound to the legacy default stream.
        """

    def bind_handle(self, handle: Handle, pointer: int) -> None:
        """Bind a handle to a stream.

        The handle is bound again even if it remembers the same pointer, because another stream may have that pointer now.

        Afterwards ``handle.stream is pointer``.
        """

    def destroy_handle(self, handle: Handle) -> None:
        """Destroy a handle, unless it is already destroyed."""

    # Memory
    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, aligned to 256 bytes.

        The memory does not come from the array library's pool. If there is not enough memory, the method raises MemoryError.
        """

    def free(self, pointer: int) -> None:
        """Free memory from `allocate`, after work that still uses the memory."""

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""

    def release_cached(self) -> None:
        """Release the free blocks of the array library's pool.

        The memory returns to the device.
        """

    def scratch_array(self, pointer: int, nbytes: int, owner: object) -> Any:
        """Return a one-dimensional uint8 array over memory from `allocate`.

        The array keeps ``owner`` alive. 0 bytes at address 0 are legal.
        """

    def end_scratch(self, array: Any, why: str) -> None:
        """Refuse later uses of a scratch array and its views.

        A driver refuses only uses that it can detect. A destructor may call this method.
        """

    def region_allocator(self, stream: Stream, keep: Callable[[object], None], of: Callable[[int], Any]) -> Any:
        """Return an allocator for branches of a region forked from ``stream``.

        The memory comes from the arena of ``stream``. So if a block is freed after the join, ``stream`` orders its next use.
        After each allocation, the allocator passes the block to ``keep``, and lets the current stream wait for ``stream``. So
        earlier work of ``stream`` that used the same memory ends before the branch writes to the block. This is needed even
        during the region, because another thread may have freed the block.

        If the current stream is not ``stream``, the allocator calls ``of`` with the current stream's pointer. ``of`` returns this
        allocator if a branch of this region runs on the current stream, and the other region's allocator if a branch of another
        region does. ``of`` returns None if code of a branch chose the stream itself. No join waits for work of such a stream, so
        the memory comes from that stream's own arena.
        """

    def block_range(self, block: Any) -> tuple[int, int]:
        """Return the addresses where an allocated block begins and ends.

        ``block`` comes from the allocator of a region or of a recording.
        """

    def swap_allocator(self, allocator: Any) -> Any:
        """Set this thread's allocator, and return the former allocator.

        As an argument and as a result, None stands for the default allocator.
        """

    # Captures
    def relaxed(self) -> AbstractContextManager[Any]:
        """Set this thread's capture mode to *relaxed*, and restore it on leaving."""

    def begin_capture(self, pointer: int) -> None:
        """Capture the later work of a stream, in thread-local mode.

        A stream that waits for the captured stream joins the capture.
        """

    def end_capture(self, pointer: int) -> RecordedGraph:
        """End the capture that began on a stream; called inside `relaxed`.

        If the capture was invalidated, the method raises its error, and the capture ends all the same.
        """

    def dependencies(self, pointer: int) -> tuple[Any, ...] | None:
        """Return the nodes that a capturing stream's next work depends on.

        The returned objects are hashable, and are equal if they stand for the same node. If the driver cannot tell the nodes, the
        method returns None.
        """

    def set_dependencies(self, pointer: int, nodes: Sequence[Any]) -> None:
        """Make a capturing stream's next work depend on ``nodes`` alone.

        The stream's next work waits until each of ``nodes`` has ended, and for no other node.

        When the capture ends, the stream on which the capture began must depend on all nodes. If this method has taken a
        stream's last node out of its dependencies, CUDA does not report a violation of this rule. The host driver reports it.
        """

    def capture_failure(self, error: BaseException) -> str | None:
        """Describe in words the operation that a capture refused.

        The method searches ``error`` and its causes. If no error among them comes from a capture, return None.
        """

    def recording_memory(self) -> RecordingMemory:
        """Return new memory that serves one recording alone."""

    # When something is wrong
    def context_lost(self, error: BaseException | None, ask: bool = True) -> BaseException | None:
        """Return the error that has made every further call fail, or None.

        The driver inspects ``error`` and its causes. If these errors do not tell whether the context is lost, and ``ask`` is
        true, the driver makes a call that would fail in a lost context.
        """

    def watch_shared_state(self, report: Callable[[str], None], *, check: bool = True) -> Callable[[], None]:
        """Call ``report(name)`` before a thread uses state shared between streams.

        ``name`` is the name of the state, which belongs to the array library. If ``check`` is true, the driver
        also checks the order of all memory accesses, if it can.

        Returns
        -------
        callable
            A function that ends the watch.
        """

    def watch_untracked_work(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Call ``report(name)`` if code outside of this package queues work.

        ``name`` is the name of the work. The thread that queues the work calls ``report``. If a driver cannot detect
        such work, it never calls ``report``.

        Returns
        -------
        callable
            A function that ends the watch.
        """

    def watch_host_data(self, bring: Bring, read: ReadHost) -> Callable[[], None]:
        """Let ``bring`` make the arrays of `asarray`; report host reads to ``read``.

        Both functions are for the calling thread only. If a driver cannot detect reads of host memory, it never calls ``read``,
        and `RecordedGraph.host_copies` lists the copies from the host.

        Parameters
        ----------
        bring : callable
            Called by `asarray` with the values, and with a function that makes the array in the usual way. ``bring`` returns the
            array.
        read : callable
            Called when queued work reads a NumPy array: with this array, with the name of the work, and with a bool that says
            whether CuPy would do this work by a copy from the host.

        Returns
        -------
        callable
            A function that ends the watch.
        """

    def before_untracked_access(self, before: BeforeUntracked) -> None:
        """Call ``before`` when untracked work will use the driver's arrays.

        Untracked work is queued by code outside of this package. The driver calls ``before`` before that code queues the work. If
        a driver cannot detect such work, it never calls ``before``.
        """

    # Arrays and graphs
    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array on the current device.

        ``strides`` are in bytes.
        """

    def prepared(self, copies: Copies) -> Run:
        """Return a function that enqueues a program's call.

        The function allocates all results, copies the caller's arrays into the program's inputs, launches the program, and copies
        the program's outputs into the results. The stream that it runs on must be current.
        """

    def asarray(self, values: Any) -> Any:
        """Return a copy of ``values`` on the current device.

        The current stream makes the copy, so later work of this stream may use it.
        """

    def asnumpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a host copy of an array.

        The copy has the values after all work of the current stream of the array's device.
        """

    def read_unordered(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return a host copy for comparison, or None under a capture.

        The copy has the values after all work of the current stream. The array may belong to another library that reports its
        address. On the host driver, the race checker does not count the copy as a wait.
        """

    def copy(self, target: Any, source: Any) -> None:
        """Copy ``source`` into ``target`` on the current stream.

        Both arrays have the same shape and type, and are on the current device.
        """

    def copy_run(self, target: Any, source: Any, pointer: int) -> None:
        """Copy ``source`` into ``target`` on a stream, as one run of bytes.

        `one_run` must be true for the two arrays. The arrays and the stream belong to the current device.
        """

    def copy_from_device(self, target: Any, source: Any, pointer: int) -> None:
        """Copy an array of another device to the current device.

        The copy runs on a stream of the current device. Called inside `relaxed`.

        Both arrays have no gaps, and the same shape, type and strides. If the current device can reach the other device's memory,
        the copy does not go through the host.
        """

    def copy_from_host(self, target: Any, values: np.ndarray[Any, Any], pointer: int) -> object:
        """Copy a host array's present values to a device array.

        The copy runs on a stream, and reads the values that the host array has now.

        ``target`` has no gaps, and the shape and type of ``values``. Called inside `relaxed`.

        The caller keeps the returned object and ``target`` alive until the stream has done the copy.
        """

    def copy_to_host(self, array: Any, pointer: int) -> np.ndarray[Any, Any]:
        """Return a host array that a stream copies a device array into.

        The device array has no gaps. Called inside `relaxed`.

        The host array is in page-locked memory if the driver has such memory. The caller keeps both arrays alive until the stream
        has done the copy.
        """

    def prepare_checksums(self) -> None:
        """Prepare the current device for `checksums`; called inside `relaxed`.

        The method loads a kernel and allocates memory if the driver needs them, and may wait for the device. If this method was
        not called before, `checksums` calls it.
        """

    def checksums(self, arrays: Sequence[Any], pointer: int) -> Sums:
        """Compute checksums of arrays' bits on a stream; called inside `relaxed`.

        The stream is not being captured. The arrays are the driver's own. Arrays and stream are on the current device. The arrays
        may have gaps and any type. The caller keeps the arrays and the returned sums alive until the stream has computed the
        sums.
        """

    def page_locked(self, values: np.ndarray[Any, Any]) -> bool:
        """Return whether an array is in page-locked memory.

        For such an array, `asarray` may return before it has read the values: the stream reads them when it reaches the copy.
        """

    def array_device(self, array: Any) -> int:
        """Return the ordinal of the device that an array lives on."""

    def array_pointer(self, array: Any) -> int:
        """Return the address of an array's first element."""

    def memory_of(self, array: Any) -> Piece:
        """Return the addresses and the layout of an array's memory.

        The driver made the array.
        """

    def array_pointers(self, arrays: Iterable[Any]) -> list[int]:
        """Return the addresses of the first elements of arrays.

        Raises AttributeError or TypeError for an object that is no array of the driver.
        """

    def part(self, array: Any, address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an array over part of another array's memory.

        The first element of the returned array is at ``address``.
        """

    def array_block(self, array: Any) -> object:
        """Return the block of memory that contains an array's elements.

        If the driver knows the block, the result has the type `block_type`.
        """

    def adopt(self, view: View) -> Any:
        """Return an operand for launches over memory of another library.

        Raises ArrayTypeError for memory that the driver's graphs cannot use.
        """

    def array_over(self, view: View) -> Any:
        """Return an array over memory of another library.

        The caller copies from the array or into it. The array keeps the memory alive. Raises the same errors as `adopt`.
        """

    def launch_buffer(self) -> Any:
        """Return a buffer for the pointers of a slot's `shortcut` launches.

        One launch at a time uses the buffer.
        """

    def new_graph(self, **settings: Any) -> Any:
        """Return an empty `cudnn.pygraph`."""

    def plan_environment(self) -> str:
        """Return the conditions of plans on this device, as JSON.

        The conditions are the versions of the libraries and the properties of the current device. They do not depend on a graph.
        """

    def compile(
        self, graph: Any, operands: Sequence[Any], *, handle: Handle, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Plan and build a graph.

        All real tensors of the graph must have shape, strides and type.

        Parameters
        ----------
        graph : cudnn.pygraph
            A graph that `new_graph` made, with all its nodes.
        operands : sequence of graph tensor
            The graph's real tensors in the order in which `Executable.launch` will get the arrays: inputs, then outputs.
        handle : Handle
            The handle with which the graph is planned or ``saved`` is read. It must live as long as the executable.
        copies : sequence of OperandCopy
            The operands that a launch copies through scratch, on its stream. ``Executable.workspace_size`` includes that scratch.
            The graph's tensor describes the copy in scratch, not the operand.
        **settings
            ``workspace_limit`` (bytes or None), ``allow_tf32``, ``deterministic``, ``heuristics``; ``name`` and ``titles``, the
            names of the graph and its operands in messages; ``saved``, a `SavedPlan` to restore in place of planning.

        Raises
        ------
        GraphNotSupportedError
            If the driver finds no plan. The error contains cuDNN's message. With ``saved``, if the saved plan does not belong to
            this graph.
        """

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> Executable:
        """Make a kernel of this package for operands with these layouts.

        Parameters
        ----------
        kernel : Kernel
            Describes the computation.
        operands : sequence of Layout
            Inputs, then the output, as in `compile`. The caller has checked that the layouts fit the kernel and each other. No
            stride is negative, and each is a multiple of the element's size. Images have four axes.
        name, titles
            Names of the kernel and its operands in messages.
        """


def abort_capture(driver: Driver, pointer: int) -> None:
    """End the capture that began on a stream, whatever its state.

    The stream may have no capture, or an invalidated capture. The function raises no error.
    """
    try:
        with driver.relaxed():
            try:
                there = driver.capture_id(pointer)
            except Exception:
                # The query raises if the capture was invalidated. Such a capture must be ended as well.
                there = 1
            if there:
                driver.end_capture(pointer).destroy()
    except Exception:
        # The end raises if the capture was invalidated or its branches were not joined. The caller is about to raise an earlier
        # error that says more.
        pass
