"""Convert a call's arrays of other libraries to arrays of the driver.

A converted array has the memory of the original array. `handlepool.foreign.torch` converts torch tensors.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from handlepool._util.names import kind_of
from handlepool._util.protocols import ARRAY_PROTOCOLS, has_protocol
from handlepool.drivers.operands import ASARRAY, check_operands, operand_name, taken
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import ArgumentError, ArrayTypeError, CaptureError, DeviceMismatchError
from handlepool.graphs.launch import GraphCall
from handlepool.graphs.signature import Settings
from handlepool.order.stream_order import integration, order
from handlepool.pool.context import on_device, thread
from handlepool.pool.deferred import abandon, defer, deferred
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.tensors.dlpack import from_cuda_array, from_dlpack
from handlepool.tensors.graph_types import DeviceArray
from handlepool.tensors.layout import HOST, Layout, Piece, View


class ForeignCall(GraphCall):
    """A `GraphCall` over arrays of other libraries than the driver's.

    The outputs that the call allocates become arrays of the first array's library. An output that needs a conversion is
    converted after the launch has been enqueued.
    """

    __slots__ = ("_call", "_converted", "callers", "stream")

    def __init__(self, converted: "ConvertedArguments", call: GraphCall, result: object) -> None:
        self._converted = converted
        self._call = call
        self.plan, self.operands, self.result = call.plan, call.operands, result
        self.stream, self.callers = converted.stream, converted.callers

    def submit(self, slot: Slot) -> Any:
        """Launch the call in order with the streams `callers`; return the outputs.

        The launch waits for the earlier work of the streams `callers`, and their later work waits for the launch.
        `GraphCall.submit` orders the call among branches and nodes.
        """
        converted = self._converted
        pointer = slot.pointer
        # Earlier work on these streams may still write the arrays, so the launch waits for that work.
        for caller in converted.callers:
            order(converted.pool, converted.device, caller, pointer)
        self._call.submit(slot)
        # Later work on these streams may read the outputs, so that work waits for the launch.
        for caller in converted.callers:
            order(converted.pool, converted.device, pointer, caller)
        return self._finish(slot)

    def launch(self, slot: Slot) -> Any:
        """Enqueue the call on the slot's stream; return the outputs.

        The stream already waits for all work that the call depends on.
        """
        self._call.launch(slot)
        return self._finish(slot)

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """Return the memory read and the memory written by the call."""
        return self._call.pieces()

    def _finish(self, slot: Slot) -> Any:
        converted = self._converted
        if converted.kept:
            self._keep_until_run(slot)
        if converted.wrap is None or not converted.made:
            return self.result
        # To convert an output, the array's library makes its own stream wait for the current stream. So the stream that writes
        # the outputs must be the current stream.
        driver = converted.pool.driver
        previous = driver.current_stream()
        if previous.ptr == slot.pointer:
            return _wrapped(converted.wrap, self.result)
        stream = slot.side_stream or driver.wrap_stream(slot.pointer, None)
        driver.push_stream(stream)
        try:
            return _wrapped(converted.wrap, self.result)
        finally:
            driver.pop_stream(stream, previous)

    def _keep_until_run(self, slot: Slot) -> None:
        converted = self._converted
        if thread.recording is not None:
            thread.recording.keep(converted.kept)
        # Keep the arrays until an event on the stream has passed. On a capturing stream the event would become a part of the
        # capture, so no event is recorded. The legacy stream cannot be captured, so CUDA is not asked.
        elif slot.pointer == LEGACY_STREAM or not converted.pool.driver.capture_id(slot.pointer):
            # Release arrays of earlier calls first, so that kept memory does not grow from call to call.
            if deferred:
                deferred.run()
            defer(_Kept(converted.pool, converted.device, slot.pointer, converted.kept).release)


def _wrapped(wrap: Callable[[Any], Any], made: object) -> Any:
    if isinstance(made, tuple):
        return tuple([_wrapped(wrap, array) for array in made])
    try:
        return wrap(made)
    # The library may not have the array's data type or its strides. Then the caller gets the driver's array.
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return made


class _Kept:
    """Keep arrays until a stream has passed the call that reads them."""

    def __init__(self, pool: PoolInternals, device: int, pointer: int, arrays: list[Any]) -> None:
        self._arrays = arrays
        self._pool = pool
        self._device = device
        self._event = pool.device(device).edges.acquire()
        pool.driver.record_event(self._event, pointer)

    def release(self) -> bool:
        pool = self._pool
        # After a fork of the process or a lost context, no CUDA object may be destroyed, so keep the arrays for ever.
        if pool.status.untouchable:
            abandon(self)
            return True
        try:
            with on_device(pool.driver, self._device):
                with pool.driver.relaxed():
                    passed = pool.driver.event_done(self._event)
                if passed:
                    pool.device(self._device).edges.release(self._event)
                return passed
        # The query of the event raises if queued work failed, for example. Then the arrays stay kept.
        except Exception:
            return False


# JAX arrays are immutable, so no call may write them.
_IMMUTABLE = ("jax", "jaxlib")


MASKED = "its mask would be lost; pass x.filled(...), or the data and the mask as two arrays"


class ConvertedArguments:
    """The arrays of one call, as arrays of the driver.

    Parameters
    ----------
    name : str
        Name of the graph function, for messages.
    pool : PoolInternals
    arrays : tuple of array
        The inputs. They may be arrays of different libraries.
    outs : tuple of array, optional
        The arrays to write. They may be arrays of different libraries.
    operand : str, optional
        Name of a single array in messages. Without a name, messages call the arrays by their positions.

    Attributes
    ----------
    arrays, outs : tuple
        The parameters ``arrays`` and ``outs``, as arrays of the driver over the same memory.
    stream : int or None
        Pointer of the stream to launch on. None means the current stream of the driver's array library.
    callers : list of int
        Pointers of other streams that use the arrays. The launch waits for the earlier work of these streams, and their later
        work waits for the launch.
    kept : list
        Views that must stay alive until the GPU has passed the call.
    made : list
        New outputs, as arrays of the driver or as torch tensors.
    wrap : callable or None
        Converts an output from an array of the driver to an array of the first array's library. None if no conversion is
        needed, or if that library has no function for the conversion.

    Raises
    ------
    ArrayTypeError, ArgumentError, DeviceMismatchError
        For an array that the driver cannot take.
    """

    __slots__ = (
        "_first",
        "_given",
        "_inputs",
        "_name",
        "_operand",
        "_torch",
        "arrays",
        "callers",
        "device",
        "kept",
        "made",
        "outs",
        "pool",
        "stream",
        "wrap",
    )

    def __init__(
        self, name: str, pool: PoolInternals, arrays: tuple[Any, ...], outs: tuple[Any, ...] = (), operand: str | None = None
    ) -> None:
        driver = pool.driver
        self.pool = pool
        self.device = driver.current_device()
        self.stream: int | None = None
        self.callers: list[int] = []
        self.made: list[Any] = []
        self.kept: list[Any] = []
        self.wrap: Callable[[Any], Any] | None = None
        self._name = name
        self._operand = operand
        self._inputs = len(arrays)
        self._given = given = arrays + outs
        operands: list[Any] = list(given)
        here = driver.current_stream().ptr
        tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
        torch: Any = None
        rest = False
        theirs: int | None = None
        for place, array in enumerate(given):
            if isinstance(array, tensor):
                torch = integration()
                operands[place] = operand = self._adopt(place, torch.view, array)
                if theirs is None and type(operand) is View:
                    theirs = torch.current_stream(self.device)
            else:
                rest = True
        # In a recording, the call does not wait for torch's stream: each replay waits for the stream that it is launched on.
        if theirs is not None and theirs != here and thread.recording is None:
            self.callers.append(theirs)
            # In a branch or a task, the launch stays on the current stream, which is the side stream.
            if thread.region is None:
                self.stream = theirs
                if rest:
                    self.callers.append(here)
        if rest:
            self._convert_rest(operands, here if self.stream is None else self.stream)
        self.arrays, self.outs = tuple(operands[: self._inputs]), tuple(operands[self._inputs :])
        self._first = first = arrays[0] if arrays else None
        self._torch = torch
        if isinstance(first, tensor):
            # A replay writes the recording's memory again. So the output stays in that memory, and torch gets a tensor over it.
            if thread.recording is not None:
                self.wrap, self._torch = torch.adopt_recorded, None
        else:
            self._torch = None
            if not isinstance(first, (*driver.array_types, View)):
                self.wrap = _wrapper(first)

    def _convert_rest(self, operands: list[Any], stream: int) -> None:
        """Convert the arrays that are no torch tensors."""
        natives = self.pool.driver.array_types
        strict = self.pool.driver.name == "host" and np.ndarray not in natives
        for place, array in enumerate(operands):
            if isinstance(array, np.ma.MaskedArray) and array.mask is not np.ma.nomask:
                raise ArrayTypeError(f"{self._name}: {self._called(place)} is a {kind_of(array)}: {MASKED}")
            if isinstance(array, (*natives, View)):
                continue
            if isinstance(array, np.ndarray) or (
                strict and (has_protocol(array, "__dlpack__") or has_protocol(array, "__array_interface__"))
            ):
                raise ArrayTypeError(
                    f"{self._name}: {self._called(place)} is a {kind_of(array)} in host memory, and the "
                    f"{self.pool.driver.name} driver takes {taken(self.pool.driver)}; convert the array first, for example with "
                    f"{ASARRAY}"
                )
            if has_protocol(array, "__dlpack__"):
                operands[place] = self._adopt(place, lambda array: from_dlpack(array, stream), array)
            elif has_protocol(array, "__cuda_array_interface__"):
                operands[place] = self._adopt(place, self._from_cuda_array, array)
            elif has_protocol(array, "__array_interface__"):
                operands[place] = self._adopt(place, _from_host_array, array)
            else:
                raise ArrayTypeError(
                    f"{self._name}: {self._called(place)} is a {kind_of(array)}; the {self.pool.driver.name} driver takes "
                    f"{taken(self.pool.driver)}, torch tensors, and arrays with __dlpack__ or __cuda_array_interface__. Convert "
                    f"the argument to such an array"
                )
            # A view may lose its memory before the launch has run, so keep the view. The host driver adopts a view as an array of
            # its own type, which stays alive by itself.
            if type(operands[place]) is View:
                self.kept.append(operands[place])

    def _called(self, place: int) -> str:
        return self._operand or operand_name(place, self._inputs, len(self._given) - self._inputs)

    def _from_cuda_array(self, array: DeviceArray) -> View:
        view, stream = from_cuda_array(array)
        if stream is not None:
            self.callers.append(stream)
        return view

    def _adopt(self, place: int, view: Callable[[Any], View], array: DeviceArray) -> Any:
        try:
            operand = self.pool.driver.adopt(view(array))
        except (ArrayTypeError, ArgumentError) as error:
            raise type(error)(f"{self._name}: {self._called(place)}, a {kind_of(array)}: {error}") from error
        if type(operand) is View and operand.device_id != self.device:
            raise DeviceMismatchError(
                f"{self._name}: {self._called(place)}, a {kind_of(array)}, is on device {operand.device_id} and the current "
                f"device is {self.device}; make device {operand.device_id} current, or copy the array to device {self.device}"
            )
        return operand

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an output as `Driver.empty` does.

        If the first array is a torch tensor, the memory comes from torch.
        """
        driver = self.pool.driver
        if self._torch is None:
            operand = made = driver.empty(shape, strides, dtype)
        else:
            made = self._torch.empty(shape, strides, dtype, self._first)
            operand = driver.adopt(View(made.data_ptr(), shape, strides, dtype, made.get_device(), False, made))
        self.made.append(made)
        return operand

    def prepare(
        self, prepare: Callable[..., GraphCall], out: object, options: dict[str, Any], settings: Settings = ()
    ) -> ForeignCall:
        """Return the call over the converted arrays.

        ``prepare`` is `GraphFunction.prepare`, which finds the plan.
        """
        if out is None and self.wrap is not None and thread.recording is not None and self.pool.driver.name == "host":
            raise CaptureError(
                f"{self._name}: {self._called(0)}, a {kind_of(self._first)}, cannot be recorded on the host driver, "
                f"because the output would be a {kind_of(self._first)} as well, and its conversion needs values that only a "
                f"replay computes. Pass arrays that {ASARRAY} makes, or record torch tensors on a GPU"
            )
        call = prepare(self.pool, self.arrays, self.outs or None, options, settings, self)
        if out is None:
            return ForeignCall(self, call, self.made[0] if call.plan.single else tuple(self.made))
        self._write(range(len(self.arrays), len(self._given)))
        return ForeignCall(self, call, out)

    def call(self, call: GraphCall, written: Iterable[int]) -> ForeignCall:
        """Wrap ``call`` so that it returns a tuple of the new outputs.

        ``written`` holds indices in ``arrays + outs``, of the arrays that ``call`` writes.
        """
        self._write(written)
        return ForeignCall(self, call, tuple(self.made))

    def _write(self, places: Iterable[int]) -> None:
        """Check that the arrays at ``places`` can be written.

        ``places`` are indices in ``arrays + outs``. The method also tells torch's autograd that the call changes the torch
        tensors among these arrays.
        """
        operands = self.arrays + self.outs
        for place in places:
            array, operand = self._given[place], operands[place]
            if _is_tensor(array):
                # Torch's autograd must know that the call changes this tensor.
                integration().written(array)
                continue
            if getattr(operand, "readonly", False) or type(array).__module__.partition(".")[0] in _IMMUTABLE:
                raise ArgumentError(
                    f"{self._name}: {self._called(place)}, a {kind_of(array)}, is an output and cannot be written; pass a "
                    f"writable array, or leave this output out"
                )


