/* A libcuda.so.1 without a GPU, for tests: cuDNN loads it by name to plan for a device that is described.

   cuInit fails, or nvrtc would go on to a driver's inner tables. What takes a compiled kernel takes it, since cuDNN hands each
   one over as it builds a plan. All else is refused. */

enum { SUCCESS = 0, NO_DEVICE = 100, UNKNOWN = 999 };

static char something;

#define TAKES(name)                                                                                                            \
    int name(void **made) {                                                                                                    \
        *made = &something;                                                                                                    \
        return SUCCESS;                                                                                                        \
    }
#define SUCCEEDS(name)                                                                                                         \
    int name(void) { return SUCCESS; }
#define REFUSES(name)                                                                                                          \
    int name(void) { return UNKNOWN; }

int cuInit(unsigned flags) { return NO_DEVICE; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = "a stub of libcuda, without a GPU";
    return SUCCESS;
}

int cuKernelGetAttribute(int *value) {
    *value = 0;
    return SUCCESS;
}

TAKES(cuLibraryLoadData)
TAKES(cuLibraryLoadFromFile)
TAKES(cuLibraryGetKernel)
TAKES(cuKernelGetFunction)
TAKES(cuModuleLoadData)
TAKES(cuModuleLoadDataEx)
TAKES(cuModuleGetFunction)

SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncSetAttribute)

REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxGetLimit)
REFUSES(cuCtxPopCurrent)
REFUSES(cuCtxPushCurrent)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetCount)
REFUSES(cuGetProcAddress)
REFUSES(cuGetProcAddress_v2)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLinkAddData)
REFUSES(cuLinkComplete)
REFUSES(cuLinkCreate)
REFUSES(cuLinkDestroy)
REFUSES(cuOccupancyMaxPotentialClusterSize)
REFUSES(cuStreamGetCtx)
REFUSES(cuTensorMapEncodeIm2col)
REFUSES(cuTensorMapEncodeTiled)
