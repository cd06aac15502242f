"""The documentation site: python -m sphinx -W --keep-going -c docs . out/site

The source folder is the repository, so that a link between pages, also to README.md, is one link in both views. Pages
are Markdown (MyST); the API page is made from docstrings. The site fetches nothing from another host when it is viewed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import vocab_parallel_ce  # noqa: E402  (after the path)

project = "vocab_parallel_ce"
author = "the vocab_parallel_ce contributors"
copyright = f"2026, {author}"
release = version = vocab_parallel_ce.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/*.md"]
exclude_patterns = [".*", "out", "build", "dist"]  # not looked into: .venv has many files
html_extra_path = ["site"]  # index.html, which leads to the first page
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sourcelink = html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide.css"]

myst_heading_anchors = 4  # as GitHub makes them

highlight_language = "none"  # of formulas; blocks of code name theirs

autodoc_typehints = "none"  # docstrings have shapes, dtypes and units, which types do not
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_rtype = True, False, False
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!vocab_parallel_ce).*")]

CONTENTS = {
    "Start": ["docs/tutorial", "docs/which_function", "docs/questions", "docs/where_it_runs", "docs/trust"],
    "Losses": [
        "docs/options",
        "docs/gradients",
        "docs/linear",
        "docs/objective",
        "docs/distillation",
        "docs/performance",
    ],
    "Frameworks": [
        f"docs/{name}" for name in ("transformers", "megatron", "dtensor", "rl", "frameworks", "compile", "training")
    ],
    "Reference": ["docs/api", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT"],
    "For contributors": ["CONTRIBUTING", "docs/design", "docs/triton_reductions", "docs/measurements"],
}

# What readers look for in the site's search, and the heading that it leads to before any name of the API.
SEARCHED = {
    "docs/rl": {
        "# Reinforcement learning": ["entropy", "log-probabilities", "PPO"],
        "## Samplers": ["top-p"],
        "## KL": ["KL"],
    },
    "docs/objective": {"## Algorithms": ["GRPO"], "## Whole groups": ["DPO", "KTO", "ORPO", "SimPO", "GSPO"]},
    "docs/distillation": {"# Distillation": ["distillation", "KL divergence"], "## Top-k teachers": ["top-k"]},
}


def add_contents(app, name, source):
    """Give the README the site's table of contents, which it does not need where it is read as a file."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += "\n".join(["\n", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])


def add_words(app, name, source):
    """Give headings the words that lead to them in the site's search."""
    for heading, words in SEARCHED.get(name, {}).items():
        lines = f"{heading}\n\n```{{index}} {', '.join(f'! {word}' for word in words)}\n```\n"
        assert source[0].count(f"{heading}\n") == 1, f"{name}: expected one heading {heading!r}"
        source[0] = source[0].replace(f"{heading}\n", lines)


def link_pages(app, what, name, obj, options, lines):
    """Make a link of a page that a docstring names."""
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`docs/\1.md </docs/\1>`", line) for line in lines]


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("source-read", add_words)
    app.connect("autodoc-process-docstring", link_pages)
