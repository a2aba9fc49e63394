#!/usr/bin/env bash
# GPT-2 124M on one GPU.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/1gpu.sh [FLAGS of train.py]     trains launch/gpt2-124m.toml on one GPU; the same line goes on after a stop

runs    train.py --config RECIPE --device cuda --expect-world-size 1 --resume auto --ckpt-dir ckpt/NAME FLAGS
NAME is the recipe's. Flags win over what stands before them and in the recipe (train.py --help lists them). Paths are
from the repository's root, wherever this is called.

Variables:
  RECIPE=launch/gpt2-124m.toml     launch/stack-100m.toml is another for one GPU
  PYTHON=       interpreter (default: .venv/bin/python where it exists, else python3)
  CUDA_VISIBLE_DEVICES=            CUDA's own: which GPU, as in CUDA_VISIBLE_DEVICES=1

  launch/1gpu.sh --plan --gpu A100                      # hours, memory, disk; needs no GPU
  launch/1gpu.sh --local-bsz 32 --ckpt-dir ckpt/gpt2    # the same curve, fewer and larger micro-batches
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

for word in "$@"; do
  case $word in -h | --help) usage; exit 0 ;; esac
done
CDPATH='' cd -- "$(dirname -- "$0")/.."
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3} RECIPE=${RECIPE:-launch/gpt2-124m.toml}
command -v -- "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program; make env builds .venv, or name another"
[ -f "$RECIPE" ] || fail "RECIPE=$RECIPE: no such file in $PWD; launch/*.toml are there"
NAME=${RECIPE##*/} NAME=${NAME%.toml}  # a run directory for each recipe

# Without --device cuda, a broken driver would mean the CPU, for a thousand times the hours.
exec "$PYTHON" train.py --config "$RECIPE" --device cuda --expect-world-size 1 --resume auto \
  --ckpt-dir "ckpt/$NAME" "$@"
