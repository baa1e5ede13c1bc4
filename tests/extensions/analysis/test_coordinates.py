"""titan-exp doctor --coordinates: muP passes, the standard parametrization and every broken factor of muP fail."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.extensions.analysis import coordinates as module
from titan_exp.extensions.analysis.coordinates import (
    _batches,
    _on_one_device,
    coordinates_command,
    measure_coordinates,
    slope,
)
from titan_exp.models.parametrization.standard import ParameterScale
from titan_exp.optim.schedule_free_adamw import ScheduleFreeAdamW

TINY = [
    *("model=llama_debug", "model.layers=1", "training.seq_len=32", "training.global_batch_size=4"),
    *("model.dim=32,128,512", "model.heads=2,8,32", "model.kv_heads=1,4,16", "model.ffn_dim=96,384,1536"),
]


def verdict(output: Path, *overrides: str) -> int:
    return coordinates_command(["--coordinates", "--output", str(output), *TINY, *overrides])


def test_mup_passes_and_the_standard_parametrization_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "check.png"
    assert verdict(picture, "parametrization=mup") == 0
    assert "coordinate check passed" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert verdict(picture) == 3
    assert "coordinate check failed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "factor"),
    [
        ("head.weight", "lr"),
        pytest.param("qkv.weight", "lr", marks=pytest.mark.night),
        pytest.param("down.weight", "lr", marks=pytest.mark.night),
        ("embedding.weight", "lr"),
    ],
)
def test_a_broken_factor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, factor: str):
    original = module.scales_of

    def broken(*args: object) -> Mapping[str, ParameterScale]:
        scales = original(*args)  # type: ignore[arg-type]
        # Matrices lose their factor; the embedding gets that of a matrix.
        other = 1.0 if part != "embedding.weight" else scales["head.weight"].lr
        return {name: replace(scale, **{factor: other}) if part in name else scale for name, scale in scales.items()}

    monkeypatch.setattr(module, "scales_of", broken)
    assert verdict(tmp_path / "check.png", "parametrization=mup") == 3


@pytest.mark.night
@pytest.mark.parametrize("optimizer", ["muon", "muon optimizer.scale=original", "dion", "lion optimizer.lr=1e-3"])
def test_mup_passes_with_other_optimizers(tmp_path: Path, optimizer: str):
    words = ["parametrization=mup", *f"optimizer={optimizer}".split()]
    assert verdict(tmp_path / "check.png", *words) == 0


@pytest.mark.night
def test_adams_learning_rates_fail_for_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_exp.optim.parameter_groups._with_own_lr", lambda named, config: named.scale)
    assert verdict(tmp_path / "check.png", "parametrization=mup", "optimizer=muon") == 3


def test_gradients_of_schedule_free_adamw_are_those_of_its_point(monkeypatch: pytest.MonkeyPatch):
    words = [word.partition(",")[0] for word in TINY]
    run = _on_one_device(to_experiment(compose([*words, "optimizer=schedule_free_adamw"])))
    batches, device = _batches(run), torch.device("cpu")
    found = measure_coordinates(run, batches, device)
    monkeypatch.setattr(ScheduleFreeAdamW, "to_gradient_point", lambda self: None)
    without = measure_coordinates(run, batches, device)
    assert found.changes[0] == without.changes[0], "both points are one before the second step"
    assert found.changes[-1]["logits"] != pytest.approx(without.changes[-1]["logits"], rel=1e-3)


def test_slopes():
    assert slope([64, 128, 256], [1, 2, 4]) == pytest.approx(1)
    assert slope([64, 256], [4, 2]) == pytest.approx(-0.5)
    assert slope([64, 256], [4, 0]) == float("inf")


@pytest.mark.parametrize(
    "words",
    [
        ["model.dim=64,128", "model.heads=2,4,8"],
        ["model.heads=2,4"],
        ["model.dim=64,128", "model.heads=3"],
        ["--output", "x.pdf"],
        ["a"],
    ],
)
def test_invalid_arguments_are_refused(words: list[str]):
    with pytest.raises(UserError):
        coordinates_command(["--coordinates", *words])
