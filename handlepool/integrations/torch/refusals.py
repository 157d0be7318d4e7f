"""Leave work to torch, and say so."""

import warnings

from handlepool._util.frames import frames_inside


class NotTaken(Exception):
    """A model, or a part of a model, that is left to torch. Says the reason."""


def warn(name: str, why: object) -> None:
    """Warn that torch runs a model, and why."""
    warnings.warn(f"handlepool leaves {name} to torch: {why}", RuntimeWarning, stacklevel=frames_inside())
