"""When one launch runs a call: every condition, of machines that need not be there, and the table of widths."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.support.cases.flat import linear_cross_entropy
from vocab_parallel_ce import one_pass, plan, spec
from vocab_parallel_ce.blocks import THREADS_PER_WARP, units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.head import plan as head_plan
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.losses.divergences import DIVERGENCE
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.one_pass import SHARED_MEMORY, WIDTHS, bind, config_of, fewest_rows_of, why_not
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.shard import VocabShard

pytestmark = pytest.mark.reference

WIDTH = 16384
WHOLE = VocabShard(0, WIDTH, WIDTH)
KEY = plan.PlanKey(torch.bfloat16, WIDTH, torch.device("cuda", 0), 0, 1, "in_forward")
LAUNCHERS = LABELS.launchers(spec.PLAIN, WHOLE, None)
GLUON = "triton.experimental.gluon.language.nvidia.ampere"

# What keeps one launch from doing a call on a GPU: (arguments of `obstacle`, what is said of it).
OBSTACLES = {
    "several ranks": ({"n_ranks": 2}, "one rank, got 2"),
    "in backward": ({"gradient": "in_backward"}, "gradient 'in_forward', got 'in_backward'"),
    "options": (
        {"options": spec.LossOptions(smoothing=0.1, softcap=30.0, predictions=True, mean_logit=True)},
        "a call without mean_logit, predictions, label_smoothing, softcap",
    ),
    "more outputs": (
        {"options": spec.LossOptions(entropy=True, sum_sq_probs=True)},
        "a call without entropy, sum_sq_probs",
    ),
    "a head": ({"extras": ("logits_dtype",)}, "a call without logits_dtype"),
    "padding": ({"shard": VocabShard(0, WIDTH, WIDTH - 8)}, "logits without padded columns"),
    "narrow": ({"n_columns": 8184, "shard": VocabShard(0, 8184, 8184)}, "rows of 16384 to 270336 bytes, got 16368"),
    "wide": (
        {"n_columns": 151936, "shard": VocabShard(0, 151936, 151936)},
        "rows of 16384 to 270336 bytes, got 303872",
    ),
    "loss": ({"loss": DIVERGENCE}, "the loss of labels, got DivergenceLoss"),
}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which ``one_pass`` can run: returns its properties, and the modules that are missing, for changes."""
    properties, missing = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY), set()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(one_pass, "is_installed", lambda module: module not in missing)
    monkeypatch.setattr(one_pass, "triton_state", lambda: "compiler")
    one_pass.obstacle_of_gpu.cache_clear()
    yield properties, missing
    one_pass.obstacle_of_gpu.cache_clear()


def obstacle(loss=LABELS, shard=WHOLE, options=spec.PLAIN, **changes):
    return why_not(loss, options, shard, KEY._replace(**changes))


def bound(loss=LABELS, shard=WHOLE, options=spec.PLAIN, impl="auto", reduction="mean", **changes):
    return bind(LAUNCHERS, loss, options, shard, KEY._replace(**changes), Settings(impl=impl, reduction=reduction))


def assert_leaves_the_call_to_three_launches(said, **call):
    assert obstacle(**call).startswith(said)
    with pytest.raises(ValueError, match=f"^impl: 'one_pass' needs {said}.*; 'auto' chooses what can run$"):
        bound(impl="one_pass", **call)
    for impl in ("auto", "triton"):
        assert bound(impl=impl, **call) is LAUNCHERS


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_leaves_the_call_to_three_launches_and_is_told(gpu, name):
    call, said = OBSTACLES[name]
    assert_leaves_the_call_to_three_launches(said, **call)


@pytest.mark.parametrize("lacks", ("another maker", "old triton", "small GPU", "interpreter"))
def test_a_machine_that_one_launch_does_not_suit_leaves_all_calls_to_three(monkeypatch, gpu, lacks):
    properties, missing = gpu
    if lacks == "another maker":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif lacks == "old triton":
        missing.add(GLUON)
    elif lacks == "interpreter":
        monkeypatch.setattr(one_pass, "triton_state", lambda: "interpreter")
    else:
        properties.shared_memory_per_block_optin -= 1
    said = {
        "another maker": "an NVIDIA GPU, got another maker's",
        "old triton": "a triton with Gluon's asynchronous copies, got",
        "small GPU": f"{SHARED_MEMORY} bytes of shared memory a program, got {SHARED_MEMORY - 1}",
        "interpreter": "triton's compiler, got triton's interpreter",
    }
    for call in ({}, {"n_ranks": 2}):
        assert_leaves_the_call_to_three_launches(said[lacks], **call)


