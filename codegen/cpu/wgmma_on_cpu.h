// wgmma on the CPU: a product reads its operands when it is issued, and its results are withheld until a wait.
//
// In between the accumulators hold signalling NaNs, so that a read before the wait shows, and a write is an error; so
// is a change of the shared memory, or of A's registers, that the product reads.  Tiles lie in dynamic shared memory.
#pragma once

#include "mma_on_cpu.h"
#include "queue.h"

namespace fusegraph_cpu {

constexpr uint32 kUnfinished = 0x7fbadbad;  // as a float, a signalling NaN

// Dynamic shared memory starts here among the addresses that descriptors hold; as on sm_90, a descriptor of 0 is wrong.
constexpr uint32 kSharedStart = 1024;

// Registers of a warpgroup's threads, as one matrix of 64 rows: values[row * columns + column].
struct Accumulators {
    Accumulators* next;
    uint32* threads[128];
    int columns;
    bool integers;
    unsigned unfinished;             // products that were issued and not waited for
    unsigned long long released_at;  // fences when the last wait gave them back
    uint32* values;
};

struct Product;

// What the threads of a warpgroup must agree on.
struct Instruction {
    void (*run)(Accumulators&, const Product&);
    uint64 a, b;  // descriptors
    int columns;
    bool integers, accumulate, a_in_registers, transpose_a, transpose_b;
    Where where;
    int selector = -1;  // of the lanes with the metadata of a sparse A; -1 if A is not
};

struct Product {
    Instruction instruction;
    Accumulators* to;
    unsigned long long group;
    unsigned char a[64][32], b[256][32];  // rows of A, columns of B
    const uint32* registers[128];         // from which A was read, if it was
    unsigned char behind[256][32];        // of a sparse A: the second half of the columns of B
    uint32 metadata[128];                 // and what the threads brought
};

// What a warpgroup has issued and not waited for.
struct Products {
    Accumulators* accumulators;
    Queue<Product*> unfinished;
    unsigned long long committed, fences;
};

// What a thread brings to the meeting.
struct Issue {
    Instruction instruction;
    uint32* d;
    const uint32* a;
    uint32 metadata = 0;
};

inline Products& products_of(Thread* first) {
    if (!first->products) first->products = first->block->runtime->block_memory(first, sizeof(Products));
    return *static_cast<Products*>(first->products);
}

template <class... T>
[[noreturn]] inline void fail(const Where& where, const char* format, T... values) {
    const Runtime* runtime = current->block->runtime;
    char* text = static_cast<char*>(runtime->block_memory(current, 512));
    __builtin_snprintf(text, 512, format, values...);
    runtime->fail(current, "%s at %s:%d: %s", where.what, where.file, where.line, text);
    __builtin_unreachable();
}

// ---- operands in shared memory

inline uint64 encode_descriptor(int swizzle, const void* tile, uint32 leading_bytes, uint32 stride_bytes,
                                const Where& where) {
    const Block* block = current->block;
    const size_t offset = static_cast<const unsigned char*>(tile) - block->dynamic_shared;
    if (offset >= block->dynamic_shared_bytes) fail(where, "the tile is not in the block's dynamic shared memory");
    if (offset % 16 || leading_bytes % 16 || stride_bytes % 16)
        fail(where, "the tile is at byte %zu, its strides are %u and %u bytes: all are multiples of 16", offset,
             leading_bytes, stride_bytes);
    if ((leading_bytes | stride_bytes) >> 18) fail(where, "strides of %u and %u bytes", leading_bytes, stride_bytes);
    const uint64 layout = swizzle == 128 ? 1 : swizzle == 64 ? 2 : swizzle == 32 ? 3 : 0;
    return uint64((kSharedStart + offset) >> 4) | uint64(leading_bytes >> 4) << 16 | uint64(stride_bytes >> 4) << 32 |
           layout << 62;
}

// Reads `rows` rows (columns of B) of 32 bytes along the sum, as the descriptor says; with `first_read`, as a new read.
inline void read_tile(unsigned char (*to)[32], uint64 descriptor, int rows, bool transposed, bool first_read,
                      const char* name, const Where& where) {
    const Block* block = current->block;
    const uint32 start = uint32(descriptor & 0x3fff) << 4, leading = uint32(descriptor >> 16 & 0x3fff) << 4,
                 stride = uint32(descriptor >> 32 & 0x3fff) << 4;
    const int layout = int(descriptor >> 62), swizzle = layout == 1 ? 128 : layout == 2 ? 64 : layout == 3 ? 32 : 0;
    const uint32 width = swizzle ? swizzle : 16, mask = swizzle ? swizzle - 16 : 0;
    if (descriptor & 0x3fffc000c000c000ull)
        fail(where, "%s's descriptor 0x%016llx has bits set that have no meaning here", name, descriptor);
    if (swizzle && start & (transposed ? 8 * width - 1 : 7 * width))
        fail(where, "%s starts at byte 0x%x of shared memory, not at a multiple of 8 rows of %u bytes", name,
             start - kSharedStart, width);
    if (swizzle && !transposed && start % width + 32 > width)
        fail(where, "%s is read from byte %u of rows of %u bytes: no 32 bytes are left", name, start % width, width);
    const auto piece = [&](uint32 address) {
        address ^= address >> 3 & mask;
        const uint32 offset = address - kSharedStart;
        if (address < kSharedStart || offset + 16 > block->dynamic_shared_bytes)
            fail(where, "%s reaches byte %d of %u bytes of dynamic shared memory", name, int(offset),
                 block->dynamic_shared_bytes);
        const unsigned char* bytes = block->dynamic_shared + offset;
        if (first_read) block->runtime->async_read(current, bytes, 16, where);
        return bytes;
    };
    if (!transposed) {
        for (int row = 0; row < rows; ++row)
            for (int half = 0; half < 2; ++half)
                memcpy(to[row] + 16 * half,
                       piece(start + row / 8 * stride + row % 8 * width + half * (swizzle ? 16 : leading)), 16);
        return;
    }
    for (int inner = 0; inner < 16; ++inner)  // elements of two bytes
        for (int row = 0; row < rows; row += 8) {
            const uint32 along = 2 * row, far = along / width, outer = inner / 8;
            const uint32 address = start + along % width + inner % 8 * width + far * (swizzle ? leading : stride) +
                                   outer * (swizzle ? stride : leading);
            const unsigned char* bytes = piece(address);
            for (int i = 0; i < 8; ++i) memcpy(to[row + i] + 2 * inner, bytes + 2 * i, 2);
        }
}

inline void read_operands(const Instruction& of, unsigned char (*a)[32], unsigned char (*b)[32],
                          unsigned char (*behind)[32], bool first_read) {
    if (!of.a_in_registers) read_tile(a, of.a, 64, of.transpose_a, first_read, "A", of.where);
    read_tile(b, of.b, of.columns, of.transpose_b, first_read, "B", of.where);
    if (of.selector >= 0) read_tile(behind, of.b + 2, of.columns, of.transpose_b, first_read, "B", of.where);
}

// The places of the two terms that a row of a sparse A has of its `four`-th four terms.
inline void find_places(const Product& product, int row, int four, int (&places)[2]) {
    const int selector = product.instruction.selector;
    const int thread = row / 16 * 32 + row % 8 * 4 + 2 * selector + four / 4;
    const uint32 bits = product.metadata[thread] >> (row / 8 % 2 * 16 + four % 4 * 4) & 15;
    places[0] = int(bits & 3), places[1] = int(bits >> 2);
    if (places[0] >= places[1])
        fail(product.instruction.where, "thread %d has metadata 0x%08x: terms %d and %d of row %d do not ascend", thread,
             product.metadata[thread], places[0], places[1], row);
}

// d += A B, four columns at once as in `multiply`: only the terms that a row has are multiplied, as tensor cores do it.
template <class A, class B, class D>
void run_sparse(Accumulators& to, const Product& product) {
    constexpr int terms = 32, kept = 16, most = 256;
    typedef D Four __attribute__((vector_size(4 * sizeof(D))));
    Four of_terms[terms][most / 4];
    for (int n = 0; n < to.columns; ++n)
        for (int k = 0; k < terms; ++k)
            of_terms[k][n / 4][n % 4] = MmaOperand<B>::value(k < 16 ? product.b[n] + 2 * k : product.behind[n] + 2 * k - 32);
    for (int row = 0; row < 64; ++row) {
        D operands[kept];
        int place[kept];
        for (int k = 0; k < kept; ++k) operands[k] = MmaOperand<A>::value(product.a[row] + 2 * k);
        for (int four = 0; four < 8; ++four) {
            int places[2];
            find_places(product, row, four, places);
            for (int n = 0; n < 2; ++n) place[2 * four + n] = 4 * four + places[n];
        }
        D* d = reinterpret_cast<D*>(to.values) + row * to.columns;
        for (int n = 0; n < to.columns; n += 4) {
            Four sums;
            memcpy(&sums, d + n, sizeof sums);
            for (int k = 0; k < kept; ++k) sums += operands[k] * of_terms[place[k]][n / 4];
            memcpy(d + n, &sums, sizeof sums);
        }
    }
}

template <class A, class B, class D>
void run_product(Accumulators& to, const Product& product) {
    multiply<A, B>(reinterpret_cast<D*>(to.values), product.a, product.b, 64, to.columns);
}

// ---- accumulators

// Calls element(register, row, column) for what thread `thread` of a warpgroup holds.
template <class Element>
inline void for_registers(int thread, int columns, Element element) {
    for (int i = 0; i < columns / 2; ++i)
        element(i, thread / 32 * 16 + thread % 32 / 4 + 8 * (i >> 1 & 1), i / 4 * 8 + 2 * (thread % 4) + (i & 1));
}

inline void check_unfinished(const Accumulators& accumulators, const Where& where) {
    for (int thread = 0; thread < 128; ++thread)
        for (int i = 0; i < accumulators.columns / 2; ++i)
            if (accumulators.threads[thread][i] != kUnfinished)
                fail(where, "d[%d] of thread %d of the warpgroup was written before wgmma_wait", i, thread);
}

// The accumulators that the threads brought, made known at their first use.
inline Accumulators& find_accumulators(Products& products, const Thread* threads, const Instruction& of) {
    const auto d = [&](int thread) { return static_cast<Issue*>(threads[thread].operand)->d; };
    Accumulators* found = nullptr;
    for (Accumulators* known = products.accumulators; known; known = known->next) {
        if (known->threads[0] == d(0) && known->columns == of.columns && known->integers == of.integers) {
            found = known;
        } else if (known->unfinished && d(0) < known->threads[0] + known->columns / 2 &&
                   known->threads[0] < d(0) + of.columns / 2) {
            fail(of.where, "d is, in part or as another type, that of a product that is not waited for");
        }
    }
    if (!found) {
        const Runtime* runtime = current->block->runtime;
        found = static_cast<Accumulators*>(runtime->block_memory(current, sizeof(Accumulators)));
        *found = Accumulators{products.accumulators, {}, of.columns, of.integers, 0, 0, nullptr};
        found->values = static_cast<uint32*>(runtime->block_memory(current, 64ull * of.columns * 4));
        products.accumulators = found;
    }
    for (int thread = 0; thread < 128; ++thread) {
        if (found->unfinished && found->threads[thread] != d(thread))
            fail(of.where, "thread %d of the warpgroup brings another d than in the products not waited for", thread);
        found->threads[thread] = d(thread);
    }
    return *found;
}

// Takes the accumulators out of the threads' hands.
inline void withhold(Accumulators& accumulators, const Products& products, const Where& where) {
    if (products.fences == accumulators.released_at)
        fail(where, "no wgmma_fence since %s", products.fences ? "wgmma_wait gave d back" : "the kernel started");
    for (int thread = 0; thread < 128; ++thread)
        for_registers(thread, accumulators.columns, [&](int i, int row, int column) {
            accumulators.values[row * accumulators.columns + column] = accumulators.threads[thread][i];
            accumulators.threads[thread][i] = kUnfinished;
        });
}

inline void give_back(Accumulators& accumulators, Products& products, const Where& where) {
    check_unfinished(accumulators, where);
    for (int thread = 0; thread < 128; ++thread)
        for_registers(thread, accumulators.columns, [&](int i, int row, int column) {
            accumulators.threads[thread][i] = accumulators.values[row * accumulators.columns + column];
        });
    accumulators.released_at = products.fences;
}

// ---- the instructions: each is completed by the last of the 128 threads to arrive

inline void check_agreement(const Instruction& first, const Instruction& other, int thread) {
    if (other.run == first.run && other.columns == first.columns && other.accumulate == first.accumulate &&
        other.a == first.a && other.b == first.b && other.selector == first.selector)
        return;
    fail(first.where,
         "threads 0 and %d of the warpgroup disagree: descriptors 0x%016llx, 0x%016llx and 0x%016llx, 0x%016llx, "
         "accumulate %d and %d",
         thread, first.a, first.b, other.a, other.b, first.accumulate, other.accumulate);
}

// Where what register r of A's, of a thread, holds lies in the rows of A.
inline unsigned char* of_register(Product& product, int thread, int r) {
    return &product.a[thread / 32 * 16 + thread % 32 / 4 + 8 * (r & 1)][4 * (thread % 4) + 16 * (r >> 1)];
}

inline void complete_wgmma(Thread* threads, unsigned) {
    Products& products = products_of(threads);
    const auto brought = [&](int thread) -> const Issue& { return *static_cast<Issue*>(threads[thread].operand); };
    const Instruction& instruction = brought(0).instruction;
    for (int thread = 1; thread < 128; ++thread)
        check_agreement(instruction, brought(thread).instruction, thread);
    Accumulators& to = find_accumulators(products, threads, instruction);
    if (to.unfinished)
        check_unfinished(to, instruction.where);
    else
        withhold(to, products, instruction.where);
    ++to.unfinished;
    Product*& place = products.unfinished.push();
    if (!place) place = static_cast<Product*>(current->block->runtime->block_memory(current, sizeof(Product)));
    Product& product = *place;
    product.instruction = instruction;
    product.to = &to;
    product.group = products.committed;
    if (instruction.a_in_registers)
        for (int thread = 0; thread < 128; ++thread) {
            product.registers[thread] = brought(thread).a;
            for (int r = 0; r < 4; ++r) memcpy(of_register(product, thread, r), &brought(thread).a[r], 4);
        }
    for (int thread = 0; thread < 128; ++thread) product.metadata[thread] = brought(thread).metadata;
    read_operands(instruction, product.a, product.b, product.behind, true);
}

inline void finish(Product& product, Products& products, const Where& where) {
    const Instruction& instruction = product.instruction;
    Accumulators& to = *product.to;
    unsigned char a[64][32], b[256][32], behind[256][32];
    read_operands(instruction, a, b, behind, false);
    const bool a_changed = !instruction.a_in_registers && __builtin_memcmp(a, product.a, sizeof a);
    const bool sparse = instruction.selector >= 0;
    if (a_changed || __builtin_memcmp(b, product.b, 32 * to.columns) ||
        (sparse && __builtin_memcmp(behind, product.behind, 32 * to.columns)))
        fail(instruction.where, "the shared memory that it reads was written before wgmma_wait");
    if (instruction.a_in_registers)
        for (int thread = 0; thread < 128; ++thread)
            for (int r = 0; r < 4; ++r)
                if (__builtin_memcmp(of_register(product, thread, r), &product.registers[thread][r], 4))
                    fail(instruction.where, "a[%d] of thread %d of the warpgroup was written before wgmma_wait", r,
                         thread);
    if (!instruction.accumulate) memset(to.values, 0, 64 * to.columns * sizeof(uint32));
    instruction.run(to, product);
    if (--to.unfinished == 0) give_back(to, products, where);
}

struct Wait {
    unsigned pending;
    Where where;
};

inline void complete_wait(Thread* threads, unsigned) {
    Products& products = products_of(threads);
    const Wait& wait = *static_cast<Wait*>(threads[0].operand);
    for (int thread = 1; thread < 128; ++thread)
        if (static_cast<Wait*>(threads[thread].operand)->pending != wait.pending)
            fail(wait.where, "threads of the warpgroup wait for different groups");
    Queue<Product*>& unfinished = products.unfinished;
    for (; !unfinished.empty() && unfinished.front()->group + wait.pending < products.committed; unfinished.pop())
        finish(*unfinished.front(), products, wait.where);
}

inline void complete_fence(Thread* threads, unsigned) { ++products_of(threads).fences; }

inline void complete_commit(Thread* threads, unsigned) { ++products_of(threads).committed; }

inline void meet_warpgroup(void* operand, Complete complete, const Where& where) {
    current->block->runtime->meet_warpgroup(current, operand, complete, where);
}

template <class A, class B, int N, class D>
Instruction wgmma_instruction(uint64 a, uint64 b, bool accumulate, const Where& where) {
    constexpr bool integers = !__is_same(typename MatrixProduct<A, B>::sum, float);
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "8 to 256 columns, a multiple of 8");
    static_assert(!integers || N % 16 == 0 || N <= 24, "integers: 8, 24 or a multiple of 16 columns");
    static_assert(__is_same(D, typename MatrixProduct<A, B>::sum), "d is float, for integers int32");
    return {&run_product<A, B, D>, a, b, N, integers, accumulate, false, false, false, where};
}

}  // namespace fusegraph_cpu

