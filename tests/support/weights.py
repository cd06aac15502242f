"""Class weights, and the forms in which a call may have them."""

from typing import Any

import torch
from torch import Tensor

from tests.support.logits import COLUMNS

WEIGHTS = {  # dtype and form
    "whole": (torch.float32, "whole"),
    "columns": (torch.float32, "columns"),
    "whole bf16": (torch.bfloat16, "whole"),
    "columns fp64": (torch.float64, "columns"),
}


def weights(n_columns: int = COLUMNS, seed: int = 0) -> Tensor:
    """Of both sides of 1; one is 0, one is negative and small."""
    values = torch.rand(n_columns, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1
    values[n_columns // 3], values[n_columns // 4] = 0.0, -0.05
    return values


def class_weight(name: str | None, n_columns: int) -> tuple[dict[str, Any], str]:
    """The option with :data:`WEIGHTS` of that name, and its form; None is no option."""
    if name is None:
        return {}, "whole"
    dtype, form = WEIGHTS[name]
    return {"class_weight": weights(n_columns).to(dtype)}, form
