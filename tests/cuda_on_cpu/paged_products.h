// The CPU's counterpart of csattn/lightning/paged/products.cuh: every thread computes its own products.

#include "../tensor_cores.cuh"

static inline void store_unit(char* query, int head, int unit, uint4 channels) {
    std::memcpy(query + head * 128 + unit * 16, &channels, 16);
}

static inline float from_e4m3(char bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    if (exponent == 15 && mantissa == 7) value = NAN;
    return bits & 0x80 ? -value : value;
}
static inline void multiply_page(float (&products)[32], const char* page, const char* query) {
    const int quad = threadIdx.x % 4, first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    for (int j = 0; j < 32; ++j) {
        const int key = first + j / 2 % 2 * 8, head = j / 4 * 8 + quad * 2 + j % 2;
        products[j] = 0;
        for (int i = 0; i < 128; ++i) products[j] += from_e4m3(page[key * 128 + i]) * from_e4m3(query[head * 128 + i]);
    }
}
