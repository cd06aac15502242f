"""Edges of the options: each gave a wrong number, a crash or a message without a subject once."""

from __future__ import annotations

import numpy
import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.oracle import (
    cross_entropy_fp64,
    cross_entropy_same_dtype,
    metrics_fp64,
    token_outputs_fp64,
    token_outputs_same_dtype,
)
from vocab_parallel_ce import (
    VocabParallelCrossEntropy,
    VocabShard,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from vocab_parallel_ce.pipeline import _settled_call

INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min


def _loss_and_grad(impl_device, logits, labels, **options):
    impl, device = impl_device
    leaf = logits.to(device).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels.to(device), impl=impl, **options)
    loss.backward(torch.ones_like(loss))
    return loss.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("ignore_index", [2**40, -(2**63)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_ignore_index_that_labels_cannot_hold_ignores_nothing(impl_device, ignore_index, dtype):
    """2**40 wrapped to int32 is 0: torch compares a scalar in the tensor's dtype."""
    impl, device = impl_device
    logits, labels = torch.randn(4, 12), torch.arange(4)
    expected = torch.nn.functional.cross_entropy(logits.double(), labels)
    loss, metrics = vocab_parallel_cross_entropy(
        logits.to(device),
        labels.to(device, dtype),
        ignore_index=ignore_index,
        impl=impl,
        check_labels=True,
        return_metrics=True,
    )
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-6, atol=0)
    right = (logits.argmax(dim=1) == labels).float().mean()
    assert metrics.token_accuracy.item() == right.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_the_z_loss_metric_is_fp32_whatever_num_items_is(impl_device, dtype):
    impl, device = impl_device
    logits, labels = torch.randn(4, 12, device=device), torch.arange(4, device=device)
    num_items = torch.tensor([3.0], device=device).to(dtype)
    options = {"reduction": "sum", "z_loss": 0.5, "return_metrics": True, "impl": impl}
    _, metrics = vocab_parallel_cross_entropy(logits, labels, num_items=num_items, **options)
    expected = 0.5 * (logits.double().logsumexp(dim=1) ** 2).sum() / 3
    assert metrics.z_loss.dtype == torch.float32 and metrics.z_loss.shape == ()
    torch.testing.assert_close(metrics.z_loss.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_items", [0, torch.tensor(0), torch.tensor([0.0])], ids=["int", "int64", "fp32"])
@pytest.mark.parametrize("gradient", ["in_forward", "in_backward", "out_of_place"])
def test_no_items_give_0_whatever_the_rows_hold(impl_device, gradient, num_items):
    """0 times the infinite loss of a masked label is NaN."""
    logits = torch.randn(4, 12)
    logits[0, 0], logits[1, 5], logits[2, 5] = -INF, NAN, INF
    labels = torch.tensor([0, 1, 2, 99])
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.to(impl_device[1])
    options = {"reduction": "sum", "num_items": num_items, "gradient": gradient}
    loss, grad = _loss_and_grad(impl_device, logits, labels, **options)
    assert loss.item() == 0.0 and torch.equal(grad, torch.zeros_like(grad))


def test_smoothing_over_excluded_and_lowest_columns_is_inf(impl_device):
    """-inf first and the lowest number after it: moving a sum of -inf by an infinite distance is NaN."""
    logits = torch.full((1, 5000), -INF)
    logits[:, 2500:4900] = LOWEST
    loss, _ = _loss_and_grad(impl_device, logits, torch.tensor([4000]), label_smoothing=0.1)
    assert loss.item() == INF


HUGE = 3e38
# Products and quotients that leave fp32's range at some logit, and the same caps where none does.
CAPS = {
    "above 1": {"softcap": 30.0, "logit_scale": 2.0},
    "below 1": {"softcap": 30.0, "logit_scale": 0.5},
    "alone": {"softcap": 30.0},
    "tiny cap": {"softcap": 1e-30, "logit_scale": 4.0},
    "tiny cap, huge scale": {"softcap": 1e-30, "logit_scale": 1e30},
    "huge cap": {"softcap": 3e38, "logit_scale": 2.0},
    "huge cap, huge scale": {"softcap": 3e38, "logit_scale": 1e30},
    "huge cap, tiny scale": {"softcap": 1e9, "logit_scale": 1e-36},
}
BY_CAP = pytest.mark.parametrize("options", CAPS.values(), ids=CAPS)


def _huge_rows():
    """Seven columns: equals of both signs, one beyond all others, masked columns, zeros, and usual logits."""
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)) * 3
    logits[0], logits[1] = HUGE, -HUGE
    logits[2, 5], logits[3, :3], logits[4, 1:3] = HUGE, -HUGE, -INF
    logits[4, 4], logits[5], logits[6, ::2] = HUGE, 0.0, 0.0
    return logits, torch.tensor([1, 6, 5, 4, 4, 0, 3, 2])


