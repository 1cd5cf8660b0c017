// y[T, N] = x[T, K] W^T for T <= X_ROWS <= 8 rows, W packed (packed.cuh), in tensor cores.
//
// Quantized weights. Integer tensor cores multiply the codes as they are by activations in fixed
// point. Of each row and block of 128 columns, with a = max |x|:
//     x = s (n + 2^-14 p),  s = a / 16319,  n = 128 n1 + n0,  p = 128 p1 + p0,  all of n1..p0 in int8
// which is 28 bits below the block's maximum (X_PARTS 2; X_PARTS 1 leaves p out). (n1, n0) and (p1, p0)
// are two pairs of columns of the instruction, whose sums over a group are exact. A group's sum of n
// (and of p), known beforehand, makes a zero point one multiply-add.
// Dense weights. bfloat16 tensor cores; x = hi + lo, both bfloat16: 16 bits.
//
// A "virtual row" is one pair of columns: row r, part p is virtual row r * X_PARTS + p.
//
// Work. A warp takes whole tiles of 16 rows, over the columns of its block's split (blockIdx.y), and
// streams each tile's units; no warp waits for another except for x. With BULK each warp has a ring
// of STAGES stages of STAGE_UNITS units that the bulk copy engine fills, the first ones before the
// predecessor has ended; else the next unit is loaded into registers.
//
// Instantiated by packed.cuh's and split.cuh's constants, N, SPLIT_INPUT, SPLITS, WARPS, EPILOGUE, and BULK, STAGES,
// STAGE_UNITS.
#include "gelu.cuh"
#include "packed.cuh"
#include "split.cuh"

constexpr int PARTIAL = 0, GEGLU = 1, SOFTCAP = 2;

constexpr bool DENSE = BITS == 16;
constexpr int VIRTUAL = X_VIRTUAL, COLUMNS = X_COLUMNS, PARTS = X_PARTS;
constexpr int N_TILES = ceil_div(COLUMNS, 8);      // instructions for all of them
constexpr int TILES = ceil_div(N, UNIT_ROWS);      // along N
constexpr int SPLIT_UNITS = ceil_div(UNITS, SPLITS);  // at most, of one split
constexpr int SUMS = X_SUMS;                       // sums of x in a unit
constexpr int X_BATCH = 4;                         // units of x that a warp splits at a time

// Shared memory: the split's share of x (split.cuh), rings [warp][stage].
constexpr int SUMS_AT = x_sums_at(SPLIT_UNITS), X_SCALES_AT = x_scales_at(SPLIT_UNITS);
constexpr int RING_AT = ceil_div(x_bytes(SPLIT_UNITS), 128) * 128;
constexpr int STAGE_BYTES = STAGE_UNITS * UNIT_BYTES;

constexpr int CODE_LOADS = CODE_BYTES / 512;

struct Unit {
    uint4 codes[CODE_LOADS];
    float scales[SUMS][2], offsets[SUMS][2];
};

template <class V>
__device__ __forceinline__ V load(const void* address) {
#if BULK
    return *(const V*)address;
#else
    return __ldg((const V*)address);
#endif
}

template <int TYPE>
__device__ __forceinline__ void load_pairs(float (&out)[SUMS][2], const u8* base, u32 g) {
    const u8* at = base + g * SUMS * 2 * type_size(TYPE);
    if constexpr (TYPE == F32) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float2 pair = load<float2>(at + 8 * i);
            out[i][0] = pair.x;
            out[i][1] = pair.y;
        }
    } else {
        u32 pairs[SUMS];
        if constexpr (SUMS >= 4) {
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                const uint4 v = load<uint4>(at + 4 * i);
                pairs[i] = v.x, pairs[i + 1] = v.y, pairs[i + 2] = v.z, pairs[i + 3] = v.w;
            }
        } else if constexpr (SUMS == 2) {
            const uint2 v = load<uint2>(at);
            pairs[0] = v.x, pairs[1] = v.y;
        } else {
            pairs[0] = load<u32>(at);
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            out[i][0] = TYPE == BF16 ? bf16_low(pairs[i]) : f16_float(u16(pairs[i]));
            out[i][1] = TYPE == BF16 ? bf16_high(pairs[i]) : f16_float(u16(pairs[i] >> 16));
        }
    }
}

