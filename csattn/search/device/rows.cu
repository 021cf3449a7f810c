// Dense rows of codes, and the sums that stand for scores.
//
// A score is the integer sum over subspaces of W * code. Two keys share a 32-bit sum of W * (code + largest): both lie in
// [0, 65534] by choice of W, so that neither reaches into the other. A lane adds up one column, 16 bytes of every row.
//
// Rows lie in tiles: TILE_BYTES of each row of a head, then the next TILE_BYTES of each. What a block reads at a time is
// then close together; whole rows, megabytes apart, cost half as much again in address translation.

constexpr u32 LARGEST_CODE = SCORE_BITS == 4 ? 7 : 127;
constexpr int TILE_BYTES = 512;
constexpr int TILE_COLUMNS = TILE_BYTES / 16;  // one for each lane
constexpr int COLUMN_KEYS = 128 / SCORE_BITS;
constexpr int TILE_KEYS = TILE_COLUMNS * COLUMN_KEYS;
constexpr int BLOCK_COLUMNS = 64 / COLUMN_KEYS;  // columns of a block of 64 keys: see csattn.table.rows
constexpr int QUADS = COLUMN_KEYS / 8;           // a quad: four sums of two keys, 16 bytes
constexpr int SUMS = COLUMN_KEYS / 2;

// What must be known of a query row to turn its sums into shares, besides the statistics of the tiles.
struct TileStatistics {
    u32 top;      // largest sum
    float total;  // sum over keys of 2 ** (slope * (sum - top))
};

// The lower key of sum `s` within its column's tile; the upper one is two keys further.
__device__ __forceinline__ int first_key(int column, int s) {
    const int place = column / BLOCK_COLUMNS * 64 + column % BLOCK_COLUMNS * 16;
    return SCORE_BITS == 4 ? place + s / 4 * 4 + s % 2 + s % 4 / 2 * 32 : place + s / 2 * 4 + s % 2;
}

// Where a quad of sums lies: [GROUP_SIZE][num_tiles][QUADS][TILE_COLUMNS] for each index head of each row of the batch.
__device__ __forceinline__ size_t quad_place(int g, int tile, int quad, int column, int num_tiles) {
    return ((static_cast<size_t>(g) * num_tiles + tile) * QUADS + quad) * TILE_COLUMNS + column;
}

// How far a 16-bit sum lies below `top`, exactly, from the negative offset of `below(top)`.
__device__ __forceinline__ float below(u32 top) { return -8388608.0f - static_cast<float>(top); }
__device__ __forceinline__ float distance(u32 sum, float below_top) { return __uint_as_float(sum | 0x4b000000u) + below_top; }
