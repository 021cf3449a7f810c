// Runs this project's kernels on a CPU. The threads of a thread block are fibers that switch at every barrier and every
// warp exchange. Blocks run one after the other; those of a cluster take turns. All thread-local variables of this
// library, shared memory included, are the state of one block: a switch to another block copies them out and in.
//
// The including file defines THREADS, SHARED_BYTES, and CLUSTER for kernels with clusters, or BLOCKS where so many
// neighbouring blocks wait for each other.

#include <link.h>

#include <cstdint>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // special functions in <cmath>, which would take a tenth of a kernel's compile time
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __restrict__
#define __shared__ static thread_local
#if defined(BLOCKS)
#define CLUSTER BLOCKS
#elif !defined(CLUSTER)
#define CLUSTER 1
#endif

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

struct dim3 { int x, y, z; };
struct ushort4 { unsigned short x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static thread_local dim3 threadIdx, blockIdx;
static dim3 gridDim;
static thread_local uint4 emulated_shared[SHARED_BYTES / 16 + 1];
static inline size_t __cvta_generic_to_shared(const void* place) {
    return static_cast<const char*>(place) - reinterpret_cast<const char*>(emulated_shared);
}
// Kernels keep shared addresses in 32 bits, signed here: a kernel's static shared memory may precede the dynamic one.
static inline void* __cvta_shared_to_generic(size_t place) {
    return reinterpret_cast<char*>(emulated_shared) + static_cast<int>(place);
}

#include "fibers.h"

// barriers: as on the device, a thread that has ended counts as arrived

struct Barrier {
    int size, arrived = 0, round = 0;

    void wait(int num_ended) {  // num_ended: threads of this barrier that have ended
        const int mine = round;
        ++arrived;
        open_if_all_are_here(num_ended);
        if (round == mine) pause_until_changed(&round, mine);
    }
    void open_if_all_are_here(int num_ended) {
        if (!arrived || arrived + num_ended < size) return;
        arrived = 0;
        ++round;
    }
};
static thread_local Barrier whole_block{THREADS};
static thread_local Barrier warps[THREADS / 32];
static void thread_has_ended() {
    whole_block.open_if_all_are_here(num_ended);
    warps[threadIdx.x / 32].open_if_all_are_here(num_ended_of_warp[threadIdx.x / 32]);
}
static inline void __syncthreads() { whole_block.wait(num_ended); }
static inline int __syncthreads_or(int value) {
    static thread_local bool any;
    __syncthreads();
    any = false;
    __syncthreads();
    any |= value != 0;
    __syncthreads();
    return any;
}
static inline int __syncthreads_count(int value) {
    static thread_local int count;
    __syncthreads();
    count = 0;
    __syncthreads();
    count += value != 0;
    __syncthreads();
    return count;
}
static inline void __syncwarp() { warps[threadIdx.x / 32].wait(num_ended_of_warp[threadIdx.x / 32]); }

// The cluster's barrier, split into arrive and wait. All threads take part.
static int cluster_arrived, cluster_round;
static inline int arrive_at_cluster() {
    const int round = cluster_round;
    if (++cluster_arrived == CLUSTER * THREADS) {
        cluster_arrived = 0;
        ++cluster_round;
    }
    return round;
}
static inline void wait_for_cluster(int round) {
    if (cluster_round == round) pause_until_changed(&cluster_round, round);
}

// The library's thread-local memory, and a copy of it for each paused block of a cluster. The loader has a reserve for small
// thread-local memory, and does not tell where in it a library's is; so this must be larger.
static thread_local char anchor[1 << 14];
static struct {
    char* here;
    const char* at_first;
    size_t size, size_at_first;  // zeros follow the initial image
} of_block;
static char* copies[CLUSTER];
static int running;  // rank of the running block

// Distributed shared memory: the address of `here` in the block of that rank.
template <class T> static inline T* in_block(const T* here, int rank) {
    char* base = rank == running ? of_block.here : copies[rank];
    return reinterpret_cast<T*>(base + (reinterpret_cast<const char*>(here) - of_block.here));
}
static int find_what_is_of_a_block(dl_phdr_info* library, size_t, void*) {
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& part = library->dlpi_phdr[i];
        char* here = static_cast<char*>(library->dlpi_tls_data);
        if (part.p_type != PT_TLS || !here || anchor < here || here + part.p_memsz <= anchor) continue;
        of_block = {here, reinterpret_cast<const char*>(library->dlpi_addr + part.p_vaddr), part.p_memsz, part.p_filesz};
        return 1;
    }
    return 0;
}
static void begin_block(dim3 place);
static void run_cluster(dim3 first) {
    bool is_left[CLUSTER];
    for (running = 0; running < CLUSTER; ++running) {
        begin_block({first.x + running, first.y, first.z});
        is_left[running] = true;
        if (CLUSTER == 1) continue;
        if (!copies[running]) copies[running] = static_cast<char*>(std::malloc(of_block.size));
        std::memcpy(copies[running], of_block.here, of_block.size);
    }
    for (bool is_any_left = true; is_any_left;) {
        is_any_left = false;
        for (running = 0; running < CLUSTER; ++running) {
            if (!is_left[running]) continue;
            if (CLUSTER > 1) std::memcpy(of_block.here, copies[running], of_block.size);
            is_any_left |= is_left[running] = run_threads();
            if (CLUSTER > 1) std::memcpy(copies[running], of_block.here, of_block.size);
        }
    }
}

