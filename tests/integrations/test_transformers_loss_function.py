"""``model.loss_function = causal_lm_loss``: the step of every class, of heads that are cut, and of compiled models."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from tests.integrations.test_transformers_classes import NAMES, built, outcomes, variants_of  # noqa: E402
from tests.support.frameworks import transformers_ranks as small  # noqa: E402
from tests.support.ranks.collectives import record_collectives  # noqa: E402
from tests.support.ranks.pools import device_of, in_ranks  # noqa: E402
from vocab_parallel_ce.integrations.transformers import causal_lm_loss  # noqa: E402
from vocab_parallel_ce.integrations.transformers.audit_models import differs, step  # noqa: E402
from vocab_parallel_ce.integrations.transformers.tiny import load_class, tiny_inputs, tiny_model  # noqa: E402

# They compute F.cross_entropy in their forward, whatever loss_function is.
INLINE = """
    BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM CpmAntForCausalLM
    MBartForCausalLM MarianForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM PLBartForCausalLM
    PegasusForCausalLM ProphetNetForCausalLM TrOCRForCausalLM WhisperForCausalLM XLMWithLMHeadModel XLNetLMHeadModel
"""
in_two_ranks = in_ranks((2,), (), (2,))


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_same(name):
    pair = built(name)
    if pair is None:
        return
    model, inputs = pair
    every, n_calls = variants_of(inputs), []
    variants = {"mean": every["mean"], "others": every["shifted"] | {"num_items_in_batch": torch.tensor(7)}}

    def counted(*args, **kwargs):
        n_calls.append(1)
        return causal_lm_loss(*args, **kwargs)

    expected = outcomes(model, variants)
    model.loss_function = counted
    found = outcomes(model, variants)
    for variant, outcome in expected.items():
        if isinstance(outcome, type):
            assert found[variant] is outcome
        else:
            assert differs(found[variant], outcome) is None, variant
    assert bool(n_calls) == (name not in INLINE.split())


@pytest.mark.reference
@pytest.mark.quick(1)
def test_a_compiled_model_without_a_graph_break():
    model = tiny_model(load_class("LlamaForCausalLM"))
    inputs = tiny_inputs(model) | {"num_items_in_batch": torch.tensor(7)}
    expected = step(model, inputs)
    model.loss_function = causal_lm_loss
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    found = found._replace(gradients={name.removeprefix("_orig_mod."): grad for name, grad in found.gradients.items()})
    torch.testing.assert_close(found.logits, expected.logits)
    assert differs(found._replace(logits=expected.logits), expected) is None


@pytest.mark.reference
def test_labels_that_are_all_ignored_and_columns_that_are_not_those_of_the_model():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = causal_lm_loss(logits, torch.full((2, 3), -100), 5, num_items_in_batch=0)
    loss.backward()
    assert loss == 0 and not logits.grad.any()
    with pytest.raises(ValueError, match=r"^logits: expected vocab_size columns, 10, got 5; .*group="):
        causal_lm_loss(logits, torch.zeros(2, 3, dtype=torch.long), 10)


STYLES = {"gathered": Replicate(), "shards": Shard(-1), "dtensor": Shard(-1)}


def _tensor_parallel(rank, group, impl, path, kind):
    """A step of a model that transformers' plan cuts, whose head returns what ``kind`` says, and of a whole one."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

    device = device_of(rank, group)
    reference, inputs = small.small_model("llama").to(device), small.tokens(device)
    expected = small.train(reference, inputs)
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=STYLES[kind], use_local_output=kind != "dtensor")
    ALL_PARALLEL_STYLES.register("head of this test", style)
    with patch.object(LlamaForCausalLM, "_tp_plan", {"lm_head": "head of this test"}):
        model = small.cut_model(rank, device, reference, path)
    ranks = init_device_mesh(device.type, (2,)).get_group() if kind == "shards" else None
    model.loss_function = partial(causal_lm_loss, group=ranks)
    with record_collectives() as collectives:
        logits = model(**inputs).logits
    if kind == "shards":
        model.loss_function = causal_lm_loss
        with pytest.raises(ValueError, match="expected vocab_size columns"):
            model(**inputs)
        model.loss_function = partial(causal_lm_loss, group=ranks)
    is_cut = isinstance(logits, DTensor), logits.shape[-1] < small.VOCABULARY
    return expected, small.train(model, inputs), is_cut, [each.name for each in collectives][-1:]


@pytest.mark.parametrize("kind", STYLES)
@in_two_ranks
def test_a_head_that_tensor_parallelism_cuts(rank_pool, impl, tmp_path, kind):
    small.small_model("llama").save_pretrained(tmp_path)
    for expected, found, is_cut, last in rank_pool.run(_tensor_parallel, impl, tmp_path, kind):
        small.assert_same_training(found, expected)
        assert is_cut == (kind == "dtensor", kind == "shards")
        assert kind == "gathered" or last == ["_allgather_base_"]
        assert kind == "gathered" or found.largest < small.LOGITS
