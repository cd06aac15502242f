"""Calls of the fused loss on R ranks: sizes, ways, and what is sent."""

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.support.cases import linear
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.ranks.case import Case, Result, n_statistics

COLUMNS, ROWS = 20, 6
WAYS = {name: linear.WAYS[name] for name in ("none", "mean", "sum", "sum, in_backward")}
WAYS["sum"] = WAYS["sum"] | {"num_items": 7}
BY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def check_collectives(case: Case, results: Sequence[Result], extra: int = 0) -> None:
    """``K = 3 + extra`` statistics a token are gathered once, and the gradient of each chunk is reduced once.

    By chunks where forward computes gradients, otherwise statistics all at once and the rest in backward.
    Tokens that are ignored may be left out: there should be none.
    """
    rows, hidden = case.inputs.labels.numel(), case.inputs.hidden
    size = min(case.options.get("chunk_size", rows), rows)
    chunks = [min(size, rows - start) for start in range(0, rows, size)]
    in_forward = case.options.get("gradient") == "in_forward"
    gathers = Counter(("_allgather_base_", 4 * (3 + extra) * n) for n in (chunks if in_forward else [rows]))
    reduces = Counter(("allreduce_", n * hidden.shape[-1] * hidden.element_size()) for n in chunks)
    if not case.options.get("reduce_hidden_grad", True) or "hidden" in case.frozen:
        reduces.clear()
    if len(results) == 1:
        gathers.clear()
        reduces.clear()
    for result in results:
        assert {call.ranks for call in result.in_forward + result.in_backward} <= {tuple(range(len(results)))}
        forward, backward = (
            Counter((call.name, call.nbytes) for call in calls) for calls in (result.in_forward, result.in_backward)
        )
        assert forward == (gathers + reduces if in_forward else gathers)
        assert backward == (Counter() if in_forward else reduces)


def check_sent(case: Case, results: Sequence[Result], leaves_out: bool) -> None:
    """Bytes of each kind of collective, over the chunks.

    Args:
        leaves_out: tokens that are ignored, as a CPU does that counts them.
    """
    options, (hidden, _, labels, _) = case.options, case.inputs
    kept = labels.numel()
    in_forward = options.get("gradient") == "in_forward"
    counts = "reduction" not in options or options["reduction"] == "mean"
    sum_of_weights = 4 * (in_forward and "class_weight" in options and counts and "num_items" not in options)
    expected = Counter()
    if options.get("sequence_parallel"):
        expected["_allgather_base_"] = (2 - in_forward) * hidden.nbytes // len(results)
        expected["_reduce_scatter_base_"] = hidden.nbytes
    else:
        n_valid = int((labels != options.get("ignore_index", IGNORE_INDEX)).sum())
        kept = min(options.get("valid_tokens") or (n_valid if leaves_out else kept), kept)
        expected["allreduce_"] = (
            options.get("reduce_hidden_grad", True) * kept * hidden.shape[-1] * hidden.element_size()
        )
    expected["_allgather_base_"] += sum_of_weights + 4 * n_statistics(case) * kept
    for result in results:
        sent = Counter()
        for call in result.in_forward + result.in_backward:
            sent[call.name] += call.nbytes
        assert sent == (+expected if len(results) > 1 else Counter())
