// What csattn/search/device/intrinsics.cu has for the device.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static inline float power_of_two(float exponent) {
    const float value = std::exp2(exponent);
    return value < 1.17549435e-38f ? 0.0f : value;
}

static inline float half_as_float(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

static inline void wait_for_earlier(u32 known = 0) {}
static inline void start_copy(uint4* to, const void* from) { std::memcpy(to, from, 16); }
template <int TO, int FROM> static inline void start_copy_at(u32 place, const void* from) {
    std::memcpy(__cvta_shared_to_generic(place + TO), static_cast<const char*>(from) + FROM, 16);
}
static inline u32 kept(u32 x) { return x; }
static inline void end_group() {}
template <int LEFT> static inline void wait_for_copies() {}

static inline void post(float* to, float4 x) { std::memcpy(to, &x, sizeof x); }
static inline u32 and_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }

// What a lane has of the operands of a product.
struct Operands {
    u32 a[4], b[2];
};

// use(row, column, a's and b's registers for the row and column with which half of their lines, by lane) for each of the
// lane's four results
template <class Use> static inline void for_each_result(const u32 (&a)[4], u32 b0, u32 b1, Use use) {
    exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of_lane, int lane) {
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 4; ++k)
                for (int half = 0; half < 2; ++half) {
                    const Operands row = of_lane(lane / 4 * 4 + k), column = of_lane((lane % 4 * 2 + i % 2) * 4 + k);
                    use(i, row.a[i / 2 + 2 * half], column.b[half]);
                }
        return 0;
    });
}
static inline void multiply_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    for_each_result(a, b0, b1, [&](int i, u32 x, u32 y) {
        for (int byte = 0; byte < 32; byte += 8) d[i] += static_cast<signed char>(x >> byte) * static_cast<int>(y >> byte & 0xff);
    });
}
static inline void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for_each_result(a, b0, b1, [&](int i, u32 x, u32 y) {
        for (int half = 0; half < 2; ++half)
            d[i] += __uint_as_float(x >> 16 * half << 16) * __uint_as_float(y >> 16 * half << 16);
    });
}
static inline u32 pack_bf16(float low, float high) {
    auto rounded = [](float x) {
        const u32 bits = __float_as_uint(x);
        return bits + 0x7fff + (bits >> 16 & 1) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}

static inline void cluster_sync() { wait_for_cluster(arrive_at_cluster()); }  // `in_block` is the emulator's
