#!/usr/bin/env bash
# Builds a wheel and an sdist, and imports the package from the wheel.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# A copy: setuptools leaves its build folder beside the sources.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar -cf - | (mkdir "$out/source" && tar -xf - -C "$out/source")
cd "$out/source"
"$VPCE_PYTHON" -c "
from setuptools import build_meta
print(build_meta.build_wheel('$out'), build_meta.build_sdist('$out'))" >/dev/null
"$VPCE_PYTHON" -m pip install --quiet --no-deps --no-index --target "$out/installed" "$out"/*.whl
cd "$out"
PYTHONPATH="$out/installed" "$VPCE_PYTHON" -c "
import torch, vocab_parallel_ce as package
assert package.__file__.startswith('$out'), package.__file__
loss = package.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([1, 2]))
assert abs(loss.item() - 1.3862944) < 1e-6, loss
print('imported', package.__version__, 'from the wheel')"
# All tests or none: setuptools takes tests/test_*.py by itself, without what they import.
tar -tzf "$out"/*.tar.gz >files
if grep /tests/ files; then
    echo "the sdist has tests: expected none, see MANIFEST.in" >&2
    exit 1
fi
