"""install() of a made-up framework and of those that are here: what it rebinds, gives back and refuses."""

import importlib
import sys
from typing import Any, NamedTuple

import pytest
import torch

from vocab_parallel_ce import integrations
from vocab_parallel_ce.integrations.rebind import Switch

pytestmark = pytest.mark.reference
CORE, TITAN, TRL = "megatron.core", "torchtitan.components.loss", "trl.trainer.utils"
TRL_DIVERGENCES = (
    "trl.trainer.distillation_trainer._chunked_divergence_loss",
    "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",
)
LANGUAGE_MODULE = f"{CORE}.models.common.language_module.language_module"
SOURCES = {  # a framework, and a script of its user
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


class Installed(NamedTuple):
    """An integration: what of its framework it rebinds, and what it refuses."""

    names: tuple[str, ...]  # first a function
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = ()
    version: str = "expected the parameters of"  # of the error of another function in place of the first


INSTALLED = {
    "shop": Installed(
        (
            "shop.core.price",
            "shop.core.Till.forward",
            "shop.core.weigh",
            "shop.core.Scale",
            "shop.trainer.cost",
            "shop.trainer.weigh",
            "shop.trainer.Scale",
            "users_script.price",
        )
    ),
    "trl": Installed(
        (f"{TRL}._ChunkedLogProbFunction", f"{TRL}.DTensor", *TRL_DIVERGENCES),
        version=r"trl: expected the fused head of TRL 1\.16, got another in TRL 1\.",
    ),
    "torchtitan": Installed(
        (
            f"{TITAN}.cross_entropy_loss",
            f"{TITAN}.compute_logprobs",
            "torchtitan.models.deepseek_v3.mtp.cross_entropy_loss",
        ),
        (
            ({"gradient": "in_forward"}, ValueError, "gradient: expected one of"),
            ({"impl": "fast"}, ValueError, "impl: expected one of"),
            ({"vocab_size": 0}, ValueError, "vocab_size: must be positive"),
        ),
    ),
    "megatron": Installed(
        (
            f"{CORE}.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
            f"{CORE}.tensor_parallel.vocab_parallel_cross_entropy",
            f"{CORE}.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
            f"{LANGUAGE_MODULE}.fused_vocab_parallel_cross_entropy",
            f"{LANGUAGE_MODULE}.LanguageModule.compute_language_model_loss",
        ),
        (
            ({"reduction": "mean"}, TypeError, "reduction: expected an option of install\\(\\), one of z_loss,"),
            ({"z_loss": -1.0}, ValueError, "z_loss"),
            ({"gradient": "later"}, ValueError, "gradient"),
            ({"linear": True, "chunk_size": 0}, ValueError, "chunk_size"),
            ({"chunk_size": 8}, ValueError, "chunk_size: expected linear=True"),
            ({"linear": True, "gradient": "out_of_place"}, ValueError, "gradient"),
        ),
        "expected that of Megatron",
    ),
}
by_name = pytest.mark.parametrize("name", INSTALLED)


def looked_up(path):
    """The module or class that has a name, and the name."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(module), name
    except ImportError:
        owner, its_name = looked_up(module)
        return getattr(owner, its_name), name


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """The made-up framework; ``import_module`` of any of its modules."""
    for name, source in SOURCES.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "users_script")]:
        del sys.modules[name]


@pytest.fixture
def framework(name, shop):
    """An integration whose framework is here; its names are the framework's own afterwards."""
    native = {}
    for path in INSTALLED[name].names:
        pytest.importorskip(path.partition(".")[0])
        owner, attribute = looked_up(path)
        native[path] = owner, attribute, getattr(owner, attribute)
    integration = Switch("shop 1", STAND_INS) if name == "shop" else integrations.__getattr__(name)
    yield integration
    integration.uninstall()
    assert all(getattr(owner, attribute) is value for owner, attribute, value in native.values())
    assert not integration.report().installed


def values(name):
    return {path: getattr(*looked_up(path)) for path in INSTALLED[name].names}


@by_name
def test_every_name_is_rebound_and_given_back(framework, name):
    native, before = values(name), framework.report()
    report = framework.install()
    assert report.installed and set(report.rebound) == set(INSTALLED[name].names) and not report.calls
    ours = values(name)
    assert not set(map(id, native.values())) & set(map(id, ours.values()))
    assert framework.install() == report and values(name) == ours
    with framework.installed() as inside:
        assert inside == report
    assert framework.report() == report
    framework.uninstall()
    framework.uninstall()
    assert values(name) == native and framework.report()._replace(calls={}) == before._replace(calls={})
    with pytest.raises(ZeroDivisionError), framework.installed():
        raise ZeroDivisionError
    assert values(name) == native


@by_name
def test_what_something_else_replaced_is_not_undone(framework, name, monkeypatch):
    first, *_, last = INSTALLED[name].names
    framework.install()
    ours = values(name)
    with monkeypatch.context() as patch:
        patch.setattr(*looked_up(first), print)
        with pytest.raises(RuntimeError, match=rf"{first.rpartition('.')[2]}: something else replaced it"):
            framework.uninstall()
        assert values(name)[last] is ours[last]


@by_name
def test_another_version_is_refused_before_anything_is_rebound(framework, name, monkeypatch):
    native = values(name)
    with monkeypatch.context() as patch:
        if name == "megatron":  # which takes any parameters
            patch.delattr(*looked_up(INSTALLED[name].names[-1]))
        else:
            patch.setattr(*looked_up(INSTALLED[name].names[0]), torch.autograd.Function)
        with pytest.raises(ValueError, match=INSTALLED[name].version):
            framework.install()
    assert values(name) == native and not framework.report().installed


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [(name, *each) for name, installed in INSTALLED.items() for each in installed.refused],
)
def test_options_are_checked_before_anything_is_rebound(framework, name, options, error, message):
    with pytest.raises(error, match=message):
        framework.install(**options)
    assert not framework.report().installed


