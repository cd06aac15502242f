"""A random program played by this package on one rank, or by PyTorch with the vocabulary of all ranks."""

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.cases.logits import of_oracle
from tests.support.random.public import invoke
from tests.support.random.wrappers import OF_ONE_LEAF, REGULARISERS, SOURCES, VIEWS, WIDTH, Case, Use, must_run, wrapped
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import at_least_fp32, values

Numbers = dict[str, Tensor]
Head = tuple[Tensor, Tensor]  # weight and bias
OVER_LOGITS = {
    "loss": "vocab_parallel_cross_entropy",
    "module": "VocabParallelCrossEntropy",
    "log_probs": "token_log_probs",
    "te": "parallel_cross_entropy",
}
OVER_HEADS = {
    "loss": "linear_cross_entropy",
    "module": "LinearCrossEntropy",
    "log_probs": "linear_token_log_probs",
}
REFUSALS = (TypeError, ValueError, RuntimeError)


class Package(NamedTuple):
    """This package on one rank."""

    impl: str
    device: Any
    dtype: torch.dtype
    ranks: tuple[int, ...] = (0,)
    group: Any = None

    def call(self, use: Use, shared: Sequence[Tensor], heads: Sequence[Head], labels: Tensor) -> Numbers:
        """What the loss returns, over a rank's logits, or over hidden states and a rank's head."""
        (inputs,) = shared
        given = {**use.options, "labels": labels, "group": self.group, "impl": self.impl, "gradient": use.gradient}
        if use.function == "te":
            given = {"label_smoothing": 0.0, "ignore_index": -100, "overwrite_input": use.gradient, **given}
        elif use.function == "log_probs":
            del given["reduction"]
        if not heads:
            return invoke(OVER_LOGITS[use.function], {"logits": inputs, **given})
        if use.function == "log_probs":
            del given["gradient"]
        ((weight, bias),) = heads
        return invoke(OVER_HEADS[use.function], {"hidden": inputs, "weight": weight, "bias": bias, **given})


class Torch(NamedTuple):
    """PyTorch, with the vocabulary of all ranks."""

    device: Any
    dtype: torch.dtype
    ranks: tuple[int, ...]

    def call(self, use: Use, shared: Sequence[Tensor], heads: Sequence[Head], labels: Tensor) -> Numbers:
        if heads:
            (hidden,) = shared
            rows = hidden.reshape(-1, hidden.shape[-1])
            # Not F.linear, which rounds bf16 logits twice if hidden has gaps.
            logits = [torch.addmm(bias, rows, weight.t()) for weight, bias in heads]
            shared = [x.view(*hidden.shape[:-1], -1) for x in logits]
        # PyTorch computes what is narrower in fp32.
        return values(at_least_fp32(torch.cat(list(shared), -1)), labels, **of_oracle(use.options))._asdict()


