// Attention of many rows over the K/V buffers, on mma.sync: the portable version (sm_80 and newer).
//
// A block computes BLOCK_QUERIES rows of one head: S = Q K^T over BLOCK_KEYS keys at a time, a running
// softmax in float32 (in base 2), O = P V. Warps lie in ROW_WARPS rows of 16 * ROW_TILES queries and
// COLUMN_WARPS columns: each column computes S for its share of the keys and O for its share of the
// head's dims, and P passes between columns through shared memory. Blocks of keys that every query of
// the block masks are skipped.
//
// KEY_COLUMNS < D: K has only the columns that rotate, the first KEY_COLUMNS / 2 of each half of a head.
// The others are those of V, for queries that rope.cu has multiplied by the weight of k's norm there.
//
// q [rows, Q_HEADS, D] float32, rotated. K [ring, KV_HEADS, KEY_COLUMNS] and V [ring, KV_HEADS, D], bfloat16,
// at table[keys] and table[values]: position p lies in slot p % ring; those of the rows of this call are already written.
// Row i has the state's position + i and sees keys at a distance from 0 up to WINDOW - 1, or any distance
// if WINDOW is 0. y: panels.cuh, Q_HEADS * D columns. Scores are multiplied by `scale`.
// Grid: (Q_HEADS, row tiles), the tiles with most keys first; 32 * ROW_WARPS * COLUMN_WARPS threads; dynamic
// shared memory MAXIMA_AT bytes, and a float for each query and column of warps if there are several.
//
// Instantiated by D, KEY_COLUMNS, Q_HEADS, KV_HEADS, WINDOW, ROW_TILES, ROW_WARPS, COLUMN_WARPS, BLOCK_KEYS,
// STAGES (tiles in shared memory; 1 where K is whole).
#include "session.cuh"
#include "panels.cuh"
#include "tensor_core.cuh"

constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int BLOCK_QUERIES = 16 * ROW_TILES * ROW_WARPS;
constexpr int WARP_KEYS = BLOCK_KEYS / COLUMN_WARPS;  // a multiple of 16
constexpr int WARP_DIMS = D / COLUMN_WARPS;           // a multiple of 16
constexpr bool SHARED_KV = KEY_COLUMNS < D;
// Rows are padded by 16 bytes: their chunks of one column lie in distinct banks.
constexpr int ROW_BYTES = D * 2 + 16, KEY_ROW_BYTES = KEY_COLUMNS * 2 + 16;
constexpr int KEYS_BYTES = BLOCK_KEYS * KEY_ROW_BYTES, VALUES_BYTES = BLOCK_KEYS * ROW_BYTES;
constexpr int WEIGHT_ROW_BYTES = BLOCK_KEYS * 2 + 16;
constexpr int KEYS_AT = BLOCK_QUERIES * ROW_BYTES;
constexpr int VALUES_AT = KEYS_AT + STAGES * KEYS_BYTES;
constexpr int WEIGHTS_AT = VALUES_AT + STAGES * VALUES_BYTES;
constexpr int MAXIMA_AT = WEIGHTS_AT + (COLUMN_WARPS > 1 ? BLOCK_QUERIES * WEIGHT_ROW_BYTES : 0);

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies COLUMNS columns of BLOCK_KEYS rows of one head from position `first` on; positions past `last` give
// zeros, since a weight of zero times whatever an unwritten slot holds need not be zero.
template <int COLUMNS>
__device__ __forceinline__ void load_block(u32 to, const u16* buffer, u32 first, u32 slot, u32 last, u32 ring) {
    constexpr int CHUNKS = COLUMNS / 8, ROWS = THREADS / CHUNKS, COPIES = ceil_div(BLOCK_KEYS, ROWS);
    constexpr int TO_BYTES = COLUMNS * 2 + 16;
    static_assert(THREADS % CHUNKS == 0, "threads copy whole rows");
    const u32 row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    if (ROWS > BLOCK_KEYS && row0 >= BLOCK_KEYS) return;
    to += row0 * TO_BYTES + chunk * 16;
    buffer += chunk * 8;
    if (slot + BLOCK_KEYS <= ring && first + BLOCK_KEYS - 1 <= last) {
        const u16* from = buffer + u64(slot + row0) * (KV_HEADS * COLUMNS);
#pragma unroll
        for (int i = 0; i < COPIES; i++) copy_async_16(to + i * (ROWS * TO_BYTES), from + i * (ROWS * KV_HEADS * COLUMNS), true);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < COPIES; i++) {
        const u32 row = row0 + i * ROWS, at = (slot + row) % ring;
        const bool valid = first + row <= last;
        copy_async_16(to + i * (ROWS * TO_BYTES), buffer + (valid ? u64(at) * (KV_HEADS * COLUMNS) : 0), valid);
    }
}

