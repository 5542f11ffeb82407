/* A double of the CUDA driver for tests of fusegraph/runtime/{driver,launch,device_array}.py on a machine without a GPU.
 *
 * Two devices whose memory is host memory, all streams in order and immediate.  It is strict where the real driver is:
 * calls that need a context fail without one, cuMemAlloc and cuModuleLoadData fail during a capture unless the thread
 * relaxed its capture mode, addresses freed twice fail.  A "module" is any image starting with "IMG"; its kernels are
 * the C functions below, which find their arguments through kernelParams as a GPU would.
 * `double_log()` is the text of the calls that matter, for tests to read.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
       CAPTURE_UNSUPPORTED = 900 };
#define CAPTURING_STREAM ((void *)0x77)
#define MAX_BLOCKS 4096

static char log_text[1 << 16];
static size_t log_size;
static int initialised, capturing, contexts[2];
static __thread int *stack[16];
static __thread int depth, capture_mode;
static struct { char *start; size_t size; int device; } blocks[MAX_BLOCKS];
static int block_count;

#define LOG(...) (log_size += snprintf(log_text + log_size, sizeof log_text - log_size - 1, __VA_ARGS__))
#define NEED_CONTEXT if (!initialised) return NOT_INITIALIZED; if (!depth || !stack[depth - 1]) return INVALID_CONTEXT
#define NEED_RELAXED if (capturing && capture_mode != 2) return CAPTURE_UNSUPPORTED

const char *double_log(void) { return log_text; }
void double_clear(void) { log_size = 0; log_text[0] = 0; }
void double_capture(int on) { capturing = on; }
int double_live(void) { return block_count; }
int double_depth(void) { return depth; }
static int device_now(void) { return (int)(stack[depth - 1] - contexts); }

CUresult cuInit(unsigned flags) {
  if (getenv("DOUBLE_NO_DEVICE")) return NO_DEVICE;
  initialised = 1;
  return OK;
}
CUresult cuDriverGetVersion(int *v) { *v = 13000; return OK; }
CUresult cuDeviceGetCount(int *n) { *n = 2; return initialised ? OK : NOT_INITIALIZED; }
CUresult cuDeviceGet(int *d, int i) { *d = i; return i < 2 ? OK : INVALID_DEVICE; }
CUresult cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Double %d", d); return OK; }
CUresult cuDeviceTotalMem_v2(size_t *n, int d) { *n = 1 << 30; return OK; }
CUresult cuDeviceGetAttribute(int *v, int a, int d) {
  switch (a) {
    case 75: *v = 9; break;      /* compute capability major, minor */
    case 76: *v = 0; break;
    case 16: *v = 132; break;    /* multiprocessors */
    case 38: *v = 50 << 20; break; /* L2 */
    case 97: *v = 232448; break; /* opt-in shared memory a block */
    case 81: *v = 233472; break;
    case 82: *v = 65536; break;
    case 39: *v = 2048; break;
    default: return INVALID_VALUE;
  }
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(void **c, int d) { LOG("retain %d\n", d); *c = &contexts[d]; return OK; }
CUresult cuCtxGetCurrent(void **c) { *c = depth ? stack[depth - 1] : 0; return OK; }
CUresult cuCtxSetCurrent(void *c) { if (!depth) depth = 1; stack[depth - 1] = c; LOG("set current\n"); return OK; }
CUresult cuCtxPushCurrent_v2(void *c) { stack[depth++] = c; LOG("push %d\n", device_now()); return OK; }
CUresult cuCtxPopCurrent_v2(void **c) {
  if (!depth) return INVALID_CONTEXT;
  LOG("pop %d\n", device_now());
  *c = stack[--depth];
  return OK;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) { int old = capture_mode; capture_mode = *mode; *mode = old; return OK; }

