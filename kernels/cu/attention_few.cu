// Attention of 1 to 8 rows over the filled part of a ring of K and V, split over keys.
//
// `attention_few`: block (split, kv head, tile of 16 query rows). The query rows of a kv head are the
// heads that share it times the call's rows. Blocks of KEYS keys go through shared memory; scores and
// outputs are tensor-core products (bfloat16). Where at most 8 query rows exist, rows 0-7 of the
// instruction hold the upper and rows 8-15 the lower bfloat16 half of q and of the probabilities, so
// both count with 16 bits. Each split leaves its unnormalised output, maximum and sum.
// `attention_join`: adds the splits of a head in order (flash-decoding: Dao et al., 2023).
//
// KEY_COLUMNS < D: K has only the columns that rotate, the first KEY_COLUMNS / 2 of each half of a head.
// The others are those of V, for queries that rope.cu has multiplied by the weight of k's norm there.
//
// Positions first..last of the keys that any row sees are cut into blocks, the blocks into SPLITS
// contiguous ranges, from the position in device memory: cost follows the filled length.
//
// Instantiated by Q_HEADS, KV_HEADS, D, KEY_COLUMNS, STAGES (tiles in shared memory; 1 where K is whole),
// ROWS, KEYS, SPLITS, WINDOW (0: none), and for the join by
// output.cuh's constants, with X_K = Q_HEADS * D.
#include "output.cuh"
#include "session.cuh"

constexpr int WARPS = 4;
constexpr int RATIO = Q_HEADS / KV_HEADS;
constexpr int QUERIES = RATIO * ROWS;
constexpr bool HALVES = QUERIES <= 8;
constexpr bool SHARED_KV = KEY_COLUMNS < D;
constexpr int PITCH = D + 8;       // elements of a row of q and V in shared memory: no bank conflicts
constexpr int K_PITCH = KEY_COLUMNS + 8;  // likewise of K
constexpr int P_PITCH = KEYS + 8;  // likewise of the probabilities
constexpr int S_PITCH = KEYS + 4;  // floats of a row of scores
constexpr int WARP_KEYS = KEYS / WARPS;
constexpr int WARP_COLUMNS = D / WARPS;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int Q_AT = 0;
constexpr int K_AT = Q_AT + 16 * PITCH * 2;
constexpr int K_BYTES = KEYS * K_PITCH * 2, V_BYTES = KEYS * PITCH * 2;
constexpr int V_AT = K_AT + STAGES * K_BYTES;
constexpr int P_AT = V_AT + STAGES * V_BYTES;
constexpr int S_AT = P_AT + 16 * P_PITCH * 2;
constexpr int FACTOR_AT = S_AT + 16 * S_PITCH * 4;

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 16 bytes into shared memory, zeros where there is nothing to read.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// The keys that rows position .. position + rows - 1 see, the splits that have work, and the blocks of
// one of them.
struct Range {
    u32 first, last, splits, begin, end;
};
__device__ __forceinline__ Range split_range(u32 position, u32 rows, u32 split) {
    const u32 last = position + rows - 1;
    const u32 first = WINDOW == 0 || position < WINDOW ? 0 : position + 1 - WINDOW;
    const u32 blocks = ceil_div(last - first + 1, u32(KEYS)), splits = lesser(blocks, u32(SPLITS));
    return {first, last, splits, blocks * split / splits, blocks * (split + 1) / splits};
}

// Copies the rows of COLUMNS columns of a block of keys into rows of COLUMNS + 8.
template <u32 COLUMNS>
__device__ __forceinline__ void copy_block(u32 to, const u16* from, const Range& range, u32 block, u32 ring) {
    constexpr u32 CHUNKS = COLUMNS / 8;
    const u32 first = range.first + block * KEYS, first_slot = first % ring;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < KEYS * CHUNKS; i += WARPS * 32) {
        const u32 key = i / CHUNKS, chunk = i % CHUNKS;
        const bool inside = first + key <= range.last;
        u32 slot = inside ? first_slot + key : 0;
        if (slot >= ring) slot %= ring;
        copy_async(to + (key * (COLUMNS + 8) + chunk * 8) * 2, from + u64(slot) * (KV_HEADS * COLUMNS) + chunk * 8, inside);
    }
}

