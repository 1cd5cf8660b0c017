// Where a kernel leaves a row of activations for the product that follows: as float32 [T, X_K], or
// split as `linear_few` wants it (SPLIT_OUTPUT).
#pragma once
#include "split.cuh"

// Writes columns 128 unit + 4 lane .. + 3 of a row; the whole warp takes part, and X_K is a multiple of 4.
__device__ __forceinline__ void write_activations(void* x, u32 unit, u32 row, float4 v, u32 lane) {
    if constexpr (SPLIT_OUTPUT) {
        split((u8*)x, X_UNITS, unit, row, v, lane, unit < X_UNITS);
    } else {
        const u32 column = unit * 128 + 4 * lane;
        if (column < X_K) *(float4*)((float*)x + u64(row) * X_K + column) = v;
    }
}
