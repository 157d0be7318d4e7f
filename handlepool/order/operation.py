"""Operations: functions that say what they write and read, so that data orders them within a region (guarantee 17)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce, update_wrapper
from sys import modules
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from handlepool._util.names import name_of, shown
from handlepool._util.reachable import bound_call, leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ContractError
from handlepool.order.accesses import Memory
from handlepool.order.books import DataOrder, before, lanes_for, open_order, opened, ordering_pool
from handlepool.order.plain_calls import exact, piece_of, pieces_of
from handlepool.order.stream_order import in_torch, order, refuse_derived, torch_among, torch_in_use
from handlepool.order.track import Track
from handlepool.order.undeclared import Call, Watch
from handlepool.pool.context import recordings, run_on, thread
from handlepool.pool.default import pool_so_far
from handlepool.pool.internals import PoolInternals
from handlepool.pool.slot import Slot
from handlepool.tensors.layout import Piece, Token, share

P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Entry = str | Callable[..., Any]
Entries = Entry | Sequence[Entry]
Find = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""What gives the value of an entry, of a call's arguments."""
Pieces = list[Piece | Token]
_OPTIONS = {bool, int, float, complex, str, bytes}
"""Arguments that tell two calls of one operation from each other."""


class Operation(Generic[P, R_co]):
    """A function that says what it writes and reads. See `operation`.

    Attributes
    ----------
    function : callable
        What it calls.
    """

    def __init__(self, function: Callable[P, R_co], mutates: Entries | None, reads: Entries | None) -> None:
        update_wrapper(self, function)
        self.function = function
        self._name = name = name_of(function)
        if not callable(function):
            raise ArgumentError(
                f"operation was given {shown(function)}, which cannot be called: put @handlepool.operation right above the "
                f"function, and @classmethod or @property above that"
            )
        for late in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if late(function):
                raise ArgumentError(
                    f"operation {name} would run after its call has returned, as a generator or a coroutine does, and could not "
                    f"be ordered: make the part that launches an operation"
                )
        parameters = _parameters(function)
        self._out = _argument(parameters, "out") if "out" in parameters else _keyword("out", None)
        self._says = mutates is not None or reads is not None
        self._mutates = _finds(name, parameters, "mutates", mutates)
        self._reads = _finds(name, parameters, "reads", reads)
        self._method = next(iter(parameters), "") == "self"  # also inside a property, of which nobody tells it

    def __set_name__(self, owner: type, name: str) -> None:
        self._method = True

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Operation[P, R_co]": ...
    @overload
    def __get__(self: "Operation[Concatenate[S, Q], R_co]", instance: S, owner: Any = None) -> "Callable[Q, R_co]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind it to an object, as a function does."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function, in the order of the region that this thread is in."""
        pool = (thread.pool or ordering_pool()) if opened or recordings else None
        if pool is not None:
            return self._in_order(cast(PoolInternals, pool), args, kwargs)  # of no other class: see `RunningPool`
        pool = pool_so_far()
        if pool is not None and pool.checked:
            return self.run(pool, args, kwargs, self._writes(pool.driver, args, kwargs))
        result = self.function(*args, **kwargs)
        if result is None and not self._says:
            self._check_says(args, kwargs)
        return result

    def _in_order(self, pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R_co:
        driver = pool.driver
        if "torch" in modules:
            refuse_derived(self.function, args, kwargs)
        reads, writes = self.accesses(driver, args, kwargs)
        device = pool.current_device()
        lanes = lanes_for(pool, driver.current_stream(device).ptr) if recordings else None
        if lanes is not None:
            call = pool, args, kwargs, writes
            # Held until nobody reads it who is not waited for: torch would give it to others before.
            given = (args, kwargs) if torch_in_use(driver) is None else self.reached(args, kwargs)

            def run(slot: Slot | None) -> R_co:
                if slot is None:
                    return self.run(*call)
                torch = torch_in_use(driver)
                rest = (
                    (self.run, call, {})
                    if torch is None
                    else in_torch(torch, slot.pointer, slot.pointer, device, self.run, call, {})
                )
                return run_on(pool, slot.side_stream, device, None, *rest)

            new = partial(_new_beside, driver, (*reads, *writes))
            values = (*args, *kwargs.values())
            what = (self, *[value for value in values if type(value) in _OPTIONS and value == value])
            return lanes.run(self._name, reads, writes, given, run, new, what=what)
        before(pool, reads, writes, self.reached(args, kwargs))
        if thread.recording is not None and thread.recording.lanes is not None:
            thread.recording.lanes.accessed(reads, ())
        torch = None if thread.recording is not None else torch_among(self.function, args, kwargs)
        if torch is None:
            result = self.run(pool, args, kwargs, writes)
        else:  # in a fork's body it may have another current stream than CuPy, and the operation may launch on both
            here, theirs = driver.current_stream(device).ptr, torch.current_stream(device)
            order(pool, device, here, theirs)
            try:
                result = self.run(pool, args, kwargs, writes)
            finally:
                order(pool, device, theirs, here)
        made = new_among(driver, result, (*reads, *writes))
        if made:
            before(pool, (), made, result)
        return result

    def run(self, pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any], writes: Pieces) -> R_co:
        """Call the function, which was ordered by its `accesses`, and see that it writes nothing else.

        Raises
        ------
        ContractError
            Where it does, as far as that is looked at: see `operation`.
        """
        if thread.recording is not None:
            thread.recording.accessed((), writes)
        watch = Watch(pool, self._call(args, kwargs), writes)
        result = self.function(*args, **kwargs)
        if result is None and not self._says:
            before(pool, (), pieces_of(pool.driver, self._call(args, kwargs), calls=True), (args, kwargs))  # whatever it wrote
            self._check_says(args, kwargs)
        watch.ended()
        return result

    def accesses(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Pieces, Pieces]:
        """Return what a call reads, and what it writes of what was there before it.

        Parameters
        ----------
        driver : Driver
        args, kwargs : tuple, dict
            The call's arguments; of a bound method, its object is the first.

        Returns
        -------
        reads, writes : list of Piece or Token

        Raises
        ------
        ArgumentError
            For an entry that these arguments do not have.
        """
        reads = pieces_of(driver, self._call(args, kwargs), calls=True)
        return reads + pieces_or_tokens(driver, [find(args, kwargs) for find in self._reads]), self._writes(driver, args, kwargs)

    def _writes(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pieces:
        found = pieces_or_tokens(driver, [find(args, kwargs) for find in self._mutates])
        return found + pieces_of(driver, self._out(args, kwargs))

    def reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """Return all that a call reads and overwrites, at this moment."""
        found = [find(args, kwargs) for find in (*self._reads, *self._mutates, self._out)]
        return [*leaves(self._call(args, kwargs), calls=True), *leaves(found, keys=True)]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call as that of a method which is bound, so that its object's attributes are seen."""
        if self._method and args:
            return MethodType(self.function, args[0]), args[1:], kwargs
        return self.function, args, kwargs

    def _check_says(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._out(args, kwargs) is None:
            raise ContractError(
                f"operation {self._name} declares nothing, returned nothing and was given no out=, so nobody knows what it "
                f'wrote: say it, as with @handlepool.operation(mutates="x"); or mutates=() where it writes nothing'
            )

    def __reduce__(self) -> Any:
        """Go by name, as functions do."""
        name = str(getattr(self, "__qualname__", self._name))
        try:
            found: Any = reduce(getattr, name.split("."), modules.get(self.__module__))
        except AttributeError:
            found = None
        if found is self:
            return name
        raise ArgumentError(
            f"operation {self._name} cannot be pickled: another process finds it by its name, and {self.__module__}.{name} does "
            f"not lead to it. Define it at the level of a module or a class, under its own name"
        )

    def __copy__(self) -> "Operation[P, R_co]":
        return self

    def __deepcopy__(self, memo: Any) -> "Operation[P, R_co]":
        return self

    def __repr__(self) -> str:
        return f"<Operation {self._name}>"


class OperationCall(Memory):
    """A call of an operation as a branch: what it reads and writes.

    Attributes
    ----------
    operation : Operation
    args, kwargs : tuple, dict
        Its arguments, the object of a bound method first.
    held : list
        What it reads and writes.
    """

    __slots__ = ("_driver", "args", "held", "kwargs", "operation")

    def __init__(self, driver: Driver, operation: Operation[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._driver = driver
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.held = operation.reached(args, kwargs)
        super().__init__(*operation.accesses(driver, args, kwargs), name=name_of(operation))

    def run(self, pool: PoolInternals) -> Any:
        """Call it, in its branch."""
        return self.operation.run(pool, self.args, self.kwargs, [*self.writes])

    def ended(self, order: DataOrder, track: Track, allocated: Sequence[Any] | None, result: object) -> None:
        """Write down what is new, now that the operation has returned."""
        made: Pieces = [(*self._driver.block_range(block), None) for block in allocated or ()]
        others = new_among(self._driver, result, (*self.reads, *self.writes, *made))
        if made or others:
            order.note_found(track, made, others)

    def failed(self, order: DataOrder, track: Track, allocated: Sequence[Any]) -> None:
        """Write down what is new, though the operation raised an error."""
        order.note_found(track, [(*self._driver.block_range(block), None) for block in allocated], ())


def operation_of(function: Any, args: tuple[Any, ...]) -> tuple[Operation[..., Any], tuple[Any, ...]] | None:
    """Return the operation that a call of a function is, and its arguments, the object of a bound method first; or None."""
    kind = type(function)
    if kind is Operation:
        return function, args
    if kind is MethodType and type(function.__func__) is Operation:
        return function.__func__, (function.__self__, *args)
    return None


def new_among(driver: Driver, result: object, known: Sequence[Piece | Token]) -> list[Piece]:
    """Return the memory of the arrays in a result that is none of what is known."""
    there = [memory for memory in known if not isinstance(memory, Token)]
    return [memory for memory in pieces_of(driver, result) if not any(share(memory, each) for each in there)]


def _new_beside(driver: Driver, known: Sequence[Piece | Token], result: object) -> list[Piece]:
    return new_among(driver, result, known)


def pieces_or_tokens(driver: Driver, value: object) -> Pieces:
    """Return the memory of what is reached from a value; a token for what is no array, or one that does not say where it lies.

    None is nothing, and so is an array without elements. An object counts with the arrays in its attributes, too.
    """
    found: Pieces = []
    for leaf in leaves(value, keys=True):
        memory = piece_of(driver, leaf)
        if memory is None and leaf is not None:
            found += [Token(leaf), *pieces_of(driver, leaf, calls=True)]
        elif memory is not None and memory[1] > memory[0]:
            found.append(memory)
    return found


@overload
def operation(function: Callable[P, R], *, mutates: Entries | None = None, reads: Entries | None = None) -> Operation[P, R]: ...
@overload
def operation(*, mutates: Entries | None = None, reads: Entries | None = None) -> Callable[[Callable[P, R]], Operation[P, R]]: ...
def operation(function: Callable[..., Any] | None = None, *, mutates: Entries | None = None, reads: Entries | None = None) -> Any:
    """Declare what a function of kernels writes in place, and what it reads beyond its arguments.

    It is for functions of CuPy kernels, torch operations or other launches. Within a region data orders such a function like a
    graph function, as a branch and in a fork's body, and elsewhere it is called as it is. It reads all arrays in its arguments,
    defaults and closure, and in the attributes of a method's object one level deep. It writes what ``mutates`` says, its ``out``,
    and the new arrays that it returns. A kernel that writes to its argument and returns nothing may have written all that it was
    given, where nothing is declared: then branches that share an input wait for each other.

    Parameters
    ----------
    function : callable, optional
        What the decorator stands on. A method, too.
    mutates : str, callable, or a tuple of these, optional
        What it writes in place. An entry is a parameter's name, an attribute of one as ``"self.state"``, or a function of the
        call's arguments. What an entry gives counts with its memory if it is an array; lists, tuples and dictionaries are walked;
        None is nothing. Any other object, as a model, a plan, a generator or a file, is a token: two operations that mutate one
        token run one after the other. The arrays in its attributes count, too. ``()`` says that nothing is written.
    reads : str, callable, or a tuple of these, optional
        What it reads beside the above.

    Returns
    -------
    callable
        With the function's name, signature and types.

    Raises
    ------
    ArgumentError
        For an entry that names no parameter; and for an attribute that is not there, at a call in a fork or a recording.
    ContractError
        At the first call, where nothing is declared, nothing returned, and no ``out`` given. And for what was written and not
        declared, as far as that is found: a torch tensor, by its version, where a branch that was given it may still read it; and
        with ``HandlePool(check=True)``, which compares a call's arguments before and after it, any array.

    Examples
    --------
    >>> scale = cupy.ElementwiseKernel("T factor", "T y", "y *= factor", "scale")                        # doctest: +SKIP
    >>> @handlepool.operation(mutates="y")                                                               # doctest: +SKIP
    ... def scaled(y, factor):
    ...     scale(factor, y)
    >>> with states.fork() as fork:                                                                      # doctest: +SKIP
    ...     y = fork.run(conv, x, w)
    ...     fork.run(scaled, y, 0.5)  # after the convolution, which writes y
    ...     left = fork.run(pool, y)  # after the scaling; the next beside this one, since both only read y
    ...     right = fork.run(conv, y, v)
    """
    if function is None:
        return lambda decorated: Operation(decorated, mutates, reads)
    return Operation(function, mutates, reads)


# Entries


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a kernel object, say, that does not tell
        return {}


def _finds(name: str, parameters: Mapping[str, inspect.Parameter], what: str, entries: Any) -> list[Find]:
    given = entries if isinstance(entries, (tuple, list)) else () if entries is None else (entries,)
    return [_find(name, parameters, what, entry) for entry in given]


def _find(name: str, parameters: Mapping[str, inspect.Parameter], what: str, entry: Any) -> Find:
    if isinstance(entry, str):
        first, *path = entry.split(".")
        if first not in parameters or not all(part.isidentifier() for part in path):
            known = f"its parameters are {', '.join(parameters)}" if parameters else "no parameters of it are known"
            raise ArgumentError(
                f"operation {name}: {what}={shown(entry)} is neither a parameter nor an attribute of one, as 'self.state', and "
                f"{known}. For anything else pass a function of the call's arguments"
            )
        find = _argument(parameters, first)
        return partial(_attribute, name, what, entry, find, path) if path else find
    if callable(entry):
        return partial(_computed, name, what, entry)
    raise ArgumentError(
        f"operation {name}: {what}={shown(entry)}; an entry is a parameter's name, a dotted attribute as 'self.state', or a "
        f"function of the call's arguments"
    )


def _argument(parameters: Mapping[str, inspect.Parameter], name: str) -> Find:
    """Return what finds a parameter's value; None where a call lacks it, which the function itself will say."""
    place, parameter = [*parameters].index(name), parameters[name]
    kind, default = parameter.kind, None if parameter.default is parameter.empty else parameter.default
    if kind is parameter.VAR_POSITIONAL:
        return lambda args, _: args[place:]
    if kind is parameter.VAR_KEYWORD:
        taken = {known for known, each in parameters.items() if each.kind is not each.POSITIONAL_ONLY}
        return lambda _, kwargs: {known: value for known, value in kwargs.items() if known not in taken}
    if kind is parameter.KEYWORD_ONLY:
        return _keyword(name, default)
    return lambda args, kwargs: args[place] if place < len(args) else kwargs.get(name, default)


def _keyword(name: str, default: Any) -> Find:
    return lambda _, kwargs: kwargs.get(name, default)


def _attribute(
    name: str, what: str, entry: str, find: Find, path: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    value = find(args, kwargs)
    for part in path:
        if value is None:
            return None
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise ArgumentError(f"operation {name}: {what}={entry!r}, and {shown(value)} has no attribute {part!r}") from error
    return value


def _computed(name: str, what: str, entry: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return entry(*args, **kwargs)
    except Exception as error:
        raise ArgumentError(
            f"operation {name}: the function in {what}= failed; it is called with the call's own arguments"
        ) from error


def follow_branches(pool: PoolInternals, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the current stream wait for the branches that read or wrote what a task is given."""
    driver, device = pool.driver, pool.current_device()
    books = open_order(driver, device)
    if books is None:
        return
    pointer = driver.current_stream(device).ptr
    track = books.tracks.get(pointer) or Track(pointer)
    if getattr(bound_call(function), "__func__", None) in exact:  # what it reads and writes is its own to know
        with books:
            books.follow(track, {each: each.count for each in books.tracks.values()})
        return
    declared = operation_of(function, args)
    if declared is None:
        reads: Pieces = [*pieces_of(driver, bound_call(function), args, kwargs, calls=True)]
        writes = reads
    else:
        reads, writes = declared[0].accesses(driver, declared[1], kwargs)
    with books:
        books.follow(track, books.conflicts(reads, writes))
