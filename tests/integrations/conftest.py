"""What the tests of the integrations share: nothing stays installed after one."""

import sys

import pytest

from vocab_parallel_ce.integrations.transformers import uninstall


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    uninstall()
    if "accelerate" in sys.modules:  # it keeps the first mixed precision of a process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def llama():
    from transformers import LlamaForCausalLM

    from vocab_parallel_ce.integrations.transformers.tiny import tiny_model

    return tiny_model(LlamaForCausalLM)
