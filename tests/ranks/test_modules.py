"""Modules with a group are copied (as averages of weights do) and pickled: the group is looked up by its name."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel

from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce import LinearCrossEntropy, VocabParallelCrossEntropy
from vocab_parallel_ce.collectives import NamedGroup

TOKENS, WIDTH, COLUMNS = 4, 5, 6  # columns of each rank


class Model(nn.Module):
    """Has a loss that shares its head."""

    def __init__(self, **options):
        super().__init__()
        self.head = nn.Linear(WIDTH, COLUMNS)
        self.loss, self.over_logits = LinearCrossEntropy(self.head, **options), VocabParallelCrossEntropy(**options)

    def forward(self, hidden, labels):
        return self.loss(hidden, labels), self.over_logits(self.head(hidden), labels)


def _copies(rank, group):
    """In a rank: whether losses of copies are those of the model, for a group, a mesh and a head that a mesh cuts."""
    torch.manual_seed(rank)
    hidden, labels = torch.ones(TOKENS, WIDTH).cumsum(0), torch.arange(TOKENS)
    mesh, equal = init_device_mesh("cpu", (group.size(),)), {}
    ways = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "EMA": lambda model: AveragedModel(model).module,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    }
    for name, own in {"group": group, "mesh": mesh, "none": None}.items():
        model = Model(group=own, label_smoothing=0.1, class_weight=torch.ones(COLUMNS))
        for way, copied in ways.items():
            other = copied(model)
            found, expected = other(hidden, labels), model(hidden, labels)
            # Not their bits: a product may depend on where the copied weight lies in memory.
            equal[name, way] = all(map(torch.allclose, found, expected)) and other.loss.group is model.loss.group
            equal[name, way] &= repr(other) == repr(model) and other.loss.head is other.head
    head = parallelize_module(nn.Linear(WIDTH, group.size() * COLUMNS), mesh, ColwiseParallel())
    module = LinearCrossEntropy(head)
    other = copy.deepcopy(module)
    equal["head cut by a mesh"] = torch.allclose(other(hidden, labels), module(hidden, labels))
    equal["head cut by a mesh"] &= other.head is not head
    ended = dist.new_group(list(range(group.size())))
    module = VocabParallelCrossEntropy(group=ended)
    pickled, named = pickle.dumps(module), NamedGroup.of(ended)
    error_of_ranks = error_of(NamedGroup(named.name, (7, 8)).resolve)
    # new_group returns in one rank while another may still connect to it: gloo raises there if this one closes.
    dist.barrier(group)
    dist.destroy_process_group(ended)
    return equal, [error_of(pickle.loads, pickled), error_of_ranks]


@in_ranks((2,), (), ())
def test_a_module_with_a_group_is_copied_and_pickled(rank_pool, impl):
    for equal, errors in rank_pool.run(_copies):
        assert len(equal) == 13 and all(equal.values()), equal
        for error, got in zip(errors, ("no such group", r"(0, 1)"), strict=True):
            assert error.startswith("ValueError: group: expected the process group ") and f"got {got}; make" in error
