"""Makes random calls and judges them: right, refused by a typed error, wrong, or the end of the process's context.

    PYTHONPATH=. python tests/random_calls.py --driver cuda --seed 7 --cases 10000 --workers 14
    PYTHONPATH=. python tests/random_calls.py --driver cuda --only 7000123

prints a summary as JSON. Each case comes from its seed alone, so that it can be repeated by itself.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from harness.process import leave
from harness.random_cases import DTYPES, FUNCTIONS, PAD, TOLERANCE, Case, Place, Round, make_case

import handlepool
from handlepool import ContractError, HandlePool, HandlePoolError, ParallelStateExecutor, ParallelStates, PoisonedContextError
from handlepool.tensors.layout import HOST, View

LIMIT = 120
"""Seconds for the start of a worker and for a case, after which it counts as dead."""
UNTOUCHED = 777
WORKERS = min(14, os.cpu_count() or 1)


class Caller:
    """Makes calls on a pool, which is the default one."""

    def __init__(self, pool: HandlePool) -> None:
        self._driver = pool.driver
        self._states = ParallelStates(3, pool=pool)
        self._executor = ParallelStateExecutor(2, pool=pool)
        self._stream = self._driver.create_stream()
        self.made = 0
        """Calls and replays so far."""

    def close(self) -> None:
        self._executor.shutdown()

    def judge(self, case: Case) -> tuple[str, str]:
        """The verdict, and what led to it."""
        try:
            with self._stream if case.own else nullcontext():
                for number, arrays in enumerate(case.rounds, 1):
                    verdict, why = self._round(case, arrays, number)
                    if verdict != "right":
                        return verdict, f"round {number}: {why}"
        except Exception as error:
            if isinstance(error, PoisonedContextError) or self._driver.context_lost(error):
                return "dies", _words(error)
            return "untyped", _words(error)
        return "right", ""

    def _round(self, case: Case, arrays: Round, number: int) -> tuple[str, str]:
        memory = Memory(self._driver, case, arrays, np.random.default_rng([case.seed, number]))
        try:
            complaint = self._call(case, arrays, memory)
        except ContractError as error:
            return "wrong", _words(error)
        except PoisonedContextError:
            raise
        except HandlePoolError as error:
            written = memory.changed(())  # read in any case: who lost the context says so here
            if written and case.way != "record":  # a recorded function ran once before it was captured
                return "wrong", f"{written}, and the call was refused: {_words(error)}"
            return "refused", _words(error)
        return ("wrong", complaint) if complaint else ("right", "")

    def _call(self, case: Case, arrays: Round, memory: "Memory") -> str:
        """Call in the case's way, and compare; what is wrong, or nothing."""
        operation = case.operation
        function, options = FUNCTIONS[operation.function], operation.options
        positional, named = memory.arguments(operation.names)
        args, outs = (*positional, *operation.static), memory.outs()
        keywords = {**options, **named}
        given = {} if outs is None else {"out": outs}
        if case.way in ("call", "branch", "task"):
            self.made += 1
        if case.way == "call":
            result = function(*args, **keywords, **given)
        elif case.way == "branch":
            with self._states.fork() as fork:
                result = fork.run(function, *args, **keywords, **given)
        elif case.way == "task":
            result = self._executor.submit(function, *args, **keywords, **given).result()
        elif case.way == "map":
            more = memory.more_outs()
            columns = [[arg] * len(more) for arg in args]
            over = {} if outs is None else {"out": more}
            self.made += len(more)
            results = self._states.map(partial(function, **keywords), *columns, **over)
            return next(filter(None, map(memory.complaint, results)), "")
        else:
            return self._record(case, memory, partial(handlepool.record, function, *args, **keywords, **given))
        if outs is not None and result is not outs:
            return f"returned {type(result)} and not out="
        return memory.complaint(result)

    def _record(self, case: Case, memory: "Memory", record: Callable[[], Any]) -> str:
        """Record and replay; then once more with other inputs."""
        with record() as program:
            memory.restore()
            program.replay()
            self.made += 1
            complaint = memory.complaint(program.outputs)
            if complaint or not case.update:
                return complaint
            positional, named = memory.other(case.operation.names)
            program.update(*positional, **named)
            program.replay()
            self.made += 1
            complaint = memory.complaint(program.outputs)
            return complaint and f"updated: {complaint}"


