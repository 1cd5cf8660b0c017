#!/usr/bin/env python3
"""Draws what `gemma4-bench -o json` measured: speed by context, and by rows of a step.

    ci/plot_bench.py RESULTS.json… DIRECTORY

Several files of one device are drawn together. Writes decode.svg, prefill.svg and rows.svg into the
directory.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 70, 50, 52
COLORS = ["#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#555555"]


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 10 else f"{value:g}"


def chart(title: str, device: str, across: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of lines over a logarithmic axis of positive x, and a linear one of y from 0."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    most = max(y for line in lines.values() for _, y in line) * 1.05
    low, high = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1)
    right, bottom = WIDTH - 170, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - low) / (high - low)
        return LEFT + along * (right - LEFT), bottom - y / most * (bottom - TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{title}</text>',
        f'<text x="{LEFT}" y="34">{device}</text>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>',
    ]
    step = 10 ** math.floor(math.log10(most))
    step = step if most / step >= 4 else step / 2 if most / step >= 2 else step / 5
    for i in range(int(most / step) + 1):
        _, y = at(xs[0], i * step)
        out.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(i * step)}</text>')
    for x in xs:
        place, _ = at(x, 0)
        out.append(f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle">{number(x)}</text>')
    for i, (name, line) in enumerate(lines.items()):
        color = COLORS[i % len(COLORS)]
        points = [at(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        out.append(f'<text x="{right + 14}" y="{TOP + 16 + i * 18}" fill="{color}">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *files, directory = map(Path, sys.argv[1:])
    measured = [json.loads(file.read_text()) for file in files]
    device = measured[0]["device"]
    decode, prefill, rows = defaultdict(list), defaultdict(list), defaultdict(list)
    for result in (row for file in measured for row in file["results"]):
        kind, size = result["test"].split()
        depth, speed = result["depth"], result["tokens_per_second"]
        # An empty context has no logarithm.
        place = max(depth, 128)
        if kind == "verify":
            rows[f"depth {number(depth)}"].append((int(size), speed))
        elif kind == "decode":
            decode["decode"].append((place, speed))
        elif int(size) > 1:
            prefill[f"{number(int(size))} tokens"].append((place, speed))
    directory.mkdir(parents=True, exist_ok=True)
    tokens = "tokens in the context (128 stands for none)"
    for name, title, across, lines in [
        ("decode", "Decode, tokens a second", tokens, decode),
        ("prefill", "Prefill, tokens a second", tokens, prefill),
        ("rows", "Tokens a second of steps of several rows", "rows of a step", rows),
    ]:
        if lines:
            file = directory / f"{name}.svg"
            file.write_text(chart(title, device, across, lines))
            print(f"wrote {file}")


if __name__ == "__main__":
    main()
