// Attention of many rows over the K/V buffers, on wgmma: the Hopper version (sm_90a) for D = 256 and 512.
//
// A block computes BLOCK_QUERIES rows of one head, 64 keys at a time: S = Q K^T, a running softmax in
// float32 (in base 2), O = P V. Two warpgroups compute, a third copies keys and values into a ring. With
// D = 256 each warpgroup has 64 queries of its own. With D = 512 both have the same 64 queries: each
// computes S for half of the keys and O for half of the dims, and P passes through shared memory. Blocks
// of keys that every query of the block masks are skipped.
//
// KEY_COLUMNS < D (D = 512 only): K has only the columns that rotate, the first KEY_COLUMNS / 2 of each half
// of a head. The others are those of V, for queries that rope.cu has multiplied by the weight of k's norm
// there. A tile of V then serves S and O, and two fit.
//
// Operands lie in panels of 64 dims: rows of 128 bytes in the 128-byte swizzle.
//
// Arguments, grid and conventions are those of attention_prefill.cu; 384 threads; dynamic shared memory
// MAXIMA_AT + 512 bytes. Instantiated by D, KEY_COLUMNS, Q_HEADS, KV_HEADS, WINDOW.
#include "session.cuh"
#include "hopper.cuh"
#include "panels.cuh"
#include "tensor_core.cuh"
#include "wgmma_attention.cuh"

constexpr int DIM_GROUPS = D / 256;  // warpgroups that share the same queries
constexpr int BLOCK_QUERIES = 128 / DIM_GROUPS;
constexpr int BLOCK_KEYS = 64;
constexpr int GROUP_KEYS = BLOCK_KEYS / DIM_GROUPS;  // of S of a warpgroup
constexpr bool SHARED_KV = KEY_COLUMNS < D;
constexpr int KEY_STAGES = 2 / DIM_GROUPS, VALUE_STAGES = SHARED_KV ? 2 : KEY_STAGES;
constexpr int CONSUMERS = 256, PRODUCERS = 128;
constexpr int DIM_PANELS = D / 64;
constexpr int QUERY_PANEL = BLOCK_QUERIES * 128, KEY_PANEL = BLOCK_KEYS * 128;
constexpr int ROTATED_PANELS = KEY_COLUMNS / 128;  // of K, of each half of a head
constexpr int KEY_BYTES = KEY_COLUMNS / 64 * KEY_PANEL, VALUE_BYTES = DIM_PANELS * KEY_PANEL;
constexpr int KEYS_AT = DIM_PANELS * QUERY_PANEL;
constexpr int VALUES_AT = KEYS_AT + KEY_STAGES * KEY_BYTES;
constexpr int WEIGHTS_AT = VALUES_AT + VALUE_STAGES * VALUE_BYTES;
// Rows of P are padded by 16 bytes: their chunks of one column lie in distinct banks.
constexpr int WEIGHT_ROW_BYTES = BLOCK_KEYS * 2 + 16;
constexpr int MAXIMA_AT = WEIGHTS_AT + (DIM_GROUPS > 1 ? BLOCK_QUERIES * WEIGHT_ROW_BYTES : 0);

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Stages of keys or of values, each with a barrier that says it is full and one that says it is empty.
template <int STAGES, int BYTES>
struct Ring {
    u32 tiles, full, empty, stage, phase;

