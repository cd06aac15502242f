"""Measures this project alongside others, and reports what was measured.

``docs/performance.md`` says how it is measured, and ``docs/measurements.md`` with which commands.
``torchrun --nproc-per-node R`` in place of ``python`` cuts the vocabulary over R GPUs. A machine without a GPU can try
a run on small shapes, such as ``--shape 64x512``, or ``--shape 64x512x32`` of heads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench_lib import cases, pages, pictures
from bench_lib.clock import DeviceTimer, Ranks, joined_ranks
from bench_lib.documents import (
    RESULTS,
    ROOT,
    Document,
    Result,
    commit_of,
    host_description,
    name_of,
    new_document,
    parser_of,
    quiet,
    read_document,
    read_documents,
    run,
)
from bench_lib.frameworks import (
    COMPILE_PROVIDERS,
    FRAMEWORK_PROVIDERS,
    OBJECTIVE_PROVIDERS,
    RL_PROVIDERS,
    TEACHER_PROVIDERS,
)
from bench_lib.measure import attempt, measure, subject_of
from bench_lib.providers import OUR_PACKAGE, PROVIDERS, Provider, chosen, row_providers, version_of

COMMANDS = {
    "table": "the loss over logits, alongside other projects'",
    "head": "a head and its loss, alongside other projects'",
    "few": "the loss over logits of few tokens, alongside other projects'",
    "options": "every option of the loss over logits",
    "losses": "class weights, distillation and log-probabilities, over logits and of heads",
    "objective": "an objective inside the head and in two steps, alongside other projects'",
    "rl": "log-probabilities and entropies, as frameworks for reinforcement learning call for them",
    "compile": "a head and its loss, compiled by torch.compile and not",
    "frameworks": "what frameworks call on shards of the vocabulary; several GPUs",
    "memory": "only the peak memory of heads against tokens",
}
OF_ROWS = ("options", "losses")


def shapes(*sizes: str) -> list[str]:
    return [word for size in sizes for word in ("--shape", size)]


DEFAULT_PROVIDERS = {
    "few": f"{cases.OURS},{cases.IN_FORWARD},quack-kernels,flash-attn,fla-core,fla-core (Gluon),liger-kernel",
    "memory": f"{cases.OURS},torch eager (16-bit logits),liger-kernel,cut-cross-entropy",
}
UNFUSED = ["head", "--reduction", "mean", "--providers", f"{cases.OURS},{cases.UNFUSED},{cases.UNFUSED_IN_FORWARD}"]
# What one GPU measures for the pages, and what several do, README's first. A document of "rl" needs every framework.
STEPS = {
    "table": ["bench.py", "table"],
    "ignored": ["bench_transformers.py", "--ignored"],
    "objective": ["bench.py", "objective"],
    "head": ["bench.py", "head"],
    "unfused": ["bench.py", *UNFUSED, *shapes("4096x128256", "16384x128256", "8192x32064", "16384x32064")],
    "transformers": ["bench_transformers.py"],
    **{command: ["bench.py", command] for command in ("compile", "losses", "memory", "options")},
    "few": ["bench.py", "few"],
    "rl": ["bench.py", "rl"],
}
STEPS_OF_SEVERAL = {
    "table": ["bench.py", "table"],
    "megatron": ["bench_megatron.py"],
    "frameworks": ["bench.py", "frameworks", *shapes("8192x128256", "16384x128256")],
    "objective": ["bench.py", "objective"],
    "head": ["bench.py", "head"],
    "few": ["bench.py", "few", *shapes("16x128256", "64x128256")],
    "losses": ["bench.py", "losses", *shapes("4096x128256", "4096x128256x4096", "16384x128256x4096")],
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = parser_of(None, rounds=15, add_help=False)
    measured.add_argument("--shape", action="append", metavar="NxV[xD]", help="tokens, vocabulary, hidden size")
    measured.add_argument("--providers", metavar="NAMES", help="comma-separated; all: the default ones")
    made = {name: commands.add_parser(name, parents=[measured], help=text) for name, text in COMMANDS.items()}
    for name in ("table", "few", "head"):
        made[name].add_argument("--reduction", choices=cases.REDUCTIONS)
    for name in OF_ROWS:
        made[name].add_argument("--baseline", type=Path, metavar="DIR", help="another checkout, for the same calls")
    page = commands.add_parser("page", help="measures most of what the pages print of some GPUs, at one commit")
    of_several = ", ".join(STEPS_OF_SEVERAL)
    page.add_argument("steps", nargs="*", help=f"only these, of {', '.join(STEPS)}; of several GPUs {of_several}")
    page.add_argument("--gpus", type=int, default=1, help="of this host, a rank on each")
    page.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="the folder of the documents")
    page.add_argument("--rounds", type=int, default=10)
    reported = commands.add_parser("report", help="the tables of the pages, from the documents")
    how = reported.add_mutually_exclusive_group(required=True)
    how.add_argument("--write", action="store_true", help="the tables and the pictures")
    how.add_argument("--check", action="store_true", help="exit with 1 and name what is stale")
    reported.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    reported.add_argument("--results", type=Path, default=RESULTS, help="the folder of the documents")
    return parser.parse_args(words)


def known_providers(command: str, case: cases.Case, baseline: Path | None) -> list[Provider]:
    if command in OF_ROWS:
        return row_providers(case, baseline)
    if command == "objective":
        others = TEACHER_PROVIDERS if case.teacher_size else () if case.n_pairs else OBJECTIVE_PROVIDERS
        return [*row_providers(case), *others]
    every = {"rl": RL_PROVIDERS, "compile": COMPILE_PROVIDERS, "frameworks": FRAMEWORK_PROVIDERS}
    return [each for each in every.get(command, PROVIDERS) if (each.takes == "head") == case.is_head]


def present(known: Sequence[Provider], names: str | None, ranks: Ranks, document: Document) -> list[Provider]:
    """The providers that run here; the document has their versions, and why the others are absent."""
    wanted = chosen(names, known)
    absent = {provider.name: provider.absent(ranks.size) for provider in wanted}
    quiet()  # an import may have set warning filters
    document["absent"] |= {name: reason for name, reason in absent.items() if reason is not None}
    found = [provider for provider in wanted if absent[provider.name] is None]
    others = {each.distribution: each.module for each in found if each.distribution not in (OUR_PACKAGE, "torch")}
    versions = {name: version_of(name, module.partition(".")[0]) for name, module in others.items()}
    document["host"]["packages"] |= versions
    return found


def measure_case(
    options: argparse.Namespace, ranks: Ranks, timer: DeviceTimer, document: Document, case: cases.Case
) -> list[Result]:
    known = known_providers(options.command, case, getattr(options, "baseline", None))
    providers = present(known, options.providers or DEFAULT_PROVIDERS.get(options.command), ranks, document)
    if not providers:
        return []
    subject = subject_of(case, ranks, options.rounds)
    if options.command == "memory":
        fields = subject.fields | {"gradient_bytes": case.gradient_bytes}
        return [fields | {"provider": each.name} | attempt(subject, each, timer) for each in providers]
    return measure(subject, providers, timer, graphs=options.command == "few")


def measure_command(options: argparse.Namespace) -> int:
    """Measure, print one line per result and write the document."""
    with joined_ranks() as ranks:
        found = cases.cases_of(options.command, ranks.size, options.shape, getattr(options, "reduction", None))
        if not found:
            raise SystemExit(
                f"bench: no case of this reduction with a vocabulary that divides by {ranks.size} ranks: pass --shape"
            )
        document, baseline = new_document(options.command, options.rounds), getattr(options, "baseline", None)
        if baseline:
            document["host"]["baseline_commit"] = commit_of(baseline, "VPCE_BASELINE_COMMIT")
            if document["host"]["baseline_commit"] is None:
                said = f"expected a checkout with git history, got {baseline}"
                raise SystemExit(f"--baseline: {said}; name its commit in VPCE_BASELINE_COMMIT")
        run(document, found, partial(measure_case, options, ranks, ranks.timer(), document), ranks, options.json)
        if not document["results"]:
            raise SystemExit("bench: no provider is here")
        if ranks.is_first and baseline:
            print(pages.beside_baseline(document, cases.BASELINE))
    return 0


def page_command(options: argparse.Namespace) -> int:
    """Measure each step in a process of its own, all at one commit. A document is copied when its step has ended."""
    steps = STEPS if options.gpus == 1 else STEPS_OF_SEVERAL
    unknown = set(options.steps) - steps.keys()
    if unknown:
        raise SystemExit(f"page: expected some of {', '.join(steps)}, got {', '.join(sorted(unknown))}")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    launcher = [sys.executable, *(ranks if options.gpus > 1 else ())]
    commit, scripts, left = host_description()["commit"], Path(__file__).parent, []
    environment = os.environ | {"VPCE_COMMIT": commit or "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with tempfile.TemporaryDirectory() as folder:
        for step in options.steps or steps:
            path = Path(folder) / f"{name_of(step, options.gpus)}.json"
            words = [str(scripts / steps[step][0]), *steps[step][1:], "--rounds", str(options.rounds)]
            has_ended = subprocess.run([*launcher, *words, "--json", str(path)], env=environment).returncode == 0
            if has_ended and (step != "rl" or not read_document(path)["absent"]):  # which needs every framework
                options.out.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, options.out)
            else:
                left.append(step)
    print(f"left: {' '.join(left) or 'nothing'}")
    return 1 if left else 0


def report_command(options: argparse.Namespace) -> int:
    """Write the tables of the pages and the pictures, or name what is stale."""
    texts = pages.texts(options.root, options.results)
    stale = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if options.check:
            print(f"stale: {path.name}; python scripts/bench.py report --write renews it")
        else:
            path.write_text(texts[path], encoding="utf-8")
    if stale and options.write:
        pictures.draw(read_documents(options.results), options.results)
    return 1 if options.check and stale else 0


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.command == "report":
        return report_command(options)
    if options.command == "page":
        return page_command(options)
    return measure_command(options)


if __name__ == "__main__":
    sys.exit(main())
