// What a many-row product makes of its sums (constant OUTPUT).
#pragma once
#include "panels.cuh"

constexpr int ROWS_F32 = 0;      // y[T, N] in float32
constexpr int ROWS_BF16 = 1;     // y[T, N] in bfloat16
constexpr int PANELS_GEGLU = 2;  // rows of W alternate in eights of gate and up: panels of bf16(gelu_tanh(gate) * up), N / 2 columns

// gelu_tanh(gate) * up (Hendrycks and Gimpel, 2016), by gelu_tanh(g) = g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)).
__device__ __forceinline__ float geglu(float gate, float up) {
    const float argument = 1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate);
    return __fdividef(gate, 1.0f + __expf(-argument)) * up;
}
