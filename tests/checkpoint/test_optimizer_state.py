"""State of any optimizer is saved and restored, whatever it is and whenever it was made."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.own_states import Counting, Generating
from tests.parity.runs import Curve, train
from tests.parity.test_continued import SAVING, assert_continues
from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.checkpoint.optimizer_state import (
    UnsavedStateError,
    differing_between_ranks,
    init_optimizer_state,
    optimizer_state_dict,
    optimizer_values,
    prepare_optimizer_state,
    saved_tensors,
)
from titan_exp.config.errors.user_error import UserError
from titan_exp.optim.parameter_groups import remember_groups
from titan_exp.trainer.distributed import joined_process_group

OWN = "tests.optim.own_states"
Mutation = Callable[[], None] | None


def built(kind: type[torch.optim.Optimizer] = Counting, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1, **options)  # type: ignore[call-arg]
    remember_groups(optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.sin(torch.arange(parameter.numel()) + number + index).view_as(parameter)
        optimizer.step()


def restored(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    other, found = built(type(optimizer), **options)
    other.load_state_dict(model.state_dict())
    tensors = optimizer_state_dict([model], optimizer)
    values = json.loads(json.dumps(optimizer_values([model], optimizer)))
    prepare_optimizer_state([other], found, saved_tensors(tensors), values)
    state = optimizer_state_dict([other], found)
    assert state.keys() == tensors.keys()
    for key, value in tensors.items():
        state[key].copy_(value)
    return other, found


@pytest.mark.parametrize("after", [1, 3, 4, 7])
def test_it_is_restored_as_it_was(after: int):
    model, optimizer = built()
    step(model, optimizer, range(after))
    other, found = restored(model, optimizer)
    for one in (found.state_dict(), optimizer.state_dict()):
        one["param_groups"][0]["scale"] = float(one["param_groups"][0]["scale"])
        one["param_groups"][1]["scale"] = float(one["param_groups"][1]["scale"])
    assert repr(found.state_dict()) == repr(optimizer.state_dict())
    step(model, optimizer, range(after, 10))
    step(other, found, range(after, 10))
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_hyperparameters_are_those_of_the_configuration():
    model, optimizer = built(power=1.0)
    step(model, optimizer, range(2))
    _, found = restored(model, optimizer, power=2.0)
    assert [(group["power"], group["k"]) for group in found.param_groups] == [(2.0, 2), (2.0, 2)]


def test_a_parameter_without_gradient_has_no_state():
    model, optimizer = built()
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    other, found = restored(model, optimizer)
    assert model.bias not in optimizer.state
    assert other.bias not in found.state
    assert found.state[other.weight]["step"] == 1


def test_allocating_leaves_no_trace_in_groups():
    model, optimizer = built()
    prepare_optimizer_state([model], optimizer, {}, {"none.weight": True, "none.bias": True})
    assert [group["k"] for group in optimizer.param_groups] == [0, 0]
    init_optimizer_state([model], optimizer)
    prepare_optimizer_state([model], optimizer, {}, {"none.weight": True, "none.bias": True})
    assert [(group["k"], "seen" in group) for group in optimizer.param_groups] == [(0, False), (0, False)]
    assert not optimizer.state


def test_values_of_groups_that_became_one_must_agree():
    model, optimizer = built()
    step(model, optimizer, range(2))
    optimizer.param_groups[1]["k"] = 7
    tensors, values = optimizer_state_dict([model], optimizer), optimizer_values([model], optimizer)
    other = nn.Linear(3, 2)
    one = Counting(other.parameters(), lr=0.1)
    remember_groups(one)
    with pytest.raises(UserError, match=r"values k differ between weight and bias"):
        prepare_optimizer_state([other], one, saved_tensors(tensors), values)


def test_what_cannot_be_carried_is_named():
    model, optimizer = built(Generating)
    step(model, optimizer, range(1))
    with pytest.raises(UnsavedStateError, match=r"state\[weight\].generator is a torch.*Generator"):
        optimizer_values([model], optimizer)
    model, optimizer = built()
    step(model, optimizer, range(1))
    optimizer.state["all"] = {"step": 1}  # type: ignore[index]  # as some optimizers do
    with pytest.raises(UnsavedStateError, match=r"state\['all'\] is the state of no parameter"):
        optimizer_values([model], optimizer)


def test_an_early_checkpoint_without_numbers_is_loaded_with_a_word(caplog: pytest.LogCaptureFixture):
    model, optimizer = built()
    step(model, optimizer, range(2))
    tensors = {key: value for key, value in optimizer_state_dict([model], optimizer).items() if "history" not in key}
    other, found = built()
    prepare_optimizer_state([other], found, saved_tensors(tensors), {})
    assert "the checkpoint has no last, step of the optimizer's state" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        {"state.weight": {"history": {"list": [{"tensor": "elsewhere"}]}}},
        {"state.weight": {"x": {"call": 1}}},
        {"state.weight": 3},
    ],
)
def test_damaged_values_are_no_traceback(values: dict[str, Any]):
    model, optimizer = built()
    with pytest.raises(UserError, match="damaged"):
        prepare_optimizer_state([model], optimizer, {}, values)


def _differing() -> list[str]:
    rank = int(os.environ["RANK"])
    with joined_process_group(torch.device("cpu")):
        state = {"optimizer.a.step": torch.tensor(3.0), "optimizer.a.rank": torch.tensor(float(rank))}
        state |= {f"optimizer.only.{rank}": torch.tensor(1.0), "model.a": torch.tensor(float(rank))}
        state["optimizer_values.state.a"] = torch.tensor([rank], dtype=torch.uint8)
        return differing_between_ranks(state, None)


def test_ranks_that_disagree_are_found():
    assert run_ranks(2, _differing) == [["optimizer.a.rank", "optimizer_values.state.a"]] * 2


def own(kind: str) -> list[str]:
    return [*SAVING, f"optimizer.name={OWN}.{kind}", "optimizer.lr=1e-3", "training.max_grad_norm=null"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    """A run of ten steps, with checkpoints of steps 5 and 10."""
    path = tmp_path_factory.mktemp("runs") / "first" / "0123456789ab"
    return path, train(path, *own("Counting"))


def continued(path: Path, parent: Path, *layout: str, kind: str = "Counting", mutate: Mutation = None) -> Curve:
    step_5 = (f"checkpoint.continue_from={parent}", "checkpoint.continue_step=5")
    return train(path / "child", *own(kind), *step_5, *layout, mutate=mutate)


def test_a_run_goes_on_bitwise(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    found = continued(tmp_path, path)
    assert found.loss == whole.loss[5:]
    assert all(torch.equal(found.weights[name], weight) for name, weight in whole.weights.items())


def test_a_run_goes_on_in_another_layout(tmp_path: Path, parent: tuple[Path, Curve]):
    path, whole = parent
    assert_continues(whole, continued(tmp_path, path, "parallelism.dp_shard=2", "parallelism.pp=2"))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("parallelism.dp_shard=2", "Counting"),
        ("parallelism.tp=2", "OnShards"),
        ("parallelism.pp=2", "OnShards"),
        pytest.param("parallelism.dp_shard=2", "OnShards", marks=pytest.mark.night),
        pytest.param("parallelism.tp=2", "Counting", marks=pytest.mark.night),
        pytest.param("parallelism.pp=2", "Counting", marks=pytest.mark.night),
    ],
)
def test_it_is_saved_by_every_layout(tmp_path: Path, layout: str, kind: str):
    path = tmp_path / "first" / "0123456789ab"
    whole = train(path, *own(kind), layout)
    again = continued(tmp_path / "same", path, layout, kind=kind)
    assert again.loss == whole.loss[5:]
    assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())
    assert_continues(whole, continued(tmp_path / "one", path, kind=kind))


def values_are_lost() -> None:
    patch("titan_exp.checkpoint.load_state.read_json_entries", _without("optimizer_values."))


def late_tensors_are_lost() -> None:
    patch("titan_exp.checkpoint.load_state.tensor_entries", _without(".late"))


def groups_are_the_configurations() -> None:
    patch("titan_exp.checkpoint.optimizer_state._restore_group", lambda original: lambda group, found: None)


def _without(word: str) -> Callable[[Any], Any]:
    def without(original: Any) -> Any:
        return lambda *args: {key: value for key, value in original(*args).items() if word not in key}

    return without


@pytest.mark.parametrize("mutate", [values_are_lost, late_tensors_are_lost, groups_are_the_configurations])
def test_mutation_is_noticed(tmp_path: Path, parent: tuple[Path, Curve], mutate: Callable[[], None]):
    path, whole = parent
    with pytest.raises(AssertionError):
        assert_continues(whole, continued(tmp_path, path, mutate=mutate))
