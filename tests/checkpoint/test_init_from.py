"""Initial weights of another run: all of them, or an error that lists every mismatch."""

import pytest
import torch
from torch import nn

from tests.checkpoint.saving import saved, trained
from titan_exp.checkpoint.load_state import load_initial_weights
from titan_exp.config.checkpoint_files import saved_state
from titan_exp.config.errors.user_error import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_all_weights_are_the_saved_ones(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    other, _ = trained(seed=3, steps=0)
    load_initial_weights(path, [other], [])
    original, _ = trained()
    assert all(torch.equal(value, weights(original)[name]) for name, value in weights(other).items())


def test_excluded_weights_keep_their_values(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    other, _ = trained(seed=3, steps=0)
    before = weights(other)
    load_initial_weights(path, [other], ["blocks.0.*"])
    original = weights(trained()[0])
    kept = [name for name in before if name.startswith("blocks.0.")]
    assert kept
    for name, value in weights(other).items():
        assert torch.equal(value, before[name] if name in kept else original[name]), name


class Mixed(nn.Module):
    """Some weights of the saved model under their names, one of another shape, and new ones."""

    def __init__(self, original: nn.Module, more: int) -> None:
        super().__init__()
        (name, first), *others = original.named_parameters()
        self.reshaped = name
        for kept, value in others[:2]:
            self.put(kept, value.detach().clone())
        self.put(name, first.detach()[:3].clone())
        for index in range(more):
            self.put(f"adapter.{index:03d}.weight", torch.zeros(2))

    def put(self, name: str, value: torch.Tensor) -> None:
        at: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(value))


def test_all_mismatches_are_listed(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    mixed = Mixed(trained()[0], more=200)
    with pytest.raises(UserError) as caught:
        load_initial_weights(path, [mixed], ["nothing.*"])
    text = str(caught.value)
    names = [name for name, _ in trained()[0].named_parameters()]
    assert "the checkpoint lacks: adapter.000.weight, " in text
    assert "adapter.011.weight and 188 more" in text
    assert names[3] in text.split("the model lacks: ")[1]
    assert f"these have another shape: {mixed.reshaped} (saved " in text
    assert "here 3×" in text
    assert "match nothing: nothing.*" in text
    assert "adapter.*" in text.split("initialize them anew: ")[1]


def test_excluded_mismatches_are_ignored(tmp_path):
    path = saved(tmp_path, 10).folder.path_of(10)
    mixed = Mixed(trained()[0], more=2)
    absent = [name for name, _ in trained()[0].named_parameters() if name not in dict(mixed.named_parameters())]
    load_initial_weights(path, [mixed], ["adapter.*", mixed.reshaped, *absent])


def test_a_run_its_folder_and_a_checkpoint_mean_the_same(tmp_path):
    folder = saved(tmp_path, 10, 20).folder
    assert saved_state(str(tmp_path)) == folder.path_of(20)
    assert saved_state(str(folder.path)) == folder.path_of(20)
    assert saved_state(str(folder.path_of(10))) == folder.path_of(10)
    folder.path_of(10).rename(folder.partial_path(10))
    assert saved_state(str(folder.partial_path(10))) is None
    assert saved_state(str(tmp_path / "nowhere")) is None
