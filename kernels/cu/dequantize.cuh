// From packed codes to bf16 fragments of a tensor-core product (A operand of m16n8k16, rows = features).
//
// Compile-time parameters: CODE_BITS (4, 8, or 16 for dense bf16), GROUP (codes that share a scale),
// SCALE_TYPE and OFFSET_TYPE (below). Every weight is formed as the reference forms it: in float32
// (or in bf16 where that is exact), and rounded to bf16 once.
//
// Packed layout: `codes` holds, for every 16 rows and 64 columns, 128 * CODE_BITS bytes as
// [CODE_BITS / 4][32 lanes][16 bytes]; lane 4g+t holds rows g and g+8. `scales` and `offsets` hold
// for every 16 rows and every group eight records (g = 0..7) of two values: row g, row g+8.
#pragma once
#include "tensor_core.cuh"

#define SCALE_BF16 0
#define SCALE_F16 1
#define SCALE_F32 2
#define OFFSET_SYMMETRIC 0
#define OFFSET_ZERO_NIBBLE 1
#define OFFSET_ZERO_U8 2
#define OFFSET_ZERO_BF16 3
#define OFFSET_ZERO_F16 4
#define OFFSET_MINIMUM_BF16 5
#define OFFSET_MINIMUM_F16 6
#define OFFSET_MINIMUM_F32 7

constexpr int K_STEP = 64;
constexpr int CODE_WORDS = CODE_BITS / 4;  // 16-byte words of one lane for 16 rows x 64 columns
#if CODE_BITS == 16
constexpr int STEP_GROUPS = 0;
constexpr bool EXACT_IN_BF16 = false;
#else
constexpr int STEP_GROUPS = GROUP == 0 || GROUP >= K_STEP ? 1 : K_STEP / GROUP;  // groups that a step of 64 columns meets
// A bf16 scale times a whole number below 2^8 is exact in float32, so one bf16 multiplication rounds alike.
constexpr bool EXACT_IN_BF16 =
    CODE_BITS == 4 && SCALE_TYPE == SCALE_BF16 && (OFFSET_TYPE == OFFSET_SYMMETRIC || OFFSET_TYPE == OFFSET_ZERO_NIBBLE);
#endif

#if SCALE_TYPE == SCALE_F32
typedef float2 ScalePair;
#else
typedef unsigned ScalePair;
#endif
#if OFFSET_TYPE == OFFSET_ZERO_NIBBLE
typedef unsigned char OffsetPair;
#elif OFFSET_TYPE == OFFSET_ZERO_U8
typedef unsigned short OffsetPair;
#elif OFFSET_TYPE == OFFSET_MINIMUM_F32
typedef float2 OffsetPair;
#else
typedef unsigned OffsetPair;
#endif

__device__ __forceinline__ float float_of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float float_of_f16(unsigned bits) {
    float out;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(out) : "h"((unsigned short)bits));
    return out;
}

__device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    unsigned out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// (a & mask) | bits in one instruction.
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned mask, unsigned bits) {
    unsigned out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(bits));
    return out;
}

__device__ __forceinline__ float scale_of(ScalePair pair, int half) {
#if SCALE_TYPE == SCALE_F32
    return half ? pair.y : pair.x;
#elif SCALE_TYPE == SCALE_F16
    return float_of_f16(pair >> (16 * half) & 0xFFFF);
#else
    return float_of_bf16(pair >> (16 * half) & 0xFFFF);
#endif
}

__device__ __forceinline__ float offset_of(OffsetPair pair, int half) {
#if OFFSET_TYPE == OFFSET_SYMMETRIC
    return float(1 << (CODE_BITS - 1));
#elif OFFSET_TYPE == OFFSET_ZERO_NIBBLE
    return float(pair >> (4 * half) & 15);
#elif OFFSET_TYPE == OFFSET_ZERO_U8
    return float(pair >> (8 * half) & 255);
#elif OFFSET_TYPE == OFFSET_MINIMUM_F32
    return half ? pair.y : pair.x;
#elif OFFSET_TYPE == OFFSET_ZERO_F16 || OFFSET_TYPE == OFFSET_MINIMUM_F16
    return float_of_f16(pair >> (16 * half) & 0xFFFF);
#else
    return float_of_bf16(pair >> (16 * half) & 0xFFFF);
#endif
}

// Where a packed matrix lies in memory.
struct PackedWeight {
    const uint4* codes;
    const ScalePair* scales;
    const OffsetPair* offsets;
    unsigned steps;   // columns / 64, rounded up
    unsigned groups;  // groups of a row: steps * STEP_GROUPS for groups up to 64, 1 for GROUP 0 (the whole row)
};

// One lane's codes, scales and offsets for 16 rows and 64 columns.
struct WeightStep {
    uint4 codes[CODE_WORDS];
#if CODE_BITS != 16
    ScalePair scales[STEP_GROUPS];
    OffsetPair offsets[STEP_GROUPS];
#endif
};

