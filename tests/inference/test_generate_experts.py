"""Generation by tensor-parallel ranks, each with other experts, equals that of one device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.composing import experiment
from tests.ranks import run_ranks
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.inference.generate import generate, sharded_experiment
from titan_exp.models.blocks.linear import ShardSpec, init_shard_
from titan_exp.models.build import build_model, init_specs
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel import meta_init
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group

PROMPTS = ["import ", "def main("]
GREEDY = GenerateOptions(temperature=0.0, tokens=16)


def source(experts: int) -> OpenCheckpoint:
    """Random weights, scaled up for varied text."""
    model = experiment("model=qwen3_moe_debug", "model.layers=2", f"model.moe.experts={experts}").model
    built = build_model(model, seq_len=16, attention_backend="math")
    table = init_specs(built)
    assert table is not None
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    for name, weight in weights.items():
        init_shard_(weight, 0, name, table[name], ShardSpec.whole(tuple(weight.shape)))
    special = {"bos_token_id": 256, "eos_token_id": 256}
    scaled = {name: 4 * weight for name, weight in weights.items()}
    return OpenCheckpoint(Path("memory"), "torch", model, TorchFileReader(scaled), "bytes", special)


def on_rank(experts: int) -> tuple[list[str], int]:
    """Texts, and the number of weights of experts on this rank."""
    device, found = torch.device("cpu"), []
    materialize = meta_init.materialize_parameters
    with joined_process_group(device):
        made, opened = sharded_experiment(source(experts), 2), source(experts)
        mesh = build_mesh(made.parallelism, device, experts=True)
        from titan_exp.trainer import restore

        def counted(model: torch.nn.Module, *rest: torch.device) -> object:
            weights = [weight for name, weight in model.named_parameters() if ".experts." in name]
            found.append(sum(local_tensor(weight).numel() for weight in weights))
            return materialize(model, *rest)

        restore.materialize_parameters = counted  # type: ignore[assignment]  # in this process alone
        return generate(opened, replace(GREEDY, tp=2), PROMPTS, window=16, mesh=mesh), found[0]


@pytest.mark.proves("qwen3_moe", "generate")
@pytest.mark.parametrize(("experts", "share"), [(8, 2), (5, 1)])
def test_text_equals_that_of_one_device(experts: int, share: int):
    """Ranks share an even number of experts, and have all of an odd one; the second has no token while decoding."""
    opened = source(experts)
    expected = generate(opened, GREEDY, PROMPTS, window=16)
    assert len(set(expected)) == len(PROMPTS)
    whole = sum(torch.Size(size).numel() for name, size in opened.parameters.shapes.items() if ".experts." in name)
    for texts, weights in run_ranks(2, on_rank, experts):
        assert texts == expected
        assert weights == whole // share
