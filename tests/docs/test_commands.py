"""Every command of the pages is one that can be typed: scripts take the arguments, files, lanes and extras exist."""

import argparse
import re
import runpy
import shlex
import string
import sys

import pytest

from tests.docs.markdown import PAGES, ROOT, without_code
from vocab_parallel_ce.__main__ import main as command_line

pytestmark = pytest.mark.reference

COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(?:python3?|torchrun|bash|pip) (.+)")
OF_THE_READER = {"example.py"}  # what a page says to make of its own example
PLACEHOLDERS = {"LANE", "TORCH", "TRITON"}
_, _, EXTRAS = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]\n")
EXTRAS = set(re.findall(r"^(\w+) = \[", EXTRAS.partition("\n\n")[0], flags=re.MULTILINE))


def commands_of(text):
    """The commands of a page's ``bash`` blocks and of its prose, without ``torchrun``'s own arguments."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_code(text))]
    variables = dict(re.fullmatch(r'(\w+)="(.+)"', line).groups() for line in lines if re.fullmatch(r'\w+=".+"', line))
    for line in lines:
        if COMMAND.fullmatch(line):
            words = shlex.split(string.Template(line).safe_substitute(variables), comments=True)
            words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if words[0] == "torchrun":
                words = ["python", *words[3:]]
            if len(words) > 1 and not OF_THE_READER & set(words):
                yield tuple(words)


RUN_BY_CI = {("-m", "sphinx"), ("-m", "venv")}
COMMANDS = sorted(
    {words for page in PAGES for words in commands_of(page.read_text(encoding="utf-8")) if words[1:3] not in RUN_BY_CI}
)


class Parsed(Exception):
    """A script's arguments were right."""


def _check_parses(monkeypatch, script, words):
    """Raise unless the parser of a script or module takes these words. Nothing after it runs."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(*args, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    run, name = (runpy.run_path, str(ROOT / script)) if script.endswith(".py") else (runpy.run_module, script)
    try:
        with pytest.raises(Parsed):
            run(name, run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in {"vocab_parallel_ce", "tests", "bench_lib", script}:
            raise
        pytest.skip(f"needs {error.name}")


def _check_test_run(words, config):
    """Raise unless pytest's arguments name marks and files that exist."""
    words, marks = list(words), {line.partition(":")[0].partition("(")[0] for line in config.getini("markers")}
    while words:
        word = words.pop(0)
        if word in ("-m", "-n", "-k", "--lanes-json"):
            value = words.pop(0)
            assert word != "-m" or value in marks | PLACEHOLDERS, f"no mark {value!r}"
        else:
            assert (ROOT / word).exists(), f"no file {word}"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command(words, monkeypatch, pytestconfig):
    program, first, *rest = words
    if program == "pip":
        assert (first, rest[0]) == ("install", "-e"), "it is on no index: expected an editable install of the clone"
        extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", rest[1])
        assert extras and set((extras[1] or "test").split(",")) <= EXTRAS and not rest[2:]
    elif program == "bash":
        assert (ROOT / first).is_file(), f"no script {first}"
        if first == "scripts/test.sh":
            _check_test_run(rest, pytestconfig)
    elif (first, rest[:1]) == ("-m", ["vocab_parallel_ce"]):
        assert command_line(rest[1:]) == 0
    elif first == "scripts/examples/tutorial.py":
        assert not rest  # tests/docs/test_tutorial.py runs it
    else:
        script, *rest = rest if first == "-m" else (first, *rest)
        _check_parses(monkeypatch, script, rest)
