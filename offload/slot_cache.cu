// Which rows of a step are on the device already, which move, and which rows they replace: decided without the host.
//
// A cluster of CLUSTER blocks decides for one KV head of one loaded context, for all rows of the batch that
// continue it. Rows selected before stay. A row that is missing gets the slot whose row was not used for the
// longest time, equally old slots by number; missing rows are taken in the order (batch row, index head, place in
// its list). What finds no slot is left where it is ("spilled"), and its place in `ids` says so.
//
// Little is written to global memory before the end: a cluster's barrier waits until what was written is seen.
//
// Compiled for THREADS, CLUSTER, NUM_KV_HEADS, HEADS_PER_KV (index heads), MAX_TOP_K, NUM_SLOTS, CAPACITY (rows of
// the longest context), ROW_BYTES, MAX_BATCH, BLOCK_SLOTS (slots of a block: a multiple of THREADS).

constexpr int kClaim = -2147483647 - 1;  // kClaim + entry stands in slot_of_key while an entry's row awaits a slot
constexpr int kWarpEntries = (MAX_BATCH * HEADS_PER_KV * MAX_TOP_K + CLUSTER * kWarps - 1) / (CLUSTER * kWarps);
constexpr int kGroups = (kWarpEntries + 32 * kInFlight - 1) / (32 * kInFlight), kRounds = kGroups * kInFlight;
constexpr int kUnrolledGroups = kRounds <= kFewRounds ? kGroups : 1;
using Ids = int[kRounds];
constexpr int kUsedWords = CLUSTER * BLOCK_SLOTS / 32;

__device__ void find_rows(Shared& s, const int* context_ids, int batch, int context) {
    const unsigned lane = threadIdx.x % 32;
    int found = 0;
    for (int base = 0; base < batch; base += 32) {
        const int row = base + (int)lane;
        const int other = row < batch ? context_ids[row] : -1;
        const bool same = row < batch && other == context;
        const unsigned ballot = __ballot_sync(kAll, same);
        if (same) s.rows[found + __popc(ballot & ((1u << lane) - 1))] = row;
        found += __popc(ballot);
    }
    if (lane == 0) s.num_rows = found;
}

// The list of an entry, [batch, num_index_heads]; entry % MAX_TOP_K is the place in it.
__device__ __forceinline__ int list_of(const Head& h, const Shared& s, int entry) {
    const int list = entry / MAX_TOP_K;
    return (s.rows[list / HEADS_PER_KV] * NUM_KV_HEADS + h.kv_head) * HEADS_PER_KV + list % HEADS_PER_KV;
}
__device__ __forceinline__ int entry_of(const Head& h, int round) { return h.begin + 32 * round + (int)h.lane; }

// Rounds that this warp has entries for: run(first round of a group), the same for all lanes.
template <typename Run>
__device__ __forceinline__ void for_groups(const Head& h, const Run& run) {
#pragma unroll kUnrolledGroups
    for (int round = 0; round < kRounds; round += kInFlight)
        if (h.begin + 32 * round < h.end) run(round);
}

// The wanted key of each entry, -1 where there is none.
__device__ __forceinline__ void load_keys(const Head& h, const Shared& s, Ids& key) {
#pragma unroll kUnrolledGroups * kInFlight
    for (int round = 0; round < kRounds; ++round) key[round] = -1;
    for_groups(h, [&](int first) {
#pragma unroll
        for (int round = first; round < first + kInFlight; ++round) {
            const int entry = entry_of(h, round);
            if (entry >= h.end) continue;
            const int list = list_of(h, s, entry), place = entry % MAX_TOP_K;
            const int wanted = __ldg(h.kv_indices + (long long)list * MAX_TOP_K + place);  // waits for no length
            key[round] = place < __ldg(h.valid_len + list) ? wanted : -1;
        }
    });
}

// Each key becomes its row's slot, or -2 - key when the row is missing. Counts both.
__device__ __forceinline__ void find_slots(const Head& h, Ids& id, int& num_found, int& num_missing) {
    for_groups(h, [&](int first) {
        int slot[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            slot[i] = id[first + i] >= 0 ? __ldcg(h.slot_of_key + id[first + i]) : -1;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int key = id[first + i];
            if (key >= 0) id[first + i] = slot[i] >= 0 ? slot[i] : -2 - key;
            num_found += slot[i] >= 0;
            num_missing += key >= 0 && slot[i] < 0;
        }
    });
}