__device__ __forceinline__ Unit load_unit(const u8* unit, u32 lane) {
    Unit u;
#pragma unroll
    for (int i = 0; i < CODE_LOADS; i++) {
        const u8* at = unit + (i * WARP + lane) * 16;
#if BULK
        u.codes[i] = *(const uint4*)at;
#else
        u.codes[i] = load_stream(at);
#endif
    }
    if constexpr (GROUPS > 0) {
        const u32 g = lane / 4;
        load_pairs<SCALE>(u.scales, unit + SCALE_AT, g);
        if constexpr (OFFSET == ZERO || OFFSET == MINIMUM)
            load_pairs<OFFSET_TYPE>(u.offsets, unit + OFFSET_AT, g);
        if constexpr (OFFSET == NIBBLE_ZERO) {
            u32 nibbles;
            if constexpr (GROUPS == 4) nibbles = load<u32>(unit + OFFSET_AT + g * 4);
            else if constexpr (GROUPS == 2) nibbles = load<u16>(unit + OFFSET_AT + g * 2);
            else nibbles = load<u8>(unit + OFFSET_AT + g);
            const u32 low = nibbles & 0x0f0f0f0fu, high = nibbles >> 4 & 0x0f0f0f0fu;
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                u.offsets[i][0] = float(low >> (8 * i) & 255);
                u.offsets[i][1] = float(high >> (8 * i) & 255);
            }
        }
    }
    return u;
}

// c += a b, in integers; codes of 4 bits are unsigned, of 8 bits signed.
__device__ __forceinline__ void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (BITS == 4)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same for 16 columns of signed codes: half of the fragments.
__device__ __forceinline__ void multiply_half(int (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// What a lane sums for its tile: quantized, [n-tile][rows g, g + 8] of one virtual row; dense, the
// instruction's own four accumulators.
struct Sums {
    float y[N_TILES][4];
    float x[N_TILES];  // sum of x, where a zero point of whole rows needs it
};

// Columns beyond those in use repeat them: their results are not written.
__device__ __forceinline__ u32 column_of(u32 tile, u32 lane) { return tile * 8 + lane / 4 % lesser(COLUMNS, 8); }
__device__ __forceinline__ u32 virtual_of(u32 tile, u32 lane) { return tile * 4 + lane % lesser(VIRTUAL, 4); }

__device__ __forceinline__ void accumulate_dense(Sums& sums, const Unit& unit, const u8* x, u32 chunk, u32 lane) {
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            const u32 at = ((chunk * 4 + quarter) * COLUMNS + column_of(j, lane)) * 4 + lane % 4;
            const uint4 b = ((const uint4*)x)[at];
            multiply(sums.y[j], unit.codes[quarter * 2 % CODE_LOADS], b.x, b.y);
            multiply(sums.y[j], unit.codes[(quarter * 2 + 1) % CODE_LOADS], b.z, b.w);
        }
}

// block += a group's scaled sums, of integers of which those over the upper and the lower limb lie side by side.
__device__ __forceinline__ void add_group(float (&block)[2], const int (&c)[4], const Unit& unit, int group,
                                          const float (&x_sums)[SUMS]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = float(c[2 * h] * 128 + c[2 * h + 1]);
        if constexpr (GROUPS == 0) {
            block[h] = sum;
        } else {
            const float scale = unit.scales[group][h], x_sum = x_sums[group];
            if constexpr (OFFSET == MINIMUM)
                block[h] = fmaf(unit.offsets[group][h], x_sum, block[h]);
            else if constexpr (OFFSET != NO_OFFSET)
                sum = fmaf(-unit.offsets[group][h], x_sum, sum);
            else if constexpr (BITS == 4)
                sum = fmaf(-8.0f, x_sum, sum);
            block[h] = fmaf(scale, sum, block[h]);
        }
    }
}

