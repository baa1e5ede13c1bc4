"""Stages are parts of the whole: every parameter on one of them, but for those that two of them use."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.models.shapes import TINY
from titan_exp.models.build import build_model
from titan_exp.parallel.pipeline_stage import prune_to_stage, shared_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_its_stage(tied: bool):
    config = replace(TINY, layers=3, tied_embeddings=tied)
    whole = build_model(config, seq_len=16, attention_backend="math")
    tokens = torch.arange(16)[None]
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    whole.reset_buffers()  # type: ignore[operator]
    names, x = Counter(), tokens
    for number, layers in enumerate(([], [0, 1], [2])):
        stage = build_model(config, seq_len=16, attention_backend="math")
        prune_to_stage(stage, layers, first=number == 0, last=number == 2)
        stage.reset_buffers()  # type: ignore[operator]
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        names.update(name for name, _ in stage.named_parameters())
        x = stage(x)
    assert names.keys() == dict(whole.named_parameters()).keys()
    assert {name for name, count in names.items() if count > 1} == set(shared_parameters(whole))
    assert shared_parameters(whole) == (("embedding.weight",) if tied else ())
    torch.testing.assert_close(x, whole(tokens))
