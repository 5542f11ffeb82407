// What the runtime (runtime.cpp, built once) and the kernels (built by the hundred) know of each other.
// Kernels reach the runtime only through the function table, so that a kernel's library has no undefined symbols.
#pragma once

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

namespace fusegraph_cpu {

struct Block;
struct Runtime;

// Where in the kernel's source a thread is, and in which CUDA function: for messages.
struct Where {
    const char* what;
    const char* file;
    int line;
};

// One CUDA thread.  The fields after `products` belong to the scheduler.
struct Thread {
    uint3 thread_index;
    unsigned int linear;      // x fastest, as CUDA numbers threads
    unsigned int lane, warp;
    unsigned int warp_lanes;  // the lanes that exist in this warp: all 32 but in the last warp of an odd-sized block
    Block* block;
    void* operand;            // what this thread brought to the meeting of its warp or warpgroup that it waits in
    void* copies;             // what async_copy_on_cpu.h and wgmma_on_cpu.h remember of this thread; null at first
    void* products;

    int state;
    unsigned int detail[2];   // mask of the warp meeting, or id and count of the barrier
    Where where;
    bool (*ready)(void*);
    void* ready_context;
};

// One block, as the kernel sees it.
struct Block {
    uint3 block_index;
    dim3 block_dim, grid_dim;
    unsigned int thread_count;
    unsigned int dynamic_shared_bytes;
    unsigned char* dynamic_shared;
    Thread* threads;
    const Runtime* runtime;
    unsigned int cluster_rank;  // x fastest
    bool reverse;               // blocks and threads run in descending order
};

// A tensor as TMA knows it: what a kernel's TensorMap parameter holds.  fusegraph/runtime/tensor_map.py
// packs it, field by field in this order, into 128 bytes.
struct TensorMapFields {
    unsigned long long magic;       // kTensorMapMagic
    unsigned long long address;
    unsigned long long strides[4];  // bytes, of all dimensions but the innermost
    unsigned int last[5];           // size - 1 of each dimension, innermost first
    unsigned short box[5];          // elements one copy brings; im2col: channels, pixels
    short lower[3], upper[3];       // im2col: corners, upper relative to the last element
    unsigned char steps[5];
    unsigned char rank, element_bytes, swizzle;  // bytes
    unsigned char im2col;                        // 0 or 1
    char kind;                                   // what an addition adds: f(loat), h(alf), b(float16), i(nt), 0: none;
                                                 // t(f32): floats that loads round to it
};
constexpr unsigned long long kTensorMapMagic = 0x70616d726f736e74;  // "tnsormap", little-endian

enum CopyKind { kLoad, kLoadIm2col, kStore, kStoreAdd, kBulkLoad, kBulkStore };

// One copy by TMA.
struct Copy {
    CopyKind kind;
    void* shared;
    const void* map;            // a TensorMap; null for bulk copies
    void* global;               // bulk copies
    unsigned int bytes;         // bulk copies
    void* barrier;              // loads
    int rank;                   // number of coordinates
    int coordinates[5];
    unsigned short offsets[3];  // im2col
    bool multicast;
    unsigned short mask;        // multicast: destination blocks
};

// Runs once, in the last thread to arrive, when all lanes of `mask` have arrived; may read and write every operand.
using Complete = void (*)(Thread* first_lane, unsigned int mask);

struct Runtime {
    // Waits until `count` threads have arrived at barrier `id`.
    void (*barrier_sync)(Thread*, unsigned id, unsigned count, const Where&);
    // Counts as an arrival and does not wait.
    void (*barrier_arrive)(Thread*, unsigned id, unsigned count, const Where&);
    // Waits until all lanes of `mask` have arrived with this mask and this `complete` (nullptr: only wait).
    void (*meet)(Thread*, unsigned mask, void* operand, Complete complete, const Where&);
    // Waits until all 128 threads of the warpgroup have arrived with this `complete`; `mask` is then of no meaning.
    void (*meet_warpgroup)(Thread*, void* operand, Complete complete, const Where&);
    // A warpgroup, of which this is the first thread, has so many registers a thread from here on.
    void (*set_registers)(Thread*, unsigned count, const Where&);
    // Memory, all zero, until the block ends.
    void* (*block_memory)(Thread*, unsigned long long bytes);
    // Whether all these bytes are the block's own shared memory.
    bool (*is_shared)(Thread*, const void*, unsigned bytes);
    // Waits until ready(context); the other threads of the block run meanwhile.
    void (*wait_until)(Thread*, bool (*ready)(void*), void* context, const Where&);
    // Barriers in shared memory.  `expected` bytes are announced by the arrival.
    void (*mbarrier_init)(Thread*, void* barrier, int arrivals, const Where&);
    void (*mbarrier_fence_init)(Thread*);
    void (*mbarrier_arrive)(Thread*, void* barrier, unsigned expected, const Where&);
    void (*mbarrier_arrive_cluster)(Thread*, void* barrier, int cta, const Where&);
    void (*mbarrier_wait)(Thread*, void* barrier, unsigned parity, const Where&);
    // TMA.  copy_wait waits until all but `pending` groups of the thread have read their shared memory and,
    // if `written`, are in global memory.
    void (*copy)(Thread*, const Copy&, const Where&);
    void (*copy_commit)(Thread*);
    void (*copy_wait)(Thread*, unsigned pending, bool written, const Where&);
    void (*fence_async)(Thread*);
    // What reads shared memory as TMA does (wgmma): fails if ordinary stores to these bytes were not fenced.
    void (*async_read)(Thread*, const void* shared, unsigned bytes, const Where&);
    // Clusters.
    void (*cluster_arrive)(Thread*, const Where&);
    void (*cluster_wait)(Thread*, const Where&);
    void* (*cluster_map)(Thread*, const void* shared, int cta, const Where&);
    // Ends the launch with a printf-like message, prefixed with kernel, block and thread.  Never returns.
    void (*fail)(Thread*, const char* format, ...);
    // Whether the launch has been ended, by a block on another host thread: what that would have done does not come.
    bool (*stopped)(Thread*);
};

// One kernel of a module.  `run` runs one thread (a fiber), `run_block` all threads of a block in a plain loop; a
// kernel has the one that it needs.
struct Kernel {
    const char* name;
    void (*run)(void** args);
    void (*run_block)(void** args, bool reverse);
    unsigned int parameter_count;
    const unsigned int* parameter_sizes;  // bytes
};

// What a module exports, as `fusegraph_cpu_module`.  slot() is the calling host thread's "current thread" pointer.
struct Module {
    const Kernel* kernels;
    unsigned int kernel_count;
    Thread** (*slot)();
};

// What a long launch needs of the Python interpreter to let it handle signals: functions of its C interface.
struct Interpreter {
    int (*ensure)();                        // PyGILState_Ensure
    void (*release)(int);                   // PyGILState_Release
    int (*check_signals)();                 // PyErr_CheckSignals
    void (*fetch)(void**, void**, void**);  // PyErr_Fetch
};

// In which order threads go on where several can: ascending, descending, or ascending but for the last warp of every
// four, which goes on when nothing else can and all copies are done: what may happen to any warp of a warpgroup.
enum Order { kForward, kReverse, kLate };

// One launch, filled in by the caller.
struct Request {
    const Kernel* kernel;
    Thread** (*slot)();
    void** args;                // args[i] points at the value of parameter i, as for cuLaunchKernel
    unsigned int grid[3], block[3], cluster[3];
    unsigned int dynamic_shared_bytes;
    unsigned int host_threads;  // most host threads to use
    int order;                  // an Order
    int poison;                 // byte to fill shared memory with before each block; -1: leave it
    const Interpreter* python;  // asked now and then, between blocks, by the calling host thread; may be null
};

enum Status { kDone = 0, kFailed = 1, kInterrupted = 2 };

struct Report {
    int has_address;
    unsigned long long address;  // of a faulting access
    void* exception[3];          // kInterrupted: what a signal's handler raised, as PyErr_Restore takes it
    char message[4096];
};

}  // namespace fusegraph_cpu
