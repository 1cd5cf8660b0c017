#!/usr/bin/env python3
"""Checks what the workspace is built from, without a network.

- every dependency comes from crates.io and is pinned in Cargo.lock;
- every licence expression can be satisfied by the licences allowed below;
- format and runtime never depend on candle, and the exporter is above both.
"""

import json
import re
import subprocess
import sys

ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CDLA-Permissive-2.0", "ISC", "MIT", "MIT-0", "MPL-2.0", "Unicode-3.0",
    "Unlicense", "Zlib", "bzip2-1.0.6",
}
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"
FORBIDDEN = {
    "gemma4-format": ["candle-core", "candle-nn", "cudarc", "gemma4-exporter", "gemma4-runtime"],
    "gemma4-kernels": ["candle-core", "candle-nn", "gemma4-exporter", "gemma4-runtime"],
    "gemma4-runtime": ["candle-core", "candle-nn", "gemma4-exporter", "gemma4-kernels"],
}


def satisfied(expression: str) -> bool:
    """Whether an SPDX expression holds when exactly the allowed licences are true."""
    expression = expression.replace("/", " OR ")
    tokens = re.findall(r"\(|\)|AND|OR|[^\s()]+(?: WITH [^\s()]+)?", expression)
    python = []
    for token in tokens:
        if token in ("(", ")"):
            python.append(token)
        elif token in ("AND", "OR"):
            python.append(token.lower())
        else:
            python.append(str(token in ALLOWED))
    return bool(eval(" ".join(python), {"__builtins__": {}}))


def main() -> int:
    command = ["cargo", "metadata", "--format-version", "1", "--offline", "--locked",
               "--filter-platform", "x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.check_output(command))
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    faults = []
    for package in packages.values():
        name = f"{package['name']} {package['version']}"
        if package["source"] is None:
            continue
        if package["source"] != CRATES_IO:
            faults.append(f"{name}: comes from {package['source']}, not from crates.io")
        if not satisfied(package["license"] or ""):
            faults.append(f"{name}: licence {package['license']!r} is not among the allowed ones")
    for package in packages.values():
        forbidden = FORBIDDEN.get(package["name"], [])
        reached, todo = set(), [package["id"]]
        while todo:
            for dependency in nodes[todo.pop()]["deps"]:
                normal = any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
                if normal and dependency["pkg"] not in reached:
                    reached.add(dependency["pkg"])
                    todo.append(dependency["pkg"])
        for name in sorted({packages[id]["name"] for id in reached} & set(forbidden)):
            faults.append(f"{package['name']}: must not depend on {name}")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"{len(packages)} packages checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