    __device__ u32 tile() const { return tiles + stage * BYTES; }
    __device__ u32 full_barrier() const { return full + stage * 8; }
    __device__ u32 empty_barrier() const { return empty + stage * 8; }
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

using Keys = Ring<KEY_STAGES, KEY_BYTES>;
using Values = Ring<VALUE_STAGES, VALUE_BYTES>;

// The keys that a block of queries sees: positions from `first` (a multiple of BLOCK_KEYS) to `last_query`.
struct Span {
    u32 first, first_query, last_query, last;
};

// Starts the copy of COLUMNS columns of 64 rows of one head from position `first` on; positions past `last` give zeros, since a
// weight of zero times whatever an unwritten slot holds need not be zero.
template <int COLUMNS>
__device__ __forceinline__ void copy_tile(u32 to, const u16* buffer, u32 first, u32 slot, u32 last, u32 ring) {
    constexpr int CHUNKS = COLUMNS / 8, ROWS = PRODUCERS / CHUNKS, COPIES = BLOCK_KEYS / ROWS;
    const u32 thread = threadIdx.x - CONSUMERS, chunk = thread % CHUNKS, row0 = thread / CHUNKS;
    to += chunk / 8 * KEY_PANEL + row0 * 128;
    buffer += chunk * 8;
    const auto place = [&](int i) { return to + i * (ROWS * 128) + ((chunk ^ row0 + i % (8 / ROWS) * ROWS) & 7) * 16; };
    if (slot + BLOCK_KEYS <= ring && first + BLOCK_KEYS - 1 <= last) {
        // Constant distances leave one instruction a copy: address arithmetic would bound the whole kernel.
        const u16* from = buffer + u64(slot + row0) * (KV_HEADS * COLUMNS);
#pragma unroll
        for (int i = 0; i < COPIES; i++) copy_async_16(place(i), from + i * (ROWS * KV_HEADS * COLUMNS), true);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < COPIES; i++) {
        const u32 row = row0 + i * ROWS, at = (slot + row) % ring;
        const bool valid = first + row <= last;
        copy_async_16(place(i), buffer + (valid ? u64(at) * (KV_HEADS * COLUMNS) : 0), valid);
    }
}

// Copies keys and values of every block of keys.
__device__ __forceinline__ void produce(Keys k, Values v, const u16* keys, const u16* values, const Span& span, u32 ring) {
    u32 slot = span.first % ring;
    for (u32 block = span.first; block <= span.last_query; block += BLOCK_KEYS) {
        barrier_wait(k.empty_barrier(), k.phase ^ 1);
        copy_tile<KEY_COLUMNS>(k.tile(), keys, block, slot, span.last, ring);
        barrier_arrive_after_copies(k.full_barrier());
        k.advance();
        barrier_wait(v.empty_barrier(), v.phase ^ 1);
        copy_tile<D>(v.tile(), values, block, slot, span.last, ring);
        barrier_arrive_after_copies(v.full_barrier());
        v.advance();
        slot += BLOCK_KEYS;
        while (slot >= ring) slot -= ring;
    }
    // Shared memory outlives the copies.
    copy_async_commit();
    copy_async_wait<0>();
}

// Rounds the block's queries to bf16 panels; rows past `rows` are zeros.
__device__ __forceinline__ void load_queries(u8* to, const float* q, u32 row0, u32 rows, u32 head) {
#pragma unroll 8
    for (u32 i = threadIdx.x; i < BLOCK_QUERIES * (D / 8); i += CONSUMERS) {
        const u32 row = i / (D / 8), chunk = i % (D / 8);
        float4 low = {0.0f, 0.0f, 0.0f, 0.0f}, high = low;
        if (row0 + row < rows) {
            const float4* from = (const float4*)(q + (u64(row0 + row) * Q_HEADS + head) * D + chunk * 8);
            low = from[0], high = from[1];
        }
        *(uint4*)(to + chunk / 8 * QUERY_PANEL + swizzled_128(row, chunk % 8)) =
            make_uint4(bf16_pair(low.x, low.y), bf16_pair(low.z, low.w), bf16_pair(high.x, high.y), bf16_pair(high.z, high.w));
    }
    fence_tensor_cores();
    named_barrier(1, CONSUMERS);
}

// What a thread of the computing warpgroups knows of its place: rows g and g + 8 of its warp's sixteen.
struct Place {
    u32 base, dim_group, row, lane;  // `row`: row g, of the block's queries
    float* maxima;
    float scale2;
    Span span;
};

// Running softmax of the two rows, in base 2.
struct Softmax {
    float maximum[2], sum[2];
};

// Starts S = Q K^T for a tile of keys. Where K shares V's columns, the product with K's own is a group of
// its own, so that their tile is free early; `v` is at the values of the same keys.
__device__ __forceinline__ void start_scores(float (&s)[GROUP_KEYS / 2], u64 queries, const Keys& k, const Values& v, const Place& at) {
    const u32 keys_at = at.dim_group * (GROUP_KEYS * 128);
    const u64 tile = operand_descriptor(k.tile() + keys_at);
    // Sixteen columns of a panel of queries and one of keys.
    const auto multiply = [&](int query_panel, u64 keys, int key_panel, int i, bool accumulate) {
        wgmma_scores(s, queries + (query_panel * QUERY_PANEL + i * 32) / 16, keys + (key_panel * KEY_PANEL + i * 32) / 16, accumulate);
    };
    barrier_wait(k.full_barrier(), k.phase);
    fence_tensor_cores();
    wgmma_fence();
    if constexpr (!SHARED_KV) {
#pragma unroll
        for (int i = 0; i < D / 16; i++) multiply(i / 4, tile, i / 4, i % 4, i > 0);
    } else {
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS / 16; i++) {
            const int panel = i / 4;
            multiply(panel / ROTATED_PANELS * (DIM_PANELS / 2) + panel % ROTATED_PANELS, tile, panel, i % 4, i > 0);
        }
        wgmma_commit();
        barrier_wait(v.full_barrier(), v.phase);
        fence_tensor_cores();
        wgmma_fence();
        const u64 values = operand_descriptor(v.tile() + keys_at);
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            if (i / 4 % (DIM_PANELS / 2) >= ROTATED_PANELS) multiply(i / 4, values, i / 4, i % 4, true);
    }
    wgmma_commit();
}

