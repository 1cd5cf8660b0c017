#!/usr/bin/env python3
"""Copies a checkpoint and plants channels whose activations are 1024 times what they were.

  plant_outliers.py SOURCE TARGET

SOURCE is a Hugging Face directory in bf16, or a bundle of gemma4-quantize. The products of a layer
then read inputs of which a few channels are a thousand times the others, as trained models have
them. A power of two moves from what makes an input to what reads it, so in floating point the model
computes what it did, to the bit; whoever rounds an input relative to its largest channel loses the
others. Where the factor goes:

  inputs of q, k and v    input_layernorm up, columns of q, k and v down
  inputs of gate and up   pre_feedforward_layernorm up, columns of gate and up down
  inputs of down          rows of up up, columns of down down
  inputs of the head      norm up, columns of the embedding down

Columns of quantized weights share a scale with their group, so whole groups are planted. The INT8
embedding of a bundle has one scale a row: its planted columns become zero, as quantizing a planted
checkpoint would make them. Only the embedding changes the model, and o_proj alone is left as it is,
because nothing but the weightless norm of the values makes its input.

Needs nothing but python3.
"""

import json
import shutil
import struct
import sys
from array import array
from pathlib import Path

SHIFT = 10  # 2^10 is the thousand
# Channels that are planted, from the start and from the end.
CHANNELS = (5, -7)
PRE_ATTENTION, PRE_MLP, FINAL = "input_layernorm.weight", "pre_feedforward_layernorm.weight", "norm.weight"
READERS = {
    "self_attn.q_proj.weight": PRE_ATTENTION,
    "self_attn.k_proj.weight": PRE_ATTENTION,
    "self_attn.v_proj.weight": PRE_ATTENTION,
    "mlp.gate_proj.weight": PRE_MLP,
    "mlp.up_proj.weight": PRE_MLP,
    "mlp.down_proj.weight": "mlp.up_proj.weight",
    "embed_tokens.weight": FINAL,
}


def shifted(bits, shift):
    """A bf16 number's bits times 2^shift; zero stays zero."""
    exponent = (bits >> 7 & 255) + shift
    if bits & 0x7FFF == 0 or exponent <= 0:
        return bits & 0x8000
    if exponent >= 255:
        raise SystemExit("a planted weight is beyond bf16")
    return bits & 0x807F | exponent << 7


class File:
    """A safetensors file whose bf16 and U8 tensors are changed in place."""

    def __init__(self, path):
        self.path, self.bytes = path, bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", self.bytes[:8])
        self.tensors, self.start = json.loads(self.bytes[8 : 8 + length]), 8 + length
        self.metadata = self.tensors.pop("__metadata__", {})

    def change(self, name, dtype, edit):
        """Passes the tensor's numbers, as unsigned integers, with its columns to `edit`."""
        tensor = self.tensors[name]
        if tensor["dtype"] != dtype:
            raise SystemExit(f"{self.path}: {name} is {tensor['dtype']}, not {dtype}")
        first, end = (self.start + offset for offset in tensor["data_offsets"])
        numbers = array("H" if dtype == "BF16" else "B", bytes(self.bytes[first:end]))
        edit(numbers, tensor["shape"][-1])
        self.bytes[first:end] = numbers.tobytes()


def multiply(indices_of, shift):
    def edit(numbers, columns):
        for i in indices_of(len(numbers), columns):
            numbers[i] = shifted(numbers[i], shift)

    return edit


def columns(chosen):
    return lambda count, width: (row + c for row in range(0, count, width) for c in chosen)


def rows(chosen):
    return lambda count, width: (r * width + c for r in chosen for c in range(width))


def encoding(file, name):
    """Bits and group of a quantized weight, or None."""
    text = file.metadata.get(name)
    quantized = json.loads(text)["encoding"].get("Quantized") if text else None
    return quantized and (quantized["bits"], quantized["group"])


def width(file, name):
    """Columns of a weight."""
    if name in file.metadata:
        return json.loads(file.metadata[name])["dims"][-1]
    return file.tensors[name]["shape"][-1]


def planted(count, group):
    """Channels that are planted among `count`: whole groups."""
    firsts = {channel % count // group * group for channel in CHANNELS}
    return [c for first in sorted(firsts) for c in range(first, first + group)]


def scale_rows(file, name, chosen):
    """Rows of a dense weight, of the scales of a quantized one, or numbers of a norm."""
    tensor = f"{name}.scales" if encoding(file, name) else name
    by = rows if len(file.tensors[tensor]["shape"]) > 1 else columns
    file.change(tensor, "BF16", multiply(by(chosen), SHIFT))


def shrink_columns(file, name, chosen):
    kind = encoding(file, name)
    if kind is None:
        file.change(name, "BF16", multiply(columns(chosen), -SHIFT))
    elif kind[1] == width(file, name):
        if kind[0] != 8:
            raise SystemExit(f"{name}: one scale a row, and not INT8")

        def erase(codes, of_row):
            for i in columns(chosen)(len(codes), of_row):
                codes[i] = 128

        file.change(f"{name}.codes", "U8", erase)
    else:
        groups = sorted({c // kind[1] for c in chosen})
        file.change(f"{name}.scales", "BF16", multiply(columns(groups), -SHIFT))


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__.split("\n\n")[1].strip())
    source, target = map(Path, sys.argv[1:])
    shutil.copytree(source, target)
    files = [File(path) for path in sorted(target.glob("*.safetensors"))]
    where = {}
    for file in files:
        for name in file.tensors:
            where[name.removesuffix(".scales")] = file, name.removesuffix(".scales")
    if not where:
        raise SystemExit(f"{source}: no *.safetensors")
    prefix = "model.language_model." if any(n.startswith("model.language_model.") for n in where) else ""

    readers = {}
    for name in where:
        for reader, maker in READERS.items():
            if name.startswith(prefix) and name.endswith("." + reader) or name == prefix + reader:
                readers.setdefault(name[: -len(reader)] + maker, []).append(name)
    for maker, names in readers.items():
        group = 1
        for name in names:
            kind = encoding(*where[name])
            if kind and kind[1] != width(*where[name]):
                group = max(group, kind[1])
        chosen = planted(width(*where[names[0]]), group)
        scale_rows(*where[maker], chosen)
        for name in names:
            shrink_columns(*where[name], chosen)
    for file in files:
        file.path.write_bytes(file.bytes)
    print(f"{target}: {len(readers)} inputs planted")


if __name__ == "__main__":
    main()
