"""scripts/setup.sh on a small checkout with stubs of python and pip: nothing is installed or fetched."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20

# The platform's python3, and the python of each environment that it makes. Setup's questions about python and files
# reach the real interpreter; `-m ...` is written to the log. `-m venv` waits while the file `hold` exists.
STUB = """#!/usr/bin/env bash
stub="{stub}"
case "$*" in
    "- "*) cat >/dev/null; echo "$stub/python3" ;;
    "-m venv "*)
        echo "venv ${{!#}}" >>"$stub/log"
        while [[ -e $stub/hold ]]; do sleep 0.02; done
        mkdir -p "${{!#}}/bin" && cp "$stub/python3" "${{!#}}/bin/python" ;;
    "-m pip "*--version*) ;;
    "-m pip "*)
        [[ $* == *" download "* ]] && exit
        echo "pip $0" >>"$stub/log"
        if [[ -e $stub/pip-error ]]; then cat "$stub/pip-error" >&2 && exit 1; fi ;;
    "-m pytest"*) echo "pytest $0" >>"$stub/log" ;;
    *importlib.import_module*) ;;
    *"sysconfig.get_path"*) mkdir -p "${{0%/bin/*}}/site-packages" && echo "${{0%/bin/*}}/site-packages" ;;
    *) exec "{python}" "$@" ;;
esac
"""


PIP_CALLS = 3  # pip itself, torch and the extras, what comes without its dependencies


class Checkout:
    """A copy of the scripts beside a directory of stubs, which comes first on PATH."""

    def __init__(self, directory: Path) -> None:
        self.root, self.stubs = directory / "checkout", directory / "stubs"
        self.venv = self.root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.errors = self.stubs / "errors"
        (self.root / "scripts").mkdir(parents=True)
        self.stubs.mkdir()
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in ("setup.sh", "test.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        self.write_stub(self.stubs / "python3")
        self.write_stub(self.stubs / "nvidia-smi", "#!/usr/bin/env bash\nexit 1\n")

    def write_stub(self, path: Path, text: str = STUB) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(stub=self.stubs, python=sys.executable))
        path.chmod(0o755)

    def start(self, venv: str | None = None, script: str = "setup.sh") -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("VPCE_")}
        env["PATH"] = f"{self.stubs}:{env['PATH']}"
        if venv is not None:
            env["VPCE_VENV"] = venv
        command = ["bash", str(self.root / "scripts" / script)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self.errors.open("w")}
        return subprocess.Popen(command, **pipes, text=True, env=env, cwd="/", start_new_session=True)

    def run(self, venv: str | None = None, script: str = "setup.sh") -> tuple[int, str, str]:
        """Returns (exit status, stdout, stderr)."""
        process = self.start(venv, script)
        stdout, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout.strip(), self.errors.read_text()

    def log(self) -> list[str]:
        log = self.stubs / "log"
        return log.read_text().splitlines() if log.exists() else []

    def make_environment(self) -> None:
        """Makes an environment at .venv as a user has it: nothing in it says that setup.sh made it."""
        self.write_stub(self.venv / "bin" / "python")
        (self.venv / "package.py").write_text("mine = True\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def wait_until(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_setup_makes_the_environment_once(checkout: Checkout) -> None:
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, checkout.python), stderr
    assert checkout.log() == [f"venv {checkout.venv}", *PIP_CALLS * [f"pip {checkout.python}"]]

    before = snapshot(checkout.root)
    assert checkout.run() == (0, checkout.python, "")
    assert snapshot(checkout.root) == before
    assert len(checkout.log()) == 1 + PIP_CALLS


def test_what_pip_says_is_why_something_is_missing(checkout: Checkout) -> None:
    (checkout.stubs / "pip-error").write_text(
        "ERROR: No matching distribution found for trl>=1.16\n[notice] a new pip\n"
    )
    status, _, stderr = checkout.run()
    assert status == 0
    why = "(ERROR: No matching distribution found for trl>=1.16)"
    assert f"setup: warning: pip could not install everything {why}; going on with what is here\n" in stderr


def test_two_setups_at_once_make_one_environment(checkout: Checkout) -> None:
    (checkout.stubs / "hold").touch()
    processes = [checkout.start()]
    try:
        wait_until(lambda: len(checkout.log()) == 1, "the first setup makes the environment")
        processes.append(checkout.start())
        waiting = "setup: another setup is running here; waiting for it"
        wait_until(lambda: waiting in checkout.errors.read_text(), "the second waits")
        assert checkout.log() == [f"venv {checkout.venv}"]
        (checkout.stubs / "hold").unlink()
        outputs = [process.communicate(timeout=TIMEOUT_S)[0].strip() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert outputs == [checkout.python, checkout.python] and [process.returncode for process in processes] == [0, 0]
    assert checkout.log() == [f"venv {checkout.venv}", *PIP_CALLS * [f"pip {checkout.python}"]]


def own_environment_that_cannot_start(checkout: Checkout) -> None:
    checkout.run()
    checkout.write_stub(checkout.venv / "bin" / "python", "#!/nowhere/python3\n")


NOT_TO_CHANGE = [
    (Checkout.make_environment, "was not made by this script"),
    (own_environment_that_cannot_start, "cannot be started"),
]


@pytest.mark.parametrize(("make", "reason"), NOT_TO_CHANGE, ids=[make.__name__ for make, _ in NOT_TO_CHANGE])
def test_what_is_not_to_be_changed_is_left_as_it_is(
    checkout: Checkout, make: Callable[[Checkout], None], reason: str
) -> None:
    make(checkout)
    before, log = snapshot(checkout.root), checkout.log()
    status, stdout, stderr = checkout.run()
    assert snapshot(checkout.root) == before
    assert checkout.log() == log
    assert (status, stdout) == (1, "")
    assert f"setup: error: {checkout.venv}" in stderr
    assert reason in stderr
    assert "set VPCE_VENV to another place" in stderr


@pytest.mark.parametrize(("script", "place"), [("setup.sh", "absolute"), ("test.sh", "relative")])
def test_vpce_venv_is_the_place(checkout: Checkout, tmp_path: Path, place: str, script: str) -> None:
    checkout.make_environment()
    before = snapshot(checkout.venv)
    venv = checkout.root / "new" / "place" if place == "relative" else tmp_path / "new" / "place"
    status, _, stderr = checkout.run("new/place/" if place == "relative" else str(venv), script)
    python = str(venv / "bin" / "python")
    assert status == 0, stderr
    assert snapshot(checkout.venv) == before
    tested = [f"pytest {python}"] if script == "test.sh" else []
    assert checkout.log() == [f"venv {venv}", *PIP_CALLS * [f"pip {python}"], *tested]
    assert (venv / ".gitignore").read_text() == "*\n"  # git and ruff leave it alone wherever it is


def test_an_environment_of_an_older_version_is_brought_up_to_date(checkout: Checkout) -> None:
    checkout.make_environment()
    (checkout.venv / "setup-unfinished").write_text("")
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, checkout.python), stderr
    assert checkout.log() == PIP_CALLS * [f"pip {checkout.python}"]
    assert (checkout.venv / "package.py").exists() and (checkout.venv / "setup-made").exists()
