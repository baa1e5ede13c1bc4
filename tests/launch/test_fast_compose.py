"""Fast composition equals Hydra's, errors included."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from titan_exp.config.hydra.compose import compose
from titan_exp.launch.sweep.sweeper import FastCompose


@pytest.fixture(scope="module")
def composer() -> tuple[FastCompose, list[list[str]]]:
    calls: list[list[str]] = []

    def hydra(overrides: list[str]) -> DictConfig:
        calls.append(overrides)
        return compose(overrides)

    return FastCompose(hydra, OverridesParser.create()), calls


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.lr=1e-3", "model=llama_debug", "optimizer.betas=[0.9,0.99]", "checkpoint.every=null"],
        ["training.steps=5", "training.steps=7", "+experiment=smoke"],
        ["experiment.notes='a, b'", "training={steps:3}", "training.seq_len=64"],
        ["+optimizer.options.rho=0.1", "optimizer.lr=2", "++optimizer.lr=3"],
        ["optimizer.lr=2", "~data.split"],
    ],
)
def test_equals_hydras_composition(overrides: list[str], composer: tuple[FastCompose, list[list[str]]]):
    assert composer[0](overrides) == compose(overrides)


def test_values_alone_are_not_composed_again(composer: tuple[FastCompose, list[list[str]]]):
    compose_quickly, calls = composer
    first = compose_quickly(["model=llama_debug", "optimizer.lr=1"])
    before = len(calls)
    second = compose_quickly(["model=llama_debug", "optimizer.lr=2", "model.dim=128"])
    assert len(calls) == before
    assert (first.optimizer.lr, second.optimizer.lr, first.model.dim, second.model.dim) == (1, 2, 64, 128)


@pytest.mark.parametrize("override", ["optimizer.nonsense=3", "model=nonsense", "training.steps.x=3"])
def test_errors_are_hydras(override: str, composer: tuple[FastCompose, list[list[str]]]):
    with pytest.raises(HydraException):
        composer[0](["optimizer.lr=1", override])


def test_points_that_fail_alike_are_composed_once(composer: tuple[FastCompose, list[list[str]]]):
    compose_quickly, calls = composer
    chosen = ["model=llama_debug", "optimizer=sgd"]
    causes = set[HydraException]()
    for lr in range(5):
        with pytest.raises(HydraException, match=r"optimizer\.betas") as caught:
            compose_quickly([*chosen, f"optimizer.lr={lr}", "optimizer.betas=[0.9,0.99]"])
        causes.add(caught.value)
    assert len(causes) == 1
    assert calls[-2:] == [chosen, [*chosen, "optimizer.lr=0", "optimizer.betas=[0.9,0.99]"]]
    with pytest.raises(HydraException, match=r"optimizer\.betas=\[0\.8,0\.99\]"):
        compose_quickly([*chosen, "optimizer.betas=[0.8,0.99]"])
    assert compose_quickly([*chosen, "optimizer.lr=7"]).optimizer.lr == 7
