#!/usr/bin/env bash
# Lets calls of a real GPU's driver fail, and its memory run out, and insists on a sentence.
#   ci/gpu_faults.sh BUNDLE (what ci/gpu_check.sh unpacks)
# FAILING_CUDA_OVER names a driver in another place than the system's. Ends with a line of what was
# found; fails if a command did not end as it should.
set -uo pipefail

bundle=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=(--model_path "$bundle/programs/sm_90a/tiny-chat.pte" --data_path "$bundle/weights/tiny-chat.ptd")
run=("$bundle/bin/gemma4-run" "${model[@]}" --prompt "What is the capital of France?" --temperature 0
  --device cuda --quiet)
expected="The capital of France is Paris."
codes=(1 2 700 719 999)
runs=40
faults=0

# ask NAME: the exit code is left in $work/NAME.code.
ask() {
  timeout 60 "${run[@]}" >"$work/$1.out" 2>"$work/$1.err"
  echo $? >"$work/$1.code"
}

# fail_at NAME CALL CODE STICKY
fail_at() {
  LD_LIBRARY_PATH="$bundle/faults:${LD_LIBRARY_PATH:-}" FAILING_CUDA_REPORT="$work/$1.report" \
    FAILING_CUDA_AT=$2 FAILING_CUDA_CODE=$3 FAILING_CUDA_STICKY=$4 ask "$1"
}

# wrong NAME WHY
wrong() {
  echo "FAIL $1: $2 (exit $(<"$work/$1.code")): $(head -c 600 "$work/$1.err")"
  faults=$((faults + 1))
}

fail_at whole 0 0 0
read -r calls failed live <"$work/whole.report"
[ "$(<"$work/whole.out")" = "$expected" ] || wrong whole "no answer through the driver in front"
[ "$live" = 0 ] || wrong whole "$live things of the driver were not given back"

# Four at once: each waits for the driver most of the time.
for ((i = 0; i < runs; i++)); do
  fail_at "$i" $((1 + i * (calls - 1) / (runs - 1))) "${codes[i % 5]}" $((i % 2)) &
  (((i + 1) % 4 == 0)) && wait
done
wait

told=0
for ((i = 0; i < runs; i++)); do
  read -r _ failed live <"$work/$i.report" || { wrong "$i" "it did not end by itself"; continue; }
  [ "$live" = 0 ] || wrong "$i" "$failed: $live things of the driver were not given back"
  if [ "$(<"$work/$i.code")" = 0 ]; then
    [ "$(<"$work/$i.out")" = "$expected" ] || wrong "$i" "$failed: another answer"
  elif [ "$(<"$work/$i.code")" = 3 ] && [ "$(grep -c '^error: ' "$work/$i.err")" = 1 ] &&
    ! grep -q panicked "$work/$i.err"; then
    told=$((told + 1))
  else
    wrong "$i" "$failed"
  fi
done
[ "$told" -ge $((runs / 2)) ] || { echo "FAIL: only $told calls mattered"; faults=$((faults + 1)); }

# Another process holds all memory but so many MiB.
full=0
for left in 0 64 400 700; do
  coproc HOLD { "$bundle/faults/hold_cuda" $left; }
  hold=$HOLD_PID
  if read -r -t 60 answer <&"${HOLD[0]}" && [ "$answer" = held ]; then
    ask "held-$left"
    if [ "$(<"$work/held-$left.code")" = 3 ] && grep -Eq 'memory' "$work/held-$left.err" &&
      ! grep -q panicked "$work/held-$left.err"; then
      echo "$left MiB free: $(<"$work/held-$left.err")"
      full=$((full + 1))
    elif [ "$(<"$work/held-$left.code")" != 0 ] || [ "$(<"$work/held-$left.out")" != "$expected" ]; then
      wrong "held-$left" "neither an answer nor a sentence about memory"
    fi
  else
    echo "FAIL: memory could not be held"
    faults=$((faults + 1))
  fi
  { exec {HOLD[1]}>&-; } 2>/dev/null
  wait "$hold"
done
[ "$full" -gt 0 ] || { echo "FAIL: no run lacked memory"; faults=$((faults + 1)); }
ask after
[ "$(<"$work/after.out")" = "$expected" ] || wrong after "no answer once the memory is free again"

echo "$runs of $calls calls failed: $told sentences; memory held 4 times: $full sentences; $faults faults"
[ "$faults" = 0 ]
