"""Memory checks before a launch: upper bounds, predictions, the prediction cache, and suggestions."""

import multiprocessing
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.plan.layouts import LAYOUTS, experiment_of, predicted
from titan_exp.cli.plan import search_options
from titan_exp.config.devices import offered_devices
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.build import build_model
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan import gate as gate_module
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.gate import (
    GIB,
    MemoryCheck,
    check_memory,
    explain_changes,
    explain_oom,
    find_changes,
    plan_record,
    upper_bound,
)
from titan_exp.plan.predict import predict
from titan_exp.plan.prediction import NotPredicted, Prediction, RankPrediction, from_json, merge_ranks
from titan_exp.plan.predictions import PredictionRequest, cache_key, get, predict_many, put

H100 = ["cluster=slurm_h100", "compile=none", "training.mixed_precision=bf16"]


def resolved(*overrides: str) -> Experiment:
    experiment = to_experiment(compose(overrides))
    return resolve_layout(experiment, offered_devices(experiment.cluster))


def synthetic(*allocated: float, category: str = "activations", reserved: float | None = None) -> Prediction:
    """Prediction of pipeline ranks with peaks in GiB."""
    ranks = [
        RankPrediction(
            number,
            round(size * GIB),
            None if reserved is None else round(reserved * GIB),
            {category: round(size * GIB)},
            "forward, block 3",
            None,
            100,
        )
        for number, size in enumerate(allocated)
    ]
    return Prediction(tuple(ranks), 0.0, None, None, None)


@pytest.fixture
def stub_predictor(monkeypatch: pytest.MonkeyPatch):
    """Stub of the predictor: a function from an experiment to a prediction, with a record of its calls."""

    def stand(answer):
        asked = []

        def predict_many(questions, cache, say=print):
            asked.extend(question.experiment for question in questions)
            return [answer(question.experiment) for question in questions]

        monkeypatch.setattr(gate_module, "predict_many", predict_many)
        return asked

    return stand


@pytest.mark.parametrize("model", ["llama_debug", "llama_laptop", "llama3_2_1b", "llama3_8b"])
def test_parameters_are_counted_from_the_shape(model: str):
    import torch

    config = resolved(f"model={model}").model
    with torch.device("meta"):
        built = build_model(config, seq_len=64, attention_backend="math")
    specified = model_spec(config)
    assert specified is not None
    assert specified.parameters == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", ["one device", "fsdp 2, accumulated", "tp 2", "pp 2, 1F1B", "cp 2, ring"])
def test_the_bound_is_above_what_is_predicted(name: str, tmp_path: Path):
    experiment = experiment_of(LAYOUTS[name])
    bound = upper_bound(experiment)
    assert bound is not None
    peak = max(numbers.peak for numbers in predicted(experiment, tmp_path))
    # The process' own share is not what makes it one.
    assert peak < bound - GIB


def test_the_bound_is_above_a_large_attention_without_a_fused_kernel(tmp_path: Path):
    experiment = experiment_of("model.attention_backend=math training.seq_len=512 model.layers=2")
    bound = upper_bound(experiment)
    assert bound is not None
    assert GIB / 20 < max(numbers.peak for numbers in predicted(experiment, tmp_path)) < bound - GIB


def test_the_bound_of_a_cuda_graph_counts_its_private_pool():
    plain, recorded = (upper_bound(resolved(f"compile.cuda_graphs={graphs}")) for graphs in ("false", "true"))
    assert plain is not None
    assert recorded is not None
    assert plain < recorded < 2 * plain


def test_the_bound_of_a_symmetric_exchange_counts_its_room():
    words = "cluster=slurm_h100 compile=none cluster.device=cuda model=qwen3_moe_debug parallelism.dp_shard=4"
    words += " parallelism.ep=4 training.mixed_precision=bf16 training.seq_len=512 training.micro_batch_size=8"
    words += " training.global_batch_size=32 model.attention_backend=flash model.layers=2"
    bounds = []
    for way in ("all_to_all", "symmetric_memory"):
        experiment = experiment_of(f"{words} parallelism.token_exchange={way}")
        (rank,) = predict(experiment, DEVICES["h100"]).ranks
        bound = upper_bound(experiment)
        assert bound is not None
        assert rank.bytes < bound
        bounds.append(bound - rank.bytes)
    assert bounds[1] > bounds[0]


