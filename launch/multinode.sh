#!/usr/bin/env bash
# One run over several machines without a scheduler: the same line on each, but for NODE_RANK.
set -euo pipefail

usage() {
  cat <<'END'
launch/multinode.sh [NAME=VALUE ...] [FLAGS of train.py]    the same line on each machine, but for NODE_RANK

  launch/multinode.sh HEAD=node1 NNODES=2 NODE_RANK=0 --config launch/7b.toml --data ./data      # on node1
  launch/multinode.sh HEAD=node1 NNODES=2 NODE_RANK=1 --config launch/7b.toml --data ./data      # on the other one

Names may also stand in the environment:
  HEAD=node1       machine that hosts the rendezvous, by a name or an address that all others reach
  NNODES=2         machines; NNODES=1:2 is elastic: from 1 to 2 of them, which may leave and come back
  NODE_RANK=0      this machine's number, 0 on HEAD (not used when elastic)
  PORT=29500       on HEAD; the others reach it and each other, no firewall between them
  PROCS=8          processes of each machine (default: the GPUs that torch sees, else 1)
  IFNAME=eth0      network interface of gloo and NCCL (default: the one of the machine's name, or that leads to HEAD)
  RECIPE=FILE      the same as --config FILE
  WAIT=600         seconds to wait for the other machines at the start
  LAST_CALL=30     elastic: seconds that a start waits for more machines than the fewest
  RESTARTS=20      elastic: failures after which a machine gives up
  PYTHON=python3   (default: .venv/bin/python where there is one)

Data, code and --ckpt-dir must be the same on all machines, at the same paths. Whatever ends it, the same lines go on from
the last checkpoint: --resume auto is added. launch/README.md has symptoms, causes and remedies.
END
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

CDPATH='' cd -- "$(dirname -- "$0")/.."
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    HEAD=* | NNODES=* | NODE_RANK=* | PORT=* | PROCS=* | IFNAME=* | RECIPE=* | WAIT=* | LAST_CALL=* | RESTARTS=* | PYTHON=*)
      declare "$1" ;;
    [A-Z]*=*) fail "${1%%=*}: not a name that is used here; see launch/multinode.sh --help" ;;
    *) break ;;
  esac
  shift
done
for word in "$@"; do
  case $word in
    -h | --help) usage; exit 0 ;;
    HEAD=* | NNODES=* | NODE_RANK=* | PORT=* | PROCS=* | IFNAME=* | RECIPE=*) fail "$word: stands before the flags" ;;
  esac
done

[ -x .venv/bin/python ] && PYTHON=${PYTHON:-$PWD/.venv/bin/python}
PYTHON=${PYTHON:-python3} PORT=${PORT:-29500} WAIT=${WAIT:-600} LAST_CALL=${LAST_CALL:-30} RESTARTS=${RESTARTS:-20}
command -v "$PYTHON" > /dev/null || fail "PYTHON=$PYTHON: no such program"
[ -n "${HEAD:-}" ] || fail "HEAD: name the machine that hosts the rendezvous, as in HEAD=node1"
if [[ ${NNODES:-} =~ ^([1-9][0-9]{0,3}):([1-9][0-9]{0,3})$ ]] && [ "${BASH_REMATCH[1]}" -le "${BASH_REMATCH[2]}" ]; then
  ELASTIC=1 ROLE=either
elif [[ ${NNODES:-} =~ ^([2-9]|[1-9][0-9]{1,3})$ ]]; then
  ELASTIC='' ROLE=other
else
  fail "NNODES=${NNODES:-}: a number from 2 up is needed, or a range such as 1:2 (one machine: launch/8gpu.sh)"
fi
case $HEAD in
  localhost | 127.* | ::1 | 0.0.0.0 | ::) fail "HEAD=$HEAD: each machine would take itself for it; name node 0 as the others reach it" ;;
esac
if [ -z "$ELASTIC" ]; then
  case ${NODE_RANK:-} in '' | *[!0-9]*) fail "NODE_RANK=${NODE_RANK:-}: give this machine's number, 0 on $HEAD" ;; esac
  [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK: NNODES=$NNODES machines are numbered 0 to $((NNODES - 1))"
  [ "$NODE_RANK" -ne 0 ] || ROLE="head"
fi
for name in PORT WAIT LAST_CALL RESTARTS ${PROCS:+PROCS}; do
  case ${!name} in '' | *[!0-9]* | 0) fail "$name=${!name}: a whole number from 1 up is needed" ;; esac
done
if [ -n "${IFNAME:-}" ]; then export GLOO_SOCKET_IFNAME=$IFNAME NCCL_SOCKET_IFNAME=$IFNAME; fi
[ -z "${RECIPE:-}" ] || set -- --config "$RECIPE" "$@"
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # train.py shares out the cores itself

found=$("$PYTHON" -m fourscale.nodes "$HEAD:$PORT" "$WAIT" "$ROLE") || exit
read -r ADDRESS ROLE <<< "$found"
PROCS=${PROCS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')}
printf '%s of NNODES=%s, %s processes; waits up to %s s for the others\n' "$(uname -n)" "$NNODES" "$PROCS" "$WAIT" >&2
if [ -z "$ELASTIC" ]; then
  exec "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$PROCS" \
    --rdzv_endpoint="$HEAD:$PORT" --rdzv_conf="timeout=$WAIT" \
    train.py --resume auto --expect-world-size $((NNODES * PROCS)) "$@"
fi

# What flags alone make fail would fail again at each restart.
"$PYTHON" train.py --resume auto "$@" --plan --expect-world-size $((${NNODES%:*} * PROCS)) > /dev/null || exit
[ "$ROLE" = head ] && HOSTS=1 || HOSTS=0
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each start gets a store of its own, without the addresses of the dead
exec "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --nproc_per_node="$PROCS" --max_restarts="$RESTARTS" \
  --local_addr="$ADDRESS" --rdzv_backend=c10d --rdzv_endpoint="$HEAD:$PORT" --rdzv_id="fourscale-$PORT" \
  --rdzv_conf="is_host=$HOSTS,join_timeout=$WAIT,last_call_timeout=$LAST_CALL,keep_alive_interval=2,keep_alive_max_attempt=5" \
  train.py --resume auto "$@"
