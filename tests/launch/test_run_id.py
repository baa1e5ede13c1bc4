"""Run id and experiment id: hashes of the keys that change what is computed."""

import dataclasses
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE, IN_RUN_ID, LAYOUT, NOT_IN_RUN_ID
from titan_exp.config.schema.typed_config import load_experiment, to_dict, to_experiment
from titan_exp.launch.run_plan import canonical, experiment_id, identity, run_id

GOLDEN = [
    ([], ("0ccd7f32aa4b", "e29e3f198032")),
    (["parallelism.dp_shard=2", "compile=blocks"], ("acf3f494daef", "e29e3f198032")),
    (["quantization=float8_rowwise", "quantization.filter=['*.down']"], ("3f425bbfea70", "2454d2d02dde")),
    (["checkpoint.initial=some/run", "optimizer.state_precision=bf16"], ("24c85b392436", "a55868a5fa82")),
]
"""Overrides, run id and experiment id."""


@cache
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
        "activation_checkpoint.every=3",
        "activation_checkpoint.save=[aten.mm]",
        "activation_checkpoint.budget=0.9",
        "compile.backend=aot_eager",
        "compile.components=[loss]",
        "compile.autotune_gemms=never",
        "parallelism.sequence_parallel=false",
        "parallelism.loss_parallel=false",
        "parallelism.pp_schedule=GPipe",
        "parallelism.cp_method=ulysses",
        "parallelism.cp_ulysses=2",
    ],
)
def test_keys_without_effect_change_no_id(override: str) -> None:
    assert run_id(experiment(override)) == run_id(experiment())
    assert experiment_id(experiment(override)) == experiment_id(experiment())


def test_automatic_chunks_of_the_loss_are_whole_logits_on_a_cpu_and_a_choice_on_gpus() -> None:
    whole = "training.loss_chunk_tokens=null"
    assert run_id(experiment(whole)) == run_id(experiment())
    cuda = ("cluster.device=cuda", "parallelism.dp_shard=1")
    assert len({run_id(experiment(*cuda)), run_id(experiment(*cuda, whole)), run_id(experiment())}) == 3
    assert experiment_id(experiment(*cuda)) == experiment_id(experiment())


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
        "optimizer.implementation=foreach",
    ],
)
def test_the_layout_changes_the_run_and_not_the_experiment(override: str) -> None:
    assert run_id(experiment(override)) != run_id(experiment())
    assert experiment_id(experiment(override)) == experiment_id(experiment())


@dataclasses.dataclass(frozen=True)
class LaterTraining(TrainingConfig):
    """The group in a later version, with another key."""

    label_smoothing: float = 0.0


@pytest.mark.parametrize("overrides", [[], ["quantization=mxfp8", "parallelism.tp=2"], ["checkpoint.initial=some/run"]])
def test_a_new_key_at_its_default_changes_no_id(overrides: list[str]) -> None:
    run = experiment(*overrides)

    def later(**values: float) -> Experiment:
        fields: dict[str, Any] = {**vars(run.training), **values}
        return dataclasses.replace(run, training=LaterTraining(**fields))

    assert (run_id(later()), experiment_id(later())) == (run_id(run), experiment_id(run))
    assert run_id(later(label_smoothing=0.1)) != run_id(run)


@pytest.mark.parametrize(("overrides", "ids"), GOLDEN)
def test_ids_are_stable(overrides: list[str], ids: tuple[str, str]) -> None:
    """Changing these ids renames every existing run."""
    run = experiment(*overrides)
    assert (run_id(run), experiment_id(run)) == ids


RELEASED = sorted((Path(__file__).parent / "released").glob("*.yaml"))
"""A run's `config.yaml` of each release, named VERSION-ID."""


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_a_run_of_an_earlier_release_reads_and_keeps_its_id(path: Path) -> None:
    assert run_id(load_experiment(path)) == path.stem.rpartition("-")[2]


