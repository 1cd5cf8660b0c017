// y[T, N] = x[T, K] W[N, K]^T for many rows, on wgmma: the Hopper version (sm_90a).
//
// A cluster of CLUSTER blocks computes BLOCK_TOKENS tokens of CLUSTER * 128 features as y^T = W x^T. In
// each block two warpgroups own 64 features each: they dequantize weights in registers into the A operand
// while the tensor cores work on the previous step. One warp of a third warpgroup copies x into a ring of
// shared-memory stages of 64 columns; every block copies its share and multicasts it to the cluster.
//
// x lies in panels: element (t, k) of bf16 at ((k / 64) * panel_rows + t) * 64 + ((k % 64 / 8) ^ (t % 8)) * 8 + k % 8,
// which is the 128-byte swizzle of the tensor cores, so a stage is one contiguous copy. Columns past K in
// the last panel are zero. With OUTPUT_PANELS y of bf16 is written likewise.
//
// The grid is persistent, CLUSTER * (clusters that fit), one block on each multiprocessor. Tiles are dealt out
// in whole waves; the last one to two waves' worth of steps is divided evenly. A cluster that computed the
// first steps of a divided tile adds the others' sums in a fixed order from `partials`
// (float [gridDim.x][BLOCK_TOKENS / 2][256]); `ready` (one word a block) is zero before and after.
//
// Parameters besides those of dequantize.cuh: BLOCK_TOKENS (a multiple of 32 up to 256), CLUSTER (1 or 2),
// OUTPUT (linear_output.cuh), OUTPUT_PANELS (0 or 1).
#include "linear_output.cuh"
#include "dequantize.cuh"
#include "hopper.cuh"
#include "wgmma_tokens.cuh"

constexpr int BLOCK_FEATURES = 128;
constexpr int CONSUMERS = 256;
constexpr int STAGE_BYTES = BLOCK_TOKENS * 128;
constexpr int STAGES = 196608 / STAGE_BYTES < 8 ? 196608 / STAGE_BYTES : 8;
constexpr int OUTPUT_BYTES = 32 * 128;  // staging of 32 tokens of a warpgroup
// Fewer steps of 64 columns than this are not worth a cluster's start and its exchange of sums.
constexpr unsigned MINIMUM_SHARE = 8;

// Steps [first, last) of a tile.
struct Segment {
    unsigned tile, first, last;
};

// Deals out the steps of all tiles; every role of a cluster walks the same segments.
struct Schedule {
    unsigned cluster, clusters, steps, whole_tiles, next_whole, share, shares, at, end;

    __device__ Schedule(unsigned cluster, unsigned clusters, unsigned tiles, unsigned steps)
        : cluster(cluster), clusters(clusters), steps(steps), next_whole(cluster) {
        unsigned waves = tiles / clusters, rest = tiles % clusters;
        whole_tiles = rest == 0 ? tiles : waves > 0 ? (waves - 1) * clusters : 0;
        share = (tiles - whole_tiles) * steps;
        shares = min(clusters, max(1u, share / MINIMUM_SHARE));
        at = begin_of(cluster);
        end = begin_of(cluster + 1);
    }

    // First divided step of a cluster, counted from the first step of the first divided tile.
    __device__ unsigned begin_of(unsigned cluster) const {
        return (unsigned)((unsigned long long)min(cluster, shares) * share / shares);
    }

    __device__ bool next(Segment& segment) {
        if (next_whole < whole_tiles) {
            segment.tile = next_whole, segment.first = 0, segment.last = steps;
            next_whole += clusters;
            return true;
        }
        if (at >= end) return false;
        unsigned tile = at / steps;
        segment.tile = whole_tiles + tile;
        segment.first = at - tile * steps;
        segment.last = min(steps, segment.first + end - at);
        at += segment.last - segment.first;
        return true;
    }

    // Clusters after this one that hold steps of a tile of which this one holds the first.
    __device__ unsigned helpers(const Segment& segment) const {
        unsigned tile_end = (segment.tile - whole_tiles + 1) * steps, count = 0;
        while (begin_of(cluster + 1 + count) < tile_end) count++;
        return count;
    }
};

struct Ring {
    unsigned stages, full, empty, stage, phase;

