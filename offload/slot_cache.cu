// The lookup of an LRU slot cache, without the host: which selected rows are on the device, which are moved there, and
// which rows they evict.
//
// A thread block cluster of CLUSTER blocks serves one KV head of one loaded context, for all rows of the batch that
// continue it. Rows that are selected and cached stay. Missing rows evict the least recently used slots, lower ones
// first on ties. The nth missing row, in the order (batch row, index head, position in its list), takes the nth slot,
// in slot order. A row that gets no slot stays on the host ("spilled"), and its entry in `ids` says so.
//
// Most writes to global memory come at the end, because a cluster barrier waits until earlier writes are visible.
//
// Compiled for THREADS, CLUSTER, NUM_KV_HEADS, HEADS_PER_KV (index heads), MAX_TOP_K, NUM_SLOTS, CAPACITY (rows of
// the longest context), ROW_BYTES, BATCH, BLOCK_SLOTS (slots of a block: a multiple of THREADS).

#include "slot_ages.cuh"

constexpr int kClaim = -2147483647 - 1;  // slot_of_key is kClaim + entry while that entry's row waits for a slot
constexpr int kLists = BATCH * HEADS_PER_KV;  // several lists may select the same row

// An entry is a position in the concatenated lists of all batch rows of the context.
constexpr int kShare = (kLists * MAX_TOP_K + CLUSTER * THREADS - 1) / (CLUSTER * THREADS);
constexpr int kGroup = kShare < 4 ? kShare : 4;  // rounds whose loads are in flight at the same time
constexpr int kRounds = (kShare + kGroup - 1) / kGroup * kGroup;
constexpr int kUnrolledGroups = kRounds <= kFewRounds ? kRounds / kGroup : 1;

struct Head {
    int* slot_of_key;  // [CAPACITY]; -1: not on the device
    int* key_of_slot;  // [NUM_SLOTS]; -1: empty
    int begin, end;    // this warp's entries
    Place at;
};

struct Entry {
    int list_place;  // index in kv_indices and ids
    int id;          // first the key, finally the value of `ids`
    int slot;        // being loaded
    int nth;         // which of the moved rows it is; -1: this entry moves none
};

__device__ void find_rows(Shared& s, const int* context_ids, int batch, int context) {
    const unsigned lane = threadIdx.x % 32;
    int found = 0;
    for (int base = 0; base < batch; base += 32) {
        const int row = base + (int)lane, other = row < batch ? context_ids[row] : -1;
        const bool same = row < batch && other == context;
        const unsigned ballot = __ballot_sync(ALL_LANES, same);
        if (same) s.rows[found + lanes_before(ballot, lane)] = row;
        found += __popc(ballot);
    }
    if (lane == 0) s.num_rows = found;
}

// Calls run(entry, its number) for every round in which this warp has entries, by groups; a lane may be past the end.
template <typename Run>
__device__ __forceinline__ void for_entries(const Head& h, Entry (&entries)[kRounds], const Run& run) {
#pragma unroll kUnrolledGroups
    for (int first = 0; first < kRounds; first += kGroup)
        if (h.begin + 32 * first < h.end)
#pragma unroll
            for (int round = first; round < first + kGroup; ++round)
                run(entries[round], h.begin + 32 * round + (int)h.at.lane);
}

// Loads the selected keys; -1 for padding.
__device__ __forceinline__ void load_keys(const Head& h, const Shared& s, const int* kv_indices, const int* valid_len,
                                          Entry (&entries)[kRounds]) {
    for_entries(h, entries, [&](Entry& entry, int number) {
        entry = {0, -1, -1, -1};
        if (number >= h.end) return;
        const int nth_list = kLists == 1 ? 0 : number / MAX_TOP_K, place = number - nth_list * MAX_TOP_K;
        const int row = kLists == 1 ? blockIdx.z : s.rows[nth_list / HEADS_PER_KV];
        const int list = (row * NUM_KV_HEADS + blockIdx.y) * HEADS_PER_KV + nth_list % HEADS_PER_KV;
        entry.list_place = list * MAX_TOP_K + place;
        const int key = __ldg(kv_indices + entry.list_place);  // does not wait for the length
        if (place < __ldg(valid_len + list)) entry.id = key;
    });
}

// Replaces each key by its row's slot, or by -2 - key if the row is missing.
__device__ __forceinline__ void find_slots(const Head& h, Entry (&entries)[kRounds]) {
    for_entries(h, entries, [&](Entry& entry, int) {
        if (entry.id >= 0) entry.slot = __ldcg(h.slot_of_key + entry.id);
    });
    for_entries(h, entries, [&](Entry& entry, int) {
        if (entry.id >= 0) entry.id = entry.slot >= 0 ? entry.slot : -2 - entry.id;
    });
}

