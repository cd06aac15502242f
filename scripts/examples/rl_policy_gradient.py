"""A policy of bf16 whose vocabulary is cut over the ranks learns by its own samples; nobody gathers the logits.

    python scripts/examples/rl_policy_gradient.py
    torchrun --nproc-per-node 2 scripts/examples/rl_policy_gradient.py

Each rank has its columns of the head. Actions are sampled from all columns. The reward of an action is the share of
its bits that a state asks for. Steps are those of PPO with one epoch, and an entropy bonus. Actions are sampled from
fp32 logits. So training keeps its logits in fp32 too: rounded ones are those of another policy.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce import HeadOptions, linear_token_log_probs

STATES, WIDTH, VOCABULARY = 32, 64, 256


def sample(logits: Tensor, rank: int, group: Any) -> Tensor:
    """Return int64 ``[N]`` global ids, drawn from the distribution of all columns by the Gumbel-max trick."""
    noise = -torch.empty_like(logits).exponential_().log()
    best = (logits + noise).max(dim=-1)
    own = torch.stack([best.values, (best.indices + rank * logits.shape[-1]).float()])
    if group is None:
        return own[1].long()
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)
    values, ids = torch.stack(of_ranks, dim=1)
    return ids.gather(0, values.argmax(dim=0, keepdim=True))[0].long()


def reward_of(states: Tensor, actions: Tensor) -> Tensor:
    """Return fp32 ``[N]``: 1 if the action is the state's id, less by 1/8 for each bit that differs."""
    differs = states ^ actions
    return 1 - sum((differs >> bit & 1 for bit in range(8)), start=torch.zeros_like(states)) / 8


def log_probs_and_entropy(hidden: Tensor, head: Tensor, actions: Tensor, group: Any) -> Any:
    """Return a record of fp32 ``[N]`` log-probabilities of the actions, and entropies. One call gives both."""
    columns: Any = {"group": group, "vocab_size": VOCABULARY}
    options = HeadOptions(logits_dtype=torch.float32)
    return linear_token_log_probs(hidden, head, actions, outputs=("entropy",), options=options, **columns)


def policy_loss(found: Any, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's clipped loss with an entropy bonus."""
    ratio = (found.log_probs - old_log_probs).clamp(max=20).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(clipped + 0.001 * found.entropy).mean()


def train(steps: int, rank: int, n_ranks: int, group: Any, device: torch.device) -> list[float]:
    """Return the mean reward of each step; the same on every rank."""
    torch.manual_seed(0)
    states = torch.nn.Embedding(STATES, WIDTH).requires_grad_(False).to(device, torch.bfloat16)
    head = (0.1 * torch.randn(VOCABULARY, WIDTH)).chunk(n_ranks)[rank].to(device).requires_grad_()
    torch.manual_seed(rank + 1)  # each rank draws the noise of its own columns
    asked = torch.arange(STATES, device=device).repeat_interleave(16)
    rewards = []
    for _ in range(steps):
        hidden, weight = states(asked), head.bfloat16()
        with torch.no_grad():
            actions = sample(hidden.float() @ weight.float().t(), rank, group)
            old_log_probs = log_probs_and_entropy(hidden, weight, actions, group).log_probs
            reward = reward_of(asked, actions)
            mean_of_state = reward.view(STATES, -1).mean(dim=1).repeat_interleave(16)
        found = log_probs_and_entropy(hidden, weight, actions, group)
        loss = policy_loss(found, old_log_probs, reward - mean_of_state)
        (gradient,) = torch.autograd.grad(loss, head)
        with torch.no_grad():
            head -= 20 * gradient
        rewards.append(float(reward.mean()))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cpu", action="store_true")
    words = parser.parse_args()
    rank, n_ranks, group = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
    on_gpu = torch.cuda.is_available() and not words.cpu
    device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1)) if on_gpu else torch.device("cpu")
    if n_ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group = dist.group.WORLD
    rewards = train(words.steps, rank, n_ranks, group, device)
    if rank == 0:
        print(f"reward of the first steps {sum(rewards[:5]) / 5:.3f}, of the last {sum(rewards[-5:]) / 5:.3f}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
