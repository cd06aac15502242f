"""The tolerances of the test suite: what PyTorch itself loses in the same dtype, and fp64 rounding."""

import torch
from torch import Tensor

K = 2.0
FP64_ROUNDINGS = 64


def assert_within_budget(actual: Tensor, oracle: Tensor, same_dtype: Tensor, magnitude: float = 0.0) -> None:
    """Fail unless ``max|actual - oracle| <= K * (max|same_dtype - oracle| + eps * max|oracle|)``.

    ``eps`` is that of ``actual``'s dtype, for fp64 64 times it. Where the oracle is NaN or infinite, ``actual`` must
    be the same; nowhere else may it be.

    Args:
        actual: what is tested.
        oracle: the fp64 value.
        same_dtype: the same computation by PyTorch, in ``actual``'s dtype.
        magnitude: of the largest number that is added or subtracted on the way, in fp32 or fp64; its rounding replaces
            that of the result if it is larger.
    """
    actual, oracle, same_dtype = (t.detach().cpu() for t in (actual, oracle, same_dtype))
    assert oracle.dtype == torch.float64, f"oracle: must be float64, got {oracle.dtype}"
    assert actual.dtype == same_dtype.dtype, f"dtype {actual.dtype}, expected {same_dtype.dtype}"
    assert actual.shape == same_dtype.shape == oracle.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(oracle.shape)} and {tuple(same_dtype.shape)}"
    )
    if actual.numel() == 0:
        return
    flat, truth, peer = (t.double().flatten() for t in (actual, oracle, same_dtype))

    finite = truth.isfinite()
    matches = torch.where(finite, flat.isfinite(), (flat == truth) | (flat.isnan() & truth.isnan()))
    if not bool(matches.all()):
        worst = int((~matches).nonzero()[0])
        raise AssertionError(
            f"{int((~matches).sum())} non-finite elements differ; first {_at(actual, worst)}: "
            f"actual {flat[worst]}, oracle {truth[worst]}, same dtype {peer[worst]}"
        )
    if not bool(finite.any()):
        return

    error = (flat - truth).abs().where(finite, 0.0)
    peer_error = (peer - truth).abs().where(finite & peer.isfinite(), 0.0)
    rounding = torch.finfo(actual.dtype).eps * float(truth.abs().where(finite, 0.0).max())
    if actual.dtype == torch.float64:
        rounding *= FP64_ROUNDINGS  # both are fp64: there is no exact value
    rounding = max(rounding, torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps * magnitude)
    allowed = K * (float(peer_error.max()) + rounding)
    worst = int(error.argmax())
    assert float(error[worst]) <= allowed, (
        f"error {float(error[worst]):.3e} exceeds {allowed:.3e} = {K:g} * (same-dtype error "
        f"{float(peer_error.max()):.3e} + rounding {rounding:.3e}); worst {_at(actual, worst)}: "
        f"actual {flat[worst]:.9g}, oracle {truth[worst]:.9g}, same dtype {peer[worst]:.9g}"
    )


def assert_fp64_equal(actual: Tensor, expected: Tensor, magnitude: float) -> None:
    """Fail unless two fp64 computations of the same value differ by rounding alone.

    Args:
        magnitude: of the largest number that either adds or subtracts on the way.
    """
    assert actual.dtype == expected.dtype == torch.float64, f"{actual.dtype}, {expected.dtype}"
    atol = FP64_ROUNDINGS * torch.finfo(torch.float64).eps * magnitude
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True)


def of_sum_sq_probs(grad_output: Tensor | None) -> float:
    """The magnitude of ``2 * p * p * grad_output``, from which ``2 * p * S * grad_output`` is subtracted."""
    return 0.0 if grad_output is None else 2 * float(grad_output.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _at(tensor: Tensor, flat_index: int) -> str:
    position = torch.unravel_index(torch.tensor(flat_index), tensor.shape) if tensor.dim() else ()
    return f"at {tuple(int(i) for i in position)}"