// Starts O += P V for a tile of values.
__device__ __forceinline__ void start_values(float (&out)[128], const u32 (&p)[BLOCK_KEYS / 16][4], const Values& v, const Place& at) {
    barrier_wait(v.full_barrier(), v.phase);
    fence_tensor_cores();
    const u64 tile = transposed_operand_descriptor(v.tile() + at.dim_group * (4 * KEY_PANEL), KEY_PANEL);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 16; i++) wgmma_values(out, p[i], tile + i * (16 * 128 / 16));
    wgmma_commit();
}

// Waits until at most `PENDING` later groups of products are unfinished: the tile can be overwritten.
template <int PENDING, typename Tiles>
__device__ __forceinline__ void release(Tiles& ring, const Place& at) {
    wgmma_wait<PENDING>();
    if (at.lane == 0) barrier_arrive(ring.empty_barrier());
    ring.advance();
}

// After a wait: `values` can be read.
template <int COUNT>
__device__ __forceinline__ void finished(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Waits for scores, `PENDING` groups of products after them.
template <int PENDING>
__device__ __forceinline__ void finish_scores(float (&s)[GROUP_KEYS / 2], Keys& k, const Place& at) {
    release<PENDING + (SHARED_KV ? 1 : 0)>(k, at);
    if constexpr (SHARED_KV) wgmma_wait<PENDING>();
    finished(s);
}

// Waits for sums of values, `PENDING` groups of products after them.
template <int PENDING>
__device__ __forceinline__ void finish_values(float (&out)[128], Values& v, const Place& at) {
    release<PENDING>(v, at);
    finished(out);
}

// Masks scores and turns them into weights; `decay` is what earlier sums are to be multiplied by.
__device__ __forceinline__ void weigh(float (&s)[GROUP_KEYS / 2], Softmax& soft, float (&decay)[2], u32 block, const Place& at) {
    const u32 t = at.lane % 4;
    const bool masked =
        block + BLOCK_KEYS > at.span.first_query + 1 || (WINDOW > 0 && block + WINDOW <= at.span.last_query);
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        largest[h] = minus_infinity();
#pragma unroll
        for (int i = 0; i < GROUP_KEYS / 4; i++) {
            float& x = s[i / 2 * 4 + h * 2 + i % 2];
            if (masked) {
                const u32 query = at.span.first_query + at.row + h * 8;
                const u32 key = block + at.dim_group * GROUP_KEYS + i / 2 * 8 + t * 2 + i % 2;
                if (key > query || (WINDOW > 0 && query - key >= WINDOW)) x = minus_infinity();
            }
            largest[h] = fmaxf(largest[h], x);
        }
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
        if (DIM_GROUPS > 1 && t == 0) at.maxima[at.dim_group * 64 + at.row + h * 8] = largest[h];
    }
    if (DIM_GROUPS > 1) named_barrier(1, CONSUMERS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (DIM_GROUPS > 1) largest[h] = fmaxf(at.maxima[at.row + h * 8], at.maxima[64 + at.row + h * 8]);
        const float now = fmaxf(soft.maximum[h], largest[h] * at.scale2);
        // A row that has seen no key yet keeps zero sums.
        const float reference = now == minus_infinity() ? 0.0f : now;
        decay[h] = exp2_fast(soft.maximum[h] - reference);
        soft.maximum[h] = now;
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP_KEYS / 4; i++) {
            float& x = s[i / 2 * 4 + h * 2 + i % 2];
            x = exp2_fast(fmaf(x, at.scale2, -reference));
            added += x;
        }
        soft.sum[h] = soft.sum[h] * decay[h] + added;
    }
}

