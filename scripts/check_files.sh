#!/usr/bin/env bash
# Looks at every file of the project: no registry's host, no trailing whitespace, none larger than 1 MB.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
status=0

files() { git ls-files -z --cached --others --exclude-standard; }

# found PROBLEM: what stands in `lines`, if anything
found() {
    if [[ -n $lines ]]; then
        printf '%s:\n%s\n' "$1" "$lines"
        status=1
    fi
}

hosts='py''pi\.org|python''hosted\.org|py''torch\.org/whl|ana''conda\.org'
lines=$(files | xargs -0 grep -sInE -e "$hosts" -- || true)
found 'a registry is the choice of pip and its settings, not of a file here'
lines=$(files | xargs -0 grep -sInE -e '[[:blank:]]+$' -- | cut -c1-120 || true)
found 'trailing whitespace'
lines=$(files | xargs -0 -I{} find {} -maxdepth 0 -type f -size +1048576c)
found 'larger than 1 MB'
exit "$status"
