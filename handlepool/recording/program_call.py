"""Update the inputs of a program, and call a program.

`update` and `call` are methods of `Program`. A call updates the inputs, replays, and copies the outputs in one turn. After the
first call with one array for each input, further calls are prepared, and cost little more than their copies.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from handlepool.order.plain_calls import orders_itself
from handlepool.order.reached import pieces_of
from handlepool.pool.context import active
from handlepool.recording.outputs import Results
from handlepool.recording.tensors import in_order
from handlepool.recording.update import Copy, copy_all

if TYPE_CHECKING:
    from handlepool.recording.program import Program

T = TypeVar("T")


@orders_itself
def update(self: "Program", *args: object, **kwargs: object) -> None:
    """Copy new values into the recorded inputs, on the current stream.

    Later replays see the new values.

    The inputs are the arrays that `record` was given, and the update overwrites them.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `record`, in the same places. Arguments without an array must have the recorded value. You may leave
        out all positional arguments without an array, and each keyword argument without an array. Arrays are of the driver's
        kind, and tensors of torch replace recorded tensors. Shapes, strides, types and device are as recorded. Tensors are
        also copied in the order of torch's current stream. Containers are nested as recorded: lists and tuples of the same
        lengths (a list may replace a tuple and the reverse), dictionaries of the same keys. None in the place of an argument
        with arrays, or of an entry, leaves the recorded values as they are. Every value is read before the first is
        overwritten, so inputs can be swapped.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
        For a value that differs from the recording, also in an argument without an array; the message names its place. For
        two values for the same memory, as for an array that was recorded in two places. For a recorded array itself, if an
        update or a call has overwritten it: pass None instead. For a value other than None in the place of an array of a
        library other than torch. After an error nothing was copied.
    CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`.
    """
    self._status.check()
    self._use("updated", _update, self, args, kwargs)


def _update(self: "Program", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    self._claim()
    copies = self._inputs.match(self._driver, self._name, self.device, args, kwargs)
    if active:
        sources, targets = ([getattr(copy, name) for copy in copies] for name in ("source", "target"))
        self._after_branches(pieces_of(self._driver, sources), pieces_of(self._driver, targets), None, copies)
    self._follow(None)
    self._inputs.copied(self._driver, copies)
    self._enqueue(_beside_torch(self, copies, partial(copy_all, self._driver, copies)))


@orders_itself
def call(self: "Program", *args: object, out: object = None, **kwargs: object) -> Any:
    """Update the inputs, replay, and copy the outputs, in one turn.

    No use by another thread comes in between.

    The recorded inputs, which are the caller's own arrays, hold the new values afterwards. Record with a copy,
    ``x.copy(order="K")``, if you need ``x`` itself. Passing the original ``x`` again is an error, because the program has
    overwritten it.

    Any thread may call. All work is enqueued on its current stream, and the call does not wait for the GPU. The returned
    arrays belong to the caller, and no later use of the program writes to them. Afterwards `update`, `replay` and `outputs`
    belong to the calling thread; see `hand_over`.

    Parameters
    ----------
    *args, **kwargs
        As in `update`.
    out : optional
        Arrays to copy the outputs into, in the structure of `outputs`, and torch's tensors for outputs that are tensors.
        Shapes and types are the same, and no two arrays share memory. None, also in the place of an array, asks for a new
        array. A recorded argument that is itself named ``out`` cannot be given here, and keeps its values.

    Returns
    -------
    array, or list, tuple or dictionary
        Copies of the outputs in the structure of `outputs`, ready in the order of the current stream. Tensors are also ready
        in the order of torch's current stream. An output in several places gets a single copy. Numbers, strings and None are
        as they were recorded. Subclasses of lists, tuples and dictionaries become the plain class, except named tuples.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
        As in `update`; for an ``out`` that differs from the outputs; for outputs that are arrays of libraries other than
        torch, or objects that may hold arrays. After an error nothing was enqueued.
    MemoryError
        If there is no memory for the copies.
    CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`, except that the program may belong to another thread. If that thread is using the program, the call
        waits.
    """
    if self._status.unusable:
        self._status.check()
    prepared = self._prepared
    if prepared is not None and out is None and not kwargs and not active:
        match, run, built = prepared
        if match(args):
            return built(self._turn(run, args, self._current_stream()))
    return self._use("called", _call, self, args, out, kwargs)


def _call(self: "Program", args: tuple[Any, ...], out: object, kwargs: dict[str, Any]) -> Any:
    if self._recording is None:
        self._refuse()
    driver = self._driver
    given = self._inputs.match(driver, self._name, self.device, args, kwargs)
    results = Results(driver, self._name, self.device, self._outputs, out)

    def turn() -> None:
        copy_all(driver, given)
        self._launch()
        copy_all(driver, results.copies)

    if active:
        read = pieces_of(driver, [copy.source for copy in given])
        changed = [*pieces_of(driver, [copy.target for copy in given]), *results.pieces]
        keep = self, given, results
        self._after_branches([*self._memory.reads, *read], [*self._memory.writes, *changed], None, keep)
    self._take_over()
    self._inputs.copied(driver, given)
    self._enqueue(_beside_torch(self, [*given, *results.copies], turn))
    self._inputs.written(driver, results.copies)
    if out is None and not kwargs and len(given) == len(args):
        self._prepare()
    return results.value


def _beside_torch(self: "Program", copies: Sequence[Copy], step: Callable[[], object]) -> Callable[[], object]:
    """Order a step that copies tensors with torch's current stream.

    Return the step for the program's stream. A step without tensors stays as it is.
    """
    recording = self._recording
    if recording is None or all(copy.tensor is None for copy in copies):
        return step
    return lambda: in_order(recording.pool, self.device, self._pointer, step)
