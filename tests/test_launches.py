"""The random calls launch every kernel with every option over rows of every kind, in both lanes.

``support/kernels/launches.py`` reads from the kernels what there is to launch. Random calls check the numbers, with
another kind of programs in each round. Here nothing is launched, so wide calls need no GPU.
"""

import warnings
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.cases.flat import linear_objective
from tests.support.kernels.launch_shapes import ONE, SEVERAL, programs
from tests.support.kernels.launches import Entry, recorded, wanted
from tests.support.random.calls import KINDS, Where, run_call
from tests.support.random.tables import configurations
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce import (
    Teacher,
    VocabShard,
    distillation_loss,
    largest,
    sampling_threshold,
    vocab_parallel_cross_entropy,
)
from vocab_parallel_ce.api import sampling

ONE_PASS = "one_pass_kernel"
# What no call can launch, and why; None stands for all.
NEVER = {
    ("element_mul_kernel", None, "padded"): "a gradient of padded columns is 0 already, and it scales whole rows",
    ("second_kernel of divergences", "loss_options.reverse", None): "js alone has a second exchange",
    (ONE_PASS, None, "padded"): "it leaves padded columns to other kernels",
}
NEVER |= {
    (ONE_PASS, f"loss_options.{name}", None): "in_forward has no such option, or one_pass lacks it"
    for name in (
        "entropy",
        "sum_sq_probs",
        "mean_logit",
        "predictions",
        "smoothing",
        "softcap",
        "negated",
    )
}
NEVER |= {
    (f"{kernel}_kernel", f"loss_options.{name}", None): "k ids have no such option"
    for kernel in ("ids_statistics", "ids_gradient")
    for name in ("smoothing", "z_loss", "class_weight", "sum_sq_probs", "mean_logit", "predictions", "lse")
}
OUTPUTS_OF_LABELS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
OF_LABELS_ALONE = ("temperature", "threshold", "valid_rows", "total", *OUTPUTS_OF_LABELS)
OF_LABELS_ALONE += tuple(f"grad_{name}" for name in OUTPUTS_OF_LABELS)
NOT_BESIDE = {
    "divergences": ("class_weight", "divergence", "grad_divergence", *OF_LABELS_ALONE),
    "lanes": ("other", "second", "stats", "divergence", "grad_divergence"),
    "teacher_rows": ("class_weight", "divisor", "valid_rows", "total"),
}
NEVER |= {
    (f"{kernel}_kernel of {loss}", tensor, None): "the loss has no such tensor"
    for kernel in ("statistics", "part", "second", "outputs", "gradient")
    for loss, tensors in NOT_BESIDE.items()
    for tensor in tensors
}
NEVER |= {
    ("part_kernel of lanes", f"ranks={n}", None): "parts of a second exchange alone merge the ranks" for n in (2, 3)
}
NEVER |= {
    (f"{kernel}_kernel of teacher_rows", f"loss_options.{name}", None): "log-probabilities have no such option"
    for kernel in ("statistics", "part", "second", "outputs", "gradient")
    for name in ("class_weight", "smoothing", "z_loss")
}
NEVER |= {
    ("statistics_kernel of teacher_rows", name, None): "a hard weight over logits has no other outputs"
    for name in OUTPUTS_OF_LABELS
}
NEVER[("second_kernel of teacher_rows", "loss_options.reverse", None)] = "js alone has a second exchange"
NEVER[("second_kernel of lanes", None, None)] = "labels have one exchange"


def is_never(entry: Entry) -> bool:
    kernel, option, rows = entry
    return bool({(kernel, option, None), (kernel, None, rows), (kernel, None, None)} & NEVER.keys())


def launched(where: Where) -> set[Entry]:
    """What the calls of every configuration launch, once each."""
    with recorded() as entries, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, kind in product(range(len(configurations())), KINDS[where.small]):
            with suppress(AssertionError):  # nothing has been computed
                run_call(seed, where, kind)
        calls_of_teachers(where)  # no random call has a teacher's softcap beside labels
        calls_of_rare_rows(where)  # nor does one of them come to these
        calls_of_samplers(where)
    return entries


def calls_of_teachers(where: Where) -> None:
    """Objectives of a teacher with every option, over rows of every kind, with labels and without."""
    for columns, padding in ((64, 0), (61, 0), (64, 3), (8192, 0), (8190, 3)):
        for ranks, kind, named in product((1, 2, 3), KINDS[where.small], ("forward", "reverse", "js")):
            for has_labels, has_threshold in ((True, True), (True, False), (False, False)):
                of = columns, padding, ranks, named, has_labels, has_threshold
                with suppress(AssertionError), programs(kind):
                    in_turn(ranks, partial(call_of_teacher, where, *of))


