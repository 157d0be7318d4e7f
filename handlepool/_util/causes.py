"""Walk from an error to the errors that it was raised for."""

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on.

    Python chains the original error behind the errors that other code raised for it.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
