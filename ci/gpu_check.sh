#!/usr/bin/env bash
# Checks a GPU with what `make gpu-bundle` packed; the machine needs the driver and nothing else.
#   ci/gpu_check.sh DIRECTORY
# Runs the checks for both kernel sets, a question through gemma4-run, calls of the driver that fail
# and memory that runs out (gpu_faults.sh beside this file), the passes of
# compute-sanitizer where it is installed, a load of 31B's 18.3 GB where the disk has room for them,
# a short bench with a profile, and quantizing on the GPU and on the CPU, and prints a table of
# results. SECONDS_PER_PASS (default 300) limits each of these. With SOAK=SECONDS it also generates for
# so long and looks for drift. Fails if anything did but the bench's speed,
# which has no limit here.
set -uo pipefail

if [ $# -ne 1 ] || [ ! -f "$1/bundle.tar.xz" ]; then
  echo "usage: ci/gpu_check.sh DIRECTORY (made by \`make gpu-bundle\`)" >&2
  exit 2
fi
limit=${SECONDS_PER_PASS:-300}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -C "$work" -xJf "$1/bundle.tar.xz"
bundle=$work/bundle
bin=$bundle/bin
failed=0
table="| pass | result | seconds | found |
|---|---|---|---|"

# row NAME STATUS SECONDS FOUND
row() {
  local result=ok
  case $2 in
    0) ;;
    skip) result="not run" ;;
    124) result="FAIL: over $limit s"; failed=1 ;;
    *) result=FAIL; failed=1 ;;
  esac
  table+="
| $1 | $result | $3 | $4 |"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

for kernels in sm_90a sm_90; do
  start=$SECONDS
  timeout "$limit" "$bin/gpu_check" "$bundle" --kernels $kernels | tee "$work/log"
  row "gpu_check $kernels" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(tail -n 1 "$work/log")"

  start=$SECONDS
  answer=$(timeout "$limit" "$bin/gemma4-run" --model_path "$bundle/programs/$kernels/tiny-chat.pte" \
    --data_path "$bundle/weights/tiny-chat.ptd" --prompt "What is the capital of France?" \
    --temperature 0 --device cuda --quiet)
  status=$?
  [ $status -ne 0 ] || [ "$answer" = "The capital of France is Paris." ] || status=1
  row "gemma4-run $kernels" $status $((SECONDS - start)) "$answer"
done

start=$SECONDS
timeout "$limit" "$(dirname "$0")/gpu_faults.sh" "$bundle" | tee "$work/faults"
row "gpu_faults" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(tail -n 1 "$work/faults")"

# The passes wait for the GPU most of the time, so they run beside each other.
if command -v compute-sanitizer >/dev/null; then
  start=$SECONDS
  passes=()
  for tool in memcheck racecheck initcheck synccheck; do
    for kernels in sm_90a sm_90; do
      pass="$tool $kernels"
      passes+=("$pass")
      {
        timeout "$limit" compute-sanitizer --tool $tool --error-exitcode 1 \
          "$bin/gpu_check" "$bundle" --quick --kernels $kernels >"$work/$pass" 2>&1
        echo "$? $((SECONDS - start))" >"$work/$pass.status"
      } &
    done
  done
  wait
  for pass in "${passes[@]}"; do
    read -r status seconds <"$work/$pass.status"
    if grep -q "Device not supported" "$work/$pass"; then
      row "compute-sanitizer $pass" skip "$seconds" "it does not support this machine"
      continue
    fi
    if [ "$status" -ne 0 ]; then
      head -n 60 "$work/$pass"
    fi
    found=$(grep -E "SUMMARY|passed," "$work/$pass" | sed 's/^=* *//' | paste -sd ';')
    row "compute-sanitizer $pass" "$status" "$seconds" "$found"
  done
else
  row compute-sanitizer skip 0 "it is not installed"
fi

start=$SECONDS
timeout "$limit" "$bin/gemma4-bench" --model_path "$bundle/bench/31b.pte" --random-weights 1 \
  -p 512,2048 -n 128 -d 0,2048 --rows 1,2,4,8 -r 3 --device cuda | tee "$work/bench"
row "gemma4-bench 31B" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(sed -n 2p "$work/bench")"

start=$SECONDS
timeout "$limit" "$bin/gemma4-bench" --model_path "$bundle/bench/31b.pte" --random-weights 1 \
  -p 2048 -d 0,2048 -r 5 --device cuda --profile | tee "$work/profile"
row "gemma4-bench --profile 31B" "${PIPESTATUS[0]}" $((SECONDS - start)) \
  "$(grep -c '^|' "$work/profile") lines"

