// Runs the kernels of this project on a CPU: a block's threads are fibers that take turns at every barrier and every
// exchange within a warp, blocks run one after the other. It finds wrong results, not races between blocks.
//
// Defined by whoever includes it: THREADS, SHARED_BYTES.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

struct dim3 { int x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, gridDim;
static uint4 emulated_shared[SHARED_BYTES / 16 + 1];

// fibers

constexpr int STACK_BYTES = 64 << 10;
struct Fiber {
    ucontext_t context;
    bool done;
    char stack[STACK_BYTES];
};
static Fiber fibers[THREADS];
static ucontext_t scheduler;
static void (*thread_body)();

static void pause_thread() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }
static void run_thread() {
    thread_body();
    fibers[threadIdx.x].done = true;
}

static void run_block() {
    for (int t = 0; t < THREADS; ++t) {
        Fiber& fiber = fibers[t];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_thread, 0);
    }
    for (bool alive = true; alive;) {
        alive = false;
        for (int t = 0; t < THREADS; ++t) {
            if (fibers[t].done) continue;
            threadIdx.x = t;
            swapcontext(&scheduler, &fibers[t].context);
            alive = true;
        }
    }
}

// barriers: a thread that has ended counts as arrived, as it does on the device

struct Barrier {
    int first, size, arrived = 0, round = 0;

    void wait() {
        const int mine = round;
        ++arrived;
        while (round == mine) {
            int ended = 0;
            for (int t = first; t < first + size; ++t) ended += fibers[t].done;
            if (arrived + ended == size) {
                arrived = 0;
                ++round;
            } else {
                pause_thread();
            }
        }
    }
};
static Barrier whole_block{0, THREADS};
static Barrier warps[THREADS / 32];
static inline void __syncthreads() { whole_block.wait(); }

// exchanges within a warp, of all 32 lanes

static uint64_t exchanged[THREADS / 32][32];
template <class T, class F> static inline auto exchange(T value, F use) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    std::memcpy(&exchanged[warp][lane], &value, sizeof value);
    warps[warp].wait();
    auto of_lane = [&](int other) {
        T theirs;
        std::memcpy(&theirs, &exchanged[warp][other], sizeof theirs);
        return theirs;
    };
    const auto result = use(of_lane, lane);
    warps[warp].wait();
    return result;
}
template <class T> static inline T __shfl_sync(unsigned, T value, int from) {
    return exchange(value, [&](auto of_lane, int) { return of_lane(from % 32); });
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return exchange(value, [&](auto of_lane, int lane) { return of_lane(lane ^ mask); });
}
template <class T> static inline T __shfl_up_sync(unsigned, T value, int step) {
    return exchange(value, [&](auto of_lane, int lane) { return of_lane(lane >= step ? lane - step : lane); });
}
template <class F> static inline unsigned reduce(unsigned value, F join) {
    return exchange(value, [&](auto of_lane, int) {
        unsigned result = of_lane(0);
        for (int i = 1; i < 32; ++i) result = join(result, of_lane(i));
        return result;
    });
}
static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return reduce(value, [](unsigned a, unsigned b) { return a + b; });
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return reduce(value, [](unsigned a, unsigned b) { return max(a, b); });
}

// arithmetic and memory

static inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
template <class T> static inline T __ldg(const T* place) { return *place; }
template <class T> static inline T __ldcg(const T* place) { return *place; }
template <class T> static inline T atomicAdd(T* place, T value) { const T old = *place; *place += value; return old; }
static inline unsigned atomicOr(unsigned* place, unsigned value) { const unsigned old = *place; *place |= value; return old; }

// launches

static void** kernel_args;

template <class... A> struct Kernel {
    static inline void (*function)(A...);

    template <size_t... I> static void call(std::index_sequence<I...>) {
        function(*static_cast<std::remove_reference_t<A>*>(kernel_args[I])...);
    }
    static void run_once() { call(std::index_sequence_for<A...>()); }
};

template <class... A> static void launch(void (*kernel)(A...), const int* grid, void** args) {
    Kernel<A...>::function = kernel;
    thread_body = Kernel<A...>::run_once;
    kernel_args = args;
    gridDim = {grid[0], grid[1], grid[2]};
    for (int warp = 0; warp < THREADS / 32; ++warp) warps[warp] = {warp * 32, 32};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) {
                std::memset(emulated_shared, 0xff, sizeof emulated_shared);
                run_block();
            }
}
