"""Class weights."""

import torch
from torch import Tensor

from tests.support.cases.logits import COLUMNS


def weights(n_columns: int = COLUMNS, seed: int = 0) -> Tensor:
    """Of both sides of 1; one is 0, one is negative and small."""
    values = torch.rand(n_columns, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1
    values[n_columns // 3], values[n_columns // 4] = 0.0, -0.05
    return values
