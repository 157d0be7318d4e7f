"""Walk from an error to its causes and contexts."""

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the chain of its causes and contexts.

    If code handles an error and raises another error, Python keeps the first as cause or context of the second.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
