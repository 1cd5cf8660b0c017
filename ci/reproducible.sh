#!/usr/bin/env bash
# Builds the archive twice from the committed sources, in directories of different names and with
# nothing of an earlier build, and compares the bytes. Takes two builds' time.
# Usage: ci/reproducible.sh
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in one another/directory; do
    mkdir -p "$work/$name"
    git archive HEAD | tar -x -C "$work/$name"
    (cd "$work/$name" && unset CARGO_TARGET_DIR && ci/dist.sh out && rm -rf target)
done
archives=("$work"/*/out/*.tar.gz "$work"/*/*/out/*.tar.gz)
sha256sum "${archives[@]}"
cmp "${archives[@]}"
echo "both builds gave the same archive"
