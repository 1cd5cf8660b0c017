#!/usr/bin/env bash
# Packs what ci/gpu_check.sh needs on a machine with a GPU into one archive of less than 30 MiB:
# binaries, programs of the small models for both kernel sets, golden files, and a 31B program that
# is run with random weights. Takes half a minute of CPU for the digests of the latter.
# Needs no GPU, but a C compiler, the CUDA compiler (`make cuda-toolchain`) and what
#   cargo build --release --workspace --bins --examples
# makes. The model as llama.cpp quantizes it is among them if GEMMA4_FIXTURES names a directory that
# holds gguf/tiny-31b-Q4_K_M.gguf.
#   ci/gpu_bundle.sh DIRECTORY
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: ci/gpu_bundle.sh DIRECTORY" >&2
  exit 2
fi
mkdir -p "$1"
directory=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bundle=$work/bundle

# export_program NAME ARCHITECTURE FLAGS: leaves the weights in $work/model.
export_program() {
  local name=$1 arch=$2
  shift 2
  ci/export_model_artifact.sh --backend cuda --arch "$arch" --output-dir "$work/model" "$@"
  mkdir -p "$bundle/programs/$arch"
  mv "$work/model/model.pte" "$bundle/programs/$arch/$name.pte"
}

# export_model NAME ARCHITECTURE FLAGS: the weights do not depend on the architecture.
export_model() {
  export_program "$@"
  mkdir -p "$bundle/weights"
  mv "$work/model/model.ptd" "$bundle/weights/$1.ptd"
}

target/release/gemma4-quantize --model-dir ci/fixtures/tiny-31b --output "$work/int4"
ci/references/plant_outliers.py ci/fixtures/tiny-31b "$work/planted"
ci/references/plant_outliers.py "$work/int4" "$work/int4-planted"
ci/references/plant_outliers.py ci/models/tiny-chat-int4 "$work/chat-planted"

# Short chunks make short rings, which a text goes round more often.
for arch in sm_90a sm_90; do
  export_model tiny-31b "$arch" --model-dir ci/fixtures/tiny-31b --max-prefill-chunk 64
  export_model tiny-31b-int4 "$arch" --model-dir ci/fixtures/tiny-31b --recipe default \
    --max-prefill-chunk 64
  for fusion in add-norm split geglu; do
    export_program "tiny-31b-int4-without-$fusion" "$arch" --model-dir ci/fixtures/tiny-31b \
      --recipe default --max-prefill-chunk 64 --without-fusion "$fusion"
  done
  export_model tiny-chat "$arch" --prequantized ci/models/tiny-chat-int4 --max-prefill-chunk 256
  export_model tiny-31b-planted "$arch" --model-dir "$work/planted" --max-prefill-chunk 64
  export_model tiny-31b-int4-planted "$arch" --prequantized "$work/int4-planted" \
    --max-prefill-chunk 64
  export_model tiny-chat-planted "$arch" --prequantized "$work/chat-planted" \
    --max-prefill-chunk 256
  if [ -n "${GEMMA4_FIXTURES:-}" ]; then
    export_model tiny-31b-q4_k_m "$arch" --gguf "$GEMMA4_FIXTURES/gguf/tiny-31b-Q4_K_M.gguf" \
      --max-prefill-chunk 64
  fi
done
# For random weights made on the GPU, and for the file that gpu_check.sh makes with this seed.
ci/export_model_artifact.sh --random exporter/configs/gemma-4-31b.json --no-data --seed 1 \
  --recipe default --backend cuda --arch sm_90a --max-seq-len 8192 --output-dir "$work/model"
mkdir -p "$bundle/bench"
mv "$work/model/model.pte" "$bundle/bench/31b.pte"
cp exporter/configs/gemma-4-31b.json "$bundle/bench/31b.json"

for name in tiny-31b tiny-chat; do
  mkdir -p "$bundle/golden/$name"
  cp ci/fixtures/golden/"$name"/golden.* "$bundle/golden/$name/"
done

if [ -f ci/references/references.json ]; then
  cp ci/references/references.* "$bundle/golden/"
fi

# The kernel that quantizes, for a machine without the compiler.
mkdir "$bundle/kernels"
target/release/examples/gpu compile "$bundle/kernels" quantize
mv "$bundle"/kernels/*.cubin "$bundle/kernels/quantize.cubin"
cp exporter/configs/tiny.json "$bundle/bench/"

mkdir "$bundle/bin"
for binary in examples/gpu_check examples/quantize_check examples/make_checkpoint \
  gemma4-run gemma4-bench gemma4-export gemma4-quantize; do
  strip -o "$bundle/bin/$(basename "$binary")" "target/release/$binary"
done
mkdir "$bundle/faults"
cc -O2 -fPIC -shared -o "$bundle/faults/libcuda.so" ci/faults/failing_cuda.c -ldl
cc -O2 -o "$bundle/faults/hold_cuda" ci/faults/hold_cuda.c -ldl
# A planted model differs from the plain one in few bytes, which a large window sees.
XZ_OPT=-9 tar -C "$work" --sort=name -cJf "$directory/bundle.tar.xz" bundle
cp ci/gpu_check.sh ci/gpu_faults.sh "$directory/"
du -sh "$directory"
