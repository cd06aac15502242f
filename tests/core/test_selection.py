"""Which implementation runs, and why: every condition, of machines that need not be there."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import plan, selection, spec
from vocab_parallel_ce.blocks import ONE_PASS, ONE_PASS_SMOOTHING, fewest_rows_of_one_pass, units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.selection import ONE_PASS_SHARED_MEMORY, Gpu, Workload, select

pytestmark = pytest.mark.reference

WORKLOAD = Workload(n_ranks=1, gradient="in_forward", beyond=(), is_aligned=True, has_padding=False, fits=True)
GPU = Gpu(is_nvidia=True, shared_memory=ONE_PASS_SHARED_MEMORY, has_gluon=True)
BEYOND = ("entropy", "mean_logit")
OTHERS = ("mps", "xpu", "npu", "privateuseone")  # devices without kernels, which installing triton does not change

# What of a call or a GPU keeps one launch from doing it: (changes to WORKLOAD, to GPU, what is said of it).
OBSTACLES = {
    "several ranks": ({"n_ranks": 2}, {}, "one rank, got 2"),
    "unreduced": ({"gradient": "in_backward"}, {}, "gradient 'in_forward', got 'in_backward'"),
    "out of place": ({"gradient": "out_of_place"}, {}, "gradient 'in_forward', got 'out_of_place'"),
    "options": (
        {"beyond": BEYOND},
        {},
        "a loss that it computes, got entropy, mean_logit",
    ),
    "the bits of several ranks": ({"has_units": True}, {}, "a row in the order of one rank, got the bits of several"),
    "padding": ({"has_padding": True}, {}, "logits without padded columns"),
    "off a boundary": ({"is_aligned": False}, {}, "logits in memory that begins at 16 bytes"),
    "width": ({"fits": False}, {}, "rows of a width in its table of measurements"),
    "another maker": ({}, {"is_nvidia": False}, "an NVIDIA GPU, got another maker's"),
    "old triton": ({}, {"has_gluon": False}, "a triton with Gluon's asynchronous copies, got"),
    "small GPU": (
        {},
        {"shared_memory": ONE_PASS_SHARED_MEMORY - 1},
        f"{ONE_PASS_SHARED_MEMORY} bytes of shared memory a program, got {ONE_PASS_SHARED_MEMORY - 1}",
    ),
}


def on_a_gpu(requested: str, workload: Workload = WORKLOAD, gpu: Gpu = GPU) -> selection.Selection:
    return select("cuda", requested, triton="compiler", workload=workload, gpu=gpu)


@pytest.mark.parametrize(
    ("device", "requested", "triton", "expected"),
    [
        ("cuda", "auto", "compiler", "triton"),
        ("cuda", "triton", "compiler", "triton"),
        ("cuda", "reference", "absent", "reference"),
        ("cpu", "auto", "compiler", "reference"),
        ("cpu", "auto", "interpreter", "reference"),
        ("cpu", "auto", "absent", "reference"),
        ("cpu", "auto", "too old", "reference"),
        ("cpu", "triton", "interpreter", "triton"),
        ("meta", "auto", "compiler", "reference"),
        *((device, "auto", "compiler", "reference") for device in OTHERS),
        *((device, "auto", "absent", "reference") for device in OTHERS),
        ("mps", "reference", "absent", "reference"),
    ],
)
def test_selection_without_a_call_names_what_runs_and_why(device, requested, triton, expected):
    """As the scaling of a stored gradient and the command line ask."""
    chosen = select(device, requested, triton=triton)
    assert chosen.name == expected and chosen.reason


@pytest.mark.parametrize(
    ("device", "requested", "triton", "reason"),
    [
        ("cuda", "auto", "absent", "not installed"),
        ("cuda", "one_pass", "absent", "not installed"),
        ("cuda", "auto", "too old", "needs the package triton, 3.6 or newer, got .*; upgrade it"),
        ("cpu", "triton", "too old", "needs the package triton, 3.6 or newer, got .*; upgrade it"),
        ("cpu", "triton", "compiler", "TRITON_INTERPRET=1"),
        *((device, "triton", "compiler", f"got tensors on {device}, .*use impl='auto'") for device in OTHERS),
        *((device, "one_pass", "absent", f"got tensors on {device}, .*use impl='auto'") for device in OTHERS),
        ("cpu", "one_pass", "compiler", "'one_pass' needs a GPU and triton's compiler, got cpu"),
        ("cuda", "one_pass", "interpreter", "'one_pass' needs a GPU .* got cuda and triton's interpreter"),
        ("cuda", "one_pass", "compiler", "'one_pass' needs a call to decide about"),
        ("cuda", "symmetric", "compiler", "expected one of 'auto', 'reference', 'triton', 'one_pass', got"),
    ],
)
def test_what_cannot_run_raises_with_the_unmet_condition(device, requested, triton, reason):
    with pytest.raises(ValueError, match=f"^impl: .*{reason}"):
        select(device, requested, triton=triton)


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_leaves_the_call_to_triton_and_is_told(name):
    of_workload, of_gpu, said = OBSTACLES[name]
    workload, gpu = WORKLOAD._replace(**of_workload), GPU._replace(**of_gpu)
    prefix, remedy = "impl: 'one_pass' needs ", "; 'auto' chooses what can run"
    with pytest.raises(ValueError, match=f"^{prefix}{said}.*{remedy}$") as refused:
        on_a_gpu("one_pass", workload, gpu)
    needed = str(refused.value).removeprefix(prefix).removesuffix(remedy)
    why = f"a GPU, and triton is installed; one_pass needs {needed}"
    assert on_a_gpu("auto", workload, gpu) == ("triton", why, 0)


def test_a_padded_shard_is_not_for_one_pass(monkeypatch):
    """It would read the padding, whatever that holds."""
    asked = []
    monkeypatch.setattr(plan, "gpu_of", lambda index: GPU)
    monkeypatch.setattr(plan, "select", lambda *_, workload, **__: asked.append(workload) or select("cpu", "reference"))
    key = plan.PlanKey(torch.bfloat16, 16384, torch.device("cuda", 0), 0, 1, "in_forward", is_aligned=True)
    for vocab_size in (None, 16384, 16376):
        plan.make_plan(LABELS, Settings(vocab_size=vocab_size), key)
    workload = WORKLOAD._replace(fewest_rows=fewest_rows_of_one_pass(2 * 16384))
    assert asked == [workload, workload, workload._replace(has_padding=True)]


def test_a_loss_per_row_has_the_bits_of_one_implementation(monkeypatch):
    """Whatever the number of rows; of a reduced loss the faster one runs."""
    asked = []
    monkeypatch.setattr(plan, "gpu_of", lambda index: GPU)
    monkeypatch.setattr(plan, "select", lambda *_, workload, **__: asked.append(workload) or select("cpu", "reference"))
    key = plan.PlanKey(torch.bfloat16, 16384, torch.device("cuda", 0), 0, 1, "in_forward", is_aligned=True)
    for reduction in ("none", "sum", "mean"):
        plan.make_plan(LABELS, Settings(reduction=reduction), key)
    few = fewest_rows_of_one_pass(2 * 16384)
    assert few > 1 and [workload.fewest_rows for workload in asked] == [0, few, few]


def test_one_rank_with_the_bits_of_several_does_not_run_one_pass(monkeypatch):
    """It walks a row in an order of its own, and a loss per row would be one_pass's from the first row on."""
    asked = []
    monkeypatch.setenv(SAME_BITS, "1")
    units_of.cache_clear()
    monkeypatch.setattr(plan, "gpu_of", lambda index: GPU)
    monkeypatch.setattr(plan, "select", lambda *_, workload, **__: asked.append(workload) or select("cpu", "reference"))
    key = plan.PlanKey(torch.bfloat16, 16384, torch.device("cuda", 0), 0, 1, "in_forward", is_aligned=True)
    plan.make_plan(LABELS, Settings(reduction="none"), key)
    plan.make_plan(LABELS, Settings(reduction="none"), key._replace(n_columns=16392))  # no whole units
    units_of.cache_clear()
    assert [workload.has_units for workload in asked] == [True, False]


