// x[t] = row tokens[t] of a packed table, times `factor`. A row per block; blockIdx.y cuts the columns.
//
// Instantiated by packed.cuh's constants and N.
#include "packed.cuh"
#include "session.cuh"

constexpr int EMBED_THREADS = 256;

// tokens: u32 [T] at table[tokens] (the state's first word is the last token); x [T, K] float32.
// A token beyond the table reads its last row.
extern "C" __global__ void __launch_bounds__(EMBED_THREADS)
    embed(const u8* __restrict__ weight, const u64* table, u32 tokens, float* __restrict__ x, float factor) {
    allow_successor();
    const u32* ids = session_memory<const u32>(table, tokens);
    wait_for_predecessor();
    const u32 row = blockIdx.x, id = lesser(ids[row], u32(N) - 1);
    for (u32 column = blockIdx.y * EMBED_THREADS + threadIdx.x; column < K; column += gridDim.y * EMBED_THREADS)
        x[u64(row) * K + column] = packed_number(weight, N, id, column) * factor;
}
