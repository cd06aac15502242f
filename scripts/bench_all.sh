#!/usr/bin/env bash
# Measures what README and docs/ print of one GPU, and writes the documents in scripts/results.
#
#   bash scripts/bench_all.sh                   every step, as long as there is time
#   bash scripts/bench_all.sh losses options    these steps
#
# It needs the packages to compare with on the path of "python", and for the largest model 110 GiB of GPU memory.
# Then "python scripts/bench.py report --write" writes the pages, on any machine.
#
# VPCE_MINUTES=9     end after so many; the last line names the steps that are left
# VPCE_ROUNDS=7      rounds of a step
# VPCE_RESULTS=DIR   another folder for the documents
# VPCE_COMMIT=HASH   if the checkout has no git history
set -euo pipefail
cd "$(dirname "$0")/.."

results=${VPCE_RESULTS:-scripts/results} rounds=${VPCE_ROUNDS:-7}
ends=$((SECONDS + 60 * ${VPCE_MINUTES:-9}))
python=$(command -v python || command -v python3)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

# What README prints comes first.
steps=("$@")
if [ $# -eq 0 ]; then
    steps=(table linear transformers compile losses memory options tokens vocabulary)
fi

memory_gib() {
    "$python" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0)'
}

# Prints the name of the document that a step writes, and then its command.
command_of() {
    case $1 in
        table) echo bench_table_1gpu scripts/bench.py table ;;
        tokens | vocabulary)
            echo "bench_sweep_$1_1gpu" scripts/bench.py table --sweep "$1" \
                --providers vocab_parallel_ce,vocab_parallel_ce[in_forward],quack-kernels,flash-attn,liger-kernel
            ;;
        options) echo bench_options_1gpu scripts/bench.py options ;;
        linear) echo linear_table_1gpu scripts/bench.py linear ;;
        memory) echo linear_memory_1gpu scripts/bench.py linear --memory-curve ;;
        losses) echo losses_1gpu scripts/bench_losses.py ;;
        compile) echo compile_1gpu scripts/bench_compile.py ;;
        rl) echo rl_1gpu scripts/bench_rl.py ;;
        transformers)
            if [ "$(memory_gib)" -lt 110 ]; then
                echo transformers_step_1gpu scripts/bench_transformers.py --case 0 --case 2
            else
                echo transformers_step_1gpu scripts/bench_transformers.py
            fi
            ;;
        *)
            echo "bench_all: expected table, linear, transformers, compile, losses, memory, options, tokens," \
                "vocabulary or rl, got $1" >&2
            return 2
            ;;
    esac
}

left=()
for step in "${steps[@]}"; do
    words=$(command_of "$step")
    read -r name command <<<"$words"
    began=$SECONDS
    # A document is moved when its step has ended: none is of half a step.
    # shellcheck disable=SC2086
    if [ "$SECONDS" -lt "$ends" ] &&
        timeout $((ends - SECONDS)) "$python" $command --rounds "$rounds" --json "$new/$name.json" >"$new/$step.log" 2>&1; then
        mv "$new/$name".* "$results/"
        echo "$step: $((SECONDS - began)) s"
    else
        left+=("$step")
        [ ! -s "$new/$step.log" ] || tail -n 5 "$new/$step.log"
        echo "$step: not finished after $((SECONDS - began)) s"
    fi
done
echo "left: ${left[*]:-nothing}"
[ ${#left[@]} -eq 0 ]
