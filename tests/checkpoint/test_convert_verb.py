"""The convert verb: output, refusals and memory."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import load_model
from tests.checkpoint.tools import KINDS, assert_holds, exported, in_memory, kind, weights
from tests.config.composing import llama
from tests.models.shapes import real_model
from titan_exp.checkpoint.formats import export_weights
from titan_exp.checkpoint.formats import safetensors as safetensors_store
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.hydra.nondefault import model_overrides
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.convert.state_dict_map import state_dict_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in several files."""
    return exported("llama3", "huggingface", tmp_path_factory.mktemp("exports") / "llama", file_bytes=1e5)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        convert_command(words)
    return str(caught.value)


def test_convert_roundtrip(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps = [
        ("a", ()),
        ("b.pt", ()),
        ("c", ("format=llama",)),
        ("d", ("format=torchtune",)),
        ("e", ("format=huggingface",)),
    ]
    source = folder
    for name, words in steps:
        assert convert_command([str(source), str(tmp_path / name), *words]) == 0
        source = tmp_path / name
    assert_holds(open_checkpoint(source), "llama3")
    out = capsys.readouterr().out
    assert "to use it, type model=" in out
    assert "fits but for model." in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b.pt", "c", "d", "e"]


def test_rounded_weights_load_into_a_model_in_fp32(folder: Path, tmp_path: Path):
    assert convert_command([str(folder), str(tmp_path / "x"), "dtype=bf16"]) == 0
    model = real_model(seed=5, **{"ffn_dim": 128, **KINDS["llama3"]})
    load_model(tmp_path / "x", model)
    for name, value in weights("llama3").items():
        assert torch.equal(model.get_parameter(name), value.bfloat16().float())


def test_a_run_without_its_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    exported("llama3", "dcp", tmp_path / "weights")
    assert convert_command([str(tmp_path / "weights"), str(tmp_path / "x")]) == 0
    assert "no tokenizer" in capsys.readouterr().out


def test_wrong_arguments(folder: Path, tmp_path: Path):
    assert "titan-exp convert SOURCE TARGET" in refused()
    assert "titan-exp convert SOURCE TARGET" in refused(str(folder))
    assert "did you mean dtype?" in refused(str(folder), str(tmp_path / "x"), "dytpe=bf16")
    assert "huggingface" in refused(str(folder), str(tmp_path / "x"), "format=huggingfase")
    assert "exists" in refused(str(folder), str(tmp_path))
    assert "does not exist" in refused(str(tmp_path / "nowhere"), str(tmp_path / "x"))
    assert "is not a checkpoint" in refused(str(tmp_path), str(tmp_path / "x"))
    assert "a folder" in refused(str(folder), str(tmp_path / "x.pt"), "format=llama")
    assert "a file" in refused(str(folder), str(tmp_path / "x"), "format=torch")
    assert "only a run folder" in refused(str(folder), str(tmp_path / "x"), "step=3")
    assert list(tmp_path.iterdir()) == []


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _drop_file(copy: Path) -> None:
    next(copy.glob("model-00002*")).unlink()


def _cut_file(copy: Path) -> None:
    file = next(copy.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-100])


def _no_weights(copy: Path) -> None:
    for file in copy.glob("*.safetensors"):
        file.unlink()


HARM: list[tuple[Callable[[Path], object], str]] = [
    (_drop_file, "lists model-00002-of-0000"),
    (_cut_file, "damaged, or its download was not complete"),
    (_no_weights, "no \\*.safetensors"),
    (lambda copy: (copy / "config.json").unlink(), "without config.json"),
    (lambda copy: (copy / "config.json").write_text("{"), "is damaged: it is not JSON"),
    (lambda copy: change(copy / "config.json", model_type="unheard"), "(Our families|We) read .*'llama'"),
    (lambda copy: change(copy / "config.json", attention_bias=True), "attention_bias=True"),
    (
        lambda copy: change(copy / "config.json", rope_scaling={"rope_type": "dynamic"}),
        "do not have rope scaling 'dynamic'",
    ),
    (
        lambda copy: change(copy / "config.json", num_hidden_layers=3),
        r"missing: model.layers.2.input_layernorm.weight \[64\]",
    ),
    (
        lambda copy: change(copy / "config.json", num_hidden_layers=1),
        r"unexpected: model.layers.1.input_layernorm.weight \[64\]",
    ),
    (
        lambda copy: change(copy / "config.json", num_key_value_heads=4),
        r"shape: model.layers.0.self_attn.k_proj.weight is \[32, 64\], and \[64, 64\] in the model",
    ),
    (lambda copy: change(copy / "config.json", intermediate_size=100), "a multiple of 32"),
]


@pytest.mark.parametrize(("harm", "says"), HARM)
def test_incomplete_folder_is_explained(harm: Callable[[Path], object], says: str, copy: Path, tmp_path: Path):
    harm(copy)
    with pytest.raises(UserError, match=says):
        convert_command([str(copy), str(tmp_path / "x")])
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


class _Harm:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_files_with_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": _Harm()}, "evil.pt")
    assert "could execute code" in refused("evil.pt", "x")
    Path("meta").mkdir()
    Path("meta/params.json").write_text("{}")
    shutil.move("evil.pt", "meta/consolidated.00.pth")
    assert "could execute code" in refused("meta", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]


