"""What the linear cross-entropy's benchmark reports: memory, overlap, tables, targets and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support.linear_benchmark import (
    HOST,
    OURS,
    TARGETS,
    UNFUSED,
    ScriptedTimer,
    case,
    document,
    memory_document,
    refusal,
    result,
    write,
)

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import plot_linear
    import report_linear
    from bench import linear_documents, linear_memory
    from bench import linear_profile as trace
    from bench.linear_cases import LinearCase
    from bench.linear_providers import LinearProvider, chosen_linear, through_autograd

pytestmark = pytest.mark.reference


def eager(hidden, weight, labels, reduction, group):
    return functional.cross_entropy(functional.linear(hidden, weight), labels, reduction=reduction)


def test_memory_against_tokens_and_what_does_not_fit_is_not_tried_again():
    tried = []

    def large(hidden, *given):
        tried.append(hidden.shape[0])
        if hidden.shape[0] > 16:
            raise torch.OutOfMemoryError("tried")
        return eager(hidden, *given)

    def provider_of(name, loss_of):
        return LinearProvider(name, lambda: through_autograd(loss_of), package="torch", distribution="torch")

    providers = [provider_of(OURS, eager), provider_of("large", large)]
    points = []
    for tokens in (16, 32, 64):
        small = LinearCase("mean", tokens, 64, 32, 1, "float32")
        points += linear_memory.measure_memory(small, None, 0, providers, ScriptedTimer(), points, "cpu")
    assert tried == [16, 16, 32]
    large_points = [point for point in points if point["provider"] == "large"]
    assert large_points[0]["extra_peak_bytes"] == 20000 and "refused" not in large_points[0]
    assert [point["refused"] for point in large_points[1:]] == ["out of memory at 32 tokens"] * 2
    assert points[0]["gradient_bytes"] == 4 * 32 * (16 + 64)
    growth = linear_memory.growth_bytes_a_token(points, OURS)
    assert growth == -4 * 32  # the scripted peak stays as it is, while the gradient of hidden grows
    assert linear_memory.growth_bytes_a_token(points, "large") is None
    json.dumps(points, allow_nan=False)
    targets = {"memory": {"growth_bytes_a_token_beyond_gradient": 64, "from_tokens": 0}}
    text = report_linear.memory_text(points, targets)
    assert "refused: out of memory at 32 tokens" in text and "(<= 64: met)" in text
    points[0]["extra_peak_bytes"] -= 48 * 1000
    assert "872 bytes a token more" in report_linear.growth_text(points, targets)
    assert "(<= 64: missed by" in report_linear.growth_text(points, targets)


def test_the_curve_is_of_the_targets_vocabulary():
    assert [case.tokens for case in linear_memory.curve_cases(1)] == [4096, 8192, 16384, 32768, 65536]
    names = [provider.name for provider in chosen_linear(linear_memory.CURVE_PROVIDERS)]
    assert names == [OURS, "torch eager", "liger-kernel", "cut-cross-entropy"]


def interval(category, start, end, stream=7):
    return trace.Interval(category, stream, float(start), float(end))


STEP = [
    interval("matmul", 0, 100),
    interval("all_gather", 100, 110, 20),
    interval("loss", 112, 130),
    interval("matmul", 130, 200),
    interval("all_reduce", 150, 230, 20),
    interval("other", 228, 240),
]


def test_spans_are_merged_and_overlaps_counted_once():
    assert trace.merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert trace.length([(0, 2), (1, 3), (10, 11)]) == 4
    assert trace.overlap([(0, 10), (5, 12)], [(8, 20), (9, 11)]) == 4
    assert trace.overlap([], [(0, 1)]) == 0 and trace.overlap([(0, 1)], [(1, 2)]) == 0


def test_what_of_nccl_is_hidden_and_what_is_exposed():
    summary = trace.summary_of(STEP)
    assert summary["step"] == 240 and summary["compute"] == 100 + 88 + 12
    assert summary["nccl"] == 90 and summary["nccl_overlapped"] == 52 and summary["nccl_exposed"] == 38
    assert summary["idle"] == 2
    assert summary["by_category"]["matmul"] == 170 and summary["kernels_by_category"]["matmul"] == 2
    assert summary["by_category"]["all_reduce"] == 80 and summary["by_category"]["reduce_scatter"] == 0
    longer = [*STEP, interval("matmul", 240, 250)]
    assert trace.median_step([longer, STEP, STEP]) is STEP
    median = trace.median_summary([longer, STEP, longer])
    assert median["step"] == 250 and median["by_category"]["matmul"] == 180 and median["steps"] == 3
    json.dumps(median)


def test_kernels_have_categories():
    of = trace.category_of
    assert of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "all_gather"
    assert of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "all_reduce"
    assert of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL") == "reduce_scatter"
    assert of("ncclDevKernel_SendRecv") == "nccl, other"
    assert of("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT") == "matmul"
    assert of("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64") == "matmul"
    assert of("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)") == "matmul"
    assert of("online_softmax_kernel") == "loss" and of("cross_entropy_kernel") == "loss"
    assert of("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>") == "other"
    assert of("Memcpy DtoD (Device -> Device)") == "other" and of("Memset (Device)") == "other"
    assert set(trace.NCCL) == {"all_gather", "all_reduce", "reduce_scatter", "nccl, other"}
    assert {*trace.CATEGORIES, trace.OTHER} == set(plot_linear.FILLS)


def events_of(step, first, begin, name=trace.STEP):
    """A profiler's events of one annotated step that the host queued long before the device ran it."""
    events = [{"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": 10.0}]
    names = {"matmul": "nvjet_tst", "loss": "cross_entropy_kernel", "other": "Memset (Device)"}
    for index, (category, stream, start, end) in enumerate(step):
        kernel = names.get(category, f"ncclDevKernel_{category.title().replace('_', '')}_RING")
        marks = {"correlation": first + index}
        at = begin + 0.5 + index
        events.append(
            {"ph": "X", "cat": "cuda_driver", "name": "launch", "ts": at, "dur": 0.1, "args": marks}
        )
        place = {"ts": 1000 + first + start, "dur": end - start, "args": marks | {"stream": stream}}
        events.append({"ph": "X", "cat": "kernel", "name": kernel} | place)
    return events


