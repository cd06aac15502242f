"""What only a GPU shows of a computation: graphs, synchronisation, peak memory, offsets past 2^31."""

import gc
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.cases.inputs import batch

TAIL_ROWS = 64


def captured(step: Callable[[], Sequence[Tensor]], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """The graph of ``step()``, and the tensors that its replays write; calls before the capture compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's threads query events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    return graph, outputs


def assert_graph_replays(
    step: Callable[..., Sequence[Tensor]], static: Sequence[Tensor], batches: Iterable[Sequence[Tensor]]
) -> None:
    """A graph of ``step(*static)`` gives, for each of ``batches`` copied to ``static``, the bits of ``step``.

    ``step`` overwrites none of its arguments.
    """
    graph, outputs = captured(lambda: step(*static))
    for number, new in enumerate(batches):
        for of_graph, value in zip(static, new, strict=True):
            of_graph.copy_(value)
        graph.replay()
        for index, (replayed, value) in enumerate(zip(outputs, step(*new), strict=True)):
            assert torch.equal(replayed, value), f"output {index} of batch {number}: {replayed}, not {value}"


def assert_host_never_waits(step: Callable[[], object]) -> None:
    """``step()`` never synchronises the host with the GPU, except the first time."""
    on_device = torch.tensor(40, device="cuda")
    step()  # compiles, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            on_device.item()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def extra_peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes requested at any moment of ``step()``, beyond those requested before it.

    A block that the allocator reuses may be up to 1 MiB larger than what was requested. Garbage of earlier tests is
    collected first: it would be freed meanwhile.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def assert_right_past_2_to_the_31_elements(
    rows: int,
    columns: int,
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    step_of_tail: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """32-bit row offsets read, and write, far outside logits ``[rows, columns]``, which are bf16.

    Args:
        step: (losses, gradient) of logits and labels, unreduced and with a grad_output of 1;
            its logits may be overwritten.
        step_of_tail: the same of the last 64 rows by themselves, which must come out equal bit for bit.
    """
    assert (rows - TAIL_ROWS - 1) * columns <= 2**31 < rows * columns
    needed = 2 * rows * columns * 2 + (1 << 30)
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed} bytes of GPU memory, {free} are free")
    logits = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    tail = batch("peaked", rows=TAIL_ROWS, vocab_size=columns, dtype=torch.bfloat16).logits.cuda()
    logits[-TAIL_ROWS:] = tail
    labels = torch.randint(0, columns, (rows,), device="cuda")
    want, want_grad = step_of_tail(tail, labels[-TAIL_ROWS:])
    losses, grad = step(logits, labels)
    assert torch.equal(losses[-TAIL_ROWS:], want), "losses of the tail"
    assert torch.equal(grad[-TAIL_ROWS:], want_grad), "gradient of the tail"
    # Element 2^31 lies in the tail or the row before it. All rows before the tail are of equal logits.
    for row in (0, 1, rows - TAIL_ROWS - 1):
        want_row = torch.full((columns,), 1 / columns, device="cuda").bfloat16()
        want_row[labels[row]] = 1 / columns - 1
        torch.testing.assert_close(grad[row], want_row, rtol=2**-7, atol=0)
    uniform = torch.tensor(columns, dtype=torch.float64).log()
    actual = losses[:-TAIL_ROWS].double().cpu()
    torch.testing.assert_close(actual, uniform.expand(rows - TAIL_ROWS), rtol=1e-6, atol=0)
