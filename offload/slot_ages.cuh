// What the blocks that decide about one KV head share, and which of its slots go when rows want them.
//
// An age is a byte: 0 no slot (padding), 1 used by this step, n: n - 1 steps ago, 126 or longer, 127 never used.

constexpr int kWarps = THREADS / 32;
constexpr int kAges = 128;
constexpr int kNoSlot = 0, kUsedNow = 1, kOldest = 126, kNeverUsed = 127;
constexpr unsigned kEach = 0x01010101u;  // of four bytes

// What a thread holds of its warp's entries and slots: every 32nd. Loops over them go by groups of kInFlight rounds,
// whose loads are under way at the same time. They stay in registers as long as they are few.
constexpr int kInFlight = 4;
constexpr int kFewRounds = 16;
constexpr int kWarpSlots = BLOCK_SLOTS / kWarps;
constexpr int kSlotRounds = kWarpSlots / 32;
constexpr int kUnrolledSlots = kSlotRounds <= kFewRounds ? kSlotRounds : kInFlight;

// What a block tells the others.
struct alignas(16) Published {
    unsigned num_of_age[kAges / 2];  // its slots, two 16-bit counts in a word
    int num_takers;                  // its entries whose rows want slots
};

struct Shared {
    int rows[MAX_BATCH], num_rows;  // of the batch that continue this context
    Published here;
    uint4 num_of_age[CLUSTER][kAges / 8];  // of all blocks
    int takers[CLUSTER], older[CLUSTER], equal[CLUSTER], first_replaced[CLUSTER];
    int takers_of[kWarps], older_of[kWarps], equal_of[kWarps];  // of a warp's entries, of its slots
    unsigned of_warp[kAges / 32];
    int threshold, equal_quota;  // replaced: every slot older than the threshold, and so many of that age
    int num_found, num_missing, num_served;  // of this block's entries, for the statistics
};

// The block's part of the dynamic shared memory.
struct Slots {
    unsigned char ages[BLOCK_SLOTS];
    unsigned short replaced[BLOCK_SLOTS];        // by number, counted from the block's first slot
    unsigned used[CLUSTER * BLOCK_SLOTS / 32];  // a bit for every slot of the head that this block's entries use
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
    bool several;    // lists are more than one: they may want the same row
    int begin, end;  // this warp's entries: places in the lists of all rows of the context, one after the other
    unsigned rank, warp, lane;
};

// Over the warps before this one. Called by whole warps, after a barrier.
__device__ __forceinline__ int sum_before_warp(const int* per_warp, const Head& h) {
    return __reduce_add_sync(kAll, h.lane < h.warp ? per_warp[h.lane] : 0);
}
__device__ __forceinline__ int lanes_before(unsigned ballot, const Head& h) {
    return __popc(ballot & ((1u << h.lane) - 1));
}

// Starts to load what this block must know of its slots; ages are there after `cp.async.wait_all` and a barrier.
__device__ __forceinline__ void load_slots(const Head& h, Slots& slots, int (&old_key)[kSlotRounds]) {
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(slots.ages + 16 * i)),
                     "l"(h.ages + i)
                     : "memory");
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round) {
        const int slot = h.rank * BLOCK_SLOTS + h.warp * kWarpSlots + 32 * round + h.lane;
        old_key[round] = slot < NUM_SLOTS ? h.key_of_slot[slot] : -1;
    }
}

// Four ages, a step later.
__device__ __forceinline__ unsigned older(unsigned ages) {
    const unsigned fixed = __vcmpeq4(ages, kEach * kNoSlot) | __vcmpeq4(ages, kEach * kNeverUsed);
    return (ages & fixed) | (__vminu4(ages + kEach, kEach * kOldest) & ~fixed);
}

// A step later all ages have grown, but for slots that some block's entries use. Counts the ages of the others.
__device__ __forceinline__ void age_slots(const Head& h, Shared& s, Slots& slots) {
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 4; i += THREADS) {
        const unsigned first = h.rank * BLOCK_SLOTS + 4 * i;
        unsigned used[CLUSTER], by_any = 0;
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) used[rank] = load_in_block(&slots.used[first / 32], rank);
        unsigned ages = older(((const unsigned*)slots.ages)[i]);
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) by_any |= used[rank];
        const unsigned bits = by_any >> first % 32 & 15;
        const unsigned mask = (bits & 1 | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21) * 255;
        ages = (ages & ~mask) | (kEach * kUsedNow & mask);
        ((unsigned*)slots.ages)[i] = ages;
#pragma unroll
        for (int j = 0; j < 4; ++j, ages >>= 8) {
            const unsigned age = ages & 255;
            if (age > kUsedNow) atomicAdd(&s.here.num_of_age[age / 2], 1u << 16 * (age % 2));
        }
    }
}

__device__ __forceinline__ unsigned num_of_age(const Shared& s, unsigned rank, int age) {
    return ((const unsigned short*)s.num_of_age[rank])[age];
}

