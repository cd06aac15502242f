"""The functions of heads with the fields of HeadOptions as keywords of their own, as tables of keywords have them."""

import functools

import vocab_parallel_ce as package
from vocab_parallel_ce.options import HEAD_FIELDS


def with_options(keywords):
    """The keywords, of which those that are fields of HeadOptions are in ``options``."""
    fields = {name: value for name, value in keywords.items() if name in HEAD_FIELDS}
    others = {name: value for name, value in keywords.items() if name not in fields}
    return others | {"options": package.HeadOptions(**fields)} if fields else others


def _flat(function):
    @functools.wraps(function)
    def call(*args, **keywords):
        return function(*args, **with_options(keywords))

    return call


linear_cross_entropy = _flat(package.linear_cross_entropy)
linear_distillation_loss = _flat(package.linear_distillation_loss)
linear_objective = _flat(package.linear_objective)
linear_token_log_probs = _flat(package.linear_token_log_probs)


class LinearCrossEntropy(package.LinearCrossEntropy):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **with_options(keywords))