class Memory:
    """The buffers of one round, on the host as they were before the call, and on the device."""

    def __init__(self, driver: Any, case: Case, arrays: Round, rng: np.random.Generator) -> None:
        self._driver = driver
        self._case = case
        self._arrays = arrays
        self._rng = rng
        self._dtype = DTYPES[case.dtype]
        outs = [arrays.outs]
        apart = len(arrays.inputs)
        if arrays.outs and case.way == "map" and all(place.buffer >= apart for place in arrays.outs):
            # Two branches, with outputs in memory of their own.
            outs.append(tuple(replace(place, buffer=place.buffer + len(arrays.outs)) for place in arrays.outs))
        self._outs = outs
        self._places = [*arrays.inputs, *(place for group in outs for place in group)]
        ends: dict[int, int] = {}
        for place in self._places:
            ends[place.buffer] = max(ends.get(place.buffer, 0), place.span[1])
        inputs = {place.buffer for place in arrays.inputs}
        self._host = {
            buffer: np.full(end + PAD, np.nan if buffer in inputs else UNTOUCHED).astype(self._dtype)
            for buffer, end in ends.items()
        }
        for group in outs:
            for place in group:
                if place.buffer not in inputs:
                    self._view(place)[...] = np.nan
        self._fill()
        self._device = {buffer: driver.asarray(memory) for buffer, memory in self._host.items()}

    def _fill(self) -> None:
        for place in self._arrays.inputs:
            self._view(place)[...] = self._rng.uniform(-1, 1, place.shape).astype(self._dtype)

    def _view(self, place: Place, memory: np.ndarray | None = None) -> np.ndarray:
        memory = self._host[place.buffer] if memory is None else memory
        step = memory.itemsize
        return np.ndarray(place.shape, memory.dtype, memory, place.first * step, [stride * step for stride in place.strides])

    def _array(self, place: Place) -> Any:
        """The array on the device."""
        buffer = self._device[place.buffer]
        step = buffer.itemsize
        strides = tuple(stride * step for stride in place.strides)
        if self._driver.name == "host":
            address = self._driver.array_pointer(buffer) + place.first * step
            return self._driver.adopt(View(address, place.shape, strides, buffer.dtype, HOST, False, buffer))
        return type(buffer)(place.shape, buffer.dtype, buffer.data + place.first * step, strides)  # as CuPy has it

    def _split(self, arrays: list[Any], names: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
        count = len(arrays) - len(names)
        return arrays[:count], dict(zip(names, arrays[count:], strict=True))

    def arguments(self, names: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs, positional and by name."""
        made: dict[Place, Any] = {}  # one place twice is one array
        return self._split([made.setdefault(place, self._array(place)) for place in self._arrays.inputs], names)

    def outs(self) -> Any:
        """What ``out`` is to be."""
        return self._group(self._outs[0]) if self._outs[0] else None

    def more_outs(self) -> list[Any]:
        """An ``out`` for each branch of a map."""
        return [self._group(group) for group in self._outs] if self._outs[0] else [None, None]

    def _group(self, places: tuple[Place, ...]) -> Any:
        arrays = tuple(map(self._array, places))
        return arrays[0] if len(arrays) == 1 else arrays

    def restore(self) -> None:
        """Put everything back to what it was."""
        for buffer, memory in self._host.items():
            self._driver.copy(self._device[buffer], self._driver.asarray(memory))

    def other(self, names: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Other values for the inputs, in arrays that lie as they do; from now on those are what is expected."""
        self._fill()
        inputs = {place.buffer for place in self._arrays.inputs}
        fresh = {buffer: self._driver.asarray(self._host[buffer]) for buffer in inputs}
        before, self._device = self._device, self._device | fresh
        arguments = self.arguments(names)
        self._device = before
        return arguments

    def complaint(self, result: Any) -> str:
        """What is wrong with a result and with all memory; nothing where all is right."""
        values = [self._view(place).astype(np.float64) for place in self._arrays.inputs]
        expected, bound = self._case.operation.expected(values)
        shapes = self._case.operation.outputs
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(shapes):
            return f"{len(results)} results of {len(shapes)}"
        for index, (array, shape, value) in enumerate(zip(results, shapes, expected, strict=True)):
            if tuple(array.shape) != shape or array.dtype != self._dtype:
                return f"result {index} is {array.dtype} of shape {array.shape}, and not {self._dtype} of {shape}"
            off = np.abs(self._driver.asnumpy(array).astype(np.float64) - value) / bound
            tolerance = TOLERANCE[self._case.dtype]
            if not (off <= tolerance).all():
                bad = int((~(off <= tolerance)).sum())
                return f"result {index} is off by {np.nan_to_num(off, nan=np.inf).max():.2g} in {bad} of {off.size} elements"
        return self.changed([place for group in self._outs for place in group])

    def changed(self, outs: Iterable[Place]) -> str:
        """What changed outside of some outputs."""
        for buffer, memory in self._host.items():
            found = self._driver.asnumpy(self._device[buffer])
            for place in outs:
                if place.buffer == buffer:
                    self._view(place, found)[...] = self._view(place)
            differ = np.flatnonzero(found.view(np.uint8) != memory.view(np.uint8))
            if differ.size:
                first = int(differ[0]) // memory.itemsize
                return f"buffer {buffer} was changed outside of the outputs, first at element {first} of {memory.size}"
        return ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:400]


# Many calls, in processes that may die


@dataclass
class Summary:
    """What became of the calls.

    Attributes
    ----------
    refused : Counter
        By the type of the error.
    plain_refused, wrong, dies, untyped : list of str
        Each with the case. Plain cases have nothing odd about them.
    """

    cases: int = 0
    calls: int = 0
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    plain_refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    dies: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)

    def add(self, seed: int, verdict: str, why: str, made: int = 1) -> None:
        """Count a case, and the calls and replays that were made for it."""
        self.cases += 1
        self.calls += made
        if verdict == "right":
            self.right += 1
            return
        case = make_case(seed)
        if verdict != "refused":
            getattr(self, verdict).append(f"{case}\n  {why}")
            return
        self.refused[why.partition(": ")[2].partition(":")[0]] += 1
        if case.plain:
            self.plain_refused.append(f"{case}\n  {why}")

    @property
    def faults(self) -> list[str]:
        """All that must not be."""
        return [f"{name}: {case}" for name in ("wrong", "dies", "untyped") for case in getattr(self, name)]

    def counts(self) -> dict[str, Any]:
        """The numbers."""
        bad = {name: len(getattr(self, name)) for name in ("plain_refused", "wrong", "dies", "untyped")}
        return {"cases": self.cases, "calls": self.calls, "right": self.right, "refused": dict(self.refused), **bad}


