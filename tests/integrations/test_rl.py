"""What verl, NeMo-RL and OpenRLHF share: how their names are rebound, the example of a policy, and its page."""

import importlib
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.linear.test_keep_logits import COLUMNS, Products
from tests.support.frameworks.rl import in_two_ranks
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import verl
from vocab_parallel_ce.integrations.log_probs import FusedLinearChunkedDistributedLogprob
from vocab_parallel_ce.integrations.rebind import Switch

EXAMPLE = ROOT / "scripts" / "examples" / "rl_policy_gradient.py"
SOURCES = {
    "shop.core": """
import torch
def price(item, discount=0): return "own"
class Till(torch.nn.Module):
    def forward(self, item): return "own"
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, item, factor): return item * factor
weigh = Scale.apply
""",
    "shop.trainer": "from shop.core import Scale, price as cost, weigh\n",
    "shop.late": "from shop.core import price\n",
    "shop.needs": "import a_module_that_is_not_there\n",
    "users_script": "from shop.core import price\n",
}


def price(item, discount=0):
    """Stands for the framework's."""
    return "ours"


def forward(self, item):
    return "ours"


def weigh(item, factor):
    return "ours"


class Scale:
    @staticmethod
    def apply(item, factor):
        return "ours"


STAND_INS = {
    "shop.core:price": price,
    "shop.core:Till.forward": forward,
    "shop.core:weigh": weigh,
    "shop.core:Scale": Scale,
    "shop.needs:price": price,
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A framework of four modules, and a script of its user; ``import_module`` of any of them."""
    for name, source in SOURCES.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "users_script")]:
        del sys.modules[name]


def _results(shop):
    core = shop("shop.core")
    found = [core.price(1), core.Till()(1), core.weigh(1, 2), core.Scale.apply(1, 2)]
    others = shop("shop.trainer")
    return [*found, others.cost(1), others.weigh(1, 2), others.Scale.apply(1, 2)]


OWN, OURS = ["own", "own", 2, 2, "own", 2, 2], ["ours"] * 7


@pytest.mark.reference
def test_names_are_rebound_wherever_a_module_has_them_and_given_back(shop):
    switch = Switch("shop 1", STAND_INS)
    assert _results(shop) == OWN
    user = shop("users_script")
    report = switch.install()
    assert switch.install() == report == switch.report()
    assert _results(shop) == OURS and user.price(1) == "ours"
    expected = {"core.price", "core.Till.forward", "core.weigh", "core.Scale"}
    expected |= {"trainer.cost", "trainer.weigh", "trainer.Scale"}
    assert set(report.rebound) == {f"shop.{name}" for name in expected} | {"users_script.price"}
    assert list(report.left) == ["shop.needs:price"] and "a_module_that_is_not_there" in report.left["shop.needs:price"]
    late = shop("shop.late")
    assert late.price(1) == "ours" and "shop.late.price" in switch.report().rebound
    switch.uninstall()
    switch.uninstall()
    assert _results(shop) == OWN and user.price(1) == late.price(1) == "own"
    assert not switch.report().installed


@pytest.mark.reference
def test_two_names_of_one_function_have_a_stand_in_each(shop):
    core = shop("shop.core")
    core.fee = core.price
    switch = Switch("shop 1", {"shop.core:price": price, "shop.core:fee": lambda item, discount=0: "a fee"})
    with switch.installed():
        assert (core.price(1), core.fee(1), shop("shop.trainer").cost(1)) == ("ours", "a fee", "ours")
    assert core.fee is core.price and _results(shop) == OWN


@pytest.mark.reference
def test_one_line_says_what_is_computed_and_what_is_left_and_why(shop, caplog):
    caplog.set_level("INFO", "vocab_parallel_ce")
    switch = Switch("shop 1", STAND_INS, {"the cellar": "it has no door"})
    report = switch.install()
    switch.install()
    switch.uninstall()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert said.startswith("vocab_parallel_ce: shop 1: computes Scale, forward, price, weigh; left to the framework: ")
    assert "the cellar (it has no door); shop.needs:price (No module named" in said
    assert report.left.keys() == {"the cellar", "shop.needs:price"} and not switch.report().left


@pytest.mark.reference
def test_the_context_manager_undoes_what_it_did(shop):
    switch = Switch("shop 1", STAND_INS)
    with switch.installed() as report:
        assert report.rebound and _results(shop) == OURS
    with pytest.raises(TypeError), switch.installed():
        shop("shop.core").price()
    assert _results(shop) == OWN
    switch.install()
    with switch.installed():
        pass
    assert _results(shop) == OURS
    switch.uninstall()


@pytest.mark.reference
def test_an_interrupt_while_modules_are_searched_changes_nothing(shop, monkeypatch):
    class InterruptsOnce:
        asked = 0

        @property
        def __dict__(self):
            type(self).asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt("while searching")
            return {}

    switch = Switch("shop 1", STAND_INS)
    monkeypatch.setitem(sys.modules, "shop.interrupts", InterruptsOnce())
    with pytest.raises(KeyboardInterrupt, match="while searching"), switch.installed():
        pass
    assert _results(shop) == OWN and not switch.report().installed and InterruptsOnce.asked == 1


@pytest.mark.reference
def test_a_name_that_cannot_be_bound_leaves_all_others_as_they_were(shop):
    class Sealed(type):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{name} is sealed")

    class Vault(metaclass=Sealed):
        def forward(self, item):
            return "own"

    shop("shop.core").Vault = Vault
    switch = Switch("shop 1", {**STAND_INS, "shop.core:Vault.forward": forward})
    with pytest.raises(AttributeError, match="forward is sealed"), switch.installed():
        pass
    assert _results(shop) == OWN and not switch.report().installed


@pytest.mark.reference
def test_what_something_else_replaced_is_not_undone(shop, monkeypatch):
    switch = Switch("shop 1", STAND_INS)
    switch.install()
    with monkeypatch.context() as patch:
        patch.setattr(shop("shop.core").Till, "forward", lambda self, item: "another")
        with pytest.raises(RuntimeError, match=r"shop\.core\.Till\.forward: something else replaced it"):
            switch.uninstall()
        assert shop("shop.core").price(1) == "ours"
    switch.uninstall()
    assert _results(shop) == OWN


@pytest.mark.reference
@pytest.mark.parametrize("name", ["price", "missing", "Till.backward", "Counter.forward"])
def test_another_version_is_refused_before_anything_changes(shop, name):
    stand_ins = {**STAND_INS, f"shop.core:{name}": lambda item, tax: "ours"}
    got = r"\['item', 'discount'\]" if name == "price" else "no such name"
    message = rf"shop\.core\.{name}: expected the parameters of shop 1, \['item', 'tax'\], got {got}; install"
    with pytest.raises(ValueError, match=message):
        Switch("shop 1", stand_ins).install()
    assert _results(shop) == OWN


@pytest.mark.reference
def test_a_framework_that_is_not_there():
    with pytest.raises(ImportError, match=r"nothing 3: nothing_of_the_kind is not installed"):
        Switch("nothing 3", {"nothing_of_the_kind:price": price}).install()


def _training(rank, group):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    return example.train(15, rank, group.size(), group, device_of(rank, group))


@pytest.mark.reference
def test_the_example_learns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--cpu", "--steps", "15"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, last = map(float, re.findall(r"0\.\d+", capsys.readouterr().out))
    assert 0.45 < first < 0.65 < 0.75 < last


@in_two_ranks
def test_the_example_learns_on_two_ranks(rank_pool, impl):
    first, second = rank_pool.run(_training)
    assert first == second and first[0] < 0.55 < 0.75 < first[-1]


@pytest.mark.reference
def test_verls_own_variable_switches_it_on(monkeypatch):
    """verl imports the modules that the variable names when it is imported itself."""
    pytest.importorskip("verl.utils.torch_functional", exc_type=ImportError)
    from tests.support.host.fresh import fresh_python

    variables = {"VOCAB_PARALLEL_CE_VERL": "1", "VERL_USE_EXTERNAL_MODULES": "vocab_parallel_ce.integrations.verl"}
    code = "from verl.utils.torch_functional import logprobs_from_logits as f; print(f.__module__)"
    result = fresh_python("-c", code, **variables)
    assert result.stdout.split()[-1:] == ["vocab_parallel_ce.integrations.verl"], result.stderr


@pytest.mark.reference
@pytest.mark.parametrize("core", ("linear_cross_entropy", "FusedLinearForPPO", "SkyRL"))
def test_heads_keep_their_logits_if_the_environment_says_so(monkeypatch, core):
    """The bits of those that are made again, with a product less per chunk."""
    hidden, weight, labels = torch.randn(6, 5), torch.randn(COLUMNS, 5), torch.randint(0, COLUMNS, (6,))
    calls = {
        "linear_cross_entropy": lambda h, w: verl.linear_cross_entropy(h, w, labels)[0],
        "FusedLinearForPPO": lambda h, w: verl.FusedLinearForPPO()(h, w, labels)[0],
        "SkyRL": lambda h, w: FusedLinearChunkedDistributedLogprob.apply(h, w, labels, 0, COLUMNS, 4, None),
    }
    results = []
    for kept, n_products in (("", 2), ("all", 1)):
        monkeypatch.setenv("VOCAB_PARALLEL_CE_KEEP_LOGITS", kept)
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with Products() as products:
            log_probs = calls[core](*leaves)
            log_probs.sum().backward()
        assert products.count == n_products
        results.append((log_probs, *(leaf.grad for leaf in leaves)))
    assert all(map(torch.equal, *results))
