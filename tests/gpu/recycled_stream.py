"""Run by a test in a process of its own, where the driver gives a destroyed stream's pointer to the next stream, every time.

Each stream is destroyed while its late write to scratch memory is pending. The next, at the same pointer, reads its own scratch
when that write has struck.
"""

import cupy
from conftest import Kernels

from handlepool import HandlePool

N, ROUNDS = 1 << 18, 6


def main():
    kernels = Kernels()
    results = [kernels.full(N, 0) for _ in range(ROUNDS)]
    cupy.cuda.Device().synchronize()
    pointers = []
    with HandlePool(driver="cuda") as pool:
        for number, result in enumerate(results, 1):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                memory = pool.get_workspace(4 * N).view(cupy.float32)
                kernels.write(memory, 1)
                kernels.spin(10 * number)  # longer than the former stream still has to run
                kernels.copy(memory, result)
                kernels.write(memory, 7)
            pointers.append(stream.ptr)
            del stream, memory
        cupy.cuda.Device().synchronize()
        print("pointers used again:", len(pointers) - len(set(pointers)))
        print("wrong results:", sum(int((result != 1).any()) for result in results))


if __name__ == "__main__":
    main()
