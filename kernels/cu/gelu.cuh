#pragma once

// The Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016).
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