// Groups of a packed row of `columns` columns.
__device__ __forceinline__ unsigned groups_of_row(unsigned columns) {
#if CODE_BITS == 16 || GROUP == 0
    return 1;
#else
    return GROUP <= K_STEP ? (columns + K_STEP - 1) / K_STEP * STEP_GROUPS : columns / GROUP;
#endif
}

// Index of the first group of a step of 64 columns.
__device__ __forceinline__ unsigned first_group(unsigned step) {
#if CODE_BITS == 16 || GROUP == 0
    return 0;
#else
    return GROUP <= K_STEP ? step * STEP_GROUPS : step * K_STEP / GROUP;
#endif
}

__device__ __forceinline__ void load_step(WeightStep& to, const PackedWeight& w, unsigned row_block, unsigned step,
                                          unsigned lane) {
    const uint4* codes = w.codes + (size_t)(row_block * w.steps + step) * (CODE_WORDS * 32) + lane;
#pragma unroll
    for (int i = 0; i < CODE_WORDS; i++) to.codes[i] = __ldg(codes + i * 32);
#if CODE_BITS != 16
    size_t record = (size_t)(row_block * w.groups + first_group(step)) * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < STEP_GROUPS; i++) {
        to.scales[i] = __ldg(w.scales + record + i * 8);
        if (OFFSET_TYPE != OFFSET_SYMMETRIC) to.offsets[i] = __ldg(w.offsets + record + i * 8);
    }
#endif
}

// Scale and offset of one group and row in the form in which `fragment` uses them.
struct GroupFactor {
    float scale, offset;
    unsigned scale2, minus_zero2;  // both bf16 halves equal: scale, -(128 + zero)
};

struct StepFactors {
    GroupFactor of[STEP_GROUPS > 0 ? STEP_GROUPS : 1][2];
};

__device__ __forceinline__ void prepare(StepFactors& to, const WeightStep& w) {
#if CODE_BITS != 16
#pragma unroll
    for (int i = 0; i < STEP_GROUPS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            GroupFactor& f = to.of[i][half];
#if SCALE_TYPE == SCALE_BF16
            if (EXACT_IN_BF16) {
                f.scale2 = __byte_perm(w.scales[i], 0, half ? 0x3232 : 0x1010);
                unsigned zero = OFFSET_TYPE == OFFSET_SYMMETRIC ? 8u : (unsigned)(w.offsets[i] >> (4 * half)) & 15u;
                f.minus_zero2 = zero * 0x00010001u | 0xC300C300u;
                continue;
            }
#endif
            f.scale = scale_of(w.scales[i], half);
            f.offset = offset_of(w.offsets[i], half);
        }
    }
#endif
}

__device__ __forceinline__ float weight_of(float code, const GroupFactor& f) {
#if OFFSET_TYPE >= OFFSET_MINIMUM_BF16
    return __fadd_rn(__fmul_rn(code, f.scale), f.offset);
#else
    return __fmul_rn(__fsub_rn(code, f.offset), f.scale);
#endif
}

// The A fragment of columns 16j .. 16j+15 of a step: a[0] row g, columns 2t, 2t+1; a[1] row g+8;
// a[2] and a[3] the same rows, columns 2t+8, 2t+9.
__device__ __forceinline__ void fragment(unsigned (&a)[4], const WeightStep& w, const StepFactors& factors, int j) {
#if CODE_BITS == 16
    a[0] = w.codes[j].x, a[1] = w.codes[j].y, a[2] = w.codes[j].z, a[3] = w.codes[j].w;
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int half = i & 1, upper = i >> 1;
        const GroupFactor& f = factors.of[j * 16 / (K_STEP / STEP_GROUPS)][half];
#if CODE_BITS == 4
        const uint4& c = w.codes[0];
        unsigned word = j < 2 ? (half ? c.y : c.x) : (half ? c.w : c.z);
        // 0x4300 is 128 in bf16, where one unit in the last place is 1: the code becomes 128 + q.
        unsigned magic = and_or(word >> ((j & 1) * 8 + upper * 4), 0x000F000Fu, 0x43004300u);
        if (EXACT_IN_BF16) {
            unsigned difference = fma_bf16x2(magic, 0x3F803F80u, f.minus_zero2);
            a[i] = fma_bf16x2(difference, f.scale2, 0x80008000u);
        } else {
            unsigned code = fma_bf16x2(magic, 0x3F803F80u, 0xC300C300u);
            a[i] = pack_bf16(weight_of(__uint_as_float(code << 16), f), weight_of(__uint_as_float(code & 0xFFFF0000u), f));
        }
#else
        const uint4& c = w.codes[j >> 1];
        unsigned word = upper ? (half ? c.w : c.z) : (half ? c.y : c.x);
        // 0x4B000000 is 2^23 in float32, where one unit in the last place is 1.
        float low = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + (j & 1))) - 8388608.0f;
        float high = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7442 + (j & 1))) - 8388608.0f;
        a[i] = pack_bf16(weight_of(low, f), weight_of(high, f));
#endif
    }
#endif
}
