// Fills a packed weight with numbers of a sane size, for measurements without a data file: codes are
// a hash of their place, weights lie around zero with a deviation near `spread`.
//
// Instantiated by packed.cuh's constants and N.
#include "packed.cuh"

__device__ __forceinline__ u32 hash(u64 value) {
    u32 h = u32(value) * 2654435761u ^ u32(value >> 32) * 2246822519u;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    return h ^ h >> 16;
}

template <int TYPE>
__device__ __forceinline__ void write(u8* base, u32 index, float value) {
    if constexpr (TYPE == F32) ((float*)base)[index] = value;
    else if constexpr (TYPE == BF16) ((u16*)base)[index] = bf16_round(value);
    else asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; st.b16 [%0], h; }" ::"l"((u16*)base + index), "f"(value) : "memory");
}

// A warp per unit.
extern "C" __global__ void __launch_bounds__(256) randomize(u8* packed, u32 seed, float spread) {
    const u64 index = u64(blockIdx.x) * 8 + threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    if (index >= u64(ceil_div(N, UNIT_ROWS)) * UNITS) return;
    u8* unit = packed + index * UNIT_BYTES;
    const auto random = [&](u32 i) { return hash((index << 12 | i) ^ u64(seed) << 40); };
    // Codes are uniform: their deviation is their number / sqrt(12).
    constexpr bool UNSIGNED_BYTES = BITS == 8 && OFFSET == MINIMUM;
    const float scale = spread * 3.46f / (UNSIGNED_BYTES ? 64 : 1 << (BITS == 16 ? 0 : BITS));
    if constexpr (BITS == 16) {
        for (u32 i = lane; i < CODE_BYTES / 2; i += WARP) ((u16*)unit)[i] = bf16_round(spread * 3.46f * (random(i) * 0x1p-32f - 0.5f));
    } else {
        for (u32 i = lane; i < CODE_BYTES / 4; i += WARP) ((u32*)unit)[i] = random(i) & (UNSIGNED_BYTES ? 0x3F3F3F3Fu : ~0u);
        for (u32 i = lane; i < UNIT_ROWS * GROUPS; i += WARP) {
            write<SCALE>(unit + SCALE_AT, i, scale * (0.75f + random(i + 2048) * 0x1p-33f));
            if constexpr (OFFSET == ZERO) write<OFFSET_TYPE>(unit + OFFSET_AT, i, 7.5f);
            if constexpr (OFFSET == MINIMUM) write<OFFSET_TYPE>(unit + OFFSET_AT, i, (UNSIGNED_BYTES ? -31.5f : -7.5f) * scale);
        }
        if constexpr (OFFSET == NIBBLE_ZERO)
            for (u32 i = lane; i < UNIT_ROWS * GROUPS / 2; i += WARP) unit[OFFSET_AT + i] = random(i + 3072) & 1 ? 0x87 : 0x78;
        if constexpr (GROUPS == 0)
            if (index % UNITS == 0 && lane < UNIT_ROWS) {
                float* pair = (float*)(packed + row_scales_at(N)) + 2 * (index / UNITS * UNIT_ROWS + lane);
                pair[0] = scale;
                pair[1] = 0.0f;
            }
    }
}
