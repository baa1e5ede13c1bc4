"""Configuration schema: keys, types and docstrings, read from the dataclasses."""

import ast
import dataclasses
import inspect
import re
import types
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import config_class, config_classes


class KeyText(NamedTuple):
    """Docstring of a key, from which its comment in `conf/` and its row in the reference are generated."""

    summary: str
    """First paragraph, on one line: the comment in `conf/`."""
    meaning: str
    """All paragraphs, on one line."""
    example: str
    """Overrides that set the key: those in backticks after `E.g.` at the end; empty if there are none."""


_NONE = KeyText("", "", "")
_EXAMPLE = re.compile(r"\s+E\.g\.\s+`([^`]+)`\.\Z")


@cache
def _types_and_docstrings() -> dict[str, tuple[Any, KeyText]]:
    """Type and docstring of every dotted key, groups included, from the first class of a group with the key."""
    found: dict[str, tuple[Any, KeyText]] = {}

    def add(kind: Any, prefix: str) -> None:
        for name, annotation in hints(kind).items():
            found.setdefault(f"{prefix}{name}", (annotation, texts(kind).get(name, _NONE)))
            if dataclasses.is_dataclass(annotation):
                add(annotation, f"{prefix}{name}.")

    for group, annotation in hints(Experiment).items():
        found[group] = (annotation, texts(Experiment).get(group, _NONE))
        for kind in config_classes(group):
            add(kind, f"{group}.")
    return found


def keys() -> list[str]:
    """Dotted keys of the configuration: groups and their keys."""
    return list(_types_and_docstrings())


def value_keys() -> list[str]:
    """Dotted keys that take a value: all except groups."""
    return [key for key, (annotation, _) in _types_and_docstrings().items() if not dataclasses.is_dataclass(annotation)]


def annotation_of(key: str) -> Any:
    """Type of a key with its bounds; None for an unknown key."""
    return _types_and_docstrings().get(key, (None, _NONE))[0]


def meaning_of(key: str) -> str:
    """Docstring of a key on one line; empty for an unknown key."""
    return _types_and_docstrings().get(key, (None, _NONE))[1].meaning


def example_of(key: str) -> str:
    """Overrides that set a key, from its docstring; empty for an unknown key."""
    return _types_and_docstrings().get(key, (None, _NONE))[1].example


def declared_in(kind: Any, key: str) -> tuple[Any, str]:
    """Type and docstring of a dotted key in a group's class, as another class of the group may have other ones."""
    *path, last = key.split(".")[1:] or [""]
    for part in path:
        kind = hints(kind).get(part) if dataclasses.is_dataclass(kind) else None
    if not dataclasses.is_dataclass(kind) or last not in hints(kind):
        return annotation_of(key), meaning_of(key)
    return hints(kind)[last], docstrings(kind).get(last, "")


@cache
def docstrings(kind: Any) -> dict[str, str]:
    """Meanings of the fields of a dataclass and its bases, read from source."""
    return {name: text.meaning for name, text in texts(kind).items()}


@cache
def texts(kind: Any) -> dict[str, KeyText]:
    """Docstrings of the fields of a dataclass and its bases, read from source; of a group of an extension, its
    class's."""
    found = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_texts(base)
    for name, annotation in hints(kind).items():
        if name not in found and dataclasses.is_dataclass(annotation):
            meaning = " ".join(inspect.cleandoc(annotation.__doc__ or "").split())
            found[name] = KeyText(meaning, meaning, "")
    return found


@cache
def _class_bodies(file: str) -> dict[str, list[ast.stmt]]:
    """Statements of the classes in a file by qualified name."""
    found = dict[str, list[ast.stmt]]()
    nodes: list[tuple[str, ast.AST]] = [("", ast.parse(Path(file).read_bytes()))]
    for outer, node in nodes:  # grows by what each node holds
        inner = outer
        if isinstance(node, ast.ClassDef):
            found.setdefault(f"{outer}{node.name}", node.body)
            inner = f"{outer}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{outer}{node.name}.<locals>."
        nodes += [(inner, child) for child in ast.iter_child_nodes(node)]
    return found


