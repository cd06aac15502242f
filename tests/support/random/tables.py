"""The configurations of random calls: for each public function a covering array of its options, sizes and layouts.

A configuration decides which kernels run, so that a GPU compiles a bounded number of them. The rest is drawn for each
call by ``random.calls``.
"""

import functools
import itertools
from collections import Counter
from typing import Any

import torch

from tests.support.cases.pairs import covering

Case = dict[str, Any]
TENSOR = "a tensor"  # drawn for each call
WIDTHS = ("a tile", "tiles", "medium", "large")
FEWER_THAN_RANKS = "fewer than ranks"  # or one more: cut as torch.chunk cuts, so that the last ranks have no columns
IN_FORWARD = ("contiguous", "transposed")  # no views, which in_forward refuses
LAYOUTS = ("contiguous", "gaps", "sliced", "transposed", "offset", "expanded", "columns", "leaf")
BESIDE = ("contiguous", "gaps", "transposed", "offset", "expanded", "columns")
PLACE = {
    "width": WIDTHS,
    "ragged": (False, True),  # rows that are no whole lines of 128 bytes
    "padding": ("none", "vectors", "odd"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
}
LOGITS = {**PLACE, "layout": LAYOUTS, "ranks": (1, 2, 3)}
OF_A_LOSS = (
    (),
    ("predictions",),
    ("entropy", "lse"),
    ("lse", "predictions"),
    ("sum_sq_probs", "mean_logit"),
)
UPSTREAM = ("random", "zero first", "expanded", "strided", "one")
OF_LOSS = {"upstream": UPSTREAM, "reduction": ("mean", "sum", "none"), "num_items": (None, 7, TENSOR)}
MATHS = {
    "label_smoothing": (0.0, 0.1),
    "class_weight": (None, "whole", "columns"),
    "z_loss": (0.0, 0.02),
    "softcap": (None, 10.0),
    "logit_scale": (1.0, 0.4),
    "outputs": OF_A_LOSS,
    "int32": (False, True),  # labels
    "check_labels": (False, True),
    "ignore_index": (-100, 2),
}
OUTPUTS = (
    (),
    ("lse",),
    ("entropy",),
    ("sum_sq_probs",),
    ("mean_logit",),
    ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions"),
)
OF_LOG_PROBS = {
    "upstream": UPSTREAM,
    "temperature": (1.0, 0.7, TENSOR),
    "softcap": (None, 10.0),
    "logit_scale": (1.0, 0.4),
    "outputs": OUTPUTS,
    "threshold": (False, True),
    "n_ids": (None, 2, 7),
    **{name: MATHS[name] for name in ("int32", "check_labels", "ignore_index")},
}
OF_HEAD = {
    **PLACE,
    "autocast": (False, True),
    "bias": (False, True),
    "main_grad": (False, True),
    "trains": ("both", "hidden", "head"),
    "chunks": ("auto", "tokens", "bytes"),
    "logits_dtype": (None, torch.float32),
    "valid_tokens": (False, True),
    "reduce_hidden_grad": (True, False),
}
MODES = ("auto", "in_backward", "out_of_place")
OF_TEACHER = {
    **OF_LOSS,
    "temperature": (1.0, 2.5),
    "labels": (False, True),
    **{name: MATHS[name] for name in ("int32", "check_labels", "ignore_index")},
}
DIVERGENCE = {"divergence": ("forward", "reverse", "js"), "hard_weight": (0.0, 0.3, 1.0)}
OF_OTHER = {"other_dtype": (torch.bfloat16, torch.float32), "other_layout": BESIDE}
OF_TE = {
    **LOGITS,
    "padding": ("none",),
    "layout": ("contiguous", "sliced", "transposed", "offset", "expanded"),
    "upstream": UPSTREAM,
}
OF_TE |= {
    "label_smoothing": (0.0, 0.1),
    "reduce_loss": (False, True),
    "int32": (False, True),
    "ignore_index": (-100, 2),
}

FACTORS: dict[str, Case] = {
    "vocab_parallel_cross_entropy": {
        **LOGITS,
        **OF_LOSS,
        **MATHS,
        "gradient": (*MODES, "in_forward"),
        "is_module": (False, True),
    },
    "one_pass": {
        "width": ("large", "one launch"),
        "ragged": (False, True),
        "padding": ("none",),
        "dtype": PLACE["dtype"],
        "layout": IN_FORWARD,
        "ranks": (1,),
        "upstream": UPSTREAM,
        "reduction": ("mean", "sum"),
        "num_items": (None, 7, TENSOR),
        "int32": MATHS["int32"],
        "class_weight": MATHS["class_weight"],
        "z_loss": MATHS["z_loss"],
        "logit_scale": MATHS["logit_scale"],
        "outputs": ((), ("lse",)),
        "gradient": ("in_forward",),
    },
    "token_log_probs": {**LOGITS, **OF_LOG_PROBS, "gradient": MODES},
    "linear_cross_entropy": {
        **OF_HEAD,
        **OF_LOSS,
        **MATHS,
        "gradient": ("auto", "in_backward", "in_forward"),
        "is_module": (False, True),
    },
    "linear_token_log_probs": {
        **OF_HEAD,
        **OF_LOG_PROBS,
        "in_objective": (False, True),
        "teacher": (None, "forward", "reverse", "js"),
    },
    "distillation_loss": {**LOGITS, **OF_TEACHER, **OF_OTHER, **DIVERGENCE, "gradient": MODES},
    "linear_distillation_loss": {**OF_HEAD, **OF_TEACHER, **DIVERGENCE, "in_linear_objective": (False, True)},
    "parallel_cross_entropy": {**OF_TE, "overwrite_input": (None, False, True)},
    "cross_entropy_forward": {**OF_TE, "is_cg_capturable": (False, True)},
}
ALL_OF_ONE_PASS = {
    "ragged": False,
    "width": "one launch",
    "class_weight": "whole",
    "z_loss": 0.02,
    "logit_scale": 0.4,
    "outputs": ("lse",),
}
MEAN = {
    "reduction": "mean",
    "num_items": None,
    "class_weight": None,
    "ranks": 1,
    "ragged": False,
    "width": "large",
    "dtype": torch.float32,
    "layout": "contiguous",
    "gradient": "auto",
}
LABELS_ALONE = {"n_ids": None, "threshold": False, "ranks": 1, "width": "medium", "layout": "contiguous"}
# What no pair of values brings about: all of one_pass together, and what tests/test_launches.py asks for.
TRIPLES = (
    ("distillation_loss", {"divergence": "js", "ranks": 3, "ragged": False, "padding": "vectors", "beta": 0.1}),
    ("distillation_loss", {"divergence": "js", "ranks": 3, "ragged": False, "padding": "none", "temperature": 2.5}),
    ("token_log_probs", {"outputs": ("entropy",), "ranks": 1, "padding": "odd"}),
    ("token_log_probs", {**LABELS_ALONE, "threshold": True, "outputs": (), "ragged": False, "padding": "none"}),
    ("token_log_probs", {**LABELS_ALONE, "outputs": ("sum_sq_probs",), "ragged": True, "padding": "odd"}),
    ("one_pass", ALL_OF_ONE_PASS),
    ("vocab_parallel_cross_entropy", {**MEAN, "padding": "none", "label_smoothing": 0.1}),
    *(("vocab_parallel_cross_entropy", {**MEAN, "padding": padding}) for padding in ("odd", "none")),
)


def allowed(case: Case) -> bool:
    """Whether no two chosen values of a configuration exclude each other."""

    def both(**values: Any) -> bool:
        return all(name in case and case[name] == value for name, value in values.items())

    def any_of(name: str, *values: Any) -> bool:
        return name in case and case[name] in values

    is_weighted = any_of("class_weight", "whole", "columns")
    return not (
        ((is_weighted or both(threshold=True)) and "mean_logit" in case.get("outputs", ()))
        or (any_of("n_ids", 2, 7) and (case.get("outputs") or both(threshold=True) or case.get("teacher")))
        or (both(in_objective=False) and case.get("teacher"))
        or (both(reduction="none") and any_of("num_items", 7, TENSOR))
        or (
            both(reduction="none", gradient="in_forward", is_module=True) and "layout" not in case
        )  # expected_grad_output
        or (both(gradient="in_forward") and "layout" in case and case["layout"] not in IN_FORWARD)
        or (both(labels=False) and any_of("hard_weight", 0.3, 1.0))
        or (both(labels=False) and both(int32=True))
        or (both(trains="hidden", main_grad=True))
        or both(in_linear_objective=True, reduction="none")
        or (both(autocast=True) and any_of("dtype", torch.bfloat16, torch.float16))
    )


@functools.cache
def configurations() -> list[tuple[str, Case]]:
    """Every configuration with its function, the functions in turn."""
    arrays = [[(name, case) for case in covering(allowed, **factors)] for name, factors in FACTORS.items()]
    arrays.append([(name, {**dict(arrays[list(FACTORS).index(name)])[name], **values}) for name, values in TRIPLES])
    rounds = itertools.zip_longest(*arrays)
    return [each for one_of_each in rounds for each in one_of_each if each is not None]


@functools.cache
def positions() -> list[int]:
    """How many configurations of the same function and teacher stand before each."""
    before: Counter[tuple[str, Any]] = Counter()
    found = []
    for name, case in configurations():
        found.append(before[name, case.get("divergence")])
        before[name, case.get("divergence")] += 1
    return found


def changes_of(seed: int, ranks: tuple[int, ...]) -> Case:
    """What a head's configuration has besides, for calls on so many ranks in turn."""
    turn, index = divmod(seed, len(configurations()))
    _, case = configurations()[index]
    n_ranks = ranks[(positions()[index] + turn) % len(ranks)]
    may_cut = case["reduce_hidden_grad"] and not case.get("valid_tokens") and "hard_weight" not in case
    return {"ranks": n_ranks, **({"sequence_parallel": True} if n_ranks > 1 and may_cut else {})}
