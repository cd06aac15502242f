"""scripts/setup.sh on a small checkout with stubs of python and pip: nothing is installed or fetched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60

# A python3, and the python of each environment that it makes. `-m ...` is written to the log.
# `packages` names the one that has torch and pytest, `gpu-torch` the version of a torch that
# runs on a GPU.
STUB = """#!/usr/bin/env bash
stub="{stub}"
echo "$*" >>"$stub/arguments"
case "$*" in
    "-m venv "*)
        echo "venv ${{!#}}" >>"$stub/log"
        mkdir -p "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python" ;;
    "-m pip "*--version) ;;
    "-m pip "*)
        echo "pip $0" >>"$stub/log"
        echo "Downloading a package"
        if [[ -e $stub/pip-error ]]; then cat "$stub/pip-error" >&2 && exit 1; fi ;;
    "-m pytest"*) echo "pytest $0" >>"$stub/log" ;;
    *"import tokenizers,"*) ;;
    *"torch.cuda.device_count()"*) echo 1 ;;
    *scripts/train_lm.py*) echo '{{"png": "curves.png"}}' ;;
    *"import torch,"*) grep -qsxF "$0" "$stub/packages" ;;
    *"import torch;"*) cat "$stub/gpu-torch" 2>/dev/null ;;
    *) exec "{python}" "$@" ;;
