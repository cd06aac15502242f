#!/usr/bin/env bash
# Sets up and runs the main job, scripts/train_lm.py; arguments go to it.
#
#   bash scripts/demo.sh [train_lm.py argument...]
#
# One rank a GPU, at most two; without a GPU two CPU ranks, and small unless arguments are given.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

vpce_imports "$VPCE_PYTHON" tokenizers tqdm matplotlib ||
    vpce_die "the demo needs tokenizers, tqdm and matplotlib, which are not all here"
gpus=$("$VPCE_PYTHON" -c 'import torch; print(torch.cuda.device_count())')
ranks=2
if [[ $gpus == 1 ]]; then ranks=1; fi
if [[ $gpus == 0 && $# == 0 ]]; then set -- --smoke; fi
vpce_say "training on $ranks ranks, $gpus GPUs found"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The job chooses its number of threads itself; torchrun only warns where none is given.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$VPCE_PYTHON" -m torch.distributed.run --standalone \
    --nproc-per-node "$ranks" scripts/train_lm.py "$@" | tee "$log"

picture='import json, sys; print(json.loads(sys.stdin.readlines()[-1])["png"])'
vpce_say "loss curves: $("$VPCE_PYTHON" -c "$picture" <"$log")"
