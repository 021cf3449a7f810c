// The CPU's counterpart of csattn/lightning/mla/products.cuh.

#include "../tensor_cores.cuh"

#define IS_bf16 1
#define IS_f16 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define IS_BF16 JOIN(IS_, HALF)

static inline uint16_t to_half(float x) {
    uint16_t bits;
    if (IS_BF16) {
        const u32 all = __float_as_uint(x);
        bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    } else {
        const _Float16 value = x;
        std::memcpy(&bits, &value, 2);
    }
    return bits;
}
static inline float from_half(const void* place) {
    uint16_t bits;
    std::memcpy(&bits, place, 2);
    if (IS_BF16) return __uint_as_float(static_cast<u32>(bits) << 16);
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return value;
}

static inline u32 pack(float first, float second) { return to_half(first) | static_cast<u32>(to_half(second)) << 16; }
static inline float element(u64 operand, int line, int column) {
    return from_half(element_at<2>(operand, line, column));
}
template <int N, class B> static inline void multiply(float* result, u64 a, B b, bool add) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 2; ++i) {
        float of_row[16];
        for (int k = 0; k < 16; ++k) of_row[k] = element(a, 16 * warp + 8 * i + lane / 4, k);
        for (int j = 0; j < N / 8; ++j)
            for (int e = 0; e < 2; ++e) {
                float sum = add ? result[4 * j + 2 * i + e] : 0;
                for (int k = 0; k < 16; ++k) sum += of_row[k] * b(8 * j + 2 * (lane % 4) + e, k);
                result[4 * j + 2 * i + e] = sum;
            }
    }
}
static inline void multiply_rows(float (&result)[16], u64 a, u64 b, int add) {
    multiply<32>(result, a, [b](int n, int k) { return element(b, n, k); }, add);
}
static inline void multiply_columns(float (&result)[128], u64 a, u64 b) {
    multiply<256>(result, a, [b](int n, int k) { return element(b, k, n); }, true);
}
