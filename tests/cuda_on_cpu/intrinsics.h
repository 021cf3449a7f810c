// The CPU's counterpart of csattn/cuda/intrinsics.cuh. Asynchronous copies complete when they are issued.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// arithmetic

static inline float exp2_approx(float x) {
    const float value = std::exp2(x);
    return value < 1.17549435e-38f ? 0.0f : value;
}
static inline float relu(float x) { return x > 0 || x != x ? x : 0; }

static inline float half_as_float(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}
static inline u32 pack_bf16(float low, float high) {
    auto rounded = [](float x) {
        const u32 bits = __float_as_uint(x);
        return bits + 0x7fff + (bits >> 16 & 1) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}
static inline u32 fma_bf16(u32 a, u32 b, u32 c) {
    auto low = [](u32 pair) { return __uint_as_float(pair << 16); };
    auto high = [](u32 pair) { return __uint_as_float(pair & 0xffff0000u); };
    return pack_bf16(std::fma(low(a), low(b), low(c)), std::fma(high(a), high(b), high(c)));
}
static inline u32 and_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }
static inline u32 keep_in_register(u32 x) { return x; }

// A lane's registers of the operands of an mma.
struct Factors {
    u32 a[4], b[2];
};

// Call use(i, a's register, b's register) for each of the lane's four results i and each pair of registers that hold the
// same elements of its row of a and its column of b.
template <class Use> static inline void for_each_result(const u32 (&a)[4], u32 b0, u32 b1, Use use) {
    exchange(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of_lane, int lane) {
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 4; ++k)
                for (int half = 0; half < 2; ++half) {
                    const Factors row = of_lane(lane / 4 * 4 + k), column = of_lane((lane % 4 * 2 + i % 2) * 4 + k);
                    use(i, row.a[i / 2 + 2 * half], column.b[half]);
                }
        return 0;
    });
}
static inline void multiply_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    for_each_result(a, b0, b1, [&](int i, u32 x, u32 y) {
        for (int byte = 0; byte < 32; byte += 8) d[i] += static_cast<signed char>(x >> byte) * static_cast<int>(y >> byte & 0xff);
    });
}
static inline void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for_each_result(a, b0, b1, [&](int i, u32 x, u32 y) {
        for (int half = 0; half < 2; ++half)
            d[i] += __uint_as_float(x >> 16 * half << 16) * __uint_as_float(y >> 16 * half << 16);
    });
}

// programmatic dependent launch: kernels run one after the other, so these do nothing

static inline void wait_for_earlier_kernels() {}
static inline void let_next_kernel_start() {}
static inline void wait_then_let_next_start(u32 known = 0) {}

// global memory

