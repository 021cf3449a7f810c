// What the blocks that decide about one KV head share, and which of its slots go when rows want them.
//
// An age is a byte: 0 no slot (padding), 1 used by this step, n: n - 1 steps ago, 254 or longer, 255 never used.

constexpr int kWarps = THREADS / 32;
constexpr int kAges = 256;
constexpr int kNoSlot = 0, kUsedNow = 1, kOldest = 254, kNeverUsed = 255;
constexpr int kInFlight = 4;
constexpr int kClaim = -2147483647 - 1;  // kClaim + entry stands in slot_of_key while an entry's row awaits a slot

struct Tally {
    unsigned total, below;  // over all blocks of the cluster, over those of lower rank
};

struct Shared {
    int rows[MAX_BATCH], num_rows;  // of the batch that continue this context
    unsigned num_of_age[kAges];
    int num_takers;  // entries of this block whose rows want slots
    int num_found, num_missing, num_served;  // of this block's entries, for the statistics
    int takers_of[kWarps], older_of[kWarps], equal_of[kWarps];
    Tally of_warp[kAges / 32];
    int threshold, equal_quota;    // replaced: every slot older than the threshold, and so many of that age
    int older_below, equal_below;  // such slots in blocks of lower rank
};

// What a block works on: one KV head of one context in one layer, and the batch that selects from it.
struct Head {
    int* slot_of_key;  // [CAPACITY], -1: not on the device
    int* key_of_slot;  // [NUM_SLOTS], -1: empty
    uint4* ages;       // this block's [BLOCK_SLOTS] bytes
    const int* kv_indices;
    const int* valid_len;
    int* ids;
    int* to_rows;    // [NUM_SLOTS] of this list: the slots that are replaced
    int* from_rows;  // [NUM_SLOTS] of this list: the keys that move there
    int kv_head;
    bool several;     // lists are more than one: they may want the same row
    int begin, end;   // this warp's entries: places in the lists of all rows of the context, one after the other
    unsigned rank, warp, lane;
};

// Over the warps before this one. Called by whole warps, after a barrier.
__device__ __forceinline__ int sum_before_warp(const int* per_warp, const Head& h) {
    return __reduce_add_sync(kAll, h.lane < h.warp ? per_warp[h.lane] : 0);
}
__device__ __forceinline__ int lanes_before(unsigned ballot, const Head& h) { return __popc(ballot & ((1u << h.lane) - 1)); }

// Four ages, a step later.
__device__ __forceinline__ unsigned older(unsigned ages) {
    const unsigned next = __vminu4(__vaddus4(ages, 0x01010101u), 0x01010101u * kOldest);
    const unsigned fixed = __vcmpeq4(ages, 0x01010101u * kNoSlot) | __vcmpeq4(ages, 0x01010101u * kNeverUsed);
    return (ages & fixed) | (next & ~fixed);
}
__device__ void age_slots(const Head& h, uint4* ages) {
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS) {
        const uint4 four = h.ages[i];
        ages[i] = make_uint4(older(four.x), older(four.y), older(four.z), older(four.w));
    }
}

constexpr int kWarpSlots = BLOCK_SLOTS / kWarps;

__device__ void count_ages(const Head& h, Shared& s, const unsigned char* ages) {
    for (int i = h.warp * kWarpSlots + h.lane; i < (h.warp + 1) * kWarpSlots; i += 32) {
        const int age = ages[i];
        const unsigned equal = __match_any_sync(kAll, age);
        if (age > kUsedNow && h.lane == __ffs(equal) - 1) atomicAdd(&s.num_of_age[age], __popc(equal));
    }
}

// Which slots go when that many rows want one. Returns how many rows get one: all, if so many slots are unused.
__device__ int find_threshold(const Head& h, Shared& s, unsigned num_wanted) {
    const int age = kAges - 1 - (int)threadIdx.x;  // the oldest first
    Tally here = {0, 0};
    if (age > kUsedNow)
        for (unsigned rank = 0; rank < CLUSTER; ++rank) {
            const unsigned num = load_in_block(&s.num_of_age[age], rank);
            here.total += num;
            here.below += rank < h.rank ? num : 0;
        }
    Tally sum = here;
    for (unsigned step = 1; step < 32; step *= 2) {
        const Tally before = {__shfl_up_sync(kAll, sum.total, step), __shfl_up_sync(kAll, sum.below, step)};
        if (h.lane >= step) sum = {sum.total + before.total, sum.below + before.below};
    }
    if (threadIdx.x < kAges && h.lane == 31) s.of_warp[h.warp] = sum;
    __syncthreads();
    Tally older = {sum.total - here.total, sum.below - here.below};
    unsigned num_unused = 0;
    for (unsigned warp = 0; warp < kAges / 32; ++warp) {
        const Tally of_warp = s.of_warp[warp];
        if (warp < h.warp) older = {older.total + of_warp.total, older.below + of_warp.below};
        num_unused += of_warp.total;
    }
    const unsigned num_moved = min(num_wanted, num_unused);
    if (age > kUsedNow && older.total < num_moved && older.total + here.total >= num_moved) {
        s.threshold = age;
        s.equal_quota = num_moved - older.total;
        s.older_below = older.below;
        s.equal_below = here.below;
    }
    __syncthreads();
    return num_moved;
}

// Empties the slots that go and lists them by number.
__device__ void replace_slots(const Head& h, Shared& s, unsigned char* ages) {
    const int begin = h.warp * kWarpSlots, end = begin + kWarpSlots;
    int num_older = 0, num_equal = 0;
    for (int i = begin + h.lane; i < end; i += 32) {
        num_older += ages[i] > s.threshold;
        num_equal += ages[i] == s.threshold;
    }
    s.older_of[h.warp] = __reduce_add_sync(kAll, num_older);
    s.equal_of[h.warp] = __reduce_add_sync(kAll, num_equal);
    __syncthreads();
    num_older = s.older_below + sum_before_warp(s.older_of, h);
    num_equal = s.equal_below + sum_before_warp(s.equal_of, h);
    for (int i = begin + h.lane; i < end; i += 32) {
        const bool is_older = ages[i] > s.threshold, is_equal = ages[i] == s.threshold;
        const unsigned older = __ballot_sync(kAll, is_older), equal = __ballot_sync(kAll, is_equal);
        const int equal_before = num_equal + lanes_before(equal, h);
        if (is_older || (is_equal && equal_before < s.equal_quota)) {
            const int slot = h.rank * BLOCK_SLOTS + i, old_key = h.key_of_slot[slot];
            h.to_rows[num_older + lanes_before(older, h) + min(equal_before, s.equal_quota)] = slot;
            if (old_key >= 0) h.slot_of_key[old_key] = -1;
            ages[i] = kUsedNow;
        }
        num_older += __popc(older);
        num_equal += __popc(equal);
    }
}
