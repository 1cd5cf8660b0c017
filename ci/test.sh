#!/usr/bin/env bash
# Runs every test of the workspace, built as the product is.
#
# Needs Rust, a C compiler and linker, and the first time crates.io. Installs NVIDIA's compiler from
# PyPI into .cuda where no toolkit is named (CUDA_HOME), so that every kernel is compiled for every
# architecture; without it those tests print `not run: …`. Tests that compare with the real vocabulary and template run where GEMMA4_FIXTURES names a directory that holds them, and
# print `not run: …` elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v cargo >/dev/null || {
  echo "error: cargo is missing; install Rust from https://rustup.rs" >&2
  exit 1
}
command -v cc >/dev/null || {
  echo "error: no C compiler (cc); install gcc or clang" >&2
  exit 1
}
if [ -z "${GEMMA4_CUDA:-}${CUDA_HOME:-}${CUDA_PATH:-}" ]; then
  echo "installing the CUDA compiler from PyPI into .cuda (no GPU needed)"
  if ci/cuda_toolchain.sh; then
    GEMMA4_CUDA=$PWD/.cuda
    export GEMMA4_CUDA
  else
    echo "not installed: tests that compile kernels will not run" >&2
  fi
fi
cargo test --release --locked --workspace "$@"