def test_a_steps_kernels_are_those_launched_inside_its_annotation():
    events = [
        *events_of(STEP, 10000, 50.0),
        *events_of([interval("all_reduce", 0, 5, 20)], 20000, 80.0, name="something else"),
        *events_of(STEP, 30000, 100.0),
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 31050.0, "dur": 1.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "alone", "ts": 90000.0, "dur": 1.0, "args": {"stream": 7}},
    ]
    steps = trace.steps_of(events)
    assert [len(step) for step in steps] == [6, 7]
    assert [kernel.category for kernel in steps[0]] == [kernel.category for kernel in STEP]
    assert trace.summary_of(steps[0]) == trace.summary_of(STEP)
    assert steps[1][1].start == 31050.0
    with pytest.raises(ValueError, match=r"trace: expected kernels in every step, got \[0\]"):
        trace.steps_of(events_of([], 0, 0.0))
    with pytest.raises(ValueError, match="trace: expected kernels in every step, got"):
        trace.steps_of([])


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_annotation_is_in_the_profilers_trace():
    """On a CPU there are no kernels, and that is what is missing."""
    timer = ScriptedTimer()
    with pytest.raises(ValueError, match=r"expected kernels in every step, got \[0, 0, 0\]"):
        trace.traced_steps(lambda: torch.ones(3).sum(), timer, 3)
    assert timer.order == [trace.STEP] * 5


def test_a_timeline_has_the_busiest_lane_first_and_nccls_last():
    timeline = trace.timeline_of([*STEP, interval("other", 0, 3, 9)])
    assert timeline["lanes"] == ["compute", "compute", "NCCL"]
    lanes = [kernel["lane"] for kernel in timeline["intervals"]]
    assert lanes == [0, 2, 0, 0, 2, 0, 1]
    assert timeline["intervals"][1] == {"lane": 2, "category": "all_gather", "start": 100.0, "end": 110.0}
    json.dumps(timeline)


