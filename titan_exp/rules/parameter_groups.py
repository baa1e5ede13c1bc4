"""Rules of parameter groups: patterns that match, one group per parameter, roles that the model has."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig, Role
from titan_exp.config.groups.parallelism import CompileConfig, ParallelismConfig
from titan_exp.config.groups.training import GradClipConfig
from titan_exp.models.spec.lookup import parameter_roles
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import rules


def roles_have_parameters(spec: ModelSpec, model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """The model has parameters of the roles whose learning rate or weight decay is set."""
    missing: dict[Role, str] = {}
    if not spec.has_experts:
        missing["expert"] = f"{model.name} has no experts"
    if spec.tied:
        missing["head"] = f"the head of {model.name} is its embedding"
    for name in ("lr_scales", "weight_decays"):
        values: dict[Role, float] = getattr(optimizer, name)
        for role in values.keys() & missing.keys():
            out = f"~optimizer.{name}.{role}"
            moved = "" if role == "expert" else f" ++optimizer.{name}.embedding={values[role]}"
            yield Violation(f"optimizer.{name}.{role}", values[role], missing[role], f"{out}{moved}")


def patterns_match(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Every pattern of a group matches a parameter."""
    roles = parameter_roles(spec)
    for name, group in optimizer.groups.items():
        for pattern in group.match:
            if not any(group.matches(pattern, parameter, role) for parameter, role in roles.items()):
                offer = did_you_mean(pattern, [*roles, *dict.fromkeys(roles.values())])
                remedy = offer or "full names such as blocks.0.attention.qkv.weight, patterns (*.qkv.weight), or roles"
                yield Violation(f"optimizer.groups.{name}.match", pattern, "the model has no such parameter", remedy)


def groups_are_disjoint(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """No parameter is in two groups, so that their order has no meaning."""
    found = set[tuple[str, ...]]()
    for parameter, role in parameter_roles(spec).items():
        names = tuple(name for name, group in optimizer.groups.items() if group.has(parameter, role))
        if len(names) > 1 and names not in found:
            found.add(names)
            reason = f"{parameter} is in the groups {listed(names, 'and')}"
            value = list(optimizer.groups[names[1]].match)
            yield Violation(f"optimizer.groups.{names[1]}.match", value, reason, "patterns without common parameters")


def betas_have_an_effect(optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Groups have betas if the optimizer has them."""
    for name, group in optimizer.groups.items():
        if group.betas is not None and not hasattr(optimizer, "betas"):
            reason = f"optimizer.name={optimizer.name} has none"
            yield Violation(f"optimizer.groups.{name}.betas", list(group.betas), reason, "leave it out")


def frozen_parameters_are_possible(
    optimizer: OptimizerConfig, parallelism: ParallelismConfig, compile: CompileConfig
) -> Iterator[Violation]:
    """Frozen parameters need a backward pass that torch records as it runs, in one stage."""
    for name, group in optimizer.groups.items() if parallelism.pp > 1 or compile.cuda_graphs else ():
        if group.frozen:
            reason, remedy = "a pipeline stage may have no backward pass then", "parallelism.pp=1"
            if parallelism.pp == 1:
                reason, remedy = "the captured backward pass has gradients of all weights", "compile.cuda_graphs=false"
            field = f"optimizer.groups.{name}.frozen"
            yield Violation(field, True, reason, f"{remedy}; or lr_scale: 0, which keeps the gradients")


def something_is_trained(spec: ModelSpec, optimizer: OptimizerConfig) -> Iterator[Violation]:
    """Some parameter is in no frozen group."""
    if not any(group.frozen for group in optimizer.groups.values()):
        return
    found = [optimizer.group_of(name, role) for name, role in parameter_roles(spec).items()]
    if all(group is not None and group.frozen for group in found):
        name = next(name for name, group in optimizer.groups.items() if group.frozen)
        reason, remedy = "every parameter is frozen, so that there is nothing to train", "patterns that leave some out"
        yield Violation(f"optimizer.groups.{name}.frozen", True, reason, f"{remedy}, or titan-exp evaluate RUN")


def group_norms_are_limited(optimizer: OptimizerConfig, grad_clip: GradClipConfig) -> Iterator[Violation]:
    """Groups with a limit of their norm have gradients, and no limits from AdaGC; none takes the name of the others."""
    for name, group in optimizer.groups.items():
        if group.max_grad_norm is None:
            continue
        field = f"optimizer.groups.{name}.max_grad_norm"
        if group.frozen:
            reason = "the group is frozen, so that it has no gradients"
            yield Violation(field, group.max_grad_norm, reason, "leave it out")
        if grad_clip.mode == "adagc":
            reason = "grad_clip=adagc has a limit for every parameter"
            yield Violation(field, group.max_grad_norm, reason, "leave it out, or grad_clip=norm")
        if name == "rest":
            reason = "clip/norm/rest is the norm of the parameters outside such groups"
            yield Violation(field, group.max_grad_norm, reason, "another name")


PARAMETER_RULES = rules(
    *(roles_have_parameters, patterns_match, groups_are_disjoint, betas_have_an_effect),
    *(frozen_parameters_are_possible, something_is_trained, group_norms_are_limited),
)
