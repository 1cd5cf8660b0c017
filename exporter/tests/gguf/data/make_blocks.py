#!/usr/bin/env python3
"""Write blocks.safetensors: rows of random ggml blocks, and their values as gguf-py decodes them.

    pip install gguf==0.19.0 safetensors==0.8.0
    python make_blocks.py blocks.safetensors

For each type T: `T.blocks` U8 [rows, bytes of a row] and `T.values` F32 [rows, 256]. Codes, 6-bit
and 8-bit scales are random bytes; float16 scales are random, some negative, zero or subnormal.
"""

import sys

import gguf
import numpy as np
from safetensors.numpy import save_file

ROWS, COLUMNS = 4, 256
# Offsets of the float16 numbers in a block.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def main():
    rng = np.random.default_rng(1)
    tensors = {}
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = ROWS * COLUMNS // elements
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in halves:
            numbers = rng.normal(0, 0.05, count).astype(np.float16)
            numbers[0] = 0
            numbers[1] = np.float16(6e-8)
            blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(count, 2)
        blocks = blocks.reshape(ROWS, -1)
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = gguf.quants.dequantize(blocks, kind).astype(np.float32)
    save_file(tensors, sys.argv[1])


if __name__ == "__main__":
    main()
