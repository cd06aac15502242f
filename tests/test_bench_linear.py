"""The benchmark of the linear cross-entropy, without a GPU: its cases, checks, times and command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support.linear_benchmark import OURS, UNFUSED, YARDSTICK, ScriptedTimer

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import report_linear
    from bench import (
        linear_cases,
        linear_documents,
        linear_measure,
        linear_memory,
        linear_oracle,
        linear_providers,
    )
    from bench.linear_cases import LinearCase, LinearEffort
    from bench.linear_measure import ALL_REDUCE
    from bench.linear_oracle import LinearResult
    from bench.linear_profile import Interval
    from bench.linear_providers import (
        LINEAR_PROVIDERS,
        LinearProvider,
        chosen_linear,
        through_autograd,
    )

pytestmark = pytest.mark.reference

SMALL = LinearCase("mean", 48, 64, 32, 1, "float32")
RIGHT = (OURS, UNFUSED, "torch eager")
NUMBERS = {
    "ratio",
    "ratio_spread",
    "milliseconds",
    "yardstick_milliseconds",
    "all_reduce_milliseconds",
    "teraflops_per_second",
    "queued",
    "extra_peak_bytes",
    "bytes_over_fp32_weight_gradient",
    "errors",
    "wrong",
}


def measured(names=RIGHT, timer=None, case=SMALL, extra=()):
    providers = [*(chosen_linear(",".join(names)) if names else ()), *extra]
    results = linear_measure.measure_linear(
        case, None, 0, providers, timer or ScriptedTimer(), LinearEffort(2, 3), device="cpu"
    )
    return {result["provider"]: result for result in results}


def provider_of(loss_of, name="other", **fields):
    fixed = {"package": "torch", "distribution": "torch"} | fields
    return LinearProvider(name, lambda: through_autograd(loss_of), **fixed)


def eager(hidden, weight, labels, reduction, group):
    return functional.cross_entropy(functional.linear(hidden, weight), labels, reduction=reduction)


def over_all_labels(hidden, weight, labels, reduction, group):
    return eager(hidden, weight, labels, "sum", group) / labels.numel()


def test_every_target_is_in_the_table():
    targets = linear_documents.bounds_by_case(linear_documents.read_targets(SCRIPTS / "results"))
    assert len(targets) == 6
    for case, bounds in targets.items():
        assert case in linear_cases.table_cases(case.ranks), case
        assert set(bounds) <= set(report_linear.BOUNDS)
    assert LinearCase("mean", 16384, 128256, 4096, 2) in linear_cases.table_cases(2)
    assert {case.columns for case in linear_cases.table_cases(4)} == {32064}
    assert {case.columns for case in linear_cases.table_cases(2)} == {64128}


def test_cases_are_named_on_the_command_line():
    named = linear_cases.chosen_cases("mean:512x8064, none:8x64x32,mean:512x8064", 2)
    assert named == [LinearCase("mean", 512, 8064, 4096, 2), LinearCase("none", 8, 64, 32, 2)]
    assert str(named[1]) == "none:8x64x32" and linear_cases.parsed_case("none:8x64x32", 2) == named[1]
    assert linear_cases.chosen_cases(None, 1) == linear_cases.table_cases(1)
    for name in ("sum:8x64", "mean:8", "mean:0x64", "8x64", "mean:8x64x"):
        with pytest.raises(ValueError, match="case: expected REDUCTION:TOKENSxVOCABULARY"):
            linear_cases.chosen_cases(name, 1)
    with pytest.raises(ValueError, match="vocabulary: expected a multiple of the 3 ranks, got 64"):
        linear_cases.chosen_cases("mean:8x64", 3)


def test_effort_suits_the_length():
    by_case = {str(case): LinearEffort.of(case, 15) for case in linear_cases.table_cases(1)}
    assert by_case["mean:4096x128256x4096"] == (1, 15)
    assert by_case["mean:32768x128256x4096"] == (1, 5)
    assert LinearEffort.of(linear_cases.table_cases(4)[1], 15) == (4, 15)
    assert LinearEffort.of(SMALL, 2) == (linear_cases.MOST_CALLS, 2)


def test_flops_and_bytes_are_a_ranks():
    case = LinearCase("mean", 4096, 128256, 4096, 4)
    assert case.flops == 6 * 4096 * 32064 * 4096
    assert case.fp32_weight_bytes == 4 * 32064 * 4096
    assert linear_memory.gradient_bytes(case) == 2 * 4096 * (4096 + 32064)


def test_inputs_are_random_the_same_where_ranks_share_them_and_a_tenth_is_ignored():
    case = LinearCase("none", 4000, 64, 32, 2)
    one, other = (linear_cases.make_inputs(case, rank, "cpu") for rank in (0, 1))
    assert torch.equal(one.hidden, other.hidden) and torch.equal(one.labels, other.labels)
    assert not torch.equal(one.weight, other.weight) and one.weight.shape == (32, 32)
    assert float(one.weight.detach().float().std()) == pytest.approx(linear_cases.WEIGHT_STD, rel=0.1)
    assert float((one.labels == -100).double().mean()) == pytest.approx(0.1, abs=0.02)
    assert int(one.labels.max()) > 32  # of the whole vocabulary
    grad_output = one.upstreams[torch.float32]
    assert torch.equal(grad_output, one.upstreams[torch.bfloat16].float()) and float(grad_output.std()) > 0.5
    assert one.upstreams.keys() == {torch.float32, torch.bfloat16}
    mean = linear_cases.make_inputs(case._replace(reduction="mean"), 0, "cpu")
    assert mean.upstreams[torch.float32].shape == () and float(mean.upstreams[torch.float32]) == 1.0


@pytest.mark.parametrize("chunk_elements", [64 * 10, 2**28])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_oracle_is_pytorchs_in_fp64_whatever_its_chunks(reduction, chunk_elements, monkeypatch):
    monkeypatch.setattr(linear_oracle, "CHUNK_ELEMENTS", chunk_elements)
    case = SMALL._replace(reduction=reduction)
    inputs = linear_cases.make_inputs(case, 0, "cpu")
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in inputs[:2])
    loss = eager(hidden, weight, inputs.labels, reduction, None)
    grads = torch.autograd.grad(loss, (hidden, weight), inputs.upstreams[torch.float32].double())
    right = linear_oracle.expected(case, inputs, 0, None)
    errors = linear_oracle.errors(LinearResult(loss.detach(), *grads), right)
    assert max(errors.values()) < 1e-13


def test_the_error_of_a_weights_gradient_is_that_of_its_rows():
    """A row without a label is small beside one with a label, and counts as much."""
    right = LinearResult(torch.ones(2), torch.ones(2, 2), torch.tensor([[1.0, 0.0], [1e-3, 0.0]]))
    half_gone = right._replace(d_weight=torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert linear_oracle.errors(half_gone, right)["d_weight"] == pytest.approx(0.5**0.5)
    must_be_zero = right._replace(d_hidden=torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert linear_oracle.errors(must_be_zero, must_be_zero)["d_hidden"] == 0.0
    assert linear_oracle.errors(right, must_be_zero)["d_hidden"] > 100
    nothing = LinearResult(*(torch.zeros(2, 2) for _ in range(3)))
    assert linear_oracle.errors(nothing, nothing)["d_weight"] == 0.0


def test_a_fault_names_what_is_wrong_and_nan_is():
    allowed = {"loss": 0.1, "d_weight": 0.1}
    assert linear_oracle.fault({"loss": 0.1, "d_weight": 0.0}, allowed) is None
    found = linear_oracle.fault({"loss": float("nan"), "d_weight": 0.25}, allowed)
    assert found == "loss: relative error nan, at most 0.1; d_weight: relative error 0.25, at most 0.1"


def test_a_result_has_all_numbers_and_is_json():
    results = measured()
    for name in RIGHT:
        assert set(results[name]) == {*LinearCase._fields, "provider"} | NUMBERS
    json.dumps(results, allow_nan=False)
    unfused = results[UNFUSED]
    assert unfused["ratio"] == 1.5 and unfused["ratio_spread"] == [1.5, 1.5]
    assert unfused["milliseconds"] == 1.5 and unfused["yardstick_milliseconds"] == 1.0  # of two calls
    assert unfused["teraflops_per_second"] == round(6 * 48 * 64 * 32 / 1.5 / 1e9, 1)
    assert unfused["all_reduce_milliseconds"] is None and unfused["wrong"] is None
    assert unfused["bytes_over_fp32_weight_gradient"] == 20000 - 4 * 64 * 32
    assert unfused["queued"] and not results["torch eager"]["queued"]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", [*RIGHT, f"{OURS}[chunk_tokens=1024]"])
def test_right_providers_pass_the_check(name, reduction):
    result = measured((name,), case=SMALL._replace(reduction=reduction))[name]
    assert max(result["errors"].values()) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_over_logits_that_nobody_else_reads_writes_over_them(reduction, monkeypatch):
    """A mean at the call itself, as ``linear_cross_entropy`` does with its chunks."""
    loss_over, written = linear_providers.vocab_parallel_cross_entropy, []

    def watched(logits, labels, **options):
        before = logits.detach().clone()
        loss = loss_over(logits, labels, **options)
        written.append(not torch.equal(before, logits))
        return loss

    monkeypatch.setattr(linear_providers, "vocab_parallel_cross_entropy", watched)
    result = measured((UNFUSED,), case=SMALL._replace(reduction=reduction))[UNFUSED]
    assert set(written) == {reduction == "mean"} and max(result["errors"].values()) < 1e-5


def test_ratios_are_of_the_same_round_which_every_second_time_goes_the_other_way():
    timer = ScriptedTimer({YARDSTICK: [9.0, 9.0, 2.0, 4.0, 2.0], "torch eager": [9.0, 9.0, 3.0, 8.0, 5.0]})
    result = measured(("torch eager",), timer)["torch eager"]
    assert timer.order[:6] == [YARDSTICK, "torch eager", "torch eager", YARDSTICK, YARDSTICK, "torch eager"]
    # Two rounds warm up, then ratios of 1.5, 2 and 2.5.
    assert result["ratio"] == 2.0 and result["ratio_spread"] == [1.5, 2.5]
    assert result["yardstick_milliseconds"] == 1.0 and result["milliseconds"] == 2.5


def test_the_yardstick_multiplies_three_times_into_memory_that_is_there():
    inputs = linear_cases.make_inputs(SMALL, 0, "cpu")
    runs = linear_measure.yardsticks(SMALL, inputs, None)
    assert list(runs) == [YARDSTICK]
    matmuls = runs[YARDSTICK]
    places = [tensor.data_ptr() for tensor in (matmuls.logits, matmuls.d_hidden, matmuls.d_weight)]
    matmuls()
    logits = inputs.hidden.detach() @ inputs.weight.detach().T
    torch.testing.assert_close(matmuls.logits, logits)
    grad = (logits.float().softmax(-1) / SMALL.tokens).to(logits.dtype)
    torch.testing.assert_close(matmuls.d_hidden, grad @ inputs.weight.detach())
    torch.testing.assert_close(matmuls.d_weight, grad.T @ inputs.hidden.detach())
    assert places == [tensor.data_ptr() for tensor in (matmuls.logits, matmuls.d_hidden, matmuls.d_weight)]


def test_on_several_ranks_the_yardstick_reduces_the_gradient_of_hidden(monkeypatch):
    reduced = []
    monkeypatch.setattr(
        linear_measure.dist, "all_reduce", lambda tensor, group: reduced.append((tensor, group))
    )
    inputs = linear_cases.make_inputs(SMALL, 0, "cpu")
    runs = linear_measure.yardsticks(SMALL, inputs, "a group")
    for run in runs.values():
        run()
    assert list(runs) == [YARDSTICK, ALL_REDUCE] and len(reduced) == 2
    assert all(tensor is runs[YARDSTICK].d_hidden and group == "a group" for tensor, group in reduced)
    times = {YARDSTICK: [4.0], ALL_REDUCE: [1.0], "x": [6.0]}
    numbers = linear_measure.time_numbers(SMALL, times, "x", 2)
    assert numbers["all_reduce_milliseconds"] == 0.5 and numbers["ratio"] == 1.5


@pytest.mark.parametrize(("reduces_hidden", "reductions"), [(True, 0), (False, 1)])
def test_who_does_not_reduce_the_gradient_of_hidden_has_it_reduced(monkeypatch, reduces_hidden, reductions):
    reduced = []
    monkeypatch.setattr(linear_measure.dist, "all_reduce", lambda tensor, group: reduced.append(tensor))
    inputs = linear_cases.make_inputs(SMALL, 0, "cpu")
    step = through_autograd(eager, reduces_hidden=reduces_hidden)
    result = step(inputs, "mean", "a group")
    assert len(reduced) == reductions and all(tensor is result.d_hidden for tensor in reduced)
    assert inputs.hidden.grad is None and not result.loss.requires_grad


def test_another_provider_that_is_wrong_is_timed_and_named():
    wrong = measured((), extra=[provider_of(over_all_labels)])["other"]
    assert wrong["wrong"].startswith("loss: relative error 0.") and wrong["ratio"] == 1.5
    assert linear_documents.measured(wrong, "ratio") is None


def test_this_project_must_be_right():
    with pytest.raises(AssertionError, match="mean:48x64x32: other: loss: relative error"):
        measured((), extra=[provider_of(over_all_labels, is_ours=True)])
    almost = partial(lambda *given: eager(*given) * 1.001)
    assert measured((), extra=[provider_of(almost)])["other"]["wrong"] is None
    with pytest.raises(AssertionError, match="d_weight: relative error 0.001"):
        measured((), extra=[provider_of(almost, is_ours=True)])


def test_what_a_provider_raises_is_why_it_is_refused():
    def raising(error):
        def loss_of(*given):
            raise error

        return loss_of

    timer = ScriptedTimer()
    extra = [
        provider_of(raising(torch.OutOfMemoryError("tried")), "large"),
        provider_of(raising(ValueError("\n width: odd\nstack")), "odd"),
    ]
    results = measured(("torch eager",), timer, extra=extra)
    assert results["large"]["refused"] == "out of memory"
    assert results["odd"]["refused"] == "ValueError: width: odd"
    assert set(results["odd"]) == {*LinearCase._fields, "provider", "refused"}
    assert not {"large", "odd"} & set(timer.order)
    with pytest.raises(ValueError, match="width"):
        measured((), extra=[provider_of(raising(ValueError("width")), is_ours=True)])


def test_the_largest_error_of_any_rank_counts_and_one_rank_refuses_for_all():
    provider = chosen_linear("torch eager")[0]
    one = linear_measure.Tried(None, {"loss": 0.0, "d_hidden": 0.01, "d_weight": 0.0}, 10)
    two = linear_measure.Tried(None, {"loss": 0.0, "d_hidden": 0.0, "d_weight": float("nan")}, 12)
    judged = linear_measure._judged(SMALL, provider, [one, two])
    assert judged["errors"] == {"loss": 0.0, "d_hidden": 0.01, "d_weight": None}
    assert judged["wrong"].startswith("d_weight: relative error nan") and judged["extra_peak_bytes"] == 12
    refused = linear_measure.Tried("out of memory", {}, 0)
    assert linear_measure._judged(SMALL, provider, [one, refused]) == {"refused": "out of memory"}


def test_providers_are_named_and_absent_ones_say_why():
    every = [provider.name for provider in chosen_linear(None)]
    assert every[:2] == [OURS, UNFUSED] and "quack-kernels (tuned)" not in every
    assert f"{OURS}[chunk_tokens=2048]" in {provider.name for provider in LINEAR_PROVIDERS}
    several = {provider.name for provider in LINEAR_PROVIDERS if provider.of_several}
    assert {name for name in several if OURS not in name} == {"F.linear + flash-attn"}
    assert chosen_linear("torch eager")[0].available(2) == "needs the whole vocabulary on one rank"
    with pytest.raises(ValueError, match="providers: expected all or some of .*, got 'torch'"):
        chosen_linear("torch")

    def missing():
        raise ModuleNotFoundError("No module named 'cutlass'")

    absent = LinearProvider("x", missing, package="torch", distribution="torch")
    assert absent.available(1) == "not installed: No module named 'cutlass'"


def test_pytorchs_own_is_absent_where_torch_has_none(monkeypatch):
    monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    loaded = chosen_linear("F.linear_cross_entropy")[0]
    fresh = LinearProvider(loaded.name, loaded.load, package="torch", distribution="torch")
    assert fresh.available(1).endswith("has no torch.nn.functional.linear_cross_entropy")


KERNELS = [Interval("matmul", 7, 0.0, 5.0), Interval("all_reduce", 20, 4.0, 6.0)]


@pytest.mark.parametrize("what", ["table", "memory", "profile"])
def test_the_command_writes_a_complete_document(what, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    from contextlib import nullcontext

    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_linear_cross_entropy as script

    path = tmp_path / "document.json"
    options = {"table": [], "memory": ["--memory-curve"], "profile": ["--profile"]}[what]
    words = ["bench", *options, "--json", str(path), "--cases", "mean:16x64x32", "--rounds", "3"]
    provider = "torch eager" if what == "profile" else f"torch eager,{UNFUSED}"
    monkeypatch.setattr("sys.argv", [*words, "--providers", provider])
    monkeypatch.setattr(script, "joined_ranks", lambda: nullcontext(script.Ranks(0, 1, None)))
    monkeypatch.setattr(script, "DeviceTimer", lambda ranks: ScriptedTimer())
    for name in ("measure_linear", "measure_memory"):
        monkeypatch.setattr(script, name, partial(getattr(script, name), device="cpu"))
    monkeypatch.setattr(script, "make_inputs", partial(linear_cases.make_inputs, device="cpu"))
    monkeypatch.setattr(script, "traced_steps", lambda run, timer: [run() and KERNELS])
    monkeypatch.setattr(script, "of_all_ranks", lambda own, group, device: [own])
    assert script.main() == 0
    printed = capsys.readouterr().out.splitlines()
    written = json.loads(path.read_text())
    assert json.loads(printed[-1]) == written and written["finished"] and written["absent"] == {}
    kinds = {"table": {"results"}, "memory": {"points"}, "profile": {"case", "ranks", "timeline"}}
    assert set(written) == {"host", "finished", "absent"} | kinds[what]
    assert written["host"]["packages"] == {}
