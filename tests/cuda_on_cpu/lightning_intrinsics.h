// What csattn/lightning/intrinsics.cu has for the device; `in_block` is the emulator's.

typedef unsigned u32;
typedef unsigned long long u64;

static inline void wait_for_earlier() {}
template <class T> static inline T load_now(const T* from) { return *from; }
static inline void store_whole(u64* to, u64 value) { *to = value; }
static inline u64 load_whole(const u64* from) {
    if (!*from) pause_thread();  // another thread of the block may be about to write it
    return *from;
}
static inline void bring_to_l2(const void* from, u32 bytes) {
    volatile char last = static_cast<const char*>(from)[bytes - 1];  // what is asked for is there
}
static inline void cluster_sync() { wait_for_cluster(arrive_at_cluster()); }

template <u32 NUM_BLOCKS> struct Cluster {
    u32 rank;

    Cluster(u64&, u32 rank_) : rank(rank_) { sync(); }
    void sync() { cluster_sync(); }
};
