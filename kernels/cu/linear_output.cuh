// What a many-row product makes of its sums (parameter OUTPUT).
#pragma once

#define OUTPUT_BF16 0
#define OUTPUT_F32 1
#define OUTPUT_GEGLU 2  // rows of W alternate in eights of gate and up; y[T, N/2] = bf16(gelu_tanh(gate) * up)

// gelu_tanh(gate) * up, by gelu_tanh(g) = g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)).
__device__ __forceinline__ float geglu(float gate, float up) {
    float argument = 1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate);
    return __fdividef(gate, 1.0f + __expf(-argument)) * up;
}
