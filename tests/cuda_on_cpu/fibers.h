// A block's threads take turns, each with a stack of its own. Whoever includes this has THREADS, CLUSTER and threadIdx.

#pragma once

#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

constexpr int STACK_BYTES = 64 << 10;
struct Fiber {
    ucontext_t start;  // entered once: this sets the signal mask, by a system call
    jmp_buf paused;    // and this does not, as often as threads take turns
    char stack[STACK_BYTES];
};
static thread_local Fiber* fibers;  // [THREADS]
// a thread of the system runs one block: these begin as zeros
static thread_local bool started[THREADS], done[THREADS];
static thread_local int num_ended, num_ended_of_warp[THREADS / 32];
static thread_local jmp_buf scheduler;
static void (*thread_body)();

__attribute__((noinline)) static void pause_thread() {
    if (!_setjmp(fibers[threadIdx.x].paused)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void resume_thread() {
    if (_setjmp(scheduler)) return;
    if (started[threadIdx.x]) _longjmp(fibers[threadIdx.x].paused, 1);
    started[threadIdx.x] = true;
    setcontext(&fibers[threadIdx.x].start);
}
static void run_thread() {
    thread_body();
    done[threadIdx.x] = true;
    ++num_ended;
    ++num_ended_of_warp[threadIdx.x / 32];
    _longjmp(scheduler, 1);
}

static void run_block() {
    for (int t = 0; t < THREADS; ++t) {
        Fiber& fiber = fibers[t];
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack;
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, run_thread, 0);
    }
    for (bool alive = true; alive;) {
        alive = false;
        for (int t = 0; t < THREADS; ++t) {
            if (done[t]) continue;
            threadIdx.x = t;
            resume_thread();
            alive = true;
        }
        if (CLUSTER > 1) sched_yield();  // a barrier may wait for another block
    }
}