def test_one_rank_with_the_bits_of_several_does_not_run_one_pass(monkeypatch, gpu):
    """It walks a row in an order of its own, and a loss per row would be one_pass's from the first row on."""
    monkeypatch.setenv(SAME_BITS, "1")
    units_of.cache_clear()
    assert_leaves_the_call_to_three_launches("a row in the order of one rank, got the bits of several")
    assert obstacle(shard=VocabShard(0, WIDTH + 4, WIDTH + 4), n_columns=WIDTH + 4) is None  # no whole units
    units_of.cache_clear()


def test_what_the_kernel_computes_is_no_obstacle(gpu):
    assert obstacle(options=spec.LossOptions(3, 0.0, 0.1, 0.5, lse=True, class_weight=True)) is None


def test_a_loss_per_row_has_the_bits_of_one_implementation(monkeypatch, gpu):
    """Whatever the number of rows; of a reduced loss the faster one runs, unless it is named."""
    pytest.importorskip(GLUON)
    few = fewest_rows_of(2 * WIDTH)
    monkeypatch.setattr(plan, "select", lambda device, impl: (impl, ""))
    for impl, expected in {"auto": [0, few, few], "one_pass": [0, 0, 0]}.items():
        settings = [Settings(reduction=r, impl=impl) for r in ("none", "sum", "mean")]
        made = [plan.make_plan(LABELS, each, KEY).launchers for each in settings]
        assert few > 1 and [each.one_pass_rows for each in made] == expected
        assert [each.one_pass.keywords["counted"] for each in made] == [False, False, True]


def test_a_head_says_what_else_its_gradients_need(monkeypatch):
    keys = []

    def cached_plan(loss, settings, key):
        keys.append(key)
        raise LookupError

    monkeypatch.setattr(head_plan, "cached_plan", cached_plan)
    hidden, weight = torch.zeros(3, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)
    ones = {"expected_grad_output": torch.ones(3), "reduction": "none", "gradient": "in_forward"}
    calls = ({}, ones, {"logits_dtype": torch.float32}, {"outputs": ("lse",)})
    for options in (*calls, {"outputs": ("lse",), "gradient": "in_forward"}):
        dtype = torch.bfloat16 if "logits_dtype" in options else torch.float32
        with pytest.raises(LookupError):
            linear_cross_entropy(hidden.to(dtype), weight.to(dtype), torch.zeros(3, dtype=torch.int64), **options)
    found = [[name.partition(" ")[0] for name in key.extras] for key in keys]
    assert found == [[], ["expected_grad_output"], ["logits_dtype"], ["outputs"], []]
    assert [key.gradient for key in keys] == ["in_forward"] * 5


@pytest.mark.parametrize(
    ("address", "offset", "expected"), [(32, 0, True), (34, 1, True), (34, 0, False), (36, 1, False)]
)
def test_memory_before_a_view_leads_back_to_a_boundary(address, offset, expected):
    of_view = {"data_ptr": lambda: address, "storage_offset": lambda: offset, "element_size": lambda: 2}
    assert one_pass.begins_at_a_boundary(SimpleNamespace(is_cuda=True, **of_view)) == expected


def test_every_width_of_the_table_has_one_configuration():
    """The ranges follow each other; there is none outside them."""
    edges = [(least, most) for least, most, _ in WIDTHS]
    assert all(least <= most for least, most in edges)
    assert [least for least, _ in edges[1:]] == [most + 1 for _, most in edges[:-1]]
    for least, most, config in WIDTHS:
        assert config_of(least) == config_of(most) == config
    for row_bytes in (1, edges[0][0] - 1, edges[-1][1] + 1, 1 << 40):
        assert config_of(row_bytes) is None


