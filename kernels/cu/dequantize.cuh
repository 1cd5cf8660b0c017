// From a packed weight to bf16 fragments of a tensor-core product (A operand of m16n8k16, rows = features).
//
// Instantiated by packed.cuh's constants. A step is 64 columns, half a unit. Every weight is formed in
// float32 (or in bf16 where that is exact) and rounded to bf16 once. The fragments hold columns in
// the order of panels.cuh.
#pragma once
#include "packed.cuh"
#include "tensor_core.cuh"

constexpr int STEP_COLUMNS = 64;
constexpr int STEPS = ceil_div(K, STEP_COLUMNS);
constexpr int CODE_WORDS = BITS / 4;  // of 16 bytes: one lane's codes of a step
constexpr int STEP_GROUPS = GROUPS == 0 ? 1 : GROUPS == 1 ? 1 : GROUPS / 2;
constexpr int SCALE_STEP = STEP_GROUPS * 2 * type_size(SCALE);  // bytes of one lane's scales of a step

// A scale of 8 bits times a whole number below 2^8 is exact in float32, so one bf16 product rounds alike.
constexpr bool EXACT_IN_BF16 = BITS == 4 && GROUPS > 0 && SCALE == BF16 && (OFFSET == NO_OFFSET || OFFSET == NIBBLE_ZERO);

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// `bytes` bytes (1, 2, 4, 8 or 16) of read-only memory as words.
template <int BYTES>
__device__ __forceinline__ void load_bytes(u32* to, const u8* from) {
    if constexpr (BYTES == 1) to[0] = __ldg(from);
    else if constexpr (BYTES == 2) to[0] = __ldg((const u16*)from);
    else if constexpr (BYTES == 4) to[0] = __ldg((const u32*)from);
    else if constexpr (BYTES == 8) {
        const uint2 v = __ldg((const uint2*)from);
        to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 v = __ldg((const uint4*)from + i);
            to[i * 4] = v.x, to[i * 4 + 1] = v.y, to[i * 4 + 2] = v.z, to[i * 4 + 3] = v.w;
        }
    }
}

constexpr int OFFSET_STEP = OFFSET == NO_OFFSET ? 0 : OFFSET == NIBBLE_ZERO ? STEP_GROUPS : STEP_GROUPS * 2 * type_size(OFFSET_TYPE);

// Number `index` (row g and g + 8 of each group in turn) among one lane's scales or offsets of a step.
template <int TYPE>
__device__ __forceinline__ float step_number(const u32* words, int index) {
    if constexpr (TYPE == F32) return __uint_as_float(words[index]);
    else if constexpr (TYPE == F16) return f16_float(u16(words[index / 2] >> (index % 2 * 16)));
    else return index % 2 ? bf16_high(words[index / 2]) : bf16_low(words[index / 2]);
}

// One lane's codes, scales and offsets of 16 rows and 64 columns.
struct WeightStep {
    u32 codes[CODE_WORDS * 4];
    u32 scales[GROUPS > 0 ? (SCALE_STEP + 3) / 4 : 1];
    u32 offsets[GROUPS > 0 && OFFSET_STEP > 0 ? (OFFSET_STEP + 3) / 4 : 1];
};

__device__ __forceinline__ void load_step(WeightStep& to, const u8* weight, u32 tile, u32 step, u32 lane) {
    const u8* unit = weight + unit_at(tile, step / 2);
    const u8* codes = unit + (step % 2) * (CODE_WORDS * 512);
    if constexpr (BITS == 16) {
        // Words of (row g, row g + 8): columns 4t, 4t+1 and 4t+2, 4t+3 of 16 lie in two neighbouring lanes.
        codes += (lane / 4 * 4 + lane % 2 * 2) * 16 + lane % 4 / 2 * 8;
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++) {
            load_bytes<8>(to.codes + i * 4, codes + i * 512);
            load_bytes<8>(to.codes + i * 4 + 2, codes + i * 512 + 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++) load_bytes<16>(to.codes + i * 4, codes + i * 512 + lane * 16);
    }
    if constexpr (GROUPS > 0) {
        const u32 part = GROUPS == 1 ? 0 : step % 2;
        load_bytes<SCALE_STEP>(to.scales, unit + SCALE_AT + (lane / 4 * (GROUPS / STEP_GROUPS) + part) * SCALE_STEP);
        if constexpr (OFFSET != NO_OFFSET)
            load_bytes<OFFSET_STEP>(to.offsets, unit + OFFSET_AT + (lane / 4 * (GROUPS / STEP_GROUPS) + part) * OFFSET_STEP);
    }
}

