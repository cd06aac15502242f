#!/usr/bin/env bash
# Makes or reuses an environment, .venv at the repository root, for the tests, the demo and the linters.
#
#   bash scripts/setup.sh                  set up, then print the interpreter to use
#   . scripts/setup.sh                     set up from another bash script, and export it as VPCE_PYTHON
#   vpce_for=demo; . scripts/setup.sh      the same, with what the demo needs alone: far less is fetched
#
# VPCE_VENV      another place than .venv: an absolute path, or one relative to the repository root
# VPCE_PYTHON    an interpreter that has what is needed: it is used as it is
#
# .venv/setup-stamp is made first and filled in last; while it matches, nothing is done. A folder without it was not
# made here. What suits the tests suits the demo too. If python3 has a torch that runs on a GPU, .venv gets that one.
# pip's own settings are obeyed, and its progress goes to stderr.

set -euo pipefail

vpce_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
vpce_venv=${VPCE_VENV:-.venv}
[[ $vpce_venv == /* ]] || vpce_venv=$vpce_root/$vpce_venv
vpce_venv=${vpce_venv%/}
vpce_stamp=$vpce_venv/setup-stamp
vpce_for=${vpce_for:-tests}

vpce_say() { printf 'setup: %s\n' "$*" >&2; }

vpce_die() { vpce_say "error: $*" && exit 1; }

# vpce_imports PYTHON MODULE...
vpce_imports() { (cd / && IFS=, && "$1" -c "import ${*:2}") >/dev/null 2>&1; }

# vpce_fingerprint demo|tests
vpce_fingerprint() (
    cd "$vpce_root" && echo "for $1" && pwd && "$vpce_venv/bin/python" -V &&
        cksum pyproject.toml scripts/{setup.sh,constraints.txt}
)

# vpce_is_for demo|tests: whether the environment suits it
vpce_is_for() { [[ -s $vpce_stamp && $(vpce_fingerprint "$1" 2>&1) == "$(cat "$vpce_stamp")" ]]; }

vpce_is_current() { vpce_is_for tests || { [[ $vpce_for == demo ]] && vpce_is_for demo; }; }

vpce_pip() { PIP_RETRIES=${PIP_RETRIES:-2} "$vpce_venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# vpce_install PYTHON
vpce_install() {
    local pins=("torch==2.13.0") extras=demo options=() version
    local on_gpu='import torch; assert torch.cuda.is_available(); print(torch.__version__.partition("+")[0])'
    if version=$("$1" -c "$on_gpu" 2>/dev/null); then
        pins=("torch==$version") options=(--system-site-packages)
    elif [[ $vpce_for == tests ]]; then
        pins+=("triton==3.7.1; platform_system == 'Linux'")
    fi
    if [[ $vpce_for == tests ]]; then extras=triton,test,demo,dev,frameworks; fi

    if ! vpce_pip --version >/dev/null 2>&1; then
        rm -rf "${vpce_venv:?}"/{bin,lib,lib64}
        "$1" -m venv ${options[@]+"${options[@]}"} "$vpce_venv" || return 1
    fi
    # pip needs no network if everything is installed, given --no-build-isolation. "compat" is a path; the default, a
    # finder, is searched after the directory above a clone, which would hide the package. torchtitan has no
    # dependencies here, because it wants some that are older than what transformers needs.
    vpce_pip install -q "pip>=22.3" "setuptools>=77" &&
        vpce_pip install --no-build-isolation --config-settings editable_mode=compat "${pins[@]}" \
            -c "$vpce_root/scripts/constraints.txt" -e "${vpce_root}[$extras]" || return 1
    [[ $vpce_for == demo ]] ||
        vpce_pip install -q --no-deps "torchtitan==0.3.*; python_version >= '3.11'" \
            "deepspeed==0.19.*; platform_system == 'Linux'" einops hjson msgpack ninja py-cpuinfo \
            "spmd_types==0.2.*; python_version >= '3.11'" docstring_parser "tyro==1.*" typeguard
}

# vpce_setup_locked PYTHON, with the folder of the environment as descriptor 9
vpce_setup_locked() {
    if type -P flock >/dev/null && ! flock -n 9; then
        vpce_say "another setup is running here; waiting for it"
        flock 9
    fi
    if vpce_is_current; then return; fi
    [[ -e $vpce_stamp || -z $(ls -A "$vpce_venv") ]] || vpce_die "$vpce_venv was not made by this script, which" \
        "leaves it as it is: set VPCE_VENV to another place, for example: export VPCE_VENV=.venv-vpce"
    : >"$vpce_stamp"
    echo '*' >"$vpce_venv/.gitignore"
    vpce_say "installing for the $vpce_for into $vpce_venv with $1 (the first time this takes minutes)"
    if vpce_install "$1" >&2; then
        vpce_fingerprint "$vpce_for" >"$vpce_stamp"
        return
    fi
    local needed=(torch pytest)
    if [[ $vpce_for == demo ]]; then needed=(torch tokenizers tqdm matplotlib); fi
    for VPCE_PYTHON in "$VPCE_PYTHON" "$1" ""; do
        ! vpce_imports "$VPCE_PYTHON" "${needed[@]}" || break
    done
    [[ $VPCE_PYTHON ]] || vpce_die "$vpce_venv is not complete, for the reason above, and $1 does not have all of" \
        "${needed[*]} to go on with: mend that and run this again"
    vpce_say "warning: $vpce_venv is not complete, for the reason above; going on with $VPCE_PYTHON as it is"
}

vpce_setup() {
    local python
    for python in python3 python3.{14,13,12,11,10} ""; do
        ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || break
    done
    [[ $python ]] || vpce_die "Python 3.10 or newer is needed, and none of python3, python3.14 ... python3.10 on the" \
        "PATH is that: install one"
    mkdir -p "$vpce_venv"
    vpce_setup_locked "$python" 9<"$vpce_venv"
}

if [[ -z ${VPCE_PYTHON:-} ]]; then
    export VPCE_PYTHON=$vpce_venv/bin/python
    if ! vpce_is_current; then vpce_setup; fi
fi
# For an interpreter that is used as it is.
export PYTHONPATH=$vpce_root${PYTHONPATH:+:$PYTHONPATH}
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then echo "$VPCE_PYTHON"; fi
