"""What each option of the loss costs: its calls as providers, and another checkout's loss."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

import vocab_parallel_ce
from bench_lib.cases import OURS
from bench_lib.providers import Provider

ALL: dict[str, Any] = dict(label_smoothing=0.1, z_loss=1e-4, softcap=30.0, logit_scale=0.0625, return_metrics=True)
OPTION_CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, in_forward": {"gradient": "in_forward"},
    **{f"mean, {name}": {name: value} for name, value in ALL.items()},
    "sum, num_items": {"reduction": "sum", "num_items": 1000},
    "none": {"reduction": "none"},
    "none, all options": {"reduction": "none", "smoothing_formula": "megatron"} | ALL,
    "token_log_probs": {},
    "token_log_probs, entropy": {"entropy": True, "temperature": 0.7},
}


# What there was before each of the options; the same calls of another checkout are measured beside it.
BASELINES = ("mean", "mean, in_forward", "none", "token_log_probs", "token_log_probs, entropy")


def option_provider(name: str, options: dict[str, Any], package: Any = vocab_parallel_ce, label: str = "") -> Provider:
    """A call with ``options`` of the function of ``package`` that ``name`` says; ``label`` is added to the name."""
    is_loss = not name.startswith("token")
    function = package.vocab_parallel_cross_entropy if is_loss else package.token_log_probs
    options = {"gradient": "in_backward"} | options  # as in ``providers``
    checked = {"reduction": "mean"} | options if is_loss else options

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        returned = function(logits, labels, group=group, **options)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return tuple(out for out in outputs if isinstance(out, Tensor))  # metrics have no gradient

    return Provider(name + label, lambda m: loss_of, OURS, "vocab-parallel-ce", options=checked)


def baseline_package(checkout: Path) -> Any:
    """The package of another checkout, imported under a name of its own."""
    name = f"baseline_{OURS}"
    parent = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / OURS, parent / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (parent / name).rglob("*.py"):
        source.write_text(source.read_text().replace(OURS, name))
    sys.path.insert(0, str(parent))
    return importlib.import_module(name)


def option_providers(baseline: Path | None = None) -> list[Provider]:
    """Every option's call, and those of ``BASELINES`` of the checkout ``baseline`` too."""
    providers = [option_provider(name, options) for name, options in OPTION_CALLS.items()]
    if baseline is not None:
        package = baseline_package(baseline)
        providers += [option_provider(name, OPTION_CALLS[name], package, ", baseline") for name in BASELINES]
    return providers
