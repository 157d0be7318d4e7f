// Checksums of arrays' bits: see `handlepool/drivers/checksum.py`. Each block of threads writes
// the sum of its words, and the host adds the sums of all blocks. So the kernel needs no atomic operation, and no memory has to
// be set to zero before a launch.

typedef unsigned long long word_t;

#ifndef ENTRY  // tests on a CPU have their own
#define ENTRY extern "C" __global__
#if __CUDA_ARCH__ >= 700
#define BY_VALUE const __grid_constant__  // an index that varies costs no copy of the argument to local memory
#else
#define BY_VALUE const
#endif
#endif

struct Words {
    word_t start, size, count, rank;  // an address, bytes of a word, words in all, axes
    word_t extents[MOST_AXES], steps[MOST_AXES];  // the innermost axis first; steps in bytes
};

struct Checksums {
    word_t sums;  // the address of one word for each block
    Words of[MOST_ARRAYS];
};

static __device__ inline word_t mixed(word_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

static __device__ inline word_t word_at(word_t address, word_t size) {
    switch (size) {
        case 8: return *(const unsigned long long*)address;
        case 4: return *(const unsigned int*)address;
        case 2: return *(const unsigned short*)address;
        default: return *(const unsigned char*)address;
    }
}

ENTRY void checksum(BY_VALUE Checksums checksums) {
    __shared__ word_t sums[THREADS];
    const Words& words = checksums.of[blockIdx.y];
    word_t total = 0;
    const word_t stride = (word_t)gridDim.x * blockDim.x;
    for (word_t i = (word_t)blockIdx.x * blockDim.x + threadIdx.x; i < words.count; i += stride) {
        word_t rest = i, address = words.start;
        const int last = (int)words.rank - 1;
        for (int axis = 0; axis < last; ++axis) {
            address += rest % words.extents[axis] * words.steps[axis];
            rest /= words.extents[axis];
        }
        address += rest * words.steps[last];
        total += mixed(word_at(address, words.size) + (i + 1) * 0x9e3779b97f4a7c15);
    }
    sums[threadIdx.x] = total;
    __syncthreads();
    for (unsigned half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (!threadIdx.x) ((word_t*)checksums.sums)[(word_t)blockIdx.y * gridDim.x + blockIdx.x] = sums[0];
}
