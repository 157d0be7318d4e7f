"""Refuse torch's random numbers in a recording, and name the user's line.

At the capture of a `torch.cuda.CUDAGraph`, torch registers its random generator, and at each replay it advances the generator's
offset. Torch does neither for the graph of another library, such as this package. So torch's random functions raise an error
under a recording. The text of that error is meant for torch's developers. This module replaces it with a text for users.
"""

from handlepool._util.causes import causes

_TEXTS = ("CUDA generator not in capture mode", "Cannot call CUDAGeneratorImpl::")
"""Parts of torch's error texts, in torch 2.8 to 2.13.

Torch raises an error with the first text when numbers are drawn, and an error with the second text when a generator's seed or
state is read or set.
"""


def refusal(error: BaseException | None, place: str) -> str | None:
    """Return a text for users if torch's random numbers caused ``error``.

    Return None for any other error.

    Parameters
    ----------
    error : BaseException or None
        The function's error, or an error that the function's error caused.
    place : str
        File and line of the user's code that raised the error, or "".
    """
    # The function's error may have torch's error as its cause or context.
    if any(isinstance(each, RuntimeError) and any(text in str(each) for text in _TEXTS) for each in causes(error)):
        return (
            f"{place or 'the function'} uses a random number generator of torch's, and each replay would need new numbers. Draw "
            f"the numbers before the call and pass them as an argument, and call eval() on a module that has dropout"
        )
    return None
