// Rewrites a weight from the plain layout of the data file into that of packed.cuh. Runs once at load.
//
// One warp per unit. Tile `i` of the launch takes its rows 8 h + g from source `h`, row
// i * TILE_STRIDE + h * HALF_STRIDE + g: with strides 16 and 8 and both sources equal, the rows of
// one matrix in order; with strides 8 and 0, the rows of two matrices (gate and up) in turns of eight,
// of which HALVES (a bit for each source) are written.
//
// Matrices that share a packed weight may be stored in different ways, where one layout holds all of
// their numbers exactly: scales become float32, groups smaller, and what has no offset gets one of 0.
//
// Instantiated by packed.cuh's constants, SOURCE_BITS (4, 5, 6, 8; 16 for bfloat16), SOURCE_GROUP, SOURCE_SCALE
// (type), SOURCE_OFFSET (NO_OFFSET, ZERO or MINIMUM), SOURCE_OFFSET_TYPE (F32, F16, BF16, or 3 for bytes, 4 for
// nibbles), TILE_STRIDE, HALF_STRIDE, HALVES (3 with 4 bits, where a byte has codes of both sources).
#include "packed.cuh"

constexpr int BYTE_ZERO = 3, PACKED_ZERO = 4;
constexpr int SOURCE_GROUPS = SOURCE_BITS == 16 ? 1 : K / SOURCE_GROUP;
constexpr int LOW_BITS = SOURCE_BITS < 8 ? 4 : 8;
constexpr int HIGH_BITS = SOURCE_BITS < 8 ? SOURCE_BITS - 4 : 0;

struct Matrix {
    const u8 *codes, *codes_high, *scales, *offsets;
};

__device__ __forceinline__ u32 code(const Matrix& m, u64 row, u32 column) {
    if constexpr (LOW_BITS == 8) return m.codes[row * K + column];
    u32 value = m.codes[row * ceil_div(K, 2) + column / 2] >> (column % 2 * 4) & 15;
    if constexpr (HIGH_BITS > 0) {
        const u32 bit = column * HIGH_BITS, stride = ceil_div(K * HIGH_BITS, 8);
        const u8* high = m.codes_high + row * stride;
        u32 word = high[bit / 8];
        if (bit / 8 + 1 < stride) word |= u32(high[bit / 8 + 1]) << 8;
        value |= (word >> bit % 8 & (1u << HIGH_BITS) - 1) << 4;
    }
    return value;
}

// What is taken from the codes: in 8 bits they are signed, those with a minimum fit as they are.
constexpr int CENTRE = BITS == 8 && SOURCE_OFFSET != MINIMUM ? 1 << (SOURCE_BITS - 1) : 0;

// A code as it is stored in the unit.
__device__ __forceinline__ u32 stored_code(const Matrix& m, u64 row, u32 column, bool inside) {
    return inside && column < K ? (code(m, row, column) - CENTRE) & 255 : 0;
}

__device__ __forceinline__ float offset(const Matrix& m, u64 row, u32 group) {
    if constexpr (SOURCE_OFFSET == NO_OFFSET)
        return 0.0f;
    else if constexpr (SOURCE_OFFSET_TYPE == PACKED_ZERO)
        return float(m.offsets[row * ceil_div(SOURCE_GROUPS, 2) + group / 2] >> (group % 2 * 4) & 15) - float(CENTRE);
    else if constexpr (SOURCE_OFFSET_TYPE == BYTE_ZERO)
        return float(m.offsets[row * SOURCE_GROUPS + group]) - float(CENTRE);
    else
        return read_float<SOURCE_OFFSET_TYPE>(m.offsets, row * SOURCE_GROUPS + group) - float(CENTRE);
}

template <int TYPE>
__device__ __forceinline__ void write_float(u8* base, u32 index, float value) {
    if constexpr (TYPE == F32) ((float*)base)[index] = value;
    else if constexpr (TYPE == BF16) ((u16*)base)[index] = bf16_round(value);
    else {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        ((u16*)base)[index] = bits;
    }
}

