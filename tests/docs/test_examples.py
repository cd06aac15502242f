"""The Python of README.md and docs/ runs as it stands, on one rank and on two, and so do the options."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.docs.markdown import PAGES, ROOT, name_of, python_blocks

OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
BLOCKS = {name_of(page): python_blocks(page.read_text(encoding="utf-8")) for page in PAGES}
WITH_BLOCKS = [name for name, blocks in BLOCKS.items() if blocks]
OF_RANKS = {
    f"{name}, block {index}": block
    for name, blocks in BLOCKS.items()
    for index, block in enumerate(blocks)
    if "init_process_group" in block
}
(OPTIONS_SETUP,) = [block for block in python_blocks(OPTIONS) if "as ce\n" in block]
OPTION_LINES = [
    re.fullmatch(r"\| (.+?) \|.*\| `(.+)` \|", row).groups()
    for row in OPTIONS.split("## Options of the mathematics\n")[1].split("\n## ")[0].splitlines()
    if row.startswith("| ") and "(logits" in row
]


@pytest.mark.reference
def test_the_pages_with_examples():
    assert {"README.md", "docs/options.md", "docs/gradients.md", "docs/linear.md"} <= set(WITH_BLOCKS)
    assert {name.partition(",")[0] for name in OF_RANKS} >= {"README.md", "docs/linear.md"}


@pytest.mark.reference
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_the_examples_of_a_page_in_their_order(page):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for example in BLOCKS[page]:
        if "init_process_group" not in example:
            exec(example, names)


@pytest.mark.gloo
@pytest.mark.parametrize("example", OF_RANKS)
def test_an_example_of_two_ranks(example, tmp_path):
    """Both print the same, which is what one rank with the whole vocabulary prints, up to rounding."""
    script = tmp_path / "example.py"
    script.write_text(OF_RANKS[example])
    # A file for each rank: two processes on one pipe may mix their lines.
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--redirects", "1")
    _output(*launcher, "--log-dir", str(tmp_path / "logs"), str(script))
    first, second = (path.read_text().split() for path in sorted(tmp_path.glob("logs/*/*/*/stdout.log")))
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    _, *expected = _output(str(script), **alone).split()
    assert expected and len(first) == 1 + len(expected)
    assert list(map(float, first[1:])) == pytest.approx(list(map(float, expected)), rel=1e-5)


def _output(*arguments, **environment):
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.reference
@pytest.mark.parametrize(("option", "line"), OPTION_LINES, ids=[option for option, _ in OPTION_LINES])
def test_each_line_of_the_table_of_options(option, line):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(OPTIONS_SETUP, names)
    exec(f"result = {line}" if " = " not in line else line, names)
    results = names.get("result", names.get("metrics", names.get("entropy")))
    for value in results if isinstance(results, tuple) else (results,):
        assert value is None or value.isfinite().all()


@pytest.mark.reference
def test_the_table_has_every_option():
    """No option of the loss without its line."""
    options = ("label_smoothing", "megatron", "z_loss", "softcap", "logit_scale", "num_items", "shard=")
    lines = [line for _, line in OPTION_LINES]
    for option in (*options, "vocab_size=", "return_metrics", "temperature", "entropy=True", "verify_group("):
        assert any(option in line for line in lines), option
