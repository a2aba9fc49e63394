#!/usr/bin/env bash
# A model of 10 million parameters on this machine's CPU.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/laptop.sh [FLAGS of train.py]     trains launch/laptop.toml on the CPU; the same line goes on after a stop

runs    train.py --config RECIPE --backend gloo --expect-world-size PROCS --resume auto --ckpt-dir ckpt/NAME FLAGS
NAME is the recipe's. Flags win over what stands before them and in the recipe (train.py --help lists them). Paths are
from the repository's root, wherever this is called.

Variables:
  PROCS=1       processes, which share out the batch and the cores
  RECIPE=launch/laptop.toml
  PYTHON=       interpreter (default: .venv/bin/python where it exists, else python3)

  .venv/bin/python prepare.py --dataset stdlib --tokenizer bpe:8192 --out ./data
  PROCS=2 launch/laptop.sh --ckpt-dir ckpt/two
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
PYTHON=${PYTHON:-python3} RECIPE=${RECIPE:-launch/laptop.toml} PROCS=${PROCS:-1}
case $PROCS in *[!0-9]* | 0*) fail "PROCS=$PROCS: a number of processes is needed, as in PROCS=2" ;; esac
command -v -- "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program; make env builds .venv, or name another"
[ -f "$RECIPE" ] || fail "RECIPE=$RECIPE: no such file in $PWD; launch/*.toml are there"
NAME=${RECIPE##*/} NAME=${NAME%.toml}  # a run directory for each recipe

FLAGS=(--config "$RECIPE" --backend gloo --expect-world-size "$PROCS" --resume auto --ckpt-dir "ckpt/$NAME" "$@")
[ "$PROCS" -gt 1 ] || exec "$PYTHON" train.py "${FLAGS[@]}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # torchrun would set it and say so; the ranks share out the cores
# A free port, and a name that resolves on any machine.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$PROCS" \
  train.py "${FLAGS[@]}"
