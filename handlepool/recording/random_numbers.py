"""Torch's random numbers inside a recording: refused in words that say where they were drawn.

Torch counts on a generator's offset at each replay of a `torch.cuda.CUDAGraph`, in whose capture the generator was registered.
Neither the registration nor the count is to be had for another graph. So torch raises an error of its own, for its author.
"""

_TEXTS = ("CUDA generator not in capture mode", "Cannot call CUDAGeneratorImpl::")
"""Of torch 2.8 to 2.13: where numbers are drawn, and where a generator's seed or state is asked for or set."""


def refusal(error: BaseException | None, place: str) -> str | None:
    """Say that random numbers of torch's cannot be recorded, where that is why a function raised an error; None elsewhere.

    Parameters
    ----------
    error : BaseException or None
        The function's, or one that came of it.
    place : str
        The file and the line of the caller's that it came from.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return (
                f"{place or 'it'} uses a random number generator of torch's, and each replay would need new numbers. Draw them "
                f"before, and pass the tensor as an argument; a module with dropout is recorded after its eval()"
            )
        error = error.__cause__ or error.__context__
    return None
