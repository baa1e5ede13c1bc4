"""Parametrizations: the papers' tables written out, base shapes, and models with explicit multipliers."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.parametrization.standard import UNSCALED, ParameterScale, multiplier, scales_of
from titan_exp.models.spec.lookup import model_spec, parameter_roles
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import build_optimizer
from titan_exp.optim.parameter_groups import freeze, hyperparameters, named_parameters
from titan_exp.parallel.meta_init import init_weights
from titan_exp.rules import check
from titan_exp.trainer.train_state import has_groups, parameter_table

FAMILIES = [
    "llama_debug",
    "qwen3_debug",
    "qwen3_moe_debug",
    "deepseek_debug",
    "gpt_oss_debug",
    "llama4_debug",
    "olmo2_debug",
]
WIDE = ["model=llama_debug", "parametrization.base_width=16", "model.layers=8"]


def composed(*overrides: str) -> Experiment:
    return check(resolve_layout(experiment(*overrides), 1))


def scales(*overrides: str) -> dict[str, ParameterScale]:
    run = composed(*overrides)
    return dict(scales_of(run.parametrization, run.model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["mup", "completep", "depth_mup"])
def test_the_base_shape_is_unchanged(family: str, name: str):
    base = composed(f"model={family}").model
    shape = [f"parametrization.base_width={base.dim}", f"parametrization.base_head_dim={_head_dim(base)}"]
    depth = [] if name == "mup" else [f"parametrization.base_depth={base.layers}"]
    found = scales(f"model={family}", f"parametrization={name}", *shape, *depth)
    spec = model_spec(base)
    assert spec is not None
    assert found.keys() == spec.shapes.keys()
    assert {*found.values()} == {UNSCALED}


def test_mup_is_table_3():
    """A fourth of the width: initial weights, learning rate, decay and epsilon of input, hidden and output weights."""
    found = scales(*WIDE, "parametrization=mup")
    assert found["embedding.weight"] == found["blocks.0.attention_norm.weight"] == ParameterScale(eps=1 / 4)
    assert found["blocks.0.attention.qkv.weight"] == ParameterScale(1 / 2, 1 / 4, 4.0, 1 / 4, 4.0, 4.0)
    assert found["blocks.7.feed_forward.down.weight"] == ParameterScale(1 / 2, 1 / 4, 4.0, 1 / 4, 4.0, 4.0)
    assert found["head.weight"] == ParameterScale(1 / 4, 1 / 4, 4.0, 1.0)
    assert scales("model=qwen3_moe_debug", "parametrization=mup", "parametrization.base_width=16")[
        "blocks.0.feed_forward.router.weight"
    ] == ParameterScale(1 / 4, 1 / 4, 4.0, 1.0, 4.0)


@pytest.mark.parametrize(("name", "exponent"), [("completep", 1.0), ("depth_mup", 0.5)])
def test_depth_is_table_1(name: str, exponent: float):
    """Four times the depth at the base width: of each part, initial weights, learning rate, decay and epsilon."""
    shape = ["parametrization.base_width=64", "parametrization.base_depth=2", f"parametrization={name}"]
    found = scales("model=llama_debug", "model.layers=8", *shape)
    branch = 4.0**exponent
    lr, eps = branch / 4, 1 / branch
    expected = {
        "embedding": ParameterScale(),
        "head": ParameterScale(),
        "norm": ParameterScale(),
        "blocks.3.attention_norm": ParameterScale(lr=lr, eps=eps),
        "blocks.3.attention.qkv": ParameterScale(lr=lr, eps=eps),
        # Initial weights of the base depth, which the family divides by the root of the depth; the branch's factor is
        # in the weights.
        "blocks.3.attention.out": ParameterScale(2 / branch, lr / branch, branch, eps * branch),
        "blocks.7.feed_forward.down": ParameterScale(2 / branch, lr / branch, branch, eps * branch),
    }
    for part, scale in expected.items():
        assert asdict(found[f"{part}.weight"]) == pytest.approx(asdict(scale)), part


def test_a_tied_heads_factor_is_in_the_last_norm():
    found = scales(*WIDE, "parametrization=mup", "model.tied_embeddings=true", "parametrization.output_multiplier=2")
    assert found["embedding.weight"] == ParameterScale(eps=1 / 4)
    assert found["norm.weight"] == ParameterScale(1 / 2, 1 / 2, 2.0, 1 / 2)
    assert "head.weight" not in found


def test_inputs_that_stay_the_same_are_not_scaled():
    options = ["model=deepseek_debug", "parametrization=mup", "parametrization.base_width=16"]
    found = scales(*options, "parametrization.fixed=[kv_lora_rank,moe.ffn_dim]")
    assert found["blocks.0.attention.kv_b.weight"].lr == found["blocks.1.feed_forward.experts.down.weight"].lr == 1
    assert found["blocks.0.attention.kv_a.weight"].lr == found["blocks.0.feed_forward.down.weight"].lr < 1


ROUTER, OUT, EXPANDED = "feed_forward.router", "attention.out", "attention.kv_b"


@pytest.mark.parametrize(
    ("optimizer", "router", "out", "expanded"),
    [
        ("lion", 1 / 4, 1 / 4, 1),
        # Spectral norms of updates grow as sqrt(outputs / inputs): 1/2, 1 and 2. Those of orthogonal ones are constant.
        ("muon optimizer.scale=none", 1 / 2, 1, 2),
        ("muon optimizer.scale=match_rms_adamw", 1 / 4, 1 / 2, 1),
        ("dion optimizer.scale=original", 1, 1, 1),
    ],
)
def test_learning_rates_follow_from_the_norm_of_updates(optimizer: str, router: float, out: float, expanded: float):
    """Factors of 4 times the width: fixed outputs, inputs and outputs that grow, fixed inputs."""
    width = ["parametrization=mup", "parametrization.base_width=16", "parametrization.fixed=[kv_lora_rank]"]
    run = composed("model=deepseek_debug", *width, *f"optimizer={optimizer}".split())
    assert run.model.dim == 64
    with torch.device("meta"):
        model = build_model(run.model, seq_len=32, attention_backend="math")
    found = {
        named.name.removeprefix("blocks.1.").removesuffix(".weight"): hyperparameters(named, run.optimizer)
        for named in named_parameters([model], scales_of(run.parametrization, run.model))
    }
    for name, factor in ((ROUTER, router), (OUT, out), (EXPANDED, expanded)):
        assert found[name].get("lr_scale", 1) == pytest.approx(factor), name
        assert found[name]["weight_decay"] == pytest.approx(run.optimizer.weight_decay / factor), name


@pytest.mark.parametrize("optimizer", ["soap", "muon split_attention=head"])
def test_optimizers_without_rules_are_refused(optimizer: str):
    name, *words = optimizer.split()
    with pytest.raises(UserError, match=f"optimizer.name={name}"):
        composed("parametrization=mup", f"optimizer={name}", *(f"optimizer.{word}" for word in words))


def built(run: Experiment, names: Any = None, **changes: Any) -> nn.Module:
    """The model on the CPU, drawn with these scales; `changes` of every initialization that is random."""
    model = build_model(run.model, seq_len=32, attention_backend="math")
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # type: ignore[operator]  # a method
    table = init_specs(model, names or {})
    assert table is not None
    for name, init in table.items():
        table[name] = replace(init, **changes) if init.kind == "normal" else init
    init_weights(model, table, 0)
    return model


def explicit(run: Experiment) -> nn.Module:
    """A model with multipliers in its forward pass, and weights drawn as CompleteP's table 1 says."""
    model = built(run)
    width, depth = run.model.dim / 16, run.model.layers / 2
    post_normed = run.model.architecture == "olmo2"
    std, base_out = 0.02, 0.02 if post_normed else 0.02 / (2 * 2) ** 0.5
    table = init_specs(model)
    assert table is not None
    for name, init in table.items():
        if init.kind == "normal" and "blocks" in name:
            own = base_out if name.endswith(("out.weight", "down.weight")) else std
            table[name] = replace(init, std=own / width**0.5)
    init_weights(model, table, 0)
    blocks: Any = model.blocks
    for block in blocks.values():
        inputs, outputs = (
            (block.attention_norm, block.feed_forward_norm),
            (block.attention.out, block.feed_forward.down),
        )
        for last in inputs if post_normed else outputs:
            last.register_forward_hook(lambda _, __, output: output / depth)
    model.head.register_forward_hook(lambda _, __, output: output / width)  # type: ignore[union-attr,operator]
    return model


