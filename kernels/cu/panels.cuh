// Activations of many rows as the tensor-core products read them: bfloat16 in panels of 64 columns.
//
// Panel p holds columns 64p .. 64p+63 of all rows, 128 bytes a row, so the panel of any range of rows is
// one contiguous copy. A row is eight chunks of 16 bytes; chunk c of row t lies at place c ^ (t % 8), the
// 128-byte swizzle of the tensor cores. Of each 16 columns the even pairs (0 1, 4 5, 8 9, 12 13) make the
// first chunk and the odd pairs the second, so that lane 4g+t of a fragment meets columns 4t .. 4t+3, which
// packed.cuh puts into one word. Columns past the last one of a panel are zero; `panel_rows`, the rows
// that a panel has room for, is a multiple of 8.
#pragma once
#include "common.cuh"

constexpr u32 PANEL_COLUMNS = 64;

// Index of element (row, column).
__device__ __forceinline__ u64 panel_at(u32 row, u32 column, u32 panel_rows) {
    const u32 pair = column % 16 / 2, chunk = column % PANEL_COLUMNS / 16 * 2 + pair % 2;
    return (u64(column / PANEL_COLUMNS) * panel_rows + row) * PANEL_COLUMNS + ((chunk ^ row % 8) * 8 + pair / 2 * 2 + column % 2);
}

// Writes columns `column` .. `column` + 15 of a row (a multiple of 16), given as pairs in order.
__device__ __forceinline__ void store_panel_16(u16* panels, u32 row, u32 column, u32 panel_rows, const u32 (&pairs)[8]) {
    u16* to = panels + (u64(column / PANEL_COLUMNS) * panel_rows + row) * PANEL_COLUMNS;
    const u32 chunk = column % PANEL_COLUMNS / 8;
    *(uint4*)(to + (chunk ^ row % 8) * 8) = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
    *(uint4*)(to + (chunk + 1 ^ row % 8) * 8) = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
}

// Writes columns `column` .. `column` + 3 of a row (a multiple of 4), given as pairs.
__device__ __forceinline__ void store_panel_4(u16* panels, u32 row, u32 column, u32 panel_rows, u32 even, u32 odd) {
    u32* to = (u32*)(panels + (u64(column / PANEL_COLUMNS) * panel_rows + row) * PANEL_COLUMNS);
    const u32 chunk = column % PANEL_COLUMNS / 16 * 2, word = column % 16 / 4;
    to[(chunk ^ row % 8) * 4 + word] = even;
    to[(chunk + 1 ^ row % 8) * 4 + word] = odd;
}
