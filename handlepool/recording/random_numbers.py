"""Refuse torch's random numbers in a recording, and name the place.

Torch registers a generator in the capture of a `torch.cuda.CUDAGraph`, and advances the generator's offset at each replay. Torch
offers neither step for any other graph. Random numbers in such a capture therefore raise an error, with a text for torch's
developers.
"""

from handlepool._util.causes import causes

_TEXTS = ("CUDA generator not in capture mode", "Cannot call CUDAGeneratorImpl::")
"""Parts of torch's error texts, in torch 2.8 to 2.13.

Torch raises the first text when numbers are drawn, and the second when a generator's seed or state is read or set.
"""


def refusal(error: BaseException | None, place: str) -> str | None:
    """Return an error text if torch's random numbers caused the error.

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
            f"{place or 'it'} uses a random number generator of torch's, and each replay would need new numbers. Draw them "
            f"before, and pass the tensor as an argument; a module with dropout is recorded after its eval()"
        )
    return None
