// The layout that `linear_few` and `embed` read, written once at load by `pack`.
//
// A weight [N, K] is cut into units of 16 rows x 128 columns; rows and columns are padded with
// zeros. Units lie tile by tile (16 rows), along K within a tile, so that any range of columns of a
// tile is one contiguous stream. A unit is
//
//   codes    in the order of the tensor-core fragments. For lane l = 4 g + t of a warp, g < 8, t < 4:
//            4 bits: [half of 64 columns][lane] 4 words; word 2 s + r holds columns
//                    32 s + 16 r + 4 t + byte of the half; row g in low nibbles, g + 8 in high ones
//            8 bits, signed: [block of 32 columns][lane] 4 words; word 2 r + h holds row g + 8 h,
//                    columns 16 r + 4 t + byte; codes are moved to the middle, but for those with a
//                    minimum, which stay unsigned below 64
//            16 bits, bfloat16: [block of 16 columns][lane] 4 words; word 2 r + h holds row g + 8 h,
//                    columns 8 r + 2 t + {0, 1}
//   scales   [g][group of the unit][h] for rows g + 8 h; none if the scale is that of the whole row
//   offsets  likewise; nibbles are packed in that order, low nibble first
//
// padded to 16 bytes. Where scales belong to whole rows (GROUP 0), pairs (scale, zero) of float32
// follow after the last unit, one for each row.
//
// Instantiated by BITS, GROUP, SCALE (type), OFFSET (kind), OFFSET_TYPE, K.
#pragma once
#include "common.cuh"

constexpr int NO_OFFSET = 0, NIBBLE_ZERO = 1, ZERO = 2, MINIMUM = 3;

constexpr int UNIT_ROWS = 16, UNIT_COLUMNS = 128;
constexpr int UNITS = ceil_div(K, UNIT_COLUMNS);  // along K
constexpr int GROUPS = BITS == 16 || GROUP == 0 ? 0 : UNIT_COLUMNS / GROUP;
constexpr int CODE_BYTES = UNIT_ROWS * UNIT_COLUMNS * BITS / 8;

constexpr int type_size(int type) { return type == F32 ? 4 : 2; }

constexpr int SCALE_AT = CODE_BYTES;
constexpr int SCALE_BYTES = UNIT_ROWS * GROUPS * type_size(SCALE);
constexpr int OFFSET_AT = SCALE_AT + SCALE_BYTES;
constexpr int OFFSET_BYTES = OFFSET == NO_OFFSET     ? 0
                             : OFFSET == NIBBLE_ZERO ? UNIT_ROWS * GROUPS / 2
                                                     : UNIT_ROWS * GROUPS * type_size(OFFSET_TYPE);
constexpr int UNIT_BYTES = ceil_div(OFFSET_AT + OFFSET_BYTES, 16) * 16;

__device__ __forceinline__ u64 unit_at(u32 tile, u32 unit) {
    return (u64(tile) * UNITS + unit) * UNIT_BYTES;
}
// Where the (scale, zero) pairs of whole rows begin, for N rows.
__device__ __forceinline__ u64 row_scales_at(u32 n) { return unit_at(ceil_div(n, u32(UNIT_ROWS)), 0); }

// One number of a packed weight with N rows, in float32.
__device__ __forceinline__ float packed_number(const u8* weight, u32 n, u32 row, u32 column) {
    const u8* unit = weight + unit_at(row / UNIT_ROWS, column / UNIT_COLUMNS);
    const u32 g = row % 8, h = row / 8 % 2, c = column % UNIT_COLUMNS;
    if constexpr (BITS == 16) {
        const u32 lane = g * 4 + c / 2 % 4, word = c / 8 % 2 * 2 + h;
        return bf16_float(((const u16*)unit)[((c / 16 * 32 + lane) * 4 + word) * 2 + c % 2]);
    } else {
        const u32 lane = g * 4 + c / 4 % 4;
        float code, scale, offset = BITS == 4 && OFFSET == NO_OFFSET ? 8.0f : 0.0f;
        if constexpr (BITS == 4)
            code = float(unit[((c / 64 * 32 + lane) * 4 + c / 16 % 4) * 4 + c % 4] >> (4 * h) & 15);
        else
            code = float(i8(unit[((c / 32 * 32 + lane) * 4 + c / 16 % 2 * 2 + h) * 4 + c % 4]));
        if constexpr (GROUPS == 0) {
            const float* pair = (const float*)(weight + row_scales_at(n)) + 2 * row;
            scale = pair[0];
            offset = pair[1];
        } else {
            const u32 at = (g * GROUPS + c / GROUP) * 2 + h;
            scale = read_float<SCALE>(unit + SCALE_AT, at);
            if constexpr (OFFSET == NIBBLE_ZERO) offset = float(unit[OFFSET_AT + at / 2] >> (at % 2 * 4) & 15);
            if constexpr (OFFSET == ZERO) offset = read_float<OFFSET_TYPE>(unit + OFFSET_AT, at);
            if constexpr (OFFSET == MINIMUM)
                return code * scale + read_float<OFFSET_TYPE>(unit + OFFSET_AT, at);
        }
        return (code - offset) * scale;
    }
}