def _own_texts(kind: Any) -> dict[str, KeyText]:
    found = {}
    for before, after in pairwise(_class_bodies(inspect.getfile(kind))[kind.__qualname__]):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    meaning, _, example = _EXAMPLE.sub(r"\0\1", text.strip()).partition("\0")
                    summary, *more = (" ".join(part.split()) for part in meaning.split("\n\n"))
                    found[before.target.id] = KeyText(summary, " ".join([summary, *more]), " ".join(example.split()))
    return found


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Field types of a dataclass, bounds included."""
    return get_type_hints(kind, include_extras=True)


def defaults(kind: Any) -> dict[str, Any]:
    """Fields of a dataclass with a default, and these."""
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING:
            found[field.name] = default
    return found


@cache
def optional_fields(kind: Any) -> frozenset[str]:
    """Fields of a dataclass with a default."""
    given = ((one.name, one.default, one.default_factory) for one in dataclasses.fields(kind))
    return frozenset(name for name, *made in given if any(one is not dataclasses.MISSING for one in made))


def own_keys(group: str, values: object) -> Collection[str]:
    """Keys of a config group with these values, if a `Config` of the user's own types it; else none."""
    try:
        kind = config_class(group, values)
    except (UserError, KeyError):
        return ()  # reported where the configuration is read
    return () if kind.__module__.startswith("titan_exp.") else hints(kind)


def group_in_mapping(annotation: Any) -> Any:
    """Dataclass of the values of a mapping of groups; None for other types."""
    kinds = get_args(annotation) if get_origin(annotation) is dict else ()
    return kinds[1] if kinds and dataclasses.is_dataclass(kinds[1]) else None


def is_number(annotation: Any) -> bool:
    """True if a type is a number, None or a word beside them, so that a boolean is invalid."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return is_number(get_args(annotation)[0])
    if origin in (types.UnionType, Union):
        parts = [part for part in get_args(annotation) if part is not types.NoneType]
        return all(is_number(part) for part in parts if get_origin(part) is not Literal)
    return annotation in (int, float)


def takes_switch(annotation: Any) -> bool:
    """True if booleans are values of this type."""
    return annotation is bool or bool in get_args(annotation)


def is_list(annotation: Any) -> bool:
    """True if a type is a list or tuple, with or without bounds."""
    if get_origin(annotation) is Annotated:
        return is_list(get_args(annotation)[0])
    return get_origin(annotation) in (list, tuple)


def takes_null(annotation: Any) -> bool:
    """True if null is a value of this type."""
    return types.NoneType in get_args(annotation)


def literals_beside(annotation: Any) -> list[str]:
    """Words that a union takes beside values of another type, as `auto` beside a number; empty for other types."""
    parts = [part for part in get_args(annotation) if part is not types.NoneType]
    is_union = get_origin(annotation) in (types.UnionType, Union) and len(parts) > 1
    return [word for part in parts for word in choices_of(part)] if is_union else []


def choices_of(annotation: Any) -> list[str]:
    """Values of a Literal type, a list of Literals, or one that may be null; empty for other types."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(parts)
    given = [part for part in parts if part is not types.NoneType]
    return choices_of(given[0]) if origin in (list, Union, types.UnionType) and len(given) == 1 else []


def _sizes_of(axis: str) -> tuple[str, str, str]:
    return f"{axis}_parallel_size", f"{axis}_model_parallel_size", f"{axis}_parallel"