CUresult cuMemGetInfo_v2(size_t *f, size_t *t) { NEED_CONTEXT; *f = 1 << 29; *t = 1 << 30; return OK; }
CUresult cuMemAlloc_v2(void **p, size_t n) {
  NEED_CONTEXT;
  NEED_RELAXED;
  if (n > (1u << 29) || block_count == MAX_BLOCKS) return NO_MEMORY;
  if (posix_memalign(p, 256, n)) return NO_MEMORY;
  memset(*p, 0xCD, n);
  blocks[block_count].start = *p;
  blocks[block_count].size = n;
  blocks[block_count++].device = device_now();
  LOG("alloc %zu on %d\n", n, device_now());
  return OK;
}
static int find(char *p, size_t n) {
  for (int i = 0; i < block_count; i++)
    if (p >= blocks[i].start && p + n <= blocks[i].start + blocks[i].size) return i;
  return -1;
}
CUresult cuMemFree_v2(void *p) {
  NEED_CONTEXT;
  NEED_RELAXED;
  int i = find(p, 0);
  if (i < 0 || blocks[i].start != p) { LOG("bad free\n"); return INVALID_VALUE; }
  LOG("free %zu on %d\n", blocks[i].size, blocks[i].device);
  free(p);
  blocks[i] = blocks[--block_count];
  return OK;
}
CUresult cuMemcpyHtoDAsync_v2(void *d, const void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (find(d, n) < 0) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemcpyDtoHAsync_v2(void *d, void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (find(s, n) < 0) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemcpyDtoDAsync_v2(void *d, void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (find(d, n) < 0 || find(s, n) < 0) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemsetD8Async(void *d, unsigned char c, size_t n, void *stream) {
  NEED_CONTEXT;
  if (find(d, n) < 0) return INVALID_VALUE;
  memset(d, c, n);
  return OK;
}
CUresult cuPointerGetAttribute(void *out, int attribute, void *p) {
  NEED_CONTEXT;
  int i = find(p, 0);
  if (i < 0) return INVALID_VALUE;
  if (attribute == 1) *(void **)out = &contexts[blocks[i].device];
  else if (attribute == 9) *(int *)out = blocks[i].device;
  else return INVALID_VALUE;
  return OK;
}

CUresult cuStreamSynchronize(void *s) { NEED_CONTEXT; LOG("sync %p\n", s); return s == (void *)0xBAD ? ILLEGAL_ADDRESS : OK; }
CUresult cuStreamIsCapturing(void *s, int *status) { NEED_CONTEXT; *status = s == CAPTURING_STREAM; return OK; }
CUresult cuEventCreate(void **e, unsigned flags) { NEED_CONTEXT; *e = calloc(1, 8); LOG("event %u\n", flags); return OK; }
CUresult cuEventRecord(void *e, void *s) { NEED_CONTEXT; *(double *)e = log_size; LOG("record %p\n", s); return OK; }
CUresult cuEventSynchronize(void *e) { NEED_CONTEXT; return OK; }
CUresult cuEventElapsedTime_v2(float *ms, void *a, void *b) { *ms = *(double *)b - *(double *)a; return OK; }
CUresult cuEventElapsedTime(float *ms, void *a, void *b) { return cuEventElapsedTime_v2(ms, a, b); }
CUresult cuEventDestroy_v2(void *e) { NEED_CONTEXT; free(e); LOG("event gone\n"); return OK; }
CUresult cuStreamWaitEvent(void *s, void *e, unsigned flags) { NEED_CONTEXT; LOG("wait %p\n", s); return OK; }

CUresult cuGetErrorName(int code, const char **s) {
  *s = code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
     : code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
     : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
     : code == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_OTHER";
  return OK;
}
CUresult cuGetErrorString(int code, const char **s) { *s = "described by the double"; return OK; }

/* Kernels: one call a launch, `out[i] = in[i] + 1` over grid.x * block.x floats, and one that records its parameters. */
typedef void (*Kernel)(unsigned threads, void **params);
static void add_one(unsigned threads, void **params) {
  float *in = *(float **)params[0], *out = *(float **)params[1];
  for (unsigned i = 0; i < threads; i++) {
    out[i] = in[i] + 1;
    if (i == threads / 2) usleep(200); /* lets another thread in while the arguments are in use */
  }
}
static void mixed(unsigned threads, void **params) {
  unsigned char *map = params[3];
  LOG("mixed %llx %d %.3f map%d %d..%d %lld\n", *(unsigned long long *)params[0], *(int *)params[1], *(float *)params[2],
      (int)((uintptr_t)map % 128), map[0], map[127], *(long long *)params[4]);
}
static void nothing(unsigned threads, void **params) {}

CUresult cuModuleLoadData(void **m, const void *image) {
  NEED_CONTEXT;
  NEED_RELAXED;
  if (memcmp(image, "IMG", 3)) return INVALID_IMAGE;
  *m = malloc(1);
  LOG("load\n");
  return OK;
}
CUresult cuModuleUnload(void *m) { NEED_CONTEXT; NEED_RELAXED; free(m); LOG("unload\n"); return OK; }
CUresult cuModuleGetFunction(void **f, void *m, const char *name) {
  NEED_CONTEXT;
  *f = !strcmp(name, "add_one") ? (void *)add_one : !strcmp(name, "mixed") ? (void *)mixed
     : !strcmp(name, "nothing") ? (void *)nothing : 0;
  return *f ? OK : NOT_FOUND;
}
CUresult cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 0 ? 1024 : a == 1 ? 1000 : a == 3 ? 16 : a == 4 ? 32 : -1; /* threads, shared, local, registers */
  return OK;
}
CUresult cuFuncSetAttribute(void *f, int a, int v) { LOG("attribute %d = %d\n", a, v); return OK; }
CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **params, void **extra) {
  NEED_CONTEXT;
  if (extra) return INVALID_VALUE;
  if (stream == (void *)0xBAD) return INVALID_HANDLE;
  if (f != (void *)nothing && f != (void *)add_one) LOG("launch %u,%u,%u %u,%u,%u %u %p\n", gx, gy, gz, bx, by, bz, shared, stream);
  ((Kernel)f)(gx * bx, params);
  return OK;
}

CUresult cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *status) {
  char versioned[128];
  *f = 0;
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (version >= 3020) *f = dlsym(self, versioned);
  if (!*f) *f = dlsym(self, name);
  if (status) *status = *f ? 0 : 1;
  return *f ? OK : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *name, void **f, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, f, version, flags, 0);
}