// Marks rows that are here. When several lists may miss the same row, the first entry's claim on it wins.
__device__ __forceinline__ void use_slots(const Head& h, const Ids& id, Slots& slots) {
    for_groups(h, [&](int first) {
#pragma unroll
        for (int round = first; round < first + kInFlight; ++round) {
            const int slot = id[round];
            if (slot >= 0) atomicOr(&slots.used[slot / 32], 1u << slot % 32);
            if (slot <= -2 && h.several) atomicMin(h.slot_of_key - 2 - slot, kClaim + entry_of(h, round));
        }
    });
}

// Whether an entry's row is missing and this entry is the first that wants it: it takes a slot if one is left.
__device__ __forceinline__ bool takes_slot(const Head& h, int round, int id) {
    return id <= -2 && (!h.several || __ldcg(h.slot_of_key - 2 - id) == kClaim + entry_of(h, round));
}
__device__ __forceinline__ int count_takers(const Head& h, const Ids& id) {
    int num_takers = 0;
    for_groups(h, [&](int first) {
#pragma unroll
        for (int round = first; round < first + kInFlight; ++round) num_takers += takes_slot(h, round, id[round]);
    });
    return num_takers;
}

// The rows that take slots take them in order; those that find none are no longer claimed.
__device__ __forceinline__ int assign_slots(const Head& h, const Shared& s, const Slots& slots, Ids& id, int taken,
                                            int num_moved) {
    int num_served = 0;
    for_groups(h, [&](int first) {
        int nth[kInFlight], slot[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const bool takes = takes_slot(h, first + i, id[first + i]);
            const unsigned takers = __ballot_sync(kAll, takes);
            nth[i] = takes ? taken + lanes_before(takers, h) : -1;
            taken += __popc(takers);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            slot[i] = nth[i] >= 0 && nth[i] < num_moved ? replaced_slot(s, slots, nth[i]) : -1;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int key = -2 - id[first + i];
            if (nth[i] >= 0 && (slot[i] >= 0 || h.several)) h.slot_of_key[key] = slot[i];
            if (slot[i] < 0) continue;
            h.from_rows[nth[i]] = key;
            h.to_rows[nth[i]] = slot[i];
            h.key_of_slot[slot[i]] = key;
            id[first + i] = slot[i];
            ++num_served;
        }
    });
    return num_served;
}

// Entries whose row another entry has fetched.
__device__ __forceinline__ int share_slots(const Head& h, Ids& id) {
    int num_served = 0;
    for_groups(h, [&](int first) {
#pragma unroll
        for (int round = first; round < first + kInFlight; ++round) {
            const int slot = id[round] <= -2 ? __ldcg(h.slot_of_key - 2 - id[round]) : -1;
            if (slot < 0) continue;
            id[round] = slot;
            ++num_served;
        }
    });
    return num_served;
}

__device__ __forceinline__ void store_ids(const Head& h, const Shared& s, const Ids& id) {
    for_groups(h, [&](int first) {
#pragma unroll
        for (int round = first; round < first + kInFlight; ++round) {
            const int entry = entry_of(h, round);
            if (entry < h.end) h.ids[(long long)list_of(h, s, entry) * MAX_TOP_K + entry % MAX_TOP_K] = id[round];
        }
    });
}