def test_one_pass_runs_where_nothing_stands_in_its_way():
    assert on_a_gpu("auto") == ("one_pass", "one read and one write", 0)
    by_rows = WORKLOAD._replace(fewest_rows=97)
    assert on_a_gpu("auto", by_rows) == ("one_pass", "one read and one write; triton for fewer than 97 rows", 97)
    for workload in (WORKLOAD, by_rows):
        for name in ("one_pass", "triton", "reference"):
            assert on_a_gpu(name, workload) == (name, "asked for", 0)
    assert on_a_gpu("auto", gpu=GPU._replace(shared_memory=10**6)).name == "one_pass"


def test_options_that_one_pass_lacks_are_named_and_off_by_default():
    on = spec.LossOptions(-100, 0.1, 0.1, 0.5, lse=True)
    assert LABELS.beyond_one_pass(spec.PLAIN) == LABELS.beyond_one_pass(on) == ()
    assert LABELS.beyond_one_pass(spec.LossOptions(class_weight=True)) == ()
    outputs = ("entropy", "sum_sq_probs", "mean_logit", "predictions")
    on = on._replace(**dict.fromkeys(outputs, True), softcap=30.0, class_weight=True)
    assert LABELS.beyond_one_pass(on) == (*outputs, "softcap", "label_smoothing with class_weight")


def test_smoothing_has_fewer_widths():
    smoothing, between = spec.LossOptions(smoothing=0.1), ONE_PASS_SMOOTHING[0][1] + 16
    assert LABELS.one_pass_config(spec.PLAIN, between) and LABELS.one_pass_config(smoothing, between) is None
    for options, table in ((spec.PLAIN, ONE_PASS), (smoothing, ONE_PASS_SMOOTHING)):
        most = table[-1][1]
        assert LABELS.one_pass_config(options, most) and LABELS.one_pass_config(options, most + 16) is None


def test_a_triton_without_gluon_is_no_error(monkeypatch):
    """Of an old Triton the parent packages are missing, of a newer one the module alone."""

    def no_parent(name):
        raise ModuleNotFoundError(name)

    for find_spec in (no_parent, lambda name: None):
        monkeypatch.setattr(selection.importlib.util, "find_spec", find_spec)
        assert selection._has_gluon() is False


def test_every_function_runs_on_a_device_without_kernels_and_without_float64():
    """Forward and backward stay on it: MPS has no float64, and a tensor on the CPU would not mix."""
    backend_registration = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch has no spare backend without C++")
    result = fresh_python("-m", "tests.support.host.other_device")
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert len(report) == 42
    dtypes = ("bool", "int32", "int64", "float32", "bfloat16")
    expected = {f"{device}torch.{dtype}" for device in ("npu ", "") for dtype in dtypes}
    for name, found in report.items():
        assert {"npu torch.float32"} <= set(found["kinds"]) <= expected, (name, found)
        assert found["triton"].startswith("ValueError: impl: 'triton' needs "), (name, found)
        assert "got tensors on npu, for which there are no kernels" in found["triton"], (name, found)