// Which slots go when all takers of the cluster want one; returns how many get one: all, if so many slots are unused.
// `taken` becomes the number of takers in blocks of lower rank.
__device__ __forceinline__ int find_threshold(const Head& h, Shared& s, int& taken) {
    constexpr int kParts = kAges / 8;
    for (int i = threadIdx.x; i < CLUSTER * kParts; i += THREADS)
        s.num_of_age[i / kParts][i % kParts] = load_four_in_block(&s.here.num_of_age[i % kParts * 4], i / kParts);
    if (threadIdx.x >= THREADS - CLUSTER) {
        const unsigned rank = THREADS - 1 - threadIdx.x;
        s.takers[rank] = load_in_block(&s.here.num_takers, rank);
    }
    __syncthreads();
    const int takers = h.lane < CLUSTER ? s.takers[h.lane] : 0, age = kAges - 1 - (int)threadIdx.x;  // the oldest first
    taken = __reduce_add_sync(kAll, h.lane < h.rank ? takers : 0);
    const unsigned num_wanted = __reduce_add_sync(kAll, takers);
    unsigned num = 0;
    if (age >= 0)
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) num += num_of_age(s, rank, age);
    unsigned num_older = num;
    for (unsigned step = 1; step < 32; step *= 2) {
        const unsigned before = __shfl_up_sync(kAll, num_older, step);
        if (h.lane >= step) num_older += before;
    }
    if (age >= 0 && h.lane == 31) s.of_warp[h.warp] = num_older;
    num_older -= num;
    __syncthreads();
    unsigned num_unused = 0;
#pragma unroll
    for (unsigned warp = 0; warp < kAges / 32; ++warp) {
        if (warp < h.warp) num_older += s.of_warp[warp];
        num_unused += s.of_warp[warp];
    }
    const unsigned num_moved = min(num_wanted, num_unused);
    if (age >= 0 && num_older < num_moved && num_older + num >= num_moved) {
        s.threshold = age;
        s.equal_quota = num_moved - num_older;
    }
    __syncthreads();
    return num_moved;
}

// How many slots go before each block's, and how many of the threshold's age are in blocks of lower rank.
__device__ __forceinline__ void find_first_replaced(const Head& h, Shared& s, int& equal_below) {
    for (unsigned rank = h.warp; rank < CLUSTER; rank += kWarps) {
        int num_older = 0;
#pragma unroll
        for (int age = h.lane; age < kAges; age += 32) num_older += age > s.threshold ? num_of_age(s, rank, age) : 0;
        num_older = __reduce_add_sync(kAll, num_older);
        if (h.lane == 0) s.older[rank] = num_older;
        if (h.lane == 0) s.equal[rank] = s.threshold < kAges ? num_of_age(s, rank, s.threshold) : 0;
    }
    __syncthreads();
    int num_older = 0, num_equal = 0;
#pragma unroll
    for (unsigned rank = 0; rank < CLUSTER; ++rank) {
        if (rank == h.rank) equal_below = num_equal;
        if (threadIdx.x == rank) s.first_replaced[rank] = num_older + min(num_equal, s.equal_quota);
        num_older += s.older[rank];
        num_equal += s.equal[rank];
    }
}

// Lists this block's slots that go, by number. Of the keys in this thread's slots, leaves those that go.
__device__ __forceinline__ void replace_slots(const Head& h, Shared& s, Slots& slots, int (&old_key)[kSlotRounds]) {
    const int begin = h.warp * kWarpSlots, threshold = s.threshold;
    int num_older = 0, num_equal = 0, equal_below;
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round) {
        const int age = slots.ages[begin + 32 * round + h.lane];
        num_older += age > threshold;
        num_equal += age == threshold;
    }
    num_older = __reduce_add_sync(kAll, num_older);
    num_equal = __reduce_add_sync(kAll, num_equal);
    if (h.lane == 0) {
        s.older_of[h.warp] = num_older;
        s.equal_of[h.warp] = num_equal;
    }
    find_first_replaced(h, s, equal_below);
    const int quota = max(0, s.equal_quota - equal_below);  // what blocks of lower rank leave
    num_older = sum_before_warp(s.older_of, h);
    num_equal = sum_before_warp(s.equal_of, h);
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round) {
        const int i = begin + 32 * round + (int)h.lane, age = slots.ages[i];
        const unsigned older = __ballot_sync(kAll, age > threshold), equal = __ballot_sync(kAll, age == threshold);
        const int equal_before = num_equal + lanes_before(equal, h);
        if (age > threshold || (age == threshold && equal_before < quota)) {
            slots.replaced[num_older + lanes_before(older, h) + min(equal_before, quota)] = i;
            slots.ages[i] = kUsedNow;
        } else {
            old_key[round] = -1;
        }
        num_older += __popc(older);
        num_equal += __popc(equal);
    }
}

// The nth of all slots that go.
__device__ __forceinline__ int replaced_slot(const Shared& s, const Slots& slots, int nth) {
    unsigned rank = 0;
#pragma unroll
    for (unsigned higher = 1; higher < CLUSTER; ++higher) rank += nth >= s.first_replaced[higher];
    return rank * BLOCK_SLOTS + load_short_in_block(&slots.replaced[nth - s.first_replaced[rank]], rank);
}

__device__ __forceinline__ void store_slots(const Head& h, const Slots& slots, const int (&old_key)[kSlotRounds]) {
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS) h.ages[i] = ((const uint4*)slots.ages)[i];
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round)
        if (old_key[round] >= 0) h.slot_of_key[old_key[round]] = -1;
}
