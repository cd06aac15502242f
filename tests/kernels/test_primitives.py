"""Jit functions on their own: tanh, log1p, transform, the count of labels, a row's body and edges."""

import pytest
import torch

from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import LossOptions

jit_functions = pytest.importorskip("tests.kernels.jit_functions")  # needs triton

INF, NAN = float("inf"), float("nan")
FP32 = torch.finfo(torch.float32)
TRANSFORMS = {
    "plain": LossOptions(),
    "logit_scale": LossOptions(logit_scale=0.0625),
    "softcap": LossOptions(softcap=30.0),
    "softcap and logit_scale": LossOptions(logit_scale=3.0, softcap=50.0),
}


def grid():
    """Every magnitude of fp32, densely where tanh bends and on both sides of where its formula changes."""
    magnitudes = torch.logspace(-45, 38.5, 4000, base=10, dtype=torch.float64)
    seam = 1 + torch.arange(-200, 200, dtype=torch.float64) * 2**-24
    positive = torch.cat([magnitudes, torch.linspace(0, 12, 20000, dtype=torch.float64), seam]).float()
    ends = torch.tensor([0.0, FP32.tiny, FP32.tiny * FP32.eps, FP32.max, INF])
    return torch.cat([positive, -positive, ends, -ends])


def test_tanh_on_a_dense_grid(kernel_device):
    x = grid()
    actual = jit_functions.elementwise("tanh", x.to(kernel_device)).cpu().double()
    truth = x.double().tanh()
    last_digit = torch.ldexp(torch.ones_like(truth), truth.frexp().exponent - 24)
    # A subnormal may be flushed to 0.
    units = (actual - truth).abs() / last_digit.clamp(min=FP32.tiny)
    worst = int(units.argmax())
    # A GPU's exp2 and division are not exact.
    allowed = 2 if kernel_device == "cpu" else 4
    assert float(units[worst]) <= allowed, (float(x[worst]), float(actual[worst]), float(truth[worst]))
    assert bool((actual.abs() <= 1).all()) and actual[-6] == 1 and actual[-1] == -1
    assert jit_functions.elementwise("tanh", torch.full((1,), NAN, device=kernel_device)).isnan()


def test_log1p_on_a_dense_grid(kernel_device):
    """Small values lose no digits; 0 and -1 are exact."""
    seam = 0.5 + torch.arange(-200, 200, dtype=torch.float64) * 2**-25
    magnitudes = torch.logspace(-37, 38, 4000, base=10, dtype=torch.float64)
    x = torch.cat([magnitudes, torch.linspace(0, 3, 20000, dtype=torch.float64), seam]).float()
    actual, truth = jit_functions.elementwise("log1p", x.to(kernel_device)).cpu().double(), x.double().log1p()
    relative = (actual - truth).abs() / truth.clamp(min=FP32.tiny)
    worst = int(relative.argmax())
    assert float(relative[worst]) <= 4 * FP32.eps, (float(x[worst]), float(actual[worst]))
    ends = jit_functions.elementwise("log1p", torch.tensor([0.0, -1.0, INF, NAN, 1e-5], device=kernel_device)).tolist()
    assert ends[:3] == [0, -INF, INF] and ends[3] != ends[3]
    assert ends[4] == pytest.approx(9.99995e-6, rel=1e-7)


def test_log2_normal_on_a_dense_grid(kernel_device):
    seams = torch.cat([scale * (1 + torch.arange(-200, 200) * 2**-24) for scale in (0.5**0.5, 1.0, 2**0.5)])
    x = torch.cat([torch.logspace(-37.9, 0, 20000), torch.linspace(0.3, 3, 20000), seams])
    actual, truth = jit_functions.elementwise("log2_normal", x.to(kernel_device)).cpu().double(), x.double().log2()
    assert bool(((actual - truth).abs() <= 1.6 * FP32.eps * truth.abs()).all())


