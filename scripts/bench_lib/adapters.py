"""How this project's functions are called: the only place that knows their names, at this commit and at a baseline.

A call here has the tensors that get a gradient, ``(logits,)`` or ``(hidden, weight)``, and then what its loss takes.
``outputs=`` asks for more than the loss or the log-probabilities, and ``group=`` is the ranks', everywhere.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from bench_lib.cases import OURS, TOP, TOP_P

Tensors = tuple[Tensor, ...]
MOST_WEIGHT = 1.2  # of an objective's importance weights


class Names:
    """Calls of a package's functions; its ``Head`` and ``TopKTeacher`` are its own."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def cross_entropy(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        of = self.package.linear_cross_entropy if len(tensors) == 2 else self.package.vocab_parallel_cross_entropy
        return of(*tensors, labels, **options)

    def log_probs(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        of = self.package.linear_token_log_probs if len(tensors) == 2 else self.package.token_log_probs
        return of(*tensors, labels, **options)

    def distillation(self, tensors: Tensors, teacher: Any, **options: Any) -> Any:
        if len(tensors) == 2:
            heads = self.package.Head(*tensors), self.package.Head(*teacher)
            return self.package.linear_distillation_loss(*heads, **options)
        return self.package.distillation_loss(*tensors, teacher, **options)

    def objective(
        self,
        tensors: Tensors,
        labels: Tensor,
        advantage: Tensor,
        old: Tensor,
        *,
        group: Any,
        in_two_steps: bool = False,
        has_entropy: bool = True,
    ) -> Tensor:
        """:func:`cispo` inside the head, or of log-probabilities that come first."""
        options: dict[str, Any] = {"outputs": ("entropy",) if has_entropy else (), "group": group}
        tokens = {"advantage": advantage, "old": old}
        if in_two_steps:
            found = self.log_probs(tensors, labels, **options)
            return cispo(found.log_probs, entropy=found.entropy, **tokens).mean()
        loss: Tensor = self.package.linear_objective(*tensors, labels, cispo, tokens=tokens, **options)[0]
        return loss

    def top_k(self, tensors: Tensors, ids: Tensor, log_probs: Tensor, **options: Any) -> Any:
        teacher = self.package.TopKTeacher(ids, log_probs, "ignore")
        return self.package.distillation_loss(*tensors, teacher, **options)

    def given_ids(self, tensors: Tensors, ids: Tensor, log_probs: Tensor, **options: Any) -> Any:
        return (self.log_probs(tensors, ids, **options) * log_probs).sum(-1)

    def sampled(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        """The entropies alone: most labels are none that a sampler takes."""
        threshold = self.package.sampling_threshold(*tensors, top_k=TOP, top_p=TOP_P, group=options.get("group"))
        return self.log_probs(tensors, labels, threshold=threshold, outputs=("entropy",), **options).entropy


def cispo(log_probs: Tensor, advantage: Tensor, old: Tensor, entropy: Tensor | None = None) -> Tensor:
    """MiniMax-M1's objective (arXiv:2506.13585) of each token, with an entropy bonus if the entropies are known."""
    weight = (log_probs.detach() - old).exp().clamp(max=MOST_WEIGHT) * advantage
    loss = -weight * log_probs
    return loss if entropy is None else loss - 0.01 * entropy


@cache
def baseline_package(checkout: Path) -> Any:
    """The package of another checkout, imported under a name of its own."""
    name = f"baseline_{OURS}"
    parent = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / OURS, parent / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (parent / name).rglob("*.py"):
        source.write_text(source.read_text().replace(OURS, name))
    sys.path.insert(0, str(parent))
    return importlib.import_module(name)
