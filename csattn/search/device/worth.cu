// What each key is worth to the group, as bits that order keys: the sum of its shares in the query rows' softmaxes, times
// 2 ** HEADROOM (csattn.search.worth has the same scale), or for a single row one more than its score. 0: may not be chosen.

constexpr float HEADROOM = 94;
constexpr float LEAST_EXPONENT = HEADROOM - 216;  // of reference.LEAST_SHARE
constexpr u32 NUM_BINS = 2048;

// Worths from `low` to `last`, counted in NUM_BINS bins of 2 ** shift; the last bin also has what does not fit below it.
struct Range {
    u32 low, last, shift;

    __device__ __forceinline__ bool holds(u32 worth) const { return worth >= low && worth <= last; }
    __device__ __forceinline__ u32 bin(u32 worth) const { return min((worth - low) >> shift, NUM_BINS - 1); }
};

// The worths of all keys sum up to the group's size, so the top_k-th is at most group_size / top_k: 32 octaves below that
// are looked at first, in bins of 1/64 octave.
__device__ __forceinline__ Range first_range(int top_k) {
    const u32 largest = __float_as_uint(exp2f(HEADROOM) * (1.01f * GROUP_SIZE) / top_k);
    return {((largest >> 17) - (NUM_BINS - 2)) << 17, 0xffffffffu, 17};
}

// Largest sum and softmax total of query row g over all blocks, from every tile and every block in fixed order.
struct Statistics {
    u32 tops[CLUSTER][GROUP_SIZE];
    float totals[CLUSTER][GROUP_SIZE];
};
