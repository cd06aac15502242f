"""How many tokens a chunk has by default, and how much memory that may take."""

import pytest
import torch

from tests.support.cases.flat import linear_cross_entropy
from vocab_parallel_ce import Head, linear_distillation_loss
from vocab_parallel_ce.head import chunks
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.head.chunks import choose_chunk_tokens, chunks_of, default_tokens, equal_chunk
from vocab_parallel_ce.head.plan import make_head_plan
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings

pytestmark = pytest.mark.reference

# (tokens, hidden size, columns), bytes of a logit and of an element of the gradient, and the sizes of the chunks.
CHOSEN = [
    ((11264, 4096, 128256), (2, 2), [11264]),  # as much memory as several chunks and their fp32 sum
    ((11265, 4096, 128256), (2, 2), [6144, 5121]),
    ((8192, 2048, 128256), (2, 2), [8192]),
    ((32768, 16384, 128256), (2, 2), [32768]),  # as many logits as the fp32 sum
    ((32769, 16384, 128256), (2, 2), [11008, 11008, 10753]),
    ((16384, 4096, 64128), (2, 2), [6144, 6144, 4096]),
    ((32768, 4096, 128256), (2, 2), [7168] * 4 + [4096]),
    ((32768, 4096, 16032), (2, 2), [8192] * 4),  # 256 MiB of logits
    ((16384, 5000, 128256), (2, 2), [6144, 6144, 4096]),
    ((8193, 4096, 128256), (2, 4), [5120, 3073]),  # one chunk would save nothing
    ((8193, 4096, 128256), (2, 0), [3072, 3072, 2049]),  # there is no sum
    ((4096, 1024, 128256), (4, 4), [4096]),
    ((8192, 256, 10**6), (2, 2), [2048] * 4),  # 5.3 GB of logits at most
    ((4096, 256, 10**6), (6, 2), [886] * 4 + [552]),
    ((3000, 256, 10**7), (2, 2), [640] * 4 + [440]),  # 14.5 GB, where the fp32 sum takes 10.2
    ((3000, 256, 10**7), (2, 0), [640] * 4 + [440]),
    ((726, 256, 10**7), (2, 2), [726]),
    ((727, 256, 10**7), (2, 2), [384, 343]),
    ((17408, 8192, 128256), (2, 2), [17408]),  # 4.5 GB, where the fp32 sum takes 4.2
]


@pytest.mark.parametrize(("sizes", "of_bytes", "expected"), CHOSEN)
def test_default_chunks(sizes, of_bytes, expected):
    chunk = choose_chunk_tokens(*sizes, of_bytes[0], *default_tokens(*sizes[1:], *of_bytes))
    assert [rows.stop - rows.start for rows in chunks_of(sizes[0], chunk)] == expected


def column_bytes(n_tokens, chunk, hidden_size, logit_bytes, gradient_bytes):
    """Of a chunk's logits, and of the weight's gradient: fp32 if chunks are summed."""
    of_gradient = gradient_bytes if chunk == n_tokens else 4 * bool(gradient_bytes)
    return logit_bytes * chunk + of_gradient * hidden_size


@pytest.mark.parametrize("hidden_size", [512, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize(("element_size", "of_teacher"), [(2, 0), (2, 2), (4, 0), (6, 0)])
@pytest.mark.parametrize("gradient_bytes", [0, 2, 4])
def test_memory_is_at_most_a_quarter_more_than_with_4096_tokens(hidden_size, element_size, of_teacher, gradient_bytes):
    """Unless the logits of all tokens take no more than an fp32 gradient."""
    logit_bytes = element_size + of_teacher
    by_default = default_tokens(hidden_size, 2**18, logit_bytes, gradient_bytes)
    of_bytes = hidden_size, logit_bytes, gradient_bytes
    for n_tokens in range(4097, 2**15, 31):
        chunk = choose_chunk_tokens(n_tokens, hidden_size, 2**18, element_size, *by_default)
        most = column_bytes(n_tokens, 4096, *of_bytes)
        has_small_logits = element_size * n_tokens <= 4 * hidden_size
        assert has_small_logits or column_bytes(n_tokens, chunk, *of_bytes) <= 1.25 * most


def test_what_a_call_says_of_its_bytes(monkeypatch):
    seen = []

    def noted(hidden_size, n_columns, *of_bytes):
        seen.append(of_bytes)
        return default_tokens(hidden_size, n_columns, *of_bytes)

    monkeypatch.setattr("vocab_parallel_ce.head.plan.default_tokens", noted)
    hidden, weight = (torch.randn(rows, 24, dtype=torch.bfloat16) for rows in (11, 13))
    labels, teacher = torch.zeros(11, dtype=torch.int64), Head(hidden.clone(), weight.clone())
    linear_cross_entropy(hidden, weight, labels)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight, labels, logits_dtype=torch.float32)
    linear_cross_entropy(hidden, weight, labels, main_grad=torch.zeros(13, 24))
    known = {"reduction": "none", "expected_grad_output": torch.ones(11), "gradient": "in_forward"}
    linear_cross_entropy(hidden, weight, labels, **known)
    linear_distillation_loss(Head(hidden, weight), teacher)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    assert seen == [(2, 0), (2, 2), (6, 2), (2, 4), (2, 4), (4, 2), (2, 0)]


def test_a_wave_takes_no_more_chunks():
    assert equal_chunk(10_000, 5000, 4096) == 5000 and equal_chunk(10_000, 5200, 4096) == 5120
    assert equal_chunk(10_000, 9000, 4096) == 8192
    assert equal_chunk(10, 4, 1) == 4 and equal_chunk(0, 4) == 1
    wide = 2**23
    assert choose_chunk_tokens(2**26, wide, 1000, 2, *default_tokens(wide, 1000, 2, 2)) <= chunks.MOST_TOKENS


def test_ranks_have_equal_chunks_of_many_columns():
    """Even if a last rank's fewer columns would allow a token more."""
    hidden, found = torch.zeros(1, 1).expand(1330, 256), []
    labels, settings = Labels(torch.zeros(1330, dtype=torch.int64)), Settings(vocab_size=8 * 999761 - 7)
    for rank, n_rows in ((0, 999761), (7, 999754)):
        head = Head(hidden, torch.zeros(1, 1, requires_grad=True).expand(n_rows, 256))
        arguments = Arguments(head, labels, None, None)
        found.append(make_head_plan(LABELS, arguments, settings, hidden.dtype, (1330,), (rank, 8)).chunks)
    assert found[0] == found[1] == (slice(0, 768), slice(768, 1330))


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("keep_logits", ["none", "all", "400B"])
def test_the_first_chunk_may_be_the_shortest(monkeypatch, logits_dtype, keep_logits):
    monkeypatch.setattr("vocab_parallel_ce.head.plan.chunks_of", lambda *_: (slice(0, 2), slice(2, 9), slice(9, 13)))
    generator = torch.Generator().manual_seed(6)
    hidden, weight = (torch.randn(rows, 27, generator=generator).bfloat16().requires_grad_() for rows in (13, 31))
    labels = torch.randint(0, 31, (13,), generator=generator)
    gradient = "in_forward" if keep_logits == "none" else "in_backward"
    options = {"gradient": gradient, "keep_logits": keep_logits, "logits_dtype": logits_dtype}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    right = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.nn.functional.cross_entropy(right[0] @ right[1].t(), labels)
    torch.testing.assert_close(loss.double(), truth, rtol=0.01, atol=0.0)
    grads = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(truth, right)
    for grad, expected in zip(*grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))
