"""scripts/setup.sh on a small checkout with stubs of python and pip: nothing is installed or fetched."""

from __future__ import annotations

import fcntl
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
WAITING = "setup: another setup is running here; waiting for it"
TIMEOUT_S = 20

# The platform's python3, and the python of each environment that it makes. Setup's questions about
# python and files reach the real interpreter; `-m ...` is written to the log. `-m venv` waits while
# the file `hold` exists, `-m pytest` while `hold_tests` does, and pip fails while `no_pip` does.
STUB = """#!/usr/bin/env bash
stub={stub}
case "$*" in
    "- "*) cat >/dev/null; echo "$stub/python3" ;;
    "-m venv "*)
        echo "venv ${{!#}}" >>"$stub/log"
        while [[ -e $stub/hold ]]; do sleep 0.02; done
        mkdir -p "${{!#}}/bin" && cp "$stub/python3" "${{!#}}/bin/python" ;;
    "-m pip "*--version*) ;;
    "-m pip "*)
        [[ ! -e $stub/no_pip ]] || exit 1
        [[ $* == *" download "* ]] || echo "pip $0" >>"$stub/log" ;;
    "-m pytest"*)
        echo "pytest $0" >>"$stub/log"
        while [[ -e $stub/hold_tests ]]; do sleep 0.02; done ;;
    *importlib.import_module*) ;;
    *"sysconfig.get_path"*) mkdir -p "${{0%/bin/*}}/site-packages" && echo "${{0%/bin/*}}/site-packages" ;;
    *) exec {python} "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts beside a directory of stubs, which comes first on PATH."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkout"
        self.venv = self.root / ".venv"
        self.stubs = directory / "stubs"
        self.errors: list[Path] = []
        (self.root / "scripts").mkdir(parents=True)
        self.stubs.mkdir()
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for name in ("setup.sh", "test.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        self.write_stub(self.stubs / "python3", STUB.format(stub=self.stubs, python=sys.executable))
        self.write_stub(self.stubs / "nvidia-smi", "#!/usr/bin/env bash\nexit 1\n")

    @staticmethod
    def write_stub(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, venv: str | None = None, script: str = "setup.sh") -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("VPCE_")}
        env["PATH"] = f"{self.stubs}:{env['PATH']}"
        if venv is not None:
            env["VPCE_VENV"] = venv
        self.errors.append(self.stubs / f"stderr{len(self.errors)}")
        with self.errors[-1].open("w") as errors:
            return subprocess.Popen(
                ["bash", str(self.root / "scripts" / script)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd="/",
                start_new_session=True,
            )

    def run(self, venv: str | None = None, script: str = "setup.sh") -> tuple[int, str, str]:
        """Returns (exit status, stdout, stderr)."""
        process = self.start(venv, script)
        stdout, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout.strip(), self.stderr()

    def stderr(self) -> str:
        """What the last script that was started has written to stderr."""
        return self.errors[-1].read_text()

    def log(self) -> list[str]:
        log = self.stubs / "log"
        return log.read_text().splitlines() if log.exists() else []

    def make_environment(self, python: str = STUB) -> None:
        """Makes an environment at .venv as a user has it: nothing in it says that setup.sh made it."""
        self.write_stub(self.venv / "bin" / "python", python.format(stub=self.stubs, python=sys.executable))
        (self.venv / "lib").mkdir()
        (self.venv / "lib" / "package.py").write_text("mine = True\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def wait_until(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


def kill_all(*processes: subprocess.Popen[str]) -> None:
    """Kills each script and its children, which share its session."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Returns mode, time of change and content of everything below the directory."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content: bytes | str = b""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def test_a_setup_makes_the_environment_once(checkout: Checkout) -> None:
    python = str(checkout.venv / "bin" / "python")
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, python), stderr
    assert checkout.log() == [f"venv {checkout.venv}", f"pip {python}", f"pip {python}"]

    before = snapshot(checkout.root)
    assert checkout.run() == (0, python, "")
    assert snapshot(checkout.root) == before
    assert len(checkout.log()) == 3


def test_two_setups_at_once_make_one_environment(checkout: Checkout) -> None:
    (checkout.stubs / "hold").touch()
    first = checkout.start()
    second = None
    try:
        wait_until(lambda: len(checkout.log()) == 1, "the first setup makes the environment")
        second = checkout.start()
        wait_until(lambda: WAITING in checkout.stderr() or len(checkout.log()) > 1, "the second waits")
        assert checkout.log() == [f"venv {checkout.venv}"]
        assert second.poll() is None
        (checkout.stubs / "hold").unlink()
        outputs = [process.communicate(timeout=TIMEOUT_S)[0].strip() for process in (first, second)]
    finally:
        kill_all(first, *([second] if second else []))

    python = str(checkout.venv / "bin" / "python")
    assert [first.returncode, second.returncode] == [0, 0]
    assert outputs == [python, python]
    assert checkout.stderr() == WAITING + "\n"
    assert checkout.log() == [f"venv {checkout.venv}", f"pip {python}", f"pip {python}"]


def test_a_killed_setup_leaves_no_lock_and_is_repaired(checkout: Checkout) -> None:
    (checkout.stubs / "hold").touch()
    killed = checkout.start()
    try:
        wait_until(lambda: len(checkout.log()) == 1, "the setup makes the environment")
    finally:
        kill_all(killed)
    (checkout.stubs / "hold").unlink()

    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, str(checkout.venv / "bin" / "python")), stderr
    assert f"making {checkout.venv}" in stderr
    assert WAITING not in stderr


