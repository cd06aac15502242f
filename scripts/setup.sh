#!/usr/bin/env bash
# Makes or reuses an environment, .venv at the repository root, for the tests, the demo and the linters.
#
#   bash scripts/setup.sh    set up, then print the interpreter to use
#   . scripts/setup.sh       set up from another bash script, and export it as VPCE_PYTHON
#
# VPCE_VENV names another place than .venv: an absolute path, or one relative to the repository root.
# The script never changes an environment that it did not make (it has no file setup-made), nor a
# finished one whose python cannot be started: it stops and says so. Two setups of one environment
# take turns.
#
# What goes into .venv, besides this checkout and its extras test, demo, dev and frameworks:
#   no NVIDIA GPU    the pinned torch and triton
#   NVIDIA GPU       the torch of the platform's python3; where it has none, the one pip chooses
#   no package index, but torch, triton and pytest on the platform
#                    the platform's packages: nothing is fetched, and what is missing is named
#                    together with what will not run for want of it. Where no .venv can be made,
#                    the platform's interpreter is used as it is and PYTHONPATH is exported.
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) are obeyed. .venv/setup-stamp is
# written last, once everything is installed; while it matches, nothing is done and no network is
# needed. .venv/setup-unfinished marks an interrupted setup, which the next run repairs.

set -euo pipefail

