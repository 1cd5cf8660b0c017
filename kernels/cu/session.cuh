// A session's own memory: its addresses stand in a table of the device, so that one captured graph
// serves every session. The state of a session is an array of 32-bit words.
#pragma once
#include "common.cuh"

// Indices of the state's words, as in `gemma4_format::plan::state`.
constexpr int STATE_TOKEN = 0;       // last token, input of the next step
constexpr int STATE_POSITION = 1;    // index of the next call's first row
constexpr int STATE_STOPPED = 2;     // 0 running, 1 stop token, 2 out of positions
constexpr int STATE_STEP = 3;        // tokens sampled
constexpr int STATE_SEED = 4;        // two words
constexpr int STATE_TEMPERATURE = 6; // float32
constexpr int STATE_TOP_K = 7;       // 0 keeps all
constexpr int STATE_TOP_P = 8;       // float32
constexpr int STATE_LIMIT = 9;       // positions that the buffers hold

template <class T>
__device__ __forceinline__ T* session_memory(const u64* table, u32 index) {
    return (T*)table[index];
}
