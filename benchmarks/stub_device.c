/* A CUDA device on which kernels do nothing: runtime and driver, as far as torch and Triton call them.
 *
 * Device memory is address space of this process, counted up to the device's capacity; its pages read as zeros until a
 * copy writes them. Copies within the device longer than a page or so are left out, so that no page is touched. Every
 * stream is always done. Whatever is not written here is an empty function of the same name (`build.py`). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cuda.h"
#include "cuda_runtime_api.h"

#undef cuDeviceTotalMem
#undef cuDeviceGetUuid
#undef cuModuleGetGlobal
#undef cuGetProcAddress

#define CALL __attribute__((visibility("default")))
#define BLOCK ((size_t)2 << 20)
#define SHORT_COPY ((size_t)1 << 16)
#define NEW_HANDLE(out) (*(size_t *)(out) = __sync_add_and_fetch(&handles, 16))

static const char *const NAME = "NVIDIA H100 80GB HBM3";
static size_t handles = 0x1000, used;
static __thread int current;
static __thread cudaError_t last_error;

static size_t number(const char *variable, size_t otherwise) {
  const char *value = getenv(variable);
  return value ? strtoull(value, NULL, 10) : otherwise;
}

static size_t capacity(void) { return number("STUB_GPU_BYTES", 85520809984); }

/* GPUs that CUDA_VISIBLE_DEVICES leaves. */
static int devices(void) {
  static int known = -1;
  const char *mask = getenv("CUDA_VISIBLE_DEVICES");
  int all = number("STUB_GPUS", 1), seen = 0;
  if (known >= 0 || !mask) return known = known >= 0 ? known : all;
  for (; *mask >= '0' && *mask <= '9' && atoi(mask) < all; seen++) mask += strcspn(mask, ","), mask += *mask == ',';
  return known = seen;
}

static cudaError_t failed(cudaError_t error) { return last_error = error; }

/* ---- ranges of memory: of the device, or pinned on the host ---- */

typedef struct { char *begin; size_t size, counted; int on_host; } Range;
static Range *ranges;
static size_t range_count, range_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(void *begin, size_t size, size_t counted, int on_host) {
  if (range_count == range_room) ranges = realloc(ranges, (range_room = 2 * range_room + 64) * sizeof *ranges);
  ranges[range_count++] = (Range){begin, size, counted, on_host};
}

static Range *range_of(const void *pointer) {
  for (size_t i = 0; i < range_count; i++)
    if ((char *)pointer >= ranges[i].begin && (char *)pointer < ranges[i].begin + ranges[i].size) return &ranges[i];
  return NULL;
}

static int is_on_device(const void *pointer) {
  pthread_mutex_lock(&lock);
  Range *range = range_of(pointer);
  int found = range && !range->on_host;
  pthread_mutex_unlock(&lock);
  return found;
}

static int allocate(void **out, size_t size, size_t counted, int on_host) {
  int fits;
  pthread_mutex_lock(&lock);
  if ((fits = used + counted <= capacity())) {
    char *begin = mmap(NULL, size + 2 * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if ((fits = begin != MAP_FAILED)) {
      *out = (void *)(((size_t)begin + BLOCK - 1) / BLOCK * BLOCK);
      add_range(*out, size + 1, counted, on_host);
      used += counted;
    }
  }
  pthread_mutex_unlock(&lock);
  return fits;
}

static int release(void *begin, int unmap) {
  int found = begin == NULL;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < range_count && !found; i++) {
    if (ranges[i].begin != (char *)begin) continue;
    if (unmap) munmap(begin, ranges[i].size);
    used -= ranges[i].counted;
    ranges[i] = ranges[--range_count];
    found = 1;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

CALL cudaError_t cudaMalloc(void **out, size_t size) {
  return allocate(out, size, size, 0) ? 0 : failed(cudaErrorMemoryAllocation);
}
CALL cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) { return cudaMalloc(out, size); }
CALL cudaError_t cudaFree(void *begin) { return release(begin, 1) ? 0 : failed(cudaErrorInvalidValue); }
CALL cudaError_t cudaFreeAsync(void *begin, cudaStream_t stream) { return cudaFree(begin); }
CALL cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
  return allocate(out, size, 0, 1) ? 0 : failed(cudaErrorMemoryAllocation);
}
CALL cudaError_t cudaFreeHost(void *begin) { return cudaFree(begin); }
CALL cudaError_t cudaHostRegister(void *begin, size_t size, unsigned flags) {
  pthread_mutex_lock(&lock);
  add_range(begin, size, 0, 1);
  pthread_mutex_unlock(&lock);
  return 0;
}
CALL cudaError_t cudaHostUnregister(void *begin) { return release(begin, 0) ? 0 : failed(cudaErrorInvalidValue); }
CALL cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { return *all = capacity(), *left = *all - used, 0; }
CALL cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
  memset(out, 0, sizeof *out);
  pthread_mutex_lock(&lock);
  Range *range = range_of(pointer);
  out->device = current;
  out->type = !range ? cudaMemoryTypeUnregistered : range->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->devicePointer = range ? (void *)pointer : NULL;
  out->hostPointer = range && range->on_host ? (void *)pointer : NULL;
  pthread_mutex_unlock(&lock);
  return 0;
}
CALL CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  pthread_mutex_lock(&lock);
  Range *range = range_of((void *)pointer);
  int known = range != NULL, on_host = known && range->on_host;
  pthread_mutex_unlock(&lock);
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = pointer;
  else *(int *)out = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 2 - on_host : 0;
  return 0;
}

