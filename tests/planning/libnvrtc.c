/* A libnvrtc.so.12 that compiles nothing, for tests: what cuDNN decides is asked for, and no kernel is launched.

   cuDNN 9.19 compiles through it; 9.28 has a compiler of its own, and takes this where CUDNN_NVRTC_RUNTIME_LINKING is 1. */

#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, SIZE = 64 };

static char something[SIZE];

#define SUCCEEDS(name)                                                                                                         \
    int name(void) { return SUCCESS; }
#define RESULT(kind)                                                                                                           \
    int nvrtcGet##kind##Size(void *program, size_t *size) {                                                                    \
        *size = SIZE;                                                                                                          \
        return SUCCESS;                                                                                                        \
    }                                                                                                                          \
    int nvrtcGet##kind(void *program, char *data) {                                                                            \
        memset(data, 0, SIZE);                                                                                                 \
        return SUCCESS;                                                                                                        \
    }

int nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 9;
    return SUCCESS;
}

int nvrtcCreateProgram(void **program) {
    *program = something;
    return SUCCESS;
}

int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
    *name = "kernel";
    return SUCCESS;
}

const char *nvrtcGetErrorString(int error) { return "a stub of nvrtc"; }

int nvrtcGetNumSupportedArchs(int *count) {
    *count = 0;
    return SUCCESS;
}

SUCCEEDS(nvrtcDestroyProgram)
SUCCEEDS(nvrtcCompileProgram)
SUCCEEDS(__nvrtcCPEx)
SUCCEEDS(nvrtcAddNameExpression)
SUCCEEDS(nvrtcGetSupportedArchs)
SUCCEEDS(nvrtcGetPCHCreateStatus)

RESULT(CUBIN)
RESULT(PTX)
RESULT(NVVM)
RESULT(LTOIR)
RESULT(OptiXIR)
RESULT(ProgramLog)
