"""What an error says of a capture, whoever raised it: CUDA by a number, CuPy by its words."""

import re

import pytest
from harness.hidden import hidden
from harness.scenes import Scene, works

import handlepool
from handlepool import CaptureError
from handlepool.drivers.cuda.failures import failure

CUBLAS = "calling cuBLAS API during stream capture is currently unsupported"


class CudaError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA error {status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (CudaError(900), "a wait for the GPU"),
        (CudaError(901), "an earlier call"),
        (RuntimeError("the current stream is capturing, so synchronous API calls are disallowed"), "a wait for the GPU"),
        (RuntimeError("the current stream is capturing, so H2D transfers are disallowed"), "copied from the host"),
        (NotImplementedError(CUBLAS), r"refuses while a stream is captured: use handlepool\.matmul"),
        (NotImplementedError(CUBLAS.replace("cuBLAS", "cuRAND")), "draw the numbers with cupy.random before"),
        (NotImplementedError(CUBLAS.replace("cuBLAS", "cuSOLVER")), r"is captured \(calling cuSOLVER"),
    ],
)
def test_a_refusal_is_explained(error, meaning):
    assert re.search(meaning, failure(error))
    outer = ValueError("on the way")
    outer.__cause__ = error
    assert failure(outer) == failure(error)


@pytest.mark.parametrize("error", [None, ValueError("x"), CudaError(700), NotImplementedError("int128"), RuntimeError("stream")])
def test_other_errors_are_no_refusal(error):
    assert failure(error) is None


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_product_by_cupy_names_ours_and_the_line(lanes):
    with Scene() as scene:
        scene.driver.capture_failure = failure
        calls = hidden([])

        @handlepool.operation
        def product(x):
            calls().append(x)
            if len(calls()) == 2:
                raise NotImplementedError(CUBLAS)
            return scene.plus(x, 1)

        line = product.function.__code__.co_firstlineno + 4
        with pytest.raises(CaptureError, match=rf"use handlepool\.matmul.* at \S+test_capture_failures\.py:{line}\."):
            handlepool.record(product, scene.array(1), pool=scene.pool, lanes=lanes)
        assert works(scene)
