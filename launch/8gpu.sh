#!/usr/bin/env bash
# A model of 1.3 billion parameters on the GPUs of one node.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/8gpu.sh [FLAGS of train.py]     trains launch/1.3b.toml on the GPUs of a node; the same line goes on after a stop

runs    torchrun --standalone --nproc_per_node=GPUS
        train.py --config RECIPE --device cuda --expect-world-size GPUS --resume auto --ckpt-dir ckpt/NAME FLAGS
NAME is the recipe's. Flags win over what stands before them and in the recipe (train.py --help lists them). Paths are
from the repository's root, wherever this is called.

Variables:
  GPUS=8        GPUs of this node, a process each; the curve is the same on any number
  RECIPE=launch/1.3b.toml
  PYTHON=       interpreter (default: .venv/bin/python where it exists, else python3)

  launch/8gpu.sh --plan --gpu H100                      # hours, memory, disk; needs no GPU
  GPUS=4 RECIPE=launch/gpt2-124m.toml launch/8gpu.sh --ckpt-dir ckpt/gpt2
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
PYTHON=${PYTHON:-python3} RECIPE=${RECIPE:-launch/1.3b.toml} GPUS=${GPUS:-8}
case $GPUS in *[!0-9]* | 0*) fail "GPUS=$GPUS: a number of GPUs is needed, as in GPUS=4" ;; esac
command -v -- "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program; make env builds .venv, or name another"
[ -f "$RECIPE" ] || fail "RECIPE=$RECIPE: no such file in $PWD; launch/*.toml are there"
NAME=${RECIPE##*/} NAME=${NAME%.toml}  # a run directory for each recipe

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # torchrun would set it and say so
# A free port, and a name that resolves on any machine. Without --device cuda, a broken driver would mean the CPU.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$GPUS" \
  train.py --config "$RECIPE" --device cuda --expect-world-size "$GPUS" --resume auto \
  --ckpt-dir "ckpt/$NAME" "$@"
