"""The README's Python runs as it stands: its examples on one rank, and each line of its table of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.reference

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "init_process_group" not in block]
(OPTIONS_SETUP,) = [block for block in BLOCKS if "as ce\n" in block]
OPTION_LINES = [
    re.fullmatch(r"\| (.+?) \|.*\| `(.+)` \|", row).groups()
    for row in README.split("### Options")[1].split("###")[0].splitlines()
    if row.startswith("| ") and "(logits" in row
]


def test_examples_in_their_order():
    names: dict[str, object] = {}
    assert len(EXAMPLES) == 4
    for example in EXAMPLES:
        exec(example, names)


@pytest.mark.parametrize(("option", "line"), OPTION_LINES, ids=[option for option, _ in OPTION_LINES])
def test_each_line_of_the_table_of_options(option, line):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(OPTIONS_SETUP, names)
    exec(f"result = {line}" if " = " not in line else line, names)
    results = names.get("result", names.get("metrics", names.get("entropy")))
    for value in results if isinstance(results, tuple) else (results,):
        assert value is None or value.isfinite().all()


def test_the_table_has_every_option():
    """No option of the loss without its line."""
    options = ("label_smoothing", "megatron", "z_loss", "softcap", "logit_scale", "num_items", "shard=")
    lines = [line for _, line in OPTION_LINES]
    for option in (*options, "vocab_size=", "return_metrics", "temperature", "entropy=True", "verify_group("):
        assert any(option in line for line in lines), option
