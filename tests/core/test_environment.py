"""The package's variables of the environment: one parser, the same words in each."""

import pytest

from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import environment
from vocab_parallel_ce.integrations.log_probs import kept_logits

pytestmark = pytest.mark.reference
SWITCHES = (environment.VERIFY, environment.TRANSFORMERS, environment.VERL)
ALL_SWITCHES = (*SWITCHES, environment.SAME_BITS)
STATES = """
import importlib.util, os, sys
from unittest import mock
from vocab_parallel_ce import verify
from vocab_parallel_ce.integrations import rebind
with mock.patch.object(rebind.Switch, "install") as of_verl:
    import vocab_parallel_ce.integrations.verl
states = [verify.is_on, of_verl.called]
if importlib.util.find_spec("transformers"):
    from vocab_parallel_ce.integrations.transformers import patch
    states.append(bool(patch._replaced))
    import vocab_parallel_ce.integrations.transformers
    states[-1] = bool(patch._replaced)
print(*states)
"""


@pytest.mark.parametrize("name", ALL_SWITCHES)
def test_the_words_of_a_switch(monkeypatch, name):
    words = {"1": True, "true": True, "YES": True, "on": True, " 1 ": True}
    words |= dict.fromkeys(("", "0", "false", "No", "OFF"), False)
    for word, is_on in words.items():
        monkeypatch.setenv(name, word)
        assert environment.switch(name) is is_on, word
    monkeypatch.delenv(name)
    assert environment.switch(name) is False
    for word in ("2", "of", "enabled"):
        monkeypatch.setenv(name, word)
        with pytest.raises(ValueError, match=f"^{name}: expected one of 1, true, .*, or nothing, got '{word}'$"):
            environment.switch(name)


@pytest.mark.parametrize(("word", "state"), [("off", "False"), ("on", "True")])
def test_each_switch_reads_a_word_alike(word, state):
    result = fresh_python("-c", STATES, **dict.fromkeys(SWITCHES, word))
    assert set(result.stdout.split()) == {state}, result.stderr


def test_another_word_is_an_error_at_import():
    result = fresh_python("-c", "import vocab_parallel_ce", VOCAB_PARALLEL_CE_VERIFY="maybe")
    assert "ValueError: VOCAB_PARALLEL_CE_VERIFY: expected one of 1, true, " in result.stderr


def test_kept_logits_are_checked_by_the_variables_name(monkeypatch):
    for word, kept in (("", "none"), ("none", "none"), ("all", "all"), ("2GiB", "2GiB")):
        monkeypatch.setenv(environment.KEEP_LOGITS, word)
        assert kept_logits() == kept
    monkeypatch.setenv(environment.KEEP_LOGITS, "true")
    with pytest.raises(ValueError, match=f"^{environment.KEEP_LOGITS}: expected 'none', 'all', .*, got 'true'"):
        kept_logits()
