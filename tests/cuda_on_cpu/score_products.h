// The CPU's counterpart of csattn/lightning/score/products.cuh. TMA copies complete when they are issued, and every
// thread computes its own products.

#include "../tensor_cores.cuh"
#include "tiles.cuh"

#define __grid_constant__

// A TMA descriptor, as `emulated.tensor_map` makes it.
struct TensorMap {
    const u8* address;
    long long rows, row_bytes, stride_bytes, box_rows, unused[11];
};
static_assert(sizeof(TensorMap) == 128, "as on the device");

// 16 bytes of a row of 128 bytes, in the 128-byte swizzle.
static inline u8* vector_of(u8* atom, int row, int vector) { return atom + row * ATOM_BYTES + (vector ^ row % 8) * 16; }

static inline void load_box(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    for (int r = 0; r < map->box_rows; ++r)
        for (int vector = 0; vector < ATOM_BYTES / 16; ++vector) {
            u8* const place = vector_of(static_cast<u8*>(to), r, vector);
            const long long first = static_cast<long long>(column) * ELEMENT_BYTES + vector * 16;
            const bool there = row + r < map->rows && first < map->row_bytes;
            if (there)
                std::memcpy(place, map->address + (row + r) * map->stride_bytes + first, 16);
            else
                std::memset(place, 0, 16);
        }
    bytes_arrive(barrier, map->box_rows * ATOM_BYTES);
}

static thread_local int turn_arrived[2], turn_round[2];
static inline void give_turn_to(int group) {
    if (++turn_arrived[group] < 256) return;
    turn_arrived[group] = 0;
    ++turn_round[group];
}
static inline void wait_for_turn(int group) {
    const int round = turn_round[group];
    give_turn_to(group);
    while (turn_round[group] == round) pause_thread();
}

static inline float element(const u8* place) {
    if (DTYPE == 2) {
        const int exponent = *place >> 3 & 15, mantissa = *place & 7;
        float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
        if (exponent == 15 && mantissa == 7) value = NAN;
        return *place & 0x80 ? -value : value;
    }
    unsigned short bits;
    std::memcpy(&bits, place, 2);
    if (DTYPE == 1) return __uint_as_float(static_cast<u32>(bits) << 16);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24);
    if (exponent == 31) value = mantissa ? NAN : INFINITY;
    return bits & 0x8000 ? -value : value;
}
static inline void read_row(float* row, const u8* tile, int tile_rows, int number) {
    constexpr int EACH = 16 / ELEMENT_BYTES;
    for (int i = 0; i < HEAD_DIM; ++i) {
        const int atom = i * ELEMENT_BYTES / ATOM_BYTES, vector = i / EACH % (ATOM_BYTES / 16);
        u8* const first = const_cast<u8*>(tile) + atom * tile_rows * ATOM_BYTES;
        row[i] = element(vector_of(first, number, vector) + i % EACH * ELEMENT_BYTES);
    }
}

static inline void multiply_tile(float (&d)[128], const u8* keys, const u8* columns) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float key[2][HEAD_DIM], column[HEAD_DIM];
    for (int r = 0; r < 2; ++r) read_row(key[r], keys, KEYS, first_row + 8 * r);
    for (int i = 0; i < 64; ++i) {
        read_row(column, columns, COLUMNS, i / 2 * 8 + lane % 4 * 2 + i % 2);
        for (int r = 0; r < 2; ++r) {
            float sum = 0;
            for (int j = 0; j < HEAD_DIM; ++j) sum += key[r][j] * column[j];
            d[i / 2 * 4 + 2 * r + i % 2] = sum;
        }
    }
}
static inline void add_positive(float& sum, float x, float weight) {
    if (x > 0 || x != x) sum = std::fma(x, weight, sum);
}