def explicit_optimizer(model: nn.Module, run: Experiment) -> torch.optim.Optimizer:
    """AdamW with the groups of CompleteP's table 1 at a = 1."""
    width, depth, groups = run.model.dim / 16, run.model.layers / 2, []
    optimizer: Any = run.optimizer
    for name, parameter in model.named_parameters():
        matrix, inside = parameter.dim() > 1, name.startswith("blocks")
        hidden = matrix and inside
        groups.append(
            {
                "params": [parameter],
                "lr": optimizer.lr / (width if hidden else 1),
                "weight_decay": optimizer.weight_decay * (width if hidden else 1) * matrix,
                "eps": optimizer.eps / width / (depth if inside else 1),
            }
        )
    return torch.optim.AdamW(groups, betas=optimizer.betas)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses, generator = [], torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(0, 300, (2, 33), generator=generator)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        *(("llama_debug", broken) for broken in (None, "init", "lr", "weight_decay", "eps")),
        *(("olmo2_debug", broken) for broken in (None, "init", "lr", "eps")),
    ],
)
def test_multipliers_in_weights_train_as_those_in_the_forward_pass(family: str, broken: str | None):
    """CompleteP's table 1, with its multipliers, against ours without; a factor left out is noticed."""
    run = composed(
        *(f"model={family}", "model.layers=6", "parametrization=completep", "parametrization.base_depth=2"),
        *("parametrization.base_width=16", "optimizer.eps=1e-4", "optimizer.weight_decay=5"),
    )
    model = explicit(run)
    expected = train(model, explicit_optimizer(model, run))
    found_scales = dict(scales_of(run.parametrization, run.model))
    if broken is not None:
        name = "blocks.0.attention.out.weight" if family == "llama_debug" else "blocks.0.attention_norm.weight"
        found_scales[name] = replace(found_scales[name], **{broken: 1.0})
    ours = built(run, found_scales)
    optimizer = build_optimizer([ours], run.optimizer, found_scales)
    set_lr(optimizer, run.optimizer.lr)
    found = train(ours, optimizer)
    error = (torch.stack(found) - torch.stack(expected)).abs().max()
    assert error < 1e-7 if broken is None else error > 1e-6, f"{error:.1e}"


