"""Rounding noise is not an update: SOAP and Dion where gradients have fewer directions than their matrices."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.extensions.diffusion.test_parity import SEQ, SIZES, write
from tests.parity.runs import Curve, train
from tests.patching import patch

FULL_RANK = "optimizer=dion optimizer.rank_fraction=1 training.steps=8"
OTHER = "training.micro_batch_size=1"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words of a model whose modulations are multiplied by one vector a sample."""
    store = tmp_path_factory.mktemp("stores") / "glyphs"
    write(store)
    sizes = SIZES if isinstance(SIZES, str) else " ".join(SIZES)
    words = f"model=flux_debug data=latents data.paths=[{store}] training.objective=rectified_flow"
    return f"{words} {sizes} {SEQ} optimizer.lr=1e-2"


def differences(path: Path, words: str, other: str, mutate: Callable[[], None] | None = None) -> tuple[float, ...]:
    """Largest difference of losses and norms, relative, and of weights, relative to the norm of each."""
    one, two = (
        train(path / str(n), *each.split(), mutate=mutate) for n, each in enumerate((words, f"{words} {other}"))
    )
    losses, norms = (_relative(getattr(one, name), getattr(two, name)) for name in ("loss", "grad_norm"))
    return losses, norms, max(_distance(one, two, name) for name in one.weights)


def _relative(found: list[float], others: list[float]) -> float:
    return max(abs(other / number - 1) for number, other in zip(found, others, strict=True))


def _distance(one: Curve, two: Curve, name: str) -> float:
    change = one.weights[name] - two.weights[name]
    return float(torch.linalg.vector_norm(change) / torch.linalg.vector_norm(one.weights[name]))


@pytest.mark.parametrize(
    ("words", "other", "bounds"),
    [
        ("flux optimizer=dion", OTHER, (2e-6, 2e-5, 0.02)),
        ("flux optimizer=soap", OTHER, (2e-6, 2e-5, 5e-3)),
        pytest.param("flux optimizer=soap", "parallelism.tp=2", (2e-6, 2e-5, 5e-3), marks=pytest.mark.night),
        (FULL_RANK, OTHER, (2e-6, 2e-5, 1e-3)),
        pytest.param(FULL_RANK, "parallelism.tp=2", (2e-6, 2e-5, 1e-3), marks=pytest.mark.night),
        ("model=qwen3_moe_debug optimizer=soap", OTHER, (2e-6, 2e-5, 2e-3)),
    ],
)
def test_rounding_is_no_update(tmp_path: Path, flux: str, words: str, other: str, bounds: tuple[float, ...]):
    found = differences(tmp_path, words.replace("flux", flux), other)
    assert [value for value, bound in zip(found, bounds, strict=True) if value > bound] == [], found


def noise_is_signal() -> None:
    for name in ("soap", "dion"):
        patch(
            f"titan_exp.optim.{name}.share_of_signal",
            lambda _: lambda squares, largest: (squares > 0).to(squares.dtype),
        )


@pytest.mark.parametrize("words", ["flux optimizer=dion", "flux optimizer=soap"])
def test_a_forgotten_guard_is_noticed(tmp_path: Path, flux: str, words: str):
    found = differences(tmp_path, words.replace("flux", flux), OTHER, mutate=noise_is_signal)
    assert found[1] > 2e-5
