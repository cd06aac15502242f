"""The Python of README.md and docs/ runs as it stands, on one rank and on two, and so do the options."""

import contextlib
import importlib.util
import io
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.docs.markdown import PAGES, README, ROOT, name_of, python_blocks
from tests.support.host.fresh import fresh_python

OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
BLOCKS = {name_of(page): python_blocks(page.read_text(encoding="utf-8")) for page in PAGES}
WITH_BLOCKS = [name for name, blocks in BLOCKS.items() if blocks]


def is_of_ranks(block):
    """Whether it starts ranks by itself; a script with a guard is run by its own test (test_tutorial.py)."""
    return "init_process_group" in block and "__main__" not in block


OF_RANKS = {
    f"{name}, block {index}": block
    for name, blocks in BLOCKS.items()
    for index, block in enumerate(blocks)
    if is_of_ranks(block)
}
(OPTIONS_SETUP,) = [block for block in python_blocks(OPTIONS) if "as ce\n" in block]
OPTION_LINES = [
    re.fullmatch(r"\| (.+?) \|.*\| `(.+)` \|", row).groups()
    for row in OPTIONS.split("## Options of the mathematics\n")[1].split("\n## ")[0].splitlines()
    if row.startswith("| ") and "(logits" in row
]


@pytest.mark.reference
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_the_examples_of_a_page_in_their_order(page):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for example in BLOCKS[page]:
        if not is_of_ranks(example) and not _absent_frameworks(example):
            exec(example, names)
    if {"install", "transformers"} & names.keys():
        from vocab_parallel_ce.integrations.transformers import uninstall

        uninstall()


def _absent_frameworks(example):
    """Names of the frameworks that an example imports, or whose integration it does, and that are not installed."""
    names = re.findall(r"^(?:import|from) (\w+)|integrations[. ](?:import )?(\w+)", example, flags=re.MULTILINE)
    names = dict.fromkeys(name or of_integration for name, of_integration in names)
    return [name for name in names if name != "dtensor" and not importlib.util.find_spec(name)]


OF_ABSENT = [(page, n) for page, blocks in BLOCKS.items() for n, each in enumerate(blocks) if _absent_frameworks(each)]


@pytest.mark.reference
@pytest.mark.parametrize(("page", "number"), OF_ABSENT)
def test_an_example_of_a_framework_that_is_not_here(page, number):
    compile(BLOCKS[page][number], page, "exec")
    pytest.skip(f"not run: needs {', '.join(_absent_frameworks(BLOCKS[page][number]))}")


def _printed(example):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    return printed.getvalue().split()


def _printed_by_rank(rank, group, example):
    """The ranks are a group before the example, and stay one."""

    def init(backend):
        assert backend == "gloo"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init)
        patch.setattr(dist, "destroy_process_group", dist.barrier)
        return _printed(example)


def _assert_printed(by_rank, example, monkeypatch):
    """Both ranks print the same, which is what one rank with the whole vocabulary prints, up to rounding."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    _, *expected = _printed(example)
    assert expected and not dist.is_initialized()
    first, second = by_rank
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:]
    assert list(map(float, first[1:])) == pytest.approx(list(map(float, expected)), rel=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("name", [name for name in OF_RANKS if "README" not in name])
@pytest.mark.parametrize("rank_pool", [pytest.param(("gloo", 2), id="gloo-2")], indirect=True)
def test_an_example_of_two_ranks(rank_pool, name, monkeypatch):
    _assert_printed(rank_pool.run(_printed_by_rank, OF_RANKS[name]), OF_RANKS[name], monkeypatch)


@pytest.mark.gloo
def test_the_readmes_example_of_two_ranks_with_its_command(monkeypatch, tmp_path):
    (example,) = [block for name, block in OF_RANKS.items() if "README" in name]
    (command,) = re.findall(r"`torchrun (.+ example\.py)`", README.read_text(encoding="utf-8"))
    (tmp_path / "example.py").write_text(example)
    # A port that is free, no name of the host, which offline hosts need not know, and a file of each rank's stdout.
    variables = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    variables |= {"PET_LOG_DIR": str(tmp_path / "logs"), "PET_REDIRECTS": "1"}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    result = fresh_python("-m", "torch.distributed.run", *command.split(), cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    by_rank = [path.read_text().split() for path in sorted(tmp_path.glob("logs/**/stdout.log"))]
    _assert_printed(by_rank, example, monkeypatch)


@pytest.mark.reference
@pytest.mark.parametrize(("option", "line"), OPTION_LINES, ids=[option for option, _ in OPTION_LINES])
def test_each_line_of_the_table_of_options(option, line):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(OPTIONS_SETUP, names)
    exec(f"result = {line}" if " = " not in line else line, names)
    results = names.get("result", names.get("found"))
    assert all(value.isfinite().all() for value in tree_leaves(results))
