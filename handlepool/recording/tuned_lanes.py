"""Keep the result of a tuning of lanes in the plan directory.

For the same recording, a later process takes the result from the directory and measures nothing. The result only selects a
schedule of the recording. All schedules compute the same values, so a wrong result can only cost time.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from handlepool.drivers.executable import SavedPlan
from handlepool.recording.schedule import estimated

if TYPE_CHECKING:
    from handlepool.recording.capture import Recording

ENGINE = "lanes"
"""The entry ``engine`` of a saved plan that holds a tuning's result."""


class TunedLanes(NamedTuple):
    """The result of a tuning, as the plan directory keeps it.

    Attributes
    ----------
    winner : int
        Index of the trial that won.
    trials : list of list
        For each trial, the values of its `LanesTrial`.
    rounds : int
        As in `LanesTuning`.
    seconds : float
        As in `LanesTuning`.
    times : list of float
        Microseconds of each step when the steps run one after the other. The schedules are computed from these times.
    """

    winner: int
    trials: list[list[Any]]
    rounds: int
    seconds: float
    times: list[float]


def load(recording: "Recording", key: str, counts: Sequence[int]) -> TunedLanes | None:
    """Return the kept result for a recording.

    Return None if the plan directory has no result for this key, or if the result does not fit the recording.
    """
    files = recording.pool.plan_files
    saved = None if files is None else files.load(key)
    if files is None or saved is None:
        return None
    try:
        found = TunedLanes(**json.loads(saved.data))
        if saved.engine == ENGINE and _fits(found, recording, counts):
            return found
    # The file may hold any bytes. If it cannot be read, it is rejected below, and no error is raised.
    except (ValueError, TypeError, RecursionError):
        pass
    files.reject(key)
    return None


def save(recording: "Recording", key: str, found: TunedLanes) -> None:
    """Save a result, if the pool has a plan directory."""
    if recording.pool.plan_files is not None:
        recording.pool.plan_files.save(key, SavedPlan(ENGINE, 0, 0, json.dumps(found._asdict()).encode()))


def key_of(recording: "Recording", name: str, goal: str, counts: Sequence[int]) -> str:
    """Return the key of a tuning in the plan directory.

    The key has the recording's steps with their bytes and dependencies, the engines of its plans, and the arguments of the
    tuning. If the result cannot be kept, the key is "".
    """
    schedule, lanes = recording.schedule, recording.lanes
    if recording.pool.plan_files is None or schedule is None or lanes is None:
        return ""
    moved = estimated(lanes.used)
    steps = [[step.name, step.lane is None, step.after, moved[number]] for number, step in enumerate(schedule.recorded.steps)]
    text = json.dumps([steps, schedule.recorded.lanes, recording.engines()])
    known = {"program": name, "lanes": counts, "goal": goal, "steps": sha256(text.encode()).hexdigest()}
    return f'{json.dumps(known)[:-1]}, "made for": {recording.pool.driver.plan_environment()}}}'


def _fits(found: TunedLanes, recording: "Recording", counts: Sequence[int]) -> bool:
    """Return whether a kept result fits a recording and its lane counts.

    Each value is checked, because any program may have written the file.
    """
    assert recording.schedule is not None
    if len(found.times) != len(recording.schedule.recorded.steps) or not all(map(_is_time, found.times)):
        return False
    for count, (lanes, got, edges, clock, device, skipped) in zip(counts, found.trials, strict=True):
        timed = _is_time(clock) and _is_time(device) and not skipped
        if lanes != count or type(skipped) is not str or not (timed or (skipped and clock is device is None)):
            return False
        if not all(type(number) is int and number >= 0 for number in (got, edges)):
            return False
    winner = type(found.winner) is int and 0 <= found.winner < len(counts) and not found.trials[found.winner][5]
    return winner and type(found.rounds) is int and _is_time(found.seconds)


def _is_time(value: object) -> bool:
    return type(value) is float and isfinite(value) and value >= 0