OTHER_NAMES = {
    "activation_checkpoint.mode": ("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
    "checkpoint.continue_from": ("resume", "resume_from", "resume_from_checkpoint", "load", "ckpt_path"),
    "checkpoint.every": ("save_steps", "save_interval", "save_every", "checkpoint_interval", "interval", "every_steps"),
    "cluster.gpus_per_node": ("gpus", "nproc_per_node", "num_gpus", "ngpus"),
    "cluster.nodes": ("nnodes", "num_nodes"),
    "experiment.name": ("run_name", "exp_name"),
    "lr_schedule.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_iters"),
    "model.context": ("max_position_embeddings", "max_seq_len"),
    "model.dim": ("hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim"),
    "model.ffn_dim": ("intermediate_size", "ffn_hidden_size", "d_ff"),
    "model.heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "model.kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "model.layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"),
    "model.moe.active_experts": ("num_experts_per_tok", "num_experts_per_token", "top_k", "topk", "router_topk"),
    "model.moe.active_groups": ("topk_group", "num_limited_groups", "router_group_topk"),
    "model.moe.balance.bias_rate": ("load_balance_coeff", "router_bias_update_rate", "bias_update_speed"),
    "model.moe.balance.coefficient": ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "aux_loss_coeff"),
    "model.moe.balance.loss": ("load_balancing_type", "aux_loss", "aux_loss_type"),
    "model.moe.balance.z_loss": ("router_z_loss_coef", "z_loss_coeff"),
    "model.moe.experts": ("n_routed_experts", "num_local_experts", "num_moe_experts", "n_experts"),
    "model.moe.ffn_dim": ("moe_intermediate_size", "moe_inter_dim", "moe_ffn_hidden_size"),
    "model.moe.groups": ("n_group", "num_expert_groups", "n_expert_groups", "router_num_groups"),
    "model.moe.normalized": ("norm_topk_prob", "route_norm"),
    "model.moe.scale": ("routed_scaling_factor", "route_scale", "router_topk_scaling_factor"),
    "model.moe.score": ("scoring_func", "score_func", "score_function"),
    "model.moe.shared_experts": ("n_shared_experts", "num_shared_experts"),
    "model.mtp.depth": ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_modules"),
    "model.mtp.weight": ("mtp_loss_scaling_factor", "mtp_loss_weight"),
    "evaluation.every": ("eval_steps", "eval_interval", "eval_every"),
    "optimizer.lr": ("learning_rate",),
    "parallelism.cp": ("context_parallel_degree", "context_parallel_size", "context_parallel", "cp_size"),
    "parallelism.dp_replicate": ("data_parallel_replicate_degree", "data_parallel_size", "ddp"),
    "parallelism.dp_shard": ("data_parallel_shard_degree", "zero_stage", "fsdp_size"),
    "parallelism.ep": ("expert_parallel_degree", *_sizes_of("expert"), "ep_size"),
    "parallelism.etp": ("expert_tensor_parallel_size", "expert_tensor_parallel_degree", "expert_tensor_parallel"),
    "parallelism.pp": ("pipeline_parallel_degree", *_sizes_of("pipeline"), "pp_size"),
    "parallelism.token_exchange": ("expert_parallel_comm_backend", "moe_token_dispatcher_type", "token_dispatcher"),
    "parallelism.tp": ("tensor_parallel_degree", *_sizes_of("tensor"), "tp_size"),
    "paths.runs": ("output_dir", "out_dir", "save_dir"),
    "tracking.log_every": ("logging_steps", "log_interval", "log_freq"),
    "training.batch_ramp": ("rampup_batch_size", "batch_size_warmup", "global_batch_size_ramp"),
    "training.global_batch_size": ("gradient_accumulation_steps", "train_batch_size", "grad_accum"),
    "training.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad", "max_norm"),
    "training.micro_batch_size": ("per_device_train_batch_size", "per_device_batch_size", "local_batch_size"),
    "training.mixed_precision": ("bf16", "fp16", "dtype", "precision"),
    "training.seq_len": ("sequence_length", "seq_length", "block_size", "max_length"),
    "training.steps": ("epochs", "num_train_epochs", "iters", "train_iters", "num_steps"),
}
"""Names in Hugging Face's Trainer, torchtitan, Megatron and nanoGPT, by our key."""


def other_names(typed: str) -> list[str]:
    """Key that another trainer calls like the last part of the typed key; empty if there is none, or for a key."""
    if typed in value_keys():
        return []
    name = typed.rpartition(".")[2].lower()
    return [key for key, names in OTHER_NAMES.items() if name in names and key in value_keys()]
