// y = gelu_tanh(gate) * up, from partial sums of a product whose rows are packed in turns of eight.
// A warp per unit of 128 columns.
//
// Instantiated by SPLITS and output.cuh's constants; X_K, a multiple of 8, is the width of y.
#include "gelu.cuh"
#include "linear_output.cuh"
#include "output.cuh"

// Panels are bfloat16, and get what the epilogue of a product of many rows makes of the same sums.
__device__ __forceinline__ float gated(float gate, float up) {
    if constexpr (PANEL_ROWS > 0) return geglu(gate, up);
    else return gelu_tanh(gate) * up;
}

// sums [SPLITS, T, 2 X_K] float32; y as in output.cuh.
extern "C" __global__ void __launch_bounds__(128) geglu(const float* __restrict__ sums, void* __restrict__ y, u32 rows) {
    allow_successor();
    wait_for_predecessor();
    const u32 lane = threadIdx.x % WARP, unit = blockIdx.x * 4 + threadIdx.x / WARP, row = blockIdx.y;
    const u32 column = unit * 128 + 4 * lane;
    float4 gate = {0.0f, 0.0f, 0.0f, 0.0f}, up = gate;
    if (column < X_K) {
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            const float* from = sums + (u64(split) * rows + row) * (2 * X_K) + column / 8 * 16 + column % 8;
            const float4 g = *(const float4*)from, u = *(const float4*)(from + 8);
            gate.x += g.x, gate.y += g.y, gate.z += g.z, gate.w += g.w;
            up.x += u.x, up.y += u.y, up.z += u.z, up.w += u.w;
        }
    }
    const float4 result = {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
    write_activations(y, unit, row, result, lane);
}
