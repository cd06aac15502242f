"""The example of a teacher that ships hidden states from another process."""

import re

import pytest

from tests.support.host.fresh import ROOT, fresh_python

EXAMPLE = str(ROOT / "scripts" / "examples" / "on_policy_distillation.py")


@pytest.mark.reference
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")], ids=("1", "2"))
def test_the_example_learns(launcher):
    curve = [
        float(value) for value in re.findall(r"\d\.\d{3}", fresh_python(*launcher, EXAMPLE, "--steps", "30").stdout)
    ]
    assert len(curve) == 11 and 0.85 < curve[0] < 1.05 and curve[-1] < 0.8 * curve[0], curve