__device__ __forceinline__ void add_to(int& shared_sum, int of_lane) {
    const int sum = __reduce_add_sync(kAll, of_lane);
    if (threadIdx.x % 32 == 0) atomicAdd(&shared_sum, sum);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) look_up_rows(
    const int* __restrict__ kv_indices,   // [batch, NUM_KV_HEADS * HEADS_PER_KV, MAX_TOP_K]
    const int* __restrict__ valid_len,    // [batch, NUM_KV_HEADS * HEADS_PER_KV]
    const int* __restrict__ context_ids,  // [batch]
    int* slot_of_key,                     // [num_contexts, NUM_KV_HEADS, CAPACITY]
    int* key_of_slot,                     // [num_contexts, NUM_KV_HEADS, NUM_SLOTS]
    uint4* slot_ages,                     // [num_contexts, NUM_KV_HEADS, CLUSTER * BLOCK_SLOTS] bytes
    unsigned long long slot_rows,         // address of [num_contexts, NUM_KV_HEADS, NUM_SLOTS] rows
    const unsigned long long* __restrict__ host_rows,  // [num_contexts] addresses of [NUM_KV_HEADS, context_len] rows
    const long long* __restrict__ context_lens,        // [num_contexts]
    int* ids,                             // [batch, NUM_KV_HEADS * HEADS_PER_KV, MAX_TOP_K]
    int* counts, unsigned long long* from, unsigned long long* to,  // [batch, NUM_KV_HEADS] lists of rows to move
    int* from_rows, int* to_rows,         // [batch, NUM_KV_HEADS, NUM_SLOTS]
    unsigned long long* statistics) {     // [4] entries, found, moved, spilled
    extern __shared__ Slots slots[];      // this block's
    __shared__ Shared s;
    const int list = blockIdx.z * NUM_KV_HEADS + blockIdx.y, context = context_ids[blockIdx.z];
    if (threadIdx.x < 32) find_rows(s, context_ids, gridDim.z, context);
    for (int i = threadIdx.x; i < kUsedWords; i += THREADS) slots->used[i] = 0;
    if (threadIdx.x < kAges / 2) s.here.num_of_age[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        s.here.num_takers = s.num_found = s.num_missing = s.num_served = s.equal_quota = 0;
        s.threshold = kAges;
    }
    __syncthreads();
    if (context < 0)
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < HEADS_PER_KV * MAX_TOP_K; i += CLUSTER * THREADS)
            ids[(long long)list * HEADS_PER_KV * MAX_TOP_K + i] = -1;
    if (context < 0 || s.rows[0] != blockIdx.z) {  // the context's first row does it for all
        if (blockIdx.x == 0 && threadIdx.x == 0) counts[list] = 0;
        return;
    }

    const long long head = (long long)context * NUM_KV_HEADS + blockIdx.y;
    const unsigned rank = blockIdx.x, warp = threadIdx.x / 32;
    const int num_entries = s.num_rows * HEADS_PER_KV * MAX_TOP_K;
    const int share = (num_entries + CLUSTER * kWarps * 32 - 1) / (CLUSTER * kWarps * 32) * 32;
    const int begin = min((int)(rank * kWarps + warp) * share, num_entries);
    const Head h = {slot_of_key + head * CAPACITY, key_of_slot + head * NUM_SLOTS,
                    slot_ages + (head * CLUSTER + rank) * (BLOCK_SLOTS / 16), kv_indices, valid_len, ids,
                    to_rows + (long long)list * NUM_SLOTS, from_rows + (long long)list * NUM_SLOTS, (int)blockIdx.y,
                    s.num_rows * HEADS_PER_KV > 1, begin, min(begin + share, num_entries),
                    rank, warp, threadIdx.x % 32};
    int id[kRounds], old_key[kSlotRounds], num_found = 0, num_missing = 0, taken = 0;

    load_keys(h, s, id);
    load_slots(h, *slots, old_key);
    find_slots(h, id, num_found, num_missing);
    use_slots(h, id, *slots);
    asm volatile("cp.async.wait_all;" ::: "memory");
    cluster_sync();  // all uses and all claims are known
    age_slots(h, s, *slots);
    const int num_takers = __reduce_add_sync(kAll, h.several ? count_takers(h, id) : num_missing);
    if (h.lane == 0) s.takers_of[warp] = num_takers;
    if (h.lane == 0) atomicAdd(&s.here.num_takers, num_takers);
    cluster_sync();  // all counts are known
    const int num_moved = find_threshold(h, s, taken);
    replace_slots(h, s, *slots, old_key);
    cluster_sync();  // it is known which slots go
    int num_served = assign_slots(h, s, *slots, id, taken + sum_before_warp(s.takers_of, h), num_moved);
    done_reading();
    store_slots(h, *slots, old_key);
    wait_for_readers();
    if (h.several) {
        cluster_sync();  // all rows that moved have their slots
        num_served += share_slots(h, id);
    }
    store_ids(h, s, id);

    add_to(s.num_found, num_found);
    add_to(s.num_missing, num_missing);
    add_to(s.num_served, num_served);
    __syncthreads();
    if (threadIdx.x > 0) return;
    atomicAdd(statistics, (unsigned long long)(s.num_found + s.num_missing));
    atomicAdd(statistics + 1, (unsigned long long)s.num_found);
    atomicAdd(statistics + 3, (unsigned long long)(s.num_missing - s.num_served));
    if (rank > 0) return;
    atomicAdd(statistics + 2, (unsigned long long)num_moved);
    counts[list] = num_moved;
    from[list] = host_rows[context] + blockIdx.y * context_lens[context] * ROW_BYTES;
    to[list] = slot_rows + head * NUM_SLOTS * ROW_BYTES;
}
