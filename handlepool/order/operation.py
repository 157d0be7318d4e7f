"""Order declared operations by their reads and writes (guarantee 17)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce, update_wrapper
from sys import modules
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from handlepool._util.names import name_of, shown
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.errors import ArgumentError, ContractError
from handlepool.order.argument_names import Call as FunctionCall
from handlepool.order.books import DataOrder
from handlepool.order.call import PythonCall
from handlepool.order.measured import LAST, Writes, begin, unsure
from handlepool.order.places import before, lanes_for, open_order, ordering_pool, run_as_node
from handlepool.order.plain_calls import does_order_itself
from handlepool.order.reached import Reached, piece_of, pieces_of
from handlepool.order.stream_order import order, refuse_derived, torch_of
from handlepool.order.track import Track, follow
from handlepool.order.undeclared import Watch
from handlepool.pool.context import active, recordings, thread
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
"""A function that finds an entry's value in a call's arguments."""
Pieces = list[Piece | Token]
_OPTIONS = {bool, int, float, complex, str, bytes}
"""Types of the arguments that `OperationCall.what` includes."""


class Operation(Generic[P, R_co]):
    """A function that declares its writes and reads. See `operation`.

    Attributes
    ----------
    function : callable
        The decorated function.
    """

    def __init__(self, function: Callable[P, R_co], mutates: Entries | None, reads: Entries | None) -> None:
        update_wrapper(self, function)
        self.function = function
        self._name = name = name_of(function)
        if not callable(function):
            raise ArgumentError(
                f"operation was given {shown(function)}, which cannot be called: put @handlepool.operation right above the "
                f"function, and @classmethod or @property above @handlepool.operation"
            )
        # The body of a generator or a coroutine runs after its call has returned. So no place can order it.
        for late in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if late(function):
                raise ArgumentError(
                    f"operation {name} is a generator or a coroutine, which runs after its call has returned and cannot be "
                    "ordered: decorate the function that launches the work"
                )
        parameters = _parameters(function)
        self._out = _argument(parameters, "out") if "out" in parameters else _keyword("out", None)
        self._says = mutates is not None or reads is not None
        self._mutates = _finds(name, parameters, "mutates", mutates)
        self._reads = _finds(name, parameters, "reads", reads)
        # `__set_name__` is not called for a function inside a property. So a first parameter ``self`` also marks a method.
        self._method = next(iter(parameters), "") == "self"
        # `dict.setdefault` is atomic, so two threads that call the operation at once have one entry.
        self._measured: dict[tuple[object, ...], Writes] = {}

    def __set_name__(self, owner: type, name: str) -> None:
        self._method = True

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Operation[P, R_co]": ...
    @overload
    def __get__(self: "Operation[Concatenate[S, Q], R_co]", instance: S, owner: Any = None) -> "Callable[Q, R_co]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the operation to an object, as a function does."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function in the order of this thread's region."""
        pool = (thread.pool or ordering_pool()) if active else None
        if pool is not None:
            # The type of `thread.pool` is a protocol, because `pool.context` may not import `PoolInternals`. Only
            # `PoolInternals` implements the protocol.
            return self._in_order(cast(PoolInternals, pool), args, kwargs)
        pool = pool_so_far()
        if pool is not None and pool.checked:
            return self.run(pool, args, kwargs, self._writes(pool.driver, args, kwargs), self.reach(pool.driver, args, kwargs))
        result = self.function(*args, **kwargs)
        if result is None and not self._says:
            self._check_says(args, kwargs)
        return result

    def _in_order(self, pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R_co:
        driver = pool.driver
        call = OperationCall(pool, self, args, kwargs)
        if "torch" in modules:
            refuse_derived(self.function, call.reached.values)
        device = pool.current_device()
        here = driver.current_stream(device).ptr
        lanes = lanes_for(pool, here) if recordings and not call.opaque else None
        if lanes is not None:
            return cast(R_co, run_as_node(lanes, pool, call, None))
        before(pool, call.reads, [*call.writes, *call.assumed_writes], call.keep, here, opaque=call.opaque)
        if thread.recording is not None and thread.recording.lanes is not None:
            thread.recording.lanes.accessed(call.reads, ())
        torch = None if thread.recording is not None else torch_of(self.function, call.reached.values)
        if torch is None:
            result = call.launch(None)
        # In a fork's body torch may have another current stream than CuPy, and the operation may launch on both. So torch's
        # stream waits for CuPy's before the call, and CuPy's waits for torch's after it.
        else:
            theirs = torch.current_stream(device)
            order(pool, device, here, theirs)
            try:
                result = call.launch(None)
            finally:
                order(pool, device, theirs, here)
        made = call.new(result)
        if made:
            before(pool, (), made, result)
        return cast(R_co, result)

    def run(self, pool: PoolInternals, args: tuple[Any, ...], kwargs: dict[str, Any], writes: Pieces, reached: Reached) -> R_co:
        """Call the function and check that it writes nothing undeclared.

        The caller has ordered the call by its `accesses` already.

        Raises
        ------
        ContractError
            Where the function was found to write an undeclared array. `operation` explains which writes are found.
        """
        if thread.recording is not None:
            thread.recording.accessed((), writes)
        watch = Watch(pool, self.function_call(args, kwargs), writes, reached)
        result = self.function(*args, **kwargs)
        if result is None and not self._says:
            # The function may have written any array that it can reach. So later calls have to wait for it.
            before(pool, (), pieces_of(pool.driver, self.function_call(args, kwargs), calls=True), (args, kwargs))
            self._check_says(args, kwargs)
        watch.ended()
        return result

    def measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Writes:
        """Return the measured writes of calls of the same form.

        The form is the number of positional arguments, the names of the keywords, and the flags.

        Raises
        ------
        ContractError
            Where such a call was found to write more than it declares.
        """
        # A flag may switch a write on. So calls with other flags are measured separately.
        flags = [value for value in (*args, *kwargs.values()) if value is None or value is True or value is False]
        form = (len(args), *kwargs, *flags)
        known = self._measured.get(form)
        if known is None:
            known = self._measured.setdefault(form, Writes(self._name, declared=True))
        if known.pending:
            known.read()
        if known.places:
            known.check()
        return known

    def accesses(
        self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any], reached: Reached | None = None
    ) -> tuple[Pieces, Pieces]:
        """Return a call's reads, and its writes to existing memory.

        Parameters
        ----------
        driver : Driver
            The driver that knows the arrays.
        args, kwargs : tuple, dict
            The call's arguments. For a method, the object is the first argument.
        reached : Reached, optional
            The result of `reach` for this call, if the caller has called `reach` already.

        Returns
        -------
        reads, writes : list of Piece or Token

        Raises
        ------
        ArgumentError
            For an entry that names a missing attribute, or whose function fails.
        """
        reached = reached or self.reach(driver, args, kwargs)
        found = pieces_or_tokens(driver, [find(args, kwargs) for find in self._reads])
        return [*reached.pieces, *found], self._writes(driver, args, kwargs)

    def _writes(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pieces:
        found = pieces_or_tokens(driver, [find(args, kwargs) for find in self._mutates])
        return found + pieces_of(driver, self._out(args, kwargs))

    def reach(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reached:
        """Return the values that a call's arguments and function lead to."""
        return Reached(driver, *self.function_call(args, kwargs))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """Return the values of the declared entries, and ``out``, for a call."""
        return [*leaves([find(args, kwargs) for find in (*self._reads, *self._mutates, self._out)], keys=True)]

    def function_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionCall:
        """Return the call, with a method bound to its object.

        From the bound method, `Reached` finds the attributes of the object.
        """
        if self._method and args:
            return MethodType(self.function, args[0]), args[1:], kwargs
        return self.function, args, kwargs

    def _check_says(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._out(args, kwargs) is None:
            raise ContractError(
                f"operation {self._name} declares nothing, returned nothing and was given no out=, so its writes are "
                'unknown. Declare the writes, for example with @handlepool.operation(mutates="x"), or pass mutates=() if the '
                "operation writes nothing"
            )

    def __reduce__(self) -> Any:
        """Pickle the operation by its name, as functions are."""
        name = str(getattr(self, "__qualname__", self._name))
        try:
            found: Any = reduce(getattr, name.split("."), modules.get(self.__module__))
        except AttributeError:
            found = None
        if found is self:
            return name
        raise ArgumentError(
            f"operation {self._name} cannot be pickled: another process finds it by its name, and {self.__module__}.{name} is "
            f"not this operation. Define the operation at the level of a module or a class, under its own name"
        )

    # Without this method, a copy would call `__reduce__`, which refuses an operation that cannot be found by its name.
    def __copy__(self) -> "Operation[P, R_co]":
        return self

    def __deepcopy__(self, memo: Any) -> "Operation[P, R_co]":
        return self

    def __repr__(self) -> str:
        return f"<Operation {self._name}>"


class OperationCall(PythonCall):
    """The reads and writes of one call of an operation.

    Attributes
    ----------
    operation : Operation
        The operation that is called.
    args, kwargs : tuple, dict
        The call's arguments. For a method, the object is the first argument.
    reached : Reached
        The values that the arguments lead to.
    """

    __slots__ = (
        "_driver",
        "_measured",
        "_pool",
        "args",
        "assumed_writes",
        "keep",
        "kwargs",
        "name",
        "opaque",
        "operation",
        "reached",
        "reads",
        "writes",
    )

    def __init__(
        self, pool: PoolInternals, operation: Operation[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        driver = pool.driver
        self._pool, self._driver = pool, driver
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.name = name_of(operation)
        self.reached = operation.reach(driver, args, kwargs)
        self.reads, self.writes = operation.accesses(driver, args, kwargs, self.reached)
        self.opaque = self.reached.opaque
        self._measured = operation.measured(args, kwargs)
        self.assumed_writes: list[Piece] = []
        if not self._measured.settled:
            self.assumed_writes += [memory for memory in self.reads if not isinstance(memory, Token)]
            unsure()
        self.keep = self.reached.values, operation.named(args, kwargs), args, kwargs

    @property
    def what(self) -> tuple[object, ...]:
        """The operation, and the arguments that are numbers or text."""
        values = (*self.args, *self.kwargs.values())
        return (self.operation, *[value for value in values if type(value) in _OPTIONS and value == value])

    def launch(self, slot: Slot | None) -> Any:
        """Call the operation, and measure its writes where due.

        The call's stream is current already.
        """
        run, pool, args, kwargs = self.operation.run, self._pool, self.args, self.kwargs
        writes, measured = [*self.writes], self._measured
        if measured.known and measured.calls >= LAST:
            return run(pool, args, kwargs, writes, self.reached)
        pointer = pool.driver.current_stream(pool.current_device()).ptr
        measurement = None
        try:
            measurement = begin(pool, pointer, measured, self.reached.arrays, writes)
            if measured.known and not measured.places:
                # `begin` marks the function as known where it found nothing to measure. Then the call has no assumed writes.
                self.assumed_writes = []
            value = run(pool, args, kwargs, writes, self.reached)
        except BaseException:
            if measurement is not None:
                measurement.drop()
            raise
        if measurement is not None:
            measurement.end(measured, self.operation.function_call(args, kwargs))
        return value

    def new(self, value: Any) -> list[Piece]:
        """Return the memory of new arrays in ``value``.

        New arrays share no memory with the arrays that the call is known to read or write.
        """
        return new_among(self._driver, value, (*self.reads, *self.writes))

    def ended(
        self, order: DataOrder, track: Track, allocated: Sequence[Any] | None, value: object
    ) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the call allocated, and other memory it wrote.

        ``value`` is the call's value. The first list is memory that the call allocated. The second list is all other memory
        that counts as written in addition to the declared writes.
        """
        made: list[Piece] = [(*self._driver.block_range(block), None) for block in allocated or ()]
        return made, [*new_among(self._driver, value, (*self.reads, *self.writes, *made)), *self.assumed_writes]

    def failed(self, order: DataOrder, track: Track, allocated: Sequence[Any]) -> tuple[list[Piece], list[Piece]]:
        """Return memory that the operation may have written before its error."""
        return [(*self._driver.block_range(block), None) for block in allocated], [*self.assumed_writes]


def operation_of(function: Any, args: tuple[Any, ...]) -> tuple[Operation[..., Any], tuple[Any, ...]] | None:
    """Return a call's operation and its arguments, or None.

    The object of a bound method is the first argument. The result is None if ``function`` is no operation.
    """
    kind = type(function)
    if kind is Operation:
        return function, args
    if kind is MethodType and type(function.__func__) is Operation:
        return function.__func__, (function.__self__, *args)
    return None


def new_among(driver: Driver, result: object, known: Sequence[Piece | Token]) -> list[Piece]:
    """Return the memory of arrays in ``result`` that share none with ``known``."""
    there = [memory for memory in known if not isinstance(memory, Token)]
    return [memory for memory in pieces_of(driver, result) if not any(share(memory, each) for each in there)]


def pieces_or_tokens(driver: Driver, value: object) -> Pieces:
    """Return the memory or the tokens that a value leads to.

    A token stands for a value that is no array, and for an array of unknown address. None and arrays without elements are left
    out. For an object, the arrays in its attributes are returned as well.
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
    """Declare a function's writes in place and its further reads.

    Use it for functions that launch CuPy kernels, torch operations or other work of the GPU. In a region or a recording, the
    memory that the function reads and writes decides its order, as for a graph function. Elsewhere the function is called
    directly. The function counts as reading all arrays in its arguments, defaults and closure, and in the attributes of objects
    among these, two attributes deep. It counts as writing the arrays in ``mutates``, its ``out``, and the new arrays that it
    returns. Its first call is measured for undeclared writes, and is ordered as if it wrote all its arguments. Further calls
    are ordered the same way until the host sees the result of the measurement.

    Without this decorator, a function that returns nothing counts as writing all its arguments. Then branches that share an
    input wait for each other.

    Parameters
    ----------
    function : callable, optional
        The decorated function or method.
    mutates : str, callable, or a tuple of these, optional
        Values that the function writes in place. An entry is a parameter's name, a parameter's attribute such as
        ``"self.state"``, or a function of the call's arguments. An array stands for its memory. Lists, tuples and dictionaries
        are walked, and None is left out. Any other object, such as a model, a plan, a generator or a file, is a token: two
        operations that mutate one token run one after the other. The arrays in the object's attributes count as written as
        well. ``()`` says that nothing is written.
    reads : str, callable, or a tuple of these, optional
        Values that the function reads in addition to the arrays above.

    Returns
    -------
    callable
        An `Operation` with the function's name, signature and types.

    Raises
    ------
    ArgumentError
        For an entry that names no parameter. At a call in a fork or a recording, for an attribute that does not exist.
    ContractError
        At a call that returns nothing and gets no ``out``, if the operation declares nothing. Also for an array that was
        written and not declared. The first, third and tenth calls are measured. If a measurement finds such a write, the error
        comes at the next call, at the join, or at `record`. The version of a torch tensor shows a write at the end of the call.
        That write is an error if a concurrent branch also uses the tensor. With ``HandlePool(check=True)`` each call compares
        its arguments before and after the call.

    Examples
    --------
    >>> scale = cupy.ElementwiseKernel("T factor", "T y", "y *= factor", "scale")                        # doctest: +SKIP
    >>> @handlepool.operation(mutates="y")                                                               # doctest: +SKIP
    ... def scaled(y, factor):
    ...     scale(factor, y)
    >>> with states.fork() as fork:                                                                      # doctest: +SKIP
    ...     y = fork.run(conv, x, w)
    ...     fork.run(scaled, y, 0.5)  # after the convolution, which writes y
    ...     left = fork.run(pool, y)  # after the scaling
    ...     right = fork.run(conv, y, v)  # beside the pooling, because both only read y
    """
    if function is None:
        return lambda decorated: Operation(decorated, mutates, reads)
    return Operation(function, mutates, reads)


# Entries


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    # Some callables, such as kernel objects, have no signature.
    except (TypeError, ValueError):
        return {}


def _finds(name: str, parameters: Mapping[str, inspect.Parameter], what: str, entries: Any) -> list[Find]:
    given = entries if isinstance(entries, (tuple, list)) else () if entries is None else (entries,)
    return [_find(name, parameters, what, entry) for entry in given]


def _find(name: str, parameters: Mapping[str, inspect.Parameter], what: str, entry: Any) -> Find:
    if isinstance(entry, str):
        first, *path = entry.split(".")
        if first not in parameters or not all(part.isidentifier() for part in path):
            known = f"its parameters are {', '.join(parameters)}" if parameters else "its parameters are unknown"
            raise ArgumentError(
                f"operation {name}: {what}={shown(entry)} is neither a parameter nor a parameter's attribute such as "
                f"'self.state', and {known}. For any other value pass a function of the call's arguments"
            )
        find = _argument(parameters, first)
        return partial(_attribute, name, what, entry, find, path) if path else find
    if callable(entry):
        return partial(_computed, name, what, entry)
    raise ArgumentError(
        f"operation {name}: {what}={shown(entry)} is no entry. Pass a parameter's name, a parameter's attribute such as "
        f"'self.state', or a function of the call's arguments"
    )


def _argument(parameters: Mapping[str, inspect.Parameter], name: str) -> Find:
    """Return a function that finds a parameter's value.

    The value is None where a call lacks the parameter. Then the decorated function itself raises the error.
    """
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
        # An optional argument may be None, and has no attributes then.
        if value is None:
            return None
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise ArgumentError(
                f"operation {name}: {what}={entry!r} is not found, because {shown(value)} has no attribute {part!r}; "
                "correct the entry, or set the attribute before the call"
            ) from error
    return value


def _computed(name: str, what: str, entry: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return entry(*args, **kwargs)
    except Exception as error:
        raise ArgumentError(
            f"operation {name}: the function in {what}= failed. It gets the arguments of the call and must accept them"
        ) from error


def follow_branches(
    pool: PoolInternals, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reached: Reached
) -> None:
    """Let the current stream wait for branches that conflict with a task."""
    driver, device = pool.driver, pool.current_device()
    books = open_order(driver, device)
    if books is None:
        return
    pointer = driver.current_stream(device).ptr
    track = books.tracks.get(pointer) or Track(pointer)
    # The reads and writes of an opaque call, and of a function that orders itself, are unknown here. So the task waits for
    # every branch.
    if reached.opaque or does_order_itself(function):
        with books:
            follow(books.events, track, books.all_calls())
        return
    declared = operation_of(function, args)
    if declared is None:
        reads: Pieces = [*reached.pieces]
        writes = reads
    else:
        operation, args = declared
        own = operation.reach(driver, args, kwargs)
        reads, writes = operation.accesses(driver, args, kwargs, own)
        if not operation.measured(args, kwargs).settled:
            writes = [*writes, *reads]
    with books:
        follow(books.events, track, books.conflicts(reads, writes))
