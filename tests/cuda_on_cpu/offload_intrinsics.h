// What offload/intrinsics.cuh has for the device.

constexpr unsigned kAll = ~0u;

static thread_local int rounds[THREADS];  // in which each thread arrived
static inline void cluster_sync() { wait_for_cluster(arrive_at_cluster()); }
static inline void done_reading() { rounds[threadIdx.x] = arrive_at_cluster(); }
static inline void wait_for_readers() { wait_for_cluster(rounds[threadIdx.x]); }

static inline unsigned load_in_block(const void* here, unsigned rank) {
    return *in_block(static_cast<const unsigned*>(here), rank);
}
static inline uint4 load_four_in_block(const void* here, unsigned rank) {
    return *in_block(static_cast<const uint4*>(here), rank);
}
static inline void store_in_block(void* here, unsigned rank, unsigned value) {
    *in_block(static_cast<unsigned*>(here), rank) = value;
}

static inline void start_copy(void* to, const void* from) { std::memcpy(to, from, 16); }
static inline void wait_for_copies() {}

template <unsigned BYTES> struct Piece {
    unsigned words[BYTES / 4];
};
template <unsigned BYTES> static inline void read_piece(unsigned long long address, Piece<BYTES>& piece) {
    piece = *reinterpret_cast<const Piece<BYTES>*>(address);
}
template <unsigned BYTES> static inline void write_piece(unsigned long long address, const Piece<BYTES>& piece) {
    *reinterpret_cast<Piece<BYTES>*>(address) = piece;
}
