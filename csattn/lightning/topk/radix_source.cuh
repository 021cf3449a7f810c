// A warp's scores of a row, for repeated passes over them.
// Compiled for VECTORS (of four scores) that a lane keeps.
#pragma once

#include "entries.cuh"

constexpr int VECTOR_SCORES = 128;  // per warp
constexpr int AT_ONCE = 4;          // vectors that a lane loads together, of those that it does not keep
constexpr int LIST_LEN = 128;       // per warp
using Kept = uint4[VECTORS];        // the keys of a lane's first scores

// Keys from low to low + width, in bins of 2 ** shift.
struct KeyRange {
    u32 low, width, shift;

    __device__ __forceinline__ KeyRange(u32 low_, u32 width_)
        : low(low_), width(width_), shift(width_ < BINS ? 0 : 21 - __clz(width_)) {}
    __device__ __forceinline__ bool holds(u32 key) const { return key - low <= width; }
    __device__ __forceinline__ bool is_below(u32 key) const { return key > low + width; }
    __device__ __forceinline__ u32 first_of(u32 bin) const { return low + (bin << shift); }
    __device__ __forceinline__ KeyRange of_bin(u32 bin) const {
        return KeyRange(first_of(bin), min((1u << shift) - 1, low + width - first_of(bin)));
    }
};
static_assert(BINS == 1 << 11, "a width of n bits leaves bins of n - 11 bits");
__device__ __forceinline__ KeyRange all_keys() { return KeyRange(1, 0xfffffffeu); }

// A warp's run of scores. Missing scores have key 0.
struct Run {
    const float* scores;
    int first, end;
    bool aligned;

    __device__ __forceinline__ static u32 key_of(float score) { return max(order_of(score), 1u); }  // NaN counts
    __device__ __forceinline__ bool has(int vector) const { return first + vector * VECTOR_SCORES < end; }
    // The index of this lane's first score of a vector.
    __device__ __forceinline__ int index(int vector) const {
        return first + vector * VECTOR_SCORES + static_cast<int>(threadIdx.x) % 32 * 4;
    }
    __device__ __forceinline__ uint4 load(int vector) const {
        const int at = index(vector);
        if (aligned && at + 4 <= end) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(scores + at));
            return make_uint4(key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w));
        }
        auto key = [&](int i) { return at + i < end ? key_of(scores[at + i]) : 0; };
        return make_uint4(key(0), key(1), key(2), key(3));
    }
};

// What a warp goes through: its run, or the scores that it has listed of it.
struct Source {
    Run run;
    const u64* list;
    int list_len;  // -1: there is no list
};

// Calls use(vector, keys, indices) for all vectors of the source, in order; called by whole warps.
template <class Use>
__device__ __forceinline__ void for_each(const Source& source, const Kept& kept, const Use& use) {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < source.list_len; first += VECTOR_SCORES) {
        const int at = first + lane * 4;
        auto entry = [&](int i) { return at + i < source.list_len ? source.list[at + i] : 0; };
        const u64 a = entry(0), b = entry(1), c = entry(2), d = entry(3);
        const uint4 indices = make_uint4(index_of(a), index_of(b), index_of(c), index_of(d));
        use(0, make_uint4(a >> 32, b >> 32, c >> 32, d >> 32), indices);
    }
    if (source.list_len >= 0) return;
    const Run& run = source.run;
    auto use_vector = [&](int vector, uint4 keys) {
        const u32 at = run.index(vector);
        use(vector, keys, make_uint4(at, at + 1, at + 2, at + 3));
    };
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        if (run.has(v)) use_vector(v, kept[v]);
    for (int v = VECTORS; run.has(v); v += AT_ONCE) {
        uint4 some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) some[i] = run.load(v + i);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (run.has(v + i)) use_vector(v + i, some[i]);
    }
}