static cudaError_t copy(void *to, const void *from, size_t size) {
  if (size <= SHORT_COPY || !is_on_device(to) || !is_on_device(from)) memmove(to, from, size);
  return 0;
}
CALL cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  return copy(to, from, size);
}
CALL cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size);
}
CALL cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
  return copy(to, from, size);
}
CALL cudaError_t cudaMemset(void *begin, int value, size_t size) {
  if (size <= SHORT_COPY) memset(begin, value, size);
  return 0;
}
CALL cudaError_t cudaMemsetAsync(void *begin, int value, size_t size, cudaStream_t stream) {
  return cudaMemset(begin, value, size);
}
CALL cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char zeros[1 << 16];
  return *out = zeros, 0;
}
CALL cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *out) {
  return *(size_t *)out = 0, 0;
}

/* Expandable segments: an address range, and handles of physical memory mapped into it. */
CALL CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags flags) {
  return *out = BLOCK, 0;
}
CALL CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags) {
  return allocate((void **)out, size, 0, 0) ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
CALL CUresult cuMemAddressFree(CUdeviceptr begin, size_t size) { return release((void *)begin, 1) ? 0 : CUDA_ERROR_INVALID_VALUE; }
CALL CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
  pthread_mutex_lock(&lock);
  int fits = used + size <= capacity();
  used += fits ? size : 0;
  pthread_mutex_unlock(&lock);
  if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t *handle = malloc(sizeof *handle);
  *handle = size;
  *out = (CUmemGenericAllocationHandle)handle;
  return 0;
}
CALL CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  pthread_mutex_lock(&lock);
  used -= *(size_t *)handle;
  pthread_mutex_unlock(&lock);
  free((void *)handle);
  return 0;
}
CALL CUresult cuMemUnmap(CUdeviceptr begin, size_t size) { return madvise((void *)begin, size, MADV_DONTNEED), 0; }

/* ---- the device ---- */

static int attribute_of(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case 13: return 1980000;  /* clock in kHz; newer headers do not name it */
    case 36: return 2619000;  /* clock of the memory */
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}
CALL cudaError_t cudaGetDeviceCount(int *out) { return *out = devices(), 0; }
CALL cudaError_t cudaGetDevice(int *out) { return *out = current, 0; }
CALL cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
  return current = device, 0;
}
CALL cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
  return *out = attribute_of(attribute), 0;
}
CALL cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, NAME);
  out->uuid.bytes[0] = out->pciBusID = 1 + device;
  out->major = 9;
  out->totalGlobalMem = capacity();
  out->warpSize = 32;
  out->multiProcessorCount = 132;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerMultiprocessor = 233472;
  out->sharedMemPerBlockOptin = 232448;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 52428800;
  out->textureAlignment = 512;
  out->unifiedAddressing = out->concurrentKernels = out->cooperativeLaunch = out->memoryPoolsSupported = 1;
  return 0;
}
CALL cudaError_t cudaDeviceCanAccessPeer(int *out, int here, int there) { return *out = 1, 0; }
CALL cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
  return snprintf(out, size, "0000:%02x:00.0", device + 1), 0;
}
CALL cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
CALL cudaError_t cudaDriverGetVersion(int *out) { return *out = CUDA_VERSION, 0; }
CALL cudaError_t cudaRuntimeGetVersion(int *out) { return *out = CUDA_VERSION, 0; }
CALL cudaError_t cudaPeekAtLastError(void) { return last_error; }
CALL cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  return last_error = 0, error;
}
CALL const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "refused by the stub" : "no error";
}
CALL const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
CALL CUresult cuDriverGetVersion(int *out) { return *out = CUDA_VERSION, 0; }
CALL CUresult cuDeviceGetCount(int *out) { return *out = devices(), 0; }
CALL CUresult cuDeviceGet(CUdevice *out, int device) { return *out = device, 0; }
CALL CUresult cuDeviceGetName(char *out, int size, CUdevice device) { return snprintf(out, size, "%s", NAME), 0; }
CALL CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device) { return *out = capacity(), 0; }
CALL CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
  return *out = attribute_of(attribute), 0;
}
CALL CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
  return memset(out, 0, sizeof *out), out->bytes[0] = 1 + device, 0;
}
CALL CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
CALL CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return *out = (CUcontext)1, 0; }
CALL CUresult cuCtxGetCurrent(CUcontext *out) { return *out = (CUcontext)1, 0; }
CALL CUresult cuCtxGetDevice(CUdevice *out) { return *out = current, 0; }
CALL CUresult cuGetErrorString(CUresult error, const char **out) { return *out = cudaGetErrorString(error), 0; }
CALL CUresult cuGetErrorName(CUresult error, const char **out) { return *out = cudaGetErrorString(error), 0; }
CALL cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *state) {
  char newer[128];
  *out = dlsym(RTLD_DEFAULT, name);
  snprintf(newer, sizeof newer, "%s_v2", name);
  if (!*out) *out = dlsym(RTLD_DEFAULT, newer);
  if (state) *state = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? 0 : failed(cudaErrorSymbolNotFound);
}