def judge(caller: Caller, seed: int) -> tuple[str, str]:
    """The verdict on a seed's case."""
    return caller.judge(make_case(seed))


def seeds_of(seed: int, cases: int) -> Iterator[int]:
    """The seeds of a run."""
    return iter(range(seed * 1_000_003, seed * 1_000_003 + cases))


Judge = Callable[[Caller, int], tuple[str, str]]


def survey(seeds: Iterable[int], *, driver: str, workers: int, judge: Judge = judge, seconds: float = math.inf) -> Summary:
    """Judge cases in processes; one that ends, or loses its context, counts as one death, and another takes its place.

    After so many seconds no other case begins.
    """
    over = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    left = deque(seeds)
    summary = Summary()
    running: dict[Any, list[Any]] = {}  # by pipe: process, seed or None while it starts, deadline

    def start() -> None:
        pipe, other = context.Pipe()
        process = context.Process(target=_work, args=(other, driver, judge), daemon=True)
        process.start()
        other.close()
        running[pipe] = [process, None, time.monotonic() + LIMIT]

    def end(pipe: Any) -> Any:
        process, seed, _ = running.pop(pipe)
        process.kill()
        process.join()
        pipe.close()
        return seed

    try:
        for _ in range(min(workers, len(left))):
            start()
        while running:
            ready = wait(list(running), timeout=1)
            late = [pipe for pipe, (*_, deadline) in running.items() if pipe not in ready and time.monotonic() > deadline]
            for pipe in [*ready, *late]:
                try:
                    answer = None if pipe in late else pipe.recv()
                except (EOFError, OSError):
                    answer = None
                seed = running[pipe][1]
                if answer is None and seed is None:
                    raise RuntimeError("a worker did not start")
                if seed is not None:
                    hung = f"no answer in {LIMIT} s" if pipe in late else "the process ended"
                    summary.add(seed, *(answer or ("dies", hung)))
                if answer is None or answer[0] == "dies":
                    end(pipe)
                    if left:
                        start()
                elif left and time.monotonic() < over:
                    running[pipe][1:] = [left.popleft(), time.monotonic() + LIMIT]
                    pipe.send(running[pipe][1])
                else:
                    end(pipe)
    finally:
        for pipe in list(running):
            end(pipe)
    return summary


def _work(pipe: Any, driver: str, judge: Judge) -> None:
    """Judge seeds as they come. A context that is lost ends the process without another call."""
    os.environ["HANDLEPOOL_DRIVER"] = driver
    caller = Caller(handlepool.default_pool())
    pipe.send(("ready", ""))
    while True:
        before = caller.made
        verdict = judge(caller, pipe.recv())
        pipe.send((*verdict, caller.made - before))
        if verdict[0] == "dies":
            leave(1)


def main() -> None:
    """Make calls, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other case begins")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--only", type=int, help="one case's seed: run it in this process, and say what became of it")
    args = parser.parse_args()
    if args.only is not None:
        os.environ["HANDLEPOOL_DRIVER"] = args.driver
        print(make_case(args.only), flush=True)
        print(*judge(Caller(handlepool.default_pool()), args.only), sep=": ", flush=True)
        leave(0)  # a lost context could not be torn down
    began = time.monotonic()
    summary = survey(seeds_of(args.seed, args.cases), driver=args.driver, workers=args.workers, seconds=args.seconds)
    for fault in summary.faults:
        print(fault)
    for case in summary.plain_refused:
        print(f"plain and refused: {case}")
    print(json.dumps(summary.counts() | {"seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
