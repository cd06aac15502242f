"""The tolerances of the test suite: the rounding of each element, what PyTorch itself loses, and fp64 rounding."""

import torch
from torch import Tensor

K = 2.0
FP64_ROUNDINGS = 64


def assert_within_budget(
    actual: Tensor,
    oracle: Tensor,
    same_dtype: Tensor,
    magnitude: float = 0.0,
    roundings: int = 1,
    summands: Tensor | None = None,
) -> None:
    """Fail unless each element is within its own rounding and what PyTorch's arithmetic makes elsewhere.

    An element's error is at most ``roundings`` of its own to a dtype of 16 bits, and ``K * (the most that PyTorch's
    elements are beyond their own rounding + eps * max|oracle|)``, with the ``eps`` of fp32. All of fp32 is in the
    second part; its eps is 64 times that of fp64 for fp64. Where the oracle is NaN or infinite, ``actual`` must be the
    same; nowhere else may it be.

    Args:
        actual: what is tested.
        oracle: the fp64 value.
        same_dtype: the same computation by PyTorch, in ``actual``'s dtype, or fp32 and not rounded to it.
        magnitude: of the largest number that is added or subtracted on the way, in fp32 or fp64; its rounding replaces
            that of the result if it is larger.
        roundings: how often a value is rounded to ``actual``'s dtype on the way.
        summands: like ``oracle``, the sum of the sizes of what is rounded to ``actual``'s dtype, and then added.
    """
    actual, oracle, same_dtype = (t.detach().cpu() for t in (actual, oracle, same_dtype))
    assert oracle.dtype == torch.float64, f"oracle: must be float64, got {oracle.dtype}"
    assert same_dtype.dtype in (actual.dtype, torch.float32), f"dtype {actual.dtype}, expected {same_dtype.dtype}"
    assert actual.shape == same_dtype.shape == oracle.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(oracle.shape)} and {tuple(same_dtype.shape)}"
    )
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

    size = truth.abs().where(finite, 0.0)
    rounding = _rounding(actual.dtype) * size.clamp(min=torch.finfo(actual.dtype).smallest_normal)
    error = (flat - truth).abs().where(finite, 0.0)
    of_peer = rounding * (same_dtype.dtype == actual.dtype)
    beyond = ((peer - truth).abs() - of_peer).clamp(min=0).where(finite & peer.isfinite(), 0.0).max()
    if actual.dtype == torch.float64:  # both are fp64: there is no exact value
        largest = max(FP64_ROUNDINGS * float(size.max()), magnitude) * torch.finfo(torch.float64).eps
    else:
        largest = max(float(size.max()), magnitude) * torch.finfo(torch.float32).eps
    allowed = roundings * rounding + K * (beyond + largest)
    of_summands = torch.zeros_like(truth) if summands is None else _rounding(actual.dtype) * summands.flatten()
    allowed += of_summands
    worst = int((error - allowed).argmax())
    assert error[worst] <= allowed[worst], (
        f"error {float(error[worst]):.3e} exceeds {float(allowed[worst]):.3e} = {roundings} * rounding "
        f"{float(rounding[worst]):.3e} + {K:g} * (that of PyTorch {float(beyond):.3e} + {largest:.3e}) + that of "
        f"summands {float(of_summands[worst]):.3e}; worst {_at(actual, worst)}: "
        f"actual {flat[worst]:.9g}, oracle {truth[worst]:.9g}, same dtype {peer[worst]:.9g}"
    )


def _rounding(dtype: torch.dtype) -> float:
    """Of one number to 16 bits, relative to it; 0 for others, whose arithmetic rounds to nothing narrower."""
    return torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0


def of_small_cap(dtype: torch.dtype, softcap: float | None = None, temperature: float = 1.0, **_: object) -> float:
    """Of 16-bit logits, kernels subtract from a small cap (``primitives.SMALL_CAP``), divided by the temperature."""
    return softcap / temperature if dtype.itemsize == 2 and softcap is not None and softcap <= 64 else 0.0


def _at(tensor: Tensor, flat_index: int) -> str:
    position = torch.unravel_index(torch.tensor(flat_index), tensor.shape) if tensor.dim() else ()
    return f"at {tuple(int(i) for i in position)}"
