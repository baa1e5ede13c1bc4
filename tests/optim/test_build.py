from dataclasses import replace

import pytest
import torch

from tests.models.shapes import real_model
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_dict, to_experiment
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.models.spec.lookup import model_spec, parameter_roles
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import build_optimizer
from titan_exp.optim.parameter_groups import named_parameters

ADAMW = AdamWConfig(
    name="adamw",
    lr=1e-2,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    decay_vectors=False,
    implementation="fused",
    state_precision="fp32",
)


def test_vectors_are_not_decayed():
    model = real_model()
    decayed, kept = build_optimizer([model], ADAMW).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert len(kept["params"]) == 2 * 2 + 1
    everything = sum(len(group["params"]) for group in (decayed, kept))
    assert everything == len(list(model.parameters()))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_adamw_is_the_published_update(implementation):
    """One parameter, two steps, against Loshchilov and Hutter's formula written out in fp64."""
    module = torch.nn.Linear(3, 2, bias=False)
    start = module.weight.detach().double().clone()
    optimizer = build_optimizer([module], replace(ADAMW, implementation=implementation))
    gradients = [torch.randn(2, 3), torch.randn(2, 3)]
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.step()
    weight, mean, square = start, torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for step, gradient in enumerate((g.double() for g in gradients), 1):
        weight = weight * (1 - 1e-2 * 0.1)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        weight = weight - 1e-2 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(module.weight.detach().double(), weight, atol=1e-6, rtol=1e-5)


def test_an_optimizer_of_the_users_own():
    config = replace(ADAMW, name="torch.optim.SGD", options={"momentum": 0.5})
    optimizer = build_optimizer([real_model()], config)
    assert isinstance(optimizer, torch.optim.SGD)
    roles = [group["role"] for group in optimizer.param_groups]
    assert sorted(roles) == ["embedding", "head", "matrix", "vector"]
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_sgd_is_one_file_whose_fields_are_its_own():
    """AdamW's fields are neither accepted nor part of its run id."""
    config = to_experiment(compose(["optimizer=sgd", "optimizer.momentum=0.5"]))
    assert set(to_dict(config)["optimizer"]) == {
        *("name", "lr", "weight_decay", "decay_vectors", "lr_scales", "weight_decays", "groups", "options"),
        *("momentum", "nesterov"),
    }
    optimizer = build_optimizer([real_model()], config.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.5
    with pytest.raises(UserError, match=r"optimizer\.betas"):
        to_experiment(compose(["optimizer=sgd", "+optimizer.betas=[0.9,0.95]"]))


def test_roles_are_those_of_the_modules():
    roles = {named.name: named.role for named in named_parameters([real_model()])}
    assert (roles["embedding.weight"], roles["head.weight"]) == ("embedding", "head")
    assert {role for name, role in roles.items() if "norm" in name} == {"vector"}
    assert {role for name, role in roles.items() if name.endswith(("qkv.weight", "down.weight"))} == {"matrix"}
    assert named_parameters([GroupedLinear(2, 4, 8, 0.02)])[0].role == "expert"


def test_biases_of_experts_are_vectors():
    """A stack of vectors is vectors, also where the spec says so."""
    experts = GroupedLinear(2, 4, 8, 0.02, bias_std=0.0)
    decayed, kept = build_optimizer([experts], ADAMW).param_groups
    assert [parameter.shape for parameter in decayed["params"]] == [(2, 8, 4)]
    assert ([parameter.shape for parameter in kept["params"]], kept["weight_decay"]) == ([(2, 8)], 0.0)
    assert {named.name: named.role for named in named_parameters([experts])} == {"weight": "expert", "bias": "vector"}
    spec = model_spec(to_experiment(compose(["model=gpt_oss_debug"])).model)
    assert spec is not None
    roles = parameter_roles(spec)
    assert {role for name, role in roles.items() if name.endswith("bias")} == {"vector"}
    assert roles["blocks.0.feed_forward.experts.down.weight"] == "expert"


@pytest.mark.parametrize(
    ("shape", "role"),
    [((4,), "vector"), ((1, 1, 4, 1), "vector"), ((1, 4), "matrix"), ((4, 1), "matrix"), ((2, 3, 4), "expert")],
)
def test_numbers_per_head_are_a_vector_in_any_shape(shape: tuple[int, ...], role: str):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(shape))
    assert named_parameters([module])[0].role == role


def test_roles_have_their_own_learning_rate_and_weight_decay():
    model = torch.nn.ModuleList([real_model(), GroupedLinear(2, 4, 8, 0.02)])
    config = replace(ADAMW, lr_scales={"expert": 0.5, "embedding": 2.0}, weight_decays={"expert": 0.0, "vector": 0.3})
    optimizer = build_optimizer([model], config)
    set_lr(optimizer, 1e-3)
    found = {group["role"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    plain = (1e-3, 0.1)
    assert found == {
        "embedding": (2e-3, 0.1),
        "head": plain,
        "matrix": plain,
        "vector": (1e-3, 0.3),
        "expert": (5e-4, 0),
    }


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("adam", "did you mean adamw?"),
        ("shampoo", "give the import path"),
        ("torch.optim.SGDD", "SGD"),
        ("nowhere.Lion", "PYTHONPATH"),
    ],
)
def test_an_unknown_optimizer_is_refused(name: str, remedy: str):
    with pytest.raises(UserError) as refused:
        to_experiment(compose([f"optimizer.name={name}"]))
    (violation,) = refused.value.violations
    assert violation.field == "optimizer.name"
    assert remedy in violation.remedy
