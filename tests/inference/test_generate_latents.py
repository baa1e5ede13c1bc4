"""Generation with latent attention, whose heads are split among tensor-parallel ranks and cached latents are not; with
sinks and biases of experts; with chunks and layers without RoPE; with norms of queries and keys."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.deepseek_shapes import LITE, V3
from tests.models.test_deepseek import noisy_model
from tests.models.test_gpt_oss import SHAPE as GPT_OSS
from tests.models.test_gpt_oss import noisy_model as noisy_with_sinks
from tests.models.test_llama4 import SHAPE as LLAMA4
from tests.models.test_olmo2 import SHAPE as OLMO2
from tests.models.test_qwen3 import SHAPE as QWEN3
from tests.ranks import run_ranks
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.inference.generate import generate, sharded_experiment
from titan_exp.models import deepseek

PROMPTS = ["import ", "def main("]
OPTIONS = GenerateOptions(temperature=0.0, tokens=24)
MODELS = {
    **{
        name: replace(shape, vocab_size=257, dense_layers=shape.layers)
        for name, shape in {"lite": LITE, "v3": V3}.items()
    },
    "sinks and experts": replace(GPT_OSS, vocab_size=257),
    # Text of 24 tokens is longer than three chunks, and than the temperature's floor.
    "chunks and experts": replace(LLAMA4, vocab_size=257, ffn_dim=128, moe=replace(LLAMA4.moe, ffn_dim=64)),
    "query and key norms": replace(QWEN3, vocab_size=257, ffn_dim=128),
    "norms over all heads": replace(OLMO2, vocab_size=257, ffn_dim=128),
}


def on_rank(path: str, options: GenerateOptions) -> list[str]:
    from titan_exp.parallel.mesh import build_mesh
    from titan_exp.trainer.distributed import joined_process_group

    source, device = open_checkpoint(Path(path)), torch.device("cpu")
    with joined_process_group(device):
        mesh = build_mesh(sharded_experiment(source, options.tp).parallelism, device)
        return generate(source, options, PROMPTS, window=48, mesh=mesh)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lite", marks=[pytest.mark.night, pytest.mark.proves("deepseek", "generate")]),
        pytest.param("v3", marks=pytest.mark.proves("deepseek", "generate")),
        pytest.param("sinks and experts", marks=[pytest.mark.night, pytest.mark.proves("gpt_oss", "generate")]),
        pytest.param("chunks and experts", marks=[pytest.mark.night, pytest.mark.proves("llama4", "generate")]),
        pytest.param("query and key norms", marks=[pytest.mark.night, pytest.mark.proves("qwen3", "generate")]),
        pytest.param("norms over all heads", marks=pytest.mark.proves("olmo2", "generate")),
    ],
)
def test_tensor_parallel_text_equals_that_of_one_device(tmp_path: Path, name: str):
    config = MODELS[name]
    model = noisy_model(config) if isinstance(config, deepseek.Config) else noisy_with_sinks(config)
    weights = {key: 2 * tensor.detach() for key, tensor in model.state_dict().items()}
    special = {"bos_token_id": 256, "eos_token_id": 256}
    source = OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(weights), "bytes", special)
    export_weights(source, tmp_path / "export", ExportOptions("dcp"))
    expected = generate(open_checkpoint(tmp_path / "export"), OPTIONS, PROMPTS, window=48)
    assert len(set(expected)) == 2
    assert generate(open_checkpoint(tmp_path / "export"), replace(OPTIONS, cache=False), PROMPTS, window=48) == expected
    for texts in run_ranks(2, on_rank, str(tmp_path / "export"), replace(OPTIONS, tp=2)):
        assert texts == expected
