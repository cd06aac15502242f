"""The example of distillation learns, alike on one rank and two, from logits and from heads."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("tokenizers")

from tests.support.ranks.pools import in_ranks

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "distillation.py"
NAMES = ("teacher", "student, distilled", "student, labels alone")
STEPS = 5


def _example():
    """The module, with small batches."""
    spec = importlib.util.spec_from_file_location("distillation", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.VOCABULARY, module.LENGTH, module.BATCH, module.STEPS_OF_TEACHER = 512, 16, 8, 3
    module.TEACHER, module.STUDENT = (32, 1), (16, 1)
    return module


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def _text(example, cache):
    return example.load_token_ids(cache, example.VOCABULARY, 30_000, False)


def _curves(rank, group, tokens, linear):
    example = _example()
    runs = example.compare(STEPS, example.TokenIds(*tokens), group, linear=linear)
    return {name: [*run.losses, *run.held_out.values()] for name, run in runs.items()}


@in_ranks((2,), (), ())
def test_two_ranks_have_the_curves_of_one_over_logits(rank_pool, impl, cache):
    tokens = tuple(_text(_example(), cache))
    expected = _curves(0, None, tokens, False)
    first, second = rank_pool.run(_curves, tokens, True)
    assert first == second and tuple(first) == NAMES
    for name in NAMES:
        assert first[name] == pytest.approx(expected[name], rel=0, abs=1e-5), name
    distilled, plain = (first[name] for name in NAMES[1:])
    assert distilled[STEPS - 1] < distilled[0] - 0.03 and distilled[-1] < distilled[STEPS]
    assert abs(distilled[0] - plain[0]) > 0.1


@pytest.mark.reference
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "linear"])
def test_the_loss_is_hintons(cache, linear):
    example = _example()
    tokens = _text(example, cache)
    models = [
        example.train(size, 2, seed, tokens, example.label_loss, None)[0] for seed, size in ((1, (32, 1)), (0, (16, 1)))
    ]
    ids, labels = example.windows(tokens.train, torch.tensor([0, 40]), 16)
    teacher, student = (model(ids).detach().double().flatten(0, 1) for model in models)
    kept, temperature = labels.flatten() != example.IGNORE_INDEX, example.TEMPERATURE
    log_t, log_s = ((z[kept] / temperature).log_softmax(-1) for z in (teacher, student))
    hard = F.cross_entropy(student[kept], labels.flatten()[kept])
    expected = 0.5 * temperature**2 * F.kl_div(log_s, log_t, reduction="batchmean", log_target=True) + 0.5 * hard
    found = example.distilling_from(models[0], linear=linear)(models[1], ids, labels)
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.reference
def test_the_program_writes_and_draws_its_curves(cache, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    example, path = _example(), tmp_path / "curves.json"
    example.CACHE, example.CHARACTERS = cache, 30_000
    monkeypatch.setattr(example.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "2", "--linear", "--json", str(path)])
    example.main()
    document = json.loads(path.read_text())
    assert (
        len(document["student, distilled"]["losses"]) == 2 and document["linear"] and path.with_suffix(".png").exists()
    )
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("training losses (distilled: divergences)")
    assert all(line.startswith(name) for line, name in zip(lines, NAMES, strict=True))
