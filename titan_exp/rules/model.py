"""Model and optimizer rules: shape and attention kernel, parametrization, parameter groups, QK-Clip."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig, Role
from titan_exp.config.groups.parallelism import CompileConfig, ParallelismConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import BaseShapeConfig, GradClipConfig, ParametrizationConfig, TrainingConfig
from titan_exp.config.torch_features import (
    ATTENTION_BACKEND,
    FLASH_PACKAGES,
    FLASH_WITH_LSE,
    HEAD_SIZES,
    LINEAR_ATTENTION_BACKEND,
    ON_CPU,
    efficient_multiple,
)
from titan_exp.models.parametrization.mup import fixed_sizes
from titan_exp.models.spec.lookup import family_violations, model_spec, parameter_roles, token_mixing
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.rope import exceeds_context
from titan_exp.models.spec.transformer import MTP_DEPTH
from titan_exp.rules.rule import Refuse, check_multiple, rules


def family_supports_the_shape(model: ModelConfig) -> Iterator[Violation]:
    """The model family's own rules hold."""
    yield from family_violations(model)


def sequence_fits_context(spec: ModelSpec | None, model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Sequences are no longer than the model's context, or than its scaling reaches."""
    # A plain class has no spec and no such bound.
    if spec is not None:
        yield from exceeds_context(model, training.seq_len)


def kernel_is_installed(spec: ModelSpec) -> Iterator[Violation]:
    """The package of FlashAttention 3 or 4 is installed."""
    package = FLASH_PACKAGES.get(spec.attention_backend)
    if package is not None and not package.is_installed():
        reason = f"{package.title} is not installed (Python finds no module {package.module})"
        yield Violation(
            ATTENTION_BACKEND,
            spec.attention_backend,
            reason,
            f"{package.install}, or use {ATTENTION_BACKEND}=auto, cudnn or flash",
        )


def kernel_supports_head_size(spec: ModelSpec, training: TrainingConfig) -> Iterator[Violation]:
    """The CUDA kernel supports the head size."""
    multiple = efficient_multiple(bf16=training.mixed_precision == "bf16")
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
    if in_parts:
        reason = f"{found}, which would see only the tokens of its own rank"
        yield Violation("parallelism.sequence_parallel", True, reason, "use parallelism.sequence_parallel=false")
    if cp > 1:
        reason = f"{found}, which would see only the tokens of its own rank"
        yield Violation("parallelism.cp", cp, reason, f"use parallelism.cp=1 parallelism.dp_shard={cp}")
    if data.document_mask:
        reason = f"{found}, which lets the documents of a row see each other"
        yield Violation("data.document_mask", True, reason, "use data.document_mask=false")


MODEL_RULES = (
    *rules(
        family_supports_the_shape,
        sequence_fits_context,
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
            lambda spec: spec.attention_backend not in ("flex", *ON_CPU),
            "this kernel runs on GPUs only, and this run trains on the CPU",
            f"use {ATTENTION_BACKEND}=auto, flash or math",
        ),
        Refuse(
            LINEAR_ATTENTION_BACKEND,
            lambda model: getattr(model, "linear_attention_backend", "") == "fla",
            "these kernels run on GPUs only, and this run trains on the CPU",
            f"use {LINEAR_ATTENTION_BACKEND}=auto or torch",
        ),
        when=lambda device: device == "cpu",
    ),
    *rules(
        kernel_is_installed,
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
            (
                "on CUDA this kernel takes no mask, and a layer of {model.name} has a window or chunks below "
                "training.seq_len"
            ),
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
            (
                "the backward pass of this kernel differs from run to run, so torch refuses it with "
                "training.deterministic=true"
            ),
            (
                f"use {ATTENTION_BACKEND}=auto, which takes flash, or efficient for masks, or use "
                "training.deterministic=false"
            ),
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
    name, missing = model.architecture, ""
    if spec.ends is not None or any(layer.tensors for layer in spec.blocks):
        missing = "gives the shapes of the parameters, and not what each of them is in the model"
    elif not all(layer.residual_outputs for layer in spec.blocks):
        missing = (
            "does not say which layers write to the residual stream (writes_residual of a LinearSpec or VectorSpec)"
        )
    elif spec.tied and spec.zero_centered_norm:
        missing = "scales the logits of its tied head by a final norm that starts from zeros, which no factor scales"
    if missing:
        yield Violation(_NAME, parametrization.name, f"the spec of {name} {missing}", "use parametrization=standard")


def fixed_keys_set_inputs(
    spec: ModelSpec, model: ModelConfig, parametrization: ParametrizationConfig
) -> Iterator[Violation]:
    """Fixed keys are numbers of the model on which the inputs of a linear layer depend."""
    if not isinstance(parametrization, BaseShapeConfig):
        return
    numbers = _numbers(model)
    for key in parametrization.fixed:
        field = "parametrization.fixed"
        if key not in numbers:
            offer = did_you_mean(key, numbers) or "use a key of the group model without its prefix, such as ffn_dim"
            yield Violation(field, key, "the model has no number of this name", offer)
        elif key == "dim":
            yield Violation(
                field,
                key,
                "this is the width that grows, so it cannot be fixed",
                "leave it out, or use parametrization=standard",
            )
        elif not fixed_sizes(model, (key,), "inputs"):
            yield Violation(field, key, "the inputs of no linear layer depend on it", "leave it out")


def scores_can_be_scaled(spec: ModelSpec, parametrization: ParametrizationConfig) -> Iterator[Violation]:
    """Weights of every layer's attention determine the scale of its scores, where heads grow."""
    if not isinstance(parametrization, BaseShapeConfig) or parametrization.base_head_dim is None:
        return
    for layer in dict.fromkeys(spec.blocks):
        if (reason := _unscalable(layer, parametrization.base_head_dim)) is not None:
            field, value = "parametrization.base_head_dim", parametrization.base_head_dim
            assert layer.attention is not None
            remedy = f"use {field}=null, or the model's own {layer.attention.qk_dim} ({layer.attention.qk_dim_key})"
            yield Violation(field, value, reason, remedy)
            return


def _unscalable(layer: LayerSpec, base_head_dim: int) -> str | None:
    attention = layer.attention
    if attention is None or attention.qk_dim == base_head_dim:
        return None
    if attention.rotated_norm_eps is not None:
        return "a norm without a weight follows the projections of queries and keys, so no weight scales the scores"
    query_norm = layer.vector("attention.q_norm")
    if query_norm is not None and query_norm.zero_centered:
        return "the norm of queries starts from zeros, which no factor scales"
    names = {linear.name for linear in layer.linears}
    if not names >= {"attention.q"} and not names >= {"attention.qkv", "attention.out"}:
        return "the attention has neither a linear layer attention.q nor the pair attention.qkv and attention.out"
    return None


def _numbers(config: Any, prefix: str = "") -> list[str]:
    """Keys of a config whose values are numbers, nested ones included."""
    found = []
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(f"{prefix}{name}")
        elif hasattr(value, "__dataclass_fields__"):
            found += _numbers(value, f"{prefix}{name}.")
    return found


def optimizer_has_rules(optimizer: OptimizerConfig, parametrization: ParametrizationConfig) -> Iterator[Violation]:
    """Learning rates of a parametrization are for optimizers whose updates do not depend on the scale of gradients."""
    if isinstance(parametrization, BaseShapeConfig) and not optimizer.is_scale_invariant:
        reason = f"it has no rule for the learning rates of optimizer.name={optimizer.name} as you configured it"
        remedy = "use optimizer=adamw, lion, dion or muon (with its heads in one matrix), or parametrization=standard"
        yield Violation(_NAME, parametrization.name, reason, remedy)


PARAMETRIZATION_RULES = rules(
    Refuse(
        _NAME,
        lambda parametrization, model: parametrization.name != "standard" and model_spec(model) is None,
        "model.architecture={model.architecture} is a plain class, without a spec that gives its shapes",
        "use parametrization=standard, or a module with a spec (titan-exp help own-model)",
    ),
    spec_describes_the_parts,
    fixed_keys_set_inputs,
    scores_can_be_scaled,
    optimizer_has_rules,
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
                remedy = (
                    offer or "use full names such as blocks.0.attention.qkv.weight, patterns (*.qkv.weight), or roles"
                )
                yield Violation(
                    f"optimizer.groups.{name}.match", pattern, "no parameter of the model matches this", remedy
                )


def groups_are_disjoint(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """No parameter is in two groups, so that their order has no meaning."""
    found = set[tuple[str, ...]]()
    for parameter, role in parameter_roles(spec).items():
        names = tuple(name for name, group in optimizer.groups.items() if group.has(parameter, role))
        if len(names) > 1 and names not in found:
            found.add(names)
            reason = f"{parameter} is in both groups {listed(names, 'and')}"
            value = list(optimizer.groups[names[1]].match)
            yield Violation(
                f"optimizer.groups.{names[1]}.match", value, reason, "give patterns that match no parameter twice"
            )


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
    for name, group in optimizer.groups.items() if parallelism.pp > 1 or compile.cuda_graphs else ():
        if group.frozen:
            reason, remedy = (
                "a pipeline stage with frozen parameters only would have no backward pass",
                "use parallelism.pp=1",
            )
            if parallelism.pp == 1:
                reason, remedy = (
                    "a captured backward pass computes the gradients of all weights",
                    "use compile.cuda_graphs=false",
                )
            field = f"optimizer.groups.{name}.frozen"
            yield Violation(field, True, reason, f"{remedy}, or lr_scale: 0, which keeps the gradients")


def something_is_trained(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Some parameter is in no frozen group."""
    if not any(group.frozen for group in optimizer.groups.values()):
        return
    found = [optimizer.group_of(name, role) for name, role in parameter_roles(spec).items()]
    if all(group is not None and group.frozen for group in found):
        name = next(name for name, group in optimizer.groups.items() if group.frozen)
        reason, remedy = (
            "every parameter is frozen, so the run would train nothing",
            "give patterns that leave some parameters out",
        )
        yield Violation(
            f"optimizer.groups.{name}.frozen",
            True,
            reason,
            f"{remedy}, or measure the model with titan-exp evaluate RUN",
        )


def group_norms_are_limited(optimizer: OptimizerConfig, grad_clip: GradClipConfig) -> Iterator[Violation]:
    """Groups with a limit of their norm have gradients, and no limits from AdaGC; none takes the name of the others."""
    for name, group in optimizer.groups.items():
        if group.max_grad_norm is None:
            continue
        field = f"optimizer.groups.{name}.max_grad_norm"
        if group.frozen:
            reason = "the group is frozen, so it has no gradients"
            yield Violation(field, group.max_grad_norm, reason, "leave it out")
        if grad_clip.mode == "adagc":
            reason = "grad_clip=adagc has a limit for every parameter already"
            yield Violation(field, group.max_grad_norm, reason, "leave it out, or use grad_clip=norm")
        if name == "rest":
            reason = "the metric clip/norm/rest already means the parameters outside of all these groups"
            yield Violation(field, group.max_grad_norm, reason, "give the group another name")


PARAMETER_RULES = rules(
    *(roles_have_parameters, patterns_match, groups_are_disjoint, betas_have_an_effect),
    *(frozen_parameters_are_possible, something_is_trained, group_norms_are_limited),
)


CLIP = "optimizer.qk_clip"


def logits_can_be_clipped(
    optimizer: OptimizerConfig, model: ModelConfig, compile: CompileConfig, device: str
) -> Iterator[Violation]:
    """Queries and keys are projections without a norm, and no kernel computes a mask of its own."""
    spec = model_spec(model)
    layers = [] if spec is None else [layer for layer in spec.blocks if layer.attention is not None]
    reasons = [] if layers else [f"model.architecture={model.architecture} does not describe its heads"]
    reasons += filter(None, map(_reason_of_layer, layers))
    backend = getattr(model, "attention_backend", "auto")
    if backend == "flex" or (backend == "auto" and device == "cuda" and any(map(_is_masked, layers))):
        reasons.append(f"FlexAttention masks the logits where we cannot see them ({ATTENTION_BACKEND}={backend})")
    if compile.cuda_graphs:
        reasons.append("we have not tested it in a captured pass (compile.cuda_graphs=true)")
    for reason in dict.fromkeys(reasons):
        yield Violation(CLIP, optimizer.max_logit, reason, f"use {CLIP}=null, or change that")
        return


def _reason_of_layer(layer: LayerSpec) -> str:
    assert layer.attention is not None
    if layer.vector("attention.q_norm") is not None or layer.attention.rotated_norm_eps is not None:
        return "the layers normalize queries and keys, which bounds the logits already"
    linears = [linear for linear in layer.linears if linear.rows is not None and linear.rows.kind == "attention"]
    named = {piece.name for linear in linears if linear.rows is not None for piece in linear.rows.pieces}
    return "" if {"query", "key"} <= named else "the layers do not describe their heads"


def _is_masked(layer: LayerSpec) -> bool:
    return layer.attention is not None and (layer.attention.sinks or not layer.attention.pattern.is_causal)


CLIP_RULES = rules(logits_can_be_clipped, when=lambda optimizer: optimizer.max_logit is not None)