@pytest.mark.parametrize("family", ["llama_debug", "qwen3_debug", "deepseek_debug", "olmo2_debug"])
def test_scores_are_divided_by_the_width_of_a_head(family: str):
    """Scaled weights give the logits of the same weights with scaled scores."""
    overrides = [f"model={family}", "parametrization=mup", "parametrization.fixed=[]"]
    run = composed(*overrides, "parametrization.base_width=64")
    width = _head_dim(run.model)
    base = replace(run.parametrization, base_width=run.model.dim)
    grown = scales_of(replace(base, base_head_dim=4), run.model)  # type: ignore[call-arg]
    tokens = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    logits = []
    for names in (grown, {}):
        model = built(run, names, std=0.5)  # large scores, on which the output depends
        if not names:
            for module in model.modules():
                core = getattr(module, "core", None)
                if core is not None:
                    core.scale = (core.scale or width**-0.5) * (4 / width) ** 0.5
        with torch.no_grad():
            logits.append(model(tokens))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3 * float(logits[1].abs().max()))


@pytest.mark.parametrize("family", [*FAMILIES, "llama_debug model.tied_embeddings=true"])
def test_roles_are_described_once(family: str):
    """Roles by the spec, which rules read, are those that an optimizer sees."""
    run = composed(*f"model={family}".split())
    spec = model_spec(run.model)
    assert spec is not None
    with torch.device("meta"):
        model = build_model(run.model, seq_len=32, attention_backend="math")
    assert {named.name: named.role for named in named_parameters([model])} == parameter_roles(spec)


