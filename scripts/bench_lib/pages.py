"""The tables that README and docs/ have between markers, from the committed documents. Pure functions.

``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` are around what NAME stands for: ``speed``, ``head`` and
``frameworks``, or the file of a document of steps without its ending.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bench_lib.cases import OURS
from bench_lib.documents import (
    Document,
    Result,
    is_of_enough_rounds,
    is_timed,
    require_one_commit,
    require_rounds,
    results_by_case,
    short_commit,
)
from bench_lib.report import gib, linear_part, place_of, profile_part, targets_part
from bench_lib.tables import host_line, shown, table

MARKED = re.compile(r"(<!-- begin: ([\w.]+) -->\n).*?(<!-- end: \2 -->)", flags=re.DOTALL)
LESS = 1.02  # memory differs if one has so many times the other's


class Framework(NamedTuple):
    """A row of docs/frameworks.md: what a framework takes without and with this package, and others alongside."""

    name: str
    line: str
    setting: str  # before the name of the case
    document: str
    case: str
    without: str
    given: str  # with this package
    peers: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()  # more of what is replaced, and of what replaces it

    def compared(self) -> list[tuple[str, str]]:
        """Each other provider, and the one of this package to compare it with."""
        return [*((other, self.given) for other in (self.without, *self.peers)), *self.pairs]


def installed(name: str, *others: str, **fields: Any) -> Framework:
    """A framework's own ``name`` and ``others``, without and with ``install()``."""
    given, *pairs = ((each, f"{each}, installed") for each in (fields["without"], *others))
    return Framework(name, given=given[1], pairs=tuple(pairs), **fields)


RL: dict[str, Any] = {"setting": "", "document": "rl_1gpu", "case": "8192 x 128256, D = 4096"}
TWO: dict[str, Any] = {"setting": "2 GPUs, ", "document": "frameworks_2gpu", "case": "8192 x 128256"}
VERL, VERL_HEAD = "verl FusedLinearForPPO", "verl linear_cross_entropy"
FRAMEWORKS = (
    Framework(
        "[Hugging Face](transformers.md)",
        "`X.transformers.install()`",
        "",
        "transformers_step_1gpu",
        "Llama-3.2-1B, 4 x 2048",
        "transformers",
        OURS,
        ("liger-kernel",),
    ),
    Framework(
        "[Megatron-Core](megatron.md)",
        "`X.megatron.install(linear=True)`",
        "2 layers of 4096, 2 GPUs, ",
        "megatron_2gpu",
        "24576 tokens",
        "Megatron-Core",
        f"{OURS}, linear",
        ("Megatron-Core, fused", "Megatron-Core, TransformerEngine's loss", f"{OURS}, logits"),
    ),
    Framework(
        "[DTensor](dtensor.md)",
        "`X.dtensor.cross_entropy(logits, labels)`",
        without="torch loss_parallel (logits.float())",
        given="DTensor loss",
        peers=("torch loss_parallel (16-bit logits)",),
        **TWO | {"setting": "2 GPUs, against `loss_parallel` of `logits.float()`, "},
    ),
    installed(
        "[torchtitan](dtensor.md#torchtitan)",
        "torchtitan log-probs",
        line="`X.torchtitan.install()`",
        without="torchtitan loss",
        **TWO,
    ),
    installed("[NeMo-RL](rl.md)", line="`X.nemo_rl.install()`", without="NeMo-RL log-probs", **TWO),
    installed(
        "[verl](rl.md)",
        VERL_HEAD,
        line="`X.verl.install()`",
        without=VERL,
        peers=(VERL_HEAD,),
        **RL | {"setting": "`FusedLinearForPPO`, "},
    ),
    installed(
        "[OpenRLHF](rl.md)",
        line="`X.openrlhf.install()`",
        without="OpenRLHF logits",
        **RL | {"case": "8192 x 128256, logits", "setting": "its actor, "},
    ),
    installed(
        "[TRL](transformers.md#trl)",
        line="`X.trl.install()`",
        without="TRL fused head",
        **RL | {"setting": "its head, "},
    ),
    Framework(
        "[torch.compile](compile.md)",
        "none: `fullgraph=True`",
        "head and loss, ",
        "compile_1gpu",
        "8192 x 128256, D = 2048",
        "PyTorch, compiled (logits.float())",
        f"{OURS}, compiled",
        (f"{OURS}, linear, compiled",),
    ),
)


class Number(NamedTuple):
    """A row of README: others, and this package beside them."""

    what: str
    document: str
    case: str
    without: tuple[str, ...]
    given: str
    is_ratio: bool = False  # the time over that of a copy, in place of time and memory

    def parts(self, result: Result) -> list[str]:
        return [f"{shown('ratio', result['ratio'])} x memcpy"] if self.is_ratio else cost(result).split(", ")

    def require_the_fastest(self, results: dict[str, Result]) -> None:
        """Raise ValueError if a row of ratios leaves out the fastest of the others."""
        if not self.is_ratio:
            return
        others = {name: each["ratio"] for name, each in results.items() if is_timed(each) and not name.startswith(OURS)}
        if min(others, key=lambda name: others[name]) not in self.without:
            raise ValueError(f"README: {self.case}: expected the fastest of {others}, got {self.without}")


