// Activations as `linear_few` multiplies them: cut into fixed-point limbs (its head says how), or into
// two bfloat16 halves where the weight is dense.
//
// Of U units of 128 columns, one after another:
//   limbs   [unit][half of 64 columns][column][t] 16 bytes; column 2 v is the upper limb of virtual row
//           v, 2 v + 1 the lower one; word 2 s + r holds columns 32 s + 16 r + 4 t + byte
//           (dense: [unit][quarter of 32 columns][column][t], columns 2 row and 2 row + 1 are the halves
//           of a row; word 2 b + r holds columns 16 b + 8 r + 2 t + {0, 1})
//   sums    [unit][virtual row][X_SUMS] float32: sums of the limbs' integers over each group
//   scales  [unit][virtual row] float32
// U is all of X_K in device memory, one split's share in shared memory.
//
// Instantiated by X_K, X_ROWS, X_PARTS, X_SUMS (groups of a unit), X_DENSE.
#pragma once
#include "common.cuh"

constexpr int X_UNITS = ceil_div(X_K, 128);
constexpr int X_VIRTUAL = X_ROWS * X_PARTS;
constexpr int X_COLUMNS = 2 * X_VIRTUAL;  // of the instruction's B operand that are in use
constexpr int X_LIMB_BYTES = 128 * X_COLUMNS * (X_DENSE ? 2 : 1);
constexpr int X_SUM_BYTES = X_DENSE ? 0 : X_VIRTUAL * X_SUMS * 4;
constexpr int X_SCALE_BYTES = X_DENSE ? 0 : X_VIRTUAL * 4;

__device__ __forceinline__ constexpr int x_sums_at(int units) { return units * X_LIMB_BYTES; }
__device__ __forceinline__ constexpr int x_scales_at(int units) { return units * (X_LIMB_BYTES + X_SUM_BYTES); }
__device__ __forceinline__ constexpr int x_bytes(int units) { return units * (X_LIMB_BYTES + X_SUM_BYTES + X_SCALE_BYTES); }

__device__ __forceinline__ u32 bytes_of(const int (&v)[4]) {
    return (u32(v[0]) & 255) | (u32(v[1]) & 255) << 8 | (u32(v[2]) & 255) << 16 | u32(v[3]) << 24;
}

__device__ __forceinline__ void split_dense(u8* x, u32 unit, u32 row, float4 v, u32 lane, bool inside) {
    const u32 high[2] = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    const u32 low[2] = {bf16_pair(v.x - bf16_low(high[0]), v.y - bf16_high(high[0])),
                        bf16_pair(v.z - bf16_low(high[1]), v.w - bf16_high(high[1]))};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 column = 4 * lane + 2 * i, word = column / 16 % 2 * 2 + column / 8 % 2, t = column / 2 % 4;
        u32* at = (u32*)x + ((unit * 4 + column / 32) * X_COLUMNS + 2 * row) * 16 + t * 4 + word;
        if (inside) at[0] = high[i];
        if (inside) at[16] = low[i];
    }
}

__device__ __forceinline__ void split_quantized(u8* x, int units, u32 unit, u32 row, float4 v, u32 lane, bool inside) {
    // Of non-negative floats, the bits have the numbers' order.
    const float own = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    const float largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(own)));
    const float scale = largest * (1.0f / 16319.0f), inverse = largest > 0.0f ? __fdividef(16319.0f, largest) : 0.0f;
    float rest[4] = {v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse};
    float* sums = (float*)(x + x_sums_at(units)) + unit * X_VIRTUAL * X_SUMS;
    float* scales = (float*)(x + x_scales_at(units)) + unit * X_VIRTUAL;
    constexpr int SUM_LANES = 32 / X_SUMS;
#pragma unroll
    for (u32 part = 0; part < X_PARTS; part++) {
        int high[4], low[4], sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = __float2int_rn(rest[i]);
            rest[i] = (rest[i] - float(n)) * 16384.0f;
            high[i] = (n + 64) >> 7;
            low[i] = n - high[i] * 128;
            sum += n;
        }
        const u32 index = row * X_PARTS + part;
        u32* at = (u32*)x + ((unit * 2 + lane / 16) * X_COLUMNS + 2 * index) * 16 + lane % 4 * 4 + lane / 4 % 4;
        if (inside) at[0] = bytes_of(high);
        if (inside) at[16] = bytes_of(low);
#pragma unroll
        for (int offset = 1; offset < SUM_LANES; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (inside && lane % SUM_LANES == 0) sums[index * X_SUMS + lane / SUM_LANES] = float(sum);
        if (inside && lane == 0) scales[index] = part == 0 ? scale : scale * (1.0f / 16384.0f);
    }
}

// Splits 128 columns of a row into `unit` of `units`, if `inside`. The whole warp takes part; lane l holds
// columns 4 l .. 4 l + 3, zeros beyond the row's end.
__device__ __forceinline__ void split(u8* x, int units, u32 unit, u32 row, float4 v, u32 lane, bool inside) {
    if constexpr (X_DENSE) split_dense(x, unit, row, v, lane, inside);
    else split_quantized(x, units, unit, row, v, lane, inside);
}
