"""The tutorial is its script, which learns and gives on two ranks what it gives on one."""

import importlib.util

import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt

from tests.docs.markdown import ROOT, python_blocks

SCRIPT = ROOT / "scripts" / "examples" / "tutorial.py"


def _run(rank, group, picture):
    spec = importlib.util.spec_from_file_location("tutorial", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plt.switch_backend("agg")
    try:
        return module.main(picture, group)
    finally:
        plt.close()


@pytest.mark.reference
def test_the_page_has_the_script():
    (shown,) = python_blocks((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    assert SCRIPT.read_text(encoding="utf-8").endswith(f'"""\n\n{shown}')


@pytest.mark.gloo
@pytest.mark.parametrize("rank_pool", [pytest.param(("gloo", 2), id="gloo-2")], indirect=True)
def test_it_learns_alike_on_one_rank_and_two(rank_pool, tmp_path):
    picture = tmp_path / "tutorial.png"
    held_out, floor, accuracy = _run(0, None, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    ends = f"ends at {held_out:.2f} nats per token, and the truth has {floor:.2f} on the same tokens. {accuracy:.0%}"
    assert ends.replace("%", " %") in page
    assert floor < held_out < floor + 0.2
    first, second = rank_pool.run(_run, str(tmp_path / "two.png"))
    assert first == second == pytest.approx((held_out, floor, accuracy), abs=1e-3)
