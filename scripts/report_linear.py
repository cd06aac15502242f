"""What was measured of the linear cross-entropy, as text and as the README's tables. Pure functions.

``scripts/bench_linear_cross_entropy.py`` and ``scripts/plot_linear.py`` are the commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.documents import OURS, Document, Result, is_timed
from bench.linear_cases import LinearCase
from bench.linear_documents import (
    GIB,
    TABLES,
    bounds_by_case,
    case_of,
    is_ours,
    measured,
    results_by_case,
)
from bench.linear_memory import growth_bytes_a_token
from report_bench import WAITS, Notes, bold, one_line, table, verdict

BOUNDS = {
    "ratio": "<= {:.2f} x the matmuls",
    "gib_over_fp32_weight_gradient": "<= {:.2f} GiB over the fp32 gradient of the weight",
}
INTRODUCTION = """\
`time / matmuls` is the device's time, forward and backward, over that of the three bare matmuls
`hidden @ weight.T`, `grad @ weight` and `grad.T @ hidden` into memory that is there, on several GPUs with the
all-reduce of the gradient of hidden behind them; medians over interleaved rounds, of the slowest rank.
`extra GiB`: peak memory beyond the inputs, both gradients included. A tenth of the labels is ignored; TFLOP/s
are of three matmuls over all tokens, whatever is computed. Bold: no other project is faster; F.linear +
vocab_parallel_ce is this project's too."""


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f}"


def verdicts(result: Result | None, bounds: dict[str, float]) -> list[str]:
    """Each bound and whether it is met; where there is none, that the case must run."""
    if not bounds:
        ran = result is not None and is_timed(result) and not result["wrong"]
        return [f"runs: {'met' if ran else 'missed'}"]
    return [
        f"{BOUNDS[metric].format(bound)}: {verdict(measured(result, metric), bound)}"
        for metric, bound in bounds.items()
    ]


def best_other(results: dict[str, Result]) -> Result | None:
    """The fastest that is right, besides this project."""
    others = [r for name, r in results.items() if not is_ours(name) and measured(r, "ratio") is not None]
    return min(others, key=lambda result: result["ratio"], default=None)


def results_text(results: Sequence[Result], targets: Document) -> str:
    """For a terminal: each case's providers by ratio, what was refused, and the bounds."""
    lines = []
    for case, of_case in results_by_case(list(results)).items():
        columns = f"{'x matmuls':>10} {'spread':>13} {'ms':>9} {'TFLOP/s':>8} {'GiB':>7} {'over fp32':>9}"
        lines += ["", f"{heading(case):46}{columns}  errors of loss, d_hidden, d_weight"]
        ordered = sorted(of_case.values(), key=lambda r: ("refused" in r, r.get("ratio", 0)))
        lines += [text_line(result) for result in ordered]
        timed = [result for result in ordered if is_timed(result)]
        lines += [yardstick_line(timed[0])] if timed else []
        bounds = bounds_by_case(targets).get(case)
        if bounds is not None and OURS in of_case:
            lines.append(f"  must reach: {'; '.join(verdicts(of_case[OURS], bounds))}")
    return "\n".join(lines[1:])


def heading(case: LinearCase) -> str:
    shape = f"{case.reduction} {case.tokens} x {case.vocabulary} x {case.hidden_size}"
    return f"{shape}, {case.ranks} GPU{'s' * (case.ranks > 1)}"


def text_line(result: Result) -> str:
    name = f"  {result['provider']:44}"
    if not is_timed(result):
        return f"{name}refused: {result['refused'][:110]}"
    spread = "-".join(f"{ratio:.3f}" for ratio in result["ratio_spread"])
    errors = " ".join("nan" if e is None else f"{e:.1e}" for e in result["errors"].values())
    marks = "" if result["queued"] else f"  ({WAITS})"
    marks += f"  WRONG: {result['wrong']}" if result["wrong"] else ""
    return (
        f"{name}{result['ratio']:10.3f} {spread:>13} {result['milliseconds']:9.3f} "
        f"{result['teraflops_per_second']:8.1f} {gib(result['extra_peak_bytes']):>7} "
        f"{gib(result['bytes_over_fp32_weight_gradient']):>9}  {errors}{marks}"
    )


def yardstick_line(result: Result) -> str:
    text = f"  three bare matmuls: {result['yardstick_milliseconds']:.3f} ms"
    reduced = result["all_reduce_milliseconds"]
    return text + ("" if reduced is None else f", of which the all-reduce alone takes {reduced:.3f} ms")


def memory_text(points: Sequence[Result], targets: Document) -> str:
    """For a terminal: GiB by tokens and provider, and what a token more costs this project."""
    tokens = sorted({point["tokens"] for point in points})
    names = list(dict.fromkeys(point["provider"] for point in points))
    lines = [f"{'extra GiB at tokens':46}" + "".join(f"{count:>9}" for count in tokens)]
    cells = {(point["provider"], point["tokens"]): point for point in points}
    for name in names:
        of_name = [cells.get((name, count)) for count in tokens]
        shown = ["-" if p is None or not is_timed(p) else gib(p["extra_peak_bytes"]) for p in of_name]
        lines.append(f"  {name:44}" + "".join(f"{text:>9}" for text in shown))
        refused = [point for point in of_name if point is not None and not is_timed(point)]
        lines += [f"    refused: {refused[0]['refused']}"] if refused else []
    gradients = {point["tokens"]: gib(point["gradient_bytes"]) for point in points}
    lines.append(f"  {'both gradients':44}" + "".join(f"{gradients[count]:>9}" for count in tokens))
    return "\n".join([*lines, f"  {growth_text(points, targets)}"])


