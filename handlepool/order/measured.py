"""Measure the arrays that calls really write (guarantee 17).

A function may write arrays that it does not declare. So this module measures the first call of each function. The call's stream
computes a checksum of each array that the call was given, before the call and after it. A checksum that differs shows a write.
A measurement makes no copy, and the host does not wait for it. Until the host sees that the stream has computed the checksums,
further calls of the function count as writing their arguments. Calls three and ten are measured again, because a first call may
be special. A write of equal values is not seen.

- A measurement that fails tells nothing, and the next call is measured.
- Under a capture nothing is measured.
- Arrays of other libraries, of NumPy and of other devices are not measured. For torch's tensors `handlepool.order.undeclared`
  compares versions.
- Graph functions, operations and branches that run inside a measured call order their own writes. The measurement leaves these
writes out.
"""

import threading
import warnings
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from handlepool._util.frames import frames_inside
from handlepool._util.reachable import leaves
from handlepool.drivers.checksum import Sums
from handlepool.drivers.protocol import Driver
from handlepool.drivers.streams import LEGACY_STREAM
from handlepool.errors import ContractError
from handlepool.order.argument_names import ADVICE, UNNAMED, Call, named_values
from handlepool.order.since import calls_so_far, written_since
from handlepool.pool.context import UNSURE, process, tell, thread
from handlepool.pool.deferred import abandon
from handlepool.pool.internals import PoolInternals
from handlepool.tensors.layout import Piece, Token, share

AGAIN = (3, 10)
"""The calls of a function that are measured again, counted from 1."""
LAST = AGAIN[-1]
"""The number of the last counted call.

A function whose writes are known after this call is neither counted nor measured any more.
"""
_MOST_KNOWN = 10_000


class Writes:
    """The undeclared writes of one function that its measured calls showed.

    Attributes
    ----------
    name : str
        The function's name.
    calls : int
        Number of calls that could have been measured.
    known : bool
        Whether a measurement has succeeded, or there was nothing to measure.
    places : frozenset of str
        Names of the arrays that measured calls wrote. `named_values` gives these names to arguments, attributes and variables of
        the closure.
    pending : deque
        Answers that have not been read. An answer is the result of one measurement.
    """

    __slots__ = ("_declared", "calls", "known", "name", "pending", "places")

    def __init__(self, name: str, *, declared: bool) -> None:
        self.name = name
        self.known = False
        self.places: frozenset[str] = frozenset()
        self._declared = declared
        self.calls = 0
        # Appends and pops are atomic, so two threads that call the function at once take no answer twice.
        self.pending: deque[_Answer] = deque()

    @property
    def settled(self) -> bool:
        """Whether `places` may be taken for all undeclared writes of later calls."""
        return self.known

    @property
    def due(self) -> bool:
        """Whether to measure the next call."""
        return (not self.known and not self.pending) or self.calls + 1 in AGAIN

    def count(self) -> None:
        """Count a call that could be measured."""
        self.calls += 1

    def expect(self, answer: "_Answer") -> None:
        """Keep an answer until `read` takes it.

        The calling thread also keeps the answer, for `wait_for_answers`.
        """
        self.pending.append(answer)
        awaited.expect(self, answer)

    def read(self) -> None:
        """Read the answers that are ready, and add the writes they show."""
        found: set[str] = set()
        while self.pending:
            try:
                answer = self.pending.popleft()
            except IndexError:
                # Another thread has just taken the last answer.
                break
            if answer.given_up():
                continue
            if not answer.ready():
                self.pending.appendleft(answer)
                break
            changed = answer.take()
            if changed is not None:
                found.update(changed)
                self.known = self.known or answer.sure
        if not found <= self.places:
            self.places |= found
            if not self._declared:
                self._warn(sorted(found))

    def check(self) -> None:
        """Raise ContractError if an operation wrote more than it declares.

        Raises
        ------
        ContractError
            If a measured call wrote an undeclared array.
        """
        if self.places and self._declared:
            raise ContractError(
                f"{self.name} wrote {min(self.places)} without declaring it: declare the function's writes, {ADVICE}"
            )

    def _warn(self, places: Sequence[str]) -> None:
        warnings.warn(
            f"{self.name} returned new arrays and wrote {places[0]} as well, so later branches that call this "
            f"function are ordered as writers of {' and '.join(places)}. Declare the function's writes with "
            "@handlepool.operation(mutates=...)",
            stacklevel=frames_inside(),
        )