#define FUSEGRAPH_WGMMA(N) static_assert(N % 8 == 0 && N >= 8 && N <= 256, "columns of wgmma");

template <int Swizzle>
inline uint64 matrix_descriptor(const void* tile, uint32 leading_bytes, uint32 stride_bytes, FUSEGRAPH_WHERE) {
    static_assert(Swizzle == 128 || Swizzle == 64 || Swizzle == 32 || Swizzle == 0, "rows of 128, 64, 32 bytes, or 0");
    const fusegraph_cpu::Where where{"matrix_descriptor", file, line};
    return fusegraph_cpu::encode_descriptor(Swizzle, tile, leading_bytes, stride_bytes, where);
}

inline void wgmma_fence(FUSEGRAPH_WHERE) {
    fusegraph_cpu::meet_warpgroup(nullptr, &fusegraph_cpu::complete_fence, {"wgmma_fence", file, line});
}

inline void wgmma_commit(FUSEGRAPH_WHERE) {
    fusegraph_cpu::meet_warpgroup(nullptr, &fusegraph_cpu::complete_commit, {"wgmma_commit", file, line});
}

template <int Pending>
inline void wgmma_wait(FUSEGRAPH_WHERE) {
    static_assert(Pending >= 0 && Pending <= 7, "0 to 7 groups");
    fusegraph_cpu::Wait wait{Pending, {"wgmma_wait", file, line}};
    fusegraph_cpu::meet_warpgroup(&wait, &fusegraph_cpu::complete_wait, wait.where);
}

