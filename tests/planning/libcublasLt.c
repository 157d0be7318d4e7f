/* A libcublasLt.so.12 that refuses everything, for tests: cuDNN ends the process where it finds none, and without a GPU the real
   one refuses as well, so that what cuDNN plans is the same. */

#include <stddef.h>

#define REFUSES(name)                                                                                                          \
    int name(void) { return 1; }

size_t cublasLtGetVersion(void) { return 120900; }

REFUSES(cublasLtCreate)
REFUSES(cublasLtDestroy)
REFUSES(cublasLtGetProperty)
REFUSES(cublasLtGroupedMatrixLayoutCreate)
REFUSES(cublasLtMatmul)
REFUSES(cublasLtMatmulAlgoGetHeuristic)
REFUSES(cublasLtMatmulDescCreate)
REFUSES(cublasLtMatmulDescDestroy)
REFUSES(cublasLtMatmulDescGetAttribute)
REFUSES(cublasLtMatmulDescSetAttribute)
REFUSES(cublasLtMatmulPreferenceCreate)
REFUSES(cublasLtMatmulPreferenceDestroy)
REFUSES(cublasLtMatmulPreferenceSetAttribute)
REFUSES(cublasLtMatrixLayoutCreate)
REFUSES(cublasLtMatrixLayoutDestroy)
REFUSES(cublasLtMatrixLayoutGetAttribute)
REFUSES(cublasLtMatrixLayoutSetAttribute)
REFUSES(cublasLtMatrixTransform)
REFUSES(cublasLtMatrixTransformDescCreate)
REFUSES(cublasLtMatrixTransformDescDestroy)
REFUSES(cublasLtMatrixTransformDescGetAttribute)
REFUSES(cublasLtMatrixTransformDescSetAttribute)