__device__ __forceinline__ void accumulate(Sums& sums, const Unit& unit, const u8* x, u32 chunk, u32 lane) {
    constexpr u32 LOW = 0x0f0f0f0fu;
    constexpr int HALVES = GROUPS == 8 ? 2 : 1;  // products of a block of 32 columns
    constexpr int GROUP_PRODUCTS = GROUPS > 0 ? 4 * HALVES / GROUPS : 4;
    const float* x_sums = (const float*)(x + SUMS_AT) + chunk * VIRTUAL * SUMS;
    const float* x_scales = (const float*)(x + X_SCALES_AT) + chunk * VIRTUAL;
    int c[N_TILES][4];
    float block[N_TILES][2], group_sums[N_TILES][SUMS];
    uint4 b[N_TILES];
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        block[j][0] = block[j][1] = 0.0f;
        const float* at = x_sums + virtual_of(j, lane) * SUMS;
        if constexpr (SUMS >= 4) {
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) *(float4*)(group_sums[j] + i) = *(const float4*)(at + i);
        } else if constexpr (SUMS == 2) *(float2*)group_sums[j] = *(const float2*)at;
        else group_sums[j][0] = *at;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a[4];
        if constexpr (BITS == 4) {
            const uint4 half = unit.codes[i / 2];
            const u32 w0 = i % 2 ? half.z : half.x, w1 = i % 2 ? half.w : half.y;
            a[0] = w0 & LOW, a[1] = w0 >> 4 & LOW, a[2] = w1 & LOW, a[3] = w1 >> 4 & LOW;
        } else {
            const uint4 w = unit.codes[i];
            a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            if (i % 2 == 0) b[j] = ((const uint4*)x)[((chunk * 2 + i / 2) * COLUMNS + column_of(j, lane)) * 4 + lane % 4];
            const u32 b0 = i % 2 ? b[j].z : b[j].x, b1 = i % 2 ? b[j].w : b[j].y;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const int product = i * HALVES + half;
                if (product % GROUP_PRODUCTS == 0) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
                if constexpr (HALVES == 2) multiply_half(c[j], a[2 * half], a[2 * half + 1], half ? b1 : b0);
                else multiply(c[j], a, b0, b1);
                if ((product + 1) % GROUP_PRODUCTS == 0) add_group(block[j], c[j], unit, product / GROUP_PRODUCTS, group_sums[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N_TILES; j++) {
        const float scale = x_scales[virtual_of(j, lane)];
        sums.y[j][0] = fmaf(scale, block[j][0], sums.y[j][0]);
        sums.y[j][1] = fmaf(scale, block[j][1], sums.y[j][1]);
        if constexpr (GROUPS == 0) sums.x[j] = fmaf(scale, group_sums[j][0], sums.x[j]);
    }
}

// Columns `column` .. `column + 3` of a row of x, zeros beyond K.
__device__ __forceinline__ float4 load_columns(const float* row, u32 column) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (K % 4 == 0) {
        if (column < K) v = *(const float4*)(row + column);
    } else {
        if (column < K) v.x = row[column];
        if (column + 1 < K) v.y = row[column + 1];
        if (column + 2 < K) v.z = row[column + 2];
        if (column + 3 < K) v.w = row[column + 3];
    }
    return v;
}

// 16 bytes into shared memory.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The units first .. last of x, split, into shared memory; the whole block takes part.
__device__ __forceinline__ void load_split(u8* shared, const u8* x, u32 first, u32 last) {
    const u32 units = last - first;
    const uint4* limbs = (const uint4*)(x + u64(first) * X_LIMB_BYTES);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < units * (X_LIMB_BYTES / 16); i += WARPS * 32) copy_async((uint4*)shared + i, limbs + i);
    const float* sums = (const float*)(x + x_sums_at(X_UNITS) + u64(first) * X_SUM_BYTES);
    const float* scales = (const float*)(x + x_scales_at(X_UNITS) + u64(first) * X_SCALE_BYTES);
#pragma unroll 2
    for (u32 i = threadIdx.x; i < units * (X_SUM_BYTES / 4); i += WARPS * 32) ((float*)(shared + SUMS_AT))[i] = sums[i];
    for (u32 i = threadIdx.x; i < units * (X_SCALE_BYTES / 4); i += WARPS * 32) ((float*)(shared + X_SCALES_AT))[i] = scales[i];
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The same from rows of float32.
__device__ __forceinline__ void split_rows(u8* shared, const float* x, u32 first, u32 last, u32 rows, u32 warp, u32 lane) {
    for (u32 row = 0; row < rows; row++)
        for (u32 base = first + warp; base < last; base += WARPS * X_BATCH) {
            float4 v[X_BATCH];
#pragma unroll
            for (int i = 0; i < X_BATCH; i++)
                v[i] = load_columns(x + u64(row) * K, (base + i * WARPS) * UNIT_COLUMNS + 4 * lane);
#pragma unroll
            for (int i = 0; i < X_BATCH; i++) {
                const u32 unit = base + i * WARPS;
                split(shared, SPLIT_UNITS, unit - first, row, v[i], lane, unit < last);
            }
        }
}

#if BULK
__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN_%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif

// A warp's way through its units: tile by tile, along the columns of the split.
struct Walk {
    u32 tile, unit;
};

// x: float32 [T, K], or split as in split.cuh (SPLIT_INPUT); y [SPLITS, T, N] partial sums, or with an epilogue [T, N] (GEGLU: [T, N / 2],
// rows 8 of gate and 8 of up in turns); cap of SOFTCAP.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BULK || X_ROWS == 8 || GROUPS == 8 ? 1 : 2)
    linear_few(const u8* __restrict__ weight, const void* __restrict__ x, float* __restrict__ y, u32 rows, float cap) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u32 first = UNITS * blockIdx.y / SPLITS, last = UNITS * (blockIdx.y + 1) / SPLITS;
    const u32 tile_step = gridDim.x * WARPS, tile_start = blockIdx.x * WARPS + warp;
    allow_successor();

