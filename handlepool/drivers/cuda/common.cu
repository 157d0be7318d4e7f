// The beginning of every kernel's source.

#if WIDE  // some offset takes more than 32 bits
typedef long long offset_t;
typedef unsigned long long count_t;
#else
typedef int offset_t;
typedef unsigned int count_t;
#endif

#ifndef ENTRY  // tests on a CPU have their own
#define ENTRY extern "C" __global__
#if __CUDA_ARCH__ >= 700
#define BY_VALUE const __grid_constant__  // an index that varies costs no copy of the argument to local memory
#else
#define BY_VALUE const
#endif

[[maybe_unused]] static __device__ inline float half_to_float(unsigned short x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
    return result;
}

[[maybe_unused]] static __device__ inline unsigned short float_to_half(float x) {
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
    return result;
}
#endif

#define LOADED asm volatile("" ::: "memory")  // no load is put off beyond this, so that those before it are under way together
#define HELPER [[maybe_unused]] static __device__ inline

HELPER float bfloat_to_float(unsigned short x) { return __uint_as_float((unsigned)x << 16); }

HELPER unsigned short float_to_bfloat(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return (unsigned short)(bits >> 16 | 64);  // a NaN stays one
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, and to even
}

struct Pointers {
    void* at[OPERANDS];
};

#define FOR_EACH_INDEX(i, count) \
    for (count_t i = (count_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count_t)(count); i += (count_t)gridDim.x * blockDim.x)
