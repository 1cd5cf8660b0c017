// y[T, N] = x[T, K] W[N, K]^T for many rows, on mma.sync: the portable version (sm_80 and newer).
//
// A block computes BLOCK_TOKENS tokens of 128 features as y^T = W x^T: weights are dequantized in
// registers into A fragments, tokens pass through a ring of shared-memory stages of 64 columns.
// Grid: (token tiles, feature tiles), 256 threads: warps in 4 rows of 32 features and 2 columns of tokens.
//
// Parameters besides those of dequantize.cuh: BLOCK_TOKENS (32, 64 or 128), OUTPUT
// (OUTPUT_BF16, OUTPUT_F32, or OUTPUT_GEGLU: rows of W alternate in eights of gate and up, and
// y[T, N/2] = bf16(gelu_tanh(gate) * up)).
#include "linear_output.cuh"
#include "dequantize.cuh"

constexpr int BLOCK_FEATURES = 128;
constexpr int STAGES = 3;
constexpr int WARP_TOKENS = BLOCK_TOKENS / 2;
constexpr int STAGE_BYTES = BLOCK_TOKENS * 128;

__device__ __forceinline__ void load_tokens(unsigned stage, const bf16_bits* x, unsigned token0, unsigned rows,
                                            unsigned columns, unsigned step) {
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 32; i++) {
        unsigned row = i * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
        unsigned column = step * K_STEP + chunk * 8;
        bool valid = token0 + row < rows && column < columns;
        const bf16_bits* from = x + (valid ? (size_t)(token0 + row) * columns + column : 0);
        copy_async_16(stage + swizzled_128(row, chunk), from, valid);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
linear_many(void* __restrict__ y, const bf16_bits* __restrict__ x, const uint4* __restrict__ codes,
            const ScalePair* __restrict__ scales, const OffsetPair* __restrict__ offsets, unsigned rows, unsigned features,
            unsigned columns) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned ring = shared_address(shared);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned token0 = blockIdx.x * BLOCK_TOKENS, warp_token = (warp & 1) * WARP_TOKENS;
    const unsigned row_blocks = (features + 15) / 16;
    const unsigned row_block = blockIdx.y * (BLOCK_FEATURES / 16) + (warp >> 1) * 2;
    PackedWeight weight;
    weight.codes = codes;
    weight.scales = scales;
    weight.offsets = offsets;
    weight.steps = (columns + K_STEP - 1) / K_STEP;
    weight.groups = groups_of_row(columns);

    float sum[2][WARP_TOKENS / 8][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < WARP_TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;

    // Blocks past the last row read the last one again; their sums are not stored.
    const unsigned block[2] = {min(row_block, row_blocks - 1), min(row_block + 1, row_blocks - 1)};
    WeightStep next[2];
    load_step(next[0], weight, block[0], 0, lane);
    load_step(next[1], weight, block[1], 0, lane);
    wait_for_previous_kernel();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < weight.steps) load_tokens(ring + s * STAGE_BYTES, x, token0, rows, columns, s);
        copy_async_commit();
    }
    // Row and chunk that this lane names to ldmatrix: matrices (tokens 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const unsigned token_row = warp_token + (lane >> 4) * 8 + (lane & 7), half_chunk = lane >> 3 & 1;
    unsigned stage = 0;
    for (unsigned step = 0; step < weight.steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        unsigned fill = stage == 0 ? STAGES - 1 : stage - 1;
        if (step + STAGES - 1 < weight.steps)
            load_tokens(ring + fill * STAGE_BYTES, x, token0, rows, columns, step + STAGES - 1);
        copy_async_commit();
        WeightStep now[2] = {next[0], next[1]};
        if (step + 1 < weight.steps) {
            load_step(next[0], weight, block[0], step + 1, lane);
            load_step(next[1], weight, block[1], step + 1, lane);
        }
        StepFactors factors[2];
        prepare(factors[0], now[0]);
        prepare(factors[1], now[1]);
        const unsigned tokens = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < K_STEP / 16; j++) {
            unsigned a[2][4];
            fragment(a[0], now[0], factors[0], j);
            fragment(a[1], now[1], factors[1], j);
#pragma unroll
            for (int n = 0; n < WARP_TOKENS / 16; n++) {
                unsigned b[4];
                load_matrix_x4(b, tokens + swizzled_128(token_row + n * 16, j * 2 + half_chunk));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma_bf16(sum[m][n * 2], a[m], b[0], b[1]);
                    mma_bf16(sum[m][n * 2 + 1], a[m], b[2], b[3]);
                }
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_async_wait<0>();

    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const unsigned feature = (row_block + m) * 16;
#pragma unroll
        for (int n = 0; n < WARP_TOKENS / 8; n++) {
            const unsigned token = token0 + warp_token + n * 8;
            const float(&d)[4] = sum[m][n];
#if OUTPUT == OUTPUT_F32
#pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned row = token + 2 * t + (i & 1), column = feature + g + (i >> 1) * 8;
                if (row < rows && column < features) ((float*)y)[(size_t)row * features + column] = d[i];
            }
#else
            // After the transposition lane 4g+t holds token g and features 2t, 2t+1.
            const unsigned row = token + g;
#if OUTPUT == OUTPUT_GEGLU
            unsigned out = transpose_matrix(pack_bf16(geglu(d[0], d[2]), geglu(d[1], d[3])));
            if (row < rows && feature < features)
                *(unsigned*)((bf16_bits*)y + (size_t)row * (features / 2) + feature / 2 + 2 * t) = out;
#else
            unsigned low = transpose_matrix(pack_bf16(d[0], d[1])), high = transpose_matrix(pack_bf16(d[2], d[3]));
            bf16_bits* to = (bf16_bits*)y + (size_t)row * features + feature + 2 * t;
            if (row < rows && feature < features) *(unsigned*)to = low;
            if (row < rows && feature + 8 < features) *(unsigned*)(to + 8) = high;
#endif
#endif
        }
    }
}
