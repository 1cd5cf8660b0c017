// Types and instructions that the kernels share. No toolkit header is needed: NVRTC alone compiles them.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;

constexpr u32 WARP = 32;

template <class T>
__device__ __forceinline__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
template <class T>
__device__ __forceinline__ constexpr T lesser(T a, T b) {
    return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ constexpr T greater(T a, T b) {
    return a > b ? a : b;
}

// Numbers of 16 bits. bfloat16 is the upper half of a float32.

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Two floats rounded to nearest even; `low` lands in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 bf16_round(float value) { return u16(bf16_pair(value, 0.0f)); }

__device__ __forceinline__ float f16_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Stored number types, numbered as in `kernels/src/encode.rs`.
constexpr int F32 = 0, F16 = 1, BF16 = 2;

template <int TYPE>
__device__ __forceinline__ float read_float(const void* base, u64 index) {
    if constexpr (TYPE == F32) return ((const float*)base)[index];
    else if constexpr (TYPE == F16) return f16_float(((const u16*)base)[index]);
    else return bf16_float(((const u16*)base)[index]);
}

template <int TYPE>
__device__ __forceinline__ float4 read_float4(const void* base, u64 vector) {
    if constexpr (TYPE == F32) return ((const float4*)base)[vector];
    const uint2 v = ((const uint2*)base)[vector];
    if constexpr (TYPE == BF16) return {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)};
    return {f16_float(u16(v.x)), f16_float(u16(v.x >> 16)), f16_float(u16(v.y)), f16_float(u16(v.y >> 16))};
}

// Programmatic dependent launch: the successor may start as soon as all blocks of this kernel have
// started; `wait_for_predecessor` must precede the first read of anything that another kernel wrote
// in this step, and the first write to anything that another kernel may still be reading.

__device__ __forceinline__ void allow_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Reductions in a fixed order.

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Sum over a block of BLOCK_THREADS threads, returned to all. `scratch` holds one float per warp and may be
// used again after the next barrier of the caller.
template <int BLOCK_THREADS>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < BLOCK_THREADS / int(WARP); warp++) total += scratch[warp];
    return total;
}

// Weights are read once per step: keep them out of L1.
__device__ __forceinline__ uint4 load_stream(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}
