"""Model and optimizer rules: shape and attention kernel, parametrization, parameter groups, QK-Clip."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config import torch_features
from titan_exp.config.errors.user_error import Violation, did_you_mean, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig, Role
from titan_exp.config.groups.parallelism import CompileConfig, ParallelismConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import BaseShapeConfig, GradClipConfig, ParametrizationConfig, TrainingConfig
from titan_exp.config.torch_features import ATTENTION_BACKEND, FLASH_PACKAGES, FLASH_WITH_LSE, HEAD_SIZES
from titan_exp.models.parametrization.mup import fixed_sizes
from titan_exp.models.spec.lookup import family_violations, model_spec, parameter_roles, token_mixing
from titan_exp.models.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from titan_exp.models.spec.rope import exceeds_context
from titan_exp.models.spec.transformer import MTP_DEPTH
from titan_exp.rules.rule import Refuse, check_multiple, rules


def kernel_supports_head_size(spec: ModelSpec, training: TrainingConfig) -> Iterator[Violation]:
    """The CUDA kernel supports the head size."""
    multiple = torch_features.efficient_multiple(bf16=training.mixed_precision == "bf16")
    table = HEAD_SIZES | ({"flash": FLASH_WITH_LSE} if spec.has_sinks else {})
    backend, sizes = spec.attention_backend, table.get(spec.attention_backend)
    for key, head_dim in spec.head_dims:
        if backend == "efficient":
            reason = f"on CUDA {ATTENTION_BACKEND}=efficient needs multiples of {multiple}"
            yield from check_multiple(key, head_dim, multiple, reason, f", or use {ATTENTION_BACKEND}=auto")
        if sizes is None or sizes.takes(head_dim):
            continue
        multiples = f"head sizes that are multiples of {sizes.multiple}, " if sizes.multiple > 1 else "head sizes "
        works = [name for name in ("fa3", "flash") if name != backend and table[name].takes(head_dim)]
        where = "on CUDA with attention sinks" if sizes is FLASH_WITH_LSE else "on CUDA"
        reason = f"{where} this kernel takes {multiples}up to {sizes.largest}, and {key} is {head_dim}"
        works += ["efficient"] if head_dim % multiple == 0 else []
        remedy = f"use {ATTENTION_BACKEND}={listed(['auto', *works, 'flex'])}"
        yield Violation(ATTENTION_BACKEND, backend, reason, remedy)


def tokens_are_mixed_by_attention(
    spec: ModelSpec, model: ModelConfig, data: DataConfig, parallelism: ParallelismConfig
) -> Iterator[Violation]:
    """No module beside attention mixes tokens, where it would see a part of them, or those of other documents."""
    in_parts, cp = parallelism.tp > 1 and parallelism.sequence_parallel, parallelism.cp
    found = token_mixing(model) if in_parts or cp > 1 or data.document_mask else None
    if found is None:
        return
    part = f"{found}, which would see only the tokens of its own rank"
    if in_parts:
        yield Violation("parallelism.sequence_parallel", True, part, "use parallelism.sequence_parallel=false")
    if cp > 1:
        yield Violation("parallelism.cp", cp, part, f"use parallelism.cp=1 parallelism.dp_shard={cp}")
    if data.document_mask:
        reason = f"{found}, which lets the documents of a row see each other"
        yield Violation("data.document_mask", True, reason, "use data.document_mask=false")


MODEL_RULES = (
    *rules(
        lambda whole: family_violations(whole.model),
        # A plain class has no spec and no such bound.
        lambda spec, model, training: exceeds_context(model, training.seq_len),
        tokens_are_mixed_by_attention,
        Refuse(
            MTP_DEPTH,
            lambda spec, training: spec.mtp_layers and len(spec.mtp_layers) >= training.seq_len,
            "with training.seq_len={training.seq_len} the last of these modules has no token left to predict",
            f"use {MTP_DEPTH}=1, as in DeepSeek V3, or longer sequences",
        ),
    ),
    *rules(
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend == "flex",
            "FlexAttention has no backward pass on a CPU",
            f"use {ATTENTION_BACKEND}=auto, flash or math",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend not in ("flex", *torch_features.ON_CPU),
            "this kernel runs on GPUs only, and this run trains on the CPU",
            f"use {ATTENTION_BACKEND}=auto, flash or math",
        ),
        Refuse(
            torch_features.LINEAR_ATTENTION_BACKEND,
            lambda model: getattr(model, "linear_attention_backend", "") == "fla",
            "these kernels run on GPUs only, and this run trains on the CPU",
            f"use {torch_features.LINEAR_ATTENTION_BACKEND}=auto or torch",
        ),
        when=lambda device: device == "cpu",
    ),
    *rules(
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: (one := FLASH_PACKAGES.get(spec.attention_backend)) and not one.is_installed() and one,
            "{found.title} is not installed (Python finds no module {found.module})",
            f"{{found.install}}, or use {ATTENTION_BACKEND}=auto, cudnn or flash",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: spec.attention_backend in HEAD_SIZES and training.mixed_precision == "fp32",
            "this kernel computes in bf16 only, and training.mixed_precision is fp32",
            f"use training.mixed_precision=bf16, or {ATTENTION_BACKEND}=auto",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, data: spec.attention_backend in ("flash", *FLASH_PACKAGES) and data.document_mask,
            "on CUDA this kernel takes no mask, and data.document_mask is true",
            f"use {ATTENTION_BACKEND}=auto, cudnn or flex, or data.document_mask=false",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: (
                spec.attention_backend in ("flash", *FLASH_PACKAGES) and spec.is_masked(training.seq_len)
            ),
            "on CUDA this kernel takes no mask, and a layer of {model.name} has a window or chunks below "
            "training.seq_len",
            f"use {ATTENTION_BACKEND}=auto, efficient or flex",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend in ("cudnn", *FLASH_PACKAGES) and spec.has_sinks,
            "attention sinks need the log-sum-exp, and this kernel does not return it",
            f"use {ATTENTION_BACKEND}=auto, efficient or flex",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: spec.attention_backend == "cudnn" and training.deterministic,
            "the backward pass of this kernel differs from run to run, so torch refuses it with "
            "training.deterministic=true",
            f"use {ATTENTION_BACKEND}=auto, which takes flash, or efficient for masks, or use "
            "training.deterministic=false",
        ),
        kernel_supports_head_size,
        when=lambda device: device == "cuda",
    ),
)


_NAME = "parametrization.name"


def spec_describes_the_parts(
    spec: ModelSpec, model: ModelConfig, parametrization: ParametrizationConfig
) -> Iterator[Violation]:
    """The spec says what writes to the residual stream, and describes every other parameter's part."""
    if not isinstance(parametrization, BaseShapeConfig):
        return
    if spec.ends is not None or any(layer.tensors for layer in spec.blocks):
        missing = "gives the shapes of the parameters, and not what each of them is in the model"
    elif not all(layer.residual_outputs for layer in spec.blocks):
        fields = "writes_residual of a LinearSpec or VectorSpec"
        missing = f"does not say which layers write to the residual stream ({fields})"
    elif spec.tied and spec.zero_centered_norm:
        missing = "scales the logits of its tied head by a final norm that starts from zeros, which no factor scales"
    else:
        return
    reason = f"the spec of {model.architecture} {missing}"
    yield Violation(_NAME, parametrization.name, reason, "use parametrization=standard")