class _Answer:
    """The result of one measurement, computed on the call's stream.

    Attributes
    ----------
    sure : bool
        Whether the measurement saw all that the call may have written.
    read : bool
        Whether the function's `Writes` have taken the answer.
    """

    __slots__ = ("_after", "_before", "_driver", "_names", "_process", "read", "sure")

    def __init__(self, driver: Driver, before: Sums, after: Sums, names: Sequence[str | None], sure: bool) -> None:
        self._driver = driver
        self._before = before
        self._after = after
        # If a nested call has already ordered its write to an array, the name of this array is None.
        self._names = names
        # A forked child shares no CUDA context with its parent. So the child must recognise the answers of its parent.
        self._process = process()
        self.read = False
        self.sure = sure

    def given_up(self) -> bool:
        """Return whether the answer belongs to the parent process.

        Such an answer is abandoned, because a forked child touches no resource of its parent (guarantee 13).
        """
        if self._process == process():
            return False
        # The sums hold events and memory of the parent. Their destructors would call CUDA, so the answer is never destroyed.
        abandon(self)
        self.read = True
        return True

    def ready(self) -> bool:
        """Return whether the stream has computed the checksums."""
        with self._driver.relaxed():
            return self._after.ready()

    def wait(self) -> None:
        """Wait on the host until the stream has computed the checksums."""
        if self._process == process():
            with self._driver.relaxed():
                self._after.wait()

    def take(self) -> list[str] | None:
        """Return the names of the arrays that have changed.

        The result is None where the checksums could not be computed.
        """
        self.read = True
        one, other = self._before.values(), self._after.values()
        if one is None or other is None:
            return None
        found = zip(self._names, one, other, strict=True)
        return [name for name, before, after in found if name is not None and before != after]


class Measurement:
    """A comparison of a call's arrays before and after the call.

    `begin` makes this object, after the call's stream was made to wait for all calls that the measured call depends on.
    """

    __slots__ = ("_arrays", "_before", "_outer", "_pointer", "_pool", "_since", "_told")

    def __init__(self, pool: PoolInternals, pointer: int, arrays: Sequence[tuple[Any, Piece]], before: Sums) -> None:
        self._pool, self._pointer = pool, pointer
        self._arrays = arrays
        self._before = before
        # Calls inside the measured call order themselves. Their writes are in the books, and must not count as undeclared.
        self._since = calls_so_far(pool)
        self._told: list[Any] = []
        self._outer = tell(self._told)

    def end(self, writes: Writes, call: Call) -> None:
        """Compute checksums after the call, and add the answer to ``writes``.

        The host does not wait for the GPU, so the answer is read later.
        """
        self.drop()
        driver = self._pool.driver
        told = [piece for piece in self._told if piece is not UNSURE and not isinstance(piece, Token)]
        try:
            names = [
                None if self._is_known(memory, told) else name
                for (_, memory), name in zip(self._arrays, self._names(call), strict=True)
            ]
            with driver.relaxed():
                after = driver.checksums([array for array, _ in self._arrays], self._pointer)
        except Exception:
            # The call has succeeded, so a failed measurement must not raise. The function's next call is measured.
            return
        # A nested call with an assumed write counts as a writer, which may hide a real write of the measured call. Then the
        # answer is not sure.
        sure = self._since is None or UNSURE not in self._told
        writes.expect(_Answer(driver, self._before, after, names, sure))

    def drop(self) -> None:
        """Stop noting the writes of nested calls, and compare nothing.

        An enclosing measurement gets the noted writes. `end` starts with this step. Callers drop a measurement if the call
        raised an error, or if the call counts as writing anyway.
        """
        tell(self._outer)
        if self._outer is not None:
            self._outer.extend(self._told)

    def _is_known(self, memory: Piece, told: Sequence[Piece]) -> bool:
        """Return whether a nested call is known to have written an array.

        ``memory`` is the memory of that array, and ``told`` the memory that nested calls reported as written.
        """
        if any(share(memory, each) for each in told):
            return True
        return self._since is not None and written_since(self._pool, memory, self._since)

    def _names(self, call: Call) -> list[str]:
        names: dict[int, str] = {}
        for name, value in named_values(call).items():
            for leaf in leaves(value, calls=True):
                names.setdefault(id(leaf), name)
        return [names.get(id(array), UNNAMED) for array, _ in self._arrays]