def test_other_torch_files_are_refused(tmp_path: Path):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "other.pt")
    assert "not of titan-exp" in refused(str(tmp_path / "other.pt"), str(tmp_path / "x"))
    (tmp_path / "text.pt").write_text("words")
    assert "is not a file of torch.save" in refused(str(tmp_path / "text.pt"), str(tmp_path / "x"))
    folder = exported("llama3", "llama", tmp_path / "llama")
    assert "Use its folder" in refused(str(folder / "consolidated.00.pth"), str(tmp_path / "x"))
    shutil.copyfile(folder / "consolidated.00.pth", folder / "consolidated.02.pth")
    assert "a file between them is missing" in refused(str(folder), str(tmp_path / "x"))


@pytest.mark.parametrize("form", ["huggingface", "llama", "torch", "dcp"])
def test_a_full_disk_leaves_nothing(form: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate" if form in ("llama", "torch") else "fsync", full)
    target = tmp_path / ("x.pt" if form == "torch" else "x")
    assert "is full, so we have removed the partial export" in refused(str(folder), str(target), f"format={form}")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_too_small_disk_is_refused_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export_weights, "METADATA_BYTES", 2**60)
    assert "GB free, and the weights take" in refused(str(folder), str(tmp_path / "x"))


def test_an_interrupted_conversion_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_store, "_write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_command([str(folder), str(tmp_path / "x"), "format=huggingface"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["llama2_70b", "llama3_8b", "llama3_1_405b", "llama3_2_1b", "llama_debug"])
def test_published_shapes_are_their_presets(preset: str):
    model = to_experiment(compose([f"model={preset}"])).model
    words = model_overrides(model)
    assert len(words) == 1
    assert to_experiment(compose(words)).model == model or preset == "llama3_1_405b"


@pytest.mark.parametrize("name", ["llama2", "llama3_2"])
def test_overrides_compose_the_shape(name: str):
    wanted = kind(name)
    model = llama(*model_overrides(wanted))
    same = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size", "context", "tied_embeddings")
    assert [getattr(model, key) for key in same] == [getattr(wanted, key) for key in same]
    assert (model.rope.theta, model.rope.scaling, model.rope.factor) == (
        wanted.rope.theta,
        wanted.rope.scaling,
        wanted.rope.factor,
    )


def test_byte_tokenizer_is_exported(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    export_weights.export_weights(
        in_memory("llama3", tokenizer="bytes"), tmp_path / "x", export_weights.ExportOptions("huggingface")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    text = "def f(x):\n\treturn 'naïve ☃'  # \x00\x7f"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256


MEASURE = """
    import sys, threading, time
    from pathlib import Path
    import torch
    from titan_exp.cli.convert import run as convert_command
    from titan_exp.checkpoint.formats import export_weights
    from titan_exp.checkpoint.formats import open_checkpoint as source
    from titan_exp.cli.convert import run as convert
    import torch.distributed.checkpoint, tokenizers
    convert_command(sys.argv[3:5])  # a tiny model: everything is imported, every pool is there

    def anonymous():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    peak, done, before = 0, False, anonymous()
    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)
    thread = threading.Thread(target=watch)
    thread.start()
    convert_command(sys.argv[1:3] + sys.argv[5:])
    done = True
    thread.join()
    print("peak", peak - before)
"""
"""Prints by how many bytes the memory that belongs to no file grew while a model was converted."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 MB of weights, the largest tensor 16 MB."""
    from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
    from titan_exp.checkpoint.formats.torch_file import TorchFileReader

    sizes = {"dim": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn_dim": 2048, "vocab_size": 4096, "layers": 6}
    model = replace(kind("llama3"), **sizes)
    shapes = state_dict_map(model, "huggingface").shapes
    tensors = {name: torch.full(shape, 0.5) for name, shape in shapes.items()}
    target = tmp_path_factory.mktemp("large") / "llama"
    export_weights.export_weights(
        OpenCheckpoint(Path("memory"), "torch", model, TorchFileReader(tensors)),
        target,
        export_weights.ExportOptions("huggingface"),
    )
    return target


@pytest.mark.parametrize(
    "chain",
    [
        ["dcp", "huggingface"],
        ["llama", "dcp"],
        ["torch"],
    ],
    ids="-".join,
)
@pytest.mark.night
def test_memory_of_a_conversion(chain: list[str], large: Path, folder: Path, tmp_path: Path):
    """Only the written tensor and those it is made of are in memory, never the model."""
    total = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert total > 150e6
    source = large
    for number, form in enumerate(chain):
        ending = ".pt" if form == "torch" else ""
        target, other = tmp_path / f"{number}{ending}", tmp_path / f"tiny{number}"
        words = [str(source), str(target), str(folder), str(other), f"format={form}"]
        command = [sys.executable, "-c", textwrap.dedent(MEASURE), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        peak = int(done.stdout.rpartition("peak ")[2])
        print(f"{form}: {peak / 1e6:.0f} MB of {total / 1e6:.0f} MB")
        # Measured: 17 to 65 MB; where the model was held, 240 to 260.
        assert peak < total / 2
        source = target