def fixed_keys_set_inputs(
    spec: ModelSpec, model: ModelConfig, parametrization: ParametrizationConfig
) -> Iterator[Violation]:
    """Fixed keys are numbers of the model on which the inputs of a linear layer depend."""
    numbers = _numbers(model)
    for key in parametrization.fixed if isinstance(parametrization, BaseShapeConfig) else ():
        reason, remedy = "the inputs of no linear layer depend on it", "leave it out"
        if key not in numbers:
            reason = "the model has no number of this name"
            remedy = did_you_mean(key, numbers) or "use a key of the group model without its prefix, such as ffn_dim"
        elif key == "dim":
            reason = "this is the width that grows, so it cannot be fixed"
            remedy = "leave it out, or use parametrization=standard"
        elif fixed_sizes(model, (key,), "inputs"):
            continue
        yield Violation("parametrization.fixed", key, reason, remedy)


def scores_can_be_scaled(spec: ModelSpec, parametrization: ParametrizationConfig) -> Iterator[Violation]:
    """Weights of every layer's attention determine the scale of its scores, where heads grow."""
    if not isinstance(parametrization, BaseShapeConfig) or parametrization.base_head_dim is None:
        return
    field, value = "parametrization.base_head_dim", parametrization.base_head_dim
    for layer in dict.fromkeys(spec.blocks):
        if layer.attention is not None and (reason := _unscalable(layer, layer.attention, value)):
            remedy = f"use {field}=null, or the model's own {layer.attention.qk_dim} ({layer.attention.qk_dim_key})"
            yield Violation(field, value, reason, remedy)
            return