NUMBERS = (
    *(
        Number(
            f"`transformers.install()`: Llama-3.2-1B, 4 x 2048 tokens, {what} ignored",
            "transformers_ignored_1gpu",
            f"Llama-3.2-1B, 4 x 2048, {share}% ignored",
            ("transformers", "liger-kernel"),
            OURS,
        )
        for what, share in (("none", 0), ("half", 50))
    ),
    Number(
        "`megatron.install(linear=True)`: 2 layers of 4096, 24576 tokens, 2 GPUs",
        "megatron_2gpu",
        "24576 tokens",
        ("Megatron-Core", "Megatron-Core, fused", "Megatron-Core, TransformerEngine's loss"),
        f"{OURS}, linear",
    ),
    Number(
        "`verl.install()`: Megatron engine's log-probabilities and entropies, 8192 x 128256, 2 GPUs",
        "frameworks_2gpu",
        "8192 x 128256",
        ("verl log-probs and entropy",),
        "verl log-probs and entropy, installed",
    ),
    Number(
        "`linear_objective` in place of TRL's head and a policy's loss, 8192 x 128256",
        "objective_1gpu",
        "8192 x 4096 x 128256",
        ("TRL log-probs and objective",),
        "linear, objective",
    ),
    Number(
        "`vocab_parallel_cross_entropy`, unreduced, 16384 x 128256, 2 GPUs",
        "bench_table_2gpu",
        "none 16384 x 128256 bf16",
        ("fla-core (Gluon)", "flash-attn", "transformer-engine (overwrite)", "megatron-core"),
        OURS,
        is_ratio=True,
    ),
)


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def cost(result: Result) -> str:
    return f"{milliseconds(result['ms'])} ms, {gib_of(result)} GiB"


def gib_of(result: Result) -> str:
    return gib(result["peak_bytes"])


def steps_block(document: Document) -> str:
    """One table for all cases that have the same providers: time with its quartiles, and memory."""
    groups: dict[tuple[str, ...], list[str]] = {}
    cases = results_by_case(document)
    for case, results in cases.items():
        groups.setdefault(tuple(results), []).append(case)
    parts = [f"{host_line(document)} Milliseconds (quartiles), and GiB of new memory at the peak:"]
    for names, found in groups.items():
        rows = [[name, *(steps_cell(cases[case][name]) for case in found)] for name in names]
        parts.append(table(["", *found], rows))
    return "\n\n".join(parts)


def objective_block(document: Document) -> str:
    """The time of each call over that of the three products, and its memory."""
    cases = results_by_case(document)
    rows = []
    for name in next(iter(cases.values())):
        found = [results[name] for results in cases.values()]
        rows.append([name, *(f"{each['ratio']:.2f}, {gib_of(each)}" if is_timed(each) else "-" for each in found)])
    every = table(["tokens x D x V", *map(str, cases)], rows)
    return f"{host_line(document)} Time over the products, and GiB of new memory at the peak:\n\n{every}"


def steps_cell(result: Result) -> str:
    lower, upper = map(milliseconds, result["ms_quartiles"])
    return f"{milliseconds(result['ms'])} ({lower}-{upper}), {gib_of(result)}"


def losses_block(document: Document) -> str:
    """Losses over logits in copies of them, and alongside the call without the last option; then those of heads."""
    cases = results_by_case(document)
    of_logits = {case: results for case, results in cases.items() if case.count(" x ") == 1}
    names = [name for name in next(iter(of_logits.values())) if name != "copy"]
    rows = []
    for name in names:
        base = name.rpartition(", ")[0]
        cells, memory = [], []
        for case, results in of_logits.items():
            of_gpu = [each.get("queued", True) for each in (results[name], results.get(base, {}))]
            cell = f"{results[name]['ratio']:.2f}" + ("" if of_gpu[0] else " (host)")
            if base in results and all(of_gpu):
                cell += f" ({100 * (results[name]['ms'] / results[base]['ms'] - 1):+.1f} %)"
            cells.append(cell)
            memory.append(f"{results[name]['peak_bytes'] / int(case.partition(' ')[0]):.0f}")
        rows.append([f"`{name}`", *cells, ", ".join(dict.fromkeys(memory))])
    title = f"{host_line(document)} Time over a copy of the logits, and over the same call without the last option:"
    heads = document | {"results": [each for each in document["results"] if each["case"] not in of_logits]}
    of_heads = steps_block(heads).partition("\n\n")
    return f"{title}\n\n{table(['call', *of_logits, 'bytes per row'], rows)}\n\nHeads, in ms and GiB:\n\n{of_heads[2]}"


