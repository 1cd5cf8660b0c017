// y[T, N] = x[T, K] W[N, K]^T for many rows, on mma.sync: the portable version (sm_80 and newer).
//
// A block computes BLOCK_TOKENS tokens of 128 features as y^T = W x^T: weights are dequantized in
// registers into A fragments, tokens (panels.cuh) pass through a ring of shared-memory stages of 64
// columns. Grid: (token tiles, feature tiles); 256 threads: warps in 4 rows of 32 features and 2
// columns of tokens; dynamic shared memory 3 * BLOCK_TOKENS * 128 bytes.
//
// Instantiated by packed.cuh's constants, N (a multiple of 8), BLOCK_TOKENS (32, 64 or 128) and OUTPUT (linear_output.cuh).
#include "dequantize.cuh"
#include "linear_output.cuh"

constexpr int BLOCK_FEATURES = 128;
constexpr int STAGES = 3;
constexpr int WARP_TOKENS = BLOCK_TOKENS / 2;
constexpr int STAGE_BYTES = BLOCK_TOKENS * 128;
constexpr u32 TILES = ceil_div(N, UNIT_ROWS);

// Copies the tokens of one panel, of which `from` is this thread's chunk of its first row (every 32nd row is
// this thread's). Rows past `room` are zeros.
__device__ __forceinline__ void load_tokens(u32 stage, const u16* from, i32 room) {
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 32; i++)
        copy_async_16(stage + i * (32 * 128) + threadIdx.x * 16, from + i * (32 * 64), i * 32 < room);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    linear_many(void* y, const u16* x, const u8* weight, u32 rows, u32 panel_rows) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 token0 = blockIdx.x * BLOCK_TOKENS, warp_token = warp % 2 * WARP_TOKENS;
    const u32 tile0 = blockIdx.y * (BLOCK_FEATURES / UNIT_ROWS) + warp / 2 * 2;

    float sum[2][WARP_TOKENS / 8][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < WARP_TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;

    // Tiles past the last read that one again; their sums are not stored.
    const u32 tile[2] = {lesser(tile0, TILES - 1), lesser(tile0 + 1, TILES - 1)};
    WeightStep next[2];
    StepFactors factors[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        load_step(next[m], weight, tile[m], 0, lane);
        prepare_rows(factors[m], weight, N, tile[m], lane);
    }
    allow_successor();
    wait_for_predecessor();
    const u32 first_row = token0 + threadIdx.x / 8;
    const i32 room = i32(panel_rows) - i32(first_row);
    const u16* from = x + u64(first_row) * PANEL_COLUMNS + threadIdx.x % 8 * 8;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < STEPS) load_tokens(ring + s * STAGE_BYTES, from, room);
        copy_async_commit();
        from += u64(panel_rows) * PANEL_COLUMNS;
    }
    // What this lane names to ldmatrix: matrices (tokens 0-7, chunk 0), (0-7, 1), (8-15, 0), (8-15, 1).
    const u32 token_row = warp_token + lane / 16 * 8 + lane % 8, half_chunk = lane / 8 % 2;
    u32 stage = 0;
    for (u32 step = 0; step < STEPS; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        const u32 fill = stage == 0 ? STAGES - 1 : stage - 1;
        if (step + STAGES - 1 < STEPS) load_tokens(ring + fill * STAGE_BYTES, from, room);
        copy_async_commit();
        from += u64(panel_rows) * PANEL_COLUMNS;
        const WeightStep now[2] = {next[0], next[1]};
        prepare_step(factors[0], now[0]);
        prepare_step(factors[1], now[1]);
        const u32 tokens = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < STEP_COLUMNS / 16; j++) {
            u32 a[2][4];
            fragment(a[0], now[0], factors[0], j);
            fragment(a[1], now[1], factors[1], j);
            // Not earlier: by now half of the step's codes have left their registers.
            if (j == 2 && step + 1 < STEPS) {
                load_step(next[0], weight, tile[0], step + 1, lane);
                load_step(next[1], weight, tile[1], step + 1, lane);
            }
#pragma unroll
            for (int n = 0; n < WARP_TOKENS / 16; n++) {
                u32 b[4];
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

    const u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const u32 feature = (tile0 + m) * UNIT_ROWS;
#pragma unroll
        for (int n = 0; n < WARP_TOKENS / 8; n++) {
            const u32 token = token0 + warp_token + n * 8;
            const float(&d)[4] = sum[m][n];
            if constexpr (OUTPUT == ROWS_F32) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 row = token + 2 * t + i % 2, column = feature + g + i / 2 * 8;
                    if (row < rows && column < N) ((float*)y)[u64(row) * N + column] = d[i];
                }
            } else {
                // After the transposition lane 4g+t holds token g and features 2t, 2t+1.
                const u32 row = token + g;
                if constexpr (OUTPUT == PANELS_GEGLU) {
                    // Columns that complete the last panel are zero.
                    const u32 column = feature / 2 + 2 * t, width = N / 2;
                    const u32 out = transpose_matrix(bf16_pair(geglu(d[0], d[2]), geglu(d[1], d[3])));
                    if (row < rows && column < ceil_div(width, PANEL_COLUMNS) * PANEL_COLUMNS)
                        *(u32*)((u16*)y + panel_at(row, column, panel_rows)) = column < width ? out : 0;
                } else {
                    const u32 low = transpose_matrix(bf16_pair(d[0], d[1])), high = transpose_matrix(bf16_pair(d[2], d[3]));
                    u16* to = (u16*)y + u64(row) * N + feature + 2 * t;
                    if (row < rows && feature < N) *(u32*)to = low;
                    if (row < rows && feature + 8 < N) *(u32*)(to + 8) = high;
                }
            }
        }
    }
}
