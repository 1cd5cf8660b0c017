// Quantizes rows of a weight, as `exporter/src/quantize` does on the CPU, to the last bit.
//
// A block takes a row, and its warps take the groups of that row in turns. So that both make the same
// bundle, no product is contracted with a sum, and sums are taken in one order: 32 side by side in a
// group, 8 side by side for the groups of a row, and then in halves or one after another.
#include "common.cuh"

constexpr u32 WARPS = 8;
// Numbers of `zero_type` beside F16 and BF16; 3 is a byte.
constexpr u32 NIBBLE = 4, NO_ZERO = 5;

// A float32 each of whose operations rounds.
struct Number {
    float value;
    __device__ __forceinline__ Number(float value) : value(value) {}
};
__device__ __forceinline__ Number operator+(Number a, Number b) { return __fadd_rn(a.value, b.value); }
__device__ __forceinline__ Number operator-(Number a, Number b) { return __fadd_rn(a.value, -b.value); }
__device__ __forceinline__ Number operator*(Number a, Number b) { return __fmul_rn(a.value, b.value); }
__device__ __forceinline__ Number operator/(Number a, Number b) { return __fdiv_rn(a.value, b.value); }
__device__ __forceinline__ Number operator-(Number a) { return -a.value; }
__device__ __forceinline__ bool operator<(Number a, Number b) { return a.value < b.value; }
__device__ __forceinline__ bool operator>(Number a, Number b) { return a.value > b.value; }
__device__ __forceinline__ u32 bits(Number a) { return __float_as_uint(a.value); }
__device__ __forceinline__ Number from_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ bool is_finite(Number a) { return (bits(a) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ Number size(Number a) { return fabsf(a.value); }
__device__ __forceinline__ Number clamp(Number a, Number low, Number high) { return a < low ? low : a > high ? high : a; }

__device__ __forceinline__ Number warp_least(Number value) {
#pragma unroll
    for (u32 offset = 16; offset > 0; offset >>= 1) {
        const Number other = __shfl_xor_sync(~0u, value.value, offset);
        value = other < value ? other : value;
    }
    return value;
}
__device__ __forceinline__ Number warp_total(Number value) {
#pragma unroll
    for (u32 offset = 16; offset > 0; offset >>= 1) value = value + Number(__shfl_xor_sync(~0u, value.value, offset));
    return value;
}

// Added to a number below 2^22, it leaves that number rounded to even in the low bits.
constexpr float ROUND = 12582912.0f;
constexpr float SMALLEST_SCALE = 0x1p-23f;
constexpr float NORM = 0.7f, BETA = 10.0f, KAPPA = 1.01f, NEGLIGIBLE = 0.14f;
constexpr int ITERATIONS = 20;

__device__ __forceinline__ Number round_even(Number value) { return (value + ROUND) - ROUND; }

// x^(NORM - 1); `power` of lanes.rs has the derivation.
__device__ __forceinline__ Number shrinking_power(Number x) {
    const int exponent = int(bits(x) - 0x3f3504f3u) >> 23;
    const Number mantissa = from_bits(bits(x) - (u32(exponent) << 23));
    const Number f = (mantissa - 1.0f) / (mantissa + 1.0f), s = f * f;
    const Number series = (((Number(0.3205989f) * s + 0.41219857f) * s + 0.57707804f) * s + 0.9617967f) * s + 2.88539f;
    const Number y = (series * f + Number(float(exponent))) * (Number(NORM) - 1.0f);
    const Number whole = round_even(y), r = y - whole;
    const Number power =
        ((((((Number(1.5252734e-5f) * r + 1.5403530e-4f) * r + 1.3333558e-3f) * r + 9.618129e-3f) * r + 5.5504109e-2f) * r +
          2.4022651e-1f) * r + 6.9314718e-1f) * r + 1.0f;
    return power * from_bits(u32(int(whole.value) + 127) << 23);
}

__device__ __forceinline__ Number read(const u8* source, u32 type, u64 at) {
    return type == u32(BF16) ? read_float<BF16>(source, at) : type == u32(F16) ? read_float<F16>(source, at) : read_float<F32>(source, at);
}
__device__ __forceinline__ u16 f16_round(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ void write(u8* part, u32 type, u64 at, Number number) {
    if (type == u32(BF16)) ((u16*)part)[at] = bf16_round(number.value);
    else if (type == u32(F16)) ((u16*)part)[at] = f16_round(number.value);
    else if (type == u32(F32)) ((float*)part)[at] = number.value;
    else part[at] = u8(number.value);
}
// The nearest number that the type holds.
__device__ __forceinline__ Number stored(u32 type, Number number) {
    return type == u32(BF16) ? bf16_float(bf16_round(number.value)) : type == u32(F16) ? f16_float(f16_round(number.value)) : number.value;
}

struct Parameters {
    Number scale, zero;
};
struct Loss {
    Number signal, noise, max_error;
};
// As the host reads it.
struct Row {
    double signal, noise;
    float max_error;
    u32 refused;
};

// One group; every lane of a warp calls its functions.
struct Group {
    const u8* source;
    u32 source_type;
    u64 first;
    u32 length, lane;
    Number levels;

    __device__ __forceinline__ Number value(u32 at) const { return read(source, source_type, first + at); }

    __device__ Parameters min_max(bool symmetric, u32 scale_type, bool& refused) const {
        Number low = 0.0f, minus_high = 0.0f;
        for (u32 at = lane; at < length; at += WARP) {
            const Number v = value(at);
            refused |= !is_finite(v);
            low = v < low ? v : low;
            minus_high = -v < minus_high ? -v : minus_high;
        }
        low = warp_least(low);
        const Number high = -warp_least(minus_high);
        if (symmetric) {
            const Number scale = (high > -low ? high : -low) / (levels / 2.0f);
            return {stored(scale_type, scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE), (levels + 1.0f) / 2.0f};
        }
        const Number quotient = (high - low) / levels, scale = quotient > SMALLEST_SCALE ? quotient : SMALLEST_SCALE;
        return {stored(scale_type, scale), clamp(-rintf((low / scale).value), 0.0f, levels)};
    }

    __device__ Loss min_max_codes(Parameters p, u32 scale_type, u8* codes) const {
        const Number reciprocal = stored(scale_type, Number(1.0f) / p.scale);
        const int shift = int(p.zero.value) - int(bits(ROUND));
        return encode(p, codes, [&](Number value) {
            const int code = int(bits(value * reciprocal + ROUND)) + shift;
            return u8(code < 0 ? 0 : code > int(levels.value) ? int(levels.value) : code);
        });
    }

    __device__ Loss hqq(Parameters& p, u32 zero_type, u8* codes) const {
        const Number scale = p.scale, reciprocal = Number(1.0f) / scale;
        const auto code = [&](Number value, Number zero) {
            return clamp(round_even(value * reciprocal + zero), 0.0f, levels);
        };
        Number low = 0.0f;
        for (u32 at = lane; at < length; at += WARP) low = value(at) < low ? value(at) : low;
        Number zero = clamp(-warp_least(low) * reciprocal, 0.0f, levels);
        Number best = zero, least = __uint_as_float(0x7f800000u), beta = BETA;
        for (int iteration = 0; iteration < ITERATIONS; iteration++) {
            Number squares = 0.0f, sum = 0.0f;
            for (u32 at = lane; at < length; at += WARP) {
                const Number v = value(at), q = code(v, zero), residual = v - (q - zero) * scale;
                Number kept = 0.0f;
                if (size(residual) > NEGLIGIBLE) {
                    const Number rest = size(residual) - shrinking_power(size(residual)) / beta;
                    kept = copysignf((rest > 0.0f ? rest : Number(0.0f)).value, residual.value);
                }
                squares = squares + residual * residual;
                sum = sum + (q - (v - kept) * reciprocal);
            }
            squares = warp_total(squares);
            if (squares.value >= least.value) break;
            best = zero;
            least = squares;
            zero = warp_total(sum) / Number(float(length));
            beta = beta * KAPPA;
        }
        p.zero = stored(zero_type, best);
        return encode(p, codes, [&](Number value) { return u8(code(value, p.zero).value); });
    }

    // Writes codes and sums up what they lose.
    template <class Code>
    __device__ __forceinline__ Loss encode(Parameters p, u8* codes, Code code) const {
        Loss loss = {0.0f, 0.0f, 0.0f};
        for (u32 at = lane; at < length; at += WARP) {
            const Number v = value(at);
            const u8 q = code(v);
            codes[at] = q;
            const Number error = size(v - (Number(float(q)) - p.zero) * p.scale);
            loss.signal = loss.signal + v * v;
            loss.noise = loss.noise + error * error;
            loss.max_error = error > loss.max_error ? error : loss.max_error;
        }
        return {warp_total(loss.signal), warp_total(loss.noise), -warp_least(-loss.max_error)};
    }
};

// source: [rows, k] in source_type. codes: [rows, k], a byte each: a part of the weight with 8 bits, else packed
// into low and high afterwards. zeros: a part of the weight, but with nibbles a byte each, packed into nibbles.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    quantize(const u8* source, u8* codes, u8* low, u8* high, u8* scales, u8* zeros, u8* nibbles, Row* rows,
             u32 k, u32 group, u32 code_bits, u32 source_type, u32 scale_type, u32 zero_type, u32 half_quadratic) {
    const u64 row = blockIdx.x;
    const u32 groups = k / group, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __shared__ Row parts[WARPS];
    double signal = 0.0, noise = 0.0;
    Number max_error = 0.0f;
    bool refused = false;
    for (u32 at = warp; at < groups; at += WARPS) {
        const u64 first = row * k + u64(at) * group;
        const Group values = {source, source_type, first, group, lane, Number(float((1u << code_bits) - 1))};
        Parameters p = values.min_max(zero_type == NO_ZERO, scale_type, refused);
        refused |= !is_finite(p.scale);
        const Loss loss = half_quadratic ? values.hqq(p, zero_type, codes + first) : values.min_max_codes(p, scale_type, codes + first);
        signal += double(loss.signal.value);
        noise += double(loss.noise.value);
        max_error = loss.max_error > max_error ? loss.max_error : max_error;
        if (lane == 0) {
            write(scales, scale_type, row * groups + at, p.scale);
            if (zero_type != NO_ZERO) write(zeros, zero_type, row * groups + at, p.zero);
        }
    }
    if (lane == 0) parts[warp] = {signal, noise, max_error.value, 0};
    const bool any_refused = __syncthreads_or(refused);
    if (threadIdx.x == 0) {
        Row sum = {0.0, 0.0, 0.0f, any_refused};
        for (const Row& part : parts) {
            sum.signal += part.signal;
            sum.noise += part.noise;
            sum.max_error = part.max_error > sum.max_error ? part.max_error : sum.max_error;
        }
        rows[row] = sum;
    }

    const u8* row_codes = codes + row * k;
    const auto code = [&](u32 at) { return at < k ? u32(row_codes[at]) : 0; };
    if (code_bits < 8)
        for (u32 at = threadIdx.x; at < ceil_div(k, 2u); at += blockDim.x)
            low[row * ceil_div(k, 2u) + at] = u8((code(2 * at) & 15) | (code(2 * at + 1) & 15) << 4);
    if (code_bits == 6)
        for (u32 at = threadIdx.x; at < ceil_div(k, 4u); at += blockDim.x) {
            u32 byte = 0;
            for (u32 i = 0; i < 4; i++) byte |= code(4 * at + i) >> 4 << (2 * i);
            high[row * ceil_div(k, 4u) + at] = u8(byte);
        }
    if (zero_type == NIBBLE) {
        const auto zero = [&](u32 at) { return at < groups ? u32(zeros[row * groups + at]) : 0; };
        for (u32 at = threadIdx.x; at < ceil_div(groups, 2u); at += blockDim.x)
            nibbles[row * ceil_div(groups, 2u) + at] = u8(zero(2 * at) | zero(2 * at + 1) << 4);
    }
}
