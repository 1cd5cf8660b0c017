#!/bin/sh
# Installs the pinned CUDA compiler (NVRTC, no GPU or driver needed) and its headers from PyPI into
# `.cuda/`, where `gemma4-export` finds them. An installed CUDA toolkit works as well: set CUDA_HOME.
#
# usage: ci/cuda_toolchain.sh [DIRECTORY]
set -eu
directory=${1:-"$(dirname "$0")/../.cuda"}
nvrtc=nvidia-cuda-nvrtc-cu12==12.9.86
headers=nvidia-cuda-runtime-cu12==12.9.79
stamp="$directory/installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$nvrtc $headers" ]; then
    exit 0
fi
python3 -m pip install --quiet --no-deps --upgrade --disable-pip-version-check \
    --target "$directory" "$nvrtc" "$headers"
printf '%s' "$nvrtc $headers" > "$stamp"
