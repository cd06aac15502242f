"""A teacher inside an objective: the divergence of each token is one more quantity, times any weight."""

import pytest
import torch

from tests.support.cases import teachers
from tests.support.cases.pairs import covering
from tests.support.cases.teachers import models
from tests.support.ranks.in_turn import in_turn

CASES = covering(
    lambda case: not (
        (case.get("labels", 0) is None and case.get("rows"))
        or (case.get("form") == "main_grad" and "weight" in case.get("frozen", ()))
        or (case.get("form") == "sequence_parallel" and case.get("ranks") == 1)
        or (case.get("logits_dtype") and case.get("dtypes", "bf16, bf16").startswith("fp32"))
    ),
    divergence=(("forward", 0.5), ("reverse", 0.5), ("js", 0.5), ("js", 0.1), ("js", 0.8)),
    caps=((None, 1.0, None, 1.0), (9.0, 0.7, 7.0, 1.3), (None, 0.7, 7.0, 1.0), (9.0, 1.0, None, 1.3)),
    temperatures=((1.0, 1.0), (0.8, 2.0), (1.5, 1.0)),
    labels=("some", "all", None),
    rows=((), ("temperature",), ("threshold",), ("temperature", "threshold")),
    ranks=(1, 2, 4),
    columns=("even", "padded", "uneven"),
    form=("", "main_grad", "sequence_parallel"),
    frozen=((), ("hidden",), ("weight", "bias")),
    divisor=("mean", "sum", 2.5),
    chunk_size=("auto", 4),
    dtypes=("fp32, fp32", "fp32, bf16", "bf16, bf16", "bf16, fp32"),
    logits_dtype=(None, torch.float32),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.quick(6)
@pytest.mark.interpreted(len(CASES))
@pytest.mark.parametrize("case", CASES, ids=[f"{case['divergence'][0]}-{n}" for n, case in enumerate(CASES)])
def test_every_option(impl_device, case):
    made = models(*(DTYPES[name] for name in case["dtypes"].split(", ")))

    def on_rank(rank, group):
        with torch.autograd.set_multithreading_enabled(False):  # backward may wait for the other ranks' threads
            return teachers.call(case, made, impl_device, rank, group)

    teachers.check(case, made, in_turn(case["ranks"], on_rank))