// q [T, Q_HEADS, D] float32; rings of bfloat16, K [ring, KV_HEADS, KEY_COLUMNS] and V [ring, KV_HEADS, D].
// sums [SPLITS, T, Q_HEADS, D] and stats [SPLITS, T, Q_HEADS, (maximum, sum)], float32.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    attention_few(const float* __restrict__ q, const u64* table, u32 state, u32 keys, u32 values, u32 ring,
                  float* __restrict__ sums, float2* __restrict__ stats, u32 rows, float scale) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 split = blockIdx.x, kv_head = blockIdx.y, query_tile = blockIdx.z * 16;
    allow_successor();
    const u16* key_rows = session_memory<const u16>(table, keys) + kv_head * KEY_COLUMNS;
    const u16* value_rows = session_memory<const u16>(table, values) + kv_head * D;
    const u32* words = session_memory<u32>(table, state);
    wait_for_predecessor();
    const u32 position = words[STATE_POSITION];
    const Range range = split_range(position, rows, split);
    if (split >= range.splits) return;

    u16* q_rows = (u16*)(shared + Q_AT);
    float* scores = (float*)(shared + S_AT);
    float* factors = (float*)(shared + FACTOR_AT);  // of the running output, per query row
    const u32 q_base = shared_address(shared + Q_AT), k_base = shared_address(shared + K_AT);
    const u32 v_base = shared_address(shared + V_AT), p_base = shared_address(shared + P_AT);
    u16* p_rows = (u16*)(shared + P_AT);

    const auto load_keys = [&](u32 block) {
        if (block < range.end)
            copy_block<KEY_COLUMNS>(k_base + block % STAGES * K_BYTES, key_rows, range, block, ring);
    };
    const auto load_values = [&](u32 block) {
        if (block < range.end) copy_block<D>(v_base + block % STAGES * V_BYTES, value_rows, range, block, ring);
    };
    // Groups of copies: where K is whole, keys and values in turns, else both of a block.
    if constexpr (SHARED_KV) {
        for (u32 block = range.begin; block < range.begin + STAGES; block++) load_keys(block), load_values(block), commit();
    } else {
        load_keys(range.begin), commit();
        load_values(range.begin), commit();
    }

    // Query `i` of the head: row i / RATIO of the call, head kv_head * RATIO + i % RATIO.
    for (u32 i = threadIdx.x; i < 16 * (D / 2); i += WARPS * 32) {
        const u32 r = i / (D / 2), column = i % (D / 2) * 2;
        const u32 query = query_tile + (HALVES ? r % 8 : r), row = query / RATIO;
        float2 v = {0.0f, 0.0f};
        if (query < QUERIES && row < rows)
            v = *(const float2*)(q + (u64(row) * Q_HEADS + kv_head * RATIO + query % RATIO) * D + column);
        u32 pair = bf16_pair(v.x, v.y);
        if (HALVES && r >= 8) pair = bf16_pair(v.x - bf16_low(pair), v.y - bf16_high(pair));
        *(u32*)(q_rows + r * PITCH + column) = pair;
    }

    constexpr int N_TILES = ceil_div(WARP_KEYS, 8);
    constexpr int O_TILES = WARP_COLUMNS / 8;
    float output[O_TILES][4] = {};
    // Softmax: eight lanes share a query row, four rows a warp.
    const u32 soft_row = warp * 4 + lane / 8;
    const u32 soft_query = query_tile + (HALVES ? soft_row % 8 : soft_row);
    const u32 soft_position = position + soft_query / RATIO;
    float maximum = LOWEST, total = 0.0f;

    for (u32 block = range.begin; block < range.end; block++) {
        wait_copies<SHARED_KV ? STAGES - 1 : 1>();
        __syncthreads();
        const u32 k_tile = k_base + block % STAGES * K_BYTES, v_tile = v_base + block % STAGES * V_BYTES;
        float s[N_TILES][4] = {};
        const u32 key_0 = warp * WARP_KEYS, key = key_0 + (N_TILES == 2 ? lane / 16 * 8 : 0) + lane % 8;
#pragma unroll(SHARED_KV ? D / 16 : 4)
        for (int d = 0; d < D; d += 16) {
            u32 a[4];
            load_matrices(a, q_base + ((lane % 16) * PITCH + d + lane / 16 * 8) * 2);
            u32 b[4];
            const int half = d / (D / 2), column = d % (D / 2);
            const bool shared_column = SHARED_KV && column >= KEY_COLUMNS / 2;
            const u32 row = shared_column ? v_tile + (key * PITCH + d) * 2
                                          : k_tile + (key * K_PITCH + half * (KEY_COLUMNS / 2) + column) * 2;
            load_matrices(b, row + lane / 8 % 2 * 16);
            multiply(s[0], a, b[0], b[1]);
            if constexpr (N_TILES == 2) multiply(s[N_TILES - 1], a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            float* at = scores + g * S_PITCH + key_0 + j * 8 + 2 * t;
            if constexpr (HALVES) {
                at[0] = s[j][0] + s[j][2];
                at[1] = s[j][1] + s[j][3];
            } else {
                at[0] = s[j][0], at[1] = s[j][1];
                at[8 * S_PITCH] = s[j][2], at[8 * S_PITCH + 1] = s[j][3];
            }
        }
        __syncthreads();
        if constexpr (!SHARED_KV) load_keys(block + 1), commit();

        if (!HALVES || soft_row < 8) {
            float p[KEYS / 8], block_maximum = LOWEST;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                const u32 key = lane % 8 + i * 8, at = range.first + block * KEYS + key;
                const bool seen = at <= soft_position && (WINDOW == 0 || soft_position - at < WINDOW);
                p[i] = seen ? scores[soft_row * S_PITCH + key] * (scale * LOG2_E) : MINUS_INFINITY;
                block_maximum = fmaxf(block_maximum, p[i]);
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset *= 2)
                block_maximum = fmaxf(block_maximum, __shfl_xor_sync(~0u, block_maximum, offset));
            const float updated = fmaxf(maximum, block_maximum), factor = exp2f(maximum - updated);
            maximum = updated;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                const u32 key = lane % 8 + i * 8;
                const float probability = exp2f(p[i] - updated);
                const u16 high = bf16_round(probability);
                p_rows[soft_row * P_PITCH + key] = high;
                if constexpr (HALVES) {
                    const u16 low = bf16_round(probability - bf16_float(high));
                    p_rows[(soft_row + 8) * P_PITCH + key] = low;
                    sum += bf16_float(high) + bf16_float(low);
                } else {
                    sum += bf16_float(high);
                }
            }
#pragma unroll
            for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
            total = total * factor + sum;
            if (lane % 8 == 0) {
                factors[soft_row] = factor;
                if constexpr (HALVES) factors[soft_row + 8] = factor;
            }
        }
        if constexpr (!SHARED_KV) wait_copies<1>();
        __syncthreads();
        const float factor_0 = factors[g], factor_1 = factors[g + 8];
