// Where an index head has one query, a key's worth is its sum and 1: it fits 16 bits, eight keys lie in 16 bytes.
//
// Then no list of candidates is needed: a bin has few different worths, which are counted one by one, by each block for its
// part of the keys. From the counts of all parts a block knows the K-th worth itself, how many keys of just that worth are
// wanted, and how many keys of earlier parts come before its own.

constexpr int SUM_KEYS = 8;  // sums are read and written eight at a time
constexpr int LOADS = 4;     // that many by every thread: one bit for each of its keys makes 32

// For each key, in order, its number among the eight and its worth.
template <typename Use> __device__ __forceinline__ void for_each_sum(uint4 sums, Use use) {
    const u32 words[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        use(2 * w, words[w] & 0xffffu);
        use(2 * w + 1, words[w] >> 16);
    }
}

constexpr int ROUND = LOADS * THREADS;  // what a block reads at a time, in units of SUM_KEYS

// What a thread loads of a round: `each` units, 32 apart, so that a warp's lie side by side. Nothing of what lies beyond the
// part. Whatever comes from earlier launches lies in the L2 cache; a first-level cache may hold what it was before.
struct Loaded {
    uint4 sums[LOADS];
    int each;

    __device__ __forceinline__ Loaded(const uint4* of_part, int from, int num_units)
        : each(min(LOADS, (num_units - from + THREADS - 1) / THREADS)) {
        const int first = from + static_cast<int>(threadIdx.x) / 32 * 32 * each + static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            sums[i] = i < each && first + i * 32 < num_units ? __ldcg(of_part + first + i * 32) : make_uint4(0, 0, 0, 0);
    }
};

// The same in shared memory, from where each thread reads `each` neighbouring units: any of its sums, in the order of the
// keys. Units change places so that neither way meets a bank twice.
struct Tray {
    uint4* of_warp;  // [32 * LOADS]
    int each;

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ static int place(int unit) { return unit ^ (unit >> 3 & 7); }

    __device__ __forceinline__ Tray(uint4* shared, const Loaded& loaded)
        : of_warp(shared + threadIdx.x / 32 * (32 * LOADS)), each(loaded.each) {
        __syncwarp();  // what it held before has been read
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i < each) of_warp[place(i * 32 + lane())] = loaded.sums[i];
        __syncwarp();
    }

    // The thread's first unit, from the round's.
    __device__ __forceinline__ int first() const { return (static_cast<int>(threadIdx.x) / 32 * 32 + lane()) * each; }
    __device__ __forceinline__ uint4 unit(int i) const { return of_warp[place(lane() * each + i)]; }
    __device__ __forceinline__ u32 word(int w) const {  // of two sums
        return reinterpret_cast<const u32*>(of_warp + place(lane() * each + w / 4))[w % 4];
    }
    __device__ __forceinline__ u32 worth(int key) const { return word(key / 2) >> key % 2 * 16 & 0xffffu; }
};

// The same four at a time, with 32 bits each.
struct WidenedSums {
    const uint2* sums;

    __device__ __forceinline__ uint4 operator[](int unit) const {
        const uint2 four = sums[unit];
        return make_uint4(four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16);
    }
};