@BY_CAP
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_cap_bounds_huge_logits_whatever_scales_them(impl_device, options, label_smoothing):
    """A product beyond fp32 was taken for an infinite logit; an infinite ratio made NaN of a logit of 0."""
    logits, labels = _huge_rows()
    if label_smoothing:
        logits[4, 1:3] = 1.0  # smoothing over a masked column is infinite
    if options["softcap"] > 1e30:
        # What differs by z near fp32's largest has a loss beyond it: keep the rows of equals and of small z.
        logits, labels = logits[[0, 1, 5, 7]] * min(1, 1e4 / options["logit_scale"]), labels[[0, 1, 5, 7]]
    options = options | {"reduction": "none", "label_smoothing": label_smoothing}
    loss, grad = _loss_and_grad(impl_device, logits.clone(), labels, **options)
    oracle, peer = (f(logits, labels, **options) for f in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(grad, oracle.grad, peer.grad)


def test_seven_equal_huge_logits_are_uniform(impl_device):
    logits = torch.full((2, 7), HUGE)
    logits[1] *= -1
    options = {"softcap": 30.0, "logit_scale": 2.0, "reduction": "none"}
    loss, grad = _loss_and_grad(impl_device, logits, torch.tensor([3, 3]), **options)
    torch.testing.assert_close(loss, torch.full((2,), 7.0).log(), rtol=1e-6, atol=0)
    assert torch.equal(grad, torch.zeros(2, 7))  # beyond the cap


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("logit_scale", [0.5, 2.0])
def test_a_cap_bounds_no_infinite_logit(impl_device, logit_scale, bad):
    """Beside a huge one; -inf stays excluded."""
    logits = torch.randn(3, 7)
    logits[:, 1], logits[:, 2], logits[1, 4] = HUGE, -INF, bad
    options = {"softcap": 30.0, "logit_scale": logit_scale, "reduction": "none"}
    loss, grad = _loss_and_grad(impl_device, logits, torch.tensor([0, 0, 2]), **options)
    assert loss.isfinite().tolist() == [True, False, False] and loss[1].isnan() and loss[2] == INF
    assert grad[1].isnan().all() and grad[[0, 2]].isfinite().all() and not grad[[0, 2], 2].any()


@BY_CAP
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_log_probs_and_entropies_of_huge_logits(impl_device, options, temperature):
    """A temperature divides the scale and the cap alike."""
    impl, device = impl_device
    logits, labels = _huge_rows()
    if options["softcap"] > 1e30:
        logits, labels, temperature = logits[[0, 1, 5]], labels[[0, 1, 5]], max(temperature, 1.0)
    options = options | {"temperature": temperature}
    leaf = logits.to(device, copy=True).requires_grad_()
    outputs = token_log_probs(leaf * 1.0, labels.to(device), entropy=True, impl=impl, **options)
    grad_output, grad_entropy = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(1))
    grads = (grad_output.to(device), grad_entropy.to(device))
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    given = options | {"grad_output": grad_output, "grad_entropy": grad_entropy}
    oracle, peer = (f(logits, labels, **given) for f in (token_outputs_fp64, token_outputs_same_dtype))
    assert_within_budget(outputs[0], oracle.log_probs, peer.log_probs)
    assert_within_budget(outputs[1], oracle.entropy, peer.entropy)
    assert_within_budget(grad, oracle.grad, peer.grad)


@pytest.mark.parametrize("options", [CAPS["above 1"], CAPS["below 1"], CAPS["alone"]], ids=str)
def test_metrics_of_huge_logits(impl_device, options):
    impl, device = impl_device
    logits, labels = _huge_rows()
    _, metrics = vocab_parallel_cross_entropy(
        logits.to(device), labels.to(device), impl=impl, return_metrics=True, **options
    )
    expected = metrics_fp64(logits, labels, **options)
    # Logits far beyond the cap come to the same z; which of the others is the largest, rounding decides.
    sure = torch.tensor([0, 1, 2, 4, 5])
    assert torch.equal(metrics.predictions.cpu()[sure], expected.predictions[sure])
    torch.testing.assert_close(metrics.lse.double().cpu(), expected.lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite_has_no_finite_gradient(impl_device, bad):
    """Its excluded columns too, in every implementation; its padding stays 0."""
    logits = torch.randn(2, 40)
    logits[0, 3], logits[0, 17] = bad, -INF
    labels = torch.tensor([1, 2])
    _, grad = _loss_and_grad(impl_device, logits, labels, vocab_size=37, reduction="sum")
    assert grad[0, :37].isnan().all() and grad[1].isfinite().all()
    assert torch.equal(grad[:, 37:], torch.zeros(2, 3))


@pytest.mark.reference
@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ((0.0, 12, 12), "shard: start: expected an int, got float"),
        ((0, 12.0, 12), "shard: stop: expected an int, got float"),
        ((0, 12, None), "shard: vocab_size: expected an int, got NoneType"),
        (("0", 12, 12), "shard: start: expected an int, got str"),
        ((torch.tensor(0), 12, 12), "shard: start: expected an int, got Tensor"),
    ],
)
def test_fields_of_a_shard_are_integers(fields, subject):
    shard = VocabShard(*fields)
    with pytest.raises(TypeError, match=f"^{subject}"):
        vocab_parallel_cross_entropy(torch.randn(2, 12), torch.tensor([0, 1]), shard=shard)
    with pytest.raises(TypeError, match=f"^{subject}"):
        VocabParallelCrossEntropy(shard=shard)