def profile_document():
    host = HOST | {"gpus_used": 4}
    profiled = case(ranks=4) | {"provider": OURS}
    ranks = [trace.median_summary([STEP])] * 4
    return document(host=host, case=profiled, ranks=ranks, timeline=trace.timeline_of(STEP))


@pytest.fixture
def one_gpu():
    return document(
        result(OURS, 1.05),
        result(UNFUSED, 1.04),
        result("liger-kernel", 2.4, queued=False),
        result("cut-cross-entropy", 1.01, wrong="d_weight: relative error 0.9, at most 0.1"),
        result(OURS, 1.2, tokens=16, bytes_over_fp32_weight_gradient=-5),
        refusal(UNFUSED, "out of memory", tokens=16),
        refusal("liger-kernel", "out of memory", tokens=16),
        refusal("cut-cross-entropy", "out of memory", tokens=16),
    )


def test_bounds_are_met_missed_or_not_measured():
    bounds = TARGETS["cases"][0]["at_most"]
    assert report_linear.verdicts(result(OURS, 1.05), bounds) == [
        "<= 1.06 x the matmuls: met",
        "<= 0.50 GiB over the fp32 gradient of the weight: met",
    ]
    missed = report_linear.verdicts(result(OURS, 1.113, bytes_over_fp32_weight_gradient=2**30), bounds)
    assert [line.rpartition(": ")[2] for line in missed] == ["missed by 5.0 %", "missed by 100.0 %"]
    assert report_linear.verdicts(None, {"ratio": 1.0}) == ["<= 1.00 x the matmuls: not measured"]
    assert report_linear.verdicts(result(OURS, 9.0), {}) == ["runs: met"]
    assert report_linear.verdicts(refusal(OURS, "out of memory"), {}) == ["runs: missed"]
    assert report_linear.verdicts(None, {}) == ["runs: missed"]


def test_the_table_for_a_terminal(one_gpu):
    lines = report_linear.results_text(one_gpu["results"], TARGETS).splitlines()
    assert lines[0].startswith("mean 8 x 64 x 32, 1 GPU")
    assert [line.split()[0] for line in lines[1:5]] == ["cut-cross-entropy", "F.linear", OURS, "liger-kernel"]
    assert "WRONG: d_weight: relative error 0.9" in lines[1] and "waits for the device" in lines[4]
    assert "2.00      0.25  1.0e-06 2.0e-03 3.0e-03" in lines[3]
    assert lines[5] == "  three bare matmuls: 20.000 ms"
    assert lines[6].startswith("  must reach: <= 1.06 x the matmuls: met; <= 0.50 GiB")
    assert "refused: out of memory" in lines[-3] and lines[-1] == "  must reach: runs: met"
    several = report_linear.results_text([result(OURS, 1.0, ranks=4, all_reduce_milliseconds=0.65)], TARGETS)
    assert "20.000 ms, of which the all-reduce alone takes 0.650 ms" in several


def test_the_readmes_table(one_gpu):
    assert (
        report_linear.table_part(one_gpu, TARGETS)
        == """\
1 x Imaginary GPU; torch 2.11.0, Triton 3.6.0, CUDA 13.0, Python 3.12.3; liger-kernel 0.8.5; \
commit 0123456789ab.

| tokens x vocabulary | time / matmuls | ms | TFLOP/s | extra GiB | must reach | best other |
| --- | --- | --- | --- | --- | --- | --- |
| mean 8 x 64 | **1.050** | 21.00 | 700 | 2.00 | <= 1.06 x the matmuls: met; \
<= 0.50 GiB over the fp32 gradient of the weight: met | liger-kernel 2.400, 2.00 GiB |
| mean 16 x 64 | **1.200** | 24.00 | 700 | 2.00 | runs: met | - |

| time / matmuls, extra GiB | vocab_parallel_ce | F.linear + vocab_parallel_ce | liger-kernel \
| cut-cross-entropy |
| --- | --- | --- | --- | --- |
| mean 8 x 64 | 1.050, 2.00 | 1.040, 2.00 | 2.400, 2.00 (1) | 1.010, 2.00 (2) |
| mean 16 x 64 | 1.200, 2.00 | - (3) | - (3) | - (3) |

(1) liger-kernel, waits for the device: its time has the host's in it; \
(2) cut-cross-entropy, wrong: `d_weight: relative error 0.9, at most 0.1`; \
(3) F.linear + vocab_parallel_ce, liger-kernel, cut-cross-entropy, refused: `out of memory`; \
quack-kernels, not timed: `not installed: No module named 'quack'`."""
    )