    __device__ unsigned tokens() const { return stages + stage * STAGE_BYTES; }
    __device__ unsigned full_barrier() const { return full + stage * 8; }
    __device__ unsigned empty_barrier() const { return empty + stage * 8; }
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ void produce(Ring ring, Schedule schedule, const bf16_bits* x, unsigned rows, unsigned panel_rows,
                                        unsigned token_tiles, unsigned rank) {
    Segment segment;
    while (schedule.next(segment)) {
        unsigned token0 = segment.tile % token_tiles * BLOCK_TOKENS;
        unsigned count = min((unsigned)BLOCK_TOKENS, (rows - token0 + 7) & ~7u);
        unsigned begin = rank * (BLOCK_TOKENS / CLUSTER), end = min(count, begin + BLOCK_TOKENS / CLUSTER);
        const bf16_bits* from = x + ((size_t)segment.first * panel_rows + token0 + begin) * 64;
        for (unsigned step = segment.first; step < segment.last; step++, from += (size_t)panel_rows * 64) {
            barrier_wait(ring.empty_barrier(), ring.phase ^ 1);
            barrier_expect(ring.full_barrier(), count * 128);
            if (begin < end) {
                unsigned to = ring.tokens() + begin * 128, bytes = (end - begin) * 128;
                if (CLUSTER == 1)
                    copy_bulk(to, from, bytes, ring.full_barrier());
                else
                    copy_bulk_multicast(to, from, bytes, ring.full_barrier(), (1 << CLUSTER) - 1);
            }
            ring.advance();
        }
    }
}

__device__ __forceinline__ void release(const Ring& ring, unsigned stage, unsigned lane) {
    if (lane < CLUSTER) barrier_arrive_at(ring.empty + stage * 8, lane);
}

// One step of 64 columns: each fragment is dequantized while the tensor cores work on the one before it.
// `weights` then holds step `reload`. Leaves one product unfinished; releases the stage of the step before.
__device__ __forceinline__ void multiply_step(float (&sum)[BLOCK_TOKENS / 2], unsigned (&a)[4][4], WeightStep& weights,
                                              Ring& ring, const PackedWeight& weight, unsigned row_block, unsigned reload,
                                              bool first, unsigned lane) {
    StepFactors factors;
    prepare(factors, weights);
    const unsigned long long tokens = operand_descriptor(ring.tokens());
    fragment(a[0], weights, factors, 0);
    barrier_wait(ring.full_barrier(), ring.phase);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > 0) fragment(a[j], weights, factors, j);
        if (j == 3) load_step(weights, weight, row_block, reload, lane);
        wgmma_fence();
        wgmma_tokens(sum, a[j], tokens + j * 2, !first || j > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (j == 0 && !first) release(ring, ring.stage == 0 ? STAGES - 1 : ring.stage - 1, lane);
    }
    ring.advance();
}

// Where a warp's weights of a segment lie.
struct Rows {
    unsigned block, first, final;
};

__device__ __forceinline__ void multiply_segment(float (&sum)[BLOCK_TOKENS / 2], WeightStep (&weights)[2], Ring& ring,
                                                 const PackedWeight& weight, const Rows& rows, unsigned lane) {
    unsigned a[4][4];
    for (unsigned step = rows.first;; step += 2) {
        multiply_step(sum, a, weights[0], ring, weight, rows.block, min(step + 2, rows.final), step == rows.first, lane);
        if (step == rows.final) break;
        multiply_step(sum, a, weights[1], ring, weight, rows.block, min(step + 3, rows.final), false, lane);
        if (step + 1 == rows.final) break;
    }
    wgmma_wait<0>();
    release(ring, ring.stage == 0 ? STAGES - 1 : ring.stage - 1, lane);
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 2; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// Hands this block's sums of a tile to the cluster that holds the tile's first steps.
__device__ __forceinline__ void send(const float (&sum)[BLOCK_TOKENS / 2], float* partials, unsigned* ready) {
    float* to = partials + (size_t)blockIdx.x * (BLOCK_TOKENS / 2) * CONSUMERS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 2; i++) __stcg(to + i * CONSUMERS, sum[i]);
    __threadfence();
    named_barrier(3, CONSUMERS);
    if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(ready + blockIdx.x) : "memory");
}

// Adds the sums of block `from` to this block's.
__device__ __forceinline__ void receive(float (&sum)[BLOCK_TOKENS / 2], const float* partials, unsigned* ready, unsigned from) {
    unsigned value = 0;
    while (value == 0) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(ready + from) : "memory");
    const float* source = partials + (size_t)from * (BLOCK_TOKENS / 2) * CONSUMERS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 2; i++) sum[i] += __ldcg(source + i * CONSUMERS);
    named_barrier(3, CONSUMERS);
    if (threadIdx.x == 0) ready[from] = 0;
}

// Writes the sums of 64 features from `feature` and BLOCK_TOKENS tokens from `token0`.
__device__ __forceinline__ void store(const float (&sum)[BLOCK_TOKENS / 2], void* y, unsigned staging, unsigned feature,
                                      unsigned token0, unsigned rows, unsigned features, unsigned panel_rows) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
#if OUTPUT == OUTPUT_F32
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < BLOCK_TOKENS / 2; i++) {
        unsigned row = token0 + i / 4 * 8 + 2 * t + (i & 1), column = feature + warp * 16 + g + (i >> 1 & 1) * 8;
        if (row < rows && column < features) ((float*)y)[(size_t)row * features + column] = sum[i];
    }