def frameworks_block(documents: Mapping[str, Document]) -> str:
    """Time and memory without and with this package, the others, and where this package loses.

    A framework that was measured in few rounds is named below the table; its own page has the figures.
    """
    enough = [row for row in FRAMEWORKS if is_of_enough_rounds(documents[row.document])]
    rows, used = [], {row.document: documents[row.document] for row in enough}
    require_one_commit("frameworks", used)
    for row in enough:
        document = documents[row.document]
        results = results_by_case(document)[row.case]
        peers = [f"{peer}: {cost(results[peer])}" for peer in row.peers if peer in results]
        is_same = not worse(results[row.without], results[row.given], "ms")
        is_same &= not worse(results[row.given], results[row.without], "ms")
        given = cost(results[row.given]) + (": time within the noise" if is_same else "")
        cells = [f"{row.name}<br>{row.line}", row.setting + row.case, cost(results[row.without]), given]
        rows.append([*cells, "<br>".join(peers) or "-", where_it_loses(row, results_by_case(document))])
    every = table(["framework and line", "case", "without", "with", "others", "where it loses"], rows)
    commits: dict[str, list[str]] = {}
    for row in enough:
        name = row.name.partition("]")[0].lstrip("[")
        commits.setdefault(short_commit(used[row.document]), []).append(name)
    first, *others = (f"{commit} ({', '.join(names)})" for commit, names in commits.items())
    few = [f"{row.name} ({row.line})" for row in FRAMEWORKS if row not in enough]
    less = f" In fewer rounds, on their pages: {'; '.join(few)}." if few else ""
    return f"{every}\n\n{'Commits' if others else 'Commit'} {'; '.join([first, *others])}.{less}"


def where_it_loses(row: Framework, cases: dict[str, dict[str, Result]]) -> str:
    """The worst case by time, and the worst by memory, of those that the row compares; "-" if there is none."""
    said = []
    for key, unit, text in (("ms", "ms", milliseconds), ("peak_bytes", "GiB", gib)):
        found = [
            (results[own][key] / results[other][key], case, own, other)
            for case, results in cases.items()
            for other, own in row.compared()
            if {own, other} <= results.keys() and worse(results[own], results[other], key)
        ]
        if found:
            _, case, own, other = max(found)
            numbers = [text(cases[case][name][key]) for name in (own, other)]
            said.append(f"{case}: {numbers[0]} {unit}, {other} {numbers[1]}")
    return "<br>".join(said) or "-"


def worse(result: Result, other: Result, key: str) -> bool:
    """Whether a provider takes more: time beyond the quartiles, or memory."""
    if key == "ms":
        return result["ms_quartiles"][0] > other["ms_quartiles"][1]
    return bool(result["peak_bytes"] > LESS * other["peak_bytes"] + 0.01 * 2**30)


def numbers_block(documents: Mapping[str, Document]) -> str:
    """README's rows, and where each was measured."""
    used = {number.document: documents[number.document] for number in NUMBERS}
    require_one_commit("README", used)
    require_rounds("README", used)
    rows: list[list[str]] = []
    for number in NUMBERS:
        results = {str(case): found for case, found in results_by_case(used[number.document]).items()}[number.case]
        number.require_the_fastest(results)
        parts = {name: number.parts(results[name]) for name in (*number.without, number.given)}
        best = [min(column, key=lambda text: float(text.split()[0])) for column in zip(*parts.values(), strict=True)]
        cells = {name: ", ".join(map(bold_if_best, each, best)) for name, each in parts.items()}
        others = "<br>".join(f"{name}: {cells[name]}" for name in number.without)
        rows.append([number.what, others, cells[number.given]])
    said = "; ".join(dict.fromkeys(map(place_of, used.values())))
    return f"{table(['bf16, forward and backward', 'without', 'with'], rows)}\n\nMeasured on {said}. Bold is the least."


def bold_if_best(text: str, best: str) -> str:
    return f"**{text}**" if text == best else text


def blocks(documents: dict[str, Document]) -> dict[str, Callable[[], str]]:
    """What makes each block, by name."""
    made: dict[str, Callable[[], str]] = {
        "numbers": lambda: numbers_block(documents),
        "targets": lambda: targets_part(documents),
        "frameworks": lambda: frameworks_block(documents),
    }
    for name, document in documents.items():
        kind = profile_part if "ranks" in document else KINDS.get(name.partition("_")[0], steps_block)
        made[name] = lambda kind=kind, document=document: kind(document)  # type: ignore[misc]
    return made


# Of documents, by the first word of their names.
KINDS = {"losses": losses_block, "objective": objective_block, "linear": linear_part}


def with_blocks(text: str, made: Mapping[str, Callable[[], str]], page: str, needed: Iterable[str] = ()) -> str:
    """The text with every block anew.

    Raises:
        ValueError: a marker names no block, has no other end, or one that is ``needed`` is not there once.
    """
    names = [match[2] for match in MARKED.finditer(text)]
    if len(names) != text.count("<!-- begin: ") or len(names) != text.count("<!-- end: "):
        raise ValueError(f"{page}: expected an end after each begin, got others")
    for name in (*names, *needed):
        if name not in made or names.count(name) != 1:
            raise ValueError(f"{page}: expected one begin and end of {name!r}, one of {', '.join(made)}")
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]()}\n\n{match[3]}", text)