template <class D, int Count>
inline void wgmma_hold(D (&)[Count]) {}

template <class A, class B, int N, int TransposeA = 0, int TransposeB = 0, class D>
inline void wgmma(D (&d)[N / 2], uint64 a, uint64 b, bool accumulate, FUSEGRAPH_WHERE) {
    static_assert((!TransposeA && !TransposeB) || fusegraph_cpu::MmaOperand<A>::size == 2,
                  "only operands of 16 bits can be transposed");
    fusegraph_cpu::Issue issue{
        fusegraph_cpu::wgmma_instruction<A, B, N, D>(a, b, accumulate, {"wgmma", file, line}),
        reinterpret_cast<uint32*>(d), nullptr};
    issue.instruction.transpose_a = TransposeA;
    issue.instruction.transpose_b = TransposeB;
    fusegraph_cpu::meet_warpgroup(&issue, &fusegraph_cpu::complete_wgmma, issue.instruction.where);
}

template <class A, class B, int N, int TransposeB = 0, class D>
inline void wgmma(D (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate, FUSEGRAPH_WHERE) {
    static_assert(!TransposeB || fusegraph_cpu::MmaOperand<A>::size == 2, "only operands of 16 bits can be transposed");
    fusegraph_cpu::Issue issue{
        fusegraph_cpu::wgmma_instruction<A, B, N, D>(0, b, accumulate, {"wgmma", file, line}),
        reinterpret_cast<uint32*>(d), a};
    issue.instruction.a_in_registers = true;
    issue.instruction.transpose_b = TransposeB;
    fusegraph_cpu::meet_warpgroup(&issue, &fusegraph_cpu::complete_wgmma, issue.instruction.where);
}

template <class A, class B, int N, int Selector, class D>
inline void wgmma_sparse(D (&d)[N / 2], uint64 a, uint64 b, uint32 metadata, bool accumulate, FUSEGRAPH_WHERE) {
    static_assert(fusegraph_cpu::MmaOperand<A>::size == 2, "elements of 16 bits");
    static_assert(Selector == 0 || Selector == 1, "the first or the second two of every four lanes");
    fusegraph_cpu::Issue issue{
        fusegraph_cpu::wgmma_instruction<A, B, N, D>(a, b, accumulate, {"wgmma_sparse", file, line}),
        reinterpret_cast<uint32*>(d), nullptr, metadata};
    issue.instruction.run = &fusegraph_cpu::run_sparse<A, B, D>;
    issue.instruction.selector = Selector;
    fusegraph_cpu::meet_warpgroup(&issue, &fusegraph_cpu::complete_wgmma, issue.instruction.where);
}
