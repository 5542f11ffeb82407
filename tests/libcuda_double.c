/* A double of the CUDA driver for tests of fusegraph/runtime/{driver,launch,device_array}.py on a machine without a GPU.
 *
 * Two devices whose memory is host memory, all streams in order and immediate.  It is strict where the real driver is:
 * calls that need a context fail without one, memory, modules and events of a device want its own, cuMemAlloc and
 * cuModuleLoadData fail during a capture unless the thread relaxed its capture mode, addresses freed twice fail.  A
 * "module" is any image starting with "IMG"; its kernels are the C functions below, which find their arguments through
 * kernelParams as a GPU would.  An image that is a real cubin has every kernel it is asked for: each logs its pointers,
 * as many as `double_pointers` said.  `double_log()` is the text of the calls that matter, for tests to read.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
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

/* Held while the log grows, and throughout a launch, whose lines belong together: threads call at the same time. */
static pthread_mutex_t logging = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define LOG(...) \
  (pthread_mutex_lock(&logging), \
   log_size += snprintf(log_text + log_size, sizeof log_text - log_size - 1, __VA_ARGS__), \
   pthread_mutex_unlock(&logging))
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
    case 13: *v = 1980000; break; /* clock, memory clock, bus */
    case 36: *v = 2619000; break;
    case 37: *v = 5120; break;
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
/* Whether memory is of the device whose context is current. */
static int here(char *p, size_t n) {
  int i = find(p, n);
  return i >= 0 && blocks[i].device == device_now();
}
static int elsewhere(char *p) { return find(p, 0) >= 0 && !here(p, 0); }
CUresult cuMemFree_v2(void *p) {
  NEED_CONTEXT;
  NEED_RELAXED;
  int i = find(p, 0);
  if (!here(p, 0) || blocks[i].start != p) { LOG("bad free\n"); return INVALID_VALUE; }
  LOG("free %zu on %d\n", blocks[i].size, blocks[i].device);
  free(p);
  blocks[i] = blocks[--block_count];
  return OK;
}
CUresult cuMemcpyHtoDAsync_v2(void *d, const void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (!here(d, n)) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemcpyDtoHAsync_v2(void *d, void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (!here(s, n)) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemcpyDtoDAsync_v2(void *d, void *s, size_t n, void *stream) {
  NEED_CONTEXT;
  if (!here(d, n) || !here(s, n)) return INVALID_VALUE;
  memcpy(d, s, n);
  return OK;
}
CUresult cuMemsetD8Async(void *d, unsigned char c, size_t n, void *stream) {
  NEED_CONTEXT;
  if (!here(d, n)) return INVALID_VALUE;
  memset(d, c, n);
  return OK;
}
CUresult cuPointerGetAttribute(void *out, int attribute, void *p) {
  NEED_CONTEXT;
  int i = find(p, 0);
  if (i < 0) return INVALID_VALUE;
  if (attribute != 9) return INVALID_VALUE;
  *(int *)out = blocks[i].device;
  return OK;
}

CUresult cuStreamSynchronize(void *s) { NEED_CONTEXT; LOG("sync %p\n", s); return s == (void *)0xBAD ? ILLEGAL_ADDRESS : OK; }
CUresult cuStreamIsCapturing(void *s, int *status) { NEED_CONTEXT; *status = s == CAPTURING_STREAM; return OK; }
typedef struct { double time; int device; } Event;
CUresult cuEventCreate(Event **e, unsigned flags) {
  NEED_CONTEXT;
  *e = calloc(1, sizeof(Event));
  (*e)->device = device_now();
  LOG("event %u\n", flags);
  return OK;
}
CUresult cuEventRecord(Event *e, void *s) {
  NEED_CONTEXT;
  if (e->device != device_now()) return INVALID_HANDLE;
  e->time = log_size;
  LOG("record %p\n", s);
  return OK;
}
CUresult cuEventSynchronize(void *e) { NEED_CONTEXT; return OK; }
CUresult cuEventElapsedTime_v2(float *ms, Event *a, Event *b) { *ms = b->time - a->time; return OK; }
CUresult cuEventElapsedTime(float *ms, Event *a, Event *b) { return cuEventElapsedTime_v2(ms, a, b); }
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
  if (elsewhere((char *)in) || elsewhere((char *)out)) { LOG("memory of another device\n"); return; }
  for (unsigned i = 0; i < threads; i++) {
    out[i] = in[i] + 1;
    if (i == threads / 2) usleep(200); /* lets another thread in while the arguments are in use */
  }
}
static void mixed(unsigned threads, void **params) {
  unsigned char *first = params[1], *second = params[3];
  LOG("mixed %llx %llx map%d %d..%d map%d\n", *(unsigned long long *)params[0], *(unsigned long long *)params[2],
      (int)((uintptr_t)first % 64), first[0], first[127], (int)((uintptr_t)second % 64));
}
static int pointers = 2, dawdling;
void double_pointers(int n) { pointers = n; }
void double_dawdle(int us) { dawdling = us; } /* a launch lets another thread in */
static void from_cubin(unsigned threads, void **params) {
  if (dawdling) usleep(dawdling);
  LOG("kernel");
  for (int i = 0; i < pointers; i++) LOG(" %llx", *(unsigned long long *)params[i]);
  LOG("\n");
}
static void nothing(unsigned threads, void **params) {}

typedef struct { char kind; int device; } Module;
CUresult cuModuleLoadData(Module **m, const void *image) {
  NEED_CONTEXT;
  NEED_RELAXED;
  if (memcmp(image, "IMG", 3) && memcmp(image, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  *m = malloc(sizeof(Module));
  **m = (Module){*(char *)image, device_now()};
  LOG("load\n");
  return OK;
}
CUresult cuModuleUnload(Module *m) {
  NEED_CONTEXT;
  NEED_RELAXED;
  if (m->device != device_now()) return INVALID_HANDLE;
  free(m);
  LOG("unload\n");
  return OK;
}
CUresult cuModuleGetFunction(void **f, Module *m, const char *name) {
  NEED_CONTEXT;
  if (m->device != device_now()) return INVALID_HANDLE;
  *f = !strcmp(name, "add_one") ? (void *)add_one : !strcmp(name, "mixed") ? (void *)mixed
     : !strcmp(name, "nothing") ? (void *)nothing : m->kind == 0x7f ? (void *)from_cubin : 0;
  return *f ? OK : NOT_FOUND;
}
CUresult cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == 0 ? 1024 : a == 1 ? 1000 : a == 3 ? 16 : a == 4 ? 32 : -1; /* threads, shared, local, registers */
  return OK;
}
CUresult cuFuncSetAttribute(void *f, int a, int v) { LOG("attribute %d = %d\n", a, v); return OK; }
typedef struct { int id, padding; int value[16]; } Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned attribute_count;
} Config;
static CUresult launch(const Config *c, void *f, void **params, void **extra) {
  if (extra) return INVALID_VALUE;
  if (c->stream == (void *)0xBAD) return INVALID_HANDLE;
  if (f != (void *)nothing && f != (void *)add_one) {
    LOG("launch %u,%u,%u %u,%u,%u %u %p", c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
        c->shared, c->stream);
    for (unsigned i = 0; i < c->attribute_count; i++) {
      int *v = c->attributes[i].value;
      if (c->attributes[i].id == 4) LOG(" cluster %d,%d,%d", v[0], v[1], v[2]);
      else if (c->attributes[i].id == 6) LOG(" dependent %d", v[0]);
      else return INVALID_VALUE;
    }
    LOG("\n");
  }
  ((Kernel)f)(c->grid[0] * c->block[0], params);
  return OK;
}
CUresult cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
  NEED_CONTEXT;
  pthread_mutex_lock(&logging);
  CUresult result = launch(c, f, params, extra);
  pthread_mutex_unlock(&logging);
  return result;
}