def _unscalable(layer: LayerSpec, attention: AttentionSpec, base_head_dim: int) -> str:
    if attention.qk_dim == base_head_dim:
        return ""
    if attention.rotated_norm_eps is not None:
        return "a norm without a weight follows the projections of queries and keys, so no weight scales the scores"
    query_norm = layer.vector("attention.q_norm")
    if query_norm is not None and query_norm.zero_centered:
        return "the norm of queries starts from zeros, which no factor scales"
    names = {linear.name for linear in layer.linears}
    if names >= {"attention.q"} or names >= {"attention.qkv", "attention.out"}:
        return ""
    return "the attention has neither a linear layer attention.q nor the pair attention.qkv and attention.out"


def _numbers(config: Any, prefix: str = "") -> list[str]:
    """Keys of a config whose values are numbers, nested ones included."""
    found = []
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(f"{prefix}{name}")
        elif hasattr(value, "__dataclass_fields__"):
            found += _numbers(value, f"{prefix}{name}.")
    return found


_PARAMETRIZATION_RULES = rules(
    Refuse(
        _NAME,
        lambda parametrization, model: parametrization.name != "standard" and model_spec(model) is None,
        "model.architecture={model.architecture} is a plain class, without a spec that gives its shapes",
        "use parametrization=standard, or a module with a spec (titan-exp help own-model)",
    ),
    spec_describes_the_parts,
    fixed_keys_set_inputs,
    scores_can_be_scaled,
    # Its learning rates are for updates that do not depend on the scale of gradients.
    Refuse(
        _NAME,
        lambda optimizer, parametrization: (
            isinstance(parametrization, BaseShapeConfig) and not optimizer.is_scale_invariant
        ),
        "it has no rule for the learning rates of optimizer.name={optimizer.name} as you configured it",
        "use optimizer=adamw, lion, dion or muon (with its heads in one matrix), or parametrization=standard",
    ),
)


