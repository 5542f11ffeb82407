// Products of a warpgroup, asynchronous, from shared memory (wgmma, sm_90a).
//
// All 128 threads of an aligned warpgroup take part, with one descriptor of each operand.  Operands are 32 bytes deep
// along the sum: 16 elements of 16 bits, 8 of tf32, 32 of 8 bits.  Of d, thread l of warp w (of the warpgroup) holds
//   d[4 * j + i]   row 16 * w + l / 4 + 8 * (i >> 1), column 8 * j + 2 * (l % 4) + (i & 1)
// A pipeline is: wgmma_fence, any number of wgmma on one accumulator, wgmma_commit, and wgmma_wait before d, or the
// shared memory that was read, is touched.  What ordinary stores wrote to shared memory is seen after
// fence_async_shared (tma.cuh).
#pragma once
#include "mma.cuh"

// Returns the descriptor (matrix_descriptor) of what lies `bytes` behind an operand, a multiple of 16: addresses in
// shared memory do not leave their field of it.
__device__ __forceinline__ uint64 matrix_behind(uint64 descriptor, int bytes) {
    return (descriptor & 0xffffffff00000000u) | (uint32(descriptor) + uint32(bytes >> 4));
}

// Returns the metadata of rows of a sparse operand: of rows that do not exist it is 0, which no product takes.
__device__ __forceinline__ uint32 sparse_metadata(uint32 word) { return word ? word : 0x44444444u; }

#ifdef FUSEGRAPH_CPU
#include "wgmma_on_cpu.h"
#else

// Describes an operand in shared memory; addresses and strides are multiples of 16 bytes.  Swizzle is the width in
// bytes of the rows within which 16-byte pieces change places (bits 4 to 6 of an address ^= bits 7 to 9, fewer for 64
// and 32), or 0: the width then is 16, and nothing changes places.  Swizzled tiles start at a multiple of 8 rows.
//   sum innermost (K-major): a row or column of the operand is a row of Swizzle bytes, of which 32 are read, from
//     `tile` on; stride_bytes lie between groups of 8 rows.  Without swizzle, leading_bytes lie between the halves of
//     the 32.
//   sum outermost (transposed, 16-bit elements): a row is Swizzle bytes of one element of the sum, 8 such rows are a
//     group.  stride_bytes lie between groups, leading_bytes between the neighbours of Swizzle bytes along the rows;
//     without swizzle it is the other way round.
template <int Swizzle>
__device__ __forceinline__ uint64 matrix_descriptor(const void* tile, uint32 leading_bytes, uint32 stride_bytes) {
    static_assert(Swizzle == 128 || Swizzle == 64 || Swizzle == 32 || Swizzle == 0, "rows of 128, 64, 32 bytes, or 0");
    constexpr uint64 layout = Swizzle == 128 ? 1 : Swizzle == 64 ? 2 : Swizzle == 32 ? 3 : 0;
    const uint32 address = shared_address(tile);
    return uint64((address & 0x3ffffu) >> 4) | uint64((leading_bytes & 0x3ffffu) >> 4) << 16 |
           uint64((stride_bytes & 0x3ffffu) >> 4) << 32 | layout << 62;
}

