"""Where a fused projection and loss has gone wrong before: chunks of ranks, casts, divisors, hooks."""

from __future__ import annotations

import importlib
import weakref

import pytest
import torch
from torch import Tensor

from tests.support.budget import assert_within_budget
from tests.support.linear import linear_fp64, linear_same_dtype, many_tokens, projection, run
from tests.linear.test_autograd import Case
from tests.linear.test_refusals import HIDDEN, LABELS, _linear
from vocab_parallel_ce import (
    LinearCrossEntropy,
    VocabShard,
    chunks,
    linear_arguments,
    linear_cross_entropy,
    tokens,
)
from vocab_parallel_ce.linear.matmul import WeightGradient, cleared

ROWS, COLUMNS, WIDTH = 6, 21, 8
INF = float("inf")


def _chunks_of_ranks(monkeypatch, bounds, vocab_size, **options):
    """Each rank's chunks of 64 tokens, or its refusal, without any other rank."""
    module, seen = importlib.import_module("vocab_parallel_ce.linear.cross_entropy"), []

    def forward(linear, inputs):
        seen.append(linear.chunks)
        return linear.call.unfilled(inputs.hidden.zero_()), None

    monkeypatch.setattr(module, "forward", forward)
    for rank, (start, stop) in enumerate(bounds):
        position = rank, len(bounds)
        monkeypatch.setattr(linear_arguments, "group_position", lambda group, position=position: position)
        arguments = torch.zeros(64, WIDTH), torch.zeros(stop - start, WIDTH), torch.zeros(64).long()
        try:
            linear_cross_entropy(*arguments, shard=VocabShard(start, stop, vocab_size), **options)
        except ValueError as error:
            seen.append(str(error))
    return seen


@pytest.mark.reference
@pytest.mark.parametrize(
    ("bounds", "vocab_size", "options", "first"),
    [
        ([(0, 16), (16, 24)], 24, {"memory_budget": 1280}, 26),
        ([(0, 16), (16, 24)], 24, {}, 26),
        ([(0, 2), (2, 4), (4, 6), (6, 7)], 7, {"memory_budget": 160}, 20),
        ([(0, 40), (40, 80)], 50, {"memory_budget": 2500}, 25),
        ([(0, 2), (2, 4), (4, 6), (6, 7)], 7, {"memory_budget": 7}, None),
    ],
    ids=["by hand", "auto", "uneven", "padded", "too small"],
)
def test_ranks_of_any_width_have_the_same_chunks(monkeypatch, bounds, vocab_size, options, first):
    """Those of ceil(V / R) columns, in fp32. Ranks that disagree would wait for each other for ever."""
    monkeypatch.setattr(chunks, "FEWEST_TOKENS", 8)
    monkeypatch.setattr(chunks, "SMALL_BYTES", 1280)
    of_ranks = _chunks_of_ranks(monkeypatch, bounds, vocab_size, **options)
    assert len(of_ranks) == len(bounds) and len(set(of_ranks)) == 1, of_ranks
    if first is None:
        assert of_ranks[0].startswith("memory_budget: must hold a token's logits, 8 bytes")
    else:
        assert of_ranks[0][0] == (0, first) and of_ranks[0][-1][1] == 64


def test_a_divisor_that_changes_before_backward_is_noticed(impl_device):
    """Counted up in place over a step's batches; the loss was divided by what it was then."""
    case = Case(impl_device)
    num_items = torch.tensor(5.0, device=case.device)
    loss = case.loss(reduction="sum", num_items=num_items, gradient="in_backward")
    num_items += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sent:
    """Counts works that nobody has waited for yet."""

    def __init__(self):
        self.in_flight = self.most = self.begun = 0

    def begin(self, *_):
        self.begun += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return self

    def wait(self):
        self.in_flight -= 1


