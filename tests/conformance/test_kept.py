"""Log-probabilities and entropies over kept sets, of logits and of heads: numbers against fp64, edges, ranks."""

import pytest
import torch

from tests.conformance.widths import PLACE, columns_of, each, made_of, placed, rows_of
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import broad_rows
from tests.support.cases.pairs import covering
from tests.support.cases.soft import Pair
from tests.support.ranks.case import Case, run
from tests.support.ranks.case import check as check_ranks
from tests.support.ranks.pools import in_several_ranks
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import transformed
from vocab_parallel_ce import linear_token_log_probs, token_log_probs

INF = float("inf")


def kept_of(logits, labels, k):
    """The label, random ids, one of them twice, and fewer in every second row."""
    n, columns = logits.shape
    kept = torch.randint(0, columns, (n, k), generator=torch.Generator().manual_seed(5))
    kept[:, -1] = torch.where(labels == IGNORE_INDEX, 0, labels)
    if k > 3:
        kept[:, 1], kept[::2, 2] = kept[:, 0], -1
    return kept


def outputs_of(logits, labels, kept, temperature=1.0, **options):
    """Log-probabilities and entropies ``[N]`` in the dtype of the logits, 0 for ignored labels."""
    temperature = temperature.to(logits).unsqueeze(-1) if torch.is_tensor(temperature) else temperature
    z, ignored = transformed(logits, **options) / temperature, labels == IGNORE_INDEX
    is_kept = (kept.unsqueeze(-1) == torch.arange(logits.shape[-1])).any(1)
    log_p = z.masked_fill(~is_kept, -INF).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -INF, 0.0)).sum(-1)
    found = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


LOGITS = covering(
    **PLACE,
    kind=("peaked", "confident"),
    k=(1, 2, 9),
    temperature=(1.0, 0.7, "tokens"),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.5),
    outputs=((), ("entropy",)),
    gradient=("auto", "in_backward", "out_of_place"),
)