def test_widths_and_fewest_rows_are_those_of_the_page():
    found = [fewest_rows_of(row_bytes) for row_bytes in (1, 32_768, 32_769, 65_536, 65_537, 1 << 40)]
    assert found == [1025, 1025, 129, 129, 97, 97]
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert re.search(r"for 1025 tokens .* up to 32 KB each, for 129 up to 64 KB,\s+and for 97 above", page)
    assert (WIDTHS[0][0], WIDTHS[-1][1]) == (16 << 10, 264 << 10)
    assert f"rows of 16 to 264 KB: {8 << 10} to {132 << 10} columns of bf16" in page


def pieces_of(least, most, config):
    """Yield ``(pieces, register_pieces)`` of every row in the range."""
    piece_bytes = THREADS_PER_WARP * config.num_warps * VECTOR_BYTES
    for pieces in range(-(-least // piece_bytes), -(-most // piece_bytes) + 1):
        yield pieces, min(config.register_pieces, pieces)


@pytest.mark.parametrize("least, most, config", WIDTHS, ids=str)
def test_a_buffer_holds_its_widest_row_and_fits_a_multiprocessor(least, most, config):
    for pieces, register_pieces in pieces_of(least, most, config):
        # At least one piece of the next row is on its way.
        assert 1 <= pieces - register_pieces <= config.stages or pieces == register_pieces
    buffer_bytes = config.stages * THREADS_PER_WARP * config.num_warps * VECTOR_BYTES
    # Besides the buffer, a program needs memory for its reductions, and the system 1 KB.
    assert config.programs_per_sm * (buffer_bytes + 1536) <= SHARED_MEMORY
    assert config.num_warps & (config.num_warps - 1) == 0
    assert config.stages >= config.pieces_per_wait >= 1


@pytest.mark.parametrize("least, most, config", WIDTHS, ids=str)
def test_no_stage_is_refilled_before_it_was_read_and_no_piece_is_read_before_it_arrived(least, most, config):
    pytest.importorskip(GLUON)
    for pieces, register_pieces in pieces_of(least, most, config):
        Buffer(config, pieces, register_pieces).walk(rows=7)


class Buffer:
    """The kernel's stages, in the order in which a row waits for, reads and refills them.

    Piece ``i`` of row ``r`` is number ``r * pieces + i``.
    """

    def __init__(self, config, pieces, register_pieces):
        self.pieces_per_wait, self.n_stages = config.pieces_per_wait, config.stages
        self.pieces, self.register_pieces = pieces, register_pieces
        self.stages = list(range(config.stages))
        self.committed, self.arrived, self.done = config.stages - 1, -1, set()

    def refill(self, *done):
        for number in done:
            stage = number % self.n_stages
            assert self.stages[stage] in self.done, "the stage's last piece is still needed"
            self.committed += 1
            assert number + self.n_stages == self.committed, "copies arrive in the order of the rows"
            self.stages[stage] = self.committed

    def wait(self, piece):
        from vocab_parallel_ce.one_pass.rows import copies_in_flight

        sizes = (self.pieces, self.register_pieces, self.n_stages, self.pieces_per_wait)
        in_flight = copies_in_flight(piece, *sizes)
        assert in_flight >= 0
        self.arrived = self.committed - in_flight

    def read(self, number):
        assert number <= self.arrived and self.stages[number % self.n_stages] == number

    def walk(self, rows):
        for first in range(0, rows * self.pieces, self.pieces):
            self.read_row(first)
            self.write_row(first)

    def read_row(self, first):
        for i in range(self.pieces):
            if i % self.pieces_per_wait == 0:
                self.wait(i)
                before = range(max(i - self.pieces_per_wait, 0), min(i, self.register_pieces))
                self.refill(*(first + piece for piece in before))
            self.read(first + i)
            if i < self.register_pieces:
                self.done.add(first + i)
        last = (self.pieces - 1) // self.pieces_per_wait * self.pieces_per_wait
        self.refill(*range(first + last, first + min(self.pieces, self.register_pieces)))

    def write_row(self, first):
        waiting = []
        for i in range(self.register_pieces, self.pieces):
            self.read(first + i)
            self.done.add(first + i)
            waiting.append(first + i)
            if len(waiting) == self.pieces_per_wait or i == self.pieces - 1:
                self.refill(*waiting)
                waiting = []