def test_small_models_are_not_predicted(tmp_path: Path, stub_predictor):
    asked = stub_predictor(lambda _: synthetic(1.0))
    small = resolved("model=llama_debug", "cluster.device=cpu")
    (memory_check,) = check_memory([small], tmp_path)
    assert (memory_check.fits, memory_check.prediction, asked) == (True, None, [])
    always = replace(small, plan=replace(small.plan, predict="always"))
    (memory_check,) = check_memory([always], tmp_path)
    assert (memory_check.fits, memory_check.prediction) == (True, synthetic(1.0))
    off = replace(small, plan=replace(small.plan, gate="off", predict="always"))
    (memory_check,) = check_memory([off], tmp_path)
    assert (memory_check.fits, plan_record(memory_check), len(asked)) == (None, None, 1)


def test_all_processes_of_a_machine_share_its_memory(tmp_path: Path, stub_predictor, monkeypatch: pytest.MonkeyPatch):
    stub_predictor(lambda _: synthetic(4.0, 2.0))
    monkeypatch.setattr("titan_exp.plan.devices.host_memory", lambda: 14 * GIB)
    four = resolved(
        *("model=llama_debug", "cluster.device=cpu", "parallelism.dp_shard=2", "parallelism.pp=2"),
        *("plan.predict=always", "parallelism.pp_microbatches=2"),
    )
    (memory_check,) = check_memory([four], tmp_path)
    # Two of each pipeline rank, and 0.45 GB for each process.
    assert memory_check.needed == 2 * (4 + 2) * GIB + 4 * 450_000_000
    assert memory_check.fits
    monkeypatch.setattr("titan_exp.plan.devices.host_memory", lambda: 13 * GIB)
    (memory_check,) = check_memory([four], tmp_path)
    assert memory_check.fits is False
    said = explain_oom(memory_check)
    assert (
        "pipeline rank 0 of 2 needs 4.42 GiB at its peak (forward, block 3), and the 4 ranks that share its memory"
        in said
    )
    assert "activations 4 GiB, process overhead 429 MiB" in said


def test_an_asynchronous_save_on_a_cpu_holds_a_copy_of_the_state(
    tmp_path: Path, stub_predictor, monkeypatch: pytest.MonkeyPatch
):
    one = synthetic(4.0)
    stub_predictor(lambda _: replace(one, ranks=(replace(one.ranks[0], saved=3 * GIB),)))
    words = ("model=llama_debug", "cluster.device=cpu", "plan.predict=always")
    needed = {}
    for mode in ("async", "async_process", "sync", "off"):
        (memory_check,) = check_memory([resolved(*words, f"checkpoint.mode={mode}")], tmp_path)
        needed[mode] = (memory_check.needed or 0) - 450_000_000
    assert needed == {"async": 7 * GIB, "async_process": 7 * GIB + 250_000_000, "sync": 4 * GIB, "off": 4 * GIB}
    monkeypatch.setattr("titan_exp.plan.devices.host_memory", lambda: 6 * GIB)
    (memory_check,) = check_memory([resolved(*words)], tmp_path)
    assert memory_check.fits is False
    assert "activations 4 GiB, copy of the state while a checkpoint is written 3 GiB" in explain_oom(memory_check)
    stub_predictor(lambda asked: one if asked.checkpoint.mode == "sync" else synthetic(9.0))
    assert next(iter(find_changes(memory_check, tmp_path).found)) == ("checkpoint.mode=sync",)


