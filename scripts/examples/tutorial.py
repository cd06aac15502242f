"""Trains, evaluates and plots, on one rank or several, on a CPU in seconds: docs/tutorial.md explains it.

It needs matplotlib.

python scripts/examples/tutorial.py
torchrun --nproc-per-node 2 scripts/examples/tutorial.py
"""

from typing import Any

import matplotlib.pyplot as plt
import torch

from vocab_parallel_ce import linear_cross_entropy

VOCABULARY, WIDTH, STEPS, OUTPUTS = 256, 16, 200, ("predictions",)


def main(picture: str, group: Any = None) -> tuple[float, float, float]:
    rank, n_ranks = (group.rank(), group.size()) if group else (0, 1)
    torch.manual_seed(0)  # the same data and first weights on every rank
    chances = (torch.randn(VOCABULARY, 8) @ torch.randn(8, VOCABULARY)).softmax(-1)  # of the next token: the truth
    table = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    head = (torch.randn(VOCABULARY, WIDTH) / 4).chunk(n_ranks)[rank].clone().requires_grad_()  # this rank's rows
    optimizer = torch.optim.Adam([table, head], lr=0.05)
    options: Any = {"group": group, "vocab_size": VOCABULARY}

    def batch(n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (n_tokens,))
        return tokens, torch.multinomial(chances[tokens], 1).squeeze(1)

    tokens, labels = batch(5000)  # held out
    training, held_out = [], {}
    for step in range(STEPS + 1):
        if step % 25 == 0:
            found: Any = linear_cross_entropy(table.detach()[tokens], head.detach(), labels, outputs=OUTPUTS, **options)
            held_out[step] = found.loss.item()
        inputs, targets = batch(1000)
        loss = linear_cross_entropy(table[inputs], head, targets, z_loss=1e-4, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.append(loss.item())
    floor = -chances[tokens, labels].log().mean().item()  # the loss of the truth itself
    if rank == 0:
        plt.plot(range(STEPS + 1), training, "-", [*held_out], [*held_out.values()], "o-")
        plt.axhline(floor, color="black", linestyle="--")
        plt.legend(["training", "held out", "the true distribution"])
        plt.gca().set(xlabel="step", ylabel="loss, nats per token", title=f"{VOCABULARY} tokens, ranks: {n_ranks}")
        plt.savefig(picture)
    return held_out[STEPS], floor, (found.predictions == labels).float().mean().item()


if __name__ == "__main__":
    if torch.distributed.is_torchelastic_launched():  # torchrun
        torch.distributed.init_process_group("gloo")
    print("held-out loss, floor, accuracy:", main("tutorial.png", torch.distributed.group.WORLD))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
