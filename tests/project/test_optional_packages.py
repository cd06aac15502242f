"""Test files whose optional packages are not installed: skipped with the reason, not an error."""

import pytest

from tests.support.host.fresh import fresh_python

pytestmark = pytest.mark.reference

COLLECT = """
import sys
sys.modules.update(dict.fromkeys(["transformers", "tqdm"]))  # neither imported nor found
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "tests/integrations", "tests/bench"]))
"""


def test_a_file_that_imports_a_missing_package_is_skipped_with_the_reason():
    collected = fresh_python("-c", COLLECT)
    assert collected.returncode == 0, collected.stdout[-2000:]
    for name in ("transformers", "tqdm"):
        assert f"needs {name}, which is not installed" in collected.stdout
