"""Compiled plans and their cache: bounded, and built once however many threads ask at the same time."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from handlepool.drivers.base import Executable
from handlepool.errors import ArgumentError, GraphNotSupportedError


@dataclass(frozen=True, slots=True)
class Layout:
    """How one array of a graph lies in memory: shape, strides in bytes, type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def reach(self) -> int:
        """Bytes from the first element's begin to the last one's end."""
        return sum((extent - 1) * step for extent, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled graph on one device, ready to launch.

    Attributes
    ----------
    name : str
        Of the function that built the graph.
    device : int
        Ordinal.
    engine : str
        cuDNN's name of the chosen engine and its knobs, or the host driver's.
    workspace_size : int
        Bytes of scratch that a launch needs.
    candidates : int
        Number of plans that cuDNN proposed for the graph.
    inputs, outputs : tuple of Layout
        What it takes and gives, in order.
    single : bool
        Whether the function gave one tensor, not a tuple of them.
    in_place : bool
        Whether an output may be an input: each element of it depends on the inputs' at the same place alone.
    """

    name: str
    device: int
    executable: Executable = field(repr=False)
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    single: bool
    in_place: bool

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.executable.engine

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch for a launch."""
        return self.executable.workspace_size

    @property
    def candidates(self) -> int:
        """Number of plans proposed."""
        return self.executable.candidates


class _Build:
    """A build under way: whoever asks for the same key waits for its outcome."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.thread = threading.get_ident()
        self.plan: Plan | None = None
        self.error: Exception | None = None


class PlanCache:
    """Plans by key, least recently used out first.

    A build runs without the cache's lock, since it calls the user's function; the threads that ask for the same key meanwhile
    wait for it and get its plan, or its error. A failed build leaves nothing behind, so a later call tries again.

    Parameters
    ----------
    limit : int
        Most plans of one device.
    """

    def __init__(self, limit: int = 512) -> None:
        if limit < 1:
            raise ArgumentError(f"a plan limit of {limit}; it must be 1 or more")
        self.limit = limit
        self.built = 0
        self._plans: dict[int, OrderedDict[Hashable, Plan]] = {}
        self._builds: dict[Hashable, _Build] = {}
        self._refusals: OrderedDict[Hashable, GraphNotSupportedError] = OrderedDict()
        self._lock = threading.Lock()  # guards the three above; hits take it too where order is changed

    def get(self, device: int, key: Hashable) -> Plan | None:
        """Return the plan of a key, now the most recently used, or None."""
        plans = self._plans.get(device)
        if plans is None:
            return None
        plan = plans.get(key)
        if plan is not None:
            try:
                plans.move_to_end(key)  # one C call, atomic under the GIL
            except KeyError:  # evicted by another thread since; the plan itself is good
                pass
        return plan

    def get_or_build(self, device: int, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """Return the plan of a key, building it when there is none and no other thread does.

        Raises
        ------
        Exception
            What the build raised, in every thread that waited for it.
        """
        while True:
            with self._lock:
                plans = self._plans.get(device)
                plan = None if plans is None else plans.get(key)
                if plan is not None:
                    return plan
                refusal = self._refusals.get((device, key))
                if refusal is not None:
                    raise GraphNotSupportedError(*refusal.args) from refusal.__cause__
                running = self._builds.get((device, key))
                if running is None:
                    running = self._builds[device, key] = _Build()
                    break
            if running.thread == threading.get_ident():
                raise ArgumentError("a graph function called itself with the same arrays while its graph is being built")
            running.done.wait()
            if running.plan is not None:
                return running.plan
            if running.error is not None:
                raise running.error
            # The builder was interrupted: that was meant for its thread alone, so another one builds.
        try:
            plan = running.plan = build()
        except Exception as error:
            running.error = error
            raise
        finally:
            self._end_build(device, key, running)
        return plan

    def _end_build(self, device: int, key: Hashable, build: _Build) -> None:
        with self._lock:
            del self._builds[device, key]
            if build.plan is not None:
                self.built += 1
                plans = self._plans.setdefault(device, OrderedDict())
                plans[key] = build.plan
                while len(plans) > self.limit:
                    plans.popitem(last=False)
            elif isinstance(build.error, GraphNotSupportedError):
                # Asked for at each call where a fallback stands behind it; cuDNN takes milliseconds to refuse.
                self._refusals[device, key] = build.error
                while len(self._refusals) > self.limit:
                    self._refusals.popitem(last=False)
        build.done.set()

    def __len__(self) -> int:
        return sum(len(plans) for plans in self._plans.values())

    def clear(self) -> None:
        """Forget every plan; those in use live on with their users."""
        with self._lock:
            self._plans.clear()
            self._refusals.clear()