def begin(
    pool: PoolInternals, pointer: int, writes: Writes, arrays: Iterable[tuple[Any, Piece]], written: Sequence[Piece | Token]
) -> Measurement | None:
    """Begin to measure a call on a stream, where due and possible.

    The result is None where no measurement is due, where a measurement is not possible, or where there is nothing to measure.

    Parameters
    ----------
    pool : PoolInternals
        The pool of the call.
    pointer : int
        The call's stream, on the current device.
    writes : Writes
        The function's undeclared writes, as known so far.
    arrays : iterable of (array, Piece)
        The arrays that the call is given. They are kept until the stream has computed the checksums.
    written : sequence of Piece or Token
        Memory that the call is known to write. Arrays that share it are not measured.
    """
    # Captured work does not run, so a checksum after the call would show no write.
    if thread.recording is not None:
        return None
    if not writes.due:
        writes.count()
        return None
    driver = pool.driver
    try:
        # While a blocking stream is being captured, CUDA refuses any question about the legacy stream. So this code does not
        # ask about the legacy stream.
        if pointer != LEGACY_STREAM and driver.is_capturing(pointer):
            return None
        writes.count()
        chosen = [*_measurable(pool, arrays, [piece for piece in written if not isinstance(piece, Token)])]
        if not chosen:
            writes.known = True
            return None
        with driver.relaxed():
            before = driver.checksums([array for array, _ in chosen], pointer)
    except Exception:
        # For example, there may be no memory for the sums. The call then runs unmeasured, and an error of the GPU reappears in
        # the call itself.
        return None
    return Measurement(pool, pointer, chosen, before)


def _measurable(
    pool: PoolInternals, arrays: Iterable[tuple[Any, Piece]], written: Sequence[Piece]
) -> Iterator[tuple[Any, Piece]]:
    """Yield the arrays to measure, each piece of memory once.

    They are the driver's arrays on the current device that are not known to be written.
    """
    driver, device = pool.driver, pool.current_device()
    seen: set[Piece] = set()
    for array, memory in arrays:
        if memory[1] <= memory[0] or memory in seen or not isinstance(array, driver.array_types[0]):
            continue
        seen.add(memory)
        if driver.array_device(array) == device and not any(share(memory, each) for each in written):
            yield array, memory


def wait_for_answers(since: int = 0) -> None:
    """Wait on the host for this thread's answers, and read them.

    Parameters
    ----------
    since : int
        An earlier value of `awaited.asked`. Answers of measurements that had ended by then are left out.

    Raises
    ------
    ContractError
        If a measurement found that an operation writes more than it declares.
    """
    for number, _, answer in awaited.answers:
        if number > since:
            answer.wait()
    read_answers(since)


def read_answers(since: int = 0) -> None:
    """Read this thread's answers that are ready, without a wait.

    ``since`` and the error are as in `wait_for_answers`.
    """
    waiting = awaited.take(since)
    try:
        for _, writes, _ in waiting:
            writes.read()
    finally:
        # An answer that is not read yet stays with its thread, also after an error.
        awaited.answers.extend([each for each in waiting if not each[2].read])
    for _, writes, answer in waiting:
        if answer.read:
            writes.check()


def unsure() -> None:
    """Make the answer of the enclosing measurement unsure.

    A nested call whose writes are unknown counts as writing its arguments. This may hide a write of the enclosing call.
    """
    if thread.told is not None:
        thread.told.append(UNSURE)


functions: dict[Hashable, Writes] = {}
"""The writes of plain functions, by code and structure of the arguments.

`dict.setdefault` is atomic. So two threads that call a function for the first time share one entry.
"""


def writes_of(form: Hashable, name: str) -> Writes:
    """Return the entry of ``form`` in `functions`, or make it."""
    known = functions.get(form)
    if known is None:
        if len(functions) >= _MOST_KNOWN:
            # Code that makes functions without end would fill the table. A cleared entry only costs another measurement.
            functions.clear()
        known = functions.setdefault(form, Writes(name, declared=False))
    return known


class _Thread(threading.local):
    def __init__(self) -> None:
        self.asked = 0
        self.answers: list[tuple[int, Writes, _Answer]] = []

    def expect(self, writes: Writes, answer: _Answer) -> None:
        """Keep an answer until this thread reads it."""
        self.asked += 1
        self.answers.append((self.asked, writes, answer))

    def take(self, since: int) -> list[tuple[int, Writes, _Answer]]:
        """Take out the answers that were asked for after ``since``."""
        # A later call of the function may have read an answer already. That call has reported the answer, so it is left out.
        left = [each for each in self.answers if not each[2].read]
        self.answers = [each for each in left if each[0] <= since]
        return [each for each in left if each[0] > since]


awaited = _Thread()
"""The answers that the calling thread awaits.

``asked`` counts all answers that the thread has ever asked for.
"""
