// Rounds float32 rows [rows, K] to bfloat16 panels (panels.cuh).
//
// Instantiated by K. One thread for each 16 columns of a row; blocks of 32 such columns by 8 rows.
#include "panels.cuh"

constexpr u32 PADDED = ceil_div(u32(K), PANEL_COLUMNS) * PANEL_COLUMNS;

extern "C" __global__ void __launch_bounds__(256) to_panels(const float* x, u16* panels, u32 rows, u32 panel_rows) {
    allow_successor();
    wait_for_predecessor();
    const u32 row = blockIdx.y * 8 + threadIdx.x / 32, column = (blockIdx.x * 32 + threadIdx.x % 32) * 16;
    if (row >= rows || column >= PADDED) return;
    u32 pairs[8];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const float4 v = column + i * 4 < K ? *(const float4*)(x + u64(row) * K + column + i * 4) : float4();
        pairs[i * 2] = bf16_pair(v.x, v.y);
        pairs[i * 2 + 1] = bf16_pair(v.z, v.w);
    }
    store_panel_16(panels, row, column, panel_rows, pairs);
}
