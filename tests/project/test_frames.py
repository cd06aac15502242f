"""How far a warm call travels: the package's Python frames and files in its forward and backward, on the CPU.

A frame is a call of a function of the package; comprehensions and lambdas do not count, nor do kernels.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # as in a program that compiles something

import vocab_parallel_ce as vp

pytestmark = pytest.mark.reference
PACKAGE = str(Path(vp.__file__).parent)
MOST = {  # frames, files, when the compiler is imported: then each call looks whether it must run eagerly
    "mean": (84, 14),
    "log-probabilities and entropy": (116, 15),
    "distillation": (79, 14),
    "top-k teacher, forward": (150, 17),
    "top-k teacher, reverse": (150, 17),
    "mean of a head": (136, 21),
}


def frames_of(call):
    """The files of the frames that a warm call makes, in order."""
    for _ in range(3):
        call()
    frames = []

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            frames.append(code.co_filename)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


@pytest.fixture(scope="module")
def calls():
    generator = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(2, 8, 64, generator=generator)
    hidden, weight = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator).requires_grad_()
    labels = torch.arange(8)
    ids = torch.arange(4).repeat(8, 1)
    top_k = vp.TopKTeacher(ids, teacher.log_softmax(-1).gather(1, ids))
    own = {"impl": "reference"}

    def logits():
        return x.clone().requires_grad_() * 1.0

    def sum_of(outputs):
        return outputs.log_probs.sum() + outputs.entropy.sum()

    return {
        "mean": lambda: vp.vocab_parallel_cross_entropy(logits(), labels, **own).backward(),
        "log-probabilities and entropy": lambda: sum_of(
            vp.token_log_probs(logits(), labels, outputs=("entropy",), **own)
        ).backward(),
        "distillation": lambda: vp.distillation_loss(logits(), teacher, **own).backward(),
        "top-k teacher, forward": lambda: vp.distillation_loss(logits(), top_k, **own).backward(),
        "top-k teacher, reverse": lambda: vp.distillation_loss(logits(), top_k, divergence="reverse", **own).backward(),
        "mean of a head": lambda: vp.linear_cross_entropy(
            hidden.clone().requires_grad_(), weight, labels, **own
        ).backward(),
    }


@pytest.mark.parametrize("name", MOST)
def test_a_call_makes_no_more_frames_in_no_more_files(calls, name):
    frames = frames_of(calls[name])
    found = len(frames), len(set(frames))
    assert found[0] <= MOST[name][0] and found[1] <= MOST[name][1], found
