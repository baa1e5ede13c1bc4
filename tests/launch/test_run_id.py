"""A run is named by what it computes, and by nothing else."""

import dataclasses
import math
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_dict, to_experiment
from titan_exp.launch.run_id import LAYOUT, NOT_IN_RUN_ID, canonical, experiment_id, run_id


def experiment(*overrides: str) -> Experiment:
    return resolve_layout(to_experiment(compose(["model=llama_debug", *overrides])), 1)


@pytest.mark.parametrize(
    "override",
    [
        "experiment.name=other",
        "experiment.tags=[a]",
        "experiment.notes=hello",
        "model.name=other",
        "paths.runs=/elsewhere",
        "tracking=all",
        "profiling=trace",
        "cluster.threads_per_process=3",
        "checkpoint=sync",
        "checkpoint.every=7",
        "checkpoint.keep_every=7",
        "checkpoint.every_minutes=7",
        "checkpoint.last=weights",
        "checkpoint.export=bf16",
        "checkpoint.initial_exclude=[a]",
        "data.prefetch=9",
        "data.preview=2",
        "training.gc_every=0",
        "quantization.smallest_gemm=4096",
        "quantization.filter=[a]",
    ],
)
def test_keys_without_effect_change_no_id(override: str) -> None:
    assert run_id(experiment(override)) == run_id(experiment())
    assert experiment_id(experiment(override)) == experiment_id(experiment())


@pytest.mark.parametrize(
    "override",
    [
        "parallelism.dp_shard=2",
        "parallelism=ddp",
        "compile=blocks",
        "activation_checkpoint=full",
        "activation_checkpoint=selective",
        "training.micro_batch_size=4",
        "training.loss_chunk_tokens=100",
        "model.attention_backend=math",
        "compile.cuda_graphs=true",
    ],
)
def test_the_layout_changes_the_run_and_not_the_experiment(override: str) -> None:
    assert run_id(experiment(override)) != run_id(experiment())
    assert experiment_id(experiment(override)) == experiment_id(experiment())


@pytest.mark.parametrize("key", ["emulate=true", "float8_all_gather=false", "precomputed_scales=false"])
def test_where_and_when_the_same_numbers_are_rounded_is_layout(key: str) -> None:
    recipe = "quantization=float8_tensorwise"
    assert run_id(experiment(recipe, f"quantization.{key}")) != run_id(experiment(recipe))
    assert experiment_id(experiment(recipe, f"quantization.{key}")) == experiment_id(experiment(recipe))
    assert experiment_id(experiment(recipe)) != experiment_id(experiment())


def test_noise_is_another_experiment() -> None:
    key = "quantization.stochastic_rounding=true"
    assert experiment_id(experiment("quantization=nvfp4", key)) != experiment_id(experiment("quantization=nvfp4"))


@pytest.mark.parametrize(
    "override",
    [
        "quantization=mxfp8",
        "optimizer.state_precision=bf16",
        "experiment.seed=1",
        "training.steps=601",
        "training.global_batch_size=32",
        "training.mixed_precision=bf16",
        "optimizer.lr=0.0030001",
        "optimizer.implementation=foreach",
        "+optimizer.options.rho=0.1",
        "model.layers=2",
        "data.virtual_shards=32",
        "data.document_mask=true",
        "training.evaluate_every=0",
        "training.deterministic=true",
        "training.z_loss=1e-4",
        "checkpoint.initial=some/run",
    ],
)
def test_what_is_computed_changes_both(override: str) -> None:
    assert run_id(experiment(override)) != run_id(experiment())
    assert experiment_id(experiment(override)) != experiment_id(experiment())


def test_a_value_counts_and_not_how_it_is_written() -> None:
    assert run_id(experiment("optimizer.lr=3e-3")) == run_id(experiment("optimizer.lr=0.003"))
    default = experiment()
    warmup = default.lr_schedule.warmup_steps  # computed from the steps
    assert run_id(experiment(f"lr_schedule.warmup_steps={warmup}")) == run_id(default)


def test_the_id_is_short_and_the_same_in_every_process() -> None:
    name = run_id(experiment("training.steps=3"))
    assert len(name) == 12
    assert int(name, 16) >= 0
    assert name == run_id(experiment("training.steps=3"))


def test_what_is_left_out_of_initial_weights_counts() -> None:
    ids = {
        run_id(experiment("checkpoint.initial=some/run", *more))
        for more in ([], ["checkpoint.initial_exclude=[a]"], ["checkpoint.keep=9"])
    }
    assert len(ids) == 2


def test_every_key_left_out_exists() -> None:
    config = to_dict(experiment())
    for key in (*NOT_IN_RUN_ID, *LAYOUT):
        part: Any = config
        for name in key.split("."):
            part = part[name]


def test_canonical_text() -> None:
    assert canonical({"b": [1, 2.5, None], "a": {"y": True, "x": "é"}}) == (
        '{"a":{"x":"\\u00e9","y":true},"b":[1,2.5,null]}'
    )
    assert canonical(1.0) != canonical(1)
    assert canonical(0.1 + 0.2) == "0.30000000000000004"
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, object(), {1: 2}, {1, 2}, b"x"])
def test_what_has_no_stable_text_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserError, match=r"options\.inner\[1\]"):
        canonical({"options": {"inner": [0, value]}})


def test_options_of_ones_own_are_part_of_the_name() -> None:
    base = experiment()
    with_nan = dataclasses.replace(base, data=dataclasses.replace(base.data, options={"ratio": math.nan}))
    with pytest.raises(UserError, match=r"data\.options\.ratio"):
        run_id(with_nan)
