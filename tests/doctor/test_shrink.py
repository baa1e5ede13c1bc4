"""Shrunken models keep every kind of their layers, and say so if they cannot be shrunk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.layout.cases import cases
from titan_exp.doctor.layout.shrink import MOST_LAYERS, MOST_PARAMETERS, shrink
from titan_exp.models import llama
from titan_exp.models.spec.lookup import model_spec

PRESETS = sorted(path.stem for path in Path("conf/model").glob("*.yaml"))


class Large(nn.Module):
    """A user's class whose width is written in it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, 2**20)

    def forward(self, tokens: Any, positions: Any = None, documents: Any = None) -> Any:
        """Not called."""


def experiment(*overrides: str) -> Any:
    return resolve_layout(to_experiment(compose([*overrides, "cluster.device=cpu"])), 1)


def kinds(model: Any) -> set[tuple[Any, ...]]:
    spec = model_spec(model)
    assert spec is not None
    names = (
        (
            tuple(linear.name for linear in layer.linears),
            tuple(vector.name for vector in layer.vectors),
            layer.attention and (layer.attention.window is None, layer.attention.chunk is None, layer.attention.rope),
        )
        for layer in spec.layers
    )
    return set(names)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shrunk_to_every_kind_of_its_layers(name: str):
    run = experiment(f"model={name}")
    small = shrink(run)
    assert not isinstance(small, str), small
    assert kinds(small.model) == kinds(run.model)
    assert 2 <= small.model.layers <= MOST_LAYERS
    spec = model_spec(small.model)
    assert spec is not None
    assert spec.parameters < 200_000


def test_layers_divide_into_the_stages_of_the_schedule():
    small = shrink(experiment("model=llama3_8b", "parallelism.pp=4", "parallelism.pp_schedule=Interleaved1F1B"))
    assert not isinstance(small, str)
    assert small.model.layers == 4


def test_a_model_that_cannot_be_shrunk_says_so(monkeypatch: pytest.MonkeyPatch):
    plain = llama.spec

    def rigid(config: llama.Config) -> Any:
        if config.dim != 4096:
            raise ValueError("this family has one width")
        return plain(config)

    monkeypatch.setattr(llama, "spec", rigid)
    run = experiment("model=llama3_8b")
    # Another name, so that no spec of it is cached.
    assert shrink(replace(run, model=replace(run.model, name="rigid"))) == "no smaller sizes of it can be built"
    assert MOST_PARAMETERS < 8e9


def test_a_run_is_checked_in_its_axes_and_their_pairs():
    run = experiment("model=qwen3_moe_debug", *(f"parallelism.{key}=4" for key in ("tp", "dp_shard", "ep", "pp")))
    small = shrink(run)
    assert not isinstance(small, str)
    found, refused = cases(run, small)
    names = [case.name for case in found]
    assert refused == []
    assert names[0] == "one rank"
    assert "parallelism.ep=2 parallelism.tp=2" in names
    assert "parallelism.dp_shard=2 with parallelism.pp=2" in names
    assert len(names) == len(set(names))
    assert {case.ranks for case in found} <= {1, 2, 4}


def test_a_plain_class_of_a_fixed_size_is_not_built():
    small = shrink(experiment("model=llama_debug", "model.architecture=tests.doctor.test_shrink.Large"))
    assert small == "no smaller sizes of it can be built"
