#!/usr/bin/env python3
"""Checks what the workspace is built from, without a network.

- every dependency comes from crates.io and is pinned in Cargo.lock;
- every licence expression can be satisfied by the licences that deny.toml allows;
- format and runtime never depend on candle, and the exporter is above both;
- CONTRIBUTING.md has a row for each crate that a Cargo.toml names, and says how many there are.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ALLOWED = set(re.findall('"([^"]+)"', re.search(r"^allow = \[(.*?)^\]", Path("deny.toml").read_text(),
                                                re.S | re.M)[1]))
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


def documented(metadata: dict, packages: dict, nodes: dict) -> list[str]:
    """What CONTRIBUTING.md gets wrong about the dependencies."""
    text = Path("CONTRIBUTING.md").read_text()
    ours = [packages[id] for id in metadata["workspace_members"]]
    direct = {dependency["name"] for package in ours for dependency in package["dependencies"]
              if "path" not in dependency}
    rows = re.search(r"^\| crate \| why \|\n(.*?)(?:\n\n|\Z)", text, re.S | re.M)[1]
    named = {name for row in rows.splitlines()[1:]
             for name in re.findall(r"[a-z][a-z0-9_-]*", row.split("|")[1])}
    built, todo = set(), [package["id"] for package in ours]
    while todo:
        for dependency in nodes[todo.pop()]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                if dependency["pkg"] not in built:
                    built.add(dependency["pkg"])
                    todo.append(dependency["pkg"])
    count = len({id for id in built if packages[id]["source"] is not None})
    said = f"{len(direct)} crates that we name, {count} with all that the commands need"
    faults = [f"CONTRIBUTING.md: no row for {name}" for name in sorted(direct - named)]
    faults += [f"CONTRIBUTING.md: {name} is no dependency" for name in sorted(named - direct)]
    if said not in text:
        faults.append(f"CONTRIBUTING.md: should say: {said}")
    return faults


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
    faults += documented(metadata, packages, nodes)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"{len(packages)} packages checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