// Marks the slots in use. If several entries miss the same row, the first one's claim wins (atomicMin).
__device__ __forceinline__ void use_slots(const Head& h, Shared& s, Slots& slots, Entry (&entries)[kRounds]) {
    int num_found = 0, num_missing = 0;
    for_entries(h, entries, [&](const Entry& entry, int number) {
        if (entry.id >= 0) atomicOr(&slots.used[entry.id / 32], 1u << entry.id % 32);
        if (kLists > 1 && entry.id <= -2) atomicMin(h.slot_of_key - 2 - entry.id, kClaim + number);
        num_found += __popc(__ballot_sync(ALL_LANES, entry.id >= 0));
        num_missing += __popc(__ballot_sync(ALL_LANES, entry.id <= -2));
    });
    if (h.at.lane > 0) return;
    atomicAdd(&s.num_found, num_found);
    atomicAdd(&s.num_missing, num_missing);
}

// Marks takers with nth = 0: entries whose row is missing and that claimed it first. They get slots while any are left.
__device__ __forceinline__ void find_takers(const Head& h, Shared& s, Entry (&entries)[kRounds]) {
    int num_takers = 0;
    for_entries(h, entries, [&](Entry& entry, int number) {
        if (entry.id <= -2 && (kLists == 1 || __ldcg(h.slot_of_key - 2 - entry.id) == kClaim + number)) entry.nth = 0;
        num_takers += __popc(__ballot_sync(ALL_LANES, entry.nth == 0));
    });
    if (h.at.lane > 0) return;
    s.takers_of[h.at.warp] = num_takers;
    atomicAdd(&s.num_takers, num_takers);
}

// Assigns slots to takers in order; gives up the claims of those that get none.
__device__ __forceinline__ void assign_slots(const Head& h, Shared& s, const Slots& slots, int num_moved,
                                             int* from_rows, int* to_rows, Entry (&entries)[kRounds]) {
    int taken = sum_of_first(s.takers, h.at.rank, h.at.lane) + sum_of_first(s.takers_of, h.at.warp, h.at.lane);
    const int num_served = max(0, min(num_moved - taken, s.takers_of[h.at.warp]));
    if (h.at.lane == 0) atomicAdd(&s.num_served, num_served);
    for_entries(h, entries, [&](Entry& entry, int) {
        const unsigned takers = __ballot_sync(ALL_LANES, entry.nth == 0);
        const int nth = taken + lanes_before(takers, h.at.lane);
        taken += __popc(takers);
        if (entry.nth < 0) return;
        entry.nth = nth < num_moved ? nth : -1;
        if (nth < num_moved) entry.slot = slots.replaced_as(nth);
        if (nth >= num_moved && kLists > 1) h.slot_of_key[-2 - entry.id] = -1;
    });
    for_entries(h, entries, [&](Entry& entry, int) {
        if (entry.nth < 0) return;
        const int key = -2 - entry.id;
        h.slot_of_key[key] = entry.slot;
        h.key_of_slot[entry.slot] = key;
        from_rows[entry.nth] = key;
        to_rows[entry.nth] = entry.slot;
        entry.id = entry.slot;
    });
}

// Gives entries the slot of their row if another entry has moved it.
__device__ __forceinline__ void share_slots(const Head& h, Shared& s, Entry (&entries)[kRounds]) {
    int num_served = 0;
    for_entries(h, entries, [&](Entry& entry, int) {
        entry.slot = entry.id <= -2 ? __ldcg(h.slot_of_key - 2 - entry.id) : -1;
    });
    for_entries(h, entries, [&](Entry& entry, int) {
        if (entry.slot >= 0 && entry.id <= -2) {
            entry.id = entry.slot;
            ++num_served;
        }
    });
    num_served = __reduce_add_sync(ALL_LANES, num_served);
    if (h.at.lane == 0) atomicAdd(&s.num_served, num_served);
}

