// Fibers: a block's threads take turns, each on a stack of its own. The including file defines THREADS, CLUSTER and
// threadIdx.

#pragma once

#include <ucontext.h>

#include <cstdint>

constexpr int STACK_BYTES = (64 << 10) + 320;  // not a power of two, or stacks would share few cache sets
static void run_thread();

#if defined(__x86_64__)  // ten instructions: a turn may be shorter than swapcontext, which makes a system call
using FiberState = void**;  // the saved stack pointer, at the saved registers
__attribute__((naked, noinline)) static void switch_fiber(FiberState*, FiberState*) {
    asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp, (%rdi)\n"
        "mov (%rsi), %rsp; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
static void make_fiber(FiberState& state, char* stack) {
    state = reinterpret_cast<FiberState>(reinterpret_cast<uintptr_t>(stack + STACK_BYTES) & ~uintptr_t{15}) - 8;
    state[6] = reinterpret_cast<void*>(run_thread);  // return address, after six registers; it never returns
}
#else
using FiberState = ucontext_t;
static void switch_fiber(FiberState* from, FiberState* to) { swapcontext(from, to); }
static void make_fiber(FiberState& state, char* stack) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = STACK_BYTES;
    state.uc_link = nullptr;
    makecontext(&state, run_thread, 0);
}
#endif

struct Fiber {
    FiberState state;
    char stack[STACK_BYTES];
};
static thread_local Fiber* fibers;  // [THREADS]
// state of a block, like all thread-local variables: it begins as zeros
static thread_local bool done[THREADS];
static thread_local int num_ended, num_ended_of_warp[THREADS / 32];
static thread_local FiberState scheduler;
// a paused thread waits until *word differs from value; null: only for its turn
static thread_local struct { const int* word; int value; } awaited[THREADS];
static void (*thread_body)();
static void thread_has_ended();  // opens barriers that waited only for this thread

__attribute__((noinline)) static void pause_thread() { switch_fiber(&fibers[threadIdx.x].state, &scheduler); }
static void pause_until_changed(const int* word, int value) {
    awaited[threadIdx.x] = {word, value};
    pause_thread();
    awaited[threadIdx.x].word = nullptr;
}
static void run_thread() {
    thread_body();
    done[threadIdx.x] = true;
    ++num_ended;
    ++num_ended_of_warp[threadIdx.x / 32];
    thread_has_ended();
    pause_thread();  // for good
}

constexpr int PASSES_AT_ONCE = 8;  // over a block's threads, in a cluster, where they may wait for another block

#pragma GCC push_options
#pragma GCC optimize("O2")
// Run the block's threads in turn until all have ended or wait, or for PASSES_AT_ONCE in a cluster. Returns whether any
// is left.
static bool run_threads() {
    for (int pass = 0; CLUSTER == 1 || pass < PASSES_AT_ONCE; ++pass) {
        bool is_any_left = false, has_moved = false;
        for (int t = 0; t < THREADS; ++t) {
            if (done[t]) continue;
            is_any_left = true;
            if (awaited[t].word && *awaited[t].word == awaited[t].value) continue;
            has_moved = true;
            threadIdx.x = t;
            switch_fiber(&scheduler, &fibers[t].state);
        }
        if (!is_any_left) return false;
        if (!has_moved) return true;
    }
    return true;
}
#pragma GCC pop_options