/* A tensor map: the address in the first bytes, the kind of map in the last. */
static CUresult encode(unsigned char *map, int rank, uint64_t address, const uint64_t *sizes, const uint64_t *strides, int kind) {
  if ((uintptr_t)map % 64 || address % 16) return INVALID_VALUE;
  memset(map, 0, 128);
  memcpy(map, &address, 8);
  map[127] = kind;
  for (int i = 0; i < rank; i++) LOG(" %llu", (unsigned long long)sizes[i]);
  for (int i = 0; i < rank - 1; i++) LOG(" /%llu", (unsigned long long)strides[i]);
  return OK;
}
CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, uint64_t address, const uint64_t *sizes,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int fill) {
  LOG("tiled type %d swizzle %d box", type, swizzle);
  for (unsigned i = 0; i < rank; i++) LOG(" %u(%u)", box[i], steps[i]);
  CUresult result = encode(map, rank, address, sizes, strides, 7);
  LOG("\n");
  return result;
}
CUresult cuTensorMapEncodeIm2col(void *map, int type, unsigned rank, uint64_t address, const uint64_t *sizes,
                                 const uint64_t *strides, const int *lower, const int *upper, unsigned channels,
                                 unsigned pixels, const unsigned *steps, int interleave, int swizzle, int promotion,
                                 int fill) {
  LOG("im2col type %d swizzle %d box %u %u from", type, swizzle, channels, pixels);
  for (unsigned i = 0; i < rank - 2; i++) LOG(" %d..%d(%u)", lower[i], upper[i], steps[i + 1]);
  CUresult result = encode(map, rank, address, sizes, strides, 8);
  LOG("\n");
  return result;
}
CUresult cuTensorMapReplaceAddress(void *map, void *address) {
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16) return INVALID_VALUE;
  memcpy(map, &address, 8);
  LOG("replace\n");
  return OK;
}

CUresult cuStreamCreate(void **s, unsigned flags) { NEED_CONTEXT; *s = CAPTURING_STREAM; return OK; }
CUresult cuStreamDestroy_v2(void *s) { NEED_CONTEXT; return OK; }
CUresult cuStreamBeginCapture_v2(void *s, int mode) { NEED_CONTEXT; return OK; }
CUresult cuStreamEndCapture(void *s, void **g) { NEED_CONTEXT; *g = malloc(1); return OK; }
CUresult cuGraphInstantiateWithFlags(void **e, void *g, uint64_t flags) { NEED_CONTEXT; *e = malloc(1); return OK; }
CUresult cuGraphDestroy(void *g) { NEED_CONTEXT; free(g); return OK; }
CUresult cuGraphExecDestroy(void *e) { NEED_CONTEXT; free(e); LOG("graph gone\n"); return OK; }
CUresult cuGraphLaunch(void *e, void *s) {
  NEED_CONTEXT;
  if (s == (void *)0xBAD) return INVALID_HANDLE;
  LOG("graph %p on %d\n", s, device_now());
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