def prices(shop):
    """What the framework computes, by each of its names."""
    core, trainer = shop("shop.core"), shop("shop.trainer")
    own = [core.price(1), core.Till()(1), core.weigh(1, 2), core.Scale.apply(1, 2)]
    return [*own, trainer.cost(1), trainer.weigh(1, 2), trainer.Scale.apply(1, 2)]


OWN, OURS = ["own", "own", 2, 2, "own", 2, 2], ["ours"] * 7


def test_a_module_that_is_imported_later_has_our_functions_until_uninstall(shop):
    assert prices(shop) == OWN
    switch = Switch("shop 1", STAND_INS)
    switch.install()
    late = shop("shop.late")
    assert prices(shop) == OURS and late.price(1) == "ours" and "shop.late.price" in switch.report().rebound
    with switch.installed():  # by somebody who does not know that it is installed
        pass
    assert prices(shop) == OURS
    switch.uninstall()
    assert prices(shop) == OWN and late.price(1) == "own"


def test_two_names_of_one_function_have_a_stand_in_each(shop):
    core = shop("shop.core")
    core.fee = core.price
    switch = Switch("shop 1", {"shop.core:price": price, "shop.core:fee": lambda item, discount=0: "a fee"})
    with switch.installed():
        assert (core.price(1), core.fee(1), shop("shop.trainer").cost(1)) == ("ours", "a fee", "ours")
    assert core.fee is core.price and prices(shop) == OWN


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
    assert prices(shop) == OWN and not switch.report().installed and InterruptsOnce.asked == 1


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
    assert prices(shop) == OWN and not switch.report().installed


@pytest.mark.parametrize("name", ["price", "missing", "Till.backward", "Counter.forward"])
def test_another_version_is_refused_before_anything_changes(shop, name):
    stand_ins = {**STAND_INS, f"shop.core:{name}": lambda item, tax: "ours"}
    got = r"\['item', 'discount'\]" if name == "price" else "no such name"
    message = rf"shop\.core\.{name}: expected the parameters of shop 1, \['item', 'tax'\], got {got}; install"
    with pytest.raises(ValueError, match=message):
        Switch("shop 1", stand_ins).install()
    assert prices(shop) == OWN


def test_a_framework_that_is_not_there():
    with pytest.raises(ImportError, match=r"nothing 3: nothing_of_the_kind is not installed"):
        Switch("nothing 3", {"nothing_of_the_kind:price": price}).install()