@pytest.mark.parametrize(
    ("switch", "override"),
    [
        ("activation_checkpoint=every_n", "activation_checkpoint.every=3"),
        ("activation_checkpoint=selective", "activation_checkpoint.save=[aten.mm]"),
        ("activation_checkpoint=selective", "activation_checkpoint.budget=0.9"),
        ("activation_checkpoint.mode=budget", "activation_checkpoint.budget=0.9"),
        ("compile=blocks", "compile.backend=aot_eager"),
        ("compile=blocks", "compile.components=[loss]"),
        ("compile=blocks", "compile.autotune_gemms=never"),
        ("parallelism.tp=2", "parallelism.sequence_parallel=false"),
        ("parallelism.tp=2", "parallelism.loss_parallel=false"),
        ("parallelism.pp=2", "parallelism.pp_schedule=GPipe"),
        ("parallelism.cp=2", "parallelism.cp_method=ulysses"),
        ("parallelism.cp=4", "parallelism.cp_ulysses=2"),
        ("quantization=mxfp8", "quantization.filter=[a]"),
    ],
)
def test_keys_of_a_mode_count_in_it(switch: str, override: str) -> None:
    assert run_id(experiment(switch, override)) != run_id(experiment(switch))


def test_quantization_keys_without_a_recipe_have_no_effect() -> None:
    assert not any(key.startswith("quantization") for key in identity(experiment("quantization.filter=[a]")))


@pytest.mark.parametrize("key", ["emulate=true", "float8_all_gather=false", "precomputed_scales=false"])
def test_rounding_options_belong_to_the_layout(key: str) -> None:
    recipe = "quantization=float8_tensorwise"
    assert run_id(experiment(recipe, f"quantization.{key}")) != run_id(experiment(recipe))
    assert experiment_id(experiment(recipe, f"quantization.{key}")) == experiment_id(experiment(recipe))
    assert experiment_id(experiment(recipe)) != experiment_id(experiment())


def test_stochastic_options_change_the_experiment() -> None:
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
        "+optimizer.options.rho=0.1",
        "model.layers=2",
        "data.virtual_shards=32",
        "data.document_mask=true",
        "evaluation.every=0",
        "training.deterministic=true",
        "training.z_loss=1e-4",
        "checkpoint.initial=some/run",
    ],
)
def test_effective_keys_change_both_ids(override: str) -> None:
    assert run_id(experiment(override)) != run_id(experiment())
    assert experiment_id(experiment(override)) != experiment_id(experiment())


def test_a_former_name_gives_the_same_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_id(experiment("training.evaluate_every=7")) == run_id(experiment("evaluation.every=7"))
    assert "training.evaluate_every=7 is evaluation.every=7 now" in capsys.readouterr().err


def test_a_former_name_with_another_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"the former name of .* which is set to 9") as caught:
        experiment("training.evaluate_every=7", "evaluation.every=9")
    (violation,) = caught.value.violations
    for word in re.findall(r"[\w.]+=\w+", violation.remedy):
        experiment("training.evaluate_every=7", "evaluation.every=9", word)
    assert experiment("training.evaluate_every=9", "evaluation.every=9").evaluation.every == 9


def test_ids_depend_on_values_not_notation() -> None:
    assert run_id(experiment("optimizer.lr=3e-3")) == run_id(experiment("optimizer.lr=0.003"))
    default = experiment()
    warmup = default.lr_schedule.warmup_steps  # computed from the steps
    assert run_id(experiment(f"lr_schedule.warmup_steps={warmup}")) == run_id(default)


def test_the_id_is_short_and_the_same_in_every_process() -> None:
    name = run_id(experiment("training.steps=3"))
    assert len(name) == 12
    assert int(name, 16) >= 0
    assert name == run_id(experiment("training.steps=3"))


def test_excluded_initial_weights_change_the_ids() -> None:
    ids = {
        run_id(experiment("checkpoint.initial=some/run", *more))
        for more in ([], ["checkpoint.initial_exclude=[a]"], ["checkpoint.keep=9"])
    }
    assert len(ids) == 2


def test_every_excluded_key_exists() -> None:
    config = to_dict(experiment())
    switches = [switch for switch, _ in COUNTS_BESIDE.values()]
    for key in (*NOT_IN_RUN_ID, *LAYOUT, *IN_RUN_ID, *COUNTS_BESIDE, *switches):
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
def test_value_without_stable_text_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"options\.inner\[1\]"):
        canonical({"options": {"inner": [0, value]}})


def test_user_options_change_the_ids() -> None:
    base = experiment()
    with_nan = dataclasses.replace(base, data=dataclasses.replace(base.data, options={"ratio": math.nan}))
    with pytest.raises(UserError, match=r"data\.options\.ratio"):
        run_id(with_nan)
