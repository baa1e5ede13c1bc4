"""Tensor-parallel generation equals that of one device."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tools import SHAPE
from tests.models.shapes import real_model
from tests.ranks import run_ranks
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.cli.main import main
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.inference.generate import generate, generate_command, sharded_experiment

PROMPTS = ["import ", "def main(", ""]
MODELS = {
    "groups": {"heads": 4, "kv_heads": 2, "vocab_size": 257, "ffn_dim": 256},
    "tied": {"heads": 4, "kv_heads": 4, "vocab_size": 257, "ffn_dim": 256, "tied_embeddings": True},
    # Ranks cut through a group of 32 gate and up columns.
    "cut": {"heads": 4, "kv_heads": 4, "vocab_size": 257, "ffn_dim": 160},
}
GREEDY = GenerateOptions(temperature=0.0, tokens=24)
SAMPLED = GenerateOptions(temperature=1.5, tokens=24, top_k=50, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights, scaled up for varied text, as checkpoints and as exports."""
    found = {}
    for name, shape in MODELS.items():
        weights = {key: 4 * value.detach() for key, value in real_model(0, seq_len=16, **shape).state_dict().items()}
        special = {"bos_token_id": 256, "eos_token_id": 256}
        source = OpenCheckpoint(
            Path("memory"), "torch", replace(SHAPE, **shape), TorchFileReader(weights), "bytes", special
        )
        for form in ("dcp", "huggingface"):
            found[f"{name} {form}"] = tmp_path_factory.mktemp(name) / form
            export_weights(source, found[f"{name} {form}"], ExportOptions(form))
    return found


def on_rank(path: str, options: GenerateOptions) -> tuple[list[str], int, set[int]]:
    """Texts, number of local weights, and numbers of KV heads in the cache."""
    from titan_exp.inference import generate as room
    from titan_exp.inference.generate import DecodeSession
    from titan_exp.ops.autograd import local_tensor
    from titan_exp.parallel.mesh import build_mesh
    from titan_exp.trainer.distributed import joined_process_group

    sessions, device = [], torch.device("cpu")

    class Seen(DecodeSession):
        def __init__(self, *args, **settings) -> None:
            super().__init__(*args, **settings)
            sessions.append(self)

    room.DecodeSession = Seen  # type: ignore[misc]  # in this process alone
    source = open_checkpoint(Path(path))
    with joined_process_group(device):
        mesh = build_mesh(sharded_experiment(source, options.tp).parallelism, device)
        texts = generate(source, options, PROMPTS, window=16, mesh=mesh)
    (session,) = sessions
    weights = sum(local_tensor(parameter).numel() for parameter in session._model.parameters())
    return texts, weights, {cache._kept[0].shape[1] for cache in session._caches}


@pytest.mark.proves("llama", "generate")
@pytest.mark.parametrize(
    ("name", "degree", "options"),
    [
        pytest.param("groups huggingface", 2, GREEDY, marks=pytest.mark.night),
        # More ranks than key and value heads.
        ("groups dcp", 4, GREEDY),
        pytest.param("tied huggingface", 4, GREEDY, marks=pytest.mark.night),
        ("tied dcp", 2, SAMPLED),
        ("cut dcp", 2, GREEDY),
    ],
)
def test_tensor_parallel_text_equals_that_of_one_device(
    folders: dict[str, Path], name: str, degree: int, options: GenerateOptions
):
    source = open_checkpoint(folders[name])
    expected = generate(source, options, PROMPTS, window=16)
    assert len(set(expected)) == 3
    found = run_ranks(degree, on_rank, str(folders[name]), replace(options, tp=degree))
    shape = MODELS[name.split(maxsplit=1)[0]]
    whole = sum(torch.Size(size).numel() for size in source.parameters.shapes.values())
    for texts, weights, kept in found:
        assert texts == expected
        assert kept == {max(1, shape["kv_heads"] // degree)}
        # Norms, and the key and value that others use as well, are on more than one rank.
        assert weights < 1.25 * whole / degree


@pytest.mark.night
def test_tp_starts_ranks(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    words = [str(folders["groups huggingface"]), "prompt=import ", "prompt=def ", "temperature=0", "tokens=12"]
    assert generate_command(words) == 0
    expected = capsys.readouterr().out
    assert expected.startswith("import ")
    assert "\n\ndef " in expected
    assert main(["generate", *words, "tp=2"]) == 0
    assert capsys.readouterr().out == expected


def test_unsupported_tp_degrees_are_refused(folders: dict[str, Path]):
    with pytest.raises(UserError, match=r"tp=3.*query heads[\s\S]*tp=1, 2 or 4"):
        sharded_experiment(open_checkpoint(folders["groups dcp"]), 3)


def test_prompts_are_completed_independently(folders: dict[str, Path], tmp_path: Path, capsys):
    source = open_checkpoint(folders["tied dcp"])
    together = generate(source, SAMPLED, PROMPTS, window=128)
    assert together == [generate(source, SAMPLED, [prompt], window=128)[0] for prompt in PROMPTS]
    (tmp_path / "prompts").write_text("import \n\ndef main(\n")
    words = [str(source.path), f"prompts={tmp_path}/prompts", *(f"{k}={v}" for k, v in asdict(SAMPLED).items() if v)]
    assert generate_command(words) == 0
    assert capsys.readouterr().out.startswith(f"import {together[0]}\n\ndef main({together[1]}\n\n")
    with pytest.raises(UserError, match="prompts=nowhere: we cannot read this file"):
        generate_command([str(source.path), "prompts=nowhere"])


def test_bf16_weights(folders: dict[str, Path]):
    source = open_checkpoint(folders["tied dcp"])
    (text,) = generate(source, replace(GREEDY, dtype="bf16", tokens=1), ["import "], window=16)
    assert len(text) <= 1
