// The CPU's counterpart of csattn/attention/products.cuh.

#define IS_bf16 1
#define IS_f16 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define IS_BF16 JOIN(IS_, ELEMENT)

static inline u16 to_half(float x) {
    if (IS_BF16) return pack_bf16(x, 0);
    const _Float16 value = x;
    u16 bits;
    std::memcpy(&bits, &value, 2);
    return bits;
}
static inline float unpack(u16 bits) { return IS_BF16 ? __uint_as_float(static_cast<u32>(bits) << 16) : half_as_float(bits); }
static inline u32 pack(float low, float high) { return to_half(low) | static_cast<u32>(to_half(high)) << 16; }

// ldmatrix: lane 8 i + r has the address of row r of matrix i. A lane gets two elements of row lane / 4 of each matrix.
static inline void load_matrices(u32 (&a)[4], u32 address) {
    exchange(address, [&](auto of_lane, int lane) {
        for (int i = 0; i < 4; ++i)
            std::memcpy(&a[i], static_cast<char*>(__cvta_shared_to_generic(of_lane(8 * i + lane / 4))) + lane % 4 * 4, 4);
        return 0;
    });
}
// The lane's two elements of the transposed matrix. of_row(row, column): an element of the matrix.
template <class OfRow> static inline u32 transposed(int lane, OfRow of_row) {
    const int row = lane % 4 * 2, column = lane / 4;
    return of_row(row, column) | static_cast<u32>(of_row(row + 1, column)) << 16;
}
static inline void load_matrices_transposed(u32 (&a)[4], u32 address) {
    exchange(address, [&](auto of_lane, int lane) {
        for (int i = 0; i < 4; ++i)
            a[i] = transposed(lane, [&](int row, int column) {
                return static_cast<const u16*>(__cvta_shared_to_generic(of_lane(8 * i + row)))[column];
            });
        return 0;
    });
}
static inline u32 transpose(u32 matrix) {
    return exchange(matrix, [](auto of_lane, int lane) {
        return transposed(lane, [&](int row, int column) {
            return static_cast<u16>(of_lane(row * 4 + column / 2) >> column % 2 * 16);
        });
    });
}
static inline void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    for_each_result(a, b[0], b[1], [&](int i, u32 x, u32 y) {
        for (int half = 0; half < 2; ++half) c[i] += unpack(x >> 16 * half) * unpack(y >> 16 * half);
    });
}
