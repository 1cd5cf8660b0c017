// y = gelu_tanh(gate) * up, from partial sums of a product whose rows are packed in turns of eight.
//
// Instantiated by I (columns of y, a multiple of 8) and SPLITS.
#include "common.cuh"
#include "gelu.cuh"

// sums [SPLITS, T, 2 I], y [T, I], float32.
extern "C" __global__ void __launch_bounds__(256)
    geglu(const float* __restrict__ sums, float* __restrict__ y, u32 rows) {
    allow_successor();
    wait_for_predecessor();
    const u32 column = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (column >= I) return;
    const u32 at = column / 8 * 16 + column % 8;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        const float* from = sums + (u64(split) * rows + row) * (2 * I) + at;
        gate += from[0];
        up += from[8];
    }
    y[u64(row) * I + column] = gelu_tanh(gate) * up;
}
