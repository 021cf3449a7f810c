// Eviction in the slot cache: the data that the thread blocks of one KV head share, and the choice of its oldest slots.
//
// An age is a byte: 0: no slot (padding); 1: used by this step; n: last used n - 1 steps ago; 126: 125 steps ago or
// more; 127: never used. The kernel is bound by instruction issue, not by bandwidth, so the little work is spread over
// many threads.
#pragma once

#include "../csattn/cuda/warps.cuh"

constexpr int kAges = 128;
constexpr unsigned kUsedNow = 1;

// A thread holds every 32nd of its warp's slots and entries, and loops over them in rounds. Loops of few rounds are
// unrolled, so that a thread's data stays in registers.
constexpr int kFewRounds = 16;
constexpr int kWarpSlots = BLOCK_SLOTS / WARPS;
constexpr int kSlotRounds = kWarpSlots / 32;
constexpr int kUnrolledSlots = kSlotRounds <= kFewRounds ? kSlotRounds : 4;

// The index of a slot: 16 bits if a block works alone (no clusters), because it has fewer slots and less shared memory.
template <bool ALONE> struct Number {
    typedef int Type;
};
template <> struct Number<true> {
    typedef u16 Type;
};
typedef Number<CLUSTER == 1>::Type SlotNumber;
static_assert(CLUSTER > 1 || BLOCK_SLOTS <= 65536, "slots are numbered in 16 bits");

struct Shared {
    alignas(16) unsigned num_of_age[kAges];  // histogram of this block's slots; other blocks read it
    int num_takers;                          // entries of this block whose rows need slots; other blocks read it
    uint4 all_ages[CLUSTER][kAges / 4];      // `num_of_age` of all blocks
    int takers[CLUSTER], older[CLUSTER], equal[CLUSTER];         // counts of all blocks
    int takers_of[WARPS], older_of[WARPS], equal_of[WARPS];  // counts of this block's warps
    int of_warp[kAges / 32];     // partial sums of the prefix sum over ages
    int threshold, equal_quota;  // evicted: every slot older than the threshold, and so many of that age
    int rows[BATCH], num_rows;   // the batch's rows that continue this context
    int num_found, num_missing, num_served;  // counts of this block's entries, for the statistics
};

// The block's dynamic shared memory.
struct alignas(16) Slots {
    unsigned ages[BLOCK_SLOTS / 4];             // four in a word
    unsigned used[CLUSTER * BLOCK_SLOTS / 32];  // a bit for every slot of the head: whether this block's entries use it
    SlotNumber replaced[BLOCK_SLOTS];  // the evicted slots in order: the nth is in block n % CLUSTER at n / CLUSTER

    __device__ __forceinline__ void replace(unsigned nth, int slot) {
        if (CLUSTER == 1)
            replaced[nth] = static_cast<SlotNumber>(slot);
        else
            store_in_block(replaced + nth / CLUSTER, nth % CLUSTER, slot);
    }
    __device__ __forceinline__ int replaced_as(unsigned nth) const {
        return CLUSTER == 1 ? replaced[nth] : load_in_block(replaced + nth / CLUSTER, nth % CLUSTER);
    }
};

struct Place {
    unsigned rank, warp, lane;
};

// Starts asynchronous copies (cp.async) of this block's ages to shared memory. They are complete after
// `wait_for_all_copies` and a barrier.
__device__ __forceinline__ void load_ages(const uint4* slot_ages, Slots& slots) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS)
        start_copy(slots.ages + 4 * i, slot_ages + i);
}

// Increments four packed ages, those from 1 to 125.
__device__ __forceinline__ unsigned older(unsigned ages) {
    return ages + ((ages + 0x7f7f7f7fu & ~(ages + 0x02020202u)) >> 7 & 0x01010101u);
}

// Ages all slots by a step, except those that some block's entries use, and makes the histogram of the others' ages.
__device__ __forceinline__ void age_slots(const Place& at, Shared& s, Slots& slots) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 4; i += THREADS) {
        const unsigned* bits = slots.used + (at.rank * BLOCK_SLOTS + 4 * i) / 32;
        unsigned used[CLUSTER], by_any = 0;
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) used[rank] = load_in_block(bits, rank);
        unsigned ages = older(slots.ages[i]);
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) by_any |= used[rank];
        by_any = by_any >> 4 * i % 32 & 15;
        const unsigned now = (by_any & 1) | (by_any & 2) << 7 | (by_any & 4) << 14 | (by_any & 8) << 21;
        ages = (ages & ~(now * 255)) | now * kUsedNow;
        slots.ages[i] = ages;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned age = ages >> 8 * j & 255;
            if (age > kUsedNow) atomicAdd(&s.num_of_age[age], 1);
        }
    }
}

