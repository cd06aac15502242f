#!/usr/bin/env bash
# Builds the wheel and the sdist with `python -m build`, checks both, and runs the README's examples from the wheel.
#
#   bash scripts/check_package.sh [FOLDER [TAG]]
#
# FOLDER gets the two files once they have passed. TAG must be "v" and the package's version. Needs no network.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
. scripts/setup.sh

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# A copy: setuptools leaves its build folder beside the sources. The build must not import torch.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar -cf - | (mkdir "$out/source" && tar -xf - -C "$out/source")
mkdir "$out/no_torch"
echo 'raise ImportError("the build imports torch")' >"$out/no_torch/torch.py"
(cd "$out" && PYTHONPATH=$out/no_torch "$VPCE_PYTHON" -m build --no-isolation --outdir dist source) >"$out/log" 2>&1 || {
    cat "$out/log" >&2
    exit 1
}
"$VPCE_PYTHON" -m twine --no-color check --strict "$out"/dist/*

# What they hold and are called. All tests or none: setuptools takes tests/test_*.py by itself, without what they import.
version=$("$VPCE_PYTHON" -c 'import vocab_parallel_ce; print(vocab_parallel_ce.__version__)')
[[ -z ${2:-} || $2 == "v$version" ]] || vpce_die "expected the tag v$version of the package, got $2"
"$VPCE_PYTHON" - "$version" "$out"/dist/* <<'END'
import subprocess, sys, tarfile, zipfile

version, sdist, wheel = sys.argv[1], *sorted(sys.argv[2:], key=lambda path: path.endswith(".whl"))
name = f"vocab_parallel_ce-{version}"
assert sdist.endswith(f"/{name}.tar.gz") and wheel.endswith(f"/{name}-py3-none-any.whl"), (sdist, wheel)
listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "vocab_parallel_ce"]
package = set(subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split())
built = {"METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE"}
found = set(zipfile.ZipFile(wheel).namelist())
expected = package | {f"{name}.dist-info/{file}" for file in built}
assert found == expected, f"the wheel: expected and got differ in {sorted(found ^ expected)}"
found = {member.name.partition("/")[2] for member in tarfile.open(sdist) if member.isfile()}
found = {file for file in found if ".egg-info/" not in file}
others = {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
assert found == package | others, f"the sdist: expected and got differ in {sorted(found ^ (package | others))}"
END

# An environment with the wheel alone; torch and what it needs come from VPCE_PYTHON.
"$VPCE_PYTHON" -m venv --without-pip "$out/venv"
python=$out/venv/bin/python
"$VPCE_PYTHON" -m pip --python "$python" install --quiet --disable-pip-version-check --no-deps --no-index "$out"/dist/*.whl
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$VPCE_PYTHON" -c 'import sys; print(*[path for path in sys.path if path.endswith("-packages")], sep="\n")' >"$packages/with_torch.pth"
"$VPCE_PYTHON" - "$out" <<'END'
import sys

from tests.docs.markdown import README, python_blocks

blocks = {False: [], True: []}
for block in python_blocks(README.read_text(encoding="utf-8")):
    blocks["init_process_group" in block].append(block)
assert all(blocks.values()), blocks
for of_ranks, name in ((False, "one_rank.py"), (True, "two_ranks.py")):
    with open(f"{sys.argv[1]}/{name}", "w", encoding="utf-8") as file:
        file.write("\n".join(blocks[of_ranks]))
END
cd "$out"
unset PYTHONPATH
found=$("$python" -c 'import vocab_parallel_ce as package; print(package.__version__, package.__file__)')
[[ $found == "$version $packages/vocab_parallel_ce/__init__.py" ]] || vpce_die "expected $version from the wheel, got $found"
"$python" -m vocab_parallel_ce doctor >/dev/null
"$python" one_rank.py
# A file for each rank: an unbuffered print is several writes, and those of two ranks may come between each other.
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 --log-dir ranks --redirects 1 two_ranks.py
cat ranks/*/*/*/stdout.log >printed
[[ $(cut -d' ' -f1 printed | sort | xargs) == "0 1" && $(cut -d' ' -f2 printed | sort -u | wc -l) == 1 ]] || {
    vpce_die "expected one loss, the same on two ranks, got: $(cat printed)"
}
printf 'the wheel of %s runs the examples of README.md\n' "$version"
cd "$root"
if [[ -n ${1:-} ]]; then mkdir -p "$1" && cp "$out"/dist/* "$1"; fi