# A warm load takes at most 8 s, the peak is predicted within 3 %, and at most 300 MiB of it are
# neither weights nor keys, values and scratch.
start=$SECONDS
found=""
if [ "$(df --output=avail -k "$work" | tail -n 1)" -gt 20000000 ]; then
  timeout "$limit" "$bin/gemma4-export" --random "$bundle/bench/31b.json" --seed 1 --recipe default \
    --output-dir "$work/31b" &&
    timeout "$limit" "$bin/gemma4-bench" --model_path "$bundle/bench/31b.pte" \
      --data_path "$work/31b/model.ptd" -p 512 -n 16 -r 1 --device cuda -o json | tee "$work/load" &&
    found=$(awk -F '[:,]' '
      /_(seconds|bytes)"/ { gsub(/[ "]/, "", $1); value[$1] = $2 }
      END {
        beside = value["peak_bytes"] - value["weights_bytes"] - value["kv_bytes"] - value["arena_bytes"]
        off = 100 * (value["predicted_bytes"] / value["peak_bytes"] - 1)
        printf "%.2f s (read %.2f, upload %.2f, verify %.2f), peak %.0f MiB, %.0f MiB beside, predicted %+.2f %%", \
          value["load_seconds"], value["read_seconds"], value["upload_seconds"], value["verify_seconds"], \
          value["peak_bytes"] / 1048576, beside / 1048576, off
        exit !(value["load_seconds"] <= 8 && beside <= 300 * 1048576 && off <= 3 && off >= -3)
      }' "$work/load")
  row "load 31B" $? $((SECONDS - start)) "$found"
else
  row "load 31B" skip 0 "the disk has less than 20 GB free"
fi

# The kernel is compiled by NVRTC where that is found, as a toolkit or beside PyTorch, else it is the
# one in the bundle. Both are compared with the CPU; a layer of 31B's shapes by the commands, too.
if [ -z "${GEMMA4_CUDA:-}" ]; then
  while read -r packages; do
    if compgen -G "$packages/nvidia/*/lib/libnvrtc.so.*" >/dev/null; then
      export GEMMA4_CUDA=$packages
    fi
  done < <(python3 -c 'import nvidia, os
for path in nvidia.__path__: print(os.path.dirname(path))' 2>/dev/null)
fi
ahead=(--kernel "$bundle/kernels/quantize.cubin")
start=$SECONDS
timeout "$limit" "$bin/quantize_check" check "${ahead[@]}" | tee "$work/quantize"
row "quantize_check, compiled ahead" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(cat "$work/quantize")"

"$bin/make_checkpoint" "$bundle/bench/tiny.json" "$work/tiny"
kernel=()
if ! said=$("$bin/gemma4-quantize" --model-dir "$work/tiny" --output "$work/tiny-gpu" --device cuda 2>&1); then
  kernel=("${ahead[@]}")
  grep -q "no CUDA compiler" <<<"$said"
  row "quantize_check, compiled here" $([ $? -eq 0 ] && echo skip || echo 1) 0 "$(tail -n 1 <<<"$said")"
else
  start=$SECONDS
  timeout "$limit" "$bin/quantize_check" check | tee "$work/quantize"
  row "quantize_check, compiled here" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(cat "$work/quantize")"
fi

if [ "$(df --output=avail -k "$work" | tail -n 1)" -gt 20000000 ]; then
  "$bin/make_checkpoint" "$bundle/bench/31b.json" "$work/layers" --layers 2
  for recipe in default hqq; do
    start=$SECONDS
    for device in cuda cpu; do
      flags=(--device "$device")
      [ "$device" = cpu ] || flags+=("${kernel[@]}")
      timeout "$limit" "$bin/gemma4-quantize" --model-dir "$work/layers" --recipe "$recipe" "${flags[@]}" \
        --output "$work/on-$device" --overwrite --report "$work/$device.json" >/dev/null 2>&1
    done
    diff -rq "$work/on-cuda" "$work/on-cpu" && cmp "$work/cuda.json" "$work/cpu.json"
    row "gemma4-quantize $recipe, GPU and CPU" $? $((SECONDS - start)) "$(du -sh "$work/on-cuda" | cut -f 1)"
    rm -rf "$work"/on-*
  done
  start=$SECONDS
  timeout "$limit" "$bin/quantize_check" bench "$work/layers" "${kernel[@]}" | tee "$work/quantize"
  row "quantize_check bench" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(paste -sd ';' "$work/quantize")"
  rm -rf "$work/layers"
else
  row "gemma4-quantize" skip 0 "the disk has less than 20 GB free"
fi

if [ -n "${SOAK:-}" ]; then
  start=$SECONDS
  timeout $((SOAK + limit)) "$bin/gpu_check" "$bundle" --soak "$SOAK" | tee "$work/soak"
  row "soak" "${PIPESTATUS[0]}" $((SECONDS - start)) "$(head -n 1 "$work/soak")"
fi

printf '\n%s\n' "$table"
exit $failed
