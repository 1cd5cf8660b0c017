#!/usr/bin/env bash
# Cheapest checks first: formatting, dependencies, clippy, documentation.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --all --check
cargo fetch --locked --quiet
python3 ci/check_dependencies.py
cargo clippy --release --locked --workspace --all-targets -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps --quiet