/* ---- streams, events, graphs ---- */

static int capturing;
static unsigned long long captures;

CALL cudaError_t cudaStreamCreate(cudaStream_t *out) { return NEW_HANDLE(out), 0; }
CALL cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) { return NEW_HANDLE(out), 0; }
CALL cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { return *out = 0, 0; }
CALL cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return capturing = 1, captures++, 0;
}
CALL cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) { return capturing = 0, NEW_HANDLE(out), 0; }
CALL cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  return *out = capturing && stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, 0;
}
CALL cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = captures;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
CALL cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return NEW_HANDLE(out), 0;
}
CALL cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { return *count = 1, 0; }
CALL cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  if (!capturing) function(data);
  return 0;
}
CALL cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  return function(stream, 0, data), 0;
}
CALL cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  return *out = calloc(1, sizeof(struct timespec)), 0;
}
CALL cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
CALL cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), 0; }
CALL cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event), 0;
}
CALL cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
CALL cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t begin, cudaEvent_t end) {
  struct timespec *from = (struct timespec *)begin, *to = (struct timespec *)end;
  *out = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) * 1e-6f + 1e-3f;
  return 0;
}

/* ---- kernels: their grids are checked, no more ---- */

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;

static cudaError_t launch(dim3 grid, dim3 block) {
  int runs = grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
  unsigned threads = block.x * block.y * block.z;
  return runs && threads && threads <= 1024 ? 0 : failed(cudaErrorInvalidConfiguration);
}
CALL unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  call.grid = grid, call.block = block, call.shared = shared, call.stream = stream;
  return 0;
}
CALL cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
  return 0;
}
CALL void **__cudaRegisterFatBinary(void *binary) { return malloc(sizeof(void *)); }
CALL cudaError_t __cudaGetKernel(void **out, const void *function) { return *out = (void *)function, 0; }
CALL cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
  return launch(grid, block);
}
CALL cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  return launch(grid, block);
}
CALL cudaError_t cudaLaunchCooperativeKernel(
    const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  return launch(grid, block);
}
CALL cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
  return launch(config->gridDim, config->blockDim);
}
CALL cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 90;
  out->maxDynamicSharedSizeBytes = 232448;
  return 0;
}
CALL cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int block, size_t shared) {
  return *out = 2, 0;
}
CALL cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *out, const void *function, int block, size_t shared, unsigned flags) {
  return *out = 2, 0;
}
CALL CUresult cuModuleLoadData(CUmodule *out, const void *image) { return NEW_HANDLE(out), 0; }
CALL CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *names, void **values) {
  return NEW_HANDLE(out), 0;
}
CALL CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) { return NEW_HANDLE(out), 0; }
CALL CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *size, CUmodule module, const char *name) {
  static char zeros[4096];
  return *out = (CUdeviceptr)zeros, *size = sizeof zeros, 0;
}
CALL CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction function) {
  *out = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return 0;
}
CALL CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                             unsigned shared, CUstream stream, void **args, void **extra) {
  return (CUresult)launch((dim3){x, y, z}, (dim3){bx, by, bz});
}
CALL CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **args, void **extra) {
  dim3 grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
  return (CUresult)launch(grid, (dim3){config->blockDimX, config->blockDimY, config->blockDimZ});
}
CALL CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *config) { return *out = 16, 0; }
CALL CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction function, int block, size_t shared) {
  return *out = 2, 0;
}
