// y[T, N] = x[T, K] W[N, K]^T for many rows, on wgmma: the Hopper version (sm_90a).
//
// A cluster of CLUSTER blocks computes BLOCK_TOKENS tokens of CLUSTER * 128 features as y^T = W x^T. In
// each block two warpgroups own 64 features each: they dequantize weights in registers into the A operand
// while the tensor cores work on the columns before. One thread of a third warpgroup copies x (panels.cuh)
// into a ring of shared-memory stages of 64 columns; each block of a cluster copies its share to all.
//
// The grid is persistent: (CLUSTER, clusters that fit), one block on each multiprocessor. Tiles are dealt
// out in whole waves; the steps of the last one to two waves are divided evenly. The cluster that computed
// the first steps of a divided tile adds the others' sums in a fixed order from `partials`
// (float [blocks][BLOCK_TOKENS / 2][256]); `ready` (one word a block) is zero before and after.
//
// Instantiated by packed.cuh's constants, N (a multiple of 8), BLOCK_TOKENS (64, 96, 128, 160, 192, 224 or 256), CLUSTER (1 or 2)
// and OUTPUT (linear_output.cuh). 384 threads; dynamic shared memory 8192 + STAGES * BLOCK_TOKENS * 128 bytes.
#include "dequantize.cuh"
#include "hopper.cuh"
#include "linear_output.cuh"
#include "wgmma_tokens.cuh"

constexpr int BLOCK_FEATURES = 128;
constexpr u32 TILES = ceil_div(N, UNIT_ROWS);
constexpr u32 FEATURE_TILES = ceil_div(N, CLUSTER * BLOCK_FEATURES);
constexpr int CONSUMERS = 256;
constexpr int STAGE_BYTES = BLOCK_TOKENS * 128;
constexpr int STAGES = lesser(196608 / STAGE_BYTES, 8);
constexpr int STAGING_BYTES = 32 * 128;  // 32 tokens of a warpgroup on their way out
constexpr int SUMS = BLOCK_TOKENS / 2;   // of one thread
// Fewer steps than this are not worth a cluster's start and its exchange of sums.
constexpr u32 MINIMUM_SHARE = 8;

// Steps [first, last) of a tile.
struct Segment {
    u32 tile, first, last;
};

// Deals out the steps of all tiles; every role of a cluster walks the same segments.
struct Schedule {
    u32 cluster, clusters, whole_tiles, next_whole, share, shares, at, end;

    __device__ Schedule(u32 cluster, u32 clusters, u32 tiles) : cluster(cluster), clusters(clusters), next_whole(cluster) {
        const u32 waves = tiles / clusters, rest = tiles % clusters;
        whole_tiles = rest == 0 ? tiles : waves > 0 ? (waves - 1) * clusters : 0;
        share = (tiles - whole_tiles) * STEPS;
        shares = lesser(clusters, greater(1u, share / MINIMUM_SHARE));
        at = begin_of(cluster);
        end = begin_of(cluster + 1);
    }

    // First divided step of a cluster, counted from the first step of the first divided tile.
    __device__ u32 begin_of(u32 cluster) const { return u32(u64(lesser(cluster, shares)) * share / shares); }

    __device__ bool next(Segment& segment) {
        if (next_whole < whole_tiles) {
            segment = {next_whole, 0, STEPS};
            next_whole += clusters;
            return true;
        }
        if (at >= end) return false;
        const u32 tile = at / STEPS, first = at - tile * STEPS, last = lesser(u32(STEPS), first + end - at);
        segment = {whole_tiles + tile, first, last};
        at += last - first;
        return true;
    }

    // Clusters after this one that hold steps of a tile of which this one holds the first.
    __device__ u32 helpers(const Segment& segment) const {
        const u32 tile_end = (segment.tile - whole_tiles + 1) * STEPS;
        u32 count = 0;
        while (begin_of(cluster + 1 + count) < tile_end) count++;
        return count;
    }
};

// The stages of tokens, each with a barrier that says it is full and one that says it is empty.
struct Ring {
    u32 stages, full, empty, stage, phase;

