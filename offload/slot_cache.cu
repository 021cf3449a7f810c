// Which rows of a step are on the device already, which move, and which rows they replace: decided without the host.
//
// A cluster of CLUSTER blocks decides for one KV head of one loaded context, for all rows of the batch that
// continue it. Rows selected before stay. A row that is missing gets the slot whose row was not used for the
// longest time, equally old slots by number; missing rows are taken in the order (batch row, index head, place in
// its list). What finds no slot is left where it is ("spilled"), and its place in `ids` says so.
//
// Compiled for THREADS, CLUSTER, NUM_KV_HEADS, HEADS_PER_KV (index heads), MAX_TOP_K, NUM_SLOTS, CAPACITY (rows of
// the longest context), ROW_BYTES, MAX_BATCH, BLOCK_SLOTS (slots of a block: a multiple of THREADS).

// Where an entry's list is, [batch, num_index_heads]; entry % MAX_TOP_K is the place in it.
__device__ __forceinline__ int list_of(const Head& h, const Shared& s, int entry) {
    const int list = entry / MAX_TOP_K;
    return (s.rows[list / HEADS_PER_KV] * NUM_KV_HEADS + h.kv_head) * HEADS_PER_KV + list % HEADS_PER_KV;
}
__device__ __forceinline__ int* id_of(const Head& h, const Shared& s, int entry) {
    return h.ids + (long long)list_of(h, s, entry) * MAX_TOP_K + entry % MAX_TOP_K;
}
__device__ __forceinline__ int wanted_key(const Head& h, const Shared& s, int entry) {
    const int list = list_of(h, s, entry), place = entry % MAX_TOP_K;
    return place < h.valid_len[list] ? h.kv_indices[(long long)list * MAX_TOP_K + place] : -1;
}

__device__ void find_rows(Shared& s, const int* context_ids, int batch, int context) {
    const unsigned lane = threadIdx.x % 32;
    int found = 0;
    for (int base = 0; base < batch; base += 32) {
        const int row = base + (int)lane;
        const bool same = row < batch && context_ids[row] == context;
        const unsigned ballot = __ballot_sync(kAll, same);
        if (same) s.rows[found + __popc(ballot & ((1u << lane) - 1))] = row;
        found += __popc(ballot);
    }
    if (lane == 0) s.num_rows = found;
}

// Every entry's id becomes its row's slot, or -2 - key when the row is missing, or -1 when there is none; rows that
// are here become used. When several lists may miss the same row, the first entry's claim on it wins.
// Waits for the cluster once, so that every block's ages are there before they are changed. Returns what is missing.
__device__ int look_up(const Head& h, Shared& s, unsigned char* ages) {
    int num_found = 0, num_missing = 0, base = h.begin;
    do {
        int key[kInFlight], slot[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int entry = base + 32 * i + (int)h.lane;
            key[i] = entry < h.end ? wanted_key(h, s, entry) : -1;
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) slot[i] = key[i] >= 0 ? __ldcg(h.slot_of_key + key[i]) : -1;
        if (base == h.begin) cluster_wait();
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int entry = base + 32 * i + (int)h.lane;
            if (entry >= h.end) continue;
            const bool found = slot[i] >= 0, missing = key[i] >= 0 && !found;
            if (found) store_in_block(ages + slot[i] % BLOCK_SLOTS, slot[i] / BLOCK_SLOTS, kUsedNow);
            if (missing && h.several) atomicMin(h.slot_of_key + key[i], kClaim + entry);
            *id_of(h, s, entry) = found ? slot[i] : missing ? -2 - key[i] : -1;
            num_found += found;
            num_missing += missing;
        }
        base += 32 * kInFlight;
    } while (base < h.end);
    num_found = __reduce_add_sync(kAll, num_found);
    num_missing = __reduce_add_sync(kAll, num_missing);
    if (h.lane == 0) {
        atomicAdd(&s.num_found, num_found);
        atomicAdd(&s.num_missing, num_missing);
    }
    return num_missing;
}

