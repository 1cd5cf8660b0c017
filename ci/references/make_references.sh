#!/usr/bin/env bash
# Makes all references of this directory, on a machine with a GPU, torch and transformers:
#   ci/references/make_references.sh QUANTIZE OUTPUT
# QUANTIZE is a gemma4-quantize that runs there. The files in OUTPUT belong beside this script.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: ci/references/make_references.sh QUANTIZE OUTPUT" >&2
  exit 2
fi
quantize=$(realpath "$1")
mkdir -p "$2"
output=$(realpath "$2")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

dense=ci/fixtures/tiny-31b
chat=ci/models/tiny-chat-int4
"$quantize" --model-dir $dense --output "$work/int4"
ci/references/plant_outliers.py $dense "$work/dense-planted"
ci/references/plant_outliers.py "$work/int4" "$work/int4-planted"
ci/references/plant_outliers.py $chat "$work/chat-planted"

tiny=ci/fixtures/golden/tiny-31b/golden.json
texts=ci/fixtures/golden/tiny-chat/golden.json
python3 ci/references/make_references.py "$output" \
  --model tiny-31b $dense $tiny \
  --model tiny-31b-int4 "$work/int4" $tiny \
  --model tiny-chat $chat $texts \
  --model tiny-31b-planted "$work/dense-planted" $tiny \
  --model tiny-31b-int4-planted "$work/int4-planted" $tiny \
  --model tiny-chat-planted "$work/chat-planted" $texts
