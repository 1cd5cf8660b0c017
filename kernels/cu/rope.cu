// From the merged product of q, k and v to rotated queries and the rows of K and V. A head per warp.
//
// Every head is normed over its own D columns (eps inside the mean), q and k are multiplied by their
// norm's weight and rotated in the half-split form: columns i and i + D / 2 turn by
// position * frequency[i] for i < ROTATED, the others stay. v has no weight and no rotation; where a
// layer has no v (SHARED_KV), v is k's raw product.
//
// KEY_COLUMNS < D: K gets only the columns that rotate, KEY_COLUMNS / 2 = ROTATED of each half. The others
// differ from V's by the weight of k's norm alone, with which q is multiplied instead.
//
// Instantiated by Q_HEADS, KV_HEADS, D, KEY_COLUMNS, ROTATED, SHARED_KV, SPLITS, WEIGHT (type of the norms'
// weights), FREQUENCIES (list of ROTATED float32 literals).
#include "session.cuh"

constexpr int HALF = D / 2;
constexpr int VECTOR = HALF % 4 == 0 ? 4 : 1;  // columns that a lane reads at a time
constexpr int VECTORS = ceil_div(HALF / VECTOR, int(WARP));
constexpr int PAIRS = VECTORS * VECTOR;  // of a lane
constexpr int COLUMNS = (Q_HEADS + KV_HEADS * (SHARED_KV ? 1 : 2)) * D;

// Not in constant memory: there, lanes that read different words wait for one another.
__device__ const float frequency[ROTATED] = {FREQUENCIES};

struct Turn {
    float cosine, sine;
};

// Sine and cosine of a float32 angle of up to 2^20: reduced by multiples of pi / 2 in double, then
// the polynomials of Cephes' sinf and cosf (S. Moshier) on [-pi/4, pi/4], error 1e-7.
__device__ __forceinline__ Turn turn(float angle) {
    const int quadrant = __float2int_rn(angle * 0.63661977f);
    const float r = float(fma(double(quadrant), -1.5707963267948966, double(angle)));
    const float s = r * r;
    float sine = fmaf(fmaf(fmaf(-1.9515295891e-4f, s, 8.3321608736e-3f), s, -1.6666654611e-1f) * s, r, r);
    float cosine = fmaf(fmaf(fmaf(2.443315711809948e-5f, s, -1.388731625493765e-3f), s, 4.166664568298827e-2f), s * s,
                        fmaf(-0.5f, s, 1.0f));
    if (quadrant & 1) {
        const float other = sine;
        sine = cosine;
        cosine = -other;
    }
    return quadrant & 2 ? Turn{-cosine, -sine} : Turn{cosine, sine};
}

// Pair i of a lane: lanes take VECTOR columns each, in turns.
__device__ __forceinline__ u32 column_of(int i, u32 lane) { return (lane + i / VECTOR * WARP) * VECTOR + i % VECTOR; }

// The multiplier that norms a head; `v` holds pairs (i, i + HALF) of this lane.
__device__ __forceinline__ float inverse_rms(const float (&v)[PAIRS][2], float eps) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) square += v[i][0] * v[i][0] + v[i][1] * v[i][1];
    return rsqrtf(warp_sum(square) / D + eps);
}

// Writes a head's pairs to its columns, VECTOR at a time.
__device__ __forceinline__ void store(float* to, const float (&v)[PAIRS][2], u32 lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i += VECTOR)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 column = column_of(i, lane);
            if (column >= HALF) continue;
            float* at = to + column + h * HALF;
            if constexpr (VECTOR == 4) *(float4*)at = {v[i][h], v[i + 1][h], v[i + 2][h], v[i + 3][h]};
            else *at = v[i][h];
        }
}
// Of each half the first COLUMNS / 2.
template <int COLUMNS>
__device__ __forceinline__ void store(u16* to, const float (&v)[PAIRS][2], u32 lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i += VECTOR)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 column = column_of(i, lane);
            if (column >= COLUMNS / 2) continue;
            u16* at = to + column + h * (COLUMNS / 2);
            if constexpr (VECTOR == 4) *(uint2*)at = {bf16_pair(v[i][h], v[i + 1][h]), bf16_pair(v[i + 2][h], v[i + 3][h])};
            else *at = bf16_round(v[i][h]);
        }
}

