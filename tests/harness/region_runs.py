"""How a case of `region_cases` is run: one step after the other, in NumPy or on one stream, or as regions."""

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness.region_cases import (
    INPUTS,
    SMALL,
    WEIGHTS,
    Branch,
    Call,
    Case,
    Drop,
    Elsewhere,
    Fork,
    Look,
    Make,
    Map,
    Record,
    Replay,
    Result,
    Shape,
    Sizes,
    Step,
    Update,
    View,
    slices,
)
from harness.region_functions import FORKED, FUNCTIONS, RECORDED, TOKENS, BranchError, Function, fresh, weights

import handlepool
from handlepool import HandlePool, ParallelStateExecutor, ParallelStates
from handlepool.pool.context import thread as this_thread

Values = dict[tuple[str, int], Any]
"""What a run gives: what arrays have in the end, the arrays of tokens, and what the host has read in between."""
Make_ = Callable[[int, int, Shape], Any]
TIMEOUT = 60
_names = itertools.count()


def values_of(seed: int, number: int, shape: Shape) -> np.ndarray:
    """What an array has in the beginning."""
    if number == WEIGHTS:
        return weights()
    return np.random.default_rng([seed, number]).integers(-8, 9, shape).astype(np.float32)


class Sequential:
    """Runs the steps one after the other: with NumPy, or with what a region would be given.

    Parameters
    ----------
    make : callable
        Makes an array of where it runs: ``make(seed, number, shape)``, where `values_of` says what is in it.
    copy : callable
        Copies one, to be looked at afterwards.
    numpy : bool
        Whether NumPy's functions are called.
    sizes : Sizes
    """

    def __init__(
        self, make: Make_ = values_of, copy: Callable[[Any], Any] = np.array, *, numpy: bool = True, sizes: Sizes = SMALL
    ) -> None:
        self.make_array, self.copy, self.numpy, self.sizes = make, copy, numpy, sizes
        self.arrays: dict[int, Any] = {}
        self.tokens: dict[int, Any] = {}
        self.programs: dict[int, tuple[Any, ...]] = {}
        self.values: Values = {}

    def run(self, case: Case) -> Values:
        """Run a case to its end, and return its values."""
        self.case = case
        self.begin()
        self.steps(case.steps)
        for base, array in self.arrays.items():
            self.values["array", base] = self.read(array, base)
        for number, token in self.tokens.items():
            self.values["token", number] = self.read(token.hidden, number)
        return self.values

    def begin(self) -> None:
        """Make what is there before the first step."""
        for base in range(INPUTS + 1):
            self.arrays[base] = self.initial(base)
        for number, kind in self.case.tokens.items():
            self.tokens[number] = TOKENS[kind](self.initial(number))

    def initial(self, number: int) -> Any:
        return self.make_array(self.case.seed, number, self.sizes.shape(self.case.shapes[number]))

    def read(self, array: Any, number: int) -> Any:
        return self.copy(array)

    # Steps

    def steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            getattr(self, type(step).__name__.lower())(step)

    def view(self, view: View) -> Any:
        array = self.arrays[view.base]
        if view.index:
            array = array[slices(self.sizes.index(view.index))]
        return array if view.spread is None else np.broadcast_to(array, self.sizes.shape(view.spread))

    def bound(self, call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A function with its arguments."""
        function = FUNCTIONS[call.function]
        args = tuple([self.view(view) for view in call.args])
        if call.token is not None:
            args = (self.tokens[call.token], *args)
        kwargs = {} if call.out is None else {"out": self.view(call.out)}
        return (function.numpy if self.numpy else function.given), args, kwargs

    def call(self, call: Call) -> None:
        function, args, kwargs = self.bound(call)
        with self.failing(call):
            if self.numpy:
                out = kwargs.pop("out", None)
                result = function(*args)
                if out is not None:
                    out[...] = result
            else:
                result = function(*args, **kwargs)
                if FUNCTIONS[call.function].bound:
                    result = result()
            self.made(call, result)

    def failing(self, call: Call) -> Any:
        return contextlib.suppress(BranchError) if FUNCTIONS[call.function].raises else contextlib.nullcontext()

    def made(self, call: Call, result: Any) -> None:
        if len(call.made) == 1:
            self.arrays[call.made[0]] = result
        elif call.made:
            self.arrays |= zip(call.made, result, strict=True)

    def map(self, step: Map) -> None:
        for call in step.calls:
            self.call(call)

    def fork(self, step: Fork) -> None:
        self.steps(step.steps)

    def branch(self, step: Branch) -> None:
        self.steps(step.steps)

    def elsewhere(self, step: Elsewhere) -> None:
        self.steps(step.steps)

    def result(self, step: Result) -> None:
        pass

    def record(self, step: Record) -> None:
        _, function, in_numpy = RECORDED[step.function]
        args = [self.view(view) for view in step.args]
        if not self.numpy:
            in_numpy = function if step.function not in FORKED else partial(function, _Here())
        in_numpy(*args)
        self.arrays[step.made] = out = in_numpy(*args)
        self.programs[step.number] = (in_numpy, args, out)

    def replay(self, step: Replay) -> None:
        function, args, out = self.programs[step.record.number]
        out[...] = function(*args)

    def update(self, step: Update) -> None:
        _, args, _ = self.programs[step.record.number]
        sources = [self.view(view) + 0 for view in step.args]
        for target, source in zip(args, sources, strict=True):
            target[...] = source

    def drop(self, step: Drop) -> None:
        for base in step.bases:
            del self.arrays[base]

    def look(self, step: Look) -> None:
        self.values["look", step.number] = self.copy(self.view(step.view))

    def make(self, step: Make) -> None:
        self.arrays[step.made] = self.initial(step.made)


class Regional(Sequential):
    """Runs the steps as they say: in forks, branches, tasks.

    Parameters
    ----------
    pool : HandlePool
        The default one meanwhile.
    note : callable
        ``with note(step):`` surrounds what a step gives to streams.
    ordered : bool
        Whether the forks order by data.
    freely : callable
        ``with freely():`` surrounds a recording, which needs a side slot.
    streams : list of stream, optional
        Where the body's other streams are, for the next run as well.
    joined : bool
        Whether each branch is joined at once, so that no order by data is needed: tasks and their results stay as they are.
    """

    def __init__(
        self,
        pool: HandlePool,
        make: Make_,
        copy: Callable[[Any], Any],
        *,
        note: Callable[[Step], Any] = contextlib.nullcontext,
        freely: Callable[[], Any] = contextlib.nullcontext,
        ordered: bool = True,
        streams: list[Any] | None = None,
        joined: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(make, copy, numpy=False, **options)
        self.pool = pool
        self.note = note
        self.freely = freely
        self.ordered = ordered
        self.joined = joined
        self.states = ParallelStates(4, pool=pool)
        self.forks: list[Any] = []  # that are open, of the branch that runs
        self.executor: ParallelStateExecutor | None = None
        self.futures: dict[int, Any] = {}
        self.streams: list[Any] = [] if streams is None else streams
        self.used = 0

    def run(self, case: Case) -> Values:
        try:
            return super().run(case)
        finally:
            if self.executor is not None:
                self.executor.shutdown()
            self.futures.clear()
            for program in self.programs.values():
                program[0].close()

    def read(self, array: Any, number: int) -> Any:
        with self.note(Look(number, View(number))):
            return self.copy(array)

    # Calls

    def call(self, call: Call) -> None:
        function = FUNCTIONS[call.function]
        if call.way == "submit":
            self.submit(call)
            return
        given, args, kwargs = self.bound(call)
        with self.failing(call):
            if call.way == "state":
                with self.note(call):
                    result = ParallelStates(4, pool=self.pool).with_state(call.index % 4, _stated(function), *args, **kwargs)
            else:
                target, args, kwargs = self.target(call, given, args, kwargs)
                if call.way == "wait" and not self.joined:
                    self.waited(call)
                with self.note(call):
                    run = partial(self.branch_of, call.up, target) if call.way == "run" else target
                    result = run(*args, **kwargs)
            self.made(call, result)

    def waited(self, step: Call | Look) -> None:
        views = step.args if isinstance(step, Call) else (step.view,)
        arrays = [self.view(view) for view in views]
        if isinstance(step, Call) and step.token is not None:
            arrays.append(self.tokens[step.token].hidden)
        with self.note(step):
            given = self.opened(step.up if isinstance(step, Call) else 0).wait(*arrays)
        assert given is arrays[0] if len(arrays) == 1 else all(a is b for a, b in zip(given, arrays, strict=True))

    def target(
        self, call: Call, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What a fork or an executor is given."""
        if FUNCTIONS[call.function].bound:
            given, args = given(*args), ()
        return (fresh(given, f"never_met_{next(_names)}") if call.fresh else given), args, kwargs

    def opened(self, up: int = 0) -> Any:
        """The fork that is open here, the innermost or one further out."""
        return self.forks[max(0, len(self.forks) - 1 - up)]

    def branch_of(self, up: int, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.joined:
            with self.states.fork() as fork:
                return fork.run(function, *args, **kwargs)
        return self.opened(up).run(function, *args, **kwargs)

    def map(self, step: Map) -> None:
        calls = [self.bound(call) for call in step.calls]
        given = calls[0][0]
        columns = [list(column) for column in zip(*(args for _, args, _ in calls), strict=True)]
        out = {"out": [kwargs["out"] for *_, kwargs in calls]} if calls[0][2] else {}
        if self.joined:
            results = []
            for call, (_, args, kwargs) in zip(step.calls, calls, strict=True):
                with self.note(call):
                    results.append(self.branch_of(0, given, *args, **kwargs))
        else:
            with self.note(step):
                fork = ParallelStates(4, pool=self.pool) if step.alone else self.opened()
                results = fork.map(given, *columns, **out)
        for call, result in zip(step.calls, results, strict=True):
            self.made(call, result)

    def submit(self, call: Call) -> None:
        target, args, kwargs = self.target(call, *self.bound(call))
        with self.note(call):
            future = self.tasks().submit(target, *args, **kwargs)
            assert not concurrent.futures.wait([future], TIMEOUT).not_done
        self.futures[call.number] = future

    def tasks(self) -> ParallelStateExecutor:
        if self.executor is None:
            self.executor = ParallelStateExecutor(2, pool=self.pool)
        return self.executor

    def result(self, step: Result) -> None:
        future = self.futures.pop(step.call.number)
        with self.failing(step.call), self.note(step):
            self.made(step.call, future.result(TIMEOUT))

    # Forks

    def fork(self, step: Fork) -> None:
        if self.joined:
            self.steps(step.steps)
            return
        options = {} if self.ordered else {"ordered": False}
        outer = list(self.forks)
        with contextlib.suppress(*[BranchError] * step.raises), self.note(step):
            try:
                with ParallelStates(step.count, pool=self.pool).fork(**options) as fork:
                    self.forks.append(fork)
                    self.steps(step.steps)
                    if step.raises:
                        raise BranchError
            finally:
                self.forks = outer

    def branch(self, step: Branch) -> None:
        # Each has code of its own, by which a function is known again.
        def returning(*args: Any) -> Any:
            self.inside(step)
            return tuple([self.arrays[base] for base in step.made])

        def silent(*args: Any) -> None:
            self.inside(step)

        def raising(*args: Any) -> None:
            self.inside(step)
            raise BranchError

        def returning_in_state(state: Any, *args: Any) -> Any:
            return returning()

        def silent_in_state(state: Any, *args: Any) -> None:
            self.inside(step)

        def raising_in_state(state: Any, *args: Any) -> None:
            self.inside(step)
            raise BranchError

        in_state, alone = (
            (raising_in_state, raising)
            if step.raises
            else (silent_in_state, silent)
            if step.silent
            else (returning_in_state, returning)
        )
        args = [self.view(view) for view in step.args]
        with contextlib.suppress(*[BranchError] * step.raises), self.note(step):
            if step.way == "state":
                ParallelStates(4, pool=self.pool).with_state(step.index % 4, in_state, *args)
            else:
                self.branch_of(0, *((alone, *args) if step.index % 3 else (partial(alone, *args),)))

    def inside(self, step: Branch) -> None:
        outer, self.forks = self.forks, []
        try:
            self.steps(step.steps)
        finally:
            self.forks = outer

    def elsewhere(self, step: Elsewhere) -> None:
        driver = self.pool.driver
        here = driver.current_stream()
        if self.used == len(self.streams):
            self.streams.append(driver.create_stream())  # to the end: the address of one that is gone would be another's
        other = self.streams[self.used]
        self.used += 1
        before, after = driver.create_event(), driver.create_event()
        with self.note(step):
            driver.record_event(before, here.ptr)
            driver.wait_event(other.ptr, before)
        with other:
            self.steps(step.steps)
        with self.note(step):
            driver.record_event(after, other.ptr)
            driver.wait_event(here.ptr, after)
        driver.destroy_event(before)
        driver.destroy_event(after)

    # The rest

    def record(self, step: Record) -> None:
        _, function, _ = RECORDED[step.function]
        args = [self.view(view) for view in step.args]
        if step.function in FORKED:
            args.insert(0, self.states)
        with self.note(step):
            with self.freely():
                program = handlepool.record(function, *args, pool=self.pool)
            program.replay()
        self.programs[step.number] = (program,)
        self.arrays[step.made] = program.outputs

    def replay(self, step: Replay) -> None:
        (program,) = self.programs[step.record.number]
        self.use(step, program.replay)

    def update(self, step: Update) -> None:
        (program,) = self.programs[step.record.number]
        self.use(step, program.update, *[self.view(view) for view in step.args])

    def use(self, step: Replay | Update, method: Any, *args: Any) -> None:
        """Use a program: in the body, in a branch, or in a task whose result is asked for at once."""
        with self.note(step):
            if step.way == "run":
                self.branch_of(0, method, *args)
            elif step.way == "submit":
                program = method.__self__
                # A program belongs to a thread: to the worker until its result is there, and then to this thread again.
                program.hand_over()
                self.tasks().submit(method, *args).result(TIMEOUT)
                program._user = this_thread.token
            else:
                method(*args)

    def look(self, step: Look) -> None:
        if self.forks and not self.joined:
            self.waited(step)
        with self.note(step):
            super().look(step)


class _Here:
    """Stands for states, and for a fork, where all runs in order."""

    def fork(self) -> "_Here":
        return self

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)


_with_states: dict[str, Any] = {}


def _stated(function: Function) -> Any:
    """A function behind a state, with code of its own."""

    def with_a_state(state: Any, *args: Any, **kwargs: Any) -> Any:
        found = function.given(*args, **kwargs)
        return found() if function.bound else found

    if function.name not in _with_states:
        _with_states[function.name] = fresh(with_a_state, f"{function.name}_with_a_state")
    return _with_states[function.name]
