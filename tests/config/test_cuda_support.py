"""GPUs that torch cannot use: found, explained, and refused by `cluster.device=auto`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.config import devices
from titan_exp.config.devices import CudaFacts, DriverAnswer, cuda_problem
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.doctor.machine import machine_command
from titan_exp.rules import check
from titan_exp.trainer import distributed

USABLE = CudaFacts("2 NVIDIA GPUs", 2, None, "2.11.0+cu130", "13.0", DriverAnswer(version=13010, count=2))


@pytest.mark.parametrize(
    "facts", [USABLE, CudaFacts(None, 0, "", "2.13.0+cpu", None, None), replace(USABLE, driver=None)]
)
def test_usable_gpus_and_machines_without_any(facts: CudaFacts):
    assert cuda_problem(facts) is None


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        (
            replace(USABLE, torch="2.13.0+cpu", torch_cuda=None),
            "torch 2.13.0+cpu is a build without CUDA",
            "CUDA build",
        ),
        (replace(USABLE, mask="", visible=0), "CUDA_VISIBLE_DEVICES='' hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        (
            replace(USABLE, driver=DriverAnswer(version=12040, count=2)),
            "its driver runs CUDA 12.4, and torch 2.11.0+cu130 needs CUDA 13.0",
            "update the driver, or install a build of torch for CUDA 12",
        ),
        (
            replace(USABLE, driver=DriverAnswer(status=803, name="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", version=13010)),
            "does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, code 803)",
            "dmesg",
        ),
        (replace(USABLE, driver=DriverAnswer(version=13010)), "shows no device", "MIG"),
        (
            replace(USABLE, driver=DriverAnswer(missing="libcuda.so.1: cannot open")),
            "libcuda.so.1: cannot",
            "container",
        ),
    ],
)
def test_reasons(facts: CudaFacts, reason: str, remedy: str):
    problem = cuda_problem(facts)
    assert problem is not None
    assert problem[0].startswith("this machine has 2 NVIDIA GPUs, but ")
    assert reason in problem[0]
    assert remedy in problem[1]
    assert problem[1].endswith("or use cluster.device=cpu to train on the CPU on purpose")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with a driver and no GPU; the folder takes device files."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "gpus")
    version = tmp_path / "version"
    version.write_text("NVRM version: 580.65")
    monkeypatch.setattr(devices, "DRIVER_VERSION", version)
    devices.unusable_cuda.cache_clear()
    yield tmp_path
    devices.unusable_cuda.cache_clear()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch of this machine is built for CUDA")
@pytest.mark.parametrize(("gpus", "found"), [(0, "an NVIDIA driver"), (2, "2 NVIDIA GPUs")])
def test_nothing_falls_back_to_the_cpu(machine: Path, gpus: int, found: str):
    for number in range(gpus):
        (machine / f"nvidia{number}").touch()
    words = rf"(?s){found}, but torch \S+ is a build without CUDA.*cluster.device=cpu to train on the CPU on purpose"
    with pytest.raises(UserError, match=words):
        check(resolve_layout(experiment("cluster.device=auto"), 1))
    with pytest.raises(UserError, match=words):
        distributed._device("auto", 0)
    with pytest.raises(UserError, match=words):
        machine_command([], lambda *_: None)  # type: ignore[arg-type, return-value]
    check(resolve_layout(experiment("cluster.device=cpu"), 1))
    assert distributed._device("cpu", 0).type == "cpu"


def test_a_login_node_without_driver_submits(machine: Path):
    (machine / "version").unlink()
    slurm = ("cluster=slurm", "cluster.device=cuda", "cluster.gpus_per_node=8", "parallelism.dp_shard=8")
    check(resolve_layout(experiment(*slurm), 8))
    assert distributed._device("auto", 0).type == "cpu"


def test_torch_without_importing_it():
    assert devices.torch_build() == (torch.__version__, torch.version.cuda)
