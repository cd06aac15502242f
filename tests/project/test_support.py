"""The suite's own tools: lanes, the error budget, the oracle, layouts, poisoned memory."""

import json
import math
import shutil
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.inputs import batch
from tests.support.host.fresh import fresh_python
from tests.support.host.lanes import LANES
from tests.support.truth.budget import K, assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype, predictions_fp64, values

NAN, INF = float("nan"), float("inf")
TESTS = Path(__file__).parents[1]
SUITE = """
import pytest

@pytest.mark.reference
def test_reference(): pass

@pytest.mark.reference
def test_reference_skipped(): pytest.skip("planted")

@pytest.mark.quick(2)
@pytest.mark.interpreter
@pytest.mark.parametrize("i", range(9))
def test_interpreter(i): assert i == 0

@pytest.mark.interpreted(3)
@pytest.mark.interpreter
@pytest.mark.parametrize("i", range(9))
def test_interpreted(i): assert i in (0, 4, 8)

@pytest.mark.quick
@pytest.mark.reference
@pytest.mark.compile_only
@pytest.mark.parametrize("i", range(3))
def test_two_lanes(i): pass

def test_no_lane(): pass
"""


def _run_suite(directory, *arguments):
    """Run a small suite under this project's conftest in a fresh process. No test of it is of the gloo lane alone."""
    shutil.copytree(TESTS / "support", directory / "tests" / "support", dirs_exist_ok=True)
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(TESTS / name, directory / "tests" / name)
    (directory / "tests" / "test_suite.py").write_text(SUITE)
    environment = {"PYTEST_ADDOPTS": "", "VPCE_COMMIT": "0123abc-dirty", "CUDA_VISIBLE_DEVICES": ""}
    return fresh_python("-m", "pytest", "-p", "no:cacheprovider", *arguments, cwd=directory, **environment)


def test_a_run_adds_up_the_workers_reports_and_an_idle_lane_fails_a_full_run_alone(tmp_path):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    path = tmp_path / "out" / "lanes.json"
    result = _run_suite(tmp_path, "-n", "2", "--lanes-json", str(path))
    assert result.returncode == 1 and " failed" not in result.stdout.splitlines()[-1], result.stdout
    assert result.stdout.count("can run here and executed nothing; the run fails") == 1
    assert "gloo: can run here and executed nothing; the run fails" in result.stdout
    record = json.loads(path.read_text())
    lanes = record["lanes"]
    assert set(lanes) == set(LANES)
    assert lanes["reference"] == {"passed": 4, "failed": 0, "skipped": 1, "unavailable": None}
    assert record["no_lane"]["passed"] == 1 and lanes["interpreter"]["passed"] in (0, 4)
    for name, lane in lanes.items():
        ran = lane["passed"] + lane["failed"] > 0
        assert ran == (lane["unavailable"] is None and name != "gloo")
    assert (record["commit"], record["dirty"], record["exit_status"]) == ("0123abc", True, 1)
    assert {"torch", "triton", "gpu_model", "gpu_count", "python", "platform"} <= set(record)

    quick = _run_suite(tmp_path, "-m", "quick")
    assert quick.returncode == 0 and "2 passed" in quick.stdout.replace("1 passed, 1 skipped", "2 passed")


def test_an_error_at_the_budget_passes_and_just_above_it_fails():
    oracle = torch.tensor([1.0, 0.0], dtype=torch.float64)
    peer = torch.tensor([1.0, 2.0**-20], dtype=torch.float32)
    limit = K * (2.0**-20 + torch.finfo(torch.float32).eps)
    assert_within_budget(torch.tensor([1.0, limit]), oracle, peer)
    with pytest.raises(AssertionError, match=r"exceeds .* worst at \(1,\): actual .*, oracle 0, same dtype"):
        assert_within_budget(torch.tensor([1.0, limit * 1.001]), oracle, peer)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_gradient_of_16_bits_is_judged_element_by_element(dtype):
    """One rounding passes, and PyTorch's fp32 before it. What is 1 % too large fails: all, or the small elements."""
    logits, labels = batch("peaked", rows=6, vocab_size=300)
    truth = cross_entropy_fp64(logits, labels, reduction="sum").grad
    fp32 = cross_entropy_same_dtype(logits, labels, reduction="sum").grad
    for peer in (fp32.to(dtype), fp32):
        assert_within_budget(fp32.to(dtype), truth, peer)
        is_small = truth.abs() < truth.abs().max() / 100
        for wrong in (fp32 * 1.01, fp32.where(~is_small, fp32 * 1.01), fp32.where(is_small, fp32 * 1.01)):
            with pytest.raises(AssertionError, match=r"exceeds .* = 1 \* rounding"):
                assert_within_budget(wrong.to(dtype), truth, peer)
    twice = (fp32.to(dtype) * 0.37).double()
    assert_within_budget(twice.to(dtype), truth * 0.37, fp32 * 0.37, roundings=2)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within_budget(twice.to(dtype), truth * 0.37, fp32 * 0.37)


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["some_ignored", "peaked"])
def test_the_oracle_of_ordinary_rows_is_pytorchs(kind, reduction):
    logits, labels = batch(kind, rows=7, vocab_size=19)
    for label_smoothing in (0.0, 0.1, 1.0):
        options = {"label_smoothing": label_smoothing, "reduction": reduction}
        leaf = logits.double().requires_grad_()
        expected = F.cross_entropy(leaf, labels, **options)
        grad_output = torch.randn(expected.shape, dtype=torch.float64)
        expected.backward(grad_output)
        loss, grad = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(grad, leaf.grad)


