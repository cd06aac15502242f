"""Which statistics are sent: 4 bytes a row and rank each."""

import pytest

from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import PLAIN, LossOptions


@pytest.mark.reference
def test_only_what_options_need_is_sent():
    names = ("row_max", "others_sum", "label_logit")
    assert PLAIN.statistics == LossOptions(7, 0.0, 0.1, 2.0, 30.0).statistics == names
    assert LossOptions(smoothing=0.1).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(entropy=True).statistics == (*names, "exp_shifted_sum")
    assert LossOptions(predictions=True).statistics == (*names, "argmax")
    assert LossOptions(class_weight=True).statistics == (*names, "label_weight")
    assert LossOptions(lse=True).statistics == names
    assert LossOptions(mean_logit=True).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(sum_sq_probs=True).statistics == (*names, "sum_exp_sq")
    every = LossOptions(-100, 0.1, 0.01, 0.5, 20.0, *[True] * 6)
    assert every.statistics == spec.RowStats._fields
