"""A small model to train and save."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.models.shapes import real_model
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.load_state import model_state_dict
from titan_exp.checkpoint.storage_reader import load_into
from titan_exp.checkpoint.storage_writer import require_intact
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment


def trained(seed: int = 0, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model after some steps, and its optimizer."""
    model = real_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on the same tokens as always."""
    model(torch.arange(40).view(2, 20)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all of the training state."""
    moments = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Load the weights of an intact checkpoint. Raises UserError if it is damaged."""
    require_intact(path)
    load_into(path, model_state_dict([model]))


def checkpointer(tmp_path: Path, mode: str = "async", **settings: Any) -> Checkpointer:
    """Checkpointer of a run in `tmp_path`, with settings of the group `checkpoint`."""
    config = replace(to_experiment(compose([f"checkpoint.mode={mode}"])).checkpoint, every=10, **settings)
    tmp_path.mkdir(parents=True, exist_ok=True)
    return Checkpointer(config, tmp_path / "checkpoints")


def saved(tmp_path: Path, *steps: int) -> Checkpointer:
    """Checkpoints of these steps, each of another training step; the mode is sync and all are kept."""
    model, optimizer = trained()
    saver = checkpointer(tmp_path, "sync", keep=100)
    for step in steps:
        saver.save(step, [model], optimizer, {"0": {"rows": step}}, {"step": step})
        one_step(model, optimizer)
    return saver