template <class T> static inline T issue_load(const T* from) { return *from; }
static inline void store_relaxed(float* to, float4 x) { std::memcpy(to, &x, sizeof x); }
static inline float4 load_relaxed(const float* from) {
    pause_thread();  // another thread may be about to store it
    float4 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline void store_relaxed(u32* to, u32 value) { *to = value; }
static inline uint4 load_relaxed(const u32* from) {
    pause_thread();  // another block may be about to store it
    return {from[0], from[1], from[2], from[3]};
}
static inline void store_relaxed(u64* to, u64 value) { *to = value; }
static inline u64 load_relaxed(const u64* from) {
    if (!*from) pause_thread();  // another thread of the block may be about to write it
    return *from;
}

static inline void prefetch_l2(const void*) {}
static inline void prefetch_l2(const void* from, u32 bytes) {
    volatile char last = static_cast<const char*>(from)[bytes - 1];  // faults if the range is not mapped
}

static inline uint4 read_once(u64 address) { return *reinterpret_cast<const uint4*>(address); }
static inline void write_once(u64 address, uint4 x) { *reinterpret_cast<uint4*>(address) = x; }

// copies into shared memory

static inline u32 shared_address(const void* place) { return __cvta_generic_to_shared(place); }

static inline void start_copy(void* to, const void* from) { std::memcpy(to, from, 16); }
static inline void start_copy(u32 to, const void* from, int count) {
    char* place = static_cast<char*>(__cvta_shared_to_generic(to));
    std::memset(place, 0, 16);
    if (count > 0) std::memcpy(place, from, count);
}
static inline void start_copy_of_word(void* to, const void* from) { std::memcpy(to, from, 4); }
static inline void start_copy_through_l1(u32 to, u64 from, int count) {
    start_copy(to, reinterpret_cast<const void*>(from), count);
}
static inline void end_copy_group() {}
template <int LEFT> static inline void wait_for_copies() {}
static inline void wait_for_all_copies() {}

// mbarriers

struct BarrierState {
    u16 count, pending;
    u32 missing_bytes : 31, phase : 1;
};
static_assert(sizeof(BarrierState) == 8, "takes the place of one");
static inline BarrierState& state_of(u64* barrier) { return *reinterpret_cast<BarrierState*>(barrier); }
static inline void end_phase_if_all_is_here(BarrierState& state) {
    if (state.pending || state.missing_bytes) return;
    state.pending = state.count;
    state.phase = !state.phase;
}
static inline void init_barrier(u64* barrier, u32 count) {
    state_of(barrier) = {static_cast<u16>(count), static_cast<u16>(count), 0, 0};
}
static inline void fence_barrier_init() {}
static inline void arrive_expecting(u64* barrier, u32 bytes) {
    state_of(barrier).missing_bytes += bytes;
    --state_of(barrier).pending;
    end_phase_if_all_is_here(state_of(barrier));
}
static inline u64* barrier_at(u32 place) { return static_cast<u64*>(__cvta_shared_to_generic(place)); }
static inline void arrive_expecting(u32 barrier, u32 bytes) { arrive_expecting(barrier_at(barrier), bytes); }
static inline void arrive(u64* barrier) { arrive_expecting(barrier, 0); }
static inline void arrive_when_copied(u64* barrier) { arrive(barrier); }
static inline void wait_for(u64* barrier, u32 parity) {
    while (state_of(barrier).phase == parity) pause_thread();
}
static inline void wait_for(u32 barrier, u32 parity) { wait_for(barrier_at(barrier), parity); }
static inline void bytes_arrive(u64* barrier, u32 bytes) {
    state_of(barrier).missing_bytes -= bytes;
    end_phase_if_all_is_here(state_of(barrier));
}
static inline void load_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
    std::memcpy(to, from, bytes);
    bytes_arrive(barrier, bytes);
}
static inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    load_bytes(__cvta_shared_to_generic(to), from, bytes, barrier_at(barrier));
}
constexpr u32 ARRIVALS_PER_LOAD = 1;
template <class To, class From>
static inline void load_by_warp(u32 count, u32 bytes, u32 barrier, const To& to, const From& from) {
    const u32 lane = threadIdx.x % 32;
    if (lane == 0) arrive_expecting(barrier, count * bytes);
    for (u32 i = lane; i < count; i += 32) load_bytes(to(i), from(i), bytes, barrier);
}

// clusters; `in_block` is the emulator's

static thread_local int rounds[THREADS];  // the barrier's round in which each thread arrived
static inline void cluster_sync() { wait_for_cluster(arrive_at_cluster()); }
static inline void done_reading() { rounds[threadIdx.x] = arrive_at_cluster(); }
static inline void wait_for_readers() { wait_for_cluster(rounds[threadIdx.x]); }

static inline u32 load_in_block(const void* here, u32 rank) {
    return *in_block(static_cast<const u32*>(here), rank);
}
static inline uint4 load_four_in_block(const void* here, u32 rank) {
    return *in_block(static_cast<const uint4*>(here), rank);
}
static inline void store_in_block(void* here, u32 rank, u32 value) {
    *in_block(static_cast<u32*>(here), rank) = value;
}

template <u32 NUM_BLOCKS> struct Cluster {
    u32 rank;

    Cluster(u64&, u32 rank_) : rank(rank_) { sync(); }
    void sync() { cluster_sync(); }
};