def test_fields_of_a_shard_may_be_numpy_integers(impl_device):
    logits, labels = torch.randn(2, 12), torch.tensor([0, 1])
    shard = VocabShard(*map(numpy.int64, (0, 12, 11)))
    loss, _ = _loss_and_grad(impl_device, logits.clone(), labels, shard=shard)
    expected = torch.nn.functional.cross_entropy(logits[:, :11].double(), labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10.0, 1, 2), TypeError, "vocab_size: expected an int"),
        ((10, 5, 2), ValueError, r"rank: must be in \[0, 2\)"),
        ((10, 0, 0), ValueError, "rank: must be in "),
        ((0, 0, 1), ValueError, "vocab_size: must be positive"),
    ],
)
def test_of_rank_refuses_what_is_no_rank_of_a_vocabulary(arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        VocabShard.of_rank(*arguments)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_smoothing": [0.1]}, TypeError, "label_smoothing: expected a number, got list"),
        ({"z_loss": 10**400}, ValueError, "z_loss: must be at least 0 and finite"),
        ({"logit_scale": 1e300}, ValueError, "logit_scale: must be positive and finite"),
        ({"smoothing_formula": "megatron", "vocab_size": 1}, ValueError, "smoothing_formula: 'megatron'"),
        ({"return_metrics": True, "vocab_size": 2**25}, ValueError, "return_metrics: vocab_size"),
        ({"shard": 3}, TypeError, "shard: expected a VocabShard"),
        ({"shard": VocabShard(0, 9, 9), "vocab_size": 9}, ValueError, "shard: has a vocab_size"),
        ({"check_labels": "no"}, TypeError, "check_labels: expected a bool"),
    ],
    ids=str,
)
def test_the_module_refuses_at_construction(options, error, message):
    with pytest.raises(error, match=f"^{message}") as raised:
        VocabParallelCrossEntropy(**options)
    assert raised.value.__context__ is None


@pytest.mark.reference
@pytest.mark.parametrize("temperature", [1e-300, 1e300, 1e-38])
def test_a_temperature_beyond_fp32_is_refused(temperature):
    """Infinite scales would give NaN, without an error."""
    with pytest.raises(ValueError, match="temperature: must be positive and finite in fp32"):
        token_log_probs(torch.randn(2, 12), torch.tensor([0, 1]), temperature=temperature, logit_scale=4.0)


@pytest.mark.reference
@pytest.mark.parametrize("num_items", [torch.tensor(-2), torch.tensor(NAN)])
def test_a_number_of_items_on_the_cpu_is_looked_at(num_items):
    with pytest.raises(ValueError, match="^num_items: must be at least 0"):
        vocab_parallel_cross_entropy(
            torch.randn(2, 12), torch.tensor([0, 1]), reduction="sum", num_items=num_items
        )


@pytest.mark.reference
def test_caches_of_options_are_bounded():
    """A weight or a temperature that is annealed has a new value every step, and shapes change too."""
    pytest.importorskip("triton")
    caches = [_settled_call]
    for name in ("online_softmax", "loss", "cross_entropy", "element_mul", "one_pass"):
        module = pytest.importorskip(f"vocab_parallel_ce.kernels.{name}")
        caches.append(module._launch)
    assert all(cache.cache_info().maxsize for cache in caches)


@pytest.fixture
def settled():
    """The cache of calls, empty before and after."""
    _settled_call.cache_clear()
    yield _settled_call.cache_info
    _settled_call.cache_clear()


CALL = (torch.randn(2, 12), torch.tensor([0, 1]))


