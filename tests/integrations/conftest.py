"""What the tests of the integrations share: nothing stays installed after one."""

import pytest

from vocab_parallel_ce.integrations.transformers import uninstall


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    uninstall()


@pytest.fixture
def llama():
    from transformers import LlamaForCausalLM

    from vocab_parallel_ce.integrations.transformers.tiny import tiny_model

    return tiny_model(LlamaForCausalLM)