    __device__ u32 tokens() const { return stages + stage * STAGE_BYTES; }
    __device__ u32 full_barrier() const { return full + stage * 8; }
    __device__ u32 empty_barrier() const { return empty + stage * 8; }
    __device__ u32 empty_barrier_before() const { return empty + (stage == 0 ? STAGES - 1 : stage - 1) * 8; }
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Copies the tokens of every step. Rows past `rows`, up to 8, are copied too; their sums are not stored.
__device__ __forceinline__ void produce(Ring ring, Schedule schedule, const u16* x, u32 rows, u32 panel_rows,
                                        u32 token_tiles, u32 rank) {
    Segment segment;
    while (schedule.next(segment)) {
        const u32 token0 = segment.tile % token_tiles * BLOCK_TOKENS;
        const u32 count = lesser(u32(BLOCK_TOKENS), ceil_div(rows - token0, 8u) * 8);
        const u32 begin = rank * (BLOCK_TOKENS / CLUSTER), end = lesser(count, begin + BLOCK_TOKENS / CLUSTER);
        const u16* from = x + (u64(segment.first) * panel_rows + token0 + begin) * PANEL_COLUMNS;
        for (u32 step = segment.first; step < segment.last; step++, from += u64(panel_rows) * PANEL_COLUMNS) {
            barrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            barrier_expect(ring.full_barrier(), count * 128);
            if (begin < end) {
                const u32 to = ring.tokens() + begin * 128, bytes = (end - begin) * 128;
                if (CLUSTER == 1) copy_bulk(to, from, bytes, ring.full_barrier());
                else copy_bulk_multicast(to, from, bytes, ring.full_barrier(), (1 << CLUSTER) - 1);
            }
            ring.advance();
        }
    }
}

// Tells every block of the cluster that this warp has done with a stage.
__device__ __forceinline__ void release(u32 barrier, u32 lane) {
    if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
}

// A warp's rows of W.
struct Rows {
    const u8* weight;
    u32 tile, lane;
};

// One step: each fragment is dequantized while the tensor cores work on the one before it. Then `weights`
// holds step + 2. Dense weights are operands as they are, free only when the step's products are done:
// there `before`, the weights of the step before, receives step + 1. Steps past `final` read that one again.
// Leaves one product unfinished; releases the stage of the step before.
__device__ __forceinline__ void multiply_step(float (&sum)[SUMS], u32 (&a)[4][4], WeightStep& weights, WeightStep& before,
                                              StepFactors& factors, Ring& ring, const Rows& at, u32 step, u32 final,
                                              bool first) {
    prepare_step(factors, weights);
    const u64 tokens = operand_descriptor(ring.tokens());
    fragment(a[0], weights, factors, 0);
    barrier_wait(ring.full_barrier(), ring.phase);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > 0) fragment(a[j], weights, factors, j);
        if (BITS != 16 && j == 3) load_step(weights, at.weight, at.tile, lesser(step + 2, final), at.lane);
        if (BITS == 16 && j == 1) load_step(before, at.weight, at.tile, lesser(step + 1, final), at.lane);
        wgmma_fence();
        wgmma_tokens(sum, a[j], tokens + j * 2, !first || j > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (j == 0 && !first) release(ring.empty_barrier_before(), at.lane);
    }
    ring.advance();
}

__device__ __forceinline__ void multiply_segment(float (&sum)[SUMS], Ring& ring, const Rows& at, const Segment& segment) {
    const u32 final = segment.last - 1;
    u32 a[4][4];
    WeightStep weights[2];
    StepFactors factors;
    load_step(weights[0], at.weight, at.tile, segment.first, at.lane);
    load_step(weights[1], at.weight, at.tile, lesser(segment.first + 1, final), at.lane);
    prepare_rows(factors, at.weight, N, at.tile, at.lane);
    for (u32 step = segment.first;; step += 2) {
        multiply_step(sum, a, weights[0], weights[1], factors, ring, at, step, final, step == segment.first);
        if (step == final) break;
        multiply_step(sum, a, weights[1], weights[0], factors, ring, at, step + 1, final, false);
        if (step + 1 == final) break;
    }
    wgmma_wait<0>();
    release(ring.empty_barrier_before(), at.lane);
    // The sums are read only from here on.
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// The partial sums of the cluster's block of this rank.
__device__ __forceinline__ u32 partial_slot(u32 cluster, u32 rank) { return cluster * CLUSTER + rank; }

// Hands this block's sums of a tile to the cluster that holds the tile's first steps.
__device__ __forceinline__ void send(const float (&sum)[SUMS], float* partials, u32* ready, u32 slot) {
    float* to = partials + u64(slot) * SUMS * CONSUMERS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < SUMS; i++) __stcg(to + i * CONSUMERS, sum[i]);
    __threadfence();
    named_barrier(3, CONSUMERS);
    if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(ready + slot) : "memory");
}

// Adds the sums of another block to this block's.
__device__ __forceinline__ void receive(float (&sum)[SUMS], const float* partials, u32* ready, u32 slot) {
    u32 value = 0;
    while (value == 0) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(ready + slot) : "memory");
    const float* from = partials + u64(slot) * SUMS * CONSUMERS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] += __ldcg(from + i * CONSUMERS);
    named_barrier(3, CONSUMERS);
    if (threadIdx.x == 0) ready[slot] = 0;
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// Where a warpgroup's sums go: 64 features from `feature`, BLOCK_TOKENS tokens from `token0`.
struct Target {
    void* y;
    u32 feature, token0, rows, panel_rows;
};

__device__ __forceinline__ void store_f32(const float (&sum)[SUMS], const Target& to) {
    const u32 lane = threadIdx.x % WARP, column0 = to.feature + threadIdx.x / WARP % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const u32 row = to.token0 + i / 4 * 8 + lane % 4 * 2 + i % 2, column = column0 + i / 2 % 2 * 8;
        if (row < to.rows && column < N) ((float*)to.y)[u64(row) * N + column] = sum[i];
    }
}

