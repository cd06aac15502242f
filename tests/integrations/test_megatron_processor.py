"""``output_processor=megatron.output_processor``: the patched way's numbers, with no name of Megatron-Core replaced."""

import pytest
import torch

from tests.support.ranks.collectives import messages_of
from tests.support.ranks.pools import device_of, in_ranks

pytest.importorskip("megatron.core")

from tests.support.frameworks import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron

pytestmark = pytest.mark.skipif(stubs.VERSION < (0, 18), reason=f"{stubs.megatron.__version__} has no output_processor")
in_two_ranks = in_ranks((2,), (), (2,))
PROCESSOR = {"output_processor": megatron.output_processor}
CASES = {
    "sequence": {"sequence_parallel": True},
    "tied": {"tied": True},
    "mup": {"use_mup": True, "mup_base_hidden_size": 4},
    "mtp": {"mtp": True},
}


def _losses(rank, group, impl, options):
    device, asked = device_of(rank, group), {"impl": impl, "vocab_size": stubs.REAL_SIZE}
    with stubs.megatron_ranks(rank, group, 2):
        model, inputs, found = stubs.small_model("gpt", device, **options), stubs.batch(device), {}
        native = *stubs.step(model, inputs), stubs.predicted()
        for gradient in ("auto", "in_backward"):
            own = asked | {"gradient": gradient}
            with megatron.installed(linear=True, **own):
                found["patched", gradient] = *stubs.step(model, inputs), stubs.predicted()
            before = megatron.report().calls
            context = {"output_processor_context": own}
            found["processor", gradient] = *stubs.step(model, inputs | PROCESSOR | context), stubs.predicted()
            calls = {n: count - before.get(n, 0) for n, count in megatron.report().calls.items()}
            assert calls[f"linear loss, gradients in {'forward' if gradient == 'auto' else 'backward'}"] == 1
        with megatron.installed(linear=True, **asked):
            found["both", "auto"] = *stubs.step(model, inputs | PROCESSOR), stubs.predicted()
        found["without context"] = *stubs.step(model, inputs | PROCESSOR), stubs.predicted()
        assert not megatron.report().installed and not vars(model.output_layer).keys() & {"forward"}
        return native, found


@in_two_ranks
@pytest.mark.parametrize("name", CASES)
def test_the_processor_has_the_numbers_of_the_patched_way(rank_pool, impl, name):
    for native, found in rank_pool.run(_losses, impl, CASES[name]):
        torch.testing.assert_close(found.pop("without context"), native, rtol=1e-5, atol=1e-5)
        for (_, gradient), made in found.items():
            expected = found["patched", gradient]
            if "mtp" in CASES[name]:  # Megatron's own heads of prediction, and their padding, in the processor
                torch.testing.assert_close(made[0], expected[0], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(made[0], expected[0]) and made[1].keys() == expected[1].keys()
                assert all(torch.equal(each, expected[1][name]) for name, each in made[1].items())


def _refusals(rank, group, impl):
    with stubs.megatron_ranks(rank, group, 2):
        model, inputs = (made(device_of(rank, group)) for made in (lambda d: stubs.small_model("gpt", d), stubs.batch))
        inputs |= PROCESSOR
        found = messages_of(
            {
                "no labels": lambda: model(**inputs | {"labels": None}),
                "gathered": lambda: model(**inputs, runtime_gather_output=True),
                "option": lambda: model(**inputs, output_processor_context={"linear": True}),
            }
        )
        assert "forward" not in vars(model.output_layer)
        return found


@in_two_ranks
def test_what_the_processor_refuses(rank_pool, impl):
    expected = {
        "no labels": "ValueError: labels: expected those of training, got None",
        "gathered": "ValueError: logits: expected this rank's columns of output_layer, 32, got 64",
        "option": "TypeError: linear: expected an option of install",
    }
    for messages, _ in rank_pool.run(_refusals, impl):
        assert messages.keys() == expected.keys()
        assert all(messages[name].startswith(words) for name, words in expected.items())