// Finds the age threshold above which slots are evicted, so that every taker of the cluster gets one, by a prefix sum
// over the histogram of ages. Returns how many takers get a slot: all, if enough slots are unused by this step.
__device__ __forceinline__ int find_threshold(const Place& at, Shared& s) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < CLUSTER * (kAges / 4); i += THREADS) {
        const unsigned rank = i / (kAges / 4), part = i % (kAges / 4);
        s.all_ages[rank][part] = load_four_in_block(s.num_of_age + 4 * part, rank);
        if (part == 0) s.takers[rank] = load_in_block(&s.num_takers, rank);
    }
    __syncthreads();
    const int age = kAges - 1 - (int)threadIdx.x;  // the oldest first
    int num = 0, num_older = 0;
    if (age >= 0) {
#pragma unroll
        for (unsigned rank = 0; rank < CLUSTER; ++rank) num += ((const int*)s.all_ages[rank])[age];
        num_older = sum_up_to_lane(num);
        if (at.lane == 31) s.of_warp[at.warp] = num_older;
        num_older -= num;
    }
    __syncthreads();
    const int num_wanted = sum_of_first(s.takers, CLUSTER, at.lane);
    const int num_moved = min(num_wanted, sum_of_first(s.of_warp, kAges / 32, at.lane));
    if (age >= 0) {
        num_older += sum_of_first(s.of_warp, at.warp, at.lane);
        if (num_older < num_moved && num_older + num >= num_moved) {
            s.threshold = age;
            s.equal_quota = num_moved - num_older;
        }
    }
    __syncthreads();
    return num_moved;
}

// Counts each block's slots that are older than the threshold, and those of that age.
__device__ __forceinline__ void count_replaced(const Place& at, Shared& s) {
    for (unsigned rank = at.warp; rank < CLUSTER; rank += WARPS) {
        const uint4 num = s.all_ages[rank][at.lane];
        const int over = s.threshold - 4 * (int)at.lane;  // the threshold's index among this lane's four ages
        const unsigned older = (over < 0 ? num.x : 0) + (over < 1 ? num.y : 0) + (over < 2 ? num.z : 0) +
                               (over < 3 ? num.w : 0);
        const unsigned sum = __reduce_add_sync(ALL_LANES, older);
        if (over >= 0 && over < 4) s.equal[rank] = over == 0 ? num.x : over == 1 ? num.y : over == 2 ? num.z : num.w;
        if (at.lane == 0) s.older[rank] = sum;
    }
}

// Lists the slots to evict; the list is complete after a cluster barrier. old_key: the keys in this thread's slots;
// those of slots that stay become -1.
__device__ __forceinline__ void replace_slots(const Place& at, Shared& s, Slots& slots, int (&old_key)[kSlotRounds]) {
    unsigned char* ages = (unsigned char*)slots.ages + at.warp * kWarpSlots + at.lane;
    const int threshold = s.threshold, quota = s.equal_quota;
    int num_older = 0, num_equal = 0;
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round) {
        num_older += __popc(__ballot_sync(ALL_LANES, ages[32 * round] > threshold));
        num_equal += __popc(__ballot_sync(ALL_LANES, ages[32 * round] == threshold));
    }
    if (at.lane == 0) {
        s.older_of[at.warp] = num_older;
        s.equal_of[at.warp] = num_equal;
    }
    count_replaced(at, s);
    __syncthreads();
    num_older = sum_of_first(s.older, at.rank, at.lane) + sum_of_first(s.older_of, at.warp, at.lane);
    num_equal = sum_of_first(s.equal, at.rank, at.lane) + sum_of_first(s.equal_of, at.warp, at.lane);
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round) {
        const int age = ages[32 * round];
        const unsigned older = __ballot_sync(ALL_LANES, age > threshold), equal = __ballot_sync(ALL_LANES, age == threshold);
        const int equal_before = num_equal + lanes_before(equal, at.lane);
        if (age > threshold || (age == threshold && equal_before < quota)) {
            const unsigned nth = num_older + lanes_before(older, at.lane) + min(equal_before, quota);
            const int slot = at.rank * BLOCK_SLOTS + at.warp * kWarpSlots + 32 * round + at.lane;
            slots.replace(nth, slot);
            ages[32 * round] = kUsedNow;
        } else {
            old_key[round] = -1;
        }
        num_older += __popc(older);
        num_equal += __popc(equal);
    }
}