// Weights as A fragments of P V. With two groups each writes its keys' and reads all.
__device__ __forceinline__ void round_weights(u32 (&p)[BLOCK_KEYS / 16][4], const float (&s)[GROUP_KEYS / 2], const Place& at) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < GROUP_KEYS / 8; i++) {
            const u32 pair = bf16_pair(s[i * 4 + h * 2], s[i * 4 + h * 2 + 1]);
            if constexpr (DIM_GROUPS == 1) p[i / 2][i % 2 * 2 + h] = pair;
            else
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at.base + WEIGHTS_AT + (at.row + h * 8) * WEIGHT_ROW_BYTES +
                                                            (at.dim_group * GROUP_KEYS + i * 8 + at.lane % 4 * 2) * 2),
                             "r"(pair)
                             : "memory");
        }
    if constexpr (DIM_GROUPS > 1) {
        named_barrier(1, CONSUMERS);
        const u32 row = at.row - at.lane / 4 + at.lane % 16;
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 16; i++)
            load_matrix_x4(p[i], at.base + WEIGHTS_AT + row * WEIGHT_ROW_BYTES + at.lane / 16 * 16 + i * 32);
    }
}

// Walks the tiles. Where the ring of keys has a second stage, the scores of the next tile and the sums of
// this one are computed while weights are.
__device__ __forceinline__ void attend(float (&out)[128], Softmax& soft, u64 queries, Keys k, Values v, const Place& at) {
    float s[GROUP_KEYS / 2], decay[2];
    u32 p[BLOCK_KEYS / 16][4], block = at.span.first;
    start_scores(s, queries, k, v, at);
    finish_scores<0>(s, k, at);
    weigh(s, soft, decay, block, at);
    round_weights(p, s, at);
    for (block += BLOCK_KEYS; block <= at.span.last_query; block += BLOCK_KEYS) {
        Values next = v;
        next.advance();
        if constexpr (KEY_STAGES > 1) {
            start_scores(s, queries, k, next, at);
            start_values(out, p, v, at);
            finish_scores<1>(s, k, at);
            weigh(s, soft, decay, block, at);
            finish_values<0>(out, v, at);
        } else {
            start_values(out, p, v, at);
            start_scores(s, queries, k, next, at);
            finish_values<SHARED_KV ? 2 : 1>(out, v, at);
            finish_scores<0>(s, k, at);
            weigh(s, soft, decay, block, at);
        }
#pragma unroll
        for (int i = 0; i < 128; i++) out[i] *= decay[i / 2 % 2];
        round_weights(p, s, at);
    }
    start_values(out, p, v, at);
    finish_values<0>(out, v, at);
}