@pytest.mark.reference
def test_a_call_like_one_before_is_settled_once(settled):
    for step in range(3):
        vocab_parallel_cross_entropy(CALL[0] + step, CALL[1], z_loss=0.1)
    assert (settled().hits, settled().misses) == (2, 1)
    vocab_parallel_cross_entropy(*CALL, z_loss=0.2)
    vocab_parallel_cross_entropy(CALL[0].bfloat16(), CALL[1], z_loss=0.1)
    vocab_parallel_cross_entropy(CALL[0][:1], CALL[1][:1], z_loss=0.1)  # the rows may change every step
    assert settled().misses == 3


@pytest.mark.reference
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "logit_scale", "softcap", "ignore_index"])
@pytest.mark.parametrize("right_first", [True, False])
def test_true_is_not_taken_for_the_1_that_equals_it(settled, name, right_first):
    """``True == 1`` and both have one hash: what was settled for one must not let the other pass."""
    one = 1 if name == "ignore_index" else 1.0
    if right_first:
        vocab_parallel_cross_entropy(*CALL, **{name: one})
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{name}: expected .* got bool"):
            vocab_parallel_cross_entropy(*CALL, **{name: True})
    vocab_parallel_cross_entropy(*CALL, **{name: one})


@pytest.mark.reference
@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"ignore_index": 1.0}, {"ignore_index": 1}, "ignore_index: expected an int, got float"),
        ({"check_labels": 1}, {"check_labels": True}, "check_labels: expected a bool, got int"),
        ({"check_labels": 0}, {"check_labels": False}, "check_labels: expected a bool, got int"),
        ({"return_metrics": 1}, {"return_metrics": True}, "return_metrics: expected a bool, got int"),
        ({"vocab_size": 12.0}, {"vocab_size": 12}, "vocab_size: expected an int, got float"),
        ({"vocab_size": True}, {"vocab_size": 12}, "vocab_size: expected an int, got bool"),
    ],
    ids=str,
)
def test_equal_values_of_other_types_are_still_refused(settled, wrong, right, message):
    vocab_parallel_cross_entropy(*CALL, **right)
    with pytest.raises(TypeError, match=f"^{message}"):
        vocab_parallel_cross_entropy(*CALL, **wrong)
    vocab_parallel_cross_entropy(*CALL, **right)


@pytest.mark.reference
def test_fields_of_a_shard_keep_their_types_in_the_cache(settled):
    """Types inside a tuple are no part of the cache's key: the fields are checked before."""
    vocab_parallel_cross_entropy(*CALL, shard=VocabShard(0, 12, 12))
    for wrong in ((0.0, 12, 12), (False, 12, 12), (0, 12, 12.0)):
        with pytest.raises(TypeError, match="^shard: .*: expected an int"):
            vocab_parallel_cross_entropy(*CALL, shard=VocabShard(*wrong))


@pytest.mark.reference
def test_a_number_and_an_integer_that_are_equal_give_the_same_loss(settled):
    losses = [vocab_parallel_cross_entropy(*CALL, z_loss=z, logit_scale=s) for z, s in ((1, 1), (1.0, 1.0))]
    assert torch.equal(*losses)


@pytest.mark.reference
def test_an_error_is_not_remembered(settled):
    """Neither as an answer nor as an entry, and it does not chain to another."""
    for _ in range(3):
        with pytest.raises(ValueError, match="^label_smoothing: must be in") as raised:
            vocab_parallel_cross_entropy(*CALL, label_smoothing=2.0)
        assert raised.value.__context__ is None
    assert settled().currsize == settled().hits == 0


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": [0.1]}, "label_smoothing: expected a number, got list"),
        ({"z_loss": {}}, "z_loss: expected a number, got dict"),
        ({"ignore_index": {1}}, "ignore_index: expected an int, got set"),
        ({"vocab_size": [12]}, "vocab_size: expected an int, got list"),
        ({"check_labels": []}, "check_labels: expected a bool, got list"),
        ({"shard": [0, 12, 12]}, "shard: expected a VocabShard, got list"),
    ],
    ids=str,
)
def test_what_cannot_be_a_key_is_refused_by_the_check(settled, options, message):
    """And not by the cache, which knows the type of an argument and not its name."""
    with pytest.raises(TypeError, match=f"^{message}"):
        vocab_parallel_cross_entropy(*CALL, **options)
    assert settled().currsize == 0


@pytest.mark.reference
@pytest.mark.parametrize("name", ["reduction", "gradient", "impl"])
def test_a_choice_that_cannot_be_a_key_is_refused_by_the_check(settled, name):
    with pytest.raises(ValueError, match=f"^{name}: expected one of .* got \\['mean'\\]"):
        vocab_parallel_cross_entropy(*CALL, **{name: ["mean"]})
