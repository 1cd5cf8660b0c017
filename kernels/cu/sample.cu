// The next token from one row of logits, and the step of the session's state.
//
// `sample_maxima`: the largest logit of each stretch of STRETCH logits, and its lowest index.
// `sample`, one block: temperature 0 (or top_k 1) takes the argmax, lowest id on ties. Else
//     keep   the top_k largest logits (and those equal to the last of them), then of those the fewest
//            largest whose probabilities at this temperature reach top_p (again with ties),
//     draw   from what is kept, by Philox4x32-10 (Salmon et al., 2011) keyed by seed and position.
// Probabilities are fixed-point numbers (exp((l - max) / temperature) * 2^32, rounded), so sums do
// not depend on their order and equal seeds give equal tokens. The thresholds and the drawn id are
// found by bisection over the bits of the logits and over ids, counting with the whole block.
//
// A logit can be among the top_k only if it reaches the top_k-th largest maximum of the stretches,
// so the few logits that do are gathered in shared memory first; where they are too many (or top_k is
// off), every count reads all logits.
//
// Instantiated by VOCABULARY.
#include "session.cuh"

constexpr int STRETCH = 256;
constexpr int STRETCHES = ceil_div(VOCABULARY, STRETCH);
constexpr int THREADS = 1024;
constexpr int PER_THREAD = ceil_div(STRETCHES, THREADS);
constexpr int GATHERED = 3072;  // logits that fit in shared memory