#if BULK
    __shared__ u64 barriers[WARPS][STAGES];
    u8* ring = shared + RING_AT + warp * (STAGES * STAGE_BYTES);
    Walk ahead = {tile_start, first};
    // Requests the next stage of the stream into slot `slot`; nothing once the stream has ended.
    const auto request = [&](u32 slot) {
        if (ahead.tile >= TILES) return;
        const u32 units = lesser(u32(STAGE_UNITS), last - ahead.unit);
        bulk_load(ring + slot * STAGE_BYTES, weight + unit_at(ahead.tile, ahead.unit), units * UNIT_BYTES, &barriers[warp][slot]);
        ahead.unit += units;
        if (ahead.unit == last) ahead = {ahead.tile + tile_step, first};
    };
    if (lane == 0) {
        for (u32 slot = 0; slot < STAGES; slot++) barrier_init(&barriers[warp][slot]);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (u32 slot = 0; slot < STAGES; slot++) request(slot);
    }
    __syncwarp();
#endif

    wait_for_predecessor();
    if constexpr (SPLIT_INPUT) load_split(shared, (const u8*)x, first, last);
    else split_rows(shared, (const float*)x, first, last, rows, warp, lane);
    __syncthreads();

#if BULK
    u32 slot = 0, parity = 0;
#endif
    for (u32 tile = tile_start; tile < TILES; tile += tile_step) {
        Sums sums = {};
#if BULK
        for (u32 unit = first; unit < last;) {
            const u32 units = lesser(u32(STAGE_UNITS), last - unit);
            barrier_wait(&barriers[warp][slot], parity);
            const u8* stage = ring + slot * STAGE_BYTES;
            const auto consume = [&](u32 i) {
                const Unit now = load_unit(stage + i * UNIT_BYTES, lane);
                if constexpr (DENSE) accumulate_dense(sums, now, shared, unit - first + i, lane);
                else accumulate(sums, now, shared, unit - first + i, lane);
            };
            // A full stage is one stretch of code, so that its units overlap.
            if (units == STAGE_UNITS) {
#pragma unroll
                for (u32 i = 0; i < STAGE_UNITS; i++) consume(i);
            } else {
                for (u32 i = 0; i < units; i++) consume(i);
            }
            unit += units;
            __syncwarp();
            if (lane == 0) request(slot);
            slot++;
            if (slot == STAGES) slot = 0, parity ^= 1;
        }
#else
        const u8* stream = weight + unit_at(tile, first);
        Unit next = load_unit(stream, lane);
        for (u32 unit = first; unit < last; unit++) {
            const Unit now = next;
            stream += UNIT_BYTES;
            if (unit + 1 < last) next = load_unit(stream, lane);
            if constexpr (DENSE) accumulate_dense(sums, now, shared, unit - first, lane);
            else accumulate(sums, now, shared, unit - first, lane);
        }
#endif
        // Rows g and g + 8 of the tile, of one row of x.
        const u32 n = tile * UNIT_ROWS + lane / 4;
        float row_scale[2] = {1.0f, 1.0f}, row_zero[2] = {0.0f, 0.0f};
        if constexpr (!DENSE && GROUPS == 0) {
            const float2* pairs = (const float2*)(weight + row_scales_at(N));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 pair = __ldg(pairs + n + 8 * h);
                row_scale[h] = pair.x;
                row_zero[h] = pair.y;
            }
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
            float value[2];
            u32 row;
            if constexpr (DENSE) {
                value[0] = sums.y[j][0] + sums.y[j][1];
                value[1] = sums.y[j][2] + sums.y[j][3];
                row = 4 * j + lane % 4;
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    value[h] = sums.y[j][h];
                    if constexpr (GROUPS == 0) value[h] = row_scale[h] * (value[h] - row_zero[h] * sums.x[j]);
                    if constexpr (PARTS == 2) value[h] += __shfl_xor_sync(~0u, value[h], 1);
                }
                row = (4 * j + lane % 4) / PARTS;
                if (lane % PARTS != 0) continue;
            }
            if (row >= rows) continue;
            if constexpr (EPILOGUE == GEGLU) {
                const u32 at = tile * 8 + lane / 4;
                if (at < N / 2) y[u64(row) * (N / 2) + at] = gelu_tanh(value[0]) * value[1];
            } else {
                float* out = y + (u64(blockIdx.y) * rows + row) * N + n;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if constexpr (EPILOGUE == SOFTCAP) value[h] = cap * tanhf(value[h] / cap);
                    if (n + 8 * h < N) out[8 * h] = value[h];
                }
            }
        }
    }
}