def roles_have_parameters(spec: ModelSpec, model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """The model has parameters of the roles whose learning rate or weight decay is set."""
    missing: dict[Role, str] = {}
    if not spec.has_experts:
        missing["expert"] = f"{model.name} has no experts"
    if spec.tied:
        missing["head"] = f"the head of {model.name} shares the weight of its embedding"
    for name in ("lr_scales", "weight_decays"):
        values: dict[Role, float] = getattr(optimizer, name)
        for role in values.keys() & missing.keys():
            out = f"~optimizer.{name}.{role}"
            moved = "" if role == "expert" else f" ++optimizer.{name}.embedding={values[role]}"
            yield Violation(f"optimizer.{name}.{role}", values[role], missing[role], f"write {out}{moved}")


def patterns_match(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Every pattern of a group matches a parameter."""
    roles = parameter_roles(spec)
    for name, group in optimizer.groups.items():
        for pattern in group.match:
            if not any(group.matches(pattern, parameter, role) for parameter, role in roles.items()):
                offer = did_you_mean(pattern, [*roles, *dict.fromkeys(roles.values())])
                names = "full names such as blocks.0.attention.qkv.weight, patterns (*.qkv.weight), or roles"
                field, reason = f"optimizer.groups.{name}.match", "no parameter of the model matches this"
                yield Violation(field, pattern, reason, offer or f"use {names}")


def groups_are_disjoint(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """No parameter is in two groups, so that their order has no meaning."""
    found = set[tuple[str, ...]]()
    for parameter, role in parameter_roles(spec).items():
        names = tuple(name for name, group in optimizer.groups.items() if group.has(parameter, role))
        if len(names) > 1 and names not in found:
            found.add(names)
            reason = f"{parameter} is in both groups {listed(names, 'and')}"
            field, value = f"optimizer.groups.{names[1]}.match", list(optimizer.groups[names[1]].match)
            yield Violation(field, value, reason, "give patterns that match no parameter twice")


def betas_have_an_effect(optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Groups have betas if the optimizer has them."""
    for name, group in optimizer.groups.items():
        if group.betas is not None and not hasattr(optimizer, "betas"):
            reason = f"optimizer.name={optimizer.name} has no betas"
            yield Violation(f"optimizer.groups.{name}.betas", list(group.betas), reason, "leave it out")


def frozen_parameters_are_possible(
    optimizer: OptimizerConfig, parallelism: ParallelismConfig, compile: CompileConfig
) -> Iterator[Violation]:
    """Frozen parameters need a backward pass that torch records as it runs, in one stage."""
    reason, switch = "a captured backward pass computes the gradients of all weights", "compile.cuda_graphs=false"
    if parallelism.pp > 1:
        reason, switch = "a pipeline stage with frozen parameters only would have no backward pass", "parallelism.pp=1"
    for name, group in optimizer.groups.items() if parallelism.pp > 1 or compile.cuda_graphs else ():
        if group.frozen:
            remedy = f"use {switch}, or lr_scale: 0, which keeps the gradients"
            yield Violation(f"optimizer.groups.{name}.frozen", True, reason, remedy)


def something_is_trained(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Some parameter is in no frozen group."""
    if not any(group.frozen for group in optimizer.groups.values()):
        return
    found = [optimizer.group_of(name, role) for name, role in parameter_roles(spec).items()]
    if all(group is not None and group.frozen for group in found):
        name = next(name for name, group in optimizer.groups.items() if group.frozen)
        reason = "every parameter is frozen, so the run would train nothing"
        remedy = "give patterns that leave some parameters out, or measure the model with titan-exp evaluate RUN"
        yield Violation(f"optimizer.groups.{name}.frozen", True, reason, remedy)


def group_norms_are_limited(optimizer: OptimizerConfig, grad_clip: GradClipConfig) -> Iterator[Violation]:
    """Groups with a limit of their norm have gradients, and no limits from AdaGC; none takes the name of the others."""
    for name, group in optimizer.groups.items():
        field, norm = f"optimizer.groups.{name}.max_grad_norm", group.max_grad_norm
        if norm is not None and group.frozen:
            yield Violation(field, norm, "the group is frozen, so it has no gradients", "leave it out")
        if norm is not None and grad_clip.mode == "adagc":
            reason = "grad_clip=adagc has a limit for every parameter already"
            yield Violation(field, norm, reason, "leave it out, or use grad_clip=norm")
        if norm is not None and name == "rest":
            reason = "the metric clip/norm/rest already means the parameters outside of all these groups"
            yield Violation(field, norm, reason, "give the group another name")


CLIP = "optimizer.qk_clip"


def logits_can_be_clipped(
    optimizer: OptimizerConfig, model: ModelConfig, compile: CompileConfig, device: str
) -> Iterator[Violation]:
    """Queries and keys are projections without a norm, and no kernel computes a mask of its own."""
    spec, backend = model_spec(model), getattr(model, "attention_backend", "auto")
    heads = [(layer, layer.attention) for layer in (spec.blocks if spec else ()) if layer.attention is not None]
    reasons = [] if heads else [f"model.architecture={model.architecture} does not describe its heads"]
    reasons += [reason for layer, attention in heads if (reason := _reason_of_layer(layer, attention))]
    masked = any(attention.sinks or not attention.pattern.is_causal for _, attention in heads)
    if backend == "flex" or (backend == "auto" and device == "cuda" and masked):
        reasons.append(f"FlexAttention masks the logits where we cannot see them ({ATTENTION_BACKEND}={backend})")
    if compile.cuda_graphs:
        reasons.append("we have not tested it in a captured pass (compile.cuda_graphs=true)")
    for reason in reasons[:1]:
        yield Violation(CLIP, optimizer.max_logit, reason, f"use {CLIP}=null, or change that")


def _reason_of_layer(layer: LayerSpec, attention: AttentionSpec) -> str:
    if layer.vector("attention.q_norm") is not None or attention.rotated_norm_eps is not None:
        return "the layers normalize queries and keys, which bounds the logits already"
    rows = [linear.rows for linear in layer.linears if linear.rows is not None and linear.rows.kind == "attention"]
    named = {piece.name for one in rows for piece in one.pieces}
    return "" if {"query", "key"} <= named else "the layers do not describe their heads"


PARAMETER_RULES = (
    *_PARAMETRIZATION_RULES,
    *rules(
        *(roles_have_parameters, patterns_match, groups_are_disjoint, betas_have_an_effect),
        *(frozen_parameters_are_possible, something_is_trained, group_norms_are_limited),
    ),
    *rules(logits_can_be_clipped, when=lambda optimizer: optimizer.max_logit is not None),
)
