"""Shrunken run: the same kinds of layers with small widths, few tokens, and an optimizer that hides no gradient."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from titan_exp.config.groups.experiment import Experiment, ModelConfig
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, ParallelismConfig, QuantizationConfig
from titan_exp.config.groups.training import GradClipConfig, WeightAverageConfig
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.models.spec.lookup import model_spec, with_key, with_mtp_depth
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.optim.sgd import Config as SGD

SEQ_LEN = 24
"""Tokens of a sequence: a size that no dim of a shrunken model has, and that every axis of degree 2 divides."""
ROWS = 4
"""Sequences of a global batch: two data ranks have two micro-batches each. Schedules with a least number of
micro-batches get twice as many."""
MOST_LAYERS = 16
MOST_PARAMETERS = 2**22
"""Maximum number of parameters of a model that can be checked: a step of it in fp64 takes about a second on a core."""
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("dim", "hidden_size", "n_embd", "d_model", "emb_dim"), 32),
    **dict.fromkeys(("heads", "num_attention_heads", "n_head", "n_heads", "experts", "num_experts"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("kv_heads", "num_key_value_heads", "active_experts", "num_experts_per_tok", "active_groups"), 2),
    **dict.fromkeys(("groups", "n_group", "topk_group"), 2),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("value_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("key_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("key_dim", "value_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("ffn_dim", "intermediate_size", "n_inner", "moe_intermediate_size", "vocab_size"), 64),
    **dict.fromkeys(("shared_experts", "n_shared_experts", "dense_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("window", "sliding_window", "chunk", "attention_chunk_size"), 10),
}
"""Largest value of a size in a shrunken model, by its key in a family's `Config` or in a `config.json`."""


def shrink(experiment: Experiment) -> Experiment | str:
    """The run with a small model, in fp32 on one rank of a CPU; a sentence if the model cannot be shrunk."""
    spec, schedule = model_spec(experiment.model), SCHEDULES.get(experiment.parallelism.pp_schedule)
    if spec is not None and spec.inputs is not None:
        return "it reads other inputs than tokens"
    rows = ROWS if experiment.parallelism.pp == 1 or schedule is None or not schedule.fill else 2 * ROWS
    training = replace(
        experiment.training,
        steps=2,
        stop_after=None,
        seq_len=SEQ_LEN,
        global_batch_size=rows,
        micro_batch_size=rows,
        batch_ramp=(),
        max_grad_norm=None,
        mixed_precision="fp32",
        accumulation_precision="fp32",
        fp32_modules=(),
        parts={},
        deterministic=False,
    )
    parallelism = replace(
        experiment.parallelism,
        **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "cp_ulysses"), 1),
        async_tp=False,
        cpu_offload=False,
        pp_layers=None,
        pp_layers_per_stage=None,
        pp_first_stage_less=0,
        pp_last_stage_less=0,
        pp_microbatches=None,
        token_exchange="all_to_all",
    )
    run = replace(
        experiment,
        training=training,
        parallelism=parallelism,
        optimizer=SGD("sgd", lr=0.1, weight_decay=0.0, decay_vectors=False, momentum=0.0, nesterov=False),
        grad_clip=GradClipConfig(),
        weight_average=WeightAverageConfig(),
        quantization=QuantizationConfig(),
        activation_checkpoint=ActivationCheckpointConfig("none", 1, ["auto"], 0.5),
        compile=replace(experiment.compile, enabled=False, cuda_graphs=False),
        tracking=replace(experiment.tracking, metrics=[]),
        cluster=replace(experiment.cluster, kind="local", device="cpu", nodes=1),
    )
    for model in _smaller(experiment.model, spec, stages(experiment.parallelism)):
        try:
            small = model_spec(model)
            parameters = _parameters(model) if small is None else small.parameters
        except Exception:  # a model of yours may raise anything for sizes that it does not know
            continue
        if parameters <= MOST_PARAMETERS:
            return replace(run, model=model)
    return "no smaller sizes of it can be built"


def _parameters(model: ModelConfig) -> int:
    import torch

    from titan_exp.models.build import build_model, parameter_count

    with torch.device("meta"):
        return parameter_count(build_model(model, seq_len=SEQ_LEN, attention_backend="math"))


def stages(parallelism: ParallelismConfig) -> int:
    """Pipeline stages of a run with two pipeline ranks, if it asks for any; else 1."""
    schedule = SCHEDULES.get(parallelism.pp_schedule)
    return 1 if parallelism.pp == 1 else 2 * (1 if schedule is None else schedule.stages_per_rank)


def _smaller(model: ModelConfig, spec: ModelSpec | None, multiple: int) -> Iterator[ModelConfig]:
    depth = min(1, 0 if spec is None else len(spec.mtp_layers))
    small = with_key(with_mtp_depth(model, depth), "attention_backend", "auto")
    for sizes in (SIZES, {name: SIZES[name] for name in ("vocab_size", "experts", "num_experts")}):
        try:
            found = _with_layers(_resized(small, sizes), spec, multiple)
        except Exception:  # a model of yours may raise anything for sizes that it does not know
            continue
        yield found
    yield small


def _resized(group: Any, sizes: Mapping[str, int]) -> Any:
    """A config with smaller sizes in it, in groups and in a `config.json`. As many key heads as heads stay so many."""
    values = (
        dict(group) if isinstance(group, dict) else {field.name: getattr(group, field.name) for field in fields(group)}
    )
    found: dict[str, Any] = {}
    for name, value in values.items():
        if is_dataclass(value) or (name == "config_json" and isinstance(value, dict)):
            found[name] = _resized(value, sizes)
        elif type(value) is int and name in sizes:
            found[name] = min(value, sizes[name])
    for heads, shared in (("heads", "kv_heads"), ("num_attention_heads", "num_key_value_heads")):
        if shared in found and heads in found:
            same, divides = values[shared] == values[heads], found[heads] % found[shared] == 0
            found[shared] = found[heads] if same else found[shared] if divides else 1
    return {**values, **found} if isinstance(group, dict) else replace(group, **found)


def _with_layers(model: ModelConfig, spec: ModelSpec | None, multiple: int) -> ModelConfig:
    """The model with the fewest layers, at least two and a multiple of the stages, that has every kind of layer."""
    if spec is None:
        return _cut(model, min(model.layers, 2))
    kinds = {_kind(layer) for layer in _spec(model).layers}
    for layers in range(2 * multiple if multiple == 1 else multiple, min(model.layers, MOST_LAYERS), multiple):
        try:
            shorter = _cut(model, layers)
            if {_kind(layer) for layer in _spec(shorter).layers} >= kinds:
                return shorter
        except Exception:  # a family of yours may raise anything for fewer layers than it names elsewhere
            continue
    return model


def _spec(model: ModelConfig) -> ModelSpec:
    found = model_spec(model)
    assert found is not None, "the same family has one"
    return found


def _cut(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first layers; lists with an entry for each layer are cut, too."""
    lists = {
        field.name: getattr(model, field.name)[:layers]
        for field in fields(model)
        if isinstance(getattr(model, field.name), list | tuple) and len(getattr(model, field.name)) == model.layers
    }
    return replace(model, layers=layers, **lists)


def _kind(layer: LayerSpec) -> object:
    """What distinguishes layers, except for initial weights."""
    linears = tuple((linear.name, linear.inputs, linear.outputs, linear.experts, linear.tp) for linear in layer.linears)
    return layer.attention, linears, tuple(vector.name for vector in layer.vectors), layer.router is None
