"""This project's own rows as providers, at this commit and at another."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_lib.adapters import Names, baseline_package
from bench_lib.cases import BASELINE, OURS, Case, Inputs
from bench_lib.peers import Step
from bench_lib.providers import OUR_PACKAGE, Provider, through_autograd
from bench_lib.rows import Row, called, rows_of


def row_providers(case: Case, baseline: Path | None = None) -> list[Provider]:
    """Every row of a case; each is followed by the same call of the checkout ``baseline``, if there is one."""
    packages = {"": importlib.import_module(OURS)}
    if baseline is not None:
        packages[BASELINE] = baseline_package(baseline)
    found = []
    interpreted = {"impl": "triton"} if case.kind == "host" and not torch.cuda.is_available() else {}
    for name, row in rows_of(case).items():
        row = row._replace(options=row.options | interpreted)
        known = {suffix: package for suffix, package in packages.items() if row.is_known_to(package)}
        for suffix, package in known.items():
            losses_of = partial(_row_losses, row, Names(package))
            found.append(
                Provider(
                    name + suffix,
                    partial(_row_step, losses_of),
                    OURS,
                    OUR_PACKAGE,
                    takes="head" if case.is_head else "logits",
                    returns=row,
                    is_step=True,
                    is_whole=not row.options.get("sequence_parallel"),
                    baseline=f"{name}{BASELINE}" if BASELINE in known and not suffix else None,
                )
            )
    return found


def _row_step(losses_of: Callable[[Inputs, str, Any], Any], ours: Any) -> Step:
    return through_autograd(losses_of)


def _row_losses(row: Row, names: Any, inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
    return called(row, names, inputs, group)