@pytest.mark.parametrize("seconds", [0.01, 2.5])
def test_a_prediction_that_takes_too_long_lets_the_run_start(tmp_path: Path, seconds: float):
    """At the limit its processes are killed, whether they import torch or trace."""
    began, before = time.monotonic(), set(multiprocessing.active_children())
    large = ["model=llama3_405b", "parallelism.dp_shard=64", "parallelism.tp=8", "training.global_batch_size=64"]
    (memory_check,) = check_memory([resolved(*large, *H100, f"plan.seconds={seconds}")], tmp_path)
    assert memory_check.why_not == f"its prediction took more than plan.seconds={seconds:g}"
    assert memory_check.fits is None
    assert time.monotonic() - began < 20
    assert set(multiprocessing.active_children()) <= before


def test_a_gpu_run_is_compared_with_the_memory_of_one_gpu(tmp_path: Path, stub_predictor):
    large = resolved("model=llama3_8b", *H100, "parallelism.dp_shard=8")
    # 79.11 GiB hold 0.6 of the context and 0.3 for each of two process groups.
    stub_predictor(lambda _: synthetic(60.0, reserved=77.9))
    (memory_check,) = check_memory([large], tmp_path)
    assert memory_check.fits
    stub_predictor(lambda _: synthetic(73.0, reserved=78.0))
    (memory_check,) = check_memory([large], tmp_path)
    assert memory_check.fits is False
    assert "reserved but not allocated 5 GiB" in explain_oom(memory_check)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["cluster=slurm"], "cluster.gpu_type=null, and the planner only knows a100"),
        (["cluster=slurm", "cluster.gpu_type=gtx"], "cluster.gpu_type=gtx, and the planner only knows a100"),
        (["cluster=slurm", "cluster.device=cpu"], "we do not know the memory of a node (set cluster.memory_gb)"),
        (
            [*H100, "model.attention_backend=flex"],
            "model.attention_backend=flex: we trace runs on a CPU, where FlexAttention has no backward pass",
        ),
    ],
)
def test_an_unknown_device_or_kernel_is_reported_and_does_not_refuse(overrides: list[str], why: str, tmp_path: Path):
    (memory_check,) = check_memory([resolved("model=llama3_8b", *overrides, "parallelism.dp_shard=8")], tmp_path)
    assert memory_check.fits is None
    assert why in memory_check.why_not
    found = plan_record(memory_check)
    assert found is not None
    assert found["why_not_predicted"] == memory_check.why_not


