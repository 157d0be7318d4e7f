"""Update the inputs of a program, and call a program.

The class `Program` has `update` and `call` as methods. A call updates the inputs, replays, and copies the outputs in one turn.
After the first call that passes one array for each input, such calls are prepared, and cost little more host time than their
copies.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from handlepool.order.places import before
from handlepool.order.plain_calls import orders_itself
from handlepool.order.reached import pieces_of
from handlepool.pool.context import active
from handlepool.pool.stream import resolve
from handlepool.recording.outputs import Results
from handlepool.recording.tensors import in_order
from handlepool.recording.update import Copy, copy_all
from handlepool.tensors.layout import Piece, Token

if TYPE_CHECKING:
    from handlepool.recording.program import Program

T = TypeVar("T")


@orders_itself
def update(self: "Program", *args: object, **kwargs: object) -> None:
    """Copy new values into the recorded inputs, on the current stream.

    Later replays read the new values. The inputs are the arrays that `record` was given, and the update overwrites them.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `record`, in the same places. Arguments without an array must have the recorded value. You may leave
        out all positional arguments without an array, and each keyword argument without an array. An array must be of the
        driver, and a tensor of torch may replace a recorded tensor. Shape, strides, type and device must be as recorded. Tensors
        are also copied in the order of torch's current stream. Lists, tuples and dictionaries must have the recorded lengths and
        keys, but a list may replace a tuple and a tuple a list. None in the place of an argument with arrays, or of an entry,
        leaves the recorded values as they are. All values are read before the first input is overwritten, so inputs can be
        swapped.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
        If a new array or value does not match the recorded argument; the message names its place. If two different arrays are
        given for the same memory, as for an array that was recorded in two places. If a recorded array is given that an
        update or a call has overwritten: pass None instead. If an array is given in the place of an array of a library other
        than torch: pass None. After an error nothing was copied.
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
        after_branches(self, pieces_of(self._driver, sources), pieces_of(self._driver, targets), None, copies)
    self._follow(None)
    self._inputs.copied(self._driver, copies)
    self._enqueue(_beside_torch(self, copies, partial(copy_all, self._driver, copies)))


@orders_itself
def call(self: "Program", *args: object, out: object = None, **kwargs: object) -> Any:
    """Update the inputs, replay, and copy the outputs, in one turn.

    No other thread can use the program between these steps.

    Afterwards the recorded inputs, which are the caller's own arrays, hold the new values. To keep the values of ``x``, record
    with a copy, ``x.copy(order="K")``. Passing the original ``x`` again is an error, because the program has overwritten it.

    Any thread may call the program. All work is enqueued on this thread's current stream, and the call does not wait for the
    GPU. The returned arrays belong to the caller, and no later use of the program writes to them. The call makes this thread
    the owner of the program; see `hand_over`.

    Parameters
    ----------
    *args, **kwargs
        As in `update`.
    out : optional
        Arrays to copy the outputs into, in the structure of `outputs`. For outputs that are tensors, they are tensors of
        torch. Each must have the shape and type of its output, and no two may share memory. None, also in the place of an
        array, asks for a new array. If the function has a recorded argument named ``out``, it cannot be given here, and keeps
        its values.

    Returns
    -------
    array, or list, tuple or dictionary
        Copies of the outputs in the structure of `outputs`. Later work of the current stream may use the copies, and later
        work of torch's current stream may use tensors among them. An output in several places gets a single copy. Numbers,
        strings and None are as they were recorded. Instances of subclasses of list, tuple and dict become plain lists, tuples
        and dictionaries, except named tuples.

    Raises
    ------
    ArgumentError, ArrayTypeError, DeviceMismatchError
        As in `update`. If ``out`` does not match the outputs. If an output is an array of a library other than torch, or an
        object that may hold arrays. After an error nothing was enqueued.
    MemoryError
        If there is no memory for the copies.
    CaptureError, OwnershipError, PoolClosedError, ForkedProcessError, PoisonedContextError
        As in `replay`, but it is no error if the program belongs to another thread. If another thread is using the program,
        the call waits for the end of that use.
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
        after_branches(self, [*self._memory.reads, *read], [*self._memory.writes, *changed], None, keep)
    self._take_over()
    self._inputs.copied(driver, given)
    self._enqueue(_beside_torch(self, [*given, *results.copies], turn))
    self._inputs.written(driver, results.copies)
    if out is None and not kwargs and len(given) == len(args):
        self._prepare()
    return results.value


def after_branches(
    self: "Program", reads: Sequence[Piece | Token], writes: Sequence[Piece | Token], stream: object, keep: object = None
) -> None:
    """Let a stream wait for branches that conflict with a use.

    ``reads`` and ``writes`` are the memory of the use of this program. The branches of this thread's forks conflict with the
    use if they write this memory, or read memory that the use writes (guarantee 17).
    """
    recording = self._recording
    if recording is not None:
        pointer = None if stream is None else resolve(self._driver, stream).pointer
        before(recording.pool, reads, writes, keep or (self, self._outputs), pointer)


def replayed(self: "Program", act: Callable[[int], T]) -> T:
    """Use the program on the current stream; return the value of ``act``."""
    if active:
        after_branches(self, self._memory.reads, self._memory.writes, None)
    self._follow(None)
    return self._enqueue(act, self._pointer)


def _beside_torch(self: "Program", copies: Sequence[Copy], step: Callable[[], object]) -> Callable[[], object]:
    """Return a step that is also ordered with torch's current stream.

    If no tensor is among the copies, return ``step`` unchanged.
    """
    recording = self._recording
    if recording is None or all(copy.tensor is None for copy in copies):
        return step
    return lambda: in_order(recording.pool, self.device, self._pointer, step)
