"""How far a warm call travels on the host of a GPU: the package's Python frames and files in its forward and backward.

``tests/support/host/host_path.py`` counts them, with launches that are one call in C. Kernels and the oracle's
mathematics do not count.
"""

import json

import pytest

from tests.support.host.fresh import fresh_python

pytestmark = pytest.mark.reference
pytest.importorskip("triton")

MOST = {  # frames, files, when the compiler is imported
    "unreduced": (15, 8),
    "mean": (15, 8),
    "forward alone": (9, 8),
    "log-probabilities and entropy": (22, 10),
    "distillation": (32, 14),
    "top-k teacher, forward": (60, 19),
    "top-k teacher, reverse": (60, 19),
    "mean of a head": (31, 17),
}


@pytest.fixture(scope="module")
def found():
    process = fresh_python("-m", "tests.support.host.host_path")
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_launch_is_counted_and_nothing_is_not(found):
    assert found.pop("nothing") == {"frames": 0, "files": []}
    assert found.keys() == MOST.keys()
    assert all("program.py" in each["files"] for each in found.values())
    assert not {"spec.py", "reference.py", "kernels/launch.py"} & set(found["mean"]["files"])


@pytest.mark.parametrize("name", MOST)
def test_a_call_makes_no_more_frames_in_no_more_files(found, name):
    counted = found[name]["frames"], len(found[name]["files"])
    assert counted[0] <= MOST[name][0] and counted[1] <= MOST[name][1], found[name]