def test_cache_key_ignores_keys_that_change_no_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = resolved("model=llama_debug", "cluster.device=cpu")
    same = resolved(
        *("model=llama_debug", "cluster.device=cpu", "optimizer.lr=1e-5", "lr_schedule=cosine", "experiment.seed=3"),
        *("training.steps=77", "optimizer.weight_decay=0.3", "experiment.name=y", "training.max_grad_norm=2"),
    )
    assert cache_key(first, None) == cache_key(same, None)
    assert cache_key(first, DEVICES["h100"]) != cache_key(first, None)
    for other in (
        *(
            "tracking.metrics=[max_logit]",
            "training.seq_len=128",
            "training.max_grad_norm=null",
            "parallelism.dp_shard=2",
        ),
        *("optimizer.state_precision=int8", "activation_checkpoint=full", "data.document_mask=true"),
    ):
        assert cache_key(resolved("model=llama_debug", "cluster.device=cpu", other), None) != cache_key(first, None), (
            other
        )
    (tmp_path / "optimizers_of_a_user.py").write_text("from torch.optim import SGD as Signum\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = resolved("model=llama_debug", "cluster.device=cpu", "optimizer.name=optimizers_of_a_user.Signum")
    assert cache_key(own, None) is None
    (tmp_path / "metrics_of_a_user.py").write_text("Rows = object\n")
    assert cache_key(replace(first, tracking=replace(first.tracking, metrics=["metrics_of_a_user.Rows"])), None) is None
    assert get(tmp_path, "x") is None
    put(tmp_path, "x", synthetic(1.0, 2.0))
    assert get(tmp_path, "x") == synthetic(1.0, 2.0)
    assert from_json(asdict(synthetic(3.0))) == synthetic(3.0)


@pytest.mark.night
def test_equal_runs_are_predicted_once(tmp_path: Path):
    rates = [
        resolved("model=llama_debug", "training.seq_len=64", "cluster.device=cpu", f"optimizer.lr={rate}")
        for rate in (1e-3, 2e-3, 3e-3)
    ]
    broken = replace(rates[0], optimizer=replace(rates[0].optimizer, name="nowhere.Lion"))
    said: list[str] = []
    found = predict_many([PredictionRequest(run, None) for run in (*rates, broken)], tmp_path, said.append)
    assert said == ["Predicting the memory of 2 runs ..."]
    assert isinstance(found[0], Prediction)
    assert found[0] == found[1] == found[2]
    assert isinstance(found[3], NotPredicted)
    assert "nowhere" in found[3].reason
    assert predict_many([PredictionRequest(rates[1], None)], tmp_path, said.append) == [found[0]]
    assert len(said) == 1
    (numbers,) = predicted(rates[0], tmp_path / "here")
    assert found[0].ranks[0].allocated == numbers.peak


def test_the_slowest_pipeline_rank_sets_the_speed():
    def part(rank: int, seconds: float) -> Prediction:
        return Prediction((RankPrediction(rank, 5, None, {}, "", None, 1, 3),), 0.1, seconds, 1 / seconds, None)

    found = merge_ranks([part(1, 2.0), part(0, 3.0)])
    assert [rank.pipeline_rank for rank in found.ranks] == [0, 1]
    assert (found.step_seconds, found.tokens_per_second_per_device) == (3.0, 1 / 3.0)


def memory_like(experiment: Experiment) -> Prediction:
    """Synthetic memory model: 16 GiB per sequence, halved by selective checkpointing, plus 20 GiB."""
    rows = experiment.training.micro_batch_size or 8
    kept = {"none": 16.0, "selective": 8.0, "full": 1.0}[experiment.activation_checkpoint.mode]
    kept += 0.0 if experiment.training.loss_chunk_tokens else 2.0
    size = round((rows * kept + 20) * GIB)
    found = synthetic(size / GIB)
    parts = {"activations": size - 20 * GIB, "optimizer": 20 * GIB}
    return replace(found, ranks=(replace(found.ranks[0], by_category=parts),))


def test_the_cheapest_changes_that_fit_are_suggested(tmp_path: Path, stub_predictor):
    large = resolved(
        *("model=llama3_8b", *H100, "parallelism.dp_shard=8", "training.seq_len=8192", "training.global_batch_size=64"),
        "paths.runs=runs",
    )
    asked = stub_predictor(memory_like)
    (memory_check,) = check_memory([large], tmp_path)
    assert memory_check.fits is False
    found = find_changes(memory_check, tmp_path).found
    assert next(iter(found)) == ("training.micro_batch_size=2",)
    assert all(changed.fits for changed in found.values())
    assert len(found) == gate_module.MAX_SUGGESTIONS
    # Nothing that is offered has all of what another offer has, and more.
    assert not any(set(overrides) < set(other) for overrides in found for other in found)
    assert len(asked) < 20


def test_no_change_is_suggested_that_does_not_fit(tmp_path: Path, stub_predictor):
    large = resolved("model=llama3_8b", *H100, "parallelism.dp_shard=8")
    stub_predictor(lambda _: synthetic(500.0, category="other"))
    (memory_check,) = check_memory([large], tmp_path)
    assert find_changes(memory_check, tmp_path).found == {}


def memory_of_accumulation(experiment: Experiment) -> Prediction:
    """Synthetic memory of a 70B model: gradients are whole if they accumulate, else sharded."""
    layout, own = ResolvedLayout.of(experiment), experiment.parallelism
    gradients = 263 / own.tp / own.pp if layout.gradient_accumulation > 1 else 2
    kept = {"none": 40.0, "selective": 20.0, "full": 4.0}[experiment.activation_checkpoint.mode]
    parts = {"gradients": gradients, "activations": layout.micro_batch_size * kept / own.tp, "optimizer": 20.0}
    found = synthetic(sum(parts.values()))
    by_category = {name: round(size * GIB) for name, size in parts.items()}
    return replace(found, ranks=(replace(found.ranks[0], by_category=by_category),))


@pytest.mark.parametrize("sequences", [512, 8192])
def test_accumulated_gradients_are_avoided_or_sharded(tmp_path: Path, stub_predictor, sequences: int):
    """By one micro-batch with recomputation, where its activations fit, and else by other degrees."""
    words = ["model=llama3_1_70b", *H100, "parallelism.dp_shard=128", "training.seq_len=8192"]
    large = resolved(*words, "training.micro_batch_size=1", f"training.global_batch_size={sequences}")
    asked = stub_predictor(memory_of_accumulation)
    (memory_check,) = check_memory([large], tmp_path)
    first = next(iter(find_changes(memory_check, tmp_path).found))
    if sequences == 512:
        assert set(first) == {"activation_checkpoint=full", "training.micro_batch_size=null"}
        modes = [(run.activation_checkpoint.mode, run.training.micro_batch_size) for run in asked]
        assert modes.index(("full", None)) < 5, "it comes early, since a prediction may take a minute"
    else:
        assert any(word in ("parallelism.tp=8", "parallelism.pp=8") for word in first)


def test_where_nothing_fits_it_says_what_was_tried_and_how_to_search(
    tmp_path: Path, stub_predictor, monkeypatch: pytest.MonkeyPatch
):
    typed = ["model=llama3_8b", *H100, "training.global_batch_size=64", "parallelism.dp_shard=8"]
    large = resolved(*typed)
    stub_predictor(lambda _: synthetic(100.0))
    (memory_check,) = check_memory([large], tmp_path)
    said = explain_changes(memory_check, tmp_path, typed=[*typed, "experiment.name=a b", "--device=h100"])
    tried = next(line for line in said.splitlines() if line.startswith("  None of the changes that we tried fits: "))
    assert "activation_checkpoint=selective or full" in tried
    assert "training.micro_batch_size=4, 2 or 1" in tried
    assert "We stopped" not in said
    assert "The largest part is activations, 100 GiB." in said
    assert "so we did not try it: training.global_batch_size=8\n" in said
    kept = "model=llama3_8b cluster=slurm_h100 compile=none training.mixed_precision=bf16 training.global_batch_size=64"
    command = f"titan-exp plan search --gpus 8 {kept} 'experiment.name=a b' --device=h100"
    assert said.endswith(f"\n  Try all layouts: {command}")
    options, overrides = search_options(shlex.split(command)[3:])
    assert (options.gpus, options.device, compose(overrides).experiment.name) == (8, "h100", "a b")
    assert "training.mixed_precision=bf16" in explain_changes(
        replace(memory_check, experiment=resolved(*typed, "training.mixed_precision=fp32")), tmp_path
    )
    monkeypatch.setattr(gate_module, "TIME_LIMIT", 0.0)
    assert "We stopped after 0 s, before we had tried" in explain_changes(memory_check, tmp_path)
    stub_predictor(lambda _: synthetic(500.0, category="other"))
    (memory_check,) = check_memory([large], tmp_path)
    assert "We know no change that could make it fit.\n" in explain_changes(memory_check, tmp_path)


def test_where_accumulated_gradients_do_not_fit_the_batch_is_named(tmp_path: Path, stub_predictor):
    words = ["model=llama3_1_70b", *H100, "parallelism.dp_shard=64", "training.seq_len=8192"]
    large = resolved(*words, "training.micro_batch_size=1", "training.global_batch_size=512")
    parts = {"gradients": 263 * GIB, "activations": 30 * GIB}
    stub_predictor(lambda _: replace(found := synthetic(293.0), ranks=(replace(found.ranks[0], by_category=parts),)))
    (memory_check,) = check_memory([large], tmp_path)
    said = explain_changes(memory_check, tmp_path)
    assert "The largest part is gradients, 263 GiB.\n  A step has 8 micro-batches, and a rank keeps the sum" in said
    assert "so we did not try it: training.global_batch_size=64\n" in said


def test_a_memory_check_without_prediction_is_unknown():
    assert MemoryCheck(resolved("model=llama_debug"), None).fits is None
