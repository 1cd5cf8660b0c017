// Rounds float32 rows [rows, K] to bfloat16 panels (panels.cuh).
//
// Instantiated by K. One thread for each 16 columns; 256 threads.
#include "panels.cuh"

constexpr u32 BLOCKS = ceil_div(u32(K), PANEL_COLUMNS) * 4;  // of 16 columns

extern "C" __global__ void __launch_bounds__(256) to_panels(const float* x, u16* panels, u32 rows, u32 panel_rows) {
    wait_for_predecessor();
    allow_successor();
    const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / BLOCKS, column = index % BLOCKS * 16;
    if (row >= rows) return;
    u32 pairs[8];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const float4 v = column + i * 4 < K ? *(const float4*)(x + u64(row) * K + column + i * 4) : float4();
        pairs[i * 2] = bf16_pair(v.x, v.y);
        pairs[i * 2 + 1] = bf16_pair(v.z, v.w);
    }
    store_panel_16(panels, row, column, panel_rows, pairs);
}