def test_a_current_environment_waits_for_no_lock(checkout: Checkout) -> None:
    checkout.run()
    descriptor = os.open(checkout.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert checkout.run() == (0, str(checkout.venv / "bin" / "python"), "")
    finally:
        os.close(descriptor)


def test_the_lock_ends_with_the_setup_and_not_with_the_tests(checkout: Checkout) -> None:
    (checkout.stubs / "hold_tests").touch()
    tests = checkout.start(script="test.sh")
    descriptor = os.open(checkout.root, os.O_RDONLY)
    try:
        wait_until(lambda: f"pytest {checkout.venv}/bin/python" in checkout.log(), "the tests start")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
        kill_all(tests)


def users_environment(checkout: Checkout) -> None:
    checkout.make_environment()


def users_environment_behind_a_link(checkout: Checkout) -> None:
    checkout.make_environment()
    checkout.venv.rename(checkout.root / "elsewhere")
    checkout.venv.symlink_to("elsewhere")


def users_environment_that_cannot_start(checkout: Checkout) -> None:
    checkout.make_environment()
    (checkout.venv / "bin" / "python").unlink()
    (checkout.venv / "bin" / "python").symlink_to("/nowhere/python3")


def own_environment_that_cannot_start(checkout: Checkout) -> None:
    checkout.run()
    checkout.write_stub(checkout.venv / "bin" / "python", "#!/nowhere/python3\n")


def own_old_environment_that_cannot_start(checkout: Checkout) -> None:
    users_environment_that_cannot_start(checkout)
    (checkout.venv / "setup-stamp").write_text("Python 3.10.0\n")


def broken_link(checkout: Checkout) -> None:
    checkout.venv.symlink_to("/nowhere/venv")


def users_file(checkout: Checkout) -> None:
    checkout.venv.write_text("mine\n")


NOT_TO_CHANGE = [
    (users_environment, "was not made by this script"),
    (users_environment_behind_a_link, "was not made by this script"),
    (users_environment_that_cannot_start, "was not made by this script"),
    (own_environment_that_cannot_start, "cannot be started"),
    (own_old_environment_that_cannot_start, "cannot be started"),
    (broken_link, "was not made by this script"),
    (users_file, "was not made by this script"),
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


@pytest.mark.parametrize("place", ["relative", "absolute"])
@pytest.mark.parametrize("script", ["setup.sh", "test.sh"])
def test_vpce_venv_is_the_place(checkout: Checkout, tmp_path: Path, place: str, script: str) -> None:
    checkout.make_environment()
    before = snapshot(checkout.venv)
    venv = checkout.root / "new" / "place" if place == "relative" else tmp_path / "new" / "place"
    status, stdout, stderr = checkout.run("new/place/" if place == "relative" else str(venv), script)
    python = str(venv / "bin" / "python")
    assert status == 0, stderr
    assert snapshot(checkout.venv) == before
    expected = [f"venv {venv}", f"pip {python}", f"pip {python}"]
    if script == "setup.sh":
        assert stdout == python
    else:
        expected.append(f"pytest {python}")
    assert checkout.log() == expected
    # git and ruff leave it alone wherever it is.
    assert (venv / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("linked", [False, True], ids=["directory", "link"])
def test_an_empty_directory_is_used(checkout: Checkout, linked: bool) -> None:
    target = checkout.root / "disk" if linked else checkout.venv
    target.mkdir()
    if linked:
        checkout.venv.symlink_to(target)
    status, _, stderr = checkout.run()
    assert status == 0, stderr
    assert checkout.venv.is_symlink() == linked
    assert (target / "setup-stamp").exists()


@pytest.mark.parametrize("marker", ["setup-stamp", "setup-unfinished", "platform-constraints.txt"])
def test_an_environment_of_an_older_version_is_brought_up_to_date(checkout: Checkout, marker: str) -> None:
    checkout.make_environment()
    (checkout.venv / marker).write_text("")
    python = str(checkout.venv / "bin" / "python")
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, python), stderr
    assert checkout.log() == [f"pip {python}", f"pip {python}"]
    assert (checkout.venv / "lib" / "package.py").exists()
    assert (checkout.venv / "setup-made").exists()


def test_an_environment_that_pip_could_not_complete_is_still_this_scripts_own(checkout: Checkout) -> None:
    python = str(checkout.venv / "bin" / "python")
    (checkout.stubs / "no_pip").touch()
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, python), stderr
    assert "pip could not install everything" in stderr
    assert not (checkout.venv / "setup-stamp").exists()

    (checkout.stubs / "no_pip").unlink()
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, python), stderr
    assert (checkout.venv / "setup-stamp").exists()


def test_a_platform_that_makes_no_environment_is_used_as_it_is(checkout: Checkout) -> None:
    broken = STUB.replace('"-m venv "*)', '"-m venv "*) exit 1;; unused)')
    checkout.write_stub(checkout.stubs / "python3", broken.format(stub=checkout.stubs, python=sys.executable))
    status, stdout, stderr = checkout.run()
    assert (status, stdout) == (0, str(checkout.stubs / "python3")), stderr
    assert f"{checkout.venv} cannot be made" in stderr
    assert not checkout.venv.exists()