def convert(name: str, pool: PoolInternals, arrays: tuple[Any, ...]) -> ConvertedArguments | None:
    """Convert the arrays of a call.

    The result is None if all ``arrays`` are of the driver's own types.
    """
    natives = pool.driver.array_types
    return None if all(type(array) in natives for array in arrays) else ConvertedArguments(name, pool, arrays)


def layout_of(name: str, pool: PoolInternals, operand: str, array: DeviceArray) -> Layout:
    """Return the layout of ``array``, for `GraphFunction.plan_for`.

    ``array`` is an array of any library, or another object with a shape, strides and a type. ``operand`` is the name of
    ``array`` in messages.

    Raises
    ------
    ArrayTypeError, DeviceMismatchError, ArgumentError
        If a call with ``array`` would raise the error.
    """
    native = isinstance(array, pool.driver.array_types)
    if not native and is_array(array):
        (array,) = ConvertedArguments(name, pool, (array,), operand=operand).arrays
        native = True
    if native:
        check_operands(pool.driver, name, pool.driver.current_device(), (array,), lambda _: operand)
        return Layout.of(array)
    return layout_of_spec(name, operand, array)


def layout_of_spec(name: str, operand: str, array: DeviceArray) -> Layout:
    """Return the layout of an array or an `ArraySpec`.

    Raises
    ------
    ArrayTypeError, ArgumentError
        For an object without a shape, strides or a type.
    """
    if not all(has_protocol(array, attribute) for attribute in ("shape", "strides", "dtype")):
        raise ArrayTypeError(f"{name}: {operand} is a {kind_of(array)}; pass an array or an ArraySpec")
    return Layout.of(array)


