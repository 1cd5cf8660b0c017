#!/usr/bin/env bash
# Runs an exported model end to end: looks into it, checks every digest, and generates an answer.
#   ci/test_model_e2e.sh DIRECTORY PROMPT [gemma4-run flags]
# Fails if the answer is empty, or differs from the environment variable EXPECT where it is set.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 2 ]; then
  echo "usage: ci/test_model_e2e.sh DIRECTORY PROMPT [gemma4-run flags]" >&2
  exit 2
fi
directory=$1
prompt=$2
shift 2
program=$directory/model.pte
data=$directory/model.ptd

target/release/gemma4-inspect "$program" --verify "$data" >&2
answer=$(target/release/gemma4-run --model_path "$program" --data_path "$data" \
  --prompt "$prompt" --temperature 0 "$@")
printf '%s\n' "$answer"
if [ -z "$answer" ]; then
  echo "error: the model said nothing" >&2
  exit 1
fi
if [ -n "${EXPECT:-}" ] && [ "$answer" != "$EXPECT" ]; then
  echo "error: expected \"$EXPECT\"" >&2
  exit 1
fi
