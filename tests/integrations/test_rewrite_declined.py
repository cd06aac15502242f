"""Forwards that are not rewritten, and why."""

import textwrap

import pytest

from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite_source

pytestmark = pytest.mark.reference

FORWARD = """\
def forward(self, input_ids, labels=None, **kwargs):
    hidden = self.model(input_ids)
    logits = self.lm_head(hidden)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
    return Output(loss=loss, logits=logits)
"""
CAP = "loss = None\n    if self.c is not None:\n        logits = torch.tanh(logits / self.c) * self.c"
HEAD, NONE, GUARD = "logits = self.lm_head(hidden)", "loss = None", "if labels is not None:"
LOSS, RETURN = "loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)", "return Output("
DECLINED = [
    ("no labels", "labels=None, ", ""),
    ("no loss", LOSS, "loss = 0"),
    ("several losses", LOSS, f"{LOSS}\n        {LOSS}"),
    ("aligned labels", LOSS, "loss = CrossEntropyLoss()(logits.view(-1, 9), labels.view(-1))"),
    ("inline loss", LOSS, "loss = F.cross_entropy(logits[:, :-1].view(-1, 9), labels[:, 1:].view(-1))"),
    ("several heads", f"{HEAD}\n    {NONE}\n    {GUARD}\n        {LOSS}", "logits = [h(hidden) for h in self.heads]"),
    ("composite", LOSS, "loss = self.compute_loss(logits, labels)"),
    ("composite", HEAD, "logits = self.lm_head(hidden, input_ids)"),
    ("composite", HEAD, "logits = self.lm_head(hidden) + self.other_head(hidden)"),
    ("composite", HEAD, "logits = self.model.lm_head(hidden)"),
    ("composite", HEAD, "logits = hidden @ self.lm_head.weight.T"),
    ("no head", HEAD, "scores = self.lm_head(hidden)"),
    ("head in a branch", HEAD, "if self.a: logits = self.lm_head(hidden)\n    else: logits = self.b(hidden)"),
    ("no guard", f"{GUARD}\n        {LOSS}", LOSS),
    ("no guard", f"{GUARD}\n        {LOSS}", f"{LOSS} if labels is not None else None"),
    ("nested guards", GUARD, "if labels is not None:\n      if self.training:"),
    ("guard: ", GUARD, "if labels is not None and self.training:"),
    ("guard: ", GUARD, "targets = labels\n    if targets is not None:"),
    ("else: ", LOSS, f"{LOSS}\n    else:\n        self.count = 0"),
    ("loss: expected one name", "loss = self.loss", "self.loss = self.loss"),
    ("loss: expected (logits", "self.vocab_size, ", "self.vocab_size, 9, "),
    ("loss: alongside", LOSS, f"labels = labels.clone()\n        {LOSS}"),
    ("aliased labels", "(logits, labels,", "(logits, targets,"),
    ("changed labels", NONE, "loss = None\n    labels = input_ids"),
    ("read or changed logits", LOSS, f"{LOSS}\n        loss = loss + logits.logsumexp(-1).mean()"),
    ("read or changed logits", "self.vocab_size", "logits.shape[-1]"),
    ("read or changed logits", "(logits, labels,", "(logits[:, 1:], labels,"),
    ("read or changed logits", NONE, "loss = None\n    logits = logits[..., :5]"),
    ("read or changed logits", NONE, "loss = None\n    logits = self.cap(logits)"),
    ("read or changed logits", NONE, "loss = None\n    logits = logits / logits.std()"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits)"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits / 3) * 4"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits / 3) * 3 * 2"),
    ("read or changed logits", NONE, "loss = None\n    best = logits.argmax(-1)"),
    ("read or changed logits", NONE, "loss = None\n    logits += 1"),
    ("read or changed logits", RETURN, "best = logits.argmax(-1)\n    return Output("),
    ("read or changed logits", RETURN, "logits[:, 0] = 0\n    return Output("),
    ("read or changed logits", RETURN, "del logits\n    return Output("),
    ("read or changed logits", "logits=logits)", "logits=logits.float())"),
    ("composite", "hidden = self.model(", "logits = hidden = self.model("),
    ("conditional logits", NONE, "loss = None\n    if self.scale is not None:\n        logits = logits * self.scale"),
    ("conditional logits", NONE, "loss = None\n    if self.c:\n        logits = torch.tanh(logits / self.c) * self.c"),
    ("conditional logits", NONE, f"{CAP}\n    else:\n        logits = logits * 2"),
    ("self.training", NONE, "loss = None\n    if not self.training:\n        logits = logits.float()"),
    ("between head and loss", NONE, "loss = None\n    self.count += 1"),
    ("between head and loss", NONE, "loss = None\n    last = kwargs.pop('last')"),
    ("changed operand", HEAD, "logits = self.lm_head(hidden) * scale\n    scale = 2"),
    ("changed operand", f"{HEAD}", "logits = self.lm_head(hidden) * labels\n    loss = 1\n    logits = logits * loss"),
    ("rewritten before", NONE, "_replay = loss = None"),
    ("layout", f"    {HEAD}", f"    a = 1; {HEAD}"),
    ("layout", HEAD, f'{HEAD}\n    note = """two\nlines"""'),
    ("no source", "def forward", "class forward"),
    ("no source", "return Output(", "return Output(("),
]


@pytest.mark.parametrize(("reason", "old", "new"), DECLINED, ids=[f"{i}-{case[0]}" for i, case in enumerate(DECLINED)])
def test_a_source_is_declined_for_a_reason(reason: str, old: str, new: str) -> None:
    assert not isinstance(rewrite_source(FORWARD), Declined) and FORWARD.count(old) == 1
    found = rewrite_source(FORWARD.replace(old, new))
    assert isinstance(found, Declined) and found.reason.startswith(reason), found
    indented = rewrite_source(textwrap.indent(FORWARD.replace(old, new), "    "))
    assert indented == found


def test_a_guarded_softcap_without_an_else_is_rewritten() -> None:
    new = rewrite_source(FORWARD.replace(NONE, CAP))
    assert not isinstance(new, Declined) and "softcap=self.c," in new