@pytest.mark.reference
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_two_chunks_at_most_are_on_their_way(monkeypatch, sequence_parallel):
    """Each keeps its memory until it has arrived."""
    sent = Sent()
    for name in ("begin_all_reduce", "begin_reduce_scatter"):
        monkeypatch.setattr(tokens, name, sent.begin)
    of_chunks = tokens.Tokens(
        torch.zeros(16 if sequence_parallel else 32, WIDTH),
        torch.float32,
        order=None,
        group=None,
        n_ranks=2,
        sequence_parallel=sequence_parallel,
        reduces=True,
    )
    for start in range(0, 32, 2):
        of_chunks.reduce(start, start + 2, of_chunks.rows_of_gradient(start, start + 2))
    assert sent.begun == 16 and sent.most == 2, (sent.begun, sent.most)
    of_chunks.gradient()
    assert sent.in_flight == 0


def test_a_weight_that_was_cast_for_the_call_lives_no_longer(impl_device):
    """Kept for backward it would be a second copy of the head, though gradients are there already."""
    case = Case(impl_device)
    weight = case.weight.to(torch.bfloat16)
    hidden, alive = case.hidden.to(torch.bfloat16), weakref.ref(weight)
    loss = linear_cross_entropy(hidden, weight, case.labels, impl=case.impl, gradient="in_forward")
    del weight
    assert alive() is None
    loss.backward()
    assert case.weight.grad.any()


@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_autocast_to_the_other_16_bits_sums_the_weights_gradient_in_fp32(impl_device, dtype, other, gradient):
    """One chunk, whose product is of another dtype than the gradient: a GPU does not multiply into that."""
    impl, device = impl_device
    inputs = many_tokens(ROWS, COLUMNS, WIDTH, dtype)
    # Logits of a usual size, whose gradients fp16 cannot hold; those of the weight it can.
    inputs = inputs._replace(hidden=inputs.hidden * 1024, weight=inputs.weight / 1024)
    options = {"reduction": "sum", "num_items": 2**23 if dtype == torch.float16 else 1}
    leaves = [x.to(device).requires_grad_() for x in (inputs.hidden, inputs.weight)]
    with torch.autocast(device, other):
        loss = linear_cross_entropy(
            *leaves, inputs.labels.to(device), impl=impl, gradient=gradient, **options
        )
    loss.backward()
    truth = linear_fp64(inputs, **options)
    peer = linear_same_dtype(inputs.to(other), weight_dtype=torch.float32, **options)
    for leaf, name in zip(leaves, ("hidden", "weight"), strict=True):
        assert_within_budget(leaf.grad, getattr(truth, name), getattr(peer, name).to(dtype))


@pytest.mark.reference
@pytest.mark.parametrize("n_chunks", [1, 2])
def test_the_weights_gradient_is_summed_in_fp32_or_is_one_product(n_chunks):
    types = torch.float32, torch.bfloat16, torch.float16
    for of_products in types:
        for dtype in types:
            weight = torch.zeros(COLUMNS, WIDTH, dtype=of_products)
            gradient = WeightGradient(weight, dtype=dtype, n_chunks=n_chunks)
            is_product = n_chunks == 1 and dtype == of_products
            assert gradient.total.dtype == (dtype if is_product else torch.float32)
            assert gradient.rounded().dtype == dtype


MORE_THAN_A_WEIGHT = {
    "full backward pre-hook": lambda head: head.register_full_backward_pre_hook(lambda *_: None),
    "forward of its own": lambda head: setattr(head, "forward", lambda hidden: hidden @ head.weight.T / 8),
}


@pytest.mark.reference
@pytest.mark.parametrize("name", MORE_THAN_A_WEIGHT)
def test_a_head_that_does_more_is_refused_when_the_module_is_made_and_later(name):
    """Wrappers of a module replace its ``forward`` in the instance, and its type stays what it was."""
    head = _linear()
    module = LinearCrossEntropy(head)
    module(HIDDEN, LABELS)
    MORE_THAN_A_WEIGHT[name](head)
    for use in (lambda: LinearCrossEntropy(head), lambda: module(HIDDEN, LABELS)):
        with pytest.raises(ValueError, match="^head: has hooks or a patched forward, .*remove"):
            use()


