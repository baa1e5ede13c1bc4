"""One real SLURM for all tests of this folder, which therefore run in one pytest worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import accounting
from tests.cluster.slurm import Slurm, missing_programs
from tests.cluster.submitting import accounted, cluster, stand_in

__all__ = ["accounted", "cluster", "stand_in"]

HERE = Path(__file__).parent
INSTALL = "apt-get install slurm-wlm munge"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("slurm"))


@pytest.fixture(scope="session")
def one_slurm() -> Iterator[Slurm]:
    yield from _running(with_accounting=False)


@pytest.fixture(scope="session")
def one_accounted_slurm() -> Iterator[Slurm]:
    yield from _running(with_accounting=True)


@pytest.fixture
def slurm(one_slurm: Slurm) -> Iterator[Slurm]:
    """SLURM without accounting, its queue empty and its nodes idle before and after."""
    yield one_slurm
    one_slurm.tidy()


@pytest.fixture
def accounted_slurm(one_accounted_slurm: Slurm) -> Iterator[Slurm]:
    """SLURM with slurmdbd, so that `sacct` answers."""
    yield one_accounted_slurm
    one_accounted_slurm.tidy()


def _running(*, with_accounting: bool) -> Iterator[Slurm]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"no SLURM on this machine ({', '.join(missing)} not found): {INSTALL}")
    missing = missing_programs(accounting.PROGRAMS) if with_accounting else []
    if missing:
        pytest.skip(f"no SLURM accounting here ({', '.join(missing)} not found): {INSTALL} slurmdbd mariadb-server")
    slurm = Slurm(accounting=with_accounting)
    try:
        yield slurm
    finally:
        slurm.stop()
