"""Check the statuses that calls of cuda-bindings return."""

from typing import Any

from cuda.bindings import driver as cu


class CudaDriverError(RuntimeError):
    """Report a call of the CUDA driver that failed with a status."""

    def __init__(self, status: cu.CUresult) -> None:
        super().__init__(f"CUDA driver error: {status.name}")
        self.status = int(status)


def check(result: tuple[Any, ...]) -> Any:
    """Return the first value of a call's result, or raise `CudaDriverError`."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise CudaDriverError(status)
    return values[0] if values else None


def check_all(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all values of a call's result, or raise `CudaDriverError`."""
    check(result)
    return result[1:]
