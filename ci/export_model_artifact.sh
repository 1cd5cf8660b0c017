#!/usr/bin/env bash
# Exports a model and prints what was written. Arguments go to gemma4-export, for example
#   ci/export_model_artifact.sh --prequantized ci/models/tiny-chat-int4 --output-dir out/demo
set -euo pipefail
cd "$(dirname "$0")/.."

exporter=target/release/gemma4-export
if [ ! -x "$exporter" ]; then
  echo "error: $exporter is missing; run \`make build\` first" >&2
  exit 1
fi
exec "$exporter" "$@"
