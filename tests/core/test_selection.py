"""Which implementation runs, and why, on machines that need not be there. ``test_one_pass`` has that of one launch."""

from __future__ import annotations

import json

import pytest

from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import selection
from vocab_parallel_ce.selection import select

pytestmark = pytest.mark.reference

OTHERS = ("mps", "xpu", "npu", "privateuseone")  # devices without kernels, which installing triton does not change


@pytest.mark.parametrize(
    ("device", "requested", "triton", "expected"),
    [
        ("cuda", "auto", "compiler", "triton"),
        ("cuda", "triton", "compiler", "triton"),
        ("cuda", "one_pass", "compiler", "one_pass"),
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
def test_selection_without_a_call_names_what_runs_and_why(monkeypatch, device, requested, triton, expected):
    """As the scaling of a stored gradient and the command line ask."""
    monkeypatch.setattr(selection, "triton_state", lambda: triton)
    name, reason = select(device, requested)
    assert name == expected and reason


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
        ("cuda", "symmetric", "compiler", "expected one of 'auto', 'reference', 'triton', 'one_pass', got"),
    ],
)
def test_what_cannot_run_raises_with_the_unmet_condition(monkeypatch, device, requested, triton, reason):
    monkeypatch.setattr(selection, "triton_state", lambda: triton)
    with pytest.raises(ValueError, match=f"^impl: .*{reason}"):
        select(device, requested)


def test_a_triton_without_gluon_is_no_error(monkeypatch):
    """Of an old Triton the parent packages are missing, of a newer one the module alone."""

    def no_parent(name):
        raise ModuleNotFoundError(name)

    for find_spec in (no_parent, lambda name: None):
        monkeypatch.setattr(selection.importlib.util, "find_spec", find_spec)
        assert selection.is_installed.__wrapped__("triton.experimental.gluon.language.nvidia.ampere") is False


def test_every_function_runs_on_a_device_without_kernels_and_without_float64():
    """Forward and backward stay on it: MPS has no float64, and a tensor on the CPU would not mix."""
    backend_registration = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch has no spare backend without C++")
    result = fresh_python("-m", "tests.support.host.other_device")
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert len(report) == 40
    dtypes = ("bool", "int32", "int64", "float32", "bfloat16")
    expected = {f"{device}torch.{dtype}" for device in ("npu ", "") for dtype in dtypes}
    for name, found in report.items():
        assert {"npu torch.float32"} <= set(found["kinds"]) <= expected, (name, found)
        assert found["triton"].startswith("ValueError: impl: 'triton' needs "), (name, found)
        assert "got tensors on npu, for which there are no kernels" in found["triton"], (name, found)