// Divides by the sums of weights and writes the block's rows of one head.
__device__ __forceinline__ void store(const float (&out)[128], Softmax& soft, u16* y, u32 row0, u32 rows, u32 panel_rows,
                                      u32 head, const Place& at) {
    const u32 t = at.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        soft.sum[h] += __shfl_xor_sync(~0u, soft.sum[h], 1);
        soft.sum[h] += __shfl_xor_sync(~0u, soft.sum[h], 2);
        if (DIM_GROUPS > 1 && t == 0) at.maxima[at.dim_group * 64 + at.row + h * 8] = soft.sum[h];
    }
    if (DIM_GROUPS > 1) named_barrier(1, CONSUMERS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = at.row + h * 8;
        const float inverse = __fdividef(1.0f, DIM_GROUPS > 1 ? at.maxima[row] + at.maxima[64 + row] : soft.sum[h]);
        if (row0 + row >= rows) continue;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const u32 column = head * D + at.dim_group * 256 + i * 8 + t * 2;
            *(u32*)(y + panel_at(row0 + row, column, panel_rows)) =
                bf16_pair(out[i * 4 + h * 2] * inverse, out[i * 4 + h * 2 + 1] * inverse);
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    attention_prefill(const float* q, const u64* table, u32 state, u32 keys, u32 values, u32 ring, u16* y, u32 rows,
                      u32 panel_rows, float scale) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * (KEY_STAGES + VALUE_STAGES)];
    const u32 base = shared_address(shared), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 head = blockIdx.x, row0 = (gridDim.y - 1 - blockIdx.y) * BLOCK_QUERIES;
    const u32 value_barriers = shared_address(barriers + 2 * KEY_STAGES);
    Keys k = {base + KEYS_AT, shared_address(barriers), shared_address(barriers + KEY_STAGES), 0, 0};
    Values v = {base + VALUES_AT, value_barriers, value_barriers + 8 * VALUE_STAGES, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < KEY_STAGES; i++) {
            barrier_init(k.full + i * 8, PRODUCERS);
            barrier_init(k.empty + i * 8, CONSUMERS / WARP);
        }
        for (int i = 0; i < VALUE_STAGES; i++) {
            barrier_init(v.full + i * 8, PRODUCERS);
            barrier_init(v.empty + i * 8, CONSUMERS / WARP);
        }
        barrier_init_fence();
    }
    __syncthreads();
    allow_successor();
    wait_for_predecessor();

    const u32 start = session_memory<u32>(table, state)[STATE_POSITION];
    Span span;
    span.last = start + rows - 1;
    span.first_query = start + row0;
    span.last_query = lesser(span.last, span.first_query + BLOCK_QUERIES - 1);
    span.first = WINDOW > 0 && span.first_query >= WINDOW ? (span.first_query - WINDOW + 1) / BLOCK_KEYS * BLOCK_KEYS : 0;

    if (threadIdx.x >= CONSUMERS) {
        give_registers<40>();
        const u32 kv_head = head / (Q_HEADS / KV_HEADS);
        produce(k, v, session_memory<u16>(table, keys) + kv_head * KEY_COLUMNS, session_memory<u16>(table, values) + kv_head * D,
                span, ring);
        return;
    }
    take_registers<232>();
    load_queries(shared, q, row0, rows, head);

    const u32 group = warp / 4, query_group = DIM_GROUPS == 1 ? group : 0;
    const u64 queries = operand_descriptor(base + query_group * (64 * 128));
    Place at = {base, DIM_GROUPS == 1 ? 0 : group, query_group * 64 + warp % 4 * 16 + lane / 4, lane,
                (float*)(shared + MAXIMA_AT), scale * 1.4426950408889634f, span};
    Softmax soft = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; i++) out[i] = 0.0f;
    attend(out, soft, queries, k, v, at);
    store(out, soft, y, row0, rows, panel_rows, head, at);
}
