// Switching between stacks: by hand on x86-64 with the System V calling convention, by ucontext elsewhere (or with
// FUSEGRAPH_CPU_UCONTEXT), which is several times slower because it makes a system call for the signal mask.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && !defined(FUSEGRAPH_CPU_UCONTEXT)

namespace fusegraph_cpu {
struct Context {
    void* stack_pointer;
};
}  // namespace fusegraph_cpu

extern "C" void fusegraph_cpu_switch(void** save, void* load) __attribute__((visibility("hidden")));

// Only what a called function must preserve; the caller's compiler has saved the rest.
asm(R"(
.text
.p2align 4
.hidden fusegraph_cpu_switch
.globl fusegraph_cpu_switch
.type fusegraph_cpu_switch, @function
fusegraph_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fusegraph_cpu_switch, .-fusegraph_cpu_switch
)");

namespace fusegraph_cpu {

inline const char* context_kind() { return "x86-64"; }

// `entry` never returns.
inline void context_make(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
    *--top = nullptr;  // return address of entry: after `ret` the stack is 8 off a multiple of 16, as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}

inline void context_switch(Context& from, Context& to) { fusegraph_cpu_switch(&from.stack_pointer, to.stack_pointer); }

}  // namespace fusegraph_cpu

#else

#include <ucontext.h>

namespace fusegraph_cpu {

struct Context {
    ucontext_t context;
};

inline const char* context_kind() { return "ucontext"; }

inline void context_make(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = bytes;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}

inline void context_switch(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

}  // namespace fusegraph_cpu

#endif
