#!/usr/bin/env bash
# One model, three peak learning rates, one target: too low, right, too high. All else is the same in each run and stands
# in race.toml: about a minute and a half a run on two CPU cores, with 50 evaluations.
set -euo pipefail

usage() {
  cat <<'END'
launch/race.sh [FLAGS of train.py]     trains, judges each run after a tenth of it, trains on, judges the outcome

What races is set by variables:
  TARGET=3.3            held-out loss to beat, nats a token
  LOW=2e-4 RIGHT=3e-3 HIGH=1e-1        peak learning rates
  EDGE=3e-2             a fourth run, near the largest rate that is borne (left out unless given)
  CONSTANT=1            a run at the right rate without decay, to see what the decay gives (left out unless given)
  TEXT=file             another text, by characters; needs a TARGET (default: Python's own sources, a BPE of 512 tokens)
  DATA=dir              data that prepare.py wrote; needs a TARGET
  OUT=ckpt/race         directory of the runs; the table is said, the plots are OUT/race.png and OUT/race.html
  PROCS=2               processes, which share out the batch
  PYTHON=               interpreter (default: .venv/bin/python where it exists, else python3)

Flags go to every run, over those of launch/race.toml. Interrupted, the same line goes on; rm -r OUT starts it over.

Characters of a text of 1 MB, such as tiny Shakespeare, and a model of 2.7 million parameters:
  TEXT=input.txt TARGET=1.75 launch/race.sh --d-model 192 --n-layers 6 --n-heads 6 --global-bsz 64 --local-bsz 32
END
}

whole() {  # a path given relative to where this was called
  case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

for word in "$@"; do
  name=${word%%=*}
  case ${name//_/-} in  # train.py takes --stop_after for --stop-after
    -h | --help) usage; exit 0 ;;
    --lr | --schedule | --ckpt-dir | --data | --stop-after | --resume)
      fail "$name: is set by the race; see launch/race.sh --help" ;;
    --plan | --preflight | --lr-find) fail "$name: trains nothing; say it to train.py itself" ;;
    --target-loss) fail "$name: say TARGET=X launch/race.sh" ;;
    --tokens) fail "$name: a tenth of a run is counted in updates here; give --steps" ;;
  esac
done

