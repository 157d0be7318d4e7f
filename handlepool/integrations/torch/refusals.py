"""Define the refusals that leave work to torch, and warn of them."""

import sys
import warnings


class NotTaken(Exception):
    """A model, or a part of one model, is left to torch."""


class NotNow(NotTaken):
    """A single call is left to torch."""


def warn(name: str, why: object) -> None:
    """Warn that torch runs a model, and why.

    The warning names the line that called the model, and no line of this package or of torch.
    """
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("handlepool", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"handlepool leaves {name} to torch: {why}", RuntimeWarning, stacklevel=depth)
