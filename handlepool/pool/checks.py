"""Check rules that cuDNN and CuPy leave unchecked.

The checks run in pools with ``check=True``. Such a pool has its own class of slots, and a wrapper around its driver, so other
pools pay nothing.

- A handle knows the thread that owns it. cuDNN's binding reads ``backend_handle`` at each use. Here this attribute is a
  property, which checks the thread.
- On the host driver, using a workspace after its end is an error, because that driver sees each use of its arrays.
- A graph function's arrays are compared with the workspaces that were handed out on other streams.
- Some state of CuPy, such as FFT plans, is shared by all streams. Two uses of such state in concurrent branches are an error.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from handlepool.drivers.executable import Executable, OperandCopy
from handlepool.drivers.kernel import Kernel
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import Handle
from handlepool.errors import ContractError, OwnershipError
from handlepool.pool.context import BranchRegion, ThreadToken, thread
from handlepool.pool.slot import Slot
from handlepool.pool.status import Status
from handlepool.pool.workspace import DeviceScratch, Workspace
from handlepool.tensors.layout import Layout


@functools.cache
def _guarded(kind: Any) -> Any:
    class Guarded(kind):  # type: ignore[misc]
        """A handle that only its owning thread may use."""

        @property
        def backend_handle(self) -> int | None:
            own = self.__dict__
            value: int | None = own["backend_handle"]
            if value is not None and own["_thread"] is not thread.token:
                raise OwnershipError(
                    f"a handle of {own['_owner']} is used by {_this_thread()}: call get_handle() in the thread and fork that "
                    "use the handle, and do not store the handle"
                )
            return value

        @backend_handle.setter
        def backend_handle(self, value: int | None) -> None:
            self.__dict__["backend_handle"] = value

        def __repr__(self) -> str:
            return f"<{kind.__name__} of {self.__dict__['_owner']}>"

    return Guarded


def _guard(handle: Handle) -> None:
    handle.__dict__.setdefault("_thread", thread.token)
    handle.__dict__.setdefault("_owner", "nobody")
    kind: Any = type(handle)
    if "backend_handle" not in vars(kind):
        handle.__class__ = _guarded(kind)


def _claim(handle: Handle) -> None:
    """Let this thread use a handle that has no owner."""
    own = handle.__dict__
    if own.get("_thread", 0) is None:
        own["_thread"] = thread.token


def _this_thread() -> str:
    return f"thread {threading.current_thread().name!r}"


class CheckedSlot(Slot):
    """A slot that raises if a thread uses it without owning it."""

    __slots__ = ("_given", "_status", "_thread", "_who")

    def __init__(
        self,
        status: Status,
        driver: Driver,
        scratch: DeviceScratch,
        handle: Handle,
        workspaces: tuple[Workspace, Workspace] | None = None,
    ) -> None:
        self._status = status
        self._thread: ThreadToken | None = None
        self._who = "nobody"
        # This is the workspace that was handed out last. A workspace of a capture is not noted, because the capture's graph may
        # use the workspace at any time.
        self._given: Any = None
        super().__init__(status, driver, scratch, handle, workspaces)
        _guard(handle)
        if isinstance(driver, CheckedDriver):
            driver.remember(self)

    def begin(self, pointer: int) -> None:
        """Begin as `Slot.begin` does, and note the owner."""
        super().begin(pointer)
        self._thread = thread.token
        self._who = f"{_this_thread()} for stream {pointer:#x} of device {self.device}"
        self._own(self.handle)

    def _own(self, handle: Handle) -> None:
        handle.__dict__.update(_thread=self._thread, _owner=self._who)

    def end(self) -> None:
        """End as `Slot.end` does, and end the last workspace."""
        if self.owner is not None:
            own = self.handle.__dict__
            own.update(_thread=None, _owner=f"{self._who}, whose thread, stream or fork has ended")
        super().end()
        self._end_given("the end of its thread, stream or fork")

    def release_unless_busy(self, closed: object) -> Slot | None:
        """Release as `Slot.release_unless_busy` does, and clear the handle's owner."""
        heir = super().release_unless_busy(closed)
        if heir is not None:
            heir.handle.__dict__.update(_thread=None, _owner=f"{self._who}, whose pool was closed")
        return heir

    @property
    def intact(self) -> bool:
        """Return the same as `Slot.intact`, without checking the owner."""
        return self.handle.__dict__["backend_handle"] is not None

    def replace_handle(self, handle: Handle) -> None:
        """Replace as `Slot.replace_handle` does, and guard the new handle."""
        super().replace_handle(handle)
        _guard(handle)
        self._own(handle)

    def workspace(self, nbytes: int) -> Any:
        """Return the array of `Slot.workspace`, and end the previous array."""
        self._check_mine()
        array = super().workspace(nbytes)
        if not self._capture:
            self._end_given("get_workspace was called for its stream again")
            self._given = array
        return array

    def _end_given(self, why: str) -> None:
        array, self._given = self._given, None
        if array is not None:
            self._driver.end_scratch(array, why)

    def reserve(self, nbytes: int) -> int:
        """Reserve as `Slot.reserve` does; raise unless this thread is the owner."""
        self._check_mine()
        return super().reserve(nbytes)

    def _check_mine(self) -> None:
        if self.owner is None or self._thread is not thread.token:
            # A close ends the slots of all threads. Later calls of these threads must raise `PoolClosedError` and not the error
            # below.
            self._status.check()
            ended = "" if self.owner is not None else ", whose thread, stream or fork has ended"
            raise OwnershipError(
                f"a state of {self._who}{ended} is used by {_this_thread()}: use a state only in its own "
                "thread, until its call ends"
            )

    def handed_out(self, pointer: int) -> bool:
        """Return whether an address lies in the owner's last `workspace`."""
        block, capture, scratch = self._handed.block, self._capture, self._scratch
        if self.owner is None or not block.pointer <= pointer < block.pointer + block.nbytes:
            return False
        # A later use of the slot does not end the memory of a capture. This memory ends when the pool forgets the capture, or
        # when the program is closed.
        return not capture or any(block in known.get(capture, ()) for known in (scratch.captured, scratch.recorded))

    def who(self) -> str:
        """Return the owner in words."""
        return self._who


