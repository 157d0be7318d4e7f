"""Leave work to torch, and say so."""

import sys
import warnings


class NotTaken(Exception):
    """A model, or a part of a model, that is left to torch. Says the reason."""


class NotNow(NotTaken):
    """A call that is left to torch, though the next call of its form may not be."""


def warn(name: str, why: object) -> None:
    """Warn that torch runs a model, and why.

    The warning names the line that called the model, and no line of this package or of torch.
    """
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("handlepool", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"handlepool leaves {name} to torch: {why}", RuntimeWarning, stacklevel=depth)