def test_groups_and_the_table():
    run = composed(
        *("model=llama_debug", "parametrization=mup", "parametrization.base_width=32", "+optimizer.lr_scales.head=3"),
        "+optimizer.groups.first={match:[blocks.0.*.weight],lr_scale:0.5,weight_decay:0.3,betas:[0.8,0.9]}",
        "+optimizer.groups.still={match:[embedding,norm.weight],frozen:true}",
    )
    with torch.device("meta"):
        model = build_model(run.model, seq_len=32, attention_backend="math")
    freeze(model, run.optimizer)
    named = named_parameters([model], scales_of(run.parametrization, run.model), frozen=True)
    assert has_groups(named, run.optimizer)
    rows = [line.split() for line in parameter_table(named, run.optimizer).splitlines()]
    assert rows[1][1:4] == ["embedding", "still", "frozen"]
    assert [row[1:5] for row in rows if row[2] == "first"] == [
        ["vector", "first", "0.002", "0.3"],
        ["matrix", "first", "0.001", "0.6"],
    ]
    assert [row[1:5] for row in rows if row[1] == "head"] == [["head", "-", "0.006", "0.2"]]
    optimizer = build_optimizer([model], run.optimizer, scales_of(run.parametrization, run.model))
    assert len(named) - 2 == sum(len(group["params"]) for group in optimizer.param_groups)
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.8, 0.9), (0.9, 0.95)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parametrization=mup", "parametrization.fixed=[ffn_dm]"], r"did you mean ffn_dim"),
        (["parametrization=mup", "parametrization.fixed=[vocab_size]"], r"the inputs of no linear layer depend"),
        (["parametrization=mup", "optimizer=sgd"], r"no rule for the learning rates of optimizer.name=sgd"),
        (["parametrization.name=mupp"], r"did you mean mup"),
        (["parametrization.name=os.path"], r"defines Config and parameter_scales"),
        (["parametrization=mup", "model=llama4_debug", "parametrization.base_head_dim=8"], r"a norm without a weight"),
        (["+optimizer.groups.a={match:[embeding]}"], r"did you mean embedding"),
        (["+optimizer.groups.a={match:[]}"], r"groups\.a\.match.*\n.*|needs 1 value"),
        (["+optimizer.groups.a={match:[head],lr_scal:2}"], r"groups\.a\.lr_scal=2: unknown key"),
        (["+optimizer.groups.a={match:[head],lr_scale:-1}"], r"groups\.a\.lr_scale=-1: must be at least 0"),
        (["+optimizer.groups.a={match:[head]}", "+optimizer.groups.b={match:[head.*]}"], r"in both groups a and b"),
        (
            ["+optimizer.groups.a={match:[head],frozen:true}", "parallelism.pp=2", "parallelism.dp_shard=1"],
            r"would have no backward pass\n.*lr_scale: 0",
        ),
        (
            ["optimizer=sgd", "+optimizer.groups.a={match:[head],betas:[0.8,0.9]}"],
            r"optimizer\.name=sgd has no betas",
        ),
        (["+optimizer.groups.a={match:['*'],frozen:true}"], r"groups\.a\.frozen=true: every parameter is frozen"),
    ],
)
def test_mistakes_are_refused_in_words(overrides: list[str], message: str):
    with pytest.raises(UserError, match=message):
        composed(*overrides)


def test_a_multiplier_is_its_own_inverse():
    assert multiplier(4.0).times(multiplier(1 / 4)) == UNSCALED


def _head_dim(model: Any) -> int:
    spec = model_spec(model)
    assert spec is not None
    assert spec.attention is not None
    return spec.attention.qk_dim