// Running softmax of the two rows (g, g + 8) of each row tile that a lane has part in.
struct Softmax {
    float maximum[ROW_TILES][2], sum[ROW_TILES][2];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_prefill(const float* q, const u64* table, u32 state, u32 keys, u32 values, u32 ring, u16* y, u32 rows,
                      u32 panel_rows, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = shared_address(shared), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 row_warp = warp / COLUMN_WARPS, column_warp = warp % COLUMN_WARPS, g = lane / 4, t = lane % 4;
    const u32 head = blockIdx.x, tile = gridDim.y - 1 - blockIdx.y, row0 = tile * BLOCK_QUERIES;
    const u32 warp_row = row_warp * (16 * ROW_TILES);
    allow_successor();
    wait_for_predecessor();

    const u32 start = session_memory<u32>(table, state)[STATE_POSITION], last = start + rows - 1;
    const u32 first_query = start + row0, last_query = lesser(last, first_query + BLOCK_QUERIES - 1);
    const u32 first_key = WINDOW > 0 && first_query >= WINDOW ? first_query - WINDOW + 1 : 0;
    const u16* head_keys = session_memory<u16>(table, keys) + head / (Q_HEADS / KV_HEADS) * KEY_COLUMNS;
    const u16* head_values = session_memory<u16>(table, values) + head / (Q_HEADS / KV_HEADS) * D;

    // Tiles of keys are copied in turns: where K is whole, keys and values apart, else together.
    u32 block = first_key / BLOCK_KEYS * BLOCK_KEYS, stage = 0;
    const auto load_keys = [&](u32 first, u32 to) {
        if (first <= last_query)
            load_block<KEY_COLUMNS>(base + KEYS_AT + to * KEYS_BYTES, head_keys, first, first % ring, last, ring);
    };
    const auto load_values = [&](u32 first, u32 to) {
        if (first <= last_query)
            load_block<D>(base + VALUES_AT + to * VALUES_BYTES, head_values, first, first % ring, last, ring);
    };
    if constexpr (SHARED_KV) {
        for (u32 i = 0; i < STAGES; i++) load_keys(block + i * BLOCK_KEYS, i), load_values(block + i * BLOCK_KEYS, i), copy_async_commit();
    } else {
        load_keys(block, 0), copy_async_commit();
        load_values(block, 0), copy_async_commit();
    }
    for (u32 i = threadIdx.x; i < BLOCK_QUERIES * (D / 4); i += THREADS) {
        const u32 row = i / (D / 4), quarter = i % (D / 4);
        float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
        if (row0 + row < rows) v = *(const float4*)(q + (u64(row0 + row) * Q_HEADS + head) * D + quarter * 4);
        *(uint2*)(shared + row * ROW_BYTES + quarter * 8) = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
    }

    // What a lane names to ldmatrix. A operand: (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1); B of S:
    // (keys 0-7, chunk 0), (0-7, 1), (8-15, 0), (8-15, 1); B of O, transposed: keys as rows of A, dims as chunks.
    const u32 query_at = base + (warp_row + lane % 16) * ROW_BYTES + lane / 16 * 16;
    const u32 score_key = column_warp * WARP_KEYS + lane / 16 * 8 + lane % 8;
    const u32 key_at = base + KEYS_AT + score_key * KEY_ROW_BYTES + lane / 8 % 2 * 16;
    const u32 shared_key_at = base + VALUES_AT + score_key * ROW_BYTES + lane / 8 % 2 * 16;
    const u32 value_at = base + VALUES_AT + (lane % 16) * ROW_BYTES + column_warp * (WARP_DIMS * 2) + lane / 16 * 16;
    const u32 weight_at = base + WEIGHTS_AT + (warp_row + lane % 16) * WEIGHT_ROW_BYTES + lane / 16 * 16;
    float* maxima = (float*)(shared + MAXIMA_AT);
    const float scale2 = scale * 1.4426950408889634f;

    float out[ROW_TILES][WARP_DIMS / 8][4];
    Softmax soft;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < WARP_DIMS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[m][n][i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) soft.maximum[m][h] = minus_infinity(), soft.sum[m][h] = 0.0f;
    }

    for (; block <= last_query; block += BLOCK_KEYS) {
        const u32 next_block = block + BLOCK_KEYS;
        copy_async_wait<SHARED_KV ? STAGES - 1 : 1>();
        __syncthreads();
        float s[ROW_TILES][WARP_KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll(SHARED_KV ? D / 16 : 4)
        for (int k = 0; k < D / 16; k++) {
            const int half = k / (D / 32), column = k % (D / 32);  // in units of 16
            const bool from_values = SHARED_KV && column >= KEY_COLUMNS / 32;
            u32 a[ROW_TILES][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) load_matrix_x4(a[m], query_at + m * 16 * ROW_BYTES + k * 32);
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 16; n++) {
                u32 b[4];
                load_matrix_x4(b, from_values ? shared_key_at + stage * VALUES_BYTES + n * 16 * ROW_BYTES + k * 32
                                              : key_at + stage * KEYS_BYTES + n * 16 * KEY_ROW_BYTES + (half * (KEY_COLUMNS / 32) + column) * 32);
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma_bf16(s[m][n * 2], a[m], b[0], b[1]);
                    mma_bf16(s[m][n * 2 + 1], a[m], b[2], b[3]);
                }
            }
        }