// Stages 32 tokens at a time in shared memory, from where whole lines are written.
__device__ __forceinline__ void store_bf16(const float (&sum)[SUMS], const Target& to, u32 staging) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, thread = threadIdx.x % 128;
    const u32 barrier = 1 + threadIdx.x / 128;
#pragma unroll
    for (int part = 0; part < BLOCK_TOKENS / 32; part++) {
        const float* d = sum + part * 16;
        const u32 token = to.token0 + part * 32;
        if constexpr (OUTPUT == PANELS_GEGLU) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                r[i] = bf16_pair(geglu(d[i * 4], d[i * 4 + 2]), geglu(d[i * 4 + 1], d[i * 4 + 3]));
            store_matrix_x4_transposed(staging + swizzled_128(lane, warp), r[0], r[1], r[2], r[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_matrix_x4_transposed(staging + swizzled_128(i * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                                           bf16_pair(d[i * 8], d[i * 8 + 1]), bf16_pair(d[i * 8 + 2], d[i * 8 + 3]),
                                           bf16_pair(d[i * 8 + 4], d[i * 8 + 5]), bf16_pair(d[i * 8 + 6], d[i * 8 + 7]));
        }
        named_barrier(barrier, 128);
        if constexpr (OUTPUT == PANELS_GEGLU) {
            // 32 columns of 32 tokens: two sixteens each. Columns that complete the last panel are zero.
            const u32 row = thread / 2, sixteen = thread % 2, width = N / 2;
            const u32 column = to.feature / 2 + sixteen * 16;
            if (thread < 64 && token + row < to.rows && column < ceil_div(width, PANEL_COLUMNS) * PANEL_COLUMNS) {
                const uint4 zero = make_uint4(0, 0, 0, 0);
                const uint4 low = column < width ? load_shared_16(staging + swizzled_128(row, sixteen * 2)) : zero;
                const uint4 high = column + 8 < width ? load_shared_16(staging + swizzled_128(row, sixteen * 2 + 1)) : zero;
                store_panel_16((u16*)to.y, token + row, column, to.panel_rows,
                               {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
            }
        } else {
#pragma unroll
            for (u32 i = thread; i < 32 * 8; i += 128) {
                const u32 row = i / 8, column = to.feature + i % 8 * 8;
                if (token + row < to.rows && column < N)
                    *(uint4*)((u16*)to.y + u64(token + row) * N + column) =
                        load_shared_16(staging + swizzled_128(row, i % 8));
            }
        }
        named_barrier(barrier, 128);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    linear_many(void* y, const u16* x, const u8* weight, float* partials, u32* ready, u32 rows, u32 panel_rows) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    const u32 token_tiles = ceil_div(rows, u32(BLOCK_TOKENS));
    // Clusters wait only for clusters of a higher number: counted downwards, those start first.
    Schedule schedule(gridDim.y - 1 - blockIdx.y, gridDim.y, token_tiles * FEATURE_TILES);
    Ring ring = {shared_address(shared) + 2 * STAGING_BYTES, shared_address(barriers), shared_address(barriers + STAGES), 0, 0};

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, CLUSTER * CONSUMERS / WARP);
        }
        barrier_init_fence();
    }
    if (CLUSTER == 1) __syncthreads();
    else cluster_sync();
    wait_for_predecessor();

    if (threadIdx.x >= CONSUMERS) {
        give_registers<40>();
        if (threadIdx.x == CONSUMERS) produce(ring, schedule, x, rows, panel_rows, token_tiles, rank);
    } else {
        take_registers<232>();
        const u32 staging = shared_address(shared) + threadIdx.x / 128 * STAGING_BYTES;
        Segment segment;
        while (schedule.next(segment)) {
            const u32 feature = (segment.tile / token_tiles * CLUSTER + rank) * BLOCK_FEATURES;
            // Tiles of rows past the last read that one again; their sums are not stored.
            const Rows at = {weight, lesser(feature / UNIT_ROWS + threadIdx.x / WARP, TILES - 1), threadIdx.x % WARP};
            float sum[SUMS];
            multiply_segment(sum, ring, at, segment);
            if (segment.first != 0) {
                send(sum, partials, ready, partial_slot(schedule.cluster, rank));
                continue;
            }
            if (segment.last != STEPS) {
                const u32 helpers = schedule.helpers(segment);
                for (u32 i = 1; i <= helpers; i++) receive(sum, partials, ready, partial_slot(schedule.cluster + i, rank));
            }
            const Target to = {y, feature + threadIdx.x / 128 * 64, segment.tile % token_tiles * BLOCK_TOKENS, rows, panel_rows};
            if constexpr (OUTPUT == ROWS_F32) store_f32(sum, to);
            else store_bf16(sum, to, staging);
        }
    }
    allow_successor();
    // A block stays until its peers have no more copies or arrivals for it.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
