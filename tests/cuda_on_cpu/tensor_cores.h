// The CPU's counterpart of csattn/lightning/tensor_cores.cuh. wgmma products complete when they are issued.

#include "../cuda/intrinsics.cuh"

static inline u32 offset_of(int line, int unit) { return line * 128 + ((unit ^ line % 8) << 4); }

template <int COUNT> static inline void decrease_registers() {}
template <int COUNT> static inline void increase_registers() {}

template <int ID, int COUNT> static inline void sync_named_barrier() {
    static thread_local Barrier barrier{COUNT};
    barrier.wait(0);
}

static inline void fence_async_proxy() {}
static inline u64 operand_descriptor(u32 address, u32 to_next = 16) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(to_next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
static inline void begin_products() {}
static inline void end_products() {}
template <int LEFT, int COUNT> static inline void wait_for_products(float (&)[COUNT]) {}
template <int LEFT> static inline void wait_for_products() {}

// The address of an operand's element, by its wgmma descriptor. Rows are contiguous, with a 128-byte swizzle: address
// bits 7 to 9 are XORed into bits 4 to 6.
template <int BYTES> static inline const void* element_at(u64 operand, int line, int column) {
    constexpr int OF_LINE = 128 / BYTES;
    const u32 start = (operand & 0x3fff) << 4, to_next = (operand >> 16 & 0x3fff) << 4;
    const u32 to_lines = (operand >> 32 & 0x3fff) << 4;
    const u32 place =
        start + column / OF_LINE * to_next + line / 8 * to_lines + line % 8 * 128 + column % OF_LINE * BYTES;
    return __cvta_shared_to_generic(place ^ (place >> 7 & 7) << 4);
}