class _Use:
    """A branch's use of state that streams share, such as FFT plans.

    The use ends with the join of its region.
    """

    __slots__ = ("__weakref__", "region", "stream", "who")

    def __init__(self, stream: int, region: BranchRegion) -> None:
        self.stream = stream
        self.region = region
        self.who = f"a branch of {_this_thread()} on stream {stream:#x}"


class CheckedDriver:
    """A wrapper around a driver that checks some of its calls.

    All other attributes are those of the inner driver.
    """

    def __init__(self, driver: Driver) -> None:
        self.checked_driver = self._driver = driver
        # The keys are the identities of the slots. Each change and each copy of the dictionary is one atomic step, so the
        # dictionary needs no lock.
        self._slots: dict[int, weakref.ref[CheckedSlot]] = {}
        # CuPy keeps FFT plans for each thread, so their last use is also kept for each thread.
        self._mine = threading.local()
        self._everybodys: dict[str, weakref.ref[_Use]] = {}
        self.close: Callable[[], None] = driver.watch_shared_state(self.note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def remember(self, slot: CheckedSlot) -> None:
        """Note a slot, so that `check_workspaces` knows its workspace."""
        slots, key = self._slots, id(slot)
        slots[key] = weakref.ref(slot, lambda _: slots.pop(key))

    def bind_handle(self, handle: Handle, pointer: int) -> None:
        """Bind as `Driver.bind_handle` does, and claim a handle without an owner."""
        _claim(handle)
        self._driver.bind_handle(handle, pointer)

    def destroy_handle(self, handle: Handle) -> None:
        """Destroy as `Driver.destroy_handle` does, and claim a handle without an owner."""
        _claim(handle)
        self._driver.destroy_handle(handle)

    def compile(
        self, graph: object, operands: Sequence[Any], *, copies: Sequence[OperandCopy] = (), **settings: Any
    ) -> Executable:
        """Compile as `Driver.compile` does; launches check their arrays."""
        executable: Executable = CheckedExecutable(self, self._driver.compile(graph, operands, copies=copies, **settings))
        return executable

    def kernel(self, kernel: Kernel, operands: Sequence[Layout], *, name: str, titles: Sequence[str]) -> Executable:
        """Make a kernel as `Driver.kernel` does; launches check their arrays."""
        executable: Executable = CheckedExecutable(self, self._driver.kernel(kernel, operands, name=name, titles=titles))
        return executable

    def check_workspaces(self, executable: Executable, handle: Handle, operands: Sequence[Any]) -> None:
        """Raise for an array in the workspace of another stream.

        The launch's own stream is the stream that the handle is bound to.
        """
        slots = [slot for known in list(self._slots.values()) if (slot := known()) is not None]
        device = self._driver.current_device()
        for index, array in enumerate(operands):
            pointer = self._driver.array_pointer(array)
            for slot in slots:
                if slot.device == device and slot.pointer != handle.stream and slot.handed_out(pointer):
                    raise ContractError(
                        f"{executable.name}: {executable.titles[index]} lies in the workspace of {slot.who()}, but "
                        f"{_this_thread()} launches on stream {handle.stream:#x}. Only the stream of a workspace may "
                        "use it, so call get_workspace() on the stream of the launch"
                    )

    def note(self, name: str) -> None:
        """Note a use of state that streams share; raise on a race.

        ``name`` is the state. A race is a use of the state by a branch on another stream, before the outermost join. Forks
        inside a branch may have ordered the two streams, but this check ignores such forks.
        """
        stream = self._driver.current_stream().ptr
        # CuPy keeps FFT plans for each thread, and one random generator for all threads of a device.
        uses = self._everybodys if name == "cupy.random" else self._mine.__dict__
        former = uses.get(name)
        use = None if former is None else former()
        region = thread.region
        if use is not None and use.stream != stream and not use.region.over:
            raise ContractError(
                f"{name} is used by {_this_thread()} on stream {stream:#x} and by {use.who} before the outermost join, "
                f"and CuPy keeps one work area or state for both streams, so results would be wrong. Use {name} on one "
                "stream, or outside of branches"
            )
        if region is not None:
            use = _Use(stream, region)
            region.keep(use)
            uses[name] = weakref.ref(use)


class CheckedExecutable:
    """An executable whose launches check their arrays."""

    def __init__(self, driver: CheckedDriver, executable: Executable) -> None:
        self._driver = driver
        self._executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def launch(
        self,
        handle: Handle,
        operands: Sequence[Any],
        workspace: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Check the handle and the arrays, and launch."""
        # Reading this attribute raises if this thread does not own the handle.
        _ = handle.backend_handle
        self._driver.check_workspaces(self._executable, handle, operands)
        self._executable.launch(handle, operands, workspace, check)

    def shortcut(self, *_: object) -> None:
        """Return None: the inner executable's shortcut would check nothing."""
