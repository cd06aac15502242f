"""Lanes, poisoned memory, and the fixtures that run one test body on every implementation and device."""

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

# Triton reads the variable when a kernel is decorated, so it is set before anything imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.support.host.lanes import (
    LANES,
    LaneLedger,
    keep_quick_cases,
    left_to_other_lanes,
    this_host,
    unavailable_lanes,
    write_lanes_json,
)
from tests.support.host.poison import poisoned_allocations
from tests.support.kernels import interpreter
from tests.support.ranks.pools import RankPools, pool_of_test
from vocab_parallel_ce import checks

HOST = this_host()
UNAVAILABLE = unavailable_lanes(HOST)
LEDGER = LaneLedger()
TESTS = Path(__file__).parent
OPTIONAL = ("transformers", "accelerate", "peft", "trl", "megatron", "lightning", "torchtitan", "tokenizers", "tqdm")
UNREAD_LABELS = ("conformance", "ranks", "test_launches.py", "test_one_pass.py", "test_random_calls.py")
MARKERS = {
    "no_poison": "allocations of the package keep their contents",
    "quick(n=1)": "a short run that touches everything once; n cases of this test in each lane",
    "interpreted(n, among=None)": "how many cases of this test are interpreted, if not 1, and of which",
}


def _implementations_and_devices() -> list[object]:
    cases = [pytest.param(("reference", "cpu"), id="reference", marks=pytest.mark.reference)]
    if HOST.gpu_count and not HOST.interprets:
        for impl in ("reference", "triton"):
            cases.append(pytest.param((impl, "cuda"), id=f"{impl}-cuda", marks=pytest.mark.cuda))
    else:
        cases.append(pytest.param(("triton", "cpu"), id="triton-interpreter", marks=pytest.mark.interpreter))
    return cases


@pytest.fixture(params=_implementations_and_devices())
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(impl, device): every implementation on every device that can run it in this process."""
    return request.param


@pytest.fixture(autouse=True)
def _seeded():
    """A test draws the same numbers alone and after others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _a_new_compiler():
    """Past a number of compilations of one function its calls are eager, and those of an earlier test count."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest):
    with nullcontext() if request.node.get_closest_marker("no_poison") else poisoned_allocations():
        yield


@pytest.fixture(scope="session")
def rank_pools():
    """The pools of rank processes of this worker."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def rank_pool(request: pytest.FixtureRequest, rank_pools: RankPools):
    """The pool that an indirect parameter ``(backend, world size)`` names."""
    return rank_pools.get(*request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "write how many tests each lane ran, with versions and machine, to PATH"
    parser.addoption("--lanes-json", type=Path, metavar="PATH", help=what)


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in {**LANES, **MARKERS}.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    # The interpreter computes masked lanes too, on whatever they hold, and numpy remarks on it.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    if HOST.interprets:
        interpreter.mend()


class FileOfTests(pytest.Module):
    """A file of tests, skipped with the reason if it imports an optional package that is not installed."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            missing = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            if missing not in OPTIONAL or find_spec(missing) is not None:
                raise
            pytest.skip(f"needs {missing}, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return FileOfTests.from_parent(parent, path=module_path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of one pool of ranks on one worker, so that each pool starts once."""
    from xdist.scheduler import LoadScopeScheduling

    class PoolScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return pool_of_test(nodeid) or nodeid

    return PoolScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = left_to_other_lanes(items)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    keep_quick_cases(items)
    for item in items:
        lanes = [lane for lane in LANES if item.get_closest_marker(lane)]
        item.user_properties.extend(("lane", lane) for lane in lanes)
        for lane in lanes:
            if lane in UNAVAILABLE:
                item.add_marker(pytest.mark.skip(reason=f"{lane} lane: {UNAVAILABLE[lane]}"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    LEDGER.record(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    if _is_full_run(session.config) and LEDGER.idle_lanes(UNAVAILABLE) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = session.config.getoption("lanes_json")
    if path is not None:
        write_lanes_json(path, LEDGER, HOST, int(session.exitstatus))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("lanes")
    for line in LEDGER.lines(UNAVAILABLE):
        terminalreporter.write_line(line)
    if _is_full_run(config):
        for lane in LEDGER.idle_lanes(UNAVAILABLE):
            terminalreporter.write_line(f"{lane}: can run here and executed nothing; the run fails", red=True)


def _is_full_run(config: pytest.Config) -> bool:
    """Whether the command line selects every test."""
    selections = ("keyword", "markexpr", "lf", "deselect", "ignore", "ignore_glob", "stepwise")
    if any(config.getoption(name, None) for name in selections):
        return False
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return config.invocation_params.dir in (TESTS, TESTS.parent)
    arguments = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    return any(argument in (TESTS, TESTS.parent) for argument in arguments)


@pytest.fixture
def unread_labels(monkeypatch):
    """Let ``check_labels="auto"`` look at nothing, as on a GPU: what kernels make of a wrong label stays tested."""
    monkeypatch.setattr(checks, "looks_at", lambda values, check_labels: check_labels is True)


@pytest.fixture(autouse=True)
def _unread_labels_where_all_devices_are_alike(request):
    """The same in tests whose cases run on a GPU too; processes of ranks do it themselves."""
    if request.path.relative_to(TESTS).parts[0] in UNREAD_LABELS:
        request.getfixturevalue("unread_labels")
