"""Warn of undeclared functions that may write their arguments."""

import warnings
from collections.abc import Hashable

from handlepool._util.frames import frames_inside

AssumedWriter = tuple[str, Hashable]
"""The name and code of a function that may write its arguments."""

# A loop may call one function many times. Only its first call warns, because repeated warnings would hide other output.
_warned: set[Hashable] = set()


def warn_of_assumed_write(writer: AssumedWriter) -> None:
    """Warn that a branch waits for an assumed write of ``writer``.

    ``writer`` declares no writes, so it counts as writing all its arguments. Only the first wait for each function warns.
    """
    if writer not in _warned:
        _warned.add(writer)
        warnings.warn(
            f"a branch waits because {writer[0]} did not return new arrays alone, and so may have written any of its "
            "arguments. Declare the writes of this function with @handlepool.operation(mutates=...), so that only branches "
            "that use the written arrays wait",
            stacklevel=frames_inside(),
        )


def warn_of_change(writer: AssumedWriter) -> None:
    """Warn once per function of a possible write to a shared array.

    The function of ``writer`` may have written an array that another branch uses, and nothing orders the two branches.
    """
    if (writer, "changed") not in _warned:
        _warned.add((writer, "changed"))
        warnings.warn(
            f"{writer[0]} returned new arrays before, and this call did not, so this call may have written an array that a "
            "concurrent branch also uses. Declare the writes of the function with @handlepool.operation(mutates=...), or pass "
            "mutates=() if the function writes nothing",
            stacklevel=frames_inside(),
        )
