import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tools import in_memory, kind
from tests.trainer.test_trainer import run
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.inference.generate import generate_command, sample_token
from titan_exp.models.spec.rope import RopeConfig, exceeds_context
from titan_exp.tracking.run_folder.run import LINEAGE_FILE, Lineage
from titan_exp.trainer.restore import training_length


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from tests.trainer.test_trainer import experiment

    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    settings = ["checkpoint.mode=sync", "training.steps=60", "training.seq_len=32"]
    run(path, *settings)
    (path / "config.yaml").write_text(to_yaml(experiment(*settings)))
    return path


def test_text_depends_on_prompt_and_seed(trained, capsys):
    def text(*options: str) -> str:
        assert generate_command([str(trained), "prompt=import ", "tokens=60", *options]) == 0
        return capsys.readouterr().out

    first = text()
    assert first.startswith("import ")
    assert f"after step 60 of {trained}" in first
    Lineage("/elsewhere/first/aaaa", 20, 640).write(trained)
    assert f"of {trained}, continued from first/aaaa after step 20" in text()
    (trained / LINEAGE_FILE).unlink()
    assert text() == first
    assert text("seed=1") != first
    assert text("temperature=0") == text("temperature=0", "seed=5")


def test_the_newest_run_is_found(trained, capsys):
    assert generate_command([f"runs={trained.parent.parent}", "tokens=5"]) == 0
    assert str(trained) in capsys.readouterr().out


def test_a_run_is_found_by_its_label(trained, capsys):
    assert main(["generate", "name/id", f"runs={trained.parent.parent}", "tokens=5"]) == 0
    assert str(trained) in capsys.readouterr().out


def test_missing_checkpoints_and_invalid_options_are_refused(tmp_path, trained):
    with pytest.raises(UserError, match="No run under"):
        generate_command([f"runs={tmp_path}"])
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("step-*"))
    with pytest.raises(UserError, match="no complete checkpoint"):
        generate_command([str(tmp_path / "copy")])
    with pytest.raises(UserError, match=r"temprature.*\n.*did you mean temperature"):
        generate_command(["temprature=1"])
    with pytest.raises(UserError, match="tokens=many"):
        generate_command(["tokens=many"])


def test_sample_token():
    random = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 2.9, -9.0])
    assert sample_token(logits, 0.0, 0, 1.0, random) == 1
    drawn = {sample_token(logits, 1.0, 0, 0.9, random) for _ in range(200)}
    assert drawn == {1, 2}
    assert {sample_token(logits, 9.0, 3, 1.0, random) for _ in range(200)} == {0, 1, 2}
    assert {sample_token(logits, 9.0, 1, 1.0, random) for _ in range(20)} == {1}
    assert {sample_token(logits, 1.0, 0, 1e-9, random) for _ in range(20)} == {1}


def test_the_kv_cache_does_not_change_the_text(trained, capsys):
    """Text over more than two windows of 32 tokens, each of which restarts the cache."""

    def text(*options: str) -> str:
        assert generate_command([str(trained), "prompt=def main(", "tokens=90", "temperature=0", *options]) == 0
        return capsys.readouterr().out

    assert text() == text("cache=false")


def test_the_kv_cache_does_not_change_the_logits(trained):
    from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
    from titan_exp.inference.generate import DecodeSession, window_start
    from titan_exp.trainer.restore import load_source

    source, device = open_checkpoint(trained), torch.device("cpu")
    ids = [256, *b"import os, sys, re, json and a lot more than that"]
    cached = DecodeSession(load_source(source, device, seq_len=32), 32, cache=True)
    plain = load_source(source, device, seq_len=32)
    for length in range(5, len(ids)):
        begin = window_start(length, 32)
        with torch.no_grad():
            expected = plain(torch.tensor([ids[begin:length]]))[0, -1]
        torch.testing.assert_close(cached.next_logits(ids[:length]), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "window"),
    [
        (RopeConfig(1e4), 128),
        (RopeConfig(1e4, "linear", 8.0, original_context=32), 256),
        (RopeConfig(1e4, "yarn", 4.0), 512),
    ],
)
def test_text_of_a_stretched_model_fills_its_stretched_context(rope: RopeConfig, window: int, tmp_path: Path):
    """Weights without a run: what `train` takes as the longest sequence is the window."""
    source = in_memory("llama3", model=replace(kind("llama3"), context=128, rope=rope))
    assert training_length(tmp_path, source) == window
    assert not list(exceeds_context(source.model, window))
    assert list(exceeds_context(source.model, window + 1))


def test_an_export_writes_the_same_text(trained, capsys, tmp_path):
    from titan_exp.cli.convert import run as convert_command

    def text(source: str) -> str:
        assert generate_command([source, "prompt=import ", "tokens=20", "temperature=0"]) == 0
        return capsys.readouterr().out.rpartition("—")[0]

    expected = text(str(trained))
    for name in ("export", "back"):
        assert convert_command([str(trained if name == "export" else tmp_path / "export"), str(tmp_path / name)]) == 0
        capsys.readouterr()
        assert text(str(tmp_path / name)) == expected
    assert convert_command([str(trained), str(tmp_path / "weights.pt")]) == 0
    with pytest.raises(UserError, match="no tokenizer"):
        generate_command([str(tmp_path / "weights.pt")])
