"""Smaller cases that fail in the same way, and a case as text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from harness.region_cases import (
    FULL,
    INPUTS,
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
    Step,
    Update,
    leaves,
    touched_by,
)
from harness.region_functions import FUNCTIONS


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case without all steps that it fails without."""
    drops = [step for step in leaves(case.steps) if isinstance(step, Drop)]
    for drop in drops:
        smaller = replace(case, steps=_kept(case.steps, lambda step, drop=drop: step is not drop))
        if fails(smaller):
            case = smaller
    again = True
    while again:
        again = False
        for number in [step.number for step in leaves(case.steps) if not isinstance(step, (Drop, Result))][::-1]:
            smaller = without(case, number)
            if smaller.steps != case.steps and fails(smaller):
                case, again = smaller, True
        bodies = [step for step in leaves(case.steps) if isinstance(step, Fork)]
        for inner in [step for body in bodies for step in body.steps if isinstance(step, Fork)]:
            smaller = without(case, inner.number, inside=True)
            if fails(smaller):
                case, again = smaller, True
        for call in [step for step in leaves(case.steps) if isinstance(step, Call)]:
            smaller = _of_inputs(case, call)
            if smaller.steps != case.steps and fails(smaller):
                case, again = smaller, True
    return case


def without(case: Case, number: int, *, inside: bool = False) -> Case:
    """The case without one step, and without all that needs what it made; ``inside`` leaves what was inside of it."""
    outside = _kept(case.steps, lambda step: getattr(step, "number", None) != number)
    steps = _opened(case.steps, number) if inside else outside
    there = set(range(INPUTS + 1)) | set(case.tokens) | {WEIGHTS}
    done: set[int] = set()
    return replace(case, steps=_possible(steps, there, done))


def _of_inputs(case: Case, call: Call) -> Case:
    """The case with a call that reads what is there before the first step, where it can."""
    roles = FUNCTIONS[call.function].roles
    args = [
        replace(view, base=INPUTS) if role == "r" and case.shapes[view.base] == FULL else view
        for view, role in zip_longest(call.args, roles)
    ]

    def given(steps: Sequence[Step]) -> tuple[Step, ...]:
        found: list[Step] = []
        for step in steps:
            if step is call:
                step = replace(call, args=tuple(args))
            elif isinstance(step, (Fork, Branch, Elsewhere)):
                step = replace(step, steps=given(step.steps))
            elif isinstance(step, Map):
                step = replace(step, calls=given(step.calls))
            elif isinstance(step, Result) and step.call is call:
                step = replace(step, call=replace(call, args=tuple(args)))
            found.append(step)
        return tuple(found)

    return replace(case, steps=given(case.steps))


def _kept(steps: Sequence[Step], keep: Callable[[Step], bool]) -> tuple[Step, ...]:
    found: list[Step] = []
    for step in steps:
        if not keep(step):
            continue
        if isinstance(step, (Fork, Branch, Elsewhere)):
            step = replace(step, steps=_kept(step.steps, keep))
        elif isinstance(step, Map):
            step = replace(step, calls=tuple(filter(keep, step.calls)))
        found.append(step)
    return tuple(found)


def _opened(steps: Sequence[Step], number: int) -> tuple[Step, ...]:
    found: list[Step] = []
    for step in steps:
        if isinstance(step, (Fork, Branch, Elsewhere)):
            inner = _opened(step.steps, number)
            found += inner if step.number == number else [replace(step, steps=inner)]
        else:
            found.append(step)
    return tuple(found)


def _possible(steps: Sequence[Step], there: set[int], done: set[int]) -> tuple[Step, ...]:
    """The steps of which everything is there."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, (Fork, Branch, Elsewhere)):
            inner = _possible(step.steps, there, done)
            if not inner:
                continue
            step = replace(step, steps=inner)
            if isinstance(step, Branch):
                args = tuple([view for view in step.args if view.base in there])
                step = replace(step, args=args, made=tuple([base for base in step.made if base in there]))
        elif isinstance(step, Map):
            calls = tuple([call for call in step.calls if all(base in there for base in _needs(call))])
            if not calls:
                continue
            step = replace(step, calls=calls)
            there.update(base for call in calls for base in call.made)
        elif isinstance(step, Drop):
            bases = tuple([base for base in step.bases if base in there])
            there.difference_update(bases)
            if not bases:
                continue
            step = Drop(bases)
        elif isinstance(step, Result):
            if step.call.number not in done:
                continue
            there.update(step.call.made)
        elif isinstance(step, (Replay, Update)):
            if step.record.number not in done or not all(view.base in there for view in getattr(step, "args", ())):
                continue
        elif not all(base in there for base in _needs(step)):
            continue
        elif isinstance(step, (Record, Make)):
            there.add(step.made)
        elif isinstance(step, Call) and step.way != "submit":
            there.update(step.made)
        if hasattr(step, "number"):
            done.add(step.number)
        found.append(step)
    return tuple(found)


def _needs(step: Step) -> set[int]:
    if isinstance(step, (Call, Record)):
        reads, writes = touched_by(step)
        made = {step.made} if isinstance(step, Record) else set(step.made)
        return (reads | writes) - made
    return {step.view.base} if isinstance(step, Look) else set()


def told(steps: Sequence[Step], indent: str = "") -> str:
    """The steps as text, one a line."""
    lines: list[str] = []
    for step in steps:
        views = ", ".join(map(str, getattr(step, "args", ())))
        number = getattr(step, "number", "")
        if isinstance(step, Call):
            out = f", out={step.out}" if step.out else ""
            token = f"{step.token}: " if step.token is not None else ""
            made = "".join(f"a{base}, " for base in step.made)[:-2]
            line = f"{step.way} {step.function}({token}{views}{out})" + (f" -> {made}" if made else "")
            line += " for the first time" * step.fresh + f" of the fork {step.up} further out" * (step.up > 0)
        elif isinstance(step, Fork):
            line = f"fork of {step.count}" + " raises" * step.raises
        elif isinstance(step, Branch):
            line = f"branch, {step.way} ({views}) -> {step.made}" + " silent" * step.silent + " raises" * step.raises
        elif isinstance(step, Look):
            line = f"look at {step.view}"
        elif isinstance(step, Elsewhere):
            line = "on another stream"
        elif isinstance(step, Result):
            line = f"result of {step.call.number}"
        elif isinstance(step, Record):
            line = f"record {step.function}({views}) -> a{step.made}"
        elif isinstance(step, (Replay, Update)):
            line = f"{step.way} {type(step).__name__.lower()} of {step.record.number} ({views})"
        else:
            line = str(step)
        lines.append(f"{number:>4} {indent}{line}")
        if isinstance(step, (Fork, Branch, Elsewhere)):
            lines.append(told(step.steps, indent + "    "))
        elif isinstance(step, Map):
            lines[-1] = f"{number:>4} {indent}map" + " alone" * step.alone
            lines.append(told(step.calls, indent + "    "))
    return "\n".join(lines)
