"""Limit of a process's memory: that of its control group, of those above it, and of the machine."""

from pathlib import Path

import pytest

from titan_exp.config import devices
from titan_exp.config.devices import host_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("limits", "groups", "limit"),
    [
        ({"memory.max": "max", "slurm/job_1/memory.max": "2", "slurm/memory.max": "3"}, "0::/slurm/job_1", 2),
        ({"slurm/job_1/step/memory.max": "max", "slurm/job_1/memory.max": "1"}, "0::/slurm/job_1/step", 1),
        ({"memory.max": "1"}, "0::/docker/absent", 1),
        ({"other/memory.max": "1", "slurm/job_1/memory.max": "3"}, "0::/slurm/job_1", 3),
        (
            {"memory/a/memory.limit_in_bytes": "1", "memory/memory.limit_in_bytes": "9223372036854771712"},
            "8:pids:/b\n4:memory:/a\n0::/",
            1,
        ),
        ({"unified/a/memory.max": "2", "memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/\n0::/a", 2),
    ],
)
def test_least_limit_of_own_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: dict[str, str], groups: str, limit: int
) -> None:
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(int(text) * 2**20) if text.isdigit() and len(text) == 1 else text)
    (tmp_path / "own").write_text(groups + "\n")
    monkeypatch.setattr(devices, "CONTROL_GROUPS", (tmp_path / "cgroup", tmp_path / "own"))
    assert host_memory() == limit * 2**20


def test_machine_without_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "CONTROL_GROUPS", (tmp_path / "absent", tmp_path / "absent too"))
    memory = host_memory()
    assert memory is not None
    assert memory > GIB