// packed: whole destination, of which `tiles` tiles from tile `first` on are written; `n` its rows.
// rows: rows of each source; tiles beyond them are filled with zeros.
extern "C" __global__ void __launch_bounds__(256)
    pack(const u8* codes_0, const u8* codes_high_0, const u8* scales_0, const u8* offsets_0,
         const u8* codes_1, const u8* codes_high_1, const u8* scales_1, const u8* offsets_1,
         u8* packed, u32 first, u32 tiles, u32 rows, u32 n) {
    const u64 index = u64(blockIdx.x) * 8 + threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 tile = index / UNITS, unit = index % UNITS;
    if (tile >= tiles) return;
    const auto source = [&](u32 h) {
        return h == 0 ? Matrix{codes_0, codes_high_0, scales_0, offsets_0}
                      : Matrix{codes_1, codes_high_1, scales_1, offsets_1};
    };
    u8* out = packed + unit_at(first + tile, unit);
    u32* words = (u32*)out;
    const u32 column = unit * UNIT_COLUMNS;
    const auto source_row = [&](u32 h, u32 g) { return u64(tile) * TILE_STRIDE + h * HALF_STRIDE + g; };

    const auto written = [](u32 h) { return (HALVES >> h & 1) != 0; };

    for (u32 i = 0; i < CODE_BYTES / 512; i++)
        for (u32 j = 0; j < 4; j++) {
            if (BITS != 4 && !written(j % 2)) continue;
            u32 word = 0;
            for (u32 b = 0; b < 4; b++) {
                if constexpr (BITS == 4) {
                    const u32 k = column + i * 64 + j * 16 + 4 * t + b;
                    for (u32 h = 0; h < 2; h++) {
                        const u64 row = source_row(h, g);
                        word |= stored_code(source(h), row, k, row < rows) << (8 * b + 4 * h);
                    }
                } else if constexpr (BITS == 8) {
                    const u64 row = source_row(j % 2, g);
                    word |= stored_code(source(j % 2), row, column + i * 32 + j / 2 * 16 + 4 * t + b,
                                        row < rows)
                            << (8 * b);
                } else {
                    const u64 row = source_row(j % 2, g);
                    const u32 k = column + i * 16 + j / 2 * 8 + 2 * t + b / 2;
                    if (row < rows && k < K) word |= source(j % 2).codes[(row * K + k) * 2 + b % 2] << (8 * b);
                }
            }
            words[(i * WARP + lane) * 4 + j] = word;
        }

    if constexpr (GROUPS > 0) {
        for (u32 at = lane; at < UNIT_ROWS * GROUPS; at += WARP) {
            const u32 h = at % 2, k = column + at / 2 % GROUPS * GROUP;
            if (!written(h)) continue;
            const u64 row = source_row(h, at / (2 * GROUPS));
            const bool inside = row < rows && k < K;
            const u32 group = k / SOURCE_GROUP;
            const float scale = inside ? read_float<SOURCE_SCALE>(source(h).scales, row * SOURCE_GROUPS + group) : 0.0f;
            write_float<SCALE>(out + SCALE_AT, at, scale);
            if constexpr (OFFSET == ZERO || OFFSET == MINIMUM)
                write_float<OFFSET_TYPE>(out + OFFSET_AT, at, inside ? offset(source(h), row, group) : 0.0f);
        }
        if constexpr (OFFSET == NIBBLE_ZERO)
            for (u32 at = lane; at < UNIT_ROWS * GROUPS / 2; at += WARP) {
                u32 byte = 0;
                for (u32 h = 0; h < 2; h++) {
                    const u32 k = column + at % GROUPS * GROUP;
                    const u64 row = source_row(h, at / GROUPS);
                    if (row < rows && k < K) byte |= u32(offset(source(h), row, k / SOURCE_GROUP)) << (4 * h);
                }
                out[OFFSET_AT + at] = byte;
            }
    } else if constexpr (BITS != 16) {
        const u32 h = lane / 8;
        if (unit == 0 && lane < UNIT_ROWS && written(h)) {
            const u64 row = source_row(h, lane % 8);
            float* pair = (float*)(packed + row_scales_at(n)) + 2 * (u64(first + tile) * UNIT_ROWS + lane);
            pair[0] = row < rows ? read_float<SOURCE_SCALE>(source(h).scales, row) : 0.0f;
            pair[1] = row < rows && OFFSET == ZERO ? offset(source(h), row, 0) : 0.0f;
        }
    }
}