// qkv [SPLITS, T, COLUMNS] float32; q [T, Q_HEADS, D] float32; K [ring, KV_HEADS, KEY_COLUMNS] and
// V [ring, KV_HEADS, D], bfloat16, at table[keys] and table[values]. A stopped session's rows stay as they are.
extern "C" __global__ void __launch_bounds__(128)
    rope(const float* __restrict__ qkv, const void* __restrict__ q_weight, const void* __restrict__ k_weight,
         float* __restrict__ q, const u64* table, u32 state, u32 keys, u32 values, u32 ring, u32 rows, float eps) {
    const u32 lane = threadIdx.x % WARP, head = blockIdx.x * 4 + threadIdx.x / WARP, row = blockIdx.y;
    allow_successor();
    const u32* words = session_memory<u32>(table, state);
    u16* key_rows = session_memory<u16>(table, keys);
    u16* value_rows = session_memory<u16>(table, values);
    const bool is_q = head < Q_HEADS, is_k = !is_q && head < Q_HEADS + KV_HEADS;
    const auto column = [&](int i) { return column_of(i, lane); };
    const auto inside = [&](int i) { return column(i) < HALF; };
    float weight[PAIRS][2];
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        for (int h = 0; h < 2; h++) {
            weight[i][h] = inside(i) ? read_float<WEIGHT>(is_q ? q_weight : k_weight, column(i) + h * HALF) : 0.0f;
            if (KEY_COLUMNS < D && is_q && inside(i) && column(i) >= ROTATED)
                weight[i][h] *= read_float<WEIGHT>(k_weight, column(i) + h * HALF);
        }
    wait_for_predecessor();
    if (head * D >= COLUMNS) return;

    float raw[PAIRS][2] = {};
#pragma unroll
    for (int i = 0; i < PAIRS; i += VECTOR)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!inside(i)) continue;
#pragma unroll
            for (int split = 0; split < SPLITS; split++) {
                const float* from = qkv + (u64(split) * rows + row) * COLUMNS + head * D + column(i) + h * HALF;
                if constexpr (VECTOR == 4) {
                    const float4 v = *(const float4*)from;
                    raw[i][h] += v.x, raw[i + 1][h] += v.y, raw[i + 2][h] += v.z, raw[i + 3][h] += v.w;
                } else {
                    raw[i][h] += *from;
                }
            }
        }
    const float inverse = inverse_rms(raw, eps);
    const u32 position = words[STATE_POSITION] + row;
    const bool stopped = words[STATE_STOPPED] != 0;
    const u64 slot = u64(position % ring) * KV_HEADS;

    if (!is_q && (!is_k || SHARED_KV) && !stopped) {
        float v[PAIRS][2];
#pragma unroll
        for (int i = 0; i < PAIRS; i++) v[i][0] = raw[i][0] * inverse, v[i][1] = raw[i][1] * inverse;
        store<D>(value_rows + (slot + (head - Q_HEADS) % KV_HEADS) * D, v, lane);
    }
    if (!is_q && !is_k) return;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float a = raw[i][0] * inverse * weight[i][0], b = raw[i][1] * inverse * weight[i][1];
        if (column(i) < ROTATED) {
            const Turn by = turn(float(position) * frequency[column(i)]);
            const float rotated = a * by.cosine - b * by.sine;
            b = b * by.cosine + a * by.sine;
            a = rotated;
        }
        raw[i][0] = a, raw[i][1] = b;
    }
    if (is_q) store(q + (u64(row) * Q_HEADS + head) * D, raw, lane);
    else if (!stopped) store<KEY_COLUMNS>(key_rows + (slot + head - Q_HEADS) * KEY_COLUMNS, raw, lane);
}
