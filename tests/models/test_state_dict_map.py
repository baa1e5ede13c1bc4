import pytest
import torch

from tests.checkpoint.tools import KINDS, kind
from titan_exp.models.build import build_model
from titan_exp.models.convert.state_dict_map import CheckpointFormat, state_dict_map
from titan_exp.models.llama import feed_forward_width, from_params, to_params


@pytest.mark.parametrize("dialect", ["huggingface", "llama", "torchtune"])
@pytest.mark.parametrize("name", KINDS)
def test_every_row_of_ours_is_one_of_theirs(name: str, dialect: CheckpointFormat):
    with torch.device("meta"):
        model = build_model(kind(name), seq_len=64, attention_backend="math")
    row_map = state_dict_map(kind(name), dialect)
    assert row_map.shapes == {key: tuple(value.shape) for key, value in model.named_parameters()}
    used: dict[str, list[int]] = {}
    for ours, runs in row_map.runs.items():
        at = 0
        for run in runs:
            assert run.start == at
            at += run.rows
            used.setdefault(run.name, []).extend(range(*run.theirs.indices(10**9)))
            assert row_map.their_shapes[run.name][1:] == row_map.shapes[ours][1:]
        assert at == row_map.shapes[ours][0]
    for their_name, shape in row_map.their_shapes.items():
        if their_name not in row_map.copies:
            assert sorted(used.pop(their_name)) == list(range(shape[0]))
    assert used == {}


def test_a_part_of_ours_is_the_same_part_of_its_runs():
    row_map = state_dict_map(kind("llama3"), "llama")
    name = "blocks.1.attention.qkv.weight"
    whole = {run.start + n: (run.name, run.first + n * run.step) for run in row_map.runs[name] for n in range(run.rows)}
    part = {
        run.start + n: (run.name, run.first + n * run.step) for run in row_map.of(name, 5, 71) for n in range(run.rows)
    }
    assert part == {row: whole[row] for row in range(5, 71)}


@pytest.mark.parametrize(
    ("preset", "multiple", "multiplier"),
    [("llama2_7b", 256, None), ("llama3_8b", 1024, 1.3), ("llama3_1_405b", 4096, 1.2), ("llama3_2_1b", 256, 1.5)],
)
def test_the_width_formula_is_metas(preset: str, multiple: int, multiplier: float | None):
    """The published numbers, and those that we write, give the published width."""
    from tests.config.composing import llama

    model = llama(f"model={preset}")
    assert feed_forward_width(model.dim, multiple, multiplier) == model.ffn_dim
    params = to_params(model)
    assert feed_forward_width(model.dim, params["multiple_of"], params.get("ffn_dim_multiplier")) == model.ffn_dim


@pytest.mark.parametrize("preset", ["llama2_70b", "llama3_8b", "llama3_1_405b", "llama3_2_3b"])
def test_published_shapes_come_back_from_params(preset: str):
    from tests.config.composing import llama

    model = llama(f"model={preset}")
    measured = {"vocab_size": model.vocab_size, "ffn_dim": model.ffn_dim, "tied": model.tied_embeddings}
    assert from_params(to_params(model), model.name, **measured) == model
