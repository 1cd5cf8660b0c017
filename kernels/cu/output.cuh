// Where a kernel leaves a row of activations for the product that follows: as float32 [T, X_K], split as
// `linear_few` wants it (SPLIT_OUTPUT), or in panels as `linear_many` does, with room for PANEL_ROWS rows.
#pragma once
#include "panels.cuh"
#include "split.cuh"

// Writes columns 128 unit + 4 lane .. + 3 of a row; the whole warp takes part, and X_K is a multiple of 4.
__device__ __forceinline__ void write_activations(void* x, u32 unit, u32 row, float4 v, u32 lane) {
    if constexpr (SPLIT_OUTPUT) {
        split((u8*)x, X_UNITS, unit, row, v, lane, unit < X_UNITS);
    } else if constexpr (PANEL_ROWS > 0) {
        // Columns that complete the last panel are zero.
        const u32 column = unit * 128 + 4 * lane;
        const bool inside = column < X_K;
        if (column < ceil_div(u32(X_K), PANEL_COLUMNS) * PANEL_COLUMNS)
            store_panel_4((u16*)x, row, column, PANEL_ROWS, inside ? bf16_pair(v.x, v.y) : 0, inside ? bf16_pair(v.z, v.w) : 0);
    } else {
        const u32 column = unit * 128 + 4 * lane;
        if (column < X_K) *(float4*)((float*)x + u64(row) * X_K + column) = v;
    }
}