def call_of_teacher(
    where: Where, columns: int, padding: int, ranks: int, kind: str, labels: bool, least: bool, rank: int, group: Any
) -> None:
    hidden, weight = (torch.ones(n, 4, device=where.device, requires_grad=True) for n in (2, columns))
    teacher = Teacher(hidden.detach(), weight.detach(), None, 9.0, 0.7, 2.0, kind, 0.05 if kind == "js" else 0.5)
    shard = VocabShard(rank * columns, (rank + 1) * columns, ranks * columns - padding)
    options = {"softcap": 9.0, "logit_scale": 0.7, "group": group, "vocab_size": shard, "impl": "triton"}
    if labels:
        of_row = torch.full((2,), 0.5, device=where.device)
        options |= {"temperature": of_row, "outputs": ("entropy", "lse", "sum_sq_probs", "predictions")}
        options |= {"threshold": of_row} if least else {"outputs": (*options["outputs"], "mean_logit")}

    def objective(log_probs=0.0, *, divergence, entropy=0.0, lse=0.0, **_):
        return divergence + log_probs + entropy + lse

    ids = torch.zeros(2, dtype=torch.int64, device=where.device) if labels else None
    linear_objective(hidden, weight, ids, objective, teacher=teacher, check_objective=False, **options)
    if labels:  # over logits, whose statistics' launch may store the outputs
        logits = torch.zeros(2, columns, device=where.device, requires_grad=True)
        ways = {"divergence": kind, "beta": teacher.beta, "hard_weight": 0.5 * least, "reduction": "none"}
        ways |= {"group": group, "vocab_size": shard, "impl": "triton", "labels": ids}
        distillation_loss(logits * 1, logits.detach(), **ways).sum().backward()


def calls_of_rare_rows(where: Where) -> None:
    """Losses of two tensors whose outputs the launch of the statistics stores: of several tiles, of a padded row.

    And rows of clusters that are no whole vectors.
    """
    x, y = torch.zeros(2, 2, 8192, device=where.device)
    distillation_loss(x, y, reduction="none", impl="triton")
    distillation_loss(x, y, reduction="none", impl="triton", vocab_size=8190)
    if not where.small:
        logits = torch.zeros(100, 60_003, device=where.device, requires_grad=True) * 1
        labels = torch.zeros(100, dtype=torch.int64, device=where.device)
        vocab_parallel_cross_entropy(logits, labels, gradient="in_forward", impl=where.impl)


def calls_of_samplers(where: Where) -> None:
    """What finds the largest logits has no impl: by itself it is plain PyTorch on a CPU."""
    logits = torch.zeros(2, 9000, device=where.device)
    of_z = {"softcap": 9.0, "logit_scale": 0.4, "temperature": torch.ones(2, device=where.device)}
    with (
        patch.object(largest, "has_kernels", lambda rows: True),
        patch.object(sampling, "has_kernels", lambda rows: True),
    ):
        for options in ({"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.5, **of_z}):
            sampling_threshold(logits, **options)


def check(entries: set[Entry], left_out: set[str]) -> None:
    asked = {entry for entry in wanted() if entry.kernel not in left_out}
    missing = sorted(entry for entry in asked - entries if not is_never(entry))
    assert not missing, "\n".join(map(str, missing))
    assert not [entry for entry in entries & asked if is_never(entry)], "launched: no exception any more"


@pytest.mark.interpreter
def test_small_calls_launch_everything_that_can_be_interpreted():
    check(launched(Where("cpu", "triton", small=True)), {ONE_PASS})


@pytest.mark.cuda
def test_wide_calls_launch_everything():
    check(launched(Where("cuda", "auto", small=False)), set())


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("divergence", "cut"),
    (
        ("forward", ["part", "statistics", "gradient"]),
        ("js", ["part", "statistics", "part", "second", "outputs", "gradient"]),
    ),
)
def test_parts_are_one_more_launch_of_each_exchange(divergence, cut):
    """With other ranks the second exchange has a launch of its own anyway. Without one no launch of outputs is left."""
    from vocab_parallel_ce.kernels.launch import Launch

    logits, teacher = (torch.randn(2, 8192, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for kind, expected in ((ONE, [name for name in cut if name not in ("part", "second")]), (SEVERAL, cut)):
        leaf = logits.clone().requires_grad_()
        with programs(kind), patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launch:
            loss = distillation_loss(leaf * 1, teacher, divergence=divergence, reduction="none", impl="triton")
            loss.sum().backward()
        names = [call.args[0].kernel.fn.__name__ for call in launch.call_args_list]
        assert [name.removesuffix("_kernel") for name in names] == expected


@pytest.mark.interpreter
@pytest.mark.parametrize(("rows", "expected"), ((1024, ["statistics"]), (1025, ["statistics", "outputs"])))
def test_the_outputs_of_few_unreduced_rows_have_no_launch(rows, expected):
    from vocab_parallel_ce.kernels.launch import Launch

    logits, labels = torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)
    with patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launch:
        losses = vocab_parallel_cross_entropy(logits, labels, reduction="none", impl="triton")
    assert [call.args[0].kernel.fn.__name__.removesuffix("_kernel") for call in launch.call_args_list] == expected
    torch.testing.assert_close(losses, torch.full((rows,), 8.0).log())
