"""Run by a test in a process of its own: an item of a spread over all devices writes to an illegal address on each of them."""

import sys

import cupy
import numpy as np

import handlepool

CODE = 'extern "C" __global__ void use(float *x) { if (x[0] > 5) *(volatile float *)256 = 1; }'


def main():
    kernel = cupy.RawKernel(CODE, "use")

    def function(x):
        kernel((1,), (1,), (x,))
        return x + 1

    items = [np.full(4, float(9 * (k >= 4)), np.float32) for k in range(8)]
    taken = []
    try:
        taken.extend(handlepool.spread(function, items))
    except handlepool.HandlePoolError as error:
        print("refused:", type(error).__name__, len(taken) <= 4, "cudaErrorIllegalAddress" in str(error))
    return 9


if __name__ == "__main__":
    sys.exit(main())
