#!/usr/bin/env bash
# Runs every test of the workspace, built as the product is.
#
# Needs Rust, a C compiler and linker, and the first time crates.io. Tests that compare with the
# real vocabulary and template run where GEMMA4_FIXTURES names a directory that holds them, and
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
cargo test --release --locked --workspace "$@"