def growth_text(points: Sequence[Result], targets: Document) -> str:
    """What a token more costs, and the bound."""
    bound = targets["memory"]["growth_bytes_a_token_beyond_gradient"]
    least = targets["memory"]["from_tokens"]
    growth = growth_bytes_a_token([point for point in points if point["tokens"] >= least], OURS)
    shown = "-" if growth is None else f"{growth:.0f}"
    return (
        f"{OURS}, from {least} tokens on, which are several chunks and take an fp32 sum: "
        f"{shown} bytes a token more beyond the gradient of hidden (<= {bound}: {verdict(growth, bound)})."
    )


def profile_text(document: Document) -> str:
    """One line a rank: the step, NCCL's time in it, and how much of that is hidden."""
    case = heading(case_of(document["case"]))
    lines = [f"{case}: medians of {document['ranks'][0]['steps']} steps or more, in ms"]
    for rank, summary in enumerate(document["ranks"]):
        by_category = ", ".join(
            f"{name} {time / 1e3:.3f}" for name, time in summary["by_category"].items() if time
        )
        lines.append(
            f"  rank {rank}: step {summary['step'] / 1e3:.3f}, {overlap_text(summary)}; {by_category}"
        )
    return "\n".join(lines)


def overlap_text(summary: Result) -> str:
    nccl, hidden = summary["nccl"], summary["nccl_overlapped"]
    share = f" ({100 * hidden / nccl:.0f} %)" if nccl else ""
    return (
        f"NCCL {nccl / 1e3:.3f}, of which {hidden / 1e3:.3f}{share} beside other kernels and "
        f"{summary['nccl_exposed'] / 1e3:.3f} exposed, idle {summary['idle'] / 1e3:.3f}"
    )


def host_line(document: Document) -> str:
    host = document["host"]
    packages = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    return (
        f"{host['gpus_used']} x {host['gpu']}; {versions}; {packages or 'no other package'}; "
        f"commit {host['commit'][:12]}."
    )


def table_part(document: Document, targets: Document) -> str:
    """Markdown: this project's numbers against the targets, then every provider's."""
    notes = Notes()
    cases = results_by_case(document["results"])
    names = list(dict.fromkeys(result["provider"] for result in document["results"]))
    header = [
        "tokens x vocabulary",
        "time / matmuls",
        "ms",
        "TFLOP/s",
        "extra GiB",
        "must reach",
        "best other",
    ]
    main = table(header, [main_row(case, of_case, targets, notes) for case, of_case in cases.items()])
    rows = [[short(case), *(cell(of_case[name], notes) for name in names)] for case, of_case in cases.items()]
    every = table(["time / matmuls, extra GiB", *names], rows)
    absent: dict[str, list[str]] = {}
    for name, reason in document["absent"].items():
        absent.setdefault(one_line(reason), []).append(name)
    lines = notes.lines() + [f"{', '.join(names)}, not timed: {reason}" for reason, names in absent.items()]
    return "\n\n".join(
        filter(None, [host_line(document), main, every, "; ".join(lines) + "." if lines else ""])
    )


def short(case: LinearCase) -> str:
    return f"{case.reduction} {case.tokens} x {case.vocabulary}"


def main_row(case: LinearCase, of_case: dict[str, Result], targets: Document, notes: Notes) -> list[str]:
    ours, other = of_case[OURS], best_other(of_case)
    numbers = [notes.dash(OURS, "refused", ours["refused"])] * 4 if not is_timed(ours) else []
    if is_timed(ours):
        wins = other is None or ours["ratio"] <= other["ratio"]
        numbers = [
            bold(f"{ours['ratio']:.3f}", wins),
            f"{ours['milliseconds']:.2f}",
            f"{ours['teraflops_per_second']:.0f}",
            gib(ours["extra_peak_bytes"]),
        ]
    bounds = bounds_by_case(targets).get(case)
    reached = "-" if bounds is None else "; ".join(verdicts(ours, bounds))
    best = "-"
    if other is not None:
        best = f"{other['provider']} {other['ratio']:.3f}, {gib(other['extra_peak_bytes'])} GiB"
    return [short(case), *numbers, reached, best]


def cell(result: Result, notes: Notes) -> str:
    name = result["provider"]
    if not is_timed(result):
        return notes.dash(name, "refused", result["refused"])
    marks = [] if result["queued"] else [notes.mark(name, WAITS)]
    marks += [notes.mark(name, f"wrong: {one_line(result['wrong'])}")] if result["wrong"] else []
    return " ".join([f"{result['ratio']:.3f}, {gib(result['extra_peak_bytes'])}", *marks])


def targets_part(documents: dict[str, Document], targets: Document) -> str:
    """Every target of the tables and whether it is met, one a line."""
    ours = {
        case: of_case[OURS]
        for name in TABLES.values()
        if name in documents
        for case, of_case in results_by_case(documents[name]["results"]).items()
    }
    return "\n".join(
        f"- {heading(case)}: {'; '.join(verdicts(ours.get(case), bounds))}"
        for case, bounds in bounds_by_case(targets).items()
    )
