"""What the host does per call stays little: a small call waits for it, not for the GPU.

Time on a shared machine would be noise, so calls are counted: of Python and of C, by this package's own code. Kernels,
their launches and plain PyTorch in their place do not count.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # with it in the process, the public functions ask if they are traced

import vocab_parallel_ce
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

pytestmark = pytest.mark.reference

PACKAGE = Path(vocab_parallel_ce.__file__).parent
LEFT_OUT = ("kernels", "reference.py")


def calls_of_package(step):
    """Return how many calls the package makes during ``step()``, outside of its launchers."""
    found = 0

    def place_of(frame):
        path = Path(frame.f_code.co_filename)
        return path.relative_to(PACKAGE).parts[0] if path.is_relative_to(PACKAGE) else ""

    def count(frame, event, _):
        nonlocal found
        caller = {"c_call": frame, "call": frame.f_back}.get(event)
        if caller is None or not place_of(caller):
            return
        while caller is not None and place_of(caller) not in LEFT_OUT:
            caller = caller.f_back
        found += caller is None

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


# Limits are what it was when this test was written: a new option should cost those who do not use it nothing.
@pytest.mark.parametrize(
    ("loss", "options", "most"),
    [
        (vocab_parallel_cross_entropy, {}, 102),
        (vocab_parallel_cross_entropy, {"reduction": "none"}, 97),
        (token_log_probs, {"entropy": True}, 120),
    ],
)
def test_a_step_makes_few_calls(loss, options, most):
    leaf = torch.randn(4, 16, requires_grad=True)
    labels = torch.tensor([1, 2, -100, 3])

    def step():
        outputs = loss(leaf * 1, labels, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad([out.sum() for out in outputs], leaf)

    step()  # plans, and imports
    assert calls_of_package(step) <= most
