// What stands between two products: partial sums, norm, residual, scalar, next norm. A row per block.
//
//     a = sum of the partial sums                                (SPLITS > 0)
//     x = (x + a * rsqrt(mean a^2 + eps) * post) * scalar        (scalar with SCALAR)
//     y = x * rsqrt(mean x^2 + eps) * next                       (NEXT)
//
// Instantiated by H, SPLITS, SCALAR, NEXT, WEIGHT (type of post, scalar and next), THREADS, and by
// output.cuh's constants, with X_K = H.
#include "output.cuh"

constexpr int VECTORS = H / 4;
constexpr int PER_THREAD = ceil_div(VECTORS, THREADS);

template <int TYPE>
__device__ __forceinline__ float4 read_float4(const void* base, u32 vector) {
    if constexpr (TYPE == F32) return ((const float4*)base)[vector];
    float4 v;
    v.x = read_float<TYPE>(base, vector * 4), v.y = read_float<TYPE>(base, vector * 4 + 1);
    v.z = read_float<TYPE>(base, vector * 4 + 2), v.w = read_float<TYPE>(base, vector * 4 + 3);
    return v;
}

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// sums [SPLITS, T, H] and x [T, H], updated, float32; y as in output.cuh.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(const float4* __restrict__ sums, const void* __restrict__ post, const void* __restrict__ scalar,
         float4* x, const void* __restrict__ next, void* __restrict__ y, u32 rows, float eps) {
    __shared__ float scratch[2][THREADS / WARP];
    allow_successor();
    float4 post_weight[PER_THREAD], next_weight[PER_THREAD];
    const auto vector = [&](int i) { return threadIdx.x + i * THREADS; };
    const auto inside = [&](int i) { return VECTORS % THREADS == 0 || vector(i) < VECTORS; };
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        post_weight[i] = next_weight[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!inside(i)) continue;
        if constexpr (SPLITS > 0) post_weight[i] = read_float4<WEIGHT>(post, vector(i));
        if constexpr (NEXT) next_weight[i] = read_float4<WEIGHT>(next, vector(i));
    }
    const float factor = SCALAR ? read_float<WEIGHT>(scalar, 0) : 1.0f;
    wait_for_predecessor();

    const u32 row = blockIdx.x;
    float4 value[PER_THREAD], a[PER_THREAD];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        value[i] = a[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!inside(i)) continue;
        value[i] = x[u64(row) * VECTORS + vector(i)];
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            const float4 part = sums[(u64(split) * rows + row) * VECTORS + vector(i)];
            a[i].x += part.x, a[i].y += part.y, a[i].z += part.z, a[i].w += part.w;
        }
        square += squares(a[i]);
    }
    if constexpr (SPLITS > 0) {
        const float inverse = rsqrtf(block_sum<THREADS>(square, scratch[0]) / H + eps);
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (!inside(i)) continue;
            value[i].x = (value[i].x + a[i].x * inverse * post_weight[i].x) * factor;
            value[i].y = (value[i].y + a[i].y * inverse * post_weight[i].y) * factor;
            value[i].z = (value[i].z + a[i].z * inverse * post_weight[i].z) * factor;
            value[i].w = (value[i].w + a[i].w * inverse * post_weight[i].w) * factor;
            x[u64(row) * VECTORS + vector(i)] = value[i];
        }
    }
    if constexpr (NEXT) {
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) square += squares(value[i]);
        const float inverse = rsqrtf(block_sum<THREADS>(square, scratch[1]) / H + eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const float4 v = value[i], w = next_weight[i];
            const float4 result = {v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w};
            write_activations(y, vector(i) / WARP, row, result, threadIdx.x % WARP);
        }
    }
}