class Player:
    """One run of a case by one engine."""

    def __init__(self, case: Case, engine: Package | Torch) -> None:
        self.case, self.engine = case, engine
        self.is_linear, self.wraps = case.family == "linear", isinstance(engine, Package)
        self.numbers: Numbers = {}
        self.watched: list[tuple[str, Tensor]] = []
        self.leaves = self._leaves()

    def _leaves(self) -> dict[str, nn.Parameter]:
        case, engine = self.case, self.engine
        generator = torch.Generator().manual_seed(random.Random(case.name).randrange(2**31))
        is_product = case.source not in OF_ONE_LEAF
        wide, values = (*case.leading, WIDTH), {}
        if self.is_linear:
            values["h"] = torch.randn(wide, generator=generator)
            if is_product:
                values["u"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.3
        product = torch.randn(wide, generator=generator) * 0.7
        names = "wb" if self.is_linear else "hw" if is_product else "p"
        n_rows = case.columns + (case.head == "rows")
        for rank in range(case.ranks):
            of_rank = {
                "w": torch.randn(n_rows, WIDTH, generator=generator) * 0.8,
                "p": torch.randn(*case.leading, case.columns, generator=generator) * 2,
                "b": torch.randn(n_rows, generator=generator),
                "h": product,
            }
            if rank in engine.ranks:
                values |= {f"{name}@{rank}": of_rank[name] for name in names}
        values = {name: x.to(case.dtype).to(engine.dtype).to(engine.device, copy=True) for name, x in values.items()}
        is_frozen = case.head == "frozen"
        return {name: nn.Parameter(x, not (is_frozen and name[0] == "w")) for name, x in values.items()}

    def play(self) -> Numbers:
        for step in range(self.case.steps):
            self._step(step)
        case, numbers = self.case, self.numbers
        trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        gradients = {name: leaf.grad for name, leaf in trained.items() if leaf.grad is not None}
        for at in (f"@{rank}" for rank in self.engine.ranks):
            if {f"w{at}", f"b{at}"} <= gradients.keys():
                # A bias is a column of the weight whose hidden value is 1, and errors are of all columns.
                columns = gradients.pop(f"w{at}"), gradients.pop(f"b{at}").unsqueeze(1)
                gradients[f"head{at}"] = torch.cat(columns, 1)
        numbers |= {f"gradient of {name}": grad.clone() for name, grad in gradients.items()}
        for at, x in self.watched:
            if case.watch == "retain_grad" and x.grad is not None:
                self._add_watched(at, x.grad)
        if case.sgd:
            torch.optim.SGD(trained.values(), lr=0.5).step()
            numbers |= {f"updated {name}": leaf.detach() for name, leaf in trained.items()}
        return numbers

    def _step(self, step: int) -> None:
        self.first: dict[str, Tensor] | None = None

        def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
            values = self._forward(step, dict(zip(self.leaves, tensors, strict=True)))
            self.names = tuple(values)
            return tuple(values.values())

        outputs = self._wrapped("all", forward, *self.leaves.values())
        values = dict(zip(self.names, outputs, strict=True))
        self.numbers |= {f"{step} {name}": value.detach().clone() for name, value in values.items()}
        self._backward({name: value for name, value in values.items() if name.startswith("target")})
        assert self.first is not None
        later: Numbers = {}
        if self.case.evaluates == "after":
            later |= self._evaluate(step, self.first, self.leaves)
        if self.case.reads == "backward":
            later |= self._read(self.first)
        self.numbers |= {f"{step} {name}": value for name, value in later.items()}

    def _wrapped(self, around: str, function: Any, *args: Tensor) -> Any:
        return wrapped(self.case.wrappers if self.wraps and self.case.around == around else (), function, *args)

    def _forward(self, step: int, leaves: dict[str, Tensor]) -> Numbers:
        case, values = self.case, {}
        shared = self._shared(leaves)
        if self.first is None:
            # By default a loss overwrites what nobody holds.
            is_read = case.evaluates == "after" or case.reads == "backward"
            self.first = shared if is_read else {}
        views: dict[str, dict[str, Tensor]] = {"": shared}
        if case.before:
            for at, x in shared.items():
                values[f"target before{at}"] = self._wrapped("before", REGULARISERS[case.before], x)
        if case.evaluates == "before":
            values |= self._evaluate(step, shared, leaves)
        for index, use in enumerate(case.losses):
            if use.view not in views:
                views[use.view] = {at: VIEWS[use.view](x) for at, x in shared.items()}
            if index == 0:
                self._watch(("hook", "retain_grad"), views[use.view])
            values |= self._loss(step, index, list(views[use.view].values()), leaves)
            if index == 0:
                self._watch(("late hook",), views[use.view])
        if case.after:
            trains_head = self.is_linear and case.head != "frozen"
            of_head = {name: leaf for name, leaf in leaves.items() if trains_head and name[0] == "w"}
            for at, x in (shared | of_head).items():
                values[f"target after{at}"] = REGULARISERS[case.after](x)
        if case.reads == "loss":
            values |= self._read(shared)
        return values

    def _shared(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hidden states, or each rank's logits."""
        source, is_product = SOURCES[self.case.source], self.case.source not in OF_ONE_LEAF
        if self.is_linear:
            return {"": source(leaves["h"] @ leaves["u"] if is_product else leaves["h"])}
        if is_product:
            return {f"@{r}": source(leaves[f"h@{r}"] @ leaves[f"w@{r}"].t()) for r in self.engine.ranks}
        return {f"@{r}": source(leaves[f"p@{r}"]) for r in self.engine.ranks}

    def _heads(self, leaves: dict[str, Tensor]) -> list[Head]:
        case = self.case
        leaves = self.leaves if case.head == "module" else leaves  # a module has no others
        heads = [(leaves[f"w@{rank}"], leaves[f"b@{rank}"]) for rank in self.engine.ranks if self.is_linear]
        if case.head == "rows":
            return [(weight[1:], bias[1:]) for weight, bias in heads]
        return [(weight * 1.1 if case.head == "scaled" else weight, bias) for weight, bias in heads]

    def _labels(self, use: Use, step: int, shape: torch.Size, n_columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(use.labels + step)
        labels = torch.randint(0, self.case.ranks * n_columns, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < use.ignored
        return labels.masked_fill(ignored, use.options.get("ignore_index", -100)).to(self.engine.device)

    def _loss(self, step: int, index: int, tensors: list[Tensor], leaves: dict[str, Tensor]) -> Numbers:
        use, around = self.case.losses[index], self.case.around
        n_columns = self.case.columns if self.is_linear else tensors[0].shape[-1]
        labels = self._labels(use, step, tensors[0].shape[:-1], n_columns)

        targets = ("log_probs", *use.options.get("outputs", ()))
        others: tuple[str, ...] = ()
        if use.function != "log_probs":
            targets, others = ("loss",), use.options.get("outputs", ())
        if self.is_linear and self.case.head != "module" and use.function == "module":
            use = use._replace(function="loss")

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            heads = self._heads(dict(zip(leaves, inputs[len(tensors) :], strict=False)))
            returned = self.engine.call(use, inputs[: len(tensors)], heads, labels)
            return tuple(returned[name] for name in targets + others)  # predictions may be tied

        is_wrapped = around == "losses" or (around == "first" and index == 0)
        inputs = [*tensors, *(leaves.values() if self.is_linear else ())]
        outputs = self._wrapped(around if is_wrapped else "", call, *inputs)
        names = [f"target {name} {index}" for name in targets] + [f"{name} {index}" for name in others]
        return dict(zip(names, outputs, strict=True))

    def _evaluate(self, step: int, shared: dict[str, Tensor], leaves: dict[str, Tensor]) -> Numbers:
        use = self.case.losses[0]
        tensors = [VIEWS[use.view](x) for x in shared.values()]
        with torch.no_grad():
            return {f"evaluated {name}": value for name, value in self._loss(step, 0, tensors, leaves).items()}

    def _watch(self, ways: Sequence[str], tensors: dict[str, Tensor]) -> None:
        """Keep the gradients that autograd shows of these; a leaf's are its ``grad``."""
        if self.case.watch not in ways:
            return
        for at, x in tensors.items():
            if not x.requires_grad or x.is_leaf:
                continue
            if self.case.watch == "retain_grad":
                x.retain_grad()
                self.watched.append((at, x))
            else:
                x.register_hook(functools.partial(self._add_watched, at))

    def _add_watched(self, at: str, grad: Tensor) -> None:
        name = f"gradient watched{at}"
        self.numbers[name] = self.numbers[name] + grad if name in self.numbers else grad.clone()

    def _read(self, shared: dict[str, Tensor]) -> Numbers:
        with torch.no_grad():
            return {f"read{at}": at_least_fp32(x).logsumexp(-1) for at, x in shared.items()}

    def _backward(self, targets: Numbers) -> None:
        plan, rng = self.case.plan, random.Random(self.case.name)
        grad_outputs = {name: self._grad_output(name, target) for name, target in targets.items()}
        total = sum((target * grad_outputs[name]).sum() for name, target in targets.items())
        if plan == "sum":
            total.backward()
        elif plan == "twice":
            total.backward(retain_graph=True)
            total.backward()
        elif plan == "together":
            torch.autograd.backward(list(targets.values()), list(grad_outputs.values()))
        elif plan == "separate":
            names = rng.sample(sorted(targets), len(targets))
            for name in names:
                targets[name].backward(grad_outputs[name], retain_graph=name != names[-1])
        else:
            leaves = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
            for leaf, grad in zip(leaves, torch.autograd.grad(total, leaves), strict=True):
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    def _grad_output(self, name: str, target: Tensor) -> Tensor:
        """Alike for all engines; a regulariser's is a factor."""
        rng = random.Random(f"{self.case.name} {name}")
        is_loss = name[-1].isdigit() and "@" not in name
        kind = self.case.losses[int(name[-1])].grad_output if is_loss else "factor"
        factor, shape = rng.choice([-1.0, 1.0]) * rng.uniform(0.3, 1.7), target.shape
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        values = {
            "one": torch.ones(shape),
            "factor": torch.full(shape, factor),
            "random": torch.randn(shape, generator=generator),
            "expanded": torch.tensor(factor).expand(shape),
        }
        return values[kind].to(target)


def outcome(case: Case, engine: Package) -> Numbers | str:
    """What the package gives, or how it refuses."""
    try:
        return Player(case, engine).play()
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} in {case}") from error


def _rounded_on_the_way(case: Case, truth: Tensor) -> float:
    """The magnitude of what is rounded to 16 bits once more than by PyTorch: forward writes it, backward scales it."""
    if case.dtype.itemsize != 2 or all(use.gradient in ("in_backward", "out_of_place") for use in case.losses):
        return 0.0
    largest = float(truth.abs().nan_to_num(0.0, 0.0, 0.0).max()) if truth.numel() else 0.0
    return largest * torch.finfo(case.dtype).eps / 2 / torch.finfo(torch.float32).eps


def problem(case: Case, results: list[Numbers | str], device: Any = "cpu") -> str:
    """What is wrong with the results of a case, one per rank, or nothing."""
    refused = [result for result in results if isinstance(result, str)]
    if refused:
        if len(refused) < len(results):
            return f"{len(refused)} of {len(results)} ranks refused: {refused[0]}"
        return f"refused: {refused[0]}" if must_run(case) else ""
    ranks = tuple(range(case.ranks))
    truth = Player(case, Torch(device, torch.float64, ranks)).play()
    peer = Player(case, Torch(device, case.dtype, ranks)).play()
    for rank, result in enumerate(results):
        assert isinstance(result, dict)
        expected = {name for name in truth if name.partition("@")[2] in ("", str(rank))}
        if result.keys() != expected:
            return f"rank {rank}: only one side has {result.keys() ^ expected}"
        for name, value in result.items():
            try:
                assert_within_budget(value, truth[name], peer[name], _rounded_on_the_way(case, truth[name]))
            except AssertionError as error:
                return f"rank {rank}, {name}: {error}"
            if "@" not in name and not torch.equal(value, results[0][name]):  # type: ignore[index]
                return f"{name}: ranks 0 and {rank} differ"
    return ""