// Orders what threads did to d, and to A's registers, before the wgmma that follow: needed before the first, and after
// other instructions touched those registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The wgmma since the last commit become a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last Pending groups are not done.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving reads of d before a wait, or writes behind a wgmma.
template <int Count>
__device__ __forceinline__ void wgmma_hold(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Count>
__device__ __forceinline__ void wgmma_hold(int32 (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// What follows the operands: the signs of A and B, then whether they are transposed, as far as the types have it.
template <class A, class B, int TransposeA, int TransposeB>
struct WgmmaTail {
    static_assert(!TransposeA && !TransposeB, "only operands of 16 bits can be transposed");
    static constexpr char text[] = ", 1, 1", text_registers[] = ", 1, 1";
};
#define WGMMA_TAIL_INTEGER(A, B)                                      \
    template <>                                                       \
    struct WgmmaTail<A, B, 0, 0> {                                    \
        static constexpr char text[] = "", text_registers[] = "";     \
    };
WGMMA_TAIL_INTEGER(int8, int8)
WGMMA_TAIL_INTEGER(int8, uint8)
WGMMA_TAIL_INTEGER(uint8, int8)
WGMMA_TAIL_INTEGER(uint8, uint8)
#undef WGMMA_TAIL_INTEGER
template <int TransposeA, int TransposeB>
struct WgmmaTail16 {
    static constexpr char text[] = {',', ' ', '1', ',', ' ', '1', ',', ' ', '0' + TransposeA,
                                    ',', ' ', '0' + TransposeB, 0};
    static constexpr char text_registers[] = {',', ' ', '1', ',', ' ', '1', ',', ' ', '0' + TransposeB, 0};
};
template <int TransposeA, int TransposeB>
struct WgmmaTail<bfloat16, bfloat16, TransposeA, TransposeB> : WgmmaTail16<TransposeA, TransposeB> {};
template <int TransposeA, int TransposeB>
struct WgmmaTail<float16, float16, TransposeA, TransposeB> : WgmmaTail16<TransposeA, TransposeB> {};

// The instructions of N columns; FUSEGRAPH_WGMMA(N) defines them.
template <int N>
struct Wgmma;

// d = A B, or d += A B.  A has 64 rows, B N columns, N a multiple of 8 up to 256, for integers of 16 beyond 32; the
// types are those of mma.  A kernel says FUSEGRAPH_WGMMA(N) once, outside of functions, for each N that it uses.
template <class A, class B, int N, int TransposeA = 0, int TransposeB = 0, class D>
__device__ __forceinline__ void wgmma(D (&d)[N / 2], uint64 a, uint64 b, bool accumulate) {
    Wgmma<N>::template run<A, B, TransposeA, TransposeB>(d, a, b, accumulate);
}
// A from registers, of which warp w holds rows 16 * w to 16 * w + 15 as mma has them.  They are read while the product
// runs: nothing may be written to them before it is waited for.
template <class A, class B, int N, int TransposeB = 0, class D>
__device__ __forceinline__ void wgmma(D (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate) {
    Wgmma<N>::template run<A, B, TransposeB>(d, a, b, accumulate);
}

// The same of an A that has two of every four neighbours along the sum (2:4 sparsity), elements of 16 bits: of 32 terms
// its tile has the 16 that are kept, in order, where B has all 32, 64 bytes.  Lanes 2 * Selector and 2 * Selector + 1 of
// every four have the metadata: lane l of warp w that of rows 16 * w + l / 4, in the lower half of the word, and 8 rows
// further, in the upper half, of terms 16 * (l & 1) to 16 * (l & 1) + 15.  Four bits are those of four terms: which two
// they are, the lower one first; they differ.  The metadata are read while the product runs, as an A in registers is.
template <class A, class B, int N, int Selector, class D>
__device__ __forceinline__ void wgmma_sparse(D (&d)[N / 2], uint64 a, uint64 b, uint32 metadata, bool accumulate) {
    Wgmma<N>::template run_sparse<A, B, Selector>(d, a, b, metadata, accumulate);
}

// All N are spelled out as macros because the compiler would take 30 ms over the functions, and nothing over these.
#define FUSEGRAPH_WGMMA(N) FUSEGRAPH_WGMMA_##N
#define WGMMA_SHAPE(N, i0, i1, i2, i3, i4, i5, i6, i7, i8)           \
    template <>                                                      \
    struct Wgmma<N> {                                                \
        WGMMA_RUN(N, float, "+f", i0, i1, i2, i3, i4, i5, i6, i7, i8) \
        WGMMA_RUN(N, int32, "+r", i0, i1, i2, i3, i4, i5, i6, i7, i8) \
        WGMMA_RUN_SPARSE(N, i0, i1, i2, i3, i4, i5, i6)              \
    };
#define WGMMA_RUN_SPARSE(N, i0, i1, i2, i3, i4, i5, i6)                                                          \
    template <class A, class B, int Selector>                                                                    \
    static __device__ __forceinline__ void run_sparse(float (&d)[N / 2], uint64 a, uint64 b, uint32 metadata,     \
                                                      bool accumulate) {                                         \
        static_assert(sizeof(A) == 2 && (Selector == 0 || Selector == 1), "elements of 16 bits");                 \
        asm volatile(                                                                                            \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #i0 ", 0;\n"                                                    \
            "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32%" #i1 " {" WGMMA_NAMES_##N "}, %" #i4 ", %" #i3         \
            ", %" #i5 ", %" #i6 ", p%" #i2 ";\n}"                                                                \
            : WGMMA_REGISTERS_##N("+f")                                                                          \
            : "r"(int32(accumulate)), "C"(MatrixProduct<A, B>::types), "C"(WgmmaTail<A, B, 0, 0>::text), "l"(b),  \
              "l"(a), "r"(metadata), "n"(Selector));                                                             \
    }
#define WGMMA_RUN(N, D, REGISTER, i0, i1, i2, i3, i4, i5, i6, i7, i8)                                            \
    template <class A, class B, int TransposeA, int TransposeB>                                                  \
    static __device__ __forceinline__ void run(D (&d)[N / 2], uint64 a, uint64 b, bool accumulate) {             \
        asm volatile(                                                                                            \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #i0 ", 0;\n"                                                    \
            "wgmma.mma_async.sync.aligned.m64n" #N "%" #i1 "%" #i2 " {" WGMMA_NAMES_##N "}, %" #i5 ", %" #i4     \
            ", p%" #i3 ";\n}"                                                                                    \
            : WGMMA_REGISTERS_##N(REGISTER)                                                                      \
            : "r"(int32(accumulate)), "C"(MatrixProduct<A, B>::k), "C"(MatrixProduct<A, B>::types),              \
              "C"(WgmmaTail<A, B, TransposeA, TransposeB>::text), "l"(b), "l"(a));                               \
    }                                                                                                            \
    template <class A, class B, int TransposeB>                                                                  \
    static __device__ __forceinline__ void run(D (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate) { \
        asm volatile(                                                                                            \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #i0 ", 0;\n"                                                    \
            "wgmma.mma_async.sync.aligned.m64n" #N "%" #i1 "%" #i2 " {" WGMMA_NAMES_##N "}, {%" #i5 ", %" #i6    \
            ", %" #i7 ", %" #i8 "}, %" #i4 ", p%" #i3 ";\n}"                                                     \
            : WGMMA_REGISTERS_##N(REGISTER)                                                                      \
            : "r"(int32(accumulate)), "C"(MatrixProduct<A, B>::k), "C"(MatrixProduct<A, B>::types),              \
              "C"(WgmmaTail<A, B, 0, TransposeB>::text_registers), "l"(b), "r"(a[0]), "r"(a[1]), "r"(a[2]),      \
              "r"(a[3]));                                                                                        \
    }

#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %8, %9, %10, %11"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %36, %37, %38, %39"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %40, %41, %42, %43"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %48, %49, %50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %60, %61, %62, %63"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", %64, %65, %66, %67"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", %68, %69, %70, %71"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", %72, %73, %74, %75"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", %76, %77, %78, %79"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", %80, %81, %82, %83"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", %84, %85, %86, %87"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", %88, %89, %90, %91"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", %92, %93, %94, %95"
#define WGMMA_NAMES_200 WGMMA_NAMES_192 ", %96, %97, %98, %99"
#define WGMMA_NAMES_208 WGMMA_NAMES_200 ", %100, %101, %102, %103"
#define WGMMA_NAMES_216 WGMMA_NAMES_208 ", %104, %105, %106, %107"
#define WGMMA_NAMES_224 WGMMA_NAMES_216 ", %108, %109, %110, %111"
#define WGMMA_NAMES_232 WGMMA_NAMES_224 ", %112, %113, %114, %115"
#define WGMMA_NAMES_240 WGMMA_NAMES_232 ", %116, %117, %118, %119"
#define WGMMA_NAMES_248 WGMMA_NAMES_240 ", %120, %121, %122, %123"
#define WGMMA_NAMES_256 WGMMA_NAMES_248 ", %124, %125, %126, %127"
#define WGMMA_REGISTERS_8(c) c(d[0]), c(d[1]), c(d[2]), c(d[3])
#define WGMMA_REGISTERS_16(c) WGMMA_REGISTERS_8(c), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define WGMMA_REGISTERS_24(c) WGMMA_REGISTERS_16(c), c(d[8]), c(d[9]), c(d[10]), c(d[11])
#define WGMMA_REGISTERS_32(c) WGMMA_REGISTERS_24(c), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define WGMMA_REGISTERS_40(c) WGMMA_REGISTERS_32(c), c(d[16]), c(d[17]), c(d[18]), c(d[19])
#define WGMMA_REGISTERS_48(c) WGMMA_REGISTERS_40(c), c(d[20]), c(d[21]), c(d[22]), c(d[23])
#define WGMMA_REGISTERS_56(c) WGMMA_REGISTERS_48(c), c(d[24]), c(d[25]), c(d[26]), c(d[27])
#define WGMMA_REGISTERS_64(c) WGMMA_REGISTERS_56(c), c(d[28]), c(d[29]), c(d[30]), c(d[31])
#define WGMMA_REGISTERS_72(c) WGMMA_REGISTERS_64(c), c(d[32]), c(d[33]), c(d[34]), c(d[35])
#define WGMMA_REGISTERS_80(c) WGMMA_REGISTERS_72(c), c(d[36]), c(d[37]), c(d[38]), c(d[39])
#define WGMMA_REGISTERS_88(c) WGMMA_REGISTERS_80(c), c(d[40]), c(d[41]), c(d[42]), c(d[43])
#define WGMMA_REGISTERS_96(c) WGMMA_REGISTERS_88(c), c(d[44]), c(d[45]), c(d[46]), c(d[47])
#define WGMMA_REGISTERS_104(c) WGMMA_REGISTERS_96(c), c(d[48]), c(d[49]), c(d[50]), c(d[51])
#define WGMMA_REGISTERS_112(c) WGMMA_REGISTERS_104(c), c(d[52]), c(d[53]), c(d[54]), c(d[55])
#define WGMMA_REGISTERS_120(c) WGMMA_REGISTERS_112(c), c(d[56]), c(d[57]), c(d[58]), c(d[59])
#define WGMMA_REGISTERS_128(c) WGMMA_REGISTERS_120(c), c(d[60]), c(d[61]), c(d[62]), c(d[63])
#define WGMMA_REGISTERS_136(c) WGMMA_REGISTERS_128(c), c(d[64]), c(d[65]), c(d[66]), c(d[67])
#define WGMMA_REGISTERS_144(c) WGMMA_REGISTERS_136(c), c(d[68]), c(d[69]), c(d[70]), c(d[71])
#define WGMMA_REGISTERS_152(c) WGMMA_REGISTERS_144(c), c(d[72]), c(d[73]), c(d[74]), c(d[75])
#define WGMMA_REGISTERS_160(c) WGMMA_REGISTERS_152(c), c(d[76]), c(d[77]), c(d[78]), c(d[79])
#define WGMMA_REGISTERS_168(c) WGMMA_REGISTERS_160(c), c(d[80]), c(d[81]), c(d[82]), c(d[83])
#define WGMMA_REGISTERS_176(c) WGMMA_REGISTERS_168(c), c(d[84]), c(d[85]), c(d[86]), c(d[87])
#define WGMMA_REGISTERS_184(c) WGMMA_REGISTERS_176(c), c(d[88]), c(d[89]), c(d[90]), c(d[91])
#define WGMMA_REGISTERS_192(c) WGMMA_REGISTERS_184(c), c(d[92]), c(d[93]), c(d[94]), c(d[95])
#define WGMMA_REGISTERS_200(c) WGMMA_REGISTERS_192(c), c(d[96]), c(d[97]), c(d[98]), c(d[99])
#define WGMMA_REGISTERS_208(c) WGMMA_REGISTERS_200(c), c(d[100]), c(d[101]), c(d[102]), c(d[103])
#define WGMMA_REGISTERS_216(c) WGMMA_REGISTERS_208(c), c(d[104]), c(d[105]), c(d[106]), c(d[107])
#define WGMMA_REGISTERS_224(c) WGMMA_REGISTERS_216(c), c(d[108]), c(d[109]), c(d[110]), c(d[111])
#define WGMMA_REGISTERS_232(c) WGMMA_REGISTERS_224(c), c(d[112]), c(d[113]), c(d[114]), c(d[115])
#define WGMMA_REGISTERS_240(c) WGMMA_REGISTERS_232(c), c(d[116]), c(d[117]), c(d[118]), c(d[119])
#define WGMMA_REGISTERS_248(c) WGMMA_REGISTERS_240(c), c(d[120]), c(d[121]), c(d[122]), c(d[123])
#define WGMMA_REGISTERS_256(c) WGMMA_REGISTERS_248(c), c(d[124]), c(d[125]), c(d[126]), c(d[127])
#define FUSEGRAPH_WGMMA_8 WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10, 11, 12)
#define FUSEGRAPH_WGMMA_16 WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14, 15, 16)
#define FUSEGRAPH_WGMMA_24 WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18, 19, 20)
#define FUSEGRAPH_WGMMA_32 WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22, 23, 24)
#define FUSEGRAPH_WGMMA_40 WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26, 27, 28)
#define FUSEGRAPH_WGMMA_48 WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30, 31, 32)
#define FUSEGRAPH_WGMMA_56 WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34, 35, 36)
#define FUSEGRAPH_WGMMA_64 WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38, 39, 40)
#define FUSEGRAPH_WGMMA_72 WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42, 43, 44)
#define FUSEGRAPH_WGMMA_80 WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46, 47, 48)
#define FUSEGRAPH_WGMMA_88 WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50, 51, 52)
#define FUSEGRAPH_WGMMA_96 WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54, 55, 56)
#define FUSEGRAPH_WGMMA_104 WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58, 59, 60)
#define FUSEGRAPH_WGMMA_112 WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62, 63, 64)
#define FUSEGRAPH_WGMMA_120 WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66, 67, 68)
#define FUSEGRAPH_WGMMA_128 WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70, 71, 72)
#define FUSEGRAPH_WGMMA_136 WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74, 75, 76)
#define FUSEGRAPH_WGMMA_144 WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78, 79, 80)
#define FUSEGRAPH_WGMMA_152 WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82, 83, 84)
#define FUSEGRAPH_WGMMA_160 WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86, 87, 88)
#define FUSEGRAPH_WGMMA_168 WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90, 91, 92)
#define FUSEGRAPH_WGMMA_176 WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94, 95, 96)
#define FUSEGRAPH_WGMMA_184 WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98, 99, 100)
#define FUSEGRAPH_WGMMA_192 WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102, 103, 104)
#define FUSEGRAPH_WGMMA_200 WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106, 107, 108)
#define FUSEGRAPH_WGMMA_208 WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110, 111, 112)
#define FUSEGRAPH_WGMMA_216 WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114, 115, 116)
#define FUSEGRAPH_WGMMA_224 WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118, 119, 120)
#define FUSEGRAPH_WGMMA_232 WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122, 123, 124)
#define FUSEGRAPH_WGMMA_240 WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126, 127, 128)
#define FUSEGRAPH_WGMMA_248 WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130, 131, 132)
#define FUSEGRAPH_WGMMA_256 WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134, 135, 136)

#endif
