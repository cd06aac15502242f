#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh [pytest argument...]
#
# The same command runs the cuda and nccl lanes where there are GPUs.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

workers=()
if vpce_imports "$VPCE_PYTHON" xdist; then
    workers=(-n auto)
    # Every worker holds a CUDA context, and a GPU host has more cores than its GPUs take contexts.
    if [[ -z ${PYTEST_XDIST_AUTO_NUM_WORKERS:-} && $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then
        cores=$("$VPCE_PYTHON" -c 'import os; print(os.cpu_count())')
        export PYTEST_XDIST_AUTO_NUM_WORKERS=$((cores < 8 ? cores : 8))
    fi
fi
# The workers and their ranks already fill the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$VPCE_PYTHON" -m pytest ${workers[@]+"${workers[@]}"} "$@"