        const bool masked = next_block > first_query + 1 || (WINDOW > 0 && block + WINDOW <= last_query);
        float maximum[ROW_TILES][2];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 query = first_query + warp_row + m * 16 + h * 8 + g;
                float largest = minus_infinity();
#pragma unroll
                for (int n = 0; n < WARP_KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[m][n][h * 2 + e];
                        const u32 key = block + column_warp * WARP_KEYS + n * 8 + t * 2 + e;
                        if (masked && (key > query || (WINDOW > 0 && query - key >= WINDOW))) x = minus_infinity();
                        largest = fmaxf(largest, x);
                    }
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                maximum[m][h] = largest;
                if (COLUMN_WARPS > 1 && t == 0)
                    maxima[column_warp * BLOCK_QUERIES + warp_row + m * 16 + h * 8 + g] = largest;
            }
        __syncthreads();
        if constexpr (!SHARED_KV) load_keys(next_block, 0), copy_async_commit();

        u32 p[ROW_TILES][WARP_KEYS / 8][2];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float largest = maximum[m][h];
                if (COLUMN_WARPS > 1) {
#pragma unroll
                    for (int c = 0; c < COLUMN_WARPS; c++)
                        largest = fmaxf(largest, maxima[c * BLOCK_QUERIES + warp_row + m * 16 + h * 8 + g]);
                }
                largest = fmaxf(soft.maximum[m][h], largest * scale2);
                // A row that has seen no key yet keeps zero sums.
                const float reference = largest == minus_infinity() ? 0.0f : largest;
                const float decay = exp2_fast(soft.maximum[m][h] - reference);
                soft.maximum[m][h] = largest;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < WARP_KEYS / 8; n++) {
                    const float low = exp2_fast(fmaf(s[m][n][h * 2], scale2, -reference));
                    const float high = exp2_fast(fmaf(s[m][n][h * 2 + 1], scale2, -reference));
                    sum += low + high;
                    p[m][n][h] = bf16_pair(low, high);
                    if (COLUMN_WARPS > 1)
                        *(u32*)(shared + WEIGHTS_AT + (warp_row + m * 16 + h * 8 + g) * WEIGHT_ROW_BYTES +
                                (column_warp * WARP_KEYS + n * 8 + t * 2) * 2) = p[m][n][h];
                }
                soft.sum[m][h] = soft.sum[m][h] * decay + sum;
#pragma unroll
                for (int n = 0; n < WARP_DIMS / 8; n++) out[m][n][h * 2] *= decay, out[m][n][h * 2 + 1] *= decay;
            }

        if constexpr (!SHARED_KV) copy_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BLOCK_KEYS / 16; k++) {
            u32 a[ROW_TILES][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                if constexpr (COLUMN_WARPS > 1) {
                    load_matrix_x4(a[m], weight_at + m * 16 * WEIGHT_ROW_BYTES + k * 32);
                } else {
                    a[m][0] = p[m][k * 2][0], a[m][1] = p[m][k * 2][1];
                    a[m][2] = p[m][k * 2 + 1][0], a[m][3] = p[m][k * 2 + 1][1];
                }
            }
#pragma unroll
            for (int n = 0; n < WARP_DIMS / 16; n++) {
                u32 b[4];
                load_matrix_x4_transposed(b, value_at + stage * VALUES_BYTES + k * 16 * ROW_BYTES + n * 32);
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma_bf16(out[m][n * 2], a[m], b[0], b[1]);
                    mma_bf16(out[m][n * 2 + 1], a[m], b[2], b[3]);
                }
            }
        }
        __syncthreads();
        const u32 free = block + STAGES * BLOCK_KEYS;
        if constexpr (SHARED_KV) load_keys(free, stage);
        load_values(free, stage), copy_async_commit();
        if (++stage == STAGES) stage = 0;
    }
    copy_async_wait<0>();

#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = soft.sum[m][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const u32 row = warp_row + m * 16 + h * 8 + g;
            if (COLUMN_WARPS > 1) {
                if (t == 0) maxima[column_warp * BLOCK_QUERIES + row] = sum;
            }
            soft.sum[m][h] = sum;
        }
    if (COLUMN_WARPS > 1) __syncthreads();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 row = warp_row + m * 16 + h * 8 + g;
            float sum = soft.sum[m][h];
            if (COLUMN_WARPS > 1) {
                sum = 0.0f;
#pragma unroll
                for (int c = 0; c < COLUMN_WARPS; c++) sum += maxima[c * BLOCK_QUERIES + row];
            }
            const float inverse = __fdividef(1.0f, sum);
            if (row0 + row >= rows) continue;
#pragma unroll
            for (int n = 0; n < WARP_DIMS / 8; n++) {
                const u32 column = head * D + column_warp * WARP_DIMS + n * 8 + t * 2;
                *(u32*)(y + panel_at(row0 + row, column, panel_rows)) =
                    bf16_pair(out[m][n][h * 2] * inverse, out[m][n][h * 2 + 1] * inverse);
            }
        }
}