STEPS=$(sed -n 's/^steps = \([0-9]*\).*/\1/p' "$(dirname -- "$0")/race.toml") before=
for word in "$@"; do
  [ "$before" != --steps ] || STEPS=$word
  case $word in --steps=*) STEPS=${word#*=} ;; esac
  before=$word
done
case $STEPS in '' | *[!0-9]*) fail "--steps $STEPS: a plain number of updates is needed here, as in --steps 500" ;; esac
STEPS=$((10#$STEPS))  # 0100 is a hundred, not an octal number
[ "$STEPS" -ge 10 ] || fail "--steps $STEPS: at least 10, of which the tenth can be judged"

if [ -n "${TEXT:-}${DATA:-}" ] && [ -z "${TARGET:-}" ]; then
  fail "TARGET: with another text say the held-out loss to beat, as in TARGET=1.75"
fi
[ -z "${TEXT:-}" ] || [ -z "${DATA:-}" ] || fail "TEXT and DATA: give one of them"
[ -z "${TEXT:-}" ] || [ -f "$TEXT" ] || fail "TEXT=$TEXT: no such file"
[ -z "${DATA:-}" ] || [ -d "$DATA" ] || fail "DATA=$DATA: no such directory"
case ${PROCS:-2} in *[!0-9]* | 0*) fail "PROCS=$PROCS: a number of processes is needed, as in PROCS=2" ;; esac
case ${PYTHON:-} in */*) PYTHON=$(whole "$PYTHON") ;; esac
TEXT=${TEXT:+$(whole "$TEXT")} DATA=${DATA:+$(whole "$DATA")} OUT=${OUT:+$(whole "$OUT")}

CDPATH='' cd -- "$(dirname -- "$0")/.."
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3} OUT=${OUT:-ckpt/race} PROCS=${PROCS:-2}
TARGET=${TARGET:-3.3} LOW=${LOW:-2e-4} RIGHT=${RIGHT:-3e-3} HIGH=${HIGH:-1e-1}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the ranks share out the cores themselves
step() { printf '\n\033[1m== %s\033[0m\n' "$1"; }
at_least_one() { printf '%s' $(($1 > 0 ? $1 : 1)); }
TENTH=$((STEPS / 10))
trap 'echo "stopped; the same line goes on from here"; exit 130' INT TERM

if [ -z "$DATA" ]; then
  step "text -> tokens"
  DATA=$OUT/data
  source=(--dataset stdlib --tokenizer bpe:512 --val-fraction 0.05 --max-tokens 3e6)
  [ -z "$TEXT" ] || source=(--dataset "$TEXT" --tokenizer char --val-fraction 0.1)
  "$PYTHON" prepare.py "${source[@]}" --out "$DATA"
fi

FLAGS=(
  --config launch/race.toml --backend gloo --expect-world-size "$PROCS"
  --steps "$STEPS" --warmup "$(at_least_one $((STEPS / 25)))" --log-every "$(at_least_one "$TENTH")"
  --eval-every "$(at_least_one $((STEPS / 50)))" "$@"
)
NAMES=("low_$LOW" "right_$RIGHT" "high_$HIGH")
[ -z "${EDGE:-}" ] || NAMES+=("edge_$EDGE")
[ -z "${CONSTANT:-}" ] || NAMES+=("constant_$RIGHT")

LAUNCH=("$PYTHON")
[ "$PROCS" -eq 1 ] || LAUNCH+=(-m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$PROCS")

over() { [ -e "$OUT/$1/DONE.json" ] || [ -e "$OUT/.$1.diverged" ]; }

train() {  # NAME, and flags for this call. A run that diverges until train.py ends it is an outcome; else errors are.
  local name=$1 schedule=cosine code=0 verdict=0
  shift
  case $name in constant_*) schedule=constant ;; esac
  mkdir -p "$OUT"
  touch "$OUT/.$name.begun"
  "${LAUNCH[@]}" train.py --data "$DATA" --ckpt-dir "$OUT/$name" "${FLAGS[@]}" --lr "${name#*_}" \
    --schedule "$schedule" --target-loss "$TARGET" --resume auto "$@" || code=$?
  [ "$code" -ne 0 ] || return 0
  [ "$OUT/$name/metrics.jsonl" -nt "$OUT/.$name.begun" ] || exit "$code"
  "$PYTHON" health.py "$OUT/$name" --fail-on diverging > /dev/null 2>&1 || verdict=$?
  [ "$verdict" -eq 1 ] || exit "$code"
  touch "$OUT/.$name.diverged"
  printf '%s diverges and went no further\n' "$name"
}

RUNS=() begun=
for name in "${NAMES[@]}"; do
  RUNS+=("$OUT/$name")
  if over "$name"; then continue; fi
  if [ -e "$OUT/$name/latest" ]; then  # this line was interrupted before
    at=$(< "$OUT/$name/latest")
    [ "${at#step_}" -lt "$TENTH" ] || continue
  fi
  step "$name: the first tenth"
  train "$name" --stop-after "$TENTH"
  begun=1
done
if [ -n "$begun" ]; then
  step "after a tenth"
  "$PYTHON" health.py "${RUNS[@]}" --target-loss "$TARGET"
fi

for name in "${NAMES[@]}"; do
  if over "$name"; then continue; fi
  step "$name: to the end"
  train "$name"
done
step "the outcome"
"$PYTHON" health.py "${RUNS[@]}" --target-loss "$TARGET" --png "$OUT/race.png" --html "$OUT/race.html"
