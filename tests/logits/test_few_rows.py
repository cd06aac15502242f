"""``gradient="in_forward"`` of few rows is the default's launches and one; ``one_pass`` takes more rows only."""

from unittest.mock import patch

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases.inputs import batch
from tests.support.kernels.launch_shapes import forget_plans
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import one_pass, plan, run, vocab_parallel_cross_entropy

pytestmark = pytest.mark.interpreter
FEWEST = 3  # rows of one_pass here


def launches(gradient, logits, labels, grad_output, **options):
    """(loss, gradient), and the names of the kernels that were launched."""
    from vocab_parallel_ce.kernels.launch import Launch

    leaf = logits.clone().requires_grad_()
    with patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launch:
        loss = vocab_parallel_cross_entropy(leaf * 1, labels, gradient=gradient, impl="triton", **options)
        (grad,) = torch.autograd.grad(loss, leaf, grad_output)
    return (loss.detach(), grad), [call.args[0].kernel.fn.__name__ for call in launch.call_args_list]


@pytest.mark.interpreted(4)
@pytest.mark.parametrize(
    "options",
    ({"z_loss": 0.1}, {"reduction": "sum"}, {"reduction": "sum", "num_items": 7}, {"ignore_index": 3}),
    ids=str,
)
def test_a_mode_by_name_is_no_more_than_the_default_and_a_scale(options):
    """A sum of the losses by PyTorch was a launch that waits, 2 us of 13; and it had another order."""
    logits, labels = batch("mixture", rows=5, vocab_size=520, dtype=torch.bfloat16)
    one = torch.ones(())
    default, by_default = launches("in_backward", logits, labels, one, **options)
    found, by_name = launches("in_forward", logits, labels, one, **options)
    assert by_default == ["statistics_kernel", "outputs_kernel", "gradient_kernel"]
    assert by_name == [*by_default, "element_mul_kernel"]
    assert torch.equal(found[1], default[1]) and torch.equal(found[0], default[0])
    oracle, peer = (of(logits, labels, **options) for of in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(found[0], oracle.loss, peer.loss)
    assert_within_budget(found[1], oracle.grad, peer.grad)


@pytest.mark.parametrize("counted_rows", (4, 5))
def test_more_rows_than_the_outputs_count_are_counted_by_pytorch(monkeypatch, counted_rows):
    from vocab_parallel_ce.kernels import outputs

    monkeypatch.setattr(outputs, "COUNTED_ROWS", counted_rows)
    forget_plans()
    logits, labels = batch("some_ignored", rows=5, vocab_size=520, dtype=torch.bfloat16)
    labels[0] = -100
    with patch.object(run, "divisor_of", side_effect=run.divisor_of) as divisor_of:
        (loss, grad), _ = launches("in_backward", logits, labels, torch.ones(()))
    forget_plans()
    assert divisor_of.call_count == (counted_rows < 5)
    oracle, peer = (of(logits, labels) for of in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(grad, oracle.grad, peer.grad)


@pytest.fixture
def one_launch(monkeypatch):
    """What a GPU would select; returns the rows of each ``one_pass``, which does what ``triton`` does."""
    from vocab_parallel_ce import kernels
    from vocab_parallel_ce.one_pass import kernel

    calls = []

    def bound(launchers, loss, options, shard, key, settings):
        return one_pass.bind(launchers, loss, options, shard, key, settings._replace(impl="auto"))

    def in_one_launch(logits, beside, divisor, outputs, *, counted, options):
        n_rows = beside.labels.shape[0]
        calls.append(n_rows)
        shard = plan.VocabShard(0, logits.shape[-1], logits.shape[-1])
        stats = logits.new_empty(1, n_rows, len(options.statistics), dtype=torch.float32)
        count = torch.empty(1, dtype=torch.int32) if counted else None
        loss = kernels.label_rows.label_loss(shard, options)
        kernels.rows.statistics_launcher(loss)(logits, beside, (stats,), 0)
        kernels.outputs.outputs_launcher(loss)((stats,), beside, divisor, outputs, None, count)
        divisor = divisor if count is None else count
        kernels.outputs.gradient_launcher(loss)(logits, beside, (stats,), divisor, run.GradOutputs(), logits)

    monkeypatch.setattr(plan, "bind", bound)
    monkeypatch.setattr(one_pass, "why_not", lambda *call: None if call[-1].gradient == "in_forward" else "in_forward")
    monkeypatch.setattr(one_pass, "FEWEST_ROWS", ((1 << 62, FEWEST),))
    monkeypatch.setattr(kernel, "one_pass", in_one_launch)
    forget_plans()
    yield calls
    forget_plans()


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_one_launch_from_the_fewest_rows_on(one_launch, reduction):
    """A loss per row has the order of one launch whatever the number of rows."""
    for n_rows in (FEWEST - 1, FEWEST, FEWEST + 2):
        logits, labels = batch("mixture", rows=n_rows, vocab_size=520, dtype=torch.bfloat16)
        options = {"reduction": reduction}
        grad_output = torch.ones(n_rows if reduction == "none" else ())
        (loss, grad), _ = launches("in_forward", logits, labels, grad_output, **options)
        oracle, peer = (of(logits, labels, **options) for of in (cross_entropy_fp64, cross_entropy_same_dtype))
        assert_within_budget(loss, oracle.loss, peer.loss)
        assert_within_budget(grad, oracle.grad, peer.grad)
    rows = ([FEWEST - 1] if reduction == "none" else []) + [FEWEST, FEWEST + 2]
    assert one_launch == rows


def test_each_chunk_of_a_head_by_its_own_rows(one_launch):
    """Ten tokens in chunks of 4, of which the last has 2."""
    linear.check(("triton", "cpu"), linear.many_tokens(10, 520), chunk_size=4)
    assert one_launch == [4, 4]
