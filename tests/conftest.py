"""Set-up of the whole test run: threads, no overlay of this machine, what is slow, and golden texts."""

import functools
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from jaxtyping import install_import_hook

from tests import fast_hydra, proofs, warm_start
from titan_exp.config.extension import extensions

# One thread per process, before torch is imported anywhere: ranks share two cores, and are forked.
os.environ["OMP_NUM_THREADS"] = "1"
# The defaults of whoever runs the tests (conf/local) are not what is tested.
os.environ["TITAN_EXP_LOCAL"] = "none"
os.environ.pop("COLUMNS", None)  # tables are as wide as they like, on every machine
# Runs are signed with a key of the tests.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"titan_exp-tests-{os.getuid()}")
# Nor are stores of the tests' texts kept among the user's own.
os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["XDG_STATE_HOME"], "cache")
# Else torch starts CUDA where it is asked for GPUs, and ranks are forked.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Shapes and types as annotated are checked at every call in this process; in production they cost nothing.
PACKAGE = Path(__file__).parents[1] / "titan_exp"
CHECKED = [path for room in ("ops", "models") for path in (PACKAGE / room).rglob("[!_]*.py")]
# Of extensions the files with shapes of tensors: some of their protocols cannot be checked.
OWN = [found.folder for found in extensions().values() if found.folder.is_relative_to(PACKAGE)]
CHECKED += [path for room in OWN for path in room.rglob("[!_]*.py") if "jaxtyping" in path.read_text(encoding="utf-8")]
install_import_hook(
    [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in CHECKED], "beartype.beartype"
)
fast_hydra.install()
warm_start.install()
# A failed comparison of curves shows the steps that differ.
pytest.register_assert_rewrite("tests.parity.runs")

PARITY = re.compile(r"tests/(parity/test_|extensions/\w+/test_parity)")
TIMED_BY_THE_MACHINE = re.compile(
    r"tests/(launch/|cluster/|journeys/|trainer/test_rendezvous|extensions/\w+/test_launch)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=1, help="layouts that tests/parity draws; hundreds for a night")
    parser.addoption(
        "--layout-seed", type=int, default=None, help="draw the same layouts again (before the dash of a test's name)"
    )
    parser.addoption("--update-golden", action="store_true", help="write golden texts anew instead of comparing them")
    parser.addoption(
        "--proofs", default="", help="file for what the collected tests prove, as tests/proofs.py reads it"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collected tests leave no garbage; looking for it takes a tenth of their collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take minutes run where they are asked for."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: pytest -m slow runs it, and make test does"))
    for item in items:
        # Curves and exports that a module's cases share are made once, not once in every worker.
        if _shares_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        # A busy machine may start a process later than a test waits. What fails twice is broken; a rerun is reported.
        if TIMED_BY_THE_MACHINE.match(item.nodeid) and config.pluginmanager.hasplugin("rerunfailures"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        # Every layout is trained by night; by day about a seventh, with a compiler half as many, the same each time.
        # Mutations run only where their file is named, and then all of them.
        fixed = PARITY.match(item.nodeid) is not None and item.name.endswith("]")
        fixed = fixed and "test_drawn" not in item.nodeid
        share = 28 if "compile=" in item.name else 14
        # `make gpu` runs every test for a GPU; they skip themselves elsewhere.
        by_day = any(item.get_closest_marker(marker) is not None for marker in ("day", "cuda"))
        if fixed and crc32(item.name.encode()) % share and not by_day:
            item.add_marker(pytest.mark.night)
    _leave_cases_to_the_night(items)
    proofs.collect(config, items)
    if "night" not in config.option.markexpr:
        # Left out, not skipped: a list of some dozens would hide what was skipped for a reason.
        kept = [item for item in items if item.get_closest_marker("night") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def cases_by_day() -> dict[str, int]:
    """Number of cases that run by day, by test, of the tests in `tests/cases_by_day.txt`."""
    lines = Path(__file__).with_name("cases_by_day.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: int(number) for name, number in pairs}


def _leave_cases_to_the_night(items: list[pytest.Item]) -> None:
    """Of tests with many long cases, some run by day, the same each time, and all that docs/models.md names."""
    wanted = cases_by_day()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (name := item.nodeid.partition("[")[0]) in wanted:
            cases.setdefault(name, []).append(item)
    for name, found in cases.items():
        order = sorted(found, key=lambda item: (item.get_closest_marker("day") is None, crc32(item.name.encode())))
        for item in order[wanted[name] :]:
            if item.get_closest_marker("proves") is None:
                item.add_marker(pytest.mark.night)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections of tests skip a million objects of the collected tests and of torch; models of tests
    recompute outputs of any size, as large ones do."""
    if not session.config.option.collectonly:
        _skip_what_lives()
    if (autograd := sys.modules.get("titan_exp.ops.autograd")) is not None:
        vars(autograd)["RECOMPUTED_BYTES"] = 0


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Garbage collections skip what tests of other files imported, too: a plan collects three times."""
    if nextitem is not None and item.path != nextitem.path:
        _skip_what_lives()


def _skip_what_lives() -> None:
    gc.collect()
    gc.freeze()


def _shares_fixtures(item: pytest.Item) -> bool:
    made = getattr(item, "_fixtureinfo", None)  # doctests have none
    return made is not None and any(made.name2fixturedefs[name][-1].scope == "module" for name in made.name2fixturedefs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A test that passes has done what it declares."""
    with proofs.held_to_what_ran(item):
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with the one in a file; with --update-golden, write it there."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path}; make golden writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} is not current: changed on purpose? run make golden"

    return compare


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts import what they need, as those of a user, and take their time."""
    monkeypatch.setattr(subprocess, "_fork_exec", warm_start.execute)


@functools.cache
def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium: of this machine, or the one that `playwright install chromium` fetched."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as started:
        try:
            launched = started.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no Chromium here: apt-get install chromium, or playwright install chromium")
        yield launched
        launched.close()
