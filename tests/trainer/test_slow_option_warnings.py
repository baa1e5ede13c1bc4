"""The log names options that save memory where there is plenty."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.tracking.display import GIB
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.profiling.slow_options import SpareMemory, log_slow_options, saving_options


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 * GIB))
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog.messages


def test_spare_memory_is_logged_once(lines: list[str], caplog: pytest.LogCaptureFixture):
    spare = SpareMemory(saving_options(experiment("activation_checkpoint=full")), torch.device("cuda", 0))
    spare.check(31.0)
    spare.check(31.0)
    assert len(caplog.messages) == 1
    assert "activation_checkpoint=none" in caplog.messages[0]
    assert "the run used at most 31.0 of 140 GiB" in caplog.messages[0]


@pytest.mark.parametrize(
    ("override", "device", "reserved"),
    [
        ("activation_checkpoint=full", "cuda", 80.0),
        ("activation_checkpoint=none", "cuda", 31.0),
        ("activation_checkpoint=full", "cpu", None),
    ],
)
def test_without_spare_memory_nothing_is_logged(
    lines: list[str], caplog: pytest.LogCaptureFixture, override: str, device: str, reserved: float | None
):
    SpareMemory(saving_options(experiment(override)), torch.device(device, 0)).check(reserved)
    assert caplog.messages == []


def test_options_are_a_line_each(lines: list[str], caplog: pytest.LogCaptureFixture):
    words = ["optimizer.implementation=for_loop", "training.deterministic=true", "cluster.device=cpu"]
    log_slow_options(resolve_layout(experiment(*words), 1))
    assert [message.partition(":")[0] for message in caplog.messages] == ["slower than necessary"] * 2
