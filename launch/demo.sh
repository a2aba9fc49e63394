#!/usr/bin/env bash
# From text to a scored model in a few minutes on two CPU cores, no network needed: what `make demo` runs.
# 12 MB of Python's own sources, a BPE of 4,096 tokens, 4 layers of width 256 (4.3 million parameters), two processes.
# Interrupted, it goes on where it was; `rm -r data/demo ckpt/demo ckpt/demo_hf` starts it over.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/demo.sh     from text to a model that is scored, sampled and exported to a Hugging Face directory

A few minutes on two CPU cores, no network: what `make demo` runs. It takes no flags. Interrupted, it goes on where it
was; rm -r data/demo ckpt/demo ckpt/demo_hf starts it over.

Variables:
  PYTHON=       interpreter (default: .venv/bin/python where it exists, else python3)
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

case ${1:-} in
  '') ;;
  -h | --help) usage; exit 0 ;;
  *) fail "$1: the demo takes no flags; launch/laptop.sh takes those of train.py" ;;
esac
CDPATH='' cd -- "$(dirname -- "$0")/.."
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3}
command -v -- "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program; make env builds .venv, or name another"
export OMP_NUM_THREADS=1  # torchrun would set and announce it; the ranks share out the cores themselves
# --local-addr: a name that resolves on any machine.
torchrun=("$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node=2)
step() { printf '\n\033[1m== %s\033[0m\n$' "$1"; printf ' %q' "${@:2}"; printf '\n'; "${@:2}"; }
trap 'echo "stopped; make demo goes on from here"' ERR

step "1. text -> tokens" \
  "$PYTHON" prepare.py --dataset stdlib --tokenizer bpe:4096 --val-fraction 0.05 --out data/demo
step "2. train on two processes (the same command resumes)" \
  "${torchrun[@]}" train.py --data data/demo --ckpt-dir ckpt/demo \
  --parallel ddp --backend gloo --arch modern --d-model 256 --n-layers 4 --ctx 256 --local-bsz 4 --optimizer muon \
  --steps 360 --lr 7e-3 --warmup 20 --eval-every 90 --eval-tokens 40_000 --ckpt-every 90 --keep 2 --target-loss 4 \
  --resume auto
step "3. was the curve sound, and did it reach 4 nats a token?" \
  "$PYTHON" health.py ckpt/demo --html ckpt/demo/health.html
step "4. score the held-out text" \
  "${torchrun[@]}" eval_ppl.py --data data/demo --ckpt ckpt/demo
step "5. a page of its text" \
  "$PYTHON" sample.py --ckpt ckpt/demo --prompt $'class Reader:\n    def __init__(self, name):\n' --max-new-tokens 400
if [ ckpt/demo_hf -nt ckpt/demo/DONE.json ]; then
  printf '\nckpt/demo_hf is there already\n'
else
  rm -rf ckpt/demo_hf  # of an earlier demo
  step "6. a Hugging Face directory" "$PYTHON" export_hf.py --ckpt ckpt/demo --out ckpt/demo_hf
fi
printf '\nDone. The curve is ckpt/demo/loss.png, a page about it ckpt/demo/health.html, the model is ckpt/demo_hf; README.md says what to try next.\n'