#pragma unroll
        for (int j = 0; j < O_TILES; j++) {
            output[j][0] *= factor_0, output[j][1] *= factor_0;
            output[j][2] *= factor_1, output[j][3] *= factor_1;
        }
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) {
            u32 a[4];
            load_matrices(a, p_base + ((lane % 16) * P_PITCH + key + lane / 16 * 8) * 2);
            if constexpr (O_TILES == 1) {
                u32 b[2];
                load_matrices_turned(b, v_tile + ((key + lane % 16) * PITCH + warp * WARP_COLUMNS) * 2);
                multiply(output[0], a, b[0], b[1]);
            } else {
#pragma unroll
                for (int j = 0; j < O_TILES / 2; j++) {
                    u32 b[4];
                    load_matrices_turned(b, v_tile + ((key + lane % 16) * PITCH + warp * WARP_COLUMNS + j * 16 + lane / 16 * 8) * 2);
                    multiply(output[2 * j], a, b[0], b[1]);
                    multiply(output[2 * j + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
        if constexpr (SHARED_KV) load_keys(block + STAGES);
        load_values(block + STAGES), commit();
    }

    const auto result_row = [&](u32 query) {
        return (u64(split) * rows + query / RATIO) * Q_HEADS + kv_head * RATIO + query % RATIO;
    };
    const auto exists = [&](u32 query) { return query < QUERIES && query / RATIO < rows; };
#pragma unroll
    for (int j = 0; j < O_TILES; j++) {
        const u32 column = warp * WARP_COLUMNS + j * 8 + 2 * t;
        const u32 query = query_tile + g;
        if constexpr (HALVES) {
            if (exists(query)) *(float2*)(sums + result_row(query) * D + column) = {output[j][0] + output[j][2], output[j][1] + output[j][3]};
        } else {
            if (exists(query)) *(float2*)(sums + result_row(query) * D + column) = {output[j][0], output[j][1]};
            if (exists(query + 8)) *(float2*)(sums + result_row(query + 8) * D + column) = {output[j][2], output[j][3]};
        }
    }
    if ((!HALVES || soft_row < 8) && lane % 8 == 0 && exists(soft_query)) stats[result_row(soft_query)] = {maximum, total};
}

// A split's share of 128 columns: lane l holds columns 4 l .. 4 l + 3.
struct Share {
    float maximum, total;
    float4 out;
};
__device__ __forceinline__ Share join(const Share& a, const Share& b) {
    const float maximum = fmaxf(a.maximum, b.maximum), x = exp2f(a.maximum - maximum), y = exp2f(b.maximum - maximum);
    return {maximum, a.total * x + b.total * y,
            {a.out.x * x + b.out.x * y, a.out.y * x + b.out.y * y, a.out.z * x + b.out.z * y, a.out.w * x + b.out.w * y}};
}

// y [T, Q_HEADS, D], as in output.cuh. Block (unit of 128 columns, row); its warps take the splits in turns.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_join(const float* __restrict__ sums, const float2* __restrict__ stats, void* __restrict__ y,
                   const u64* table, u32 state, u32 rows) {
    __shared__ Share shares[WARPS - 1][WARP];
    allow_successor();
    const u32* words = session_memory<u32>(table, state);
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, unit = blockIdx.x, row = blockIdx.y;
    const u32 column = unit * 128 + 4 * lane;
    wait_for_predecessor();
    const u32 splits = split_range(words[STATE_POSITION], rows, 0).splits;
    Share all = {LOWEST, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (column < X_K) {
#pragma unroll 4
        for (u32 split = warp; split < splits; split += WARPS) {
            const u64 at = u64(split) * rows + row;
            const float2 part = stats[at * Q_HEADS + column / D];
            all = join(all, {part.x, part.y, *(const float4*)(sums + at * X_K + column)});
        }
    }
    if (warp > 0) shares[warp - 1][lane] = all;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int i = 0; i < WARPS - 1; i++) all = join(all, shares[i][lane]);
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
    if (column < X_K) out = {all.out.x / all.total, all.out.y / all.total, all.out.z / all.total, all.out.w / all.total};
    write_activations(y, unit, row, out, lane);
}
