#!/usr/bin/env bash
# Sets up and runs the main job, scripts/train_lm.py; arguments go to it.
#
#   bash scripts/demo.sh [train_lm.py argument...]
#
# One rank a GPU, at most two; without a GPU two CPU ranks, and small unless arguments are given. Ranks
# talk over the loopback interface; where it is down there is one rank, and it says so.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
vpce_for=demo
. scripts/setup.sh

vpce_imports "$VPCE_PYTHON" tokenizers tqdm matplotlib ||
    vpce_die "the demo needs tokenizers, tqdm and matplotlib, which are not all here"
gpus=$("$VPCE_PYTHON" -c 'import torch; print(torch.cuda.device_count())')
ranks=2
if [[ $gpus == 1 ]]; then ranks=1; fi
for argument; do
    case $argument in -h | --help) exec "$VPCE_PYTHON" scripts/train_lm.py --help ;; esac
done
if [[ $gpus == 0 && $# == 0 ]]; then set -- --smoke; fi

connects='import socket as s; here = s.create_server(("127.0.0.1", 0)); s.create_connection(here.getsockname())'
launch=(-m torch.distributed.run --standalone --nproc-per-node "$ranks")
if [[ $ranks == 1 ]]; then
    launch=()
elif ! "$VPCE_PYTHON" -c "$connects" 2>/dev/null; then
    vpce_say "the loopback interface is down (ip link set lo up): ONE RANK, nothing is sharded"
    ranks=1 launch=()
fi
vpce_say "ranks: $ranks, GPUs found: $gpus"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The job chooses its number of threads itself; torchrun only warns where none is given.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$VPCE_PYTHON" ${launch[@]+"${launch[@]}"} \
    scripts/train_lm.py "$@" | tee "$log"

picture='import json, os, sys; print(os.path.abspath(json.loads(sys.stdin.readlines()[-1])["png"]))'
picture=$("$VPCE_PYTHON" -c "$picture" <"$log")
vpce_say "loss curves: $picture"