@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transform(kernel_device, options):
    """Values and slopes of logits as they occur; infinities stay what they are."""
    x = torch.cat([torch.linspace(-400, 400, 20001), torch.tensor([1e-30, -1e30, NAN, INF, -INF])])
    z, slope = (value.cpu() for value in jit_functions.transform_of(x.to(kernel_device), options))
    truth, true_slope = (torch.as_tensor(v).double().expand_as(x) for v in spec.transformed(x.double(), options))
    peer, peer_slope = (torch.as_tensor(v).float().expand_as(x) for v in spec.transformed(x, options))
    assert_within_budget(z[:-2], truth[:-2], peer[:-2])
    assert z[-2:].tolist() == [INF, -INF]
    assert_within_budget(slope[:-3], true_slope[:-3], peer_slope[:-3])
    assert bool((slope[:-3] >= 0).all())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("softcap", (1.0, 30.0, 64.0, 65.0, 1e6))
def test_softcap_of_16_bit_logits(kernel_device, dtype, softcap):
    """The error is of the cap, not of the value, and only if the cap is small. Values never fall."""
    x = torch.cat([torch.linspace(-400, 400, 20001), torch.tensor([1e-3, -1e4, NAN, INF, -INF])]).to(dtype)
    options = LossOptions(softcap=softcap)
    z, slope = (value.cpu() for value in jit_functions.transform_of(x.to(kernel_device), options))
    truth, true_slope = spec.transformed(x.double(), options)
    peer, peer_slope = spec.transformed(x.float(), options)
    assert z.dtype == slope.dtype == torch.float32
    assert_within_budget(z[:-2], truth[:-2], peer[:-2], magnitude=softcap if softcap <= 64 else 0.0)
    assert z[-2:].tolist() == [INF, -INF]
    assert_within_budget(slope[:-3], true_slope[:-3], peer_slope[:-3])
    assert bool((slope[:-3] >= 0).all()) and bool((z[:20000].diff() >= 0).all())
    assert not slope[:-5][x[:-5].abs() > 20 * softcap].any()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("softcap", (1.0, 5.0, 30.0, 64.0))
def test_a_small_softcap_of_every_16_bit_logit(kernel_device, dtype, softcap):
    """docs/options.md says how large its error is, and that a larger logit has no smaller value."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = every[every.isfinite()].double().sort().values
    z = jit_functions.transform_of(x.to(dtype).to(kernel_device), LossOptions(softcap=softcap))[0].cpu()
    assert float((z.double() - softcap * torch.tanh(x / softcap)).abs().max()) <= 3e-7 * softcap
    assert bool((z.diff() >= 0).all())


@pytest.mark.parametrize("vector", (4, 8))
def test_head_body_and_tail_are_every_column_once(kernel_device, vector):
    """Rows of every width at every beginning; bodies begin at lines of 128 bytes."""
    widths, begins = 160, 64
    first, body, offset, inside = (t.cpu() for t in jit_functions.row_parts(widths, begins, vector, kernel_device))
    assert bool((first % (8 * vector) == 0).all()) and bool((body % vector == 0).all())
    begin, width = torch.arange(begins), torch.arange(1, widths + 1).unsqueeze(1)
    assert bool((first >= begin).all()) and bool((first - begin < 8 * vector).all())
    assert set(inside.unique().tolist()) <= {0, 1}
    position = torch.arange(begins + widths + 64 * vector)
    seen = ((position >= first.unsqueeze(2)) & (position < (first + body).unsqueeze(2))).to(torch.int8)
    assert bool((offset >= 0).all())
    seen.scatter_add_(2, offset, inside.to(torch.int8))
    is_column = (position >= begin.unsqueeze(1)) & (position < (begin + width).unsqueeze(2))
    assert torch.equal(seen, is_column.to(torch.int8))


@pytest.mark.parametrize("n_rows", (0, 1, 511, 512, 513, 1023, 1024, 1025, 2100))
def test_count_of_labels(kernel_device, n_rows):
    """2100 labels take three steps."""
    labels = (torch.arange(n_rows) % 3).to(kernel_device)
    assert jit_functions.count_of(labels, 2) == int((labels != 2).sum())
