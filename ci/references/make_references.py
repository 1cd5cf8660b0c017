#!/usr/bin/env python3
"""Writes what transformers computes for a checkpoint, in float32 and in bfloat16, on a GPU.

  make_references.py OUTPUT --model NAME DIRECTORY GOLDEN.json [--model …]

DIRECTORY is a Hugging Face checkpoint, or a bundle of gemma4-quantize, which is dequantized first;
GOLDEN.json holds the token ids: prompts with 48 ids of greedy decoding, or texts. All ids are forced.
Rows are the logits after the last token of a prompt and after every id that follows.

OUTPUT/references.json has, for each model and text, how far bfloat16 is from float32: largest and
mean distance of a logit over all rows, and the mean KL divergence in nats.
OUTPUT/references.safetensors has of float32: `MODEL/TEXT/last` F32 [vocabulary], the whole last row;
`MODEL/TEXT/top_ids` I32 and `MODEL/TEXT/top` F32 [rows, 16], the largest logits of each row;
`MODEL/TEXT/logsumexp` F32 [rows].

Needs torch with CUDA, transformers and safetensors; no network.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TOP = 16


def nibbles(codes):
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()


def dequantized(path):
    """float32 weights of a bundle in INT4 with nibble zero points and symmetric INT8."""
    stored, weights = load_file(path), {}
    for name, tensor in stored.items():
        if name.startswith("__pad") or name.endswith((".scales", ".zeros")):
            continue
        if name.endswith(".codes"):
            name = name.removesuffix(".codes")
            scales = stored[f"{name}.scales"].float()
            rows, groups = scales.shape
            if f"{name}.zeros" in stored:
                zeros = nibbles(stored[f"{name}.zeros"])[:, :groups, None]
                centred = nibbles(tensor).view(rows, groups, -1) - zeros
            else:
                centred = tensor.float().view(rows, groups, -1) - 128
            tensor = (centred * scales[..., None]).view(rows, -1)
        weights[f"model.language_model.{name}"] = tensor.float().contiguous()
    return weights


def is_bundle(directory):
    path = Path(directory) / "model.safetensors"
    if not path.exists():
        return False
    with safe_open(path, "pt") as file:
        return "gemma4.layout" in (file.metadata() or {})


def texts_of(golden):
    """Name, prompt and forced ids of each text of a golden file."""
    if "prompts" in golden:
        return [(name, p["input_ids"], p["greedy_ids"]) for name, p in golden["prompts"].items()]
    return [(f"text {i}", t["prompt_ids"], t["output_ids"]) for i, t in enumerate(golden["text"])]


@torch.no_grad()
def rows(directory, dtype, texts):
    """float32 logits after the prompt's last token and each forced id, for each text."""
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    model = model.eval().to("cuda")
    found = []
    for _, prompt, forced in texts:
        ids = torch.tensor([prompt + forced], device="cuda")
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        found.append(logits.float().cpu())
    return found


def compare(a, b):
    """How far rows of logits `b` are from `a`."""
    distance = (a - b).abs().double()
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    found = {"max": distance.max(), "mean": distance.mean(), "kl": kl.mean()}
    return {key: float(f"{value.item():.5g}") for key, value in found.items()}


def reference(name, directory, golden):
    """The tensors of a model, and the distances of its texts."""
    texts = texts_of(json.loads(Path(golden).read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        if is_bundle(directory):
            weights = dequantized(Path(directory) / "model.safetensors")
            save_file(weights, f"{scratch}/model.safetensors", metadata={"format": "pt"})
            # A bundle is text only.
            config = json.loads((Path(directory) / "config.json").read_text())
            config["vision_config"] = None
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            directory = scratch
        exact = rows(directory, torch.float32, texts)
        rounded = rows(directory, torch.bfloat16, texts)
    tensors, distances = {}, {}
    for (text, _, _), a, b in zip(texts, exact, rounded):
        top = a.topk(TOP)
        tensors[f"{name}/{text}/last"] = a[-1].clone()
        tensors[f"{name}/{text}/top"] = top.values.contiguous()
        tensors[f"{name}/{text}/top_ids"] = top.indices.to(torch.int32).contiguous()
        tensors[f"{name}/{text}/logsumexp"] = a.double().logsumexp(-1).float()
        distances[text] = compare(a, b)
        print(f"{name} {text}: {len(a)} rows, bfloat16 {distances[text]}", flush=True)
    return tensors, distances


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--model", nargs=3, action="append", required=True, metavar=("NAME", "DIRECTORY", "GOLDEN")
    )
    arguments = parser.parse_args()
    # float32 stays float32: no TF32 products.
    torch.set_float32_matmul_precision("highest")
    tensors, models = {}, {}
    for name, directory, golden in arguments.model:
        found, models[name] = reference(name, directory, golden)
        tensors.update(found)
    made = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, arguments.output / "references.safetensors", metadata={"format": "pt"})
    text = json.dumps({"made_with": made, "models": models}, indent=1)
    (arguments.output / "references.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
