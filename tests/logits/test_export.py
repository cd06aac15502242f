"""``torch.export`` records every loss as one operator, strict or not, over logits and of heads."""

import pytest
import torch

from tests.logits.test_transforms import COLUMNS, FUNCTIONS, OF_HEADS, TOKENS, arguments
from tests.support.cases.flat import linear_cross_entropy
from vocab_parallel_ce import LinearCrossEntropy, vocab_parallel_cross_entropy

pytestmark = pytest.mark.reference
by_mode = pytest.mark.parametrize("strict", (False, True), ids=("default", "strict"))


class Calls(torch.nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, given, labels):
        return self.function(given, labels, **self.options)


@by_mode
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_loss_is_one_operator(function, strict):
    module, (given, labels) = Calls(FUNCTIONS[function]), arguments(function)
    exported = torch.export.export(module, (given.detach(), labels), strict=strict)
    operators = [str(node.target) for node in exported.graph.nodes if "vocab_parallel_ce" in str(node.target)]
    assert operators == [f"vocab_parallel_ce.loss_of_{'head' if function in OF_HEADS else 'logits'}.default"]
    for inputs in ((given.detach(), labels), (given.detach() * 2, labels.flip(0))):
        assert torch.equal(exported.module()(*inputs), module(*inputs))


@by_mode
def test_a_module_with_its_head(strict):
    module = LinearCrossEntropy(in_features=5, columns=COLUMNS, bias=True)
    given = torch.randn(TOKENS, 5), torch.tensor([1, -100, 0, 11])
    exported = torch.export.export(module, given, strict=strict)
    assert torch.equal(exported.module()(*given), module(*given))


@by_mode
@pytest.mark.parametrize(
    ("function", "options"),
    [(vocab_parallel_cross_entropy, {"gradient": "in_backward"}), (linear_cross_entropy, {"keep_logits": "all"})],
)
def test_a_call_that_needs_eager_code_is_refused(function, options, strict):
    given, labels = arguments("linear")
    weight = {"weight": torch.ones(COLUMNS, 5)} if function is linear_cross_entropy else {}
    module = Calls(lambda given, labels, **options: function(given, **weight, labels=labels, **options), **options)
    with pytest.raises(Exception, match=f"{function.__name__} has no operator for this call"):
        torch.export.export(module, (given.detach(), labels), strict=strict)


def test_a_chunk_that_follows_the_number_of_tokens():
    """Outside of Dynamo such a number is no int, and stays symbolic."""
    weight, tokens = torch.randn(COLUMNS, 5), torch.export.Dim("tokens", min=4, max=64)
    module = Calls(lambda given, labels: linear_cross_entropy(given, weight, labels, chunk_size=given.shape[0] // 2))
    given, labels = arguments("linear")
    shapes = {"given": {0: tokens}, "labels": {0: tokens}}
    exported = torch.export.export(module, (given.detach(), labels), dynamic_shapes=shapes)
    more = torch.randn(9, 5), torch.arange(9)
    assert torch.equal(exported.module()(*more), module(*more))