// Order of floats as order of unsigned integers; NaN counts as the lowest.
__device__ __forceinline__ u32 order_of(float value) {
    if (value != value) return 0;
    const u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Largest {
    u32 order, id;
};
__device__ __forceinline__ Largest larger(Largest a, Largest b) {
    return a.order > b.order || (a.order == b.order && a.id < b.id) ? a : b;
}
__device__ __forceinline__ Largest warp_largest(Largest value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        value = larger(value, {__shfl_xor_sync(~0u, value.order, offset), __shfl_xor_sync(~0u, value.id, offset)});
    return value;
}

// logits [VOCABULARY] float32; maxima [STRETCHES] (order, id). A stretch per warp.
extern "C" __global__ void __launch_bounds__(256)
    sample_maxima(const float* __restrict__ logits, uint2* __restrict__ maxima) {
    allow_successor();
    wait_for_predecessor();
    const u32 stretch = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (stretch >= STRETCHES) return;
    Largest best = {0, ~0u};
#pragma unroll
    for (int i = 0; i < STRETCH / int(WARP); i++) {
        const u32 id = stretch * STRETCH + i * WARP + lane;
        if (id < VOCABULARY) best = larger(best, {order_of(logits[id]), id});
    }
    best = warp_largest(best);
    if (lane == 0) maxima[stretch] = {best.order, best.id};
}

__device__ __forceinline__ u64 warp_total(u64 value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

// Sum over the block, returned to all threads.
__device__ u64 block_total(u64 value) {
    __shared__ u64 parts[THREADS / WARP];
    value = warp_total(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    return warp_total(parts[threadIdx.x % WARP]);
}

// The largest x in low .. high for which holds(x), a condition that fails from some x on and holds at `low`.
template <class F>
__device__ __forceinline__ u32 last_that(u32 low, u32 high, F holds) {
    while (low < high) {
        const u32 middle = low + (high - low) / 2 + (high - low) % 2;
        if (holds(middle)) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ __forceinline__ u64 random_bits(u32 seed_0, u32 seed_1, u32 position) {
    u32 c[4] = {position, 0, 0, 0}, k0 = seed_0, k1 = seed_1;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = u64(c[0]) * 0xd2511f53u, b = u64(c[2]) * 0xcd9e8d57u;
        const u32 next[4] = {u32(b >> 32) ^ c[1] ^ k0, u32(b), u32(a >> 32) ^ c[3] ^ k1, u32(a)};
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] = next[i];
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return u64(c[1]) << 32 | c[0];
}

// stops [stop_count] token ids. ring: device address of `ring_slots` host-mapped 64-bit slots at
// table[output]; slot `step % ring_slots` receives (step + 1) << 32 | token. `rows` of the call that
// made the logits are added to the position. A stopped session changes nothing.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* __restrict__ logits, const uint2* __restrict__ maxima, const u64* table, u32 state, u32 output,
           u32 ring_slots, const u32* __restrict__ stops, u32 stop_count, u32 rows) {
    __shared__ u32 gathered_order[GATHERED], gathered_id[GATHERED], gathered;
    __shared__ Largest warp_best[THREADS / WARP];
    allow_successor();
    u32* words = session_memory<u32>(table, state);
    wait_for_predecessor();
    if (words[STATE_STOPPED] != 0) return;
    const float temperature = __uint_as_float(words[STATE_TEMPERATURE]);
    const float top_p = __uint_as_float(words[STATE_TOP_P]);
    const u32 position = words[STATE_POSITION] + rows;
    const u32 top_k = words[STATE_TOP_K] == 0 ? VOCABULARY : lesser(words[STATE_TOP_K], u32(VOCABULARY));

    Largest best = {0, ~0u};
    u32 stretch_order[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const u32 stretch = threadIdx.x + i * THREADS;
        stretch_order[i] = 0;
        if (stretch >= STRETCHES) continue;
        const uint2 largest = maxima[stretch];
        stretch_order[i] = largest.x;
        best = larger(best, {largest.x, largest.y});
    }
    best = warp_largest(best);
    if (threadIdx.x % WARP == 0) warp_best[threadIdx.x / WARP] = best;
    if (threadIdx.x == 0) gathered = 0;
    __syncthreads();
    best = warp_largest(warp_best[threadIdx.x % WARP]);
    u32 token = lesser(best.id, u32(VOCABULARY) - 1);

    if (temperature > 0.0f && top_k > 1) {
        const float largest = logits[token], rate = 1.0f / temperature;
        const auto stretches_from = [&](u32 order) {
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
                count += threadIdx.x + i * THREADS < STRETCHES && stretch_order[i] >= order;
            return block_total(count);
        };
        u32 least = 0;
        if (top_k <= STRETCHES) least = last_that(0, best.order, [&](u32 order) { return stretches_from(order) >= top_k; });
        for (u32 id = threadIdx.x; id < VOCABULARY; id += THREADS) {
            if (maxima[id / STRETCH].x < least) continue;
            const u32 order = order_of(logits[id]);
            if (order < least) continue;
            const u32 at = atomicAdd(&gathered, 1u);
            if (at < GATHERED) gathered_order[at] = order, gathered_id[at] = id;
        }
        __syncthreads();
        const bool all = gathered > GATHERED;
        const u32 count = all ? VOCABULARY : gathered;
        // Sum of f(order, id) over the logits that can matter.
        const auto total = [&](auto f) {
            u64 sum = 0;
            for (u32 i = threadIdx.x; i < count; i += THREADS) sum += all ? f(order_of(logits[i]), i) : f(gathered_order[i], gathered_id[i]);
            return block_total(sum);
        };
        const auto mass = [&](u32 order) {
            const float logit = __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
            return u64(__float2ull_rn(expf((logit - largest) * rate) * 4294967296.0f));
        };
        if (top_k < VOCABULARY)
            least = last_that(least, best.order, [&](u32 order) { return total([&](u32 o, u32) -> u64 { return o >= order; }) >= top_k; });
        if (top_p < 1.0f) {
            const u64 kept = total([&](u32 o, u32) -> u64 { return o >= least ? mass(o) : 0; });
            const u64 wanted = greater(u64(1), u64(double(kept) * double(fmaxf(top_p, 0.0f))));
            least = last_that(least, best.order, [&](u32 order) { return total([&](u32 o, u32) -> u64 { return o >= order ? mass(o) : 0; }) >= wanted; });
        }
        const u64 kept = total([&](u32 o, u32) -> u64 { return o >= least ? mass(o) : 0; });
        const u64 drawn = __umul64hi(random_bits(words[STATE_SEED], words[STATE_SEED + 1], position), kept);
        // The first id up to which the masses exceed what was drawn.
        token = last_that(0, VOCABULARY - 1, [&](u32 id) {
            return id == 0 || total([&](u32 o, u32 i) -> u64 { return i < id && o >= least ? mass(o) : 0; }) <= drawn;
        });
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32 stopped = position >= words[STATE_LIMIT] ? 2 : 0;
    for (u32 i = 0; i < stop_count; i++)
        if (stops[i] == token) stopped = 1;
    const u32 step = words[STATE_STEP];
    words[STATE_TOKEN] = token;
    words[STATE_POSITION] = position;
    words[STATE_STEP] = step + 1;
    words[STATE_STOPPED] = stopped;
    volatile u64* slots = session_memory<volatile u64>(table, output);
    slots[step % ring_slots] = u64(step + 1) << 32 | token;
    __threadfence_system();
}