vpce_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
vpce_venv=${VPCE_VENV:-.venv}
vpce_venv=${vpce_venv%/}
[[ $vpce_venv == /* ]] || vpce_venv=$vpce_root/$vpce_venv
vpce_made=$vpce_venv/setup-made
vpce_stamp=$vpce_venv/setup-stamp
vpce_unfinished=$vpce_venv/setup-unfinished
vpce_constraints=$vpce_venv/platform-constraints.txt
vpce_pins=("torch==2.13.0" "triton==3.7.1; platform_system == 'Linux'")
# The extras have no upper bounds; what the tests say of each class of a framework is of these.
vpce_tested=("transformers<5.24" "trl<1.17; python_version >= '3.11'" "peft<0.22" "accelerate<2" "megatron-core<0.20" "lightning<3")
vpce_extras=triton,test,demo,dev,frameworks
# torchtitan without its dependencies, some of which are older than what transformers needs.
vpce_alone=("torchtitan==0.3.*; python_version >= '3.11'" "spmd_types==0.2.*; python_version >= '3.11'" docstring_parser "tyro==1.*" typeguard)
vpce_gpu=no
[[ $(nvidia-smi -L 2>/dev/null) != GPU* ]] || vpce_gpu=yes

vpce_say() { printf 'setup: %s\n' "$*" >&2; }

vpce_die() {
    vpce_say "error: $*"
    exit 1
}

# vpce_imports PYTHON MODULE...
vpce_imports() {
    local all='import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]'
    (cd / && "$1" -c "$all" "${@:2}") >/dev/null 2>&1
}

# Editable installs are in setuptools' mode "compat", a path: its default, a finder, comes after the
# search of the path, so that from the directory above a clone its folder would be imported instead.
vpce_pip() {
    PIP_RETRIES=${PIP_RETRIES:-2} \
        "$vpce_venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

# Fetches one small package of the tests, from wherever pip's settings say, to learn in seconds
# whether trying to install is worth the wait.
vpce_index_answers() {
    local scratch answer=0
    scratch=$(mktemp -d)
    vpce_pip download --quiet --no-deps --retries 0 --timeout 10 --dest "$scratch" pytest-timeout \
        >/dev/null 2>&1 || answer=1
    rm -rf "$scratch"
    return "$answer"
}

# vpce_reason FILE: why pip failed, by what it wrote to FILE.
vpce_reason() {
    if grep -q 'connection broken' "$1"; then
        echo "no connection to the package index"
        return
    fi
    { grep -i '^ *error' "$1" || cat "$1"; } | tail -n 1
}

vpce_fingerprint() {
    "$vpce_venv/bin/python" -V 2>/dev/null || return 1
    cat "$vpce_root/pyproject.toml" "$vpce_root/scripts/setup.sh" | cksum
    echo "$vpce_root, NVIDIA GPU: $vpce_gpu"
}

vpce_is_current() {
    [[ -f $vpce_stamp && ! -e $vpce_unfinished && $(vpce_fingerprint) == "$(cat "$vpce_stamp")" ]]
}

# Prints the interpreter to build on: not .venv's own, which comes first where .venv is activated.
vpce_platform_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        "$name" - "$vpce_venv" 2>/dev/null <<'PYTHON' && return 0
import os
import sys

if sys.version_info < (3, 10):
    sys.exit(1)
own = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
print(sys._base_executable if own else sys.executable)
PYTHON
    done
    return 1
}

# vpce_lock PYTHON: locks the directory that is open as descriptor 9, and waits while another setup
# has it locked. The lock ends with the last process that has the descriptor, however it ends.
vpce_lock() {
    "$1" -I - <<'PYTHON'
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    import fcntl

    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("setup: another setup is running here; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(9, fcntl.LOCK_EX)
except (ImportError, OSError) as error:
    print(f"setup: warning: cannot lock ({error}): run one setup at a time", file=sys.stderr)
PYTHON
}

# An empty directory, or nothing at all.
vpce_is_vacant() {
    local entries
    [[ -e $vpce_venv || -L $vpce_venv ]] || return 0
    [[ -d $vpce_venv ]] && entries=$(ls -A "$vpce_venv/" 2>/dev/null) && [[ -z $entries ]]
}

# Versions before setup-made left one of the other three files.
vpce_is_own() {
    [[ -e $vpce_made || -e $vpce_stamp || -e $vpce_unfinished || -e $vpce_constraints ]]
}

vpce_refuse_to_change() {
    local remedy="set VPCE_VENV to another place, for example: export VPCE_VENV=.venv-vpce"
    if vpce_is_vacant; then return; fi
    vpce_is_own || vpce_die "$vpce_venv was not made by this script, which leaves it as it is: $remedy"
    # An interrupted setup may have stopped before there was a python to start.
    [[ -e $vpce_unfinished ]] || "$vpce_venv/bin/python" -c '' >/dev/null 2>&1 ||
        vpce_die "$vpce_venv/bin/python cannot be started, and this script deletes no finished" \
            "environment: remove $vpce_venv yourself, or $remedy"
}

vpce_is_reusable() {
    local python=$vpce_venv/bin/python
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || return 1
    if [[ -e $vpce_unfinished ]]; then
        vpce_say "the last setup was interrupted"
        # What works is kept, as there may be no network to replace it; pip completes the rest.
        vpce_imports "$python" torch pytest && vpce_pip --version >/dev/null 2>&1 || return 1
    fi
    if [[ $vpce_gpu == yes ]] && vpce_imports "$python" torch; then
        (cd / && "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)') || return 1
    fi
}

# The directory itself stays, as it may be a link to another disk, and so does the file that says
# whose it is.
vpce_clear_venv() {
    find "$vpce_venv/" -mindepth 1 -maxdepth 1 ! -name setup-unfinished -exec rm -rf {} +
}

vpce_make_venv() {
    vpce_say "making $vpce_venv with $1"
    mkdir -p "$vpce_venv" && : >"$vpce_unfinished" && vpce_clear_venv || return 1
    echo '*' >"$vpce_venv/.gitignore"
    # Without pip where ensurepip is packaged apart: pip may still come from the platform.
    "$1" -m venv "$vpce_venv" >/dev/null 2>&1 ||
        "$1" -m venv --without-pip "$vpce_venv" >/dev/null 2>&1
}

vpce_site_packages() {
    "$vpce_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# vpce_add_platform_packages PYTHON MODULE...; fails where PYTHON does not import every module.
# Puts the platform's packages behind .venv's own. --system-site-packages does not do this where
# the platform's interpreter is itself in a virtual environment: it reaches the one below that.
vpce_add_platform_packages() {
    vpce_imports "$@" || return 1
    vpce_say "using the packages of $1"
    (cd / && "$1" - "$(vpce_site_packages)/platform.pth" "$vpce_constraints") <<'PYTHON'
import sys
from importlib import metadata

packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
with open(sys.argv[1], "w") as pth:
    pth.writelines(f"import site; site.addsitedir({path!r})\n" for path in packages)
with open(sys.argv[2], "w") as constraints:
    for name in ("torch", "triton"):
        try:
            constraints.write(f"{name}=={metadata.version(name)}\n")
        except metadata.PackageNotFoundError:
            pass
PYTHON
    vpce_imports "$vpce_venv/bin/python" "${@:2}"
}

# vpce_install PIP_OPTION...
vpce_install() {
    local torch=("${vpce_pins[@]}")
    if [[ $vpce_gpu == yes && -f $vpce_constraints ]]; then
        torch=(--constraint "$vpce_constraints")
    elif [[ $vpce_gpu == yes ]]; then
        torch=(torch)
    fi
    # One command for torch and the extras, so that pip cannot replace the torch asked for.
    vpce_pip install -qq "$@" "pip>=22.3" "setuptools>=77" &&
        vpce_pip install -qq "$@" --no-build-isolation "${torch[@]}" "${vpce_tested[@]}" \
            --config-settings editable_mode=compat --editable "${vpce_root}[$vpce_extras]" &&
        vpce_pip install -qq "$@" --no-deps "${vpce_alone[@]}"
}

# Makes the package importable where the extras could not be installed.
vpce_link_checkout() {
    vpce_pip install --quiet --no-index --no-deps --no-build-isolation \
        --config-settings editable_mode=compat --editable "$vpce_root" \
        >/dev/null 2>&1 || echo "$vpce_root" >"$(vpce_site_packages)/vocab_parallel_ce_checkout.pth"
}

vpce_name_missing() {
    local module loss
    while read -r module loss; do
        vpce_imports "$1" "$module" || vpce_say "missing: $module: $loss"
    done <<'LOSSES'
triton the triton implementation and its tests will not run
numpy the tests under the interpreter and the demo will not run
xdist the tests run in one process
pytest_timeout a test that hangs is not stopped
hypothesis the property tests will not run
tokenizers the demo will not run
tqdm the demo will not run
matplotlib the demo will not run
transformers the tests of its integration will not run
accelerate some tests with transformers will not run
peft some tests with transformers will not run
trl the tests of its integration will not run
ruff .ci/run will not lint
mypy .ci/run will not check types
LOSSES
}

vpce_die_without_packages() {
    vpce_pip --version >/dev/null 2>&1 ||
        vpce_die "this Python has no ensurepip (Debian, Ubuntu: apt-get install python3-venv)"
    vpce_die "torch and pytest are not all here and pip could not get them ($1): mend that and run this" \
        "again, or run it where python3 has torch, triton and pytest"
}

vpce_use_platform_python() {
    vpce_imports "$1" torch pytest ||
        vpce_die "$1 cannot make the virtual environment $vpce_venv: check that its directory is" \
            "writable and install Python's venv (Debian, Ubuntu: apt-get install python3-venv)"
    vpce_say "$vpce_venv cannot be made: using $1 as it is"
    export VPCE_PYTHON=$1 PYTHONPATH=$vpce_root${PYTHONPATH:+:$PYTHONPATH}
    vpce_name_missing "$1"
}

# vpce_setup_locked PYTHON
vpce_setup_locked() {
    local platform=$1 installed=no errors=$vpce_venv/setup-errors reason="the package index does not answer"
    # The setup that held the lock before may have done everything.
    if vpce_is_current; then return; fi
    vpce_refuse_to_change
    if ! vpce_is_reusable && ! vpce_make_venv "$platform"; then
        { vpce_clear_venv && rm -f "$vpce_unfinished" && rmdir "$vpce_venv"; } 2>/dev/null || true
        vpce_use_platform_python "$platform"
        return
    fi
    : >"$vpce_unfinished"
    echo "scripts/setup.sh made this directory and may make it anew." >"$vpce_made"
    if [[ $vpce_gpu == yes ]] && ! vpce_imports "$VPCE_PYTHON" torch; then
        vpce_add_platform_packages "$platform" torch || vpce_say "no torch on the platform"
    fi

    if vpce_index_answers; then
        vpce_say "installing into $vpce_venv (the first time this takes minutes)"
        if vpce_install 2>"$errors"; then
            installed=yes
        else
            cat "$errors" >&2
            reason=$(vpce_reason "$errors")
        fi
    elif vpce_install --no-index >/dev/null 2>&1; then
        installed=yes
    fi
    if [[ $installed == yes ]]; then
        rm -f "$vpce_unfinished"
        vpce_fingerprint >"$vpce_stamp.new"
        mv "$vpce_stamp.new" "$vpce_stamp"
        vpce_say "ready"
        return
    fi

    vpce_imports "$VPCE_PYTHON" torch pytest ||
        vpce_add_platform_packages "$platform" torch triton pytest || vpce_die_without_packages "$reason"
    vpce_say "warning: pip could not install everything ($reason); going on with what is here"
    vpce_link_checkout
    vpce_name_missing "$VPCE_PYTHON"
    rm -f "$vpce_unfinished"
}

vpce_setup() {
    local platform parent
    export VPCE_PYTHON=$vpce_venv/bin/python
    if vpce_is_current; then return; fi

    platform=$(vpce_platform_python) ||
        vpce_die "Python 3.10 or newer is needed, and none of python3, python3.14 ... python3.10 on" \
            "the PATH is that: install one"
    parent=$(dirname "$vpce_venv")
    mkdir -p "$parent" || vpce_die "VPCE_VENV: $parent cannot be made: choose another place"
    {
        vpce_lock "$platform"
        vpce_setup_locked "$platform"
    } 9<"$parent"
}

vpce_setup
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    echo "$VPCE_PYTHON"
fi
