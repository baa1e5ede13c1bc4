"""Weights at URLs: read and written by verbs, used as initial weights, downloaded once."""

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.tools import assert_holds, exported
from tests.ranks import run_ranks
from titan_exp.checkpoint.checkpoint_cache import local_copy
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.checkpoint_files import saved_state
from titan_exp.config.errors.user_error import UserError
from titan_exp.inference.generate import generate_command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the download cache of the verbs."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_verbs_read_and_write_urls(here, s3, tmp_path, capsys):
    folder = exported("llama3", "huggingface", tmp_path / "llama", file_bytes=1e5)
    (folder / "pytorch_model.bin").write_bytes(b"nobody needs it")
    assert convert_command([str(folder), "s3://bucket/a", "format=llama"]) == 0
    assert convert_command(["s3://bucket/a", "s3://bucket/b.pt"]) == 0
    assert convert_command(["s3://bucket/b.pt", "s3://bucket/c"]) == 0
    assert convert_command(["s3://bucket/c", "s3://bucket/d", "format=dcp"]) == 0
    assert_holds(open_checkpoint(local_copy("s3://bucket/d")), "llama3")
    with pytest.raises(UserError, match="s3://bucket/c exists"):
        convert_command(["s3://bucket/a", "s3://bucket/c"])
    assert not list(here.glob("runs/.cache/remote/outgoing-*"))
    assert capsys.readouterr().out.count("titan-exp generate s3://bucket/") == 4


def test_needed_files_of_a_folder_are_downloaded_once(here, s3, tmp_path):
    folder = exported("llama3", "huggingface", tmp_path / "llama", file_bytes=1e5)
    (folder / "pytorch_model.bin").write_bytes(b"nobody needs it")
    (folder / "unnamed.safetensors").write_bytes(b"nor this, which the index does not name")
    s3.store().put(str(folder), "bucket/llama", recursive=True)
    asked: list[str] = []
    s3.seen = lambda method, path: asked.append(path) if method == "GET" and "?" not in path else None
    found = local_copy("s3://bucket/llama")
    names = {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "unnamed.safetensors"}
    assert {path.name for path in found.iterdir() if not path.name.endswith(".version")} == names
    assert_holds(open_checkpoint(found), "llama3")
    some = next(name for name in names if name.endswith(".safetensors"))
    asked.clear()
    assert local_copy("s3://bucket/llama") == found
    assert not [path for path in asked if path.endswith(".safetensors")], "all of it is here"
    (found / some).write_bytes(b"torn")
    local_copy("s3://bucket/llama")
    assert [path for path in asked if path.endswith(".safetensors")] == [f"/bucket/llama/{some}"]
    s3.store().pipe_file("bucket/llama/generation_config.json", b'{"of": "another version"}')
    local_copy("s3://bucket/llama")
    assert json.loads((found / "generation_config.json").read_text()) == {"of": "another version"}


def run_at(tmp_path: Path) -> tuple[Path, str]:
    """A run with checkpoints of steps 2 and 4, and the URL where they are kept as well."""
    from tests.trainer.test_trainer import experiment, run
    from titan_exp.config.schema.typed_config import to_yaml

    settings = [f"checkpoint.remote=file://{tmp_path}/share", "checkpoint.mode=sync", "checkpoint.every=2"]
    path = tmp_path / "runs" / "first" / "abc"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(experiment(*settings, "training.steps=4")))
    run(path, *settings, "training.steps=4")
    return path, f"file://{tmp_path}/share/{experiment().experiment.name}/abc"


def test_one_checkpoint_of_a_run_is_downloaded(here, tmp_path):
    path, url = run_at(tmp_path)
    shutil.rmtree(path)
    share = Path(url.removeprefix("file://"))
    for place, step, expected in ((url, 0, 4), (url, 2, 2), (f"{url}/step-00000002", 0, 2)):
        found = open_checkpoint(local_copy(place, step=step), step)
        assert found.path.name == f"step-{expected:08d}"
    assert generate_command([url, "tokens=3"]) == 0
    (share / "step-00000004/checksums.json").unlink()
    assert open_checkpoint(local_copy(url)).path.name == "step-00000002"
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        local_copy(f"{url}/step-00000004")
    with pytest.raises(UserError, match=r"step=4.*no complete checkpoint"):
        local_copy(url, step=4)
    with pytest.raises(UserError, match="contains no checkpoint"):
        local_copy(f"file://{tmp_path}/nothing")
    shutil.rmtree(here / "runs/.cache")
    file = share / "step-00000002/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"step-00000002/__0_0\.distcp is damaged"):
        local_copy(url)


def test_run_starts_from_weights_at_a_url(tmp_path, caplog):
    from tests.trainer.test_trainer import run
    from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

    path, url = run_at(tmp_path)
    losses = []
    for name, place in (("by_path", str(path)), ("by_url", url)):
        _, folder = run(
            tmp_path / name,
            "checkpoint.mode=sync",
            "training.steps=1",
            "experiment.seed=5",
            f"checkpoint.initial={place}",
        )
        losses.append(read_metrics(folder.metrics)[0]["loss"])
    assert losses[0] == losses[1]


def fetched(place: str, cache: str) -> str:
    import torch

    from titan_exp.trainer.distributed import joined_process_group

    with joined_process_group(torch.device("cpu")):
        return str(local_copy(place, cache=Path(cache)))


def test_ranks_share_a_download_and_its_failure(tmp_path):
    _, url = run_at(tmp_path)
    found = set(run_ranks(2, fetched, url, str(tmp_path / "cache")))
    assert len(found) == 1
    assert saved_state(found.pop()) is not None
    with pytest.raises(AssertionError, match="contains no checkpoint"):
        run_ranks(2, fetched, f"{url}/nothing", str(tmp_path / "cache"))