#else
    constexpr unsigned CHUNKS = OUTPUT == OUTPUT_GEGLU ? 4 : 8;  // 16-byte chunks of a token that the warpgroup makes
    const unsigned width = OUTPUT == OUTPUT_GEGLU ? features / 2 : features;
    const unsigned column0 = OUTPUT == OUTPUT_GEGLU ? feature / 2 : feature;
    for (int part = 0; part < BLOCK_TOKENS / 32; part++) {
        // A constant index keeps the sums in registers: the part is found by comparison.
#pragma unroll
        for (int p = 0; p < BLOCK_TOKENS / 32; p++) {
            if (p != part) continue;
            const float* d = sum + p * 16;
#if OUTPUT == OUTPUT_GEGLU
            unsigned r[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                r[i] = pack_bf16(geglu(d[i * 4], d[i * 4 + 2]), geglu(d[i * 4 + 1], d[i * 4 + 3]));
            store_matrix_x4_transposed(staging + swizzled_128(lane, warp), r[0], r[1], r[2], r[3]);
#else
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_matrix_x4_transposed(
                    staging + swizzled_128(i * 16 + (lane >> 4) * 8 + (lane & 7), warp * 2 + (lane >> 3 & 1)),
                    pack_bf16(d[i * 8], d[i * 8 + 1]), pack_bf16(d[i * 8 + 2], d[i * 8 + 3]),
                    pack_bf16(d[i * 8 + 4], d[i * 8 + 5]), pack_bf16(d[i * 8 + 6], d[i * 8 + 7]));
#endif
        }
        named_barrier(1 + group, 128);
#pragma unroll
        for (unsigned i = threadIdx.x % 128; i < 32 * CHUNKS; i += 128) {
            unsigned row = i / CHUNKS, chunk = i % CHUNKS, token = token0 + part * 32 + row, column = column0 + chunk * 8;
            uint4 value;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                         : "r"(staging + swizzled_128(row, chunk)));
            if (token < rows && column < width) {
#if OUTPUT_PANELS
                size_t at = ((size_t)(column / 64) * panel_rows + token) * 64 + ((column / 8 ^ token) & 7) * 8;
#else
                size_t at = (size_t)token * width + column;
#endif
                *(uint4*)((bf16_bits*)y + at) = value;
            }
        }
        named_barrier(1 + group, 128);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
linear_many(void* __restrict__ y, const bf16_bits* __restrict__ x, const uint4* __restrict__ codes,
            const ScalePair* __restrict__ scales, const OffsetPair* __restrict__ offsets, float* partials, unsigned* ready,
            unsigned rows, unsigned features, unsigned columns, unsigned panel_rows) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ unsigned long long barriers[2 * STAGES];
    const unsigned rank = CLUSTER == 1 ? 0 : cluster_rank();
    const unsigned row_blocks = (features + 15) / 16;
    PackedWeight weight;
    weight.codes = codes;
    weight.scales = scales;
    weight.offsets = offsets;
    weight.steps = (columns + K_STEP - 1) / K_STEP;
    weight.groups = groups_of_row(columns);
    Ring ring;
    ring.stages = shared_address(shared) + 2 * OUTPUT_BYTES;
    ring.full = shared_address(barriers);
    ring.empty = ring.full + STAGES * 8;
    ring.stage = ring.phase = 0;
    const unsigned token_tiles = (rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const unsigned feature_tiles = (features + CLUSTER * BLOCK_FEATURES - 1) / (CLUSTER * BLOCK_FEATURES);
    Schedule schedule(blockIdx.x / CLUSTER, gridDim.x / CLUSTER, token_tiles * feature_tiles, weight.steps);

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, CLUSTER * CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    if (CLUSTER == 1)
        __syncthreads();
    else
        cluster_sync();
    wait_for_previous_kernel();

    if (threadIdx.x >= CONSUMERS) {
        give_registers<40>();
        if (threadIdx.x == CONSUMERS) produce(ring, schedule, x, rows, panel_rows, token_tiles, rank);
    } else {
        take_registers<232>();
        const unsigned lane = threadIdx.x % 32;
        const unsigned staging = shared_address(shared) + threadIdx.x / 128 * OUTPUT_BYTES;
        Segment segment;
        WeightStep weights[2];
        bool more = schedule.next(segment);
        while (more) {
            const Segment now = segment;
            const unsigned feature = (now.tile / token_tiles * CLUSTER + rank) * BLOCK_FEATURES;
            const unsigned token0 = now.tile % token_tiles * BLOCK_TOKENS;
            // Row blocks past the last read that one again; their sums are not stored.
            const Rows at = {min(feature / 16 + threadIdx.x / 32, row_blocks - 1), now.first, now.last - 1};
            load_step(weights[0], weight, at.block, at.first, lane);
            load_step(weights[1], weight, at.block, min(at.first + 1, at.final), lane);
            float sum[BLOCK_TOKENS / 2];
            multiply_segment(sum, weights, ring, weight, at, lane);
            more = schedule.next(segment);
            if (now.first != 0) {
                send(sum, partials, ready);
                continue;
            }
            if (now.last != weight.steps) {
                const unsigned helpers = schedule.helpers(now);
                for (unsigned i = 1; i <= helpers; i++) receive(sum, partials, ready, blockIdx.x + i * CLUSTER);
            }
            store(sum, y, staging, feature + threadIdx.x / 128 * 64, token0, rows, features, panel_rows);
        }
    }
    allow_next_kernel();
    // A block stays until its peers have no more copies or arrivals for it.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
