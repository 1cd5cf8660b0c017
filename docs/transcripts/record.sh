#!/usr/bin/env bash
# Records what a terminal shows, as text: chats with the bundled model in tmux.
# Usage: docs/transcripts/record.sh DIRECTORY-OF-COMMANDS (needs tmux; writes *.txt beside itself)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
commands=$(cd "${1:?usage: record.sh DIRECTORY-OF-COMMANDS}" && pwd)
work=$(mktemp -d)
socket=$work/socket
trap 'tmux -S "$socket" kill-server 2>/dev/null || true; rm -rf "$work"' EXIT
"$commands/gemma4-export" --prequantized "$here/../../ci/models/tiny-chat-int4" --output-dir "$work/out" 2> /dev/null
# Screens are narrow, so the files of the model are not among what is typed.
printf '#!/bin/sh\nexec "%s/gemma4-run" --model_path out/model.pte --data_path out/model.ptd "$@"\n' \
    "$commands" > "$work/gemma4-run"
chmod +x "$work/gemma4-run"

# What the commands would show that differs from run to run, or from machine to machine.
settle() {
    sed -E 's/^device: .*, (context .*)/device: …, \1/; s/[0-9.]+ tok\/s/… tok\/s/; s/: [0-9.]+ m?s$/: …/;
            s/^(peak memory|seed): .*/\1: …/' | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
}
open() { # columns lines
    tmux -S "$socket" -f /dev/null new-session -d -x "$1" -y "$2" "cd $work && env -i \
        HOME=$work TERM=xterm-256color PATH=$work:/usr/bin:/bin PS1='\$ ' LANG=C.UTF-8 bash --norc --noprofile"
    wait_for '^\$ ?$'
}
type_() { tmux -S "$socket" send-keys -l "$1"; tmux -S "$socket" send-keys Enter; }
key() { tmux -S "$socket" send-keys "$1"; }
screen() { tmux -S "$socket" capture-pane -p -S -; }
wait_for() { # pattern [times]
    for _ in $(seq 300); do
        [ "$(screen | grep -cE -- "$1")" -ge "${2:-1}" ] && return
        sleep 0.1
    done
    echo "error: nothing shows \`$1\`:" >&2
    screen >&2
    exit 1
}
keep() { screen | settle > "$here/$1.txt"; tmux -S "$socket" kill-server; }

open 80 40
type_ 'gemma4-run -i --temperature 0'
wait_for 'Ctrl-D ends'
type_ 'What is the capital of France?'
wait_for 'stop\]' 1
type_ '"""'
type_ 'What is the currency of Japan?'
type_ '"""'
wait_for 'stop\]' 2
type_ 'What is the capital of Italy?'
wait_for 'stop\]' 3
key Up; key C-a; key M-f; key M-f; key M-f; key M-f; key M-f; key M-d; type_ ' Spain'
wait_for 'stop\]' 4
type_ '/stats'
wait_for 'finish reason'
type_ '/nothing'
type_ '/quit'
wait_for '^\$ ?$'
keep chat

open 80 24
type_ 'gemma4-run -i --temperature 0 --logit_bias 1=-inf,106=-inf'
wait_for 'Ctrl-D ends'
type_ 'In the beginning'
sleep 0.5
key C-c
wait_for 'interrupted\]'
key C-c
wait_for '/quit or Ctrl-D'
key C-d
wait_for '^\$ ?$'
type_ 'echo $?'
wait_for '^0$'
keep interrupted-in-decode

open 80 24
seq 1 900 | sed 's/^/number /' | tr '\n' ' ' > "$work/long.txt"
printf '[{"role": "user", "content": "%s"}]' "$(cat "$work/long.txt")" > "$work/long.json"
type_ 'gemma4-run -i --temperature 0'
wait_for 'Ctrl-D ends'
type_ '/load long.json'
wait_for '1 messages'
type_ 'Go on.'
sleep 0.25
key C-c
wait_for 'forgotten'
type_ '/reset'
type_ 'What is the capital of France?'
wait_for 'stop\]'
key C-d
wait_for '^\$ ?$'
keep interrupted-in-prefill

open 80 24
type_ 'gemma4-run --raw_prompt --prompt "In the beginning" --temperature 0 | head -c 60; echo; echo ${PIPESTATUS[0]}'
wait_for '^0$'
keep closed-pipe

open 30 40
type_ 'gemma4-run -i --temperature 0'
wait_for '^> ?$'
type_ 'What is the capital of France?'
wait_for 'stop\]'
type_ '/help'
wait_for 'Arrow keys'
type_ '/quit'
wait_for '^\$ ?$'
keep narrow