esac
"""
TOO_OLD = "#!/usr/bin/env bash\nexit 1\n"
PIP_CALLS = 3  # pip itself, torch and the extras, what comes without its dependencies
DEMO_CALLS = 2  # of these the last is for tests alone


class Checkout:
    """A copy of the scripts beside a directory of stubs, which comes first on PATH; both have a space in their path."""

    def __init__(self, directory: Path) -> None:
        self.root, self.stubs = directory / "a checkout", directory / "the stubs"
        self.venv = self.root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.errors = self.stubs / "errors"
        (self.root / "scripts").mkdir(parents=True)
        self.stubs.mkdir()
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in ("setup.sh", "test.sh", "demo.sh", "constraints.txt"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        self.write_stub(self.stubs / "python3")

    def write_stub(self, path: Path, text: str = STUB) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(stub=self.stubs, python=sys.executable))
        path.chmod(0o755)

    def start(self, script: str = "setup.sh", **variables: str) -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("VPCE_")}
        env |= {"PATH": f"{self.stubs}:{env['PATH']}", **variables}
        command = ["bash", str(self.root / "scripts" / script)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self.errors.open("w")}
        return subprocess.Popen(command, **pipes, text=True, env=env, cwd="/", start_new_session=True)

    def run(self, script: str = "setup.sh", **variables: str) -> tuple[int, str, str]:
        """Returns (exit status, stdout, stderr)."""
        process = self.start(script, **variables)
        stdout, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout.strip(), self.errors.read_text()

    def log(self) -> list[str]:
        log = self.stubs / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_setup_makes_the_environment_once(checkout: Checkout) -> None:
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, str(checkout.python)), stderr
    assert stderr.count("Downloading a package\n") == PIP_CALLS  # what pip says is seen
    assert checkout.log() == [f"venv {checkout.venv}", *PIP_CALLS * [f"pip {checkout.python}"]]

    before = snapshot(checkout.root)
    assert checkout.run() == (0, str(checkout.python), "")
    assert snapshot(checkout.root) == before
    assert len(checkout.log()) == 1 + PIP_CALLS


def test_the_demo_fetches_what_it_needs_alone_and_the_tests_the_rest(checkout: Checkout) -> None:
    for _ in range(2):
        status, stdout, stderr = checkout.run("demo.sh")
        assert (status, stdout) == (0, '{"png": "curves.png"}'), stderr
        assert checkout.log() == [f"venv {checkout.venv}", *DEMO_CALLS * [f"pip {checkout.python}"]]
    installed = (checkout.stubs / "arguments").read_text()
    assert f"-e {checkout.root}[demo]\n" in installed
    assert "triton==" not in installed and "torchtitan" not in installed

    assert checkout.run("test.sh")[0] == 0
    assert f"-e {checkout.root}[triton,test,demo,dev,frameworks]\n" in (checkout.stubs / "arguments").read_text()
    log = checkout.log()
    assert log[1 + DEMO_CALLS :] == [*PIP_CALLS * [f"pip {checkout.python}"], f"pytest {checkout.python}"]
    assert checkout.run("demo.sh")[0] == 0  # what the tests have is enough
    assert checkout.log() == log


@pytest.mark.parametrize("gpu_torch", [None, "2.11.0"])
def test_a_torch_that_runs_on_a_gpu_is_kept(checkout: Checkout, gpu_torch: str | None) -> None:
    if gpu_torch is not None:
        (checkout.stubs / "gpu-torch").write_text(gpu_torch)
    assert checkout.run()[0] == 0
    arguments = (checkout.stubs / "arguments").read_text()
    assert (f"torch=={gpu_torch}" in arguments) == ("--system-site-packages" in arguments) == (gpu_torch is not None)


CHANGED = ("pyproject.toml", "scripts/constraints.txt", ".venv/setup-stamp", ".venv/bin/python")


@pytest.mark.parametrize("changed", CHANGED)
def test_what_is_not_up_to_date_or_was_interrupted_is_completed(checkout: Checkout, changed: str) -> None:
    """An environment whose python cannot start is made anew."""
    checkout.run()
    (checkout.root / changed).write_text("#!/nowhere/python3\n" if changed.endswith("python") else "")
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, str(checkout.python)), stderr
    made, filled = [f"venv {checkout.venv}"], PIP_CALLS * [f"pip {checkout.python}"]
    assert checkout.log() == [*made, *filled, *(made if changed.endswith("python") else []), *filled]


@pytest.mark.parametrize("has_packages", [".venv", "python3", "none"])
def test_if_pip_fails_what_has_torch_and_pytest_is_used(checkout: Checkout, has_packages: str) -> None:
    (checkout.stubs / "pip-error").write_text("ERROR: No matching distribution found for trl>=1.16\n")
    python = {".venv": checkout.python, "python3": checkout.stubs / "python3"}.get(has_packages)
    (checkout.stubs / "packages").write_text(f"{python}\n")
    expected = "python3" if has_packages == "python3" else python
    for _ in range(2):  # it is tried again
        status, stdout, stderr = checkout.run()
        assert stderr.count("ERROR: No matching distribution found for trl>=1.16\n") == 1
        assert f"{checkout.venv} is not complete, for the reason above" in stderr
        if python is None:
            assert (status, stdout) == (1, "") and "setup: error: " in stderr
        else:
            assert (status, stdout) == (0, str(expected)) and f"warning: {checkout.venv}" in stderr


def test_an_environment_of_somebody_else_is_left_as_it_is(checkout: Checkout) -> None:
    checkout.write_stub(checkout.python)
    before = snapshot(checkout.root)
    status, stdout, stderr = checkout.run()
    assert snapshot(checkout.root) == before and checkout.log() == []
    assert (status, stdout) == (1, "")
    assert f"setup: error: {checkout.venv} was not made by this script" in stderr
    assert "set VPCE_VENV to another place" in stderr


@pytest.mark.parametrize(("script", "place"), [("setup.sh", "absolute"), ("test.sh", "relative")])
def test_vpce_venv_is_the_place(checkout: Checkout, tmp_path: Path, place: str, script: str) -> None:
    venv = checkout.root / "new" / "place" if place == "relative" else tmp_path / "new" / "place"
    status, _, stderr = checkout.run(script, VPCE_VENV="new/place/" if place == "relative" else str(venv))
    python = venv / "bin" / "python"
    assert status == 0, stderr
    assert not checkout.venv.exists()
    tested = [f"pytest {python}"] if script == "test.sh" else []
    assert checkout.log() == [f"venv {venv}", *PIP_CALLS * [f"pip {python}"], *tested]
    assert (venv / ".gitignore").read_text() == "*\n"  # git and ruff leave it alone wherever it is


def test_vpce_python_is_used_as_it_is(checkout: Checkout) -> None:
    assert checkout.run("test.sh", VPCE_PYTHON="python3") == (0, "", "")
    assert checkout.log() == [f"pytest {checkout.stubs / 'python3'}"] and not checkout.venv.exists()


def test_a_python_that_is_new_enough_is_chosen(checkout: Checkout) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in range(10, 15))):
        checkout.write_stub(checkout.stubs / name, TOO_OLD)
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (1, "") and "setup: error: Python 3.10 or newer is needed" in stderr
    assert not checkout.venv.exists()
    checkout.write_stub(checkout.stubs / "python3.12")
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, str(checkout.python)) and "with python3.12" in stderr
