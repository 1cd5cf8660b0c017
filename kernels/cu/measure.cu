// Measure a device beside which kernels are judged: how fast it reads memory, and how fast its tensor cores
// multiply bf16 operands that are at hand. WARPGROUPS chooses the products of Hopper's warpgroups.
#include "tensor_core.cuh"
#if WARPGROUPS
#define BLOCK_TOKENS 256
#include "hopper.cuh"
#include "wgmma_tokens.cuh"
#endif

constexpr u32 THREADS = 256;
// A sum that no data gives: without the write to `sink` the compiler would drop the work.
constexpr u32 NEVER = 0x7fc12345;

// Reads `chunks` times 16 bytes once.
extern "C" __global__ void __launch_bounds__(THREADS) measure_read(const uint4* from, u32 chunks, u32* sink) {
    constexpr u32 AT_ONCE = 4;
    const u32 step = gridDim.x * THREADS;
    u32 sum = 0;
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < chunks; i += u64(step) * AT_ONCE) {
        uint4 got[AT_ONCE];
        for (u32 j = 0; j < AT_ONCE; j++) {
            const u64 at = i + u64(step) * j;
            got[j] = at < chunks ? load_stream(from + at) : make_uint4(0, 0, 0, 0);
        }
        for (u32 j = 0; j < AT_ONCE; j++) sum ^= got[j].x ^ got[j].y ^ got[j].z ^ got[j].w;
    }
    if (sum == NEVER) *sink = sum;
}

// Two bf16 numbers of either sign in [0.5, 1), as a hash of `i`: power, and with it the clock, depends on the data.
__device__ __forceinline__ u32 operand(u32 i) {
    i = (i ^ i >> 15) * 2246822519u;
    i = (i ^ i >> 13) * 3266489917u;
    return ((i ^ i >> 16) & 0x807f807fu) | 0x3f003f00u;
}

// 2^22 operations for each iteration of a block.
extern "C" __global__ void __launch_bounds__(THREADS) measure_multiply(u32 iterations, u32* sink) {
    u32 a[4][4];
    for (u32 i = 0; i < 16; i++) a[i / 4][i % 4] = operand(threadIdx.x * 16 + i);
    float sum = 0;
#if WARPGROUPS
    __shared__ __align__(1024) u32 tile[BLOCK_TOKENS * 32];
    for (u32 i = threadIdx.x; i < BLOCK_TOKENS * 32; i += THREADS) tile[i] = operand(i);
    fence_tensor_cores();
    __syncthreads();
    const u64 b = operand_descriptor(shared_address(tile));
    float d[BLOCK_TOKENS / 2] = {};
    for (u32 i = 0; i < iterations; i++) {
        wgmma_fence();
        for (u32 k = 0; k < 4; k++) wgmma_tokens(d, a[k], b + 2 * k, true);
        wgmma_commit();
        wgmma_wait<0>();
    }
    for (u32 i = 0; i < BLOCK_TOKENS / 2; i++) sum += d[i];
#else
    u32 b[4][2];
    for (u32 i = 0; i < 8; i++) b[i / 2][i % 2] = operand(threadIdx.x * 8 + i + 4096);
    float d[16][4] = {};
    for (u32 i = 0; i < iterations * 8; i++) {
#pragma unroll
        for (u32 tile = 0; tile < 16; tile++) mma_bf16(d[tile], a[tile / 4], b[tile % 4][0], b[tile % 4][1]);
    }
    for (u32 i = 0; i < 64; i++) sum += d[i / 4][i % 4];
#endif
    if (__float_as_uint(sum) == NEVER) *sink = 1;
}
