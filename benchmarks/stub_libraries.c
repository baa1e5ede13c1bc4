/* Libraries of CUDA beside the stub device: cuBLAS, cuDNN, NCCL, NVRTC, NVML. Calls succeed and compute nothing; functions
 * that are not written here are empty (`build.py`). Messages stay on their rank. */
#include <stdlib.h>
#include <string.h>

#define CALL __attribute__((visibility("default")))

static size_t handles = 0x100000;
static int new_handle(void **out) { return *(size_t *)out = __sync_add_and_fetch(&handles, 16), 0; }

/* ---- cuBLAS: one algorithm for every matmul, which needs no workspace beside torch's own ---- */

CALL int cublasCreate_v2(void **out) { return new_handle(out); }
CALL int cublasGetMathMode(void *handle, int *out) { return *out = 0, 0; }
CALL int cublasGetPointerMode_v2(void *handle, int *out) { return *out = 0, 0; }
CALL int cublasLtCreate(void **out) { return new_handle(out); }
CALL size_t cublasLtGetVersion(void) { return 130000; }
CALL int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return new_handle(out); }
CALL int cublasLtMatrixLayoutCreate(void **out, int type, size_t rows, size_t columns, long stride) { return new_handle(out); }
CALL int cublasLtMatmulPreferenceCreate(void **out) { return new_handle(out); }
CALL int cublasLtMatmulAlgoGetHeuristic(void *handle, void *matmul, void *a, void *b, void *c, void *d, void *preference,
                                        int wanted, void *result, int *found) {
  const size_t result_bytes = 96; /* cublasLtMatmulHeuristicResult_t */
  return memset(result, 0, result_bytes), *found = 1, 0;
}

/* ---- cuDNN: one engine for every graph, without a workspace ---- */

enum { INT64 = 3, DESCRIPTOR = 15, INT32 = 23 }; /* cudnnBackendAttributeType_t */

CALL int cudnnCreate(void **out) { return new_handle(out); }
CALL size_t cudnnGetVersion(void) { return 91300; }
CALL size_t cudnnGetCudartVersion(void) { return 13000; }
CALL const char *cudnnGetErrorString(int error) { return "no error"; }
CALL int cudnnBackendCreateDescriptor(int type, void **out) { return new_handle(out); }
CALL int cudnnBackendGetAttribute(void *descriptor, int name, int type, long wanted, long *found, void *out) {
  if (found) *found = type == DESCRIPTOR || type == INT64 || type == INT32;
  if (out && wanted > 0 && type == INT64) *(long *)out = 0;
  if (out && wanted > 0 && type == INT32) *(int *)out = 0;
  return 0;
}

/* ---- NCCL ---- */

typedef struct { int rank, size; } Communicator;
typedef struct { char bytes[128]; } UniqueId;

int cudaMalloc(void **out, size_t size);
int cudaFree(void *begin);

static int communicator(void **out, int size, int rank) {
  Communicator *made = malloc(sizeof *made);
  return made->rank = rank, made->size = size, *out = made, 0;
}
CALL int ncclGetVersion(int *out) { return *out = 22809, 0; }
CALL int ncclGetUniqueId(UniqueId *out) { return memset(out, 7, sizeof *out), 0; }
CALL int ncclCommInitRank(void **out, int size, UniqueId id, int rank) { return communicator(out, size, rank); }
CALL int ncclCommInitRankConfig(void **out, int size, UniqueId id, int rank, void *config) { return communicator(out, size, rank); }
CALL int ncclCommInitRankScalable(void **out, int size, int rank, int ids, UniqueId *id, void *config) {
  return communicator(out, size, rank);
}
CALL int ncclCommSplit(Communicator *of, int color, int key, void **out, void *config) { return communicator(out, of->size, key); }
CALL int ncclCommCount(Communicator *of, int *out) { return *out = of->size, 0; }
CALL int ncclCommUserRank(Communicator *of, int *out) { return *out = of->rank, 0; }
CALL int ncclCommGetAsyncError(Communicator *of, int *out) { return *out = 0, 0; }
CALL const char *ncclGetErrorString(int error) { return "no error"; }
CALL const char *ncclGetLastError(void *of) { return ""; }
CALL int ncclMemAlloc(void **out, size_t size) { return cudaMalloc(out, size); }
CALL int ncclMemFree(void *begin) { return cudaFree(begin); }

/* ---- NVRTC: torch compiles some elementwise kernels when they are first called ---- */

CALL int nvrtcCreateProgram(void **out, const char *source, const char *name, int count, const char *const *headers,
                            const char *const *names) { return new_handle(out); }
CALL int nvrtcGetPTXSize(void *program, size_t *out) { return *out = 16, 0; }
CALL int nvrtcGetCUBINSize(void *program, size_t *out) { return *out = 16, 0; }
CALL int nvrtcGetProgramLogSize(void *program, size_t *out) { return *out = 1, 0; }
CALL int nvrtcGetLoweredName(void *program, const char *name, const char **out) { return *out = "kernel", 0; }
CALL int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
CALL const char *nvrtcGetErrorString(int error) { return "no error"; }

/* ---- NVML, as far as torch asks it for devices ---- */

CALL int nvmlDeviceGetCount_v2(int *out) {
  const char *count = getenv("STUB_GPUS");
  return *out = count ? atoi(count) : 1, 0;
}
CALL int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return new_handle(out); }
CALL int nvmlDeviceGetUUID(void *device, char *out, unsigned size) { return *out = 0, 0; }