// Exchanges among all 32 lanes of a warp. They are double buffered, so that none has to wait until all lanes have read.

static thread_local uint64_t exchanged[2][THREADS / 32][32][3];
static thread_local bool turn[THREADS];
template <class T, class F> static inline auto exchange(T value, F use) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& values = exchanged[turn[threadIdx.x] ^= true][warp];
    static_assert(sizeof value <= sizeof values[lane], "there is room for a value");
    std::memcpy(&values[lane], &value, sizeof value);
    __syncwarp();
    auto of_lane = [&](int other) {
        T theirs;
        std::memcpy(&theirs, &values[other], sizeof theirs);
        return theirs;
    };
    return use(of_lane, lane);
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
    static thread_local unsigned joined[2][THREADS / 32];
    const int warp = threadIdx.x / 32;
    unsigned& sum = joined[turn[threadIdx.x] ^= true][warp];
    sum = warps[warp].arrived ? join(sum, value) : value;
    __syncwarp();
    return sum;
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
static inline int __double2hiint(double value) { uint64_t bits; std::memcpy(&bits, &value, 8); return bits >> 32; }
static inline long long __double_as_longlong(double value) { long long bits; std::memcpy(&bits, &value, 8); return bits; }
static inline float __int_as_float(unsigned bits) { return __uint_as_float(bits); }
static inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
static inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += static_cast<signed char>(a >> shift) * static_cast<signed char>(b >> shift);
    return sum;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }

// The standard normal distribution function, its inverse, and erfcx: exp(x * x) * erfc(x) for x >= 0.
static inline float normcdff(float x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }
static inline float normcdfinvf(float share) {
    if (share == 0) return -INFINITY;
    double low = -40, high = 40;
    for (int i = 0; i < 100; ++i) {
        const double middle = (low + high) / 2;
        (std::erfc(-middle / std::sqrt(2.0)) / 2 < share ? low : high) = middle;
    }
    return low;
}
static inline float erfcxf(float x) {
    if (x < 5) return std::exp(static_cast<double>(x) * x) * std::erfc(static_cast<double>(x));
    double fraction = x;
    for (int k = 40; k > 0; --k) fraction = x + k / 2.0 / fraction;
    return 1 / (fraction * std::sqrt(M_PI));
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static inline unsigned __ballot_sync(unsigned, bool value) {
    return reduce(value ? 1u << threadIdx.x % 32 : 0, [](unsigned a, unsigned b) { return a | b; });
}
static inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
static inline void __nanosleep(unsigned) { pause_thread(); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T> static inline T __ldg(const T* place) { return *place; }
template <class T> static inline T __ldcs(const T* place) { return *place; }
template <class T> static inline T __ldcg(const T* place) { return *place; }
template <class T> static inline T atomicAdd(T* place, std::common_type_t<T> value) {
    return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST);
}
template <class T> static inline T atomicOr(T* place, std::common_type_t<T> value) {
    return __atomic_fetch_or(place, value, __ATOMIC_SEQ_CST);
}
template <class T, class F> static inline T exchange_if(T* place, F wanted) {
    T old = __atomic_load_n(place, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(place, &old, wanted(old), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}
template <class T> static inline T atomicMin(T* place, std::common_type_t<T> value) {
    return exchange_if(place, [=](T old) { return value < old ? value : old; });
}
template <class T> static inline T atomicMax(T* place, std::common_type_t<T> value) {
    return exchange_if(place, [=](T old) { return value > old ? value : old; });
}
template <class T> static inline T atomicExch(T* place, std::common_type_t<T> value) {
    return __atomic_exchange_n(place, value, __ATOMIC_SEQ_CST);
}
template <class T> static inline T atomicCAS(T* place, std::common_type_t<T> compare, std::common_type_t<T> value) {
    return exchange_if(place, [=](T old) { return old == compare ? value : old; });
}

// launches

static void** kernel_args;

template <class... A> struct Kernel {
    static inline void (*function)(A...);

    template <size_t... I> static void call(std::index_sequence<I...>) {
        function(*static_cast<std::remove_reference_t<A>*>(kernel_args[I])...);
    }
    static void run_once() { call(std::index_sequence_for<A...>()); }
};

static Fiber* fibers_of_rank;  // [CLUSTER * THREADS]

static void begin_block(dim3 place) {
    std::memcpy(of_block.here, of_block.at_first, of_block.size_at_first);
    std::memset(of_block.here + of_block.size_at_first, 0, of_block.size - of_block.size_at_first);
    std::memset(emulated_shared, 0xff, sizeof emulated_shared);
    blockIdx = place;
    fibers = fibers_of_rank + running * THREADS;
    for (Barrier& warp : warps) warp = {32};
    for (int t = 0; t < THREADS; ++t) make_fiber(fibers[t].state, fibers[t].stack);
}

template <class... A> static void launch(void (*kernel)(A...), const int* grid, void** args, void* memory) {
    Kernel<A...>::function = kernel;
    thread_body = Kernel<A...>::run_once;
    kernel_args = args;
    gridDim = {grid[0], grid[1], grid[2]};
    fibers_of_rank = static_cast<Fiber*>(memory);
    anchor[0] = 0;  // the first access allocates thread-local memory
    if (!dl_iterate_phdr(find_what_is_of_a_block, nullptr)) std::abort();
    for (int z = 0; z < grid[2]; ++z)
        for (int y = 0; y < grid[1]; ++y)
            for (int x = 0; x < grid[0]; x += CLUSTER) run_cluster({x, y, z});
}
