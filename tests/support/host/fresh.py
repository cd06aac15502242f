"""Python in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def fresh_python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python`` on these arguments, with these variables besides the present ones."""
    command, environment = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
