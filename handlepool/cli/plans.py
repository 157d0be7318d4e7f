"""Run ``handlepool plans``.

The command shows and manages a plan directory, and builds plans for a device elsewhere.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from handlepool._util.names import shown
from handlepool.cli.terminal import Progress, complain, tell
from handlepool.errors import ArgumentError, DriverNotAvailableError, HandlePoolError
from handlepool.pool.plan_directory import VARIABLE, PlanDirectory, PlanFile, absolute

_UNITS = ("bytes", "KiB", "MiB", "GiB")


def main(options: argparse.Namespace) -> int:
    """Run ``list``, ``verify``, ``clear`` or ``build``; return the exit status."""
    try:
        named = options.directory or os.environ.get(VARIABLE)
        path = named or _usual()
        if options.action == "build":
            status = _build(options.module, options.device_properties, path)
            if not named:
                tell(f"set {VARIABLE}={path} in the environment of a program that is to use these plans")
            return status
        found = absolute(path)
        # If the default directory does not exist, no plan was built yet. This is no mistake of the caller.
        if not named and not found.exists():
            tell(f"0 plans: {path} does not exist yet")
            return 0
        # For an existing path that is no directory, `PlanDirectory` raises the right error below.
        if not (found.exists() or found.is_symlink()):
            raise ArgumentError(f"the plan directory {path} does not exist; pass the path of a directory with plans")
        actions = {"list": _list, "verify": _verify, "clear": _clear}
        return actions[options.action](PlanDirectory(path))
    except (HandlePoolError, OSError) as error:
        complain("plans", error)
        return 2


def _usual() -> str:
    """Return the plan directory that is used by default."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG base directory specification, a relative path in this variable is invalid and has to be ignored.
    return os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "handlepool", "plans")


def _list(files: PlanDirectory) -> int:
    """Print each plan, most recently used first."""
    found = list(files.files())
    for file in found:
        tell(_line(file))
    tell(f"{len(found)} plans, {_size(sum(file.nbytes for file in found))}")
    return 0


def _verify(files: PlanDirectory) -> int:
    """Print unusable files; return status 1 if there are any."""
    found = list(files.files())
    bad = [file for file in found if file.plan is None]
    for file in bad:
        tell(
            f"{file.name}: damaged, or written by another version; handlepool skips the file, and replaces it "
            "when it builds the plan again"
        )
    tell(f"{len(found) - len(bad)} of {len(found)} files are good")
    return 1 if bad else 0


def _clear(files: PlanDirectory) -> int:
    tell(f"{files.clear()} files removed")
    return 0


def _build(name: str, properties: Path, path: str) -> int:
    """Plan a module's list of calls for a described device.

    The status is 1 if a call cannot be planned, or a plan cannot be kept.
    """
    from handlepool.cli.planner import Planner
    from handlepool.graphs.compile import UNKEPT
    from handlepool.pool.default import substitute_default
    from handlepool.pool.pool import HandlePool
    from handlepool.tensors.device_properties import DeviceProperties

    try:
        device = DeviceProperties(properties.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{properties} is no file that handlepool info --device-properties wrote: {error}; write a new file with this command"
        ) from error
    # ``python -m`` puts the current folder on the search path, and so finds a module of this folder. The named module is found
    # in the same way.
    sys.path.insert(0, os.getcwd())
    if "" in name.split("."):
        raise ArgumentError(
            f"{shown(name)} is no name of a module; pass a name as in an import, such as mymodule or package.mymodule"
        )
    try:
        module = import_module(name)
    except ImportError as error:
        raise ArgumentError(f"module {name} cannot be imported: {error}") from error
    entries = getattr(module, "PLANS", None)
    if not isinstance(entries, (list, tuple)):
        raise ArgumentError(
            f"module {name} has no list PLANS; write PLANS = [(function, specs), ...] or [(function, specs, options), ...] "
            "in the module"
        )
    failed: list[str] = []
    progress = Progress("handlepool plans")
    planner, early = Planner(device), 0
    # The listed functions use the default pool and the current stream, as they do in the application.
    with HandlePool(driver=planner, plan_directory=path) as pool, substitute_default(pool), planner.create_stream():
        for number, entry in enumerate(entries, 1):
            function, specs, options = _entry(entry)
            progress(f"{number} of {len(entries)}, {getattr(function, '__name__', function)}")
            before = sum(met.refused for met in planner.met)
            try:
                function(*planner.arrays_of(specs), **planner.arrays_of(options))
            # A missing driver affects every entry, so the loop ends.
            except DriverNotAvailableError:
                raise
            except (HandlePoolError, MemoryError, TypeError) as error:
                trace = error.__traceback__
                if type(error) is TypeError and trace is not None and trace.tb_next is not None:
                    # A second traceback entry means that the error comes from inside the function. Without this entry, the call
                    # itself failed, because the function does not take these arguments.
                    raise
                why = (
                    f"its arrays do not fit into the memory of this machine: {error}" if isinstance(error, MemoryError) else error
                )
                failed.append(f"{getattr(function, '__name__', function)} cannot be planned: {why}")
                # Count a call that failed without a refused graph. Refused graphs are counted below.
                early += before == sum(met.refused for met in planner.met)
        if unwritten := pool.stats()["plan_files_unwritten"]:
            failed.append(f"{unwritten} plans could not be written to {path}: the directory is full or read-only")
    progress.clear()
    for met in planner.met:
        tell(f"{met.title}: {met.said}")
    failed += [f"{met.title} cannot be kept: {UNKEPT}" for met in planner.met if not (met.refused or met.kept)]
    for line in failed:
        tell(line)
    refused = sum(met.refused for met in planner.met)
    tell(f"{len(planner.met) - refused} plans for {device.name}, {refused + early} refused")
    return 1 if failed else 0


def _entry(entry: Any) -> tuple[Callable[..., Any], Iterable[Any], dict[str, Any]]:
    try:
        function, specs, *more = entry
        (options,) = more or ({},)
        if not callable(function):
            raise ArgumentError(f"PLANS has {function!r}, which cannot be called; each entry must begin with a function")
        return function, tuple(specs), dict(options)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"an entry of PLANS is {entry!r}; each entry must be (function, specs) or (function, specs, options)"
        ) from None


def _line(file: PlanFile) -> str:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
    if file.plan is None or file.key is None:
        return f"{used}  {_size(file.nbytes):>10}  cannot be used: {file.name}"
    try:
        known = json.loads(file.key)
        plan_environment = known["made for"]
        device = plan_environment.get("device", {}).get("deviceName", plan_environment.get("driver", ""))
        if "program" in known:
            return f"{used}  {_size(file.nbytes):>10}  {device}: lanes of {known['program']} by {known['goal']}"
        nodes = " -> ".join(node[0].lower() for node in known["nodes"])
        shapes = ", ".join("x".join(map(str, known["tensors"][place][1])) for place in known["operands"])
        version = f", cuDNN {plan_environment['cudnn']}" if "cudnn" in plan_environment else ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{used}  {_size(file.nbytes):>10}  of another version of handlepool: {file.name}"
    return f"{used}  {_size(file.nbytes):>10}  {device}{version}: {nodes} over {shapes}: {file.plan.engine}"


def _size(nbytes: float) -> str:
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"