// The first loads the keys in this thread's slots; the second stores that evicted ones are no longer on the device.
__device__ __forceinline__ void load_old_keys(const Head& h, int (&old_key)[kSlotRounds]) {
    const int first = h.at.rank * BLOCK_SLOTS + h.at.warp * kWarpSlots + h.at.lane;
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round)
        old_key[round] = first + 32 * round < NUM_SLOTS ? h.key_of_slot[first + 32 * round] : -1;
}
__device__ __forceinline__ void forget_old_keys(const Head& h, const int (&old_key)[kSlotRounds]) {
#pragma unroll kUnrolledSlots
    for (int round = 0; round < kSlotRounds; ++round)
        if (old_key[round] >= 0) h.slot_of_key[old_key[round]] = -1;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) look_up_rows(
    const int* __restrict__ kv_indices,   // [BATCH, NUM_KV_HEADS * HEADS_PER_KV, MAX_TOP_K]
    const int* __restrict__ valid_len,    // [BATCH, NUM_KV_HEADS * HEADS_PER_KV]
    const int* __restrict__ context_ids,  // [BATCH]
    int* slot_of_key,                     // [num_contexts, NUM_KV_HEADS, CAPACITY]
    int* key_of_slot,                     // [num_contexts, NUM_KV_HEADS, NUM_SLOTS]
    uint4* slot_ages,                     // [num_contexts, NUM_KV_HEADS, CLUSTER * BLOCK_SLOTS] bytes
    unsigned long long slot_rows,         // address of [num_contexts, NUM_KV_HEADS, NUM_SLOTS] rows
    const unsigned long long* __restrict__ host_rows,  // [num_contexts] addresses of [NUM_KV_HEADS, context_len] rows
    const long long* __restrict__ context_lens,        // [num_contexts]
    int* ids,                             // [BATCH, NUM_KV_HEADS * HEADS_PER_KV, MAX_TOP_K]
    int* counts, unsigned long long* from, unsigned long long* to,  // [BATCH, NUM_KV_HEADS] lists of rows to move
    int* from_rows, int* to_rows,         // [BATCH, NUM_KV_HEADS, NUM_SLOTS]
    unsigned long long* statistics) {     // [4] entries, found, moved, spilled
    extern __shared__ Slots slots[];      // one, this block's
    __shared__ Shared s;
    const int list = blockIdx.z * NUM_KV_HEADS + blockIdx.y, context = context_ids[blockIdx.z];
    const Place at = {blockIdx.x, threadIdx.x / 32, threadIdx.x % 32};
    if (kLists > 1 && at.warp == 0) find_rows(s, context_ids, BATCH, context);
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < CLUSTER * BLOCK_SLOTS / 32; i += THREADS) slots->used[i] = 0;
    if (threadIdx.x < kAges) s.num_of_age[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        s.num_takers = s.num_found = s.num_missing = s.num_served = s.equal_quota = 0;
        s.threshold = kAges;
    }
    __syncthreads();
    wait_then_let_next_start();
    if (context < 0)
        for (int i = at.rank * THREADS + threadIdx.x; i < HEADS_PER_KV * MAX_TOP_K; i += CLUSTER * THREADS)
            ids[list * HEADS_PER_KV * MAX_TOP_K + i] = -1;
    if (context < 0 || (kLists > 1 && s.rows[0] != (int)blockIdx.z)) {  // the context's first batch row serves all
        if (at.rank == 0 && threadIdx.x == 0) counts[list] = 0;
        return;
    }

    const int head = context * NUM_KV_HEADS + blockIdx.y;
    const int num_entries = kLists == 1 ? MAX_TOP_K : s.num_rows * HEADS_PER_KV * MAX_TOP_K;
    const int share = (num_entries + CLUSTER * THREADS - 1) / (CLUSTER * THREADS) * 32;
    const int begin = min((int)(at.rank * WARPS + at.warp) * share, num_entries);
    const Head h = {slot_of_key + (long long)head * CAPACITY, key_of_slot + (long long)head * NUM_SLOTS, begin,
                    min(begin + share, num_entries), at};
    slot_ages += (head * CLUSTER + at.rank) * (BLOCK_SLOTS / 16);
    Entry entries[kRounds];
    int old_key[kSlotRounds];

    load_keys(h, s, kv_indices, valid_len, entries);
    load_ages(slot_ages, *slots);
    load_old_keys(h, old_key);
    find_slots(h, entries);
    use_slots(h, s, *slots, entries);
    wait_for_all_copies();
    cluster_sync();  // all slots in use and all claims are known
    age_slots(at, s, *slots);
    find_takers(h, s, entries);
    cluster_sync();  // all counts are known
    const int num_moved = find_threshold(at, s);
    replace_slots(at, s, *slots, old_key);
    cluster_sync();  // the evicted slots are known
    assign_slots(h, s, *slots, num_moved, from_rows + list * NUM_SLOTS, to_rows + list * NUM_SLOTS, entries);
    if (kLists == 1) done_reading();
    forget_old_keys(h, old_key);
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS) slot_ages[i] = ((const uint4*)slots->ages)[i];
    if (kLists == 1) {
        wait_for_readers();
    } else {
        cluster_sync();  // all moved rows have their slots
        share_slots(h, s, entries);
    }
    for_entries(h, entries, [&](const Entry& entry, int number) {
        if (number < h.end) ids[entry.list_place] = entry.id;
    });

    __syncthreads();
    if (threadIdx.x > 0) return;
    atomicAdd(statistics, (unsigned long long)(s.num_found + s.num_missing));
    atomicAdd(statistics + 1, (unsigned long long)s.num_found);
    atomicAdd(statistics + 3, (unsigned long long)(s.num_missing - s.num_served));
    if (at.rank > 0) return;
    atomicAdd(statistics + 2, (unsigned long long)num_moved);
    counts[list] = num_moved;
    from[list] = host_rows[context] + blockIdx.y * context_lens[context] * ROW_BYTES;
    to[list] = slot_rows + (long long)head * NUM_SLOTS * ROW_BYTES;
}
