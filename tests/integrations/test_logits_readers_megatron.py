"""Whoever reads the logits of Megatron-Core's output layer, and however, gets Megatron's own gradients."""

import pytest

from tests.support.frameworks import logits_readers as readers
from tests.support.ranks.pools import device_of, in_ranks

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel

from tests.support.frameworks import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron

in_two_ranks = in_ranks((2,), (), (2,))


def copied(logits, labels, group):
    """Megatron's Function in front of a loss of its own."""
    return readers.READERS["a Function"](tensor_parallel.copy_to_tensor_model_parallel_region(logits), labels, group)


ALL = readers.READERS | {"copy_to_tensor_model_parallel_region": copied}


def loss_of(model, inputs, group, reader=None, place="beside"):
    """The masked mean of a call, with the loss of a hook's logits. Megatron, which overwrites them, gets a copy."""
    kept, labels = [], inputs["labels"].transpose(0, 1)

    def keep(layer, args, output):
        logits = output[0]
        kept.append(ALL[reader](logits, labels, group) if place == "inside" else logits)
        return None if megatron.report().installed else (logits.clone(), output[1])

    if reader is None:
        return stubs.masked_mean(model(**inputs), inputs["loss_mask"])
    handle = model.output_layer.register_forward_hook(keep)
    try:
        loss = stubs.masked_mean(model(**inputs), inputs["loss_mask"])
    finally:
        handle.remove()
    read = kept[0] if place == "inside" else ALL[reader](kept[0], labels, group)
    return read if place == "alone" else read + loss


def ways_in(reader, place):
    """A third of a reader's ways: all readers together have each way in each place."""
    return readers.ways_of(reader)[([*ALL].index(reader) + readers.PLACES.index(place)) % 3 :: 3]


def _read(rank, group, impl, reader):
    """What of each cell of a reader is not as it is without install()."""
    device, wrong = device_of(rank, group), {}
    with stubs.megatron_ranks(rank, group, 2):
        model, inputs = stubs.small_model("gpt", device), stubs.batch(device)
        plain = readers.differentiated(model, loss_of(model, inputs, group))
        for place in readers.PLACES:
            expected = readers.differentiated(
                model, loss_of(model, inputs, group, readers.true_reader(reader, place), place)
            )
            assert readers.matters(expected, plain, "output_layer.weight")
            for way in ways_in(reader, place):
                options = {"gradient": "in_backward"} if way == readers.RETAINED else {}
                with megatron.installed(linear=True, impl=impl, **options):
                    try:
                        actual = readers.differentiated(model, loss_of(model, inputs, group, reader, place), way)
                        wrong[place, way] = readers.differs(actual, expected)
                    except Exception as error:
                        wrong[place, way] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.parametrize("reader", ALL)
@in_two_ranks
def test_a_reader_gets_the_gradients_of_megatron(rank_pool, impl, reader):
    for results in rank_pool.run(_read, impl, reader):
        wrong = [f"{place}, {way}: {actual}" for (place, way), actual in results.items() if actual is not None]
        assert not wrong, "\n".join(wrong)
