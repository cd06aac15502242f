#!/usr/bin/env bash
# Runs the quick lane and the compile-only lane with another torch or Triton than .venv's.
#
#   bash scripts/test_versions.sh TORCH TRITON [pytest argument...]
#
# If TORCH is the version in .venv, only Triton is fetched (200 to 300 MB; 1 GB on the disk) and comes before .venv's.
# Any other torch gets an environment of its own (3 GB; 5 to 7 GB on the disk). Both stay in .cache/versions.
# Exit status 3: pip could not get them.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

(($# >= 2)) || vpce_die "expected versions of torch and triton, for example: scripts/test_versions.sh 2.11.0 3.6.0"
torch=$1 triton=$2
shift 2
here=$("$VPCE_PYTHON" -c 'import platform, torch; print(platform.python_version(), torch.__version__.partition("+")[0])')
root=$PWD

# fetch PACKAGE...: with the pip of the python that gets them
fetch() { PIP_RETRIES=${PIP_RETRIES:-2} "$python" -m pip --disable-pip-version-check --no-input install --quiet "$@"; }

install_triton() { fetch --no-deps --target "$place" "triton==$triton"; }

install_both() {
    "$VPCE_PYTHON" -m venv "$place" &&
        fetch "torch==$torch" "triton==$triton" numpy pytest pytest-xdist pytest-timeout hypothesis setuptools
}

if [[ ${here#* } == "$torch" ]]; then
    place=$root/.cache/versions/python-${here% *}-triton-$triton python=$VPCE_PYTHON install=install_triton
    export PYTHONPATH=$root:$place
else
    place=$root/.cache/versions/python-${here% *}-torch-$torch-triton-$triton install=install_both
    python=$place/bin/python
    export PYTHONPATH=$root
fi
if [[ ! -e $place/complete ]]; then
    vpce_say "fetching torch $torch with triton $triton into $place"
    rm -rf "$place"
    mkdir -p "$place"
    if ! $install; then
        vpce_say "pip could not get torch $torch with triton $triton, for the reason above"
        rm -rf "$place"
        exit 3
    fi
    touch "$place/complete"
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" -W ignore -c 'import torch, triton; print(f"torch {torch.__version__} with triton {triton.__version__}")'
# In one process: the compiler's own processes fill the cores.
"$python" -m pytest -n 0 -q -m compile_only tests/test_compile_only.py "$@"
"$python" -m pytest -n auto -q -m quick "$@"
