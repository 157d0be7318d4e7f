"""Declare the operations that handlepool needs from a GPU.

Two drivers implement it: `cuda` (CuPy and nvidia-cudnn-frontend) and `host` (NumPy, no GPU). A driver knows nothing of the
pool. Conventions that hold for both:

- *Device* is the ordinal. "The current device" is this thread's. Whoever calls makes the right device current first; a
  driver does not switch devices on its own.
- *Pointer* is the integer value of a stream's ``cudaStream_t``. 0 is the legacy default stream and 2 the per-thread default
  stream, of whatever device is current.
- *Event* is opaque to the callers. It is created for ordering, or, with ``timing=True``, for `elapsed`.
- What may harm another thread's CUDA-graph capture (creating and destroying handles, streams and events, allocating and
  freeing, asking whether an event has passed, compiling) is called inside ``with driver.relaxed():``, which exchanges this
  thread's capture mode for *relaxed*. The driver does not do it on its own, so that the care is visible where it is taken and the
  host driver can refuse a call without it.
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
from handlepool.drivers.streams import Handle, Stream
from handlepool.tensors.layout import Layout, Piece, View

Bring = Callable[[np.ndarray[Any, Any], Callable[[], Any]], Any]
ReadHost = Callable[[np.ndarray[Any, Any], str, bool], None]
BeforeUntracked = Callable[[int, Sequence[Piece], Sequence[Piece]], None]
"""Told of a stream, and of the memory that is about to be read and written on it."""


class Driver(Protocol):
    """The hardware seam."""

    name: str
    array_types: tuple[type, ...]
    """What it takes as it is; the first is what it makes."""
    block_type: type
    """Of the blocks of its array library's pool. Two that live at once share no byte."""
    memory_advice: str
    """What the message of an error adds where memory is out: how to have more, if a setting says how much there is."""

    # Hot, and called by position only, so that a driver can hand out the array library's own C functions.
    def current_device(self) -> int:
        """Return this thread's device."""

    def current_stream(self, device: int = -1, /) -> Stream:
        """Return this thread's stream on the current device."""

    def record_event(self, event: Any, pointer: int, /) -> None:
        """Let the event stand for all that the stream was given so far."""

    def wait_event(self, pointer: int, event: Any, /) -> None:
        """Let what the stream is given from now on run after the event."""

    def set_device(self, ordinal: int, /) -> None:
        """Make a device current for this thread."""

    def is_capturing(self, pointer: int, /) -> bool:
        """Whether a stream, which is not the legacy default stream, takes part in a capture."""

    # Devices and streams
    def device_count(self) -> int:
        """Return the number of visible devices."""

    def device(self, ordinal: int) -> AbstractContextManager[Any]:
        """Make a device current, and the one before current again on leaving."""

    def create_stream(self) -> Stream:
        """Return a new non-blocking stream of the current device; destroyed with its last reference."""

    def wrap_stream(self, pointer: int, owner: object) -> Stream:
        """Return a stream object for a pointer of the current device that somebody else owns; keeps ``owner`` alive.

        For the pointer of a default stream, the one object of it that lasts.
        """

    def push_stream(self, stream: Stream) -> None:
        """Make a stream of the current device current for this thread, so that ``with`` statements inside come back to it."""

    def pop_stream(self, stream: Stream, previous: Stream) -> None:
        """End `push_stream`; ``previous`` was current before."""

    def owns_stream(self, stream: object) -> bool:
        """Whether this is the array library's stream object whose life is the stream's life, or a default stream's object."""

    def stream_id(self, pointer: int) -> int:
        """Return the driver's id of a stream, unique for the process's life. Must not be asked of a capturing stream."""

    def capture_id(self, pointer: int) -> int:
        """Return the id of the capture that a stream takes part in, or 0."""

    def stream_device(self, pointer: int) -> int:
        """Return the ordinal of a stream's device. Must not be asked of a default stream."""

    def synchronize_stream(self, pointer: int) -> None:
        """Wait on the host until the stream has run all that it was given."""

    # Events
    def create_event(self, *, timing: bool = False) -> Any:
        """Return a new event on the current device."""

    def destroy_event(self, event: Any) -> None:
        """Give an event back; its pending work goes on."""

    def event_done(self, event: Any, failures: bool = False) -> bool:
        """Whether the work that an event, of any device, stands for has run; with ``failures``, raise as a wait does."""

    def synchronize_event(self, event: Any) -> None:
        """Wait on the host for an event of any device."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds between two timing events that have passed."""

    # Handles
    def create_handle(self) -> Handle:
        """Return a new cuDNN handle on the current device, bound to the legacy default stream."""

    def bind_handle(self, handle: Handle, pointer: int) -> None:
        """Bind a handle to a stream, also when it remembers the same pointer. Afterwards ``handle.stream is pointer``."""

    def destroy_handle(self, handle: Handle) -> None:
        """Destroy a handle; harmless when that was done already."""

    # Memory
    def allocate(self, nbytes: int) -> int:
        """Device memory of the driver's own, not of the array library's pool; 256-byte aligned. Raises MemoryError."""

    def free(self, pointer: int) -> None:
        """Give `allocate`'s memory back; waits for work that may still use it."""

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and bytes in all on the current device."""

    def release_cached(self) -> None:
        """Have the array library's own pool give its free blocks back to the device."""

    def scratch_array(self, pointer: int, nbytes: int, owner: object) -> Any:
        """Return a one-dimensional uint8 array over memory from `allocate`; keeps ``owner`` alive. 0 bytes at 0 are legal."""

    def end_scratch(self, array: Any, why: str) -> None:
        """Refuse uses of a scratch array and its views from now on, where the driver can see them. A destructor may call it."""

    def region_allocator(self, stream: Stream, keep: Callable[[object], None], of: Callable[[int], Any]) -> Any:
        """Return an allocator for branches of a region that was forked from ``stream``.

        What it allocates comes from the arena of ``stream`` (so that, freed after the join, it is reused in the order of
        that stream), is passed to ``keep``, and is followed by an edge from ``stream`` to the stream that is current at that
        time (so that work queued on ``stream`` before another thread freed the block has run before the branch writes to it).

        For another stream than ``stream``, ``of(pointer)`` says whose memory it is: this allocator's, another region's where a
        branch of that runs there, or None for a stream that the branch chose itself: it comes from that stream's own arena, since
        no join waits for what runs there.
        """

    def block_range(self, block: Any) -> tuple[int, int]:
        """Return where memory begins and ends that a region's allocator, or a recording's, told of."""

    def swap_allocator(self, allocator: Any) -> Any:
        """Make an allocator this thread's; returns the one before, None for the default."""

    # Captures
    def relaxed(self) -> AbstractContextManager[Any]:
        """Exchange this thread's stream-capture mode for *relaxed*, and back on leaving."""

    def begin_capture(self, pointer: int) -> None:
        """Capture, in thread-local mode, what a stream is given from now on, and what the streams are that wait for it."""

    def end_capture(self, pointer: int) -> RecordedGraph:
        """End the capture that began on a stream, also where this raises what was wrong with it; called inside `relaxed`."""

    def dependencies(self, pointer: int) -> tuple[Any, ...] | None:
        """Return the nodes of its capture that whatever a capturing stream is given next will run after.

        They are opaque, have a hash, and compare by identity of the node. None where the driver has no such call.
        """

    def set_dependencies(self, pointer: int, nodes: Sequence[Any]) -> None:
        """Let whatever a capturing stream is given next run after these nodes of its capture alone, each to its end.

        The first stream of the capture must come to be behind all nodes by its end. CUDA does not say so of a stream that was
        moved away from its last node; the host driver does.
        """

    def capture_failure(self, error: BaseException) -> str | None:
        """Say what in an error, or in what it came from, a capture could not take; None where it was something else."""

    def recording_memory(self) -> RecordingMemory:
        """Memory of a recording's own."""

    # When something is wrong
    def context_lost(self, error: BaseException | None, ask: bool = True) -> BaseException | None:
        """Return the error after which no call of this process can succeed any more, None where there was none.

        Looked for in ``error`` and what it came from; where they say nothing and ``ask`` is true, by a call that is refused then.
        """

    def watch_shared_state(self, report: Callable[[str], None], *, check: bool = True) -> Callable[[], None]:
        """Have ``report(name)`` called before a thread uses something of the array library's that all its streams share.

        With ``check`` a driver that can do so checks the order of all accesses to memory meanwhile.

        Returns
        -------
        callable
            What ends it.
        """

    def watch_untracked_work(self, report: Callable[[str], None]) -> Callable[[], None]:
        """Have ``report(name)`` called where work is queued that is none of our calls, in the thread that queues it.

        Nothing where the driver sees none of that.

        Returns
        -------
        callable
            What ends it.
        """

    def watch_host_data(self, bring: Bring, read: ReadHost) -> Callable[[], None]:
        """Have this thread's `asarray` ask for its arrays, and its work tell of host memory that it reads.

        A driver that does not see its work's reads tells of none; `RecordedGraph.host_copies` has the copies then.

        Parameters
        ----------
        bring : callable
            Given the values and a function that makes the array as ever. Returns the array.
        read : callable
            Given the memory, the name of the work, and whether the work is one that CuPy does by a copy from the host.

        Returns
        -------
        callable
            Ends it.
        """

    def before_untracked_access(self, before: BeforeUntracked) -> None:
        """Have a function told of what is done with the driver's arrays beside our calls, before it is queued.

        Nothing where the driver sees none of that.
        """

    # Arrays and graphs
    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array on the current device; strides in bytes."""

    def empties(self, lies: Sequence[tuple[Sequence[int], Sequence[int], np.dtype[Any]]]) -> Callable[[], list[Any]]:
        """Return a function that makes an array for each shape, strides and type, as `empty` does, in one step."""

    def asarray(self, values: Any) -> Any:
        """Return a host array's copy on the current device, ready for the current stream."""

    def asnumpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a device array's copy on the host, ordered after the current stream of the array's device."""

    def read_unordered(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return an array's copy on the host, ordered after the current stream, for who compares it; None under a capture.

        The array may be of another library that says where it lies. On the host driver nothing counts as ordered by it.
        """

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array into another of the same shape and type, both on the current device, on the current stream."""

    def copy_run(self, target: Any, source: Any, pointer: int) -> None:
        """Copy an array into another on a stream: `one_run` holds of the two, both are on the current device, as the stream."""

    def copy_from_device(self, target: Any, source: Any, pointer: int) -> None:
        """Copy an array of another device into one of the current device, on a stream of that; called inside `relaxed`.

        Both have no gaps, and the same shape, type and strides. Directly where the one device reaches the other's memory.
        """

    def copy_from_host(self, target: Any, values: np.ndarray[Any, Any], pointer: int) -> object:
        """Copy the values that an array of the host's has now into one without gaps, on a stream; called inside `relaxed`.

        Both have the same shape and type. Returns what is to be kept, as the target, until the stream has come so far.
        """

    def copy_to_host(self, array: Any, pointer: int) -> np.ndarray[Any, Any]:
        """Return an array of the host's that a stream copies one without gaps into; called inside `relaxed`.

        It is in page-locked memory where there is such a thing. Both are to be kept until the stream has come so far.
        """

    def checksums(self, arrays: Sequence[Any], pointer: int) -> Sums:
        """Compute checksums of arrays' bits on a stream that is not being captured; called inside `relaxed`.

        The arrays are the driver's own, on the current device, as the stream. They may have gaps and any type. They are to be
        kept until the stream has come so far, and so are the sums.
        """

    def page_locked(self, values: np.ndarray[Any, Any]) -> bool:
        """Whether an array is in page-locked memory, which `asarray` may read only when the stream has come so far."""

    def array_device(self, array: Any) -> int:
        """Return the ordinal of the device that an array lives on."""

    def array_pointer(self, array: Any) -> int:
        """Return the address of an array's first element."""

    def memory_of(self, array: Any) -> Piece:
        """Return the memory that an array of the driver's lies in."""

    def array_pointers(self, arrays: Iterable[Any]) -> list[int]:
        """Return the addresses of many arrays; raises AttributeError or TypeError for what is none of the driver's."""

    def part(self, array: Any, address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an array over the memory that another one lies in, whose first element is at an address."""

    def array_block(self, array: Any) -> object:
        """Return the block of memory that an array lies in: of `block_type`, or anything else where that is not known."""

    def adopt(self, view: View) -> Any:
        """Memory of another library's as an operand; raises ArrayTypeError for memory that the driver's graphs cannot use."""

    def array_over(self, view: View) -> Any:
        """Return an array over memory of another library's, which it keeps, to be copied; raises as `adopt`."""

    def launch_buffer(self) -> Any:
        """Storage that one launch at a time by a `shortcut` needs, made for each slot."""

    def new_graph(self, **settings: Any) -> Any:
        """Return an empty `cudnn.pygraph`."""

    def plan_environment(self) -> str:
        """Return what plans of the current device depend on beside their graph, as JSON: versions, and the device."""

    def compile(
        self, graph: Any, operands: Sequence[Any], *, handle: Handle, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Plan and build a graph whose real tensors all have shape, strides and type.

        Parameters
        ----------
        graph : cudnn.pygraph
            From `new_graph`, with its nodes.
        operands : sequence of graph tensor
            The graph's real tensors in the order in which `Executable.launch` will get the arrays: inputs, then outputs.
        handle : Handle
            To plan with, or to read ``saved`` with. What is planned needs it as long as it lives.
        copies : sequence of OperandCopy
            The operands that a launch copies, on its stream, in scratch that ``Executable.workspace_size`` counts, too. The
            graph's tensor is the copy.
        **settings
            ``workspace_limit`` (bytes or None), ``allow_tf32``, ``deterministic``, ``heuristics``; ``name`` and ``titles``, what
            messages call the graph and its operands; ``saved``, a `SavedPlan` to make it of instead.

        Raises
        ------
        GraphNotSupportedError
            With the backend's own words. With ``saved``, where that is no plan of this graph.
        """

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> Executable:
        """Make a kernel of our own for operands that lie so.

        Parameters
        ----------
        kernel : Kernel
            What it computes.
        operands : sequence of Layout
            Inputs, then the output, as `compile` has them: checked by the caller to fit the kernel, and each other. No stride is
            negative, or falls between elements. Images have four axes.
        name, titles
            What messages call it and its operands.
        """


def abort_capture(driver: Driver, pointer: int) -> None:
    """Leave no capture open that began on a stream, also where an attempt to end it failed; raises no error of CUDA's."""
    try:
        with driver.relaxed():
            try:
                there = driver.capture_id(pointer)
            except Exception:  # as of a capture that was invalidated, which has to be ended, too
                there = 1
            if there:
                driver.end_capture(pointer).destroy()
    except Exception:  # it was invalidated, or its branches were not joined: the first error says more
        pass