@pytest.mark.parametrize("valid_tokens", [None, ROWS], ids=["left out", "not left out"])
@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_from_is_0_whatever_comes_from_upstream(
    impl_device, reduction, gradient, valid_tokens
):
    """A loss scale that has overflowed: 0 times inf would be NaN in ``main_grad``, which is kept."""
    inputs = projection("all_ignored", rows=ROWS, vocab_size=COLUMNS, width=WIDTH, bias=True, broad=False)
    for main_grad in (None, torch.zeros(COLUMNS, WIDTH, device=impl_device[1])):
        results = run(
            impl_device,
            inputs,
            torch.tensor(INF),
            reduction=reduction,
            gradient=gradient,
            valid_tokens=valid_tokens,
            main_grad=main_grad,
        )
        d_weight = results.weight if main_grad is None else main_grad.cpu()
        for tensor in (*results.outputs, results.hidden, d_weight, results.bias):
            assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("valid_tokens", [0, 1, ROWS // 2, ROWS - 1])
def test_more_labels_than_were_promised_make_every_loss_nan(impl_device, valid_tokens):
    """Also that of a token which was left out: a 0 there would pass for a loss."""
    inputs = projection("peaked", rows=ROWS, vocab_size=COLUMNS, width=WIDTH, bias=True)
    results = run(impl_device, inputs, reduction="none", valid_tokens=valid_tokens)
    for tensor in (*results.outputs, results.weight, results.bias):
        assert tensor.isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignore_index_that_int32_labels_cannot_hold(impl_device, reduction):
    """No label is it: all of them count, and there are more than were promised."""
    inputs = projection("peaked", rows=ROWS, vocab_size=COLUMNS, width=WIDTH)
    options = {"reduction": reduction, "ignore_index": 2**40}
    for valid_tokens in (2, ROWS, None):
        narrow, wide = (
            run(impl_device, inputs._replace(labels=labels), valid_tokens=valid_tokens, **options)
            for labels in (inputs.labels.int(), inputs.labels)
        )
        for same, expected in zip((*narrow.outputs, *narrow[1:3]), (*wide.outputs, *wide[1:3]), strict=True):
            torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)
        assert wide.outputs[0].isnan().all() == (valid_tokens == 2)


def _at_an_offset(values: Tensor, offset: int) -> Tensor:
    """``values`` in a storage of its own that begins ``offset`` bytes behind an aligned address."""
    memory = bytearray(values.nbytes + 64)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    view = torch.frombuffer(
        memory, dtype=values.dtype, count=values.numel(), offset=-start % 8 + offset
    ).view(values.shape)
    return view.copy_(values)


@pytest.mark.reference
@pytest.mark.parametrize("width", [8, 7, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ignored_rows_are_cleared_in_memory_of_every_layout(monkeypatch, dtype, width):
    """Eight bytes at a time only from addresses, and over widths, of whole eight bytes."""
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    is_ignored = torch.tensor([True, False, False, True, False])
    values[is_ignored] = float("nan")
    expected = values.nan_to_num(0.0)
    padded = torch.full((11, width + 4), INF, dtype=dtype)
    layouts = {f"{offset} bytes off": _at_an_offset(values, offset) for offset in (0, 2, 4, 6)}
    if dtype == torch.float32:
        layouts = {name: rows for name, rows in layouts.items() if rows.data_ptr() % 4 == 0}
    layouts |= {
        "part of a row": padded[:5, 1 : width + 1].copy_(values),
        "every other row": padded.clone()[:10:2, :width].copy_(values),
        "behind one element": torch.cat([padded.view(-1)[:1], values.view(-1)])[1:].view(5, width),
        "behind one off": _at_an_offset(
            torch.cat([values.view(-1)[:1], values.view(-1)]), 8 - values.itemsize
        )[1:].view(5, width),
        "columns first": values.t().contiguous().t(),
    }
    filled, masked_fill = [], Tensor.masked_fill

    def recorded(rows, mask, value):
        filled.append(rows)
        return masked_fill(rows, mask, value)

    monkeypatch.setattr(Tensor, "masked_fill", recorded)
    for name, rows in layouts.items():
        result = cleared(rows, is_ignored)
        assert result.dtype == dtype and torch.equal(result, expected), name
        torch.testing.assert_close(rows, values, rtol=0, atol=0, equal_nan=True)
        assert filled[-1].data_ptr() % filled[-1].itemsize == 0, f"{name}: read off its alignment"
    eight = [rows.dtype == torch.int64 for rows in filled]
    assert any(eight) == (values.itemsize * width % 8 == 0), "never 8 bytes at a time"
