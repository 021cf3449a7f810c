// Rows of queries and of keys, as Hopper's matrix units take them.
//
// Compiled for DTYPE: 0 float16, 1 bfloat16, 2 float8_e4m3fn; HEAD_DIM; COLUMNS.
#pragma once

constexpr int ELEMENT_BYTES = DTYPE == 2 ? 1 : 2;
constexpr int ATOM_BYTES = 128;  // of a row, that lie together in shared memory
constexpr int ATOMS = HEAD_DIM * ELEMENT_BYTES / ATOM_BYTES;
constexpr int KEYS = 64;  // of a tile: rows of one product
static_assert(HEAD_DIM * ELEMENT_BYTES % ATOM_BYTES == 0 && COLUMNS == 256, "rows are whole atoms");
