#!/usr/bin/env bash
# Packs all commands, completions, manual pages and licences into OUT/gemma4-VERSION-MACHINE-linux.tar.gz,
# and tries the archive in an empty root that has nothing but the C library (where chroot is allowed).
# Usage: ci/dist.sh OUT
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: ci/dist.sh OUT}
newest_glibc=2.34

# Messages of panics name source files: without the directories in which they lie here, the same
# sources and compiler give the same bytes everywhere (`make reproducible`).
CARGO_ENCODED_RUSTFLAGS=$(printf -- '--remap-path-prefix=%s=.\x1f--remap-path-prefix=%s=cargo' \
    "$PWD" "${CARGO_HOME:-$HOME/.cargo}")
export CARGO_ENCODED_RUSTFLAGS
cargo build --release --locked --workspace --bin gemma4
built=${CARGO_TARGET_DIR:-target}/release/gemma4
version=$("$built" --version | cut -d' ' -f2)
name=gemma4-$version-$(uname -m)-linux
mkdir -p "$out"
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

mkdir -p "$root/$name/bin"
strip --strip-all -o "$root/$name/bin/gemma4" "$built"
for command in export quantize validate run inspect eval bench; do
    ln -s gemma4 "$root/$name/bin/gemma4-$command"
done
"$built" write-documents "$root/$name"
cp README.md LICENSE NOTICE "$root/$name"

needed=$(objdump -T "$root/$name/bin/gemma4" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
if [ "$(printf '%s\n' "$needed" "GLIBC_$newest_glibc" | sort -V | tail -1)" != "GLIBC_$newest_glibc" ]; then
    echo "error: the binary needs $needed, and the README promises glibc $newest_glibc" >&2
    exit 1
fi
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$root" -cf - "$name" | gzip -n9 > "$out/$name.tar.gz"
echo "$out/$name.tar.gz: $(stat -c %s "$out/$name.tar.gz") bytes, needs $needed"

if [ "$(id -u)" != 0 ]; then
    echo "not run: the archive in an empty root (only root may chroot)"
    exit 0
fi
bare=$root/bare
mkdir -p "$bare/model" "$bare/tmp"
tar -xzf "$out/$name.tar.gz" -C "$bare"
ldd "$built" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$bare$(dirname "$library")"
    cp -L "$library" "$bare$library"
done
cp -r ci/models/tiny-chat-int4 "$bare/model/bundle"
inside() { chroot "$bare" "/$name/bin/$1" "${@:2}"; }
inside gemma4-export --prequantized /model/bundle --output-dir /model/out
inside gemma4-inspect /model/out/model.pte --verify /model/out/model.ptd > /dev/null
answer=$(inside gemma4-run --model_path /model/out/model.pte --data_path /model/out/model.ptd \
    --prompt 'What is the capital of France?' --temperature 0 -q)
[ "$answer" = 'The capital of France is Paris.' ] || { echo "error: it answered: $answer" >&2; exit 1; }
echo "in an empty root: $answer"
