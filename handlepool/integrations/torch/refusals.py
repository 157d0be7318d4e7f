"""Define the refusals that leave work to torch, and warn of them."""

import sys
import warnings


class NotTaken(Exception):
    """Torch has to run a model or a part of a model."""


class NotNow(NotTaken):
    """Torch has to run one call; later calls may be recorded."""


def warn(name: str, why: object) -> None:
    """Warn that torch runs a model, with the reason.

    The warning names the line of user code that called the model.
    """
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("handlepool", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"handlepool leaves {name} to torch: {why}", RuntimeWarning, stacklevel=depth)
