"""Declare the operations that handlepool needs from a GPU.

Two drivers implement it: `cuda` (CuPy and nvidia-cudnn-frontend) and `host` (NumPy, no GPU). A driver does not depend on the
pool. Conventions that hold for both:

- *Device* is the ordinal. "The current device" is this thread's. The caller makes the right device current first. A
  driver does not switch devices on its own.
- *Pointer* is the integer value of a stream's ``cudaStream_t``. 0 is the legacy default stream and 2 the per-thread default
  stream, of the current device.
- *Event* is opaque to the callers. It is created for ordering, or, with ``timing=True``, for `elapsed`.
- Calls that may harm another thread's CUDA-graph capture are made inside ``with driver.relaxed():``, which exchanges this
  thread's capture mode for *relaxed*. Such calls create or destroy handles, streams and events, allocate or free, ask whether
  an event has passed, or compile. The driver does not relax on its own. The care is thus visible at the call, and the host
  driver can refuse a call without it.
- No method waits for the device unless its name says so (`synchronize_event`, `synchronize_stream`); `free` may.
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
"""Receive a stream, and the memory that its next work accesses.

The first sequence of pieces is read, and the second is written.
"""


class Driver(Protocol):
    """The hardware seam."""

    name: str
    array_types: tuple[type, ...]
    """Array types that the driver accepts unchanged; it makes the first type."""
    block_type: type
    """Type of the memory blocks of the array library's pool.

    Two live blocks share no byte.
    """
    memory_advice: str
    """Advice that an out-of-memory message adds.

    It names the setting for the amount of memory, if there is such a setting.
    """

    # These methods are on hot paths. They are called by position only, so that a driver can use the array library's C functions
    # for them.
    def current_device(self) -> int:
        """Return this thread's device."""

    def current_stream(self, device: int = -1, /) -> Stream:
        """Return this thread's stream on the current device."""

    def record_event(self, event: Any, pointer: int, /) -> None:
        """Record the stream's work so far in the event."""

    def record_event_next(self, event: Any, pointer: int, /) -> None:
        """Record an event right behind another call on the stream.

        That call has waited for room in the stream's queue. So this method may keep Python's lock, which threads that serve
        requests would otherwise wait for.
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

        The stream is destroyed with its last reference.
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
        """Undo `push_stream`; ``previous`` was current before."""

    def owns_stream(self, stream: object) -> bool:
        """Return whether this object of the array library owns its stream.

        A default stream's object also counts as an owner.
        """

    def stream_id(self, pointer: int) -> int:
        """Return the driver's id of a stream, which is never reused.

        Must not be called for a capturing stream.
        """

    def capture_id(self, pointer: int) -> int:
        """Return the id of a stream's capture, or 0."""

    def stream_device(self, pointer: int) -> int:
        """Return the ordinal of a stream's device.

        Must not be called for a default stream.
        """

    def synchronize_stream(self, pointer: int) -> None:
        """Wait on the host until the stream has run all its work."""

    # Events
    def create_event(self, *, timing: bool = False) -> Any:
        """Return a new event on the current device."""

    def destroy_event(self, event: Any) -> None:
        """Destroy an event; the work that it marks goes on."""

    def event_done(self, event: Any, failures: bool = False) -> bool:
        """Return whether the work that an event marks has run.

        The event may belong to any device. With ``failures``, the method raises the errors that a wait would raise.
        """

    def synchronize_event(self, event: Any) -> None:
        """Wait on the host for an event of any device."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two timing events that have passed."""

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

        The memory does not come from the array library's pool. The method raises MemoryError.
        """

    def free(self, pointer: int) -> None:
        """Free memory from `allocate`, after the work that may still use it."""

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

        Its memory comes from the arena of ``stream``. So a block that is freed after the join is reused in the order of that
        stream. After each allocation, the allocator passes the block to ``keep``, and lets the current stream wait for
        ``stream``. So earlier work of ``stream`` that used the same memory ends before the branch writes to the block. Another
        thread may have freed the block meanwhile.

        If the current stream is not ``stream``, ``of(pointer)`` returns the allocator to use. It is this allocator, or that of
        another region if a branch of that region runs on the current stream. None means that the branch itself chose the
        stream. No join waits for work there, so the memory comes from the chosen stream's own arena.
        """

    def block_range(self, block: Any) -> tuple[int, int]:
        """Return the addresses where an allocated block begins and ends.

        The block comes from the allocator of a region or of a recording.
        """

    def swap_allocator(self, allocator: Any) -> Any:
        """Set this thread's allocator, and return the former allocator.

        None stands for the default allocator.
        """

    # Captures
    def relaxed(self) -> AbstractContextManager[Any]:
        """Set this thread's capture mode to *relaxed*, and restore it on leaving."""

    def begin_capture(self, pointer: int) -> None:
        """Capture the later work of a stream, in thread-local mode.

        Streams that wait for it join the capture.
        """

    def end_capture(self, pointer: int) -> RecordedGraph:
        """End the capture that began on a stream; called inside `relaxed`.

        The capture ends even if the method raises the capture's error.
        """

    def dependencies(self, pointer: int) -> tuple[Any, ...] | None:
        """Return the nodes that a capturing stream's next work depends on.

        The returned objects are hashable, and are equal if they stand for the same node. The method returns None if the driver
        cannot tell the nodes.
        """

    def set_dependencies(self, pointer: int, nodes: Sequence[Any]) -> None:
        """Make a capturing stream's next work depend on these nodes alone.

        The stream's next work waits until each of these nodes has ended, and for no other node.

        When the capture ends, the stream on which it began must depend on all nodes. If this method has moved a stream away
        from its last node, CUDA does not report a violation of this rule. The host driver reports it.
        """

    def capture_failure(self, error: BaseException) -> str | None:
        """Return in words the operation that a capture refused.

        The error and its causes are searched for it. Return None for an unrelated error.
        """

    def recording_memory(self) -> RecordingMemory:
        """Make separate memory for a recording."""

    # When something is wrong
    def context_lost(self, error: BaseException | None, ask: bool = True) -> BaseException | None:
        """Return the error that has made every further call fail, or None.

        The driver inspects ``error`` and its causes. If they do not tell and ``ask`` is true, it makes a call that would fail
        in a lost context.
        """

    def watch_shared_state(self, report: Callable[[str], None], *, check: bool = True) -> Callable[[], None]:
        """Call ``report(name)`` before a thread uses state shared between streams.

        The state belongs to the array library. With ``check`` a driver that can do so also checks the order of all memory
        accesses.

        Returns
        -------
        callable
            A function that ends it.
        """

    def watch_untracked_work(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Call ``report(name)`` if code outside of this library queues work.

        The call is made in the thread that queues the work. A driver that cannot detect such work never calls it.

        Returns
        -------
        callable
            A function that ends it.
        """

    def watch_host_data(self, bring: Bring, read: ReadHost) -> Callable[[], None]:
        """Let ``bring`` make the arrays of `asarray`; report reads of host memory.

        Both hold for the calling thread. A driver that cannot detect reads of host memory reports none. Then
        `RecordedGraph.host_copies` lists the copies.

        Parameters
        ----------
        bring : callable
            Called with the values, and with a function that makes the array in the usual way. It returns the array.
        read : callable
            Called with the memory, the name of the work, and whether CuPy does this work by a copy from the host.

        Returns
        -------
        callable
            A function that ends it.
        """

    def before_untracked_access(self, before: BeforeUntracked) -> None:
        """Call a function before untracked work uses the driver's arrays.

        Such work is queued by code outside of this library. The function is called before the work is queued. A driver that
        cannot detect such work never calls it.
        """

    # Arrays and graphs
    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array on the current device; strides in bytes."""

    def prepared(self, copies: Copies) -> Run:
        """Return a function that enqueues a program's call.

        It allocates all results before the first copy, copies the caller's arrays into the inputs, launches, and copies the
        outputs. The stream is current.
        """

    def asarray(self, values: Any) -> Any:
        """Return a copy on the current device, ready for the current stream."""

    def asnumpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a host copy, ordered after the device's current stream.

        The device is the array's device.
        """

    def read_unordered(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return a host copy for comparison, ordered after the current stream.

        Returns None under a capture.

        The array may belong to another library that reports its address. On the host driver, the copy does not order later work.
        """

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array into another array on the current stream.

        Both have the same shape and type and are on the current device.
        """

    def copy_run(self, target: Any, source: Any, pointer: int) -> None:
        """Copy an array into another array on a stream.

        `one_run` must be true for the two arrays. The arrays and the stream belong to the current device.
        """

    def copy_from_device(self, target: Any, source: Any, pointer: int) -> None:
        """Copy an array of another device into an array of this device.

        The copy runs on a stream of the current device. Called inside `relaxed`.

        Both arrays have no gaps, and the same shape, type and strides. The copy is direct where the current device reaches the
        other device's memory.
        """

    def copy_from_host(self, target: Any, values: np.ndarray[Any, Any], pointer: int) -> object:
        """Copy a host array's present values to a device array.

        The copy runs on a stream, and reads the values that the host array has now.

        The device array has no gaps. Called inside `relaxed`.

        Both have the same shape and type. The method returns an object. The caller keeps this object and the target until the
        stream has done the copy.
        """

    def copy_to_host(self, array: Any, pointer: int) -> np.ndarray[Any, Any]:
        """Return a host array that a stream copies a device array into.

        The device array has no gaps. Called inside `relaxed`.

        The host array is in page-locked memory if the driver has such memory. The caller keeps both arrays until the stream has
        done the copy.
        """

    def prepare_checksums(self) -> None:
        """Load and allocate what `checksums` needs on the current device.

        Called inside `relaxed`. This may wait for the device. `checksums` does it itself where it was not done before.
        """

    def checksums(self, arrays: Sequence[Any], pointer: int) -> Sums:
        """Compute checksums of arrays' bits on a stream; called inside `relaxed`.

        The stream is not being captured. The arrays are the driver's own. Arrays and stream are on the current device. The arrays
        may have gaps and any type. The caller keeps the arrays and the sums until the stream has passed them.
        """

    def page_locked(self, values: np.ndarray[Any, Any]) -> bool:
        """Return whether an array is in page-locked memory.

        `asarray` may read such an array only when the stream reaches the copy.
        """

    def array_device(self, array: Any) -> int:
        """Return the ordinal of the device that an array lives on."""

    def array_pointer(self, array: Any) -> int:
        """Return the address of an array's first element."""

    def memory_of(self, array: Any) -> Piece:
        """Return the memory that an array of the driver's lies in."""

    def array_pointers(self, arrays: Iterable[Any]) -> list[int]:
        """Return the addresses of many arrays.

        Raises AttributeError or TypeError for an object that is no array of the driver's.
        """

    def part(self, array: Any, address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an array over part of another array's memory.

        Its first element is at ``address``.
        """

    def array_block(self, array: Any) -> object:
        """Return the block of memory that an array lies in.

        If the block is known, the result is of type `block_type`.
        """

    def adopt(self, view: View) -> Any:
        """Make an operand of memory of another library.

        Raises ArrayTypeError for memory that the driver's graphs cannot use.
        """

    def array_over(self, view: View) -> Any:
        """Return an array over memory of another library, to be copied.

        The array keeps the memory alive. Raises the same errors as `adopt`.
        """

    def launch_buffer(self) -> Any:
        """Return the storage of a slot for launches by a `shortcut`.

        One launch at a time uses it.
        """

    def new_graph(self, **settings: Any) -> Any:
        """Return an empty `cudnn.pygraph`."""

    def plan_environment(self) -> str:
        """Return the conditions of plans on this device, as JSON.

        They are the versions and the current device. The graph itself is not part of them.
        """

    def compile(
        self, graph: Any, operands: Sequence[Any], *, handle: Handle, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Plan and build a graph.

        All real tensors of the graph must have shape, strides and type.

        Parameters
        ----------
        graph : cudnn.pygraph
            Made by `new_graph`, with its nodes.
        operands : sequence of graph tensor
            The graph's real tensors in the order in which `Executable.launch` will get the arrays: inputs, then outputs.
        handle : Handle
            The handle with which the graph is planned or ``saved`` is read. It must live as long as the executable.
        copies : sequence of OperandCopy
            The operands that a launch copies, on its stream, in scratch that ``Executable.workspace_size`` counts, too. The
            graph's tensor is the copy.
        **settings
            ``workspace_limit`` (bytes or None), ``allow_tf32``, ``deterministic``, ``heuristics``; ``name`` and ``titles`` of the
            graph and its operands in messages; ``saved``, a `SavedPlan` to restore instead.

        Raises
        ------
        GraphNotSupportedError
            If there is no plan; the error has the backend's message. With ``saved``, if the saved plan does not belong to this
            graph.
        """

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> Executable:
        """Make a kernel of this package for operands with these layouts.

        Parameters
        ----------
        kernel : Kernel
            Describes the computation.
        operands : sequence of Layout
            Inputs, then the output, as in `compile`. The caller has checked that they fit the kernel and each other. No stride is
            negative, or falls between elements. Images have four axes.
        name, titles
            Names of the kernel and its operands in messages.
        """


def abort_capture(driver: Driver, pointer: int) -> None:
    """End a capture that began on a stream, in any state.

    The capture is ended even if an earlier attempt failed. The function raises no error of CUDA.
    """
    try:
        with driver.relaxed():
            try:
                there = driver.capture_id(pointer)
            except Exception:
                # An invalidated capture raises here, and it has to be ended as well.
                there = 1
            if there:
                driver.end_capture(pointer).destroy()
    except Exception:
        # The capture was invalidated, or its branches were not joined. The first error says more.
        pass