def test_the_oracles_options_of_a_row_worked_by_hand():
    """``x = [0, ln 3, -inf]``, label 1: p = 1/4, 3/4, 0 and lse = ln 4."""
    logits, labels = torch.tensor([[0.0, math.log(3), -INF]], dtype=torch.float64), torch.tensor([1])
    nll, lse = math.log(4 / 3), math.log(4)

    def loss(x=logits, **options):
        return cross_entropy_fp64(x, labels, reduction="sum", **options).loss.item()

    assert loss() == pytest.approx(nll)
    assert loss(z_loss=0.5) == pytest.approx(nll + 0.5 * lse**2)
    assert loss(num_items=4) == pytest.approx(nll / 4)
    # 3 ** 2 = 9: p = 1/10, 9/10. Softcap 1 maps ln 3 to tanh(ln 3) = (9 - 1) / (9 + 1). The scale is first.
    assert loss(logit_scale=2) == pytest.approx(math.log(10 / 9))
    assert loss(softcap=1) == pytest.approx(math.log1p(math.exp(-0.8)))
    assert loss(softcap=1, logit_scale=2) == pytest.approx(math.log1p(math.exp(-80 / 82)))
    mean = (math.log(4) + nll) / 2  # of -log p, over two columns
    assert loss(logits[:, :2], label_smoothing=0.1) == pytest.approx(0.9 * nll + 0.1 * mean)
    plain = values(logits, labels)
    assert plain.log_probs.item() == pytest.approx(math.log(3 / 4))
    assert plain.entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    # The temperature divides what the cap leaves: tanh(ln 3) / 0.5 = 1.6.
    capped = values(logits, labels, softcap=1, temperature=0.5)
    assert capped.log_probs.item() == pytest.approx(-math.log1p(math.exp(-1.6)))


def test_the_oracle_at_the_edges():
    rows = [[0.0, 2.0, 2.0], [3.0, -INF, 0.0], [NAN, 0.0, 1.0], [5.0, 0.0, 1.0], [1.0, 2.0, 0.0], [NAN] * 3]
    logits, labels = torch.tensor(rows), torch.tensor([1, 2, 2, -100, 1, -1])
    loss, grad = cross_entropy_fp64(logits, labels, reduction="none", softcap=30.0)
    assert loss.isnan().tolist() == grad.isnan().any(1).tolist() == [False, False, True, False, False, True]
    assert loss[3] == 0 and not grad[3].any() and grad[1, 1] == 0
    assert predictions_fp64(logits, labels).tolist() == [1, 0, -1, -1, 1, -1]
    lse = values(logits.double(), labels).lse
    torch.testing.assert_close(lse[[0, 1, 4]], logits[[0, 1, 4]].double().logsumexp(1))
    _, grad = cross_entropy_fp64(logits[:2], labels[:2], label_smoothing=0.3, reduction="sum")
    assert grad.isfinite().all() and grad[1, 1] == 0
    none = cross_entropy_fp64(logits, labels, reduction="sum", num_items=torch.tensor(0))
    assert none.loss.item() == 0 and not none.grad.any()


def test_allocations_of_the_package_alone_are_poisoned():
    source = "def allocate(torch, like): return torch.empty(3), like.new_empty(3), torch.empty_like(like)"
    for name, is_poisoned in (("vocab_parallel_ce.kernels.x", True), ("vocab_parallel_ce_other", False)):
        module = types.ModuleType(name)
        exec(source, module.__dict__)
        with pytest.MonkeyPatch.context() as patch:
            filled = []
            patch.setattr("tests.support.host.poison.poison", lambda x, filled=filled: filled.append(x) or x)
            module.allocate(torch, torch.zeros(3))
        assert len(filled) == 3 * is_poisoned