# Kinds


def is_array(value: object) -> bool:
    """Return whether a value is an array of any library."""
    return _is_tensor(value) or any(has_protocol(value, protocol) for protocol in ARRAY_PROTOCOLS)


def _is_tensor(array: object) -> bool:
    return "torch" in sys.modules and isinstance(array, getattr(sys.modules["torch"], "Tensor", ()))


def _wrapper(array: object) -> Callable[[Any], Any] | None:
    """Return a function that converts the driver's arrays to ``array``'s library.

    The result is None if the library has no such function.
    """
    root = type(array).__module__.partition(".")[0]
    if root.startswith("numba"):
        as_cuda_array = getattr(sys.modules.get("numba.cuda"), "as_cuda_array", None)
        # The pool has already ordered the streams of the array, so Numba need not synchronise.
        return None if as_cuda_array is None else lambda made: as_cuda_array(made, sync=False)
    # Look for ``from_dlpack`` in the array API's namespace, or else in the library's top module.
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else sys.modules.get(root)
    return getattr(namespace, "from_dlpack", None)


def _from_host_array(array: DeviceArray) -> View:
    values = np.asarray(array)
    address, readonly = values.__array_interface__["data"]
    # The memory may belong to ``values`` or to ``array``, so the view keeps both alive.
    return View(address, values.shape, values.strides, values.dtype, HOST, readonly, (values, array))
