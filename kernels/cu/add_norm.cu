// What stands between two products: partial sums, norm, residual, scalar, next norm.
//
//     a = sum of the partial sums                                (SPLITS > 0)
//     x = (x + a * rsqrt(mean a^2 + eps) * post) * scalar        (scalar with SCALAR)
//     y = x * rsqrt(mean x^2 + eps) * next                       (NEXT)
//
// A row belongs to CLUSTER blocks, which lie in a cluster if there are several: block r takes units of 128
// columns r, r + CLUSTER, ... A few rows are so many times faster than on one multiprocessor each.
//
// Instantiated by H, SPLITS, SCALAR, NEXT, WEIGHT (type of post, scalar and next), CLUSTER, THREADS (of a
// block), and by output.cuh's constants, with X_K = H.
#include "output.cuh"

constexpr u32 VECTORS = H / 4;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 PER_THREAD = ceil_div(ceil_div(u32(H), 128u), CLUSTER * WARPS);

// Fused by hand, so that every instance rounds in the same way.
__device__ __forceinline__ float squares(float4 v) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x)));
}

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
#define CLUSTER_DIMS
#endif

// Sum over the threads of a row, in a fixed order. `scratch` holds a number for each warp of each block, and
// is used once.
__device__ __forceinline__ float row_sum(float value, float (&scratch)[CLUSTER][WARPS], u32 rank) {
    value = warp_sum(value);
#if CLUSTER > 1
    // Lane r gives the warp's sum to block r.
    if (threadIdx.x % WARP < CLUSTER)
        asm volatile(
            "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.f32 [remote], %2; }" ::"r"(
                shared_address(&scratch[rank][threadIdx.x / WARP])), "r"(threadIdx.x % WARP), "f"(value)
            : "memory");
    cluster_sync();
#else
    if (threadIdx.x % WARP == 0) scratch[0][threadIdx.x / WARP] = value;
    __syncthreads();
#endif
    float total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CLUSTER * WARPS; i++) total += scratch[i / WARPS][i % WARPS];
    return total;
}

// sums [SPLITS, T, H] and x [T, H], updated, float32; y as in output.cuh.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS)
    add_norm(const float4* __restrict__ sums, const void* __restrict__ post, const void* __restrict__ scalar,
         float4* x, const void* __restrict__ next, void* __restrict__ y, u32 rows, float eps) {
    __shared__ float scratch[2][CLUSTER][WARPS];
    allow_successor();
    const u32 row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const auto unit = [&](u32 i) { return (i * WARPS + warp) * CLUSTER + rank; };
    const auto vector = [&](u32 i) { return unit(i) * WARP + lane; };
    float4 post_weight[PER_THREAD], next_weight[PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        post_weight[i] = next_weight[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (vector(i) >= VECTORS) continue;
        if constexpr (SPLITS > 0) post_weight[i] = read_float4<WEIGHT>(post, vector(i));
        if constexpr (NEXT) next_weight[i] = read_float4<WEIGHT>(next, vector(i));
    }
    const float factor = SCALAR ? read_float<WEIGHT>(scalar, 0) : 1.0f;
#if CLUSTER > 1
    // All blocks have begun before one writes to another's shared memory.
    cluster_sync();
#endif
    wait_for_predecessor();

    float4 value[PER_THREAD], a[PER_THREAD];
    float square = 0.0f;
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        value[i] = a[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (vector(i) >= VECTORS) continue;
        value[i] = x[u64(row) * VECTORS + vector(i)];
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            const float4 part = sums[(u64(split) * rows + row) * VECTORS + vector(i)];
            a[i].x += part.x, a[i].y += part.y, a[i].z += part.z, a[i].w += part.w;
        }
        square += squares(a[i]);
    }
    if constexpr (SPLITS > 0) {
        const float inverse = rsqrtf(row_sum(square, scratch[0], rank) / H + eps);
        square = 0.0f;
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            if (vector(i) >= VECTORS) continue;
            value[i].x = fmaf(a[i].x * inverse, post_weight[i].x, value[i].x) * factor;
            value[i].y = fmaf(a[i].y * inverse, post_weight[i].y, value[i].y) * factor;
            value[i].z = fmaf(a[i].z * inverse, post_weight[i].z, value[i].z) * factor;
            value[i].w = fmaf(a[i].w * inverse, post_weight[i].w, value[i].w) * factor;
            x[u64(row) * VECTORS + vector(i)] = value[i];
        }
    }
    if constexpr (NEXT) {
        square = 0.0f;
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) square += squares(value[i]);
        const float inverse = rsqrtf(row_sum(square, scratch[1], rank) / H + eps);
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            const float4 v = value[i], w = next_weight[i];
            const float4 result = {v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w};
            write_activations(y, unit(i), row, result, lane);
        }
    }
}