// Scale and offset of one group and row in the form in which `fragment` uses them.
struct GroupFactor {
    float scale, offset;
    u32 scale2, minus_zero2;  // both bf16 halves equal: scale, -(128 + zero)
};

struct StepFactors {
    GroupFactor of[STEP_GROUPS][2];
};

// The factors of whole rows, which hold for every step of a tile (GROUP 0).
__device__ __forceinline__ void prepare_rows(StepFactors& to, const u8* weight, u32 n, u32 tile, u32 lane) {
    if constexpr (BITS != 16 && GROUPS == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 pair = __ldg((const float2*)(weight + row_scales_at(n)) + tile * UNIT_ROWS + h * 8 + lane / 4);
            to.of[0][h].scale = pair.x;
            to.of[0][h].offset = BITS == 4 && OFFSET == NO_OFFSET ? 8.0f : pair.y;
        }
    }
}

// The factors of a step, where scales belong to groups.
__device__ __forceinline__ void prepare_step(StepFactors& to, const WeightStep& w) {
    if constexpr (GROUPS > 0) {
#pragma unroll
        for (int i = 0; i < STEP_GROUPS * 2; i++) {
            GroupFactor& f = to.of[i / 2][i % 2];
            u32 zero = 8;
            if constexpr (OFFSET == NIBBLE_ZERO) zero = w.offsets[i / 8] >> (i % 8 * 4) & 15;
            if constexpr (EXACT_IN_BF16) {
                f.scale2 = __byte_perm(w.scales[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
                f.minus_zero2 = zero * 0x00010001u | 0xC300C300u;
            } else {
                f.scale = step_number<SCALE>(w.scales, i);
                if constexpr (OFFSET == ZERO || OFFSET == MINIMUM) f.offset = step_number<OFFSET_TYPE>(w.offsets, i);
                else f.offset = BITS == 8 ? 0.0f : float(zero);
            }
        }
    }
}

__device__ __forceinline__ float weight_of(float code, const GroupFactor& f) {
    if constexpr (OFFSET == MINIMUM) return __fadd_rn(__fmul_rn(code, f.scale), f.offset);
    else if constexpr (BITS == 8 && OFFSET == NO_OFFSET) return __fmul_rn(code, f.scale);
    else return __fmul_rn(__fsub_rn(code, f.offset), f.scale);
}

// The A fragment of columns 16j .. 16j+15 of a step: a[0] row g, columns 4t, 4t+1; a[1] row g + 8;
// a[2] and a[3] the same rows, columns 4t+2, 4t+3.
__device__ __forceinline__ void fragment(u32 (&a)[4], const WeightStep& w, const StepFactors& factors, int j) {
    if constexpr (BITS == 16) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = w.codes[j * 4 + i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = i % 2, upper = i / 2;
            const GroupFactor& f = factors.of[j * STEP_GROUPS / 4][h];
            if constexpr (BITS == 4) {
                const u32 codes = (h ? w.codes[j] >> 4 : w.codes[j]) & 0x0F0F0F0Fu;
                // 0x43 makes 128 + q of a bf16's low byte: there one unit in the last place is 1.
                const u32 magic = __byte_perm(codes, 0x43434343u, upper ? 0x4342 : 0x4140);
                if constexpr (EXACT_IN_BF16) {
                    const u32 difference = fma_bf16x2(magic, 0x3F803F80u, f.minus_zero2);
                    a[i] = fma_bf16x2(difference, f.scale2, 0x80008000u);
                } else {
                    const u32 code = fma_bf16x2(magic, 0x3F803F80u, 0xC300C300u);
                    a[i] = bf16_pair(weight_of(bf16_low(code), f), weight_of(bf16_high(code), f));
                }
            } else {
                // 0x4B000000 is 2^23 in float32, where one unit in the last place is 1; codes are signed.
                const u32 codes = w.codes[j / 2 * 4 + j % 2 * 2 + h] ^ 0x80808080u;
                const float low = __uint_as_float(__byte_perm(codes, 0x4B000000u, 0x7440 + upper * 2)) - 8388736.0f;
                const float high = __uint_as_float(__byte_perm(codes, 0x4B000000u, 0x7441 + upper * 2)) - 8388736.0f;
                a[i] = bf16_pair(weight_of(low, f), weight_of(high, f));
            }
        }
    }
}
