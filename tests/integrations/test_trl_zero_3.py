"""TRL's fused head with this package's core, of a model that DeepSpeed ZeRO-3 has partitioned."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16")

from trl.trainer import utils

from tests.integrations.test_engines import deepspeed_engine
from tests.support.frameworks.rl import real_module
from tests.support.frameworks.transformers_ranks import halves, small_model
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce.integrations import trl as fused


def _trained(rank, group):
    """Losses, and weights, of three steps without and with install(), and what became of the calls."""
    configs, found, device = real_module("transformers.integrations"), [], device_of(rank, group)
    with patch.dict(os.environ, {"LOCAL_RANK": str(rank)}), patch.object(F, "linear", F.linear):
        told = configs.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # so that TRL gathers the head
        for installs in (False, True):
            model, batch = small_model("llama"), halves(device)[rank][0]  # of one seed
            utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
            engine = deepspeed_engine(model, "ZeRO-3", torch.float32, device)
            fused.install() if installs else None
            losses = []
            for _ in range(3):
                outputs = engine.model(**batch, fused_lm_head=True)
                losses.append(outputs.loss.item())
                engine.step(outputs.loss - 0.1 * outputs.entropy.mean())
            calls = fused.report().calls
            fused.uninstall()
            found.append((losses, engine.weights(), calls))
        del told
    return found


@in_ranks((2,), (), ())
def test_a_head_that_zero_3_has_partitioned_trains_alike(rank_pool, impl):
    real_module("deepspeed")
    for (expected, own, _), (losses, weights, calls) in rank_pool.run(_trained):
        assert calls == {"fused": 3} and expected[-1] < expected[0]
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, own[name], rtol=1e-5, atol=1e-6)
