"""Every public function, class and record ends in an example that runs on a CPU and prints what it says."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vocab_parallel_ce as package
from tests.docs.markdown import ROOT
from vocab_parallel_ce import integrations

pytestmark = pytest.mark.reference

NEED_THEIR_FRAMEWORK = {  # the pages of the integrations have examples of these
    **dict.fromkeys(("transformers", "trl", "megatron", "nemo_automodel", "skyrl", "swift"), "every name"),
    "torchtitan": "every name",
    "verl": "vocab_parallel_",  # which ask Megatron-Core for the group
}
IN_EVERY_SWITCH = ("install", "uninstall", "installed", "report")


def public_names() -> dict[str, object]:
    found = {name: getattr(package, name) for name in package.__all__}
    for module_name in integrations.MODULES:
        module = importlib.import_module(f"{integrations.__name__}.{module_name}")
        exempt = NEED_THEIR_FRAMEWORK.get(module_name)
        for name, value in vars(module).items():
            is_own = callable(value) and not name.startswith("_") and inspect.getmodule(value) is module
            if is_own and name not in IN_EVERY_SWITCH and exempt != "every name" and not name.startswith(exempt or "?"):
                found[f"{module_name}.{name}"] = value
    return found


PUBLIC = public_names()


def example_of(value: object, name: str) -> doctest.DocTest:
    text = inspect.getdoc(value) or ""
    _, found, example = text.partition("\nExample:\n")
    return doctest.DocTestParser().get_doctest(example if found else "", {"torch": torch}, name, None, None)


def test_the_page_of_the_api_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r":: (?:vocab_parallel_ce\.)?(\w+)$", page, re.M)) >= {
        name for name in PUBLIC if name.partition(".")[0] not in integrations.MODULES
    }
    modules = re.findall(r"^\.\. automodule:: vocab_parallel_ce\.integrations\.(\w+)$", page, re.M)
    assert sorted(modules) == sorted(integrations.MODULES)


def _row(name: str, value: Any) -> str:
    """The row of a public name in the table of docs/api.md: its arguments, its file, and its docstring's beginning."""
    own = inspect.unwrap(value)
    said = " ".join((inspect.getdoc(own) or "").partition("\n\n")[0].split())
    said = re.sub(r":func:`(\w+)`", r"`\1`", said).replace("``", "`")
    file = Path(inspect.getfile(own)).relative_to(ROOT).as_posix()
    signature = inspect.signature(value)  # of `public`: with the settings
    keywords = [n for n, each in signature.parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    others = [n for n in signature.parameters if n not in keywords]
    arguments = ", ".join([*others, *(["*"] if keywords else []), *keywords])
    return f"| [`{name}`](../{file}) | `{arguments}` | {said} |"


@pytest.mark.parametrize("name", package.__all__)
def test_the_page_of_the_api_says_what_a_name_does(name):
    row = _row(name, getattr(package, name))
    assert row in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines(), f"expected the row {row}"


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_docstring(name):
    example = example_of(PUBLIC[name], name)
    assert example.examples, f"{name}: expected an example at the end of its docstring, got none"
    assert len(example.examples) <= 8, f"{name}: expected at most 8 statements, got {len(example.examples)}"
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert not failed, "".join(said)