def test_every_target_is_reported(one_gpu):
    assert (
        report_linear.targets_part({"linear_table_1gpu.json": one_gpu}, TARGETS)
        == """\
- mean 8 x 64 x 32, 1 GPU: <= 1.06 x the matmuls: met; <= 0.50 GiB over the fp32 gradient of the weight: met
- mean 16 x 64 x 32, 1 GPU: runs: met
- mean 8 x 64 x 32, 4 GPUs: <= 1.07 x the matmuls: not measured"""
    )


@pytest.fixture
def folder(tmp_path, one_gpu):
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"# Title\n\n{plot_linear.BEGIN}\n\n{plot_linear.END}\n\nThe end.\n")
    write(tmp_path, "linear_targets.json", TARGETS)
    write(tmp_path, "linear_table_1gpu.json", one_gpu)
    return tmp_path


def run(folder, *arguments):
    places = ["--results", str(folder / "results"), "--readme", str(folder / "README.md")]
    return plot_linear.main([*arguments, *places])


def test_pictures_are_drawn_and_checked_with_the_readmes_part(folder, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is not installed")
    write(folder, "linear_memory_1gpu.json", memory_document())
    write(folder, "linear_profile_4gpu.json", profile_document())
    assert run(folder, "--check") == 1
    said = capsys.readouterr().out
    assert "stale: README: Linear cross-entropy on 1 GPU (`linear_table_1gpu.json`)" in said
    assert "stale: linear_memory_1gpu.png: not drawn from this" in said
    assert run(folder, "--write") == 0 and run(folder, "--check") == 0
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# Title\n\n") and readme.endswith("\n\nThe end.\n")
    assert "NCCL 0.090, of which 0.052 (58 %) beside other kernels and 0.038 exposed, idle 0.002" in readme
    for name in ("linear_memory_1gpu.png", "linear_profile_4gpu.png"):
        assert f"](results/{name})" in readme
        assert (folder / "results" / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    changed = memory_document()
    changed["points"][0]["extra_peak_bytes"] += 1
    write(folder, "linear_memory_1gpu.json", changed)
    assert run(folder, "--check") == 1


def test_documents_must_be_finished_and_of_the_ranks_of_their_name(folder, one_gpu):
    results = folder / "results"
    assert list(linear_documents.read_documents(results)) == ["linear_table_1gpu.json"]
    write(folder, "linear_table_1gpu.json", one_gpu | {"finished": False})
    with pytest.raises(ValueError, match="1gpu.json: expected the document of a finished run"):
        linear_documents.read_documents(results)
    write(folder, "linear_table_1gpu.json", one_gpu | {"host": HOST | {"gpus_used": 2}})
    with pytest.raises(ValueError, match="1gpu.json: host.gpus_used must be 1, got 2"):
        linear_documents.read_documents(results)
    write(folder, "linear_table_1gpu.json", one_gpu | {"host": HOST | {"commit": None}})
    with pytest.raises(ValueError, match="1gpu.json: host.commit must name the commit"):
        linear_documents.read_documents(results)
    with pytest.raises(ValueError, match="expected one result of vocab_parallel_ce, got several"):
        linear_documents.results_by_case([result(OURS, 1.0), result(OURS, 1.0)])


def test_the_committed_part_and_pictures_are_those_of_the_committed_documents(capsys):
    assert plot_linear.main(["--check"]) == 0, capsys.readouterr().out
