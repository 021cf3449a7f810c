// What csattn/lightning/tensor_cores.cu has for the device. Copies and products are done when they are started.

typedef unsigned u32;
typedef unsigned long long u64;

static inline u32 address_of(const void* place) { return __cvta_generic_to_shared(place); }
static inline u32 offset_of(int line, int unit) { return line * 128 + ((unit ^ line % 8) << 4); }

template <int COUNT> static inline void release_registers() {}
template <int COUNT> static inline void claim_registers() {}

static inline void start_copy(u32 to, const void* from, int count) {
    char* place = static_cast<char*>(__cvta_shared_to_generic(to));
    std::memset(place, 0, 16);
    if (count == 16) std::memcpy(place, from, 16);
}
static inline void end_copies() {}
template <int LEFT> static inline void wait_for_copies() {}

// The number of phases that have ended, how many have still to arrive in this one, and in each.
struct CountedPhases {
    uint16_t ended, missing, count, unused;
};
static inline CountedPhases& phases_of(u64* barrier) { return *reinterpret_cast<CountedPhases*>(barrier); }
static inline void init_barrier(u64* barrier, u32 count) {
    phases_of(barrier) = {0, static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
static inline void arrive(u64* barrier) {
    CountedPhases& phases = phases_of(barrier);
    if (--phases.missing == 0) phases.missing = phases.count, ++phases.ended;
}
static inline void arrive_when_copied(u64* barrier) { arrive(barrier); }
static inline void wait_for(u64* barrier, u32 parity) {
    while (phases_of(barrier).ended % 2 == parity) pause_thread();
}
template <int ID, int COUNT> static inline void meet() {
    static thread_local Barrier barrier{COUNT};
    barrier.wait(0);
}

static inline void show_to_tensor_cores() {}
static inline u64 operand_at(u32 shared_address, u32 to_next = 16) {
    return (shared_address & 0x3ffff) >> 4 | static_cast<u64>(to_next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
static inline void begin_products() {}
static inline void end_products() {}
template <int LEFT, int COUNT> static inline void wait_for_products(float (&)[COUNT]) {}
static inline void wait_for_all_products() {}

// Where an element of an operand lies; its columns lie side by side, in units exchanged by the address's bits.
template <int BYTES> static inline const void* element_at(u64 operand, int line, int column) {
    constexpr int COLUMNS = 128 / BYTES;
    const u32 start = (operand & 0x3fff) << 4, to_next = (operand >> 16 & 0x3fff) << 4;
    const u32 to_lines = (operand >> 32 & 0x3fff) << 4;
    const u32 place =
        start + column / COLUMNS * to_next + line / 8 * to_lines + line % 8 * 128 + column % COLUMNS * BYTES;
    return __cvta_shared_to_generic(place ^ (place >> 7 & 7) << 4);
}
