#!/usr/bin/env bash
# The figures that need a GPU, in one go of about six minutes: training 124M against the plain loop, 1.3B, and memory.
# One card of 80 GB or more.
#
#   bench/gpu.sh                            # JSON files and tables in bench/, named after the card
#   OUT=/tmp/figures bench/gpu.sh           # elsewhere
#   bench/gpu.sh --quick --device cpu       # flags of bench.py for each part: does all of it run?
#
# Each part is bounded in time and writes its file at once: what a time limit cuts off costs no other part.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-bench}
mkdir -p "$OUT" || exit 2
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | tr ' /' '--')
case "${card:-}/$*" in
  /*"--device cpu"*) card=cpu ;;
  /*) echo "error: nvidia-smi names no GPU here; bench.py measures a CPU without this script" >&2; exit 2 ;;
esac

failed=0
part() { # part NAME SECONDS FLAGS OF bench.py
  local name=$1 limit=$2
  shift 2
  echo "==== $name, at most $limit s"
  timeout -k 20 "$limit" "$PYTHON" bench.py --json "$OUT/$card-$name.json" --device cuda --compile "$@" "${extra[@]}" || {
    echo "note: $name ended with $?; the other parts go on"
    failed=1
  }
}
extra=("$@")

part train-1.3b 80 --what train --alone --rounds 1 --d-model 2048 --n-layers 24 --n-heads 16 --ctx 1024 \
  --vocab-size 50257 --local-bsz 8
part train-124m 220 --what train --rounds 2 --updates 24
part memory 60 --what memory
exit "$failed"