// Whether an entry's row is missing and this entry is the first that wants it: it takes a slot if one is left.
__device__ __forceinline__ bool takes_slot(const Head& h, int entry, int id) {
    return id <= -2 && (!h.several || __ldcg(h.slot_of_key - 2 - id) == kClaim + entry);
}
__device__ int count_takers(const Head& h, const Shared& s) {
    int num_takers = 0;
    for (int base = h.begin; base < h.end; base += 32) {
        const int entry = base + (int)h.lane;
        num_takers += __popc(__ballot_sync(kAll, entry < h.end && takes_slot(h, entry, *id_of(h, s, entry))));
    }
    return num_takers;
}

// The rows that take slots take them in order; those that find none are no longer claimed.
__device__ int assign_slots(const Head& h, const Shared& s, int taken, int num_moved) {
    int num_served = 0;
    for (int base = h.begin; base < h.end; base += 32) {
        const int entry = base + (int)h.lane;
        int* id = entry < h.end ? id_of(h, s, entry) : nullptr;
        const int key = id ? -2 - *id : -1;
        const bool takes = id && takes_slot(h, entry, -2 - key);
        const unsigned takers = __ballot_sync(kAll, takes);
        const int nth = taken + lanes_before(takers, h);
        taken += __popc(takers);
        if (!takes) continue;
        const int slot = nth < num_moved ? __ldcg(h.to_rows + nth) : -1;
        if (slot >= 0 || h.several) h.slot_of_key[key] = slot;
        if (slot < 0) continue;
        h.from_rows[nth] = key;
        h.key_of_slot[slot] = key;
        *id = slot;
        ++num_served;
    }
    return num_served;
}

// Entries whose row another entry has fetched.
__device__ int share_slots(const Head& h, const Shared& s) {
    int num_served = 0;
    for (int entry = h.begin + h.lane; entry < h.end; entry += 32) {
        int* id = id_of(h, s, entry);
        const int slot = *id <= -2 ? __ldcg(h.slot_of_key - 2 - *id) : -1;
        if (slot < 0) continue;
        *id = slot;
        ++num_served;
    }
    return num_served;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) look_up_rows(
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
    extern __shared__ uint4 packed_ages[];
    unsigned char* ages = (unsigned char*)packed_ages;
    __shared__ Shared s;
    const int batch = gridDim.z, list = blockIdx.z * NUM_KV_HEADS + blockIdx.y, context = context_ids[blockIdx.z];
    if (context >= 0 && threadIdx.x < 32) find_rows(s, context_ids, batch, context);
    if (threadIdx.x < kAges) s.num_of_age[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        s.num_takers = s.num_found = s.num_missing = s.num_served = 0;
        s.threshold = kAges;
        s.equal_quota = s.older_below = s.equal_below = 0;
    }
    __syncthreads();
    if (context < 0) {
        int* idle = ids + (long long)list * HEADS_PER_KV * MAX_TOP_K;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < HEADS_PER_KV * MAX_TOP_K; i += CLUSTER * THREADS) idle[i] = -1;
    }
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

    age_slots(h, packed_ages);
    cluster_arrive();
    int num_takers = look_up(h, s, ages);
    cluster_sync();  // all ages and all claims are known
    if (h.several) num_takers = count_takers(h, s);
    s.takers_of[warp] = num_takers;
    if (h.lane == 0) atomicAdd(&s.num_takers, num_takers);
    count_ages(h, s, ages);
    cluster_sync();  // all counts are known
    const int takers = h.lane < CLUSTER ? load_in_block(&s.num_takers, h.lane) : 0;
    const int taken = __reduce_add_sync(kAll, h.lane < rank ? takers : 0) + sum_before_warp(s.takers_of, h);
    const int num_moved = find_threshold(h, s, __reduce_add_sync(kAll, takers));
    replace_slots(h, s, ages);
    cluster_sync();  // the list of replaced slots is complete
    for (unsigned i = threadIdx.x; i < BLOCK_SLOTS / 16; i += THREADS) h.ages[i] = packed_ages[i];
    int num_served = assign_slots(h, s, taken, num_moved);
    if (h.several) {
        cluster_sync();  // all rows that moved have their slots
        num_served += share_slots(h, s);
    }

    num_served = __reduce_add_sync(kAll, num_served);
    if (h.lane == 0) atomicAdd(&s.num_served, num_served);
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