@pytest.mark.quick(3)
@each(LOGITS, interpreted=14)
def test_logits(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    kept = kept_of(logits, labels, case["k"])
    temperature = torch.rand(len(labels)) + 0.5 if case["temperature"] == "tokens" else case["temperature"]
    there = temperature.view(shape).to(device) if torch.is_tensor(temperature) else temperature
    leaf, x = placed(logits, case, device)
    of_z = {name: case[name] for name in ("softcap", "logit_scale")}
    ways = {"temperature": there, "impl": impl, "gradient": case["gradient"], "vocab_size": columns_of(case)[0]}
    there = labels.view(shape).to(device), kept.view(*shape, -1).to(device)
    found = token_log_probs(x, there[0], kept=there[1], outputs=case["outputs"], **of_z, **ways)
    found = [found.log_probs, found.entropy] if case["outputs"] else [found]
    grads = [torch.randn(len(labels), generator=torch.Generator().manual_seed(i)) for i in range(len(found))]
    torch.autograd.backward(found, [g.view(shape).to(device) for g in grads])

    def expected(dtype):
        own = logits.detach().to(dtype).requires_grad_()
        values = outputs_of(own, labels, kept, temperature, **of_z)[: len(found)]
        (grad,) = torch.autograd.grad(values, own, [g.to(dtype) for g in grads])
        return [value.detach() for value in values], grad

    truth, peer = expected(torch.float64), expected(torch.float32)
    largest = float(transformed(logits.double(), **of_z).abs().max()) / 0.5
    for value, *others in zip(found, truth[0], peer[0], strict=True):
        assert_within_budget(value.detach().view(-1).cpu(), *others, 1.0 + largest)
    assert_within_budget(leaf.grad, truth[1], peer[1], largest)
    elsewhere = (kept.unsqueeze(-1) != torch.arange(logits.shape[-1])).all(1)
    assert not leaf.grad.cpu().view(logits.shape)[elsewhere].any()


def test_edges(impl_device):
    """NaN that is not kept, one that is, an excluded id, a label that is not kept, ids outside, and ignored ones."""
    impl, device = impl_device
    logits, labels = torch.randn(7, 9), torch.full((7,), 2)
    kept = torch.tensor([[2, 3, -1]]).repeat(7, 1)
    logits[0, 5], logits[1, 3], logits[2, 3], labels[3] = float("nan"), float("nan"), -INF, 7
    kept[4, 2], kept[5, 2], labels[6] = 9, -2, IGNORE_INDEX
    leaf = logits.to(device).requires_grad_()
    found = token_log_probs(leaf * 1, labels.to(device), kept=kept.to(device), impl=impl, outputs=("entropy",))
    (found.log_probs + found.entropy).sum().backward()
    values, grad = found.log_probs.detach().cpu(), leaf.grad.cpu()
    torch.testing.assert_close(values[0], logits[0, 2:4].log_softmax(-1)[0])
    assert values[1].isnan() and grad[1, 2:4].isnan().all() and values[2] == 0 and not grad[2].any()
    assert values[3] == -INF and found.entropy[3].isfinite() and grad[3].isfinite().all()
    assert values[4:6].isnan().all() and grad[4:6, 2:4].isnan().all()
    assert values[6] == 0 and not grad[6].any() and not grad[:, [0, 1, *range(4, 9)]].any()


@pytest.mark.parametrize("keep_logits", ("none", "all"))
def test_heads(impl_device, keep_logits):
    impl, device = impl_device
    hidden, weight, labels = torch.randn(9, 12), torch.randn(43, 12), torch.randint(0, 43, (9,))
    labels[4] = IGNORE_INDEX
    kept = kept_of(hidden @ weight.t(), labels, 5)

    def gradients(function, dtype, device):
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        found = function(*leaves)
        return found[0].detach(), *torch.autograd.grad(found[0].sum() + found[1].sum(), leaves)

    def ours(h, w):
        ways = {"impl": impl, "chunk_size": 4, "keep_logits": keep_logits, "outputs": ("entropy",)}
        found = linear_token_log_probs(h, w, labels.to(device), kept=kept.to(device), **ways)
        return found.log_probs, found.entropy

    found = gradients(ours, torch.float32, device)
    of_both = [
        gradients(lambda h, w: outputs_of(h @ w.t(), labels, kept), t, "cpu") for t in (torch.float64, torch.float32)
    ]
    for triple in zip(found, *of_both, strict=True):
        assert_within_budget(*triple, 30.0)


@pytest.mark.reference
def test_no_kept_ids_are_nan_and_valid_tokens_are_gathered_with_their_sets():
    logits = torch.randn(3, 9)
    found = token_log_probs(logits, torch.tensor([1, -100, 2]), kept=torch.tensor([[-1, -1], [-1, -1], [2, 3]]))
    assert found[0].isnan() and found[1] == 0 and found[2].isfinite()
    hidden, weight = torch.randn(8, 6), torch.randn(9, 6)
    labels, kept = torch.tensor([IGNORE_INDEX, 1, 2, IGNORE_INDEX, 3, 0, 5, IGNORE_INDEX]), torch.randint(0, 9, (8, 4))
    kept[:, 0] = labels.clamp(min=0)
    expected = token_log_probs(hidden @ weight.t(), labels, kept=kept)
    own = linear_token_log_probs(hidden, weight, labels, kept=kept.int(), valid_tokens=6, chunk_size=2)
    torch.testing.assert_close(own, expected)


def _weighed(student, ignored, *, labels, kept, factors, reduction, **options):
    """Log-probabilities and entropies as one loss per token, as the harness of losses takes them."""
    found = token_log_probs(student, labels, kept=kept, outputs=("entropy",), **options)
    return found.log_probs * factors[:, 0] + found.entropy * factors[:, 1]


def _losses(student, ignored, *, labels, kept, factors, **options):
    log_probs, entropy = outputs_of(student, labels, kept, **options)
    return log_probs * factors[:, 0].to(student) + entropy * factors[:, 1].to(student)


@pytest.mark.quick(2)
@pytest.mark.interpreted(2)
@in_several_ranks
def test_ranks(rank_pool, impl):
    """One all_gather of 16 bytes per token; some ranks have none of a row's ids."""
    logits, labels = broad_rows("peaked", 6, 64)
    labels, n = labels.clamp(min=0), rank_pool.world_size
    bounds = [(64 // n * rank, 64 // n * (rank + 1)) for rank in range(n)]
    options = {"labels": labels, "kept": kept_of(logits, labels, 5), "factors": torch.randn(6, 2), "reduction": "none"}
    case = Case(Pair(logits, logits, _losses), impl, options | {"temperature": 0.7}, bounds, "shard", function=_weighed)
    check_ranks(case, rank_pool.run(run, case), [16])
